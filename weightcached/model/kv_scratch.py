"""A KV cache whose addresses outlive its memory.

While an engine is parked, the whole range lies over small scratch allocations, mapped again and
again. A warm-up or the capture of a graph finds memory there and leaves bytes that nobody reads.
While the engine is awake, the range lies over real memory, zeroed. Addresses never change, so
graphs captured over scratch memory work over real memory.

vLLM's own allocator leaves the range empty instead, so it can neither start an engine without the
memory nor capture graphs meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from weightcached.errors import OutOfDeviceMemoryError, SegmentError
from weightcached.segments.cuda_driver import Allocation, CudaError, Gpu, Reservation

if TYPE_CHECKING:
    import torch

log = logging.getLogger("vllm.weightcached")

# The largest first; each is a multiple of the next. One of 64 MiB alone made an H200 take 0.4 s to put 100 GiB
# over it, 0.2 ms for each mapping; the small one keeps what a range is rounded up by small.
SCRATCH_BYTES = (256 << 20, 32 << 20)
# The memory of a process that was killed comes back a little after the process is gone: 94 GiB take
# 0.35 s.
MEMORY_WAIT_S = 3.0
_MEMORY_POLL_S = 0.01


class ParkedAllocationError(SegmentError):
    """Memory was asked for that cannot lie over scratch."""


class _Range:
    """Addresses, and whether memory of their own is under them."""

    def __init__(self, reservation: Reservation, nbytes: int) -> None:
        self.reservation = reservation
        self.address = reservation.address
        self.nbytes = nbytes
        self.mapped = False


class KvScratch:
    """The ranges of one KV cache on one GPU. Parked or awake, all of them together."""

    def __init__(
        self, gpu: Gpu, *, parked: bool, scratch_bytes: Sequence[int] = SCRATCH_BYTES
    ) -> None:
        self.parked = parked
        self._gpu = gpu
        self._scratch_bytes = scratch_bytes
        # By size, as far as they were needed.
        self._scratch: dict[int, Allocation] = {}
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
        # A multiple of the smallest scratch allocation, which is one of the granularity.
        unit = self._scratch_bytes[-1]
        size = -(-nbytes // unit) * unit
        with self._gpu.context.current():
            new = _Range(self._gpu.reserve(size, failing), size)
            try:
                if self.parked:
                    self._map_scratch(new, failing)
                else:
                    self._map_memory(new, self._allocate(size, failing), failing)
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
                for scratch in self._scratch.values():
                    scratch.close()
                self._scratch.clear()

    def park(self) -> None:
        """Give the memory back and put scratch under the addresses. Raises CudaError."""
        if self.parked:
            return
        failing = f"cannot give back a KV cache of {self.nbytes} bytes"
        with self._gpu.context.current():
            self._gpu.context.synchronize(failing)
            # First the step that may find no room.
            for each in self._ranges.values():
                self._scratch_under(each, failing)
            self.parked = True
            for each in self._ranges.values():
                self._unmap(each, failing)
                self._map_scratch(each, failing)

    def wake(self, *, wait_s: float = MEMORY_WAIT_S) -> None:
        """Put zeroed memory under the addresses; waits up to `wait_s` for it to become free.

        Raises OutOfDeviceMemoryError, still parked then and able to try again, and CudaError.
        """
        if not self.parked:
            return
        failing = f"cannot wake a KV cache of {self.nbytes} bytes"
        self._wait_for_memory(failing, wait_s)
        with self._gpu.context.current(), contextlib.ExitStack() as handles:
            taken: list[tuple[_Range, Allocation]] = []
            for each in self._ranges.values():
                allocation = self._allocate(each.nbytes, failing)
                # The mapping keeps the memory alive by itself.
                handles.callback(allocation.close)
                taken.append((each, allocation))
            self._gpu.context.synchronize(failing)
            try:
                for each, allocation in taken:
                    self._unmap(each, failing)
                    self._place(each, allocation, failing)
                    self._gpu.zero(each.address, each.nbytes, failing)
                self._gpu.context.synchronize(failing)
            except BaseException:
                for each, _ in taken:
                    self._unmap(each, failing)
                    self._map_scratch(each, failing)
                raise
        self.parked = False

    def _wait_for_memory(self, failing: str, wait_s: float) -> None:
        deadline_s = time.monotonic() + wait_s
        while True:
            free, total = self._gpu.memory()
            if free >= self.nbytes:
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

    def _map_memory(self, new: _Range, allocation: Allocation, failing: str) -> None:
        try:
            self._place(new, allocation, failing)
        finally:
            allocation.close()

    def _place(self, each: _Range, allocation: Allocation, failing: str) -> None:
        self._gpu.place(each.address, each.nbytes, allocation, failing)
        each.mapped = True
        self._gpu.open(each.address, each.nbytes, failing)

    def _map_scratch(self, each: _Range, failing: str) -> None:
        address = each.address
        try:
            for size, scratch in self._scratch_under(each, failing):
                self._gpu.place(address, size, scratch, failing)
                address += size
        except CudaError:
            if address > each.address:
                self._gpu.take_away(each.address, address - each.address, failing)
            raise
        each.mapped = True
        self._gpu.open(each.address, each.nbytes, failing)

    def _scratch_under(self, each: _Range, failing: str) -> list[tuple[int, Allocation]]:
        """The allocations under the range while it is parked, in order, with sizes."""
        left, pieces = each.nbytes, []
        for size in self._scratch_bytes:
            count, left = divmod(left, size)
            if count and size not in self._scratch:
                self._scratch[size] = self._allocate(size, failing)
            if count:
                pieces += [(size, self._scratch[size])] * count
        return pieces

    def _unmap(self, each: _Range, failing: str) -> None:
        if each.mapped:
            self._gpu.take_away(each.address, each.nbytes, failing)
            each.mapped = False


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
