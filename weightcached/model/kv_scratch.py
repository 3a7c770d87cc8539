"""A KV cache whose addresses outlive its memory.

While an engine starts parked, the whole range lies over one small scratch allocation, mapped again
and again. A warm-up or the capture of a graph finds memory there and leaves bytes that nobody reads.
While the engine is awake, the range lies over real memory, zeroed. In sleep it lies over nothing.
Addresses never change, so graphs captured over scratch memory work over real memory.

vLLM's own allocator has no scratch, so it can neither start an engine without the memory nor capture
graphs meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightcached.errors import OutOfDeviceMemoryError, SegmentError
from weightcached.model.kv_lending import Inbox, lend
from weightcached.segments.cuda_driver import Allocation, CudaError, Gpu, Reservation
from weightcached.system.fds import OwnedFd, close_all

if TYPE_CHECKING:
    import torch

log = logging.getLogger("vllm.weightcached")

# What a range is rounded up by, too. 100 GiB over it take an H200 0.09 s.
SCRATCH_BYTES = 64 << 20
# Memory comes in such pieces, so that a cache of another size can use most of what it was lent. To
# map a piece takes 1 ms; to clear memory that was freed, 3 ms a GiB.
PIECE_BYTES = 8 << 30
# The memory of a process that was killed comes back a little after the process is gone: 94 GiB take
# 0.35 s.
MEMORY_WAIT_S = 3.0
_MEMORY_POLL_S = 0.01


class ParkedAllocationError(SegmentError):
    """Memory was asked for that cannot lie over scratch."""


class _Range:
    """Addresses, and whether anything is under them. Memory of their own comes in `pieces`, in order:
    bytes of each; `memory` has the descriptors.
    """

    def __init__(self, reservation: Reservation, pieces: list[int]) -> None:
        self.reservation = reservation
        self.address = reservation.address
        self.nbytes = sum(pieces)
        self.mapped = False
        self.pieces = pieces
        self.memory: list[OwnedFd] = []


class KvScratch:
    """The ranges of one KV cache on one GPU. Parked or awake, all of them together."""

    def __init__(
        self,
        gpu: Gpu,
        *,
        parked: bool,
        scratch_bytes: int = SCRATCH_BYTES,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """piece_bytes: a multiple of scratch_bytes, and that one of the driver's granularity."""
        self.parked = parked
        self._piece_bytes = piece_bytes
        self._gpu = gpu
        self._scratch_bytes = scratch_bytes
        # From a parked start to the first wake.
        self._scratch: Allocation | None = None
        self._inbox: Inbox | None = None
        self._ranges: dict[int, _Range] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all ranges, parked or awake."""
        return sum(r.nbytes for r in self._ranges.values())

    def allocate(self, nbytes: int) -> int:
        """The address of a new range of at least `nbytes`.

        Raises ParkedAllocationError for a second one while parked: only a KV cache can lose
        everything written before the first wake. SegmentError, OutOfDeviceMemoryError.
        """
        failing = f"cannot allocate a KV cache of {nbytes} bytes"
        if self._ranges:
            told = f"a second allocation of {nbytes} bytes came with the KV cache of {self.nbytes} bytes"
            if self.parked:
                raise ParkedAllocationError(
                    f"{told}: this engine cannot start parked, leave start_parked out"
                )
            log.warning("%s; its content is lost in sleep, as with vLLM's own back end", told)
        # A multiple of the scratch allocation, which is one of the granularity.
        size = -(-nbytes // self._scratch_bytes) * self._scratch_bytes
        whole, rest = divmod(size, self._piece_bytes)
        pieces = [self._piece_bytes] * whole + ([rest] if rest else [])
        with self._gpu.context.current():
            new = _Range(self._gpu.reserve(size, failing), pieces)
            try:
                if self.parked:
                    self._map_scratch(new, failing)
                else:
                    none: list[OwnedFd | None] = [None] * len(pieces)
                    self._map_memory(new, self._complete(none, pieces, failing), failing)
            except BaseException:
                self._unmap(new, failing)
                new.reservation.close()
                raise
        self._ranges[new.address] = new
        return new.address

    def free(self, address: int) -> None:
        """Give a range back. Raises CudaError; its addresses stay taken then."""
        gone = self._ranges.pop(address)
        failing = f"cannot free a KV cache of {gone.nbytes} bytes"
        with self._gpu.context.current():
            self._gpu.context.synchronize(failing)
            self._unmap(gone, failing)
            gone.reservation.close()
            if not self._ranges:
                self._let_scratch_go()

    def park(self) -> None:
        """Give the memory back; the addresses stay. Raises CudaError."""
        if self.parked:
            return
        failing = f"cannot give back a KV cache of {self.nbytes} bytes"
        with self._gpu.context.current():
            self._gpu.context.synchronize(failing)
            self.parked = True
            # No scratch: an engine asleep runs nothing, and the driver would map it only once it has
            # cleared the memory that was freed, 0.3 s for 100 GiB.
            for each in self._ranges.values():
                self._unmap(each, failing)

    def wake(self, *, wait_s: float = MEMORY_WAIT_S) -> None:
        """Put zeroed memory under the addresses: what was lent, if that can be used now, or free
        memory, for which it waits up to `wait_s`.

        Raises OutOfDeviceMemoryError, still parked then and able to try again, and CudaError.
        """
        if not self.parked:
            return
        failing = f"cannot wake a KV cache of {self.nbytes} bytes"
        if self._inbox is not None and (why := self._inbox.obstacle()):
            # A descriptor keeps memory usable whether or not its lender still writes there.
            log.warning("the memory that was lent to this engine is not used: %s", why)
            self.forget()
            failing += f" in the memory that was lent to it, as {why}"
        ranges = list(self._ranges.values())
        wanted = [nbytes for each in ranges for nbytes in each.pieces]
        lent = self._take_lent(wanted)
        lacking = sum(nbytes for nbytes, fd in zip(wanted, lent, strict=True) if fd is None)
        try:
            self._wait_for_memory(lacking, failing, wait_s)
        except BaseException:
            close_all(filter(None, lent))
            raise
        with self._gpu.context.current():
            memory = self._complete(lent, wanted, failing)
            rest = iter(memory)
            try:
                self._gpu.context.synchronize(failing)
                for each in ranges:
                    self._unmap(each, failing)
                    self._map_memory(each, list(islice(rest, len(each.pieces))), failing)
                    self._gpu.zero(each.address, each.nbytes, failing)
                self._gpu.context.synchronize(failing)
            except BaseException:
                for each in ranges:
                    self._unmap(each, failing)
                    if self._scratch is not None:
                        self._map_scratch(each, failing)
                close_all(memory)
                raise
            self.parked = False
            self._let_scratch_go()

    def expect(self, path: Path, obstacle: Callable[[], str]) -> None:
        """From now on memory can be lent to this cache, at a socket. Raises OSError. obstacle: asked
        at the wake, why it cannot be used then, as its lender still does; or "".

        Awake it needs none, and nobody would take what was lent.
        """
        self.forget()
        if self.parked:
            self._inbox = Inbox(path, obstacle)

    def forget(self) -> None:
        """Give back what was lent."""
        inbox, self._inbox = self._inbox, None
        if inbox is not None:
            inbox.close()

    def lend(self, path: Path) -> None:
        """Lend the memory under the addresses, if it is awake, to the cache that expects it there.

        Raises OSError, ProtocolError.
        """
        if self.parked:
            return
        ranges = list(self._ranges.values())
        nbytes = [size for each in ranges for size in each.pieces]
        lend(path, self._gpu.device, nbytes, [fd for each in ranges for fd in each.memory])

    def _take_lent(self, wanted: Sequence[int]) -> list[OwnedFd | None]:
        """A descriptor for each of the wanted sizes, as far as they were lent."""
        taken: list[OwnedFd | None] = [None] * len(wanted)
        lent = self._inbox.take() if self._inbox is not None else None
        self.forget()
        if lent is None:
            return taken
        # A restart may bring the service to another device.
        left = list(wanted) if lent.device == self._gpu.device else []
        for nbytes, fd in zip(lent.nbytes, lent.fds, strict=False):
            if nbytes in left:
                place = left.index(nbytes)
                left[place] = 0
                taken[place] = OwnedFd(fd.take())
        # Before the wait for memory: it is only free then.
        close_all(lent.fds)
        return taken

    def _wait_for_memory(self, nbytes: int, failing: str, wait_s: float) -> None:
        deadline_s = time.monotonic() + wait_s
        while True:
            free, total = self._gpu.memory()
            if free >= nbytes:
                return
            if time.monotonic() >= deadline_s:
                raise OutOfDeviceMemoryError(
                    f"{failing}: {free} of {total} bytes are free; let another engine sleep, or start this one with a "
                    "lower gpu_memory_utilization",
                    code="no-room",
                )
            time.sleep(_MEMORY_POLL_S)

    def _allocate(self, nbytes: int, failing: str) -> Allocation:
        try:
            return self._gpu.allocate(nbytes, failing)
        except CudaError as e:
            if e.result != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            free, total = self._gpu.memory()
            raise OutOfDeviceMemoryError(
                f"{failing}: {free} of {total} bytes are free", code="no-room"
            ) from e

    def _complete(
        self, lent: list[OwnedFd | None], wanted: Sequence[int], failing: str
    ) -> list[OwnedFd]:
        """What was lent, and descriptors on new memory for the rest of the wanted sizes."""
        try:
            for place, nbytes in enumerate(wanted):
                if lent[place] is None:
                    allocation = self._allocate(nbytes, failing)
                    try:
                        lent[place] = allocation.export(failing)
                    finally:
                        allocation.close()
        except BaseException:
            close_all(filter(None, lent))
            raise
        return [fd for fd in lent if fd is not None]

    def _map_memory(self, each: _Range, memory: list[OwnedFd], failing: str) -> None:
        """From here on the descriptors are the range's."""
        each.memory = memory
        with contextlib.ExitStack() as handles:
            allocations = []
            for fd in memory:
                allocations.append(self._gpu.adopt(fd, failing))
                handles.callback(allocations[-1].close)
            self._map(each, list(zip(each.pieces, allocations, strict=True)), failing)

    def _map_scratch(self, each: _Range, failing: str) -> None:
        if self._scratch is None:
            self._scratch = self._allocate(self._scratch_bytes, failing)
        count = each.nbytes // self._scratch_bytes
        self._map(each, [(self._scratch_bytes, self._scratch)] * count, failing)

    def _map(
        self, each: _Range, allocations: Sequence[tuple[int, Allocation]], failing: str
    ) -> None:
        done = 0
        try:
            for nbytes, allocation in allocations:
                self._gpu.place(each.address + done, nbytes, allocation, failing)
                done += nbytes
        except CudaError:
            if done:
                self._gpu.take_away(each.address, done, failing)
            raise
        each.mapped = True
        self._gpu.open(each.address, each.nbytes, failing)

    def _let_scratch_go(self) -> None:
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None

    def _unmap(self, each: _Range, failing: str) -> None:
        if each.mapped:
            self._gpu.take_away(each.address, each.nbytes, failing)
            each.mapped = False
        close_all(each.memory)
        each.memory = []


# Torch calls these when a pool needs memory or gives it back.
_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
# Torch may call back until the process ends, even if nobody refers to the pool any more.
_callbacks: list[Any] = []


class KvPool:
    """A torch memory pool whose memory is a KvScratch's."""

    def __init__(self, scratch: KvScratch) -> None:
        import torch

        self.scratch = scratch
        self._error: Exception | None = None
        allocate, free = _Allocate(self._allocate), _Free(self._free)
        address_of = [ctypes.cast(each, ctypes.c_void_p).value for each in (allocate, free)]
        self._allocator: Any = torch._C._cuda_customAllocator(*address_of)
        _callbacks.extend((allocate, free, self._allocator))
        self._pool: torch.cuda.MemPool | None = torch.cuda.MemPool(self._allocator)

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Torch's allocations in the block come from the pool. Raises a failed allocation's error."""
        import torch

        if self._pool is None:
            raise SegmentError("the memory pool of the KV cache is closed")
        self._error = None
        try:
            with torch.cuda.use_mem_pool(self._pool):
                yield
        except torch.OutOfMemoryError:
            # As torch takes any failure of ours.
            error, self._error = self._error, None
            if error is not None:
                raise error from None
            raise

    def close(self) -> None:
        """Let go of the pool, and of all in it that is free. May be called twice.

        To be called before the interpreter ends: a pool that goes after its allocator ends the
        process with "pure virtual method called".
        """
        self._pool = None
        gc.collect()

    def _allocate(self, nbytes: int, device: int, stream: int) -> int | None:
        try:
            return self.scratch.allocate(nbytes)
        except Exception as e:
            self._error = e
            return None

    def _free(self, address: int, nbytes: int, device: int, stream: int) -> None:
        try:
            self.scratch.free(address)
        except Exception as e:
            log.error("the KV cache's memory stays until this process ends: %s", repr(e))
