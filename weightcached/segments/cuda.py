"""The CUDA backend: segments as exportable GPU memory, and how torch sees it in place.

A published segment belongs to its descriptors and mappings, not to a process. Engines map all
segments of an index into one address range whose pages they cannot write. cuda_driver.py has the
driver calls and the owners of resources; system/gpus.py knows which process uses how much memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from weightcached.errors import OutOfDeviceMemoryError, SegmentError
from weightcached.segments.backend_name import BackendName
from weightcached.segments.cuda_driver import (
    Allocation,
    CudaError,
    Gpu,
    MappedRange,
)
from weightcached.system import gpus
from weightcached.system.fds import OwnedFd, close_all
from weightcached.system.text import bytes_text

if TYPE_CHECKING:
    import torch


class DeviceArray:
    """`nbytes` bytes at `address` on CUDA device `ordinal`, in the form that torch.as_tensor()
    takes without a copy.

    torch refers to this object, and it to the memory's `owner`, until the last tensor over the
    bytes is gone.
    """

    def __init__(self, owner: object, address: int, nbytes: int, ordinal: int) -> None:
        self.owner = owner
        self.address = address
        self.nbytes = nbytes
        self.ordinal = ordinal

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # torch refuses arrays marked as read-only, so this says False. The GPU's page tables guard
        # the memory.
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }


def torch_tensor(array: DeviceArray) -> torch.Tensor:
    """uint8, shape (array.nbytes,): the array itself. Raises SegmentError if torch copied it."""
    # The daemon imports this package and never torch.
    import torch

    # Only then does torch know which device an address belongs to.
    torch.cuda.init()
    tensor = torch.as_tensor(array, dtype=torch.uint8, device=torch.device("cuda", array.ordinal))
    if tensor.data_ptr() != array.address:
        raise SegmentError(
            f"torch {torch.__version__} copied {array.nbytes} bytes, mapped at {array.address:#x} on "
            f"cuda:{array.ordinal}, to {tensor.data_ptr():#x} on {tensor.device}: report this fault of weightcached"
        )
    return tensor


AsTensor = Callable[[DeviceArray], Any]


class CudaSegment:
    """A segment that its creator fills, mapped read-write. WritableSegment of segments/api.py."""

    def __init__(
        self,
        gpu: Gpu,
        allocation: Allocation,
        mapped: MappedRange,
        as_tensor: AsTensor,
    ) -> None:
        self.nbytes = mapped.nbytes
        self._gpu = gpu
        self._allocation = allocation
        self._mapped: MappedRange | None = mapped
        self._as_tensor = as_tensor
        self._array: Callable[[], DeviceArray | None] = lambda: None

    def tensor(self) -> torch.Tensor:
        """uint8, shape (nbytes,), writable, not zeroed. Must be gone, with its views, at publish()."""
        mapped = self._open("tensor")
        array = self._array()
        if array is None:
            array = DeviceArray(mapped, mapped.address, self.nbytes, self._gpu.ordinal)
            self._array = weakref.ref(array)
        tensor: torch.Tensor = self._as_tensor(array)
        return tensor

    def write(self, offset_bytes: int, data: memoryview) -> None:
        """Copy host memory into the segment; fast from memory of staging()."""
        mapped = self._open("write")
        failing = f"cannot copy {len(data)} bytes to offset {offset_bytes} of a segment"
        if not 0 <= offset_bytes <= offset_bytes + len(data) <= self.nbytes:
            raise SegmentError(f"{failing} of {self.nbytes} bytes")
        self._gpu.write(mapped.address + offset_bytes, data, failing)

    def publish(self) -> OwnedFd:
        """Wait for the writes, unmap and return the descriptor that keeps the memory alive. Raises
        SegmentError.

        After an error the segment is still the caller's, to publish() again or close().
        """
        self._open("publish")
        failing = f"cannot publish a segment of {self.nbytes} bytes"
        if self._array() is not None:
            raise SegmentError(
                f"{failing}: a tensor over it is alive and could still write; delete every one of them"
            )
        with self._gpu.context.current():
            self._gpu.context.synchronize(failing)
            fd = self._allocation.export(failing)
        self.close()
        return fd

    def close(self) -> None:
        """Free an unpublished segment once no tensor over it is left. May be called twice."""
        mapped, self._mapped = self._mapped, None
        if mapped is not None and self._array() is None:
            mapped.close()

    def _open(self, method: str) -> MappedRange:
        if self._mapped is None:
            raise SegmentError(
                f"{method}() of a segment of {self.nbytes} bytes that was published or closed"
            )
        return self._mapped


class CudaStaging:
    """Staging of segments/api.py: page-locked memory."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        self._gpu = gpu
        self._memory = gpu.page_locked(nbytes, f"cannot lock {nbytes} bytes of host memory")

    def view(self) -> memoryview:
        return self._memory.view()

    def close(self) -> None:
        with self._gpu.context.current():
            self._memory.close()


class CudaMapping:
    """All segments of one index in one contiguous address range, read-only. Mapping of
    segments/api.py.

    A kernel that writes there gets "illegal memory access", which breaks its process's CUDA context
    and no other.
    """

    def __init__(
        self, gpu: Gpu, mapped: MappedRange, nbytes: Sequence[int], as_tensor: AsTensor
    ) -> None:
        self.nbytes = mapped.nbytes
        self._gpu = gpu
        self._sizes = tuple(nbytes)
        self._offsets = tuple(sum(self._sizes[:segment]) for segment in range(len(self._sizes)))
        self._mapped: MappedRange | None = mapped
        self._as_tensor = as_tensor

    def view(self, segment: int, offset_bytes: int, nbytes: int) -> torch.Tensor:
        """uint8, shape (nbytes,), with its own storage from the offset on. Writing to it faults."""
        mapped, address = self._at(segment, offset_bytes, nbytes)
        tensor: torch.Tensor = self._as_tensor(
            DeviceArray(mapped, address, nbytes, self._gpu.ordinal)
        )
        return tensor

    def read(self, segment: int, offset_bytes: int, nbytes: int) -> memoryview:
        """A copy of the bytes in host memory, made by the driver alone. Raises SegmentError."""
        _, address = self._at(segment, offset_bytes, nbytes)
        return self._gpu.read(address, nbytes, f"cannot read {nbytes} bytes of segment {segment}")

    def private_copy(self, segment: int) -> CudaCopy:
        """A writable copy of one segment, from torch's allocator, made by one copy on the device."""
        return CudaCopy(
            self.view(segment, 0, self._sizes[segment]).clone(), self._gpu.ordinal, self._as_tensor
        )

    def unmap(self) -> None:
        """Take the memory from under all tensors, which keep their addresses.

        Until map_again() nothing may touch them. Raises SegmentError; nothing has changed then.
        """
        self._open().unmap()

    def map_again(self, fds: Sequence[OwnedFd]) -> None:
        """Adopt the descriptors (closing each) and put their segments, of the same sizes, in place
        of this mapping's.

        Raises SegmentError. If a descriptor cannot be adopted, the old mapping stays; after any
        other error nothing is mapped.
        """
        failing = f"cannot map {len(self._sizes)} segments on {self._gpu.device} again"
        mapped = self._open()
        with ExitStack() as descriptors:
            descriptors.callback(close_all, fds)
            if len(fds) != len(self._sizes):
                raise SegmentError(f"{failing}: {len(fds)} descriptors came with them")
            with self._gpu.context.current(), ExitStack() as handles:
                pieces = _adopt(self._gpu, fds, self._sizes, handles, failing)
                mapped.unmap()
                self._gpu.map_again(mapped, pieces, failing=failing)

    def close(self) -> None:
        """Drop this reference; unmaps with the last tensor over the range. May be called twice."""
        self._mapped = None

    def _open(self) -> MappedRange:
        if self._mapped is None:
            raise SegmentError(
                f"a mapping of {self.nbytes} bytes is closed: take its tensors before close()"
            )
        return self._mapped

    def _at(self, segment: int, offset_bytes: int, nbytes: int) -> tuple[MappedRange, int]:
        mapped = self._open()
        if not 0 <= segment < len(self._sizes):
            raise SegmentError(
                f"segment {segment} is not one of the {len(self._sizes)} that are mapped"
            )
        if not 0 <= offset_bytes <= offset_bytes + nbytes <= self._sizes[segment]:
            raise SegmentError(
                f"{nbytes} bytes at {offset_bytes} reach outside segment {segment} of {self._sizes[segment]} bytes"
            )
        return mapped, mapped.address + self._offsets[segment] + offset_bytes


class CudaCopy:
    """This process's own copy of a segment. PrivateCopy of segments/api.py."""

    def __init__(self, memory: torch.Tensor, ordinal: int, as_tensor: AsTensor) -> None:
        self._memory = memory
        self._ordinal = ordinal
        self._as_tensor = as_tensor

    def view(self, offset_bytes: int, nbytes: int) -> torch.Tensor:
        """uint8, shape (nbytes,), writable, with a storage of its own."""
        address = self._memory.data_ptr() + offset_bytes
        tensor: torch.Tensor = self._as_tensor(
            DeviceArray(self._memory, address, nbytes, self._ordinal)
        )
        return tensor


class CudaBackend:
    """Segments on one GPU or MIG device. Backend of segments/api.py.

    `driver` has the functions of cuda.bindings.driver, which is the default; `as_tensor` shows an
    array to torch. Raises SegmentError without a driver or a device that can share memory,
    DeviceError for one that is not visible.
    """

    name: BackendName = "cuda"

    def __init__(
        self, device: str, driver: Any = None, *, as_tensor: AsTensor = torch_tensor
    ) -> None:
        self.device = device
        self._gpu = Gpu(device, driver)
        self._as_tensor = as_tensor

    def granularity(self) -> int:
        """Bytes; every segment's size is a multiple of it (2 MiB on today's GPUs)."""
        return self._gpu.granularity

    def driver(self) -> str:
        """The kernel driver, e.g. "nvidia 580.159.03". Not libcuda: memory outlives its processes."""
        return gpus.driver_name(gpus.kernel_driver_version())

    def free_bytes(self) -> tuple[int, int]:
        """(free, total) bytes of the device's memory. Raises SegmentError."""
        return self._gpu.memory()

    def persistence_warning(self) -> str | None:
        """A warning for the operator if persistence mode is off, else None."""
        return gpus.persistence_warning(self.device)

    def create(self, nbytes: int) -> CudaSegment:
        """A new segment of `nbytes`, a multiple of granularity().

        Raises SegmentError, OutOfDeviceMemoryError.
        """
        failing = f"cannot create a segment of {nbytes} bytes on {self.device}"
        self._check_size(nbytes, failing)
        free, total = self._gpu.memory()
        if free < nbytes:
            raise self._out_of_memory(failing, free, total)
        with self._gpu.context.current(), ExitStack() as resources:
            try:
                allocation = self._gpu.allocate(nbytes, failing)
            except CudaError as e:
                if e.result == "CUDA_ERROR_OUT_OF_MEMORY":
                    raise self._out_of_memory(failing, free, total) from e
                raise
            resources.callback(allocation.close)
            pieces = [(allocation, nbytes)]
            mapped = self._gpu.map_range(
                pieces, writable=True, resources=resources, failing=failing
            )
        return CudaSegment(self._gpu, allocation, mapped, self._as_tensor)

    def staging(self, nbytes: int) -> CudaStaging:
        """Page-locked host memory. Raises SegmentError."""
        return CudaStaging(self._gpu, nbytes)

    def map(self, fds: Sequence[OwnedFd], nbytes: Sequence[int]) -> CudaMapping:
        """Adopt the descriptors (closing each) and map all segments read-only, in order, or none at
        all.

        Raises SegmentError naming segment, driver call and error; nothing stays mapped, no
        descriptor open then.
        """
        failing = f"cannot map {len(nbytes)} segments on {self.device}"
        with ExitStack() as descriptors:
            # Imports take references of their own; open descriptors would only pin the memory once
            # more.
            descriptors.callback(close_all, fds)
            if len(fds) != len(nbytes) or not nbytes:
                raise SegmentError(
                    f"{failing}: {len(fds)} descriptors came with them; expected one each, at least one"
                )
            for segment, size in enumerate(nbytes):
                self._check_size(size, f"{failing}: segment {segment}")
            with self._gpu.context.current(), ExitStack() as handles, ExitStack() as resources:
                pieces = _adopt(self._gpu, fds, nbytes, handles, failing)
                mapped = self._gpu.map_range(
                    pieces, writable=False, resources=resources, failing=failing
                )
                # Leaving the block releases the handles: the mapping keeps the memory alive by
                # itself.
        return CudaMapping(self._gpu, mapped, nbytes, self._as_tensor)

    def _check_size(self, nbytes: int, failing: str) -> None:
        unit = self._gpu.granularity
        if nbytes <= 0 or nbytes % unit:
            raise SegmentError(
                f"{failing}: {nbytes} bytes, expected a positive multiple of the granularity, {unit}"
            )

    def _out_of_memory(self, failing: str, free: int, total: int) -> OutOfDeviceMemoryError:
        found = gpus.holders(self.device)
        listed = ", ".join(
            f"pid {holder.pid} ({holder.name}) {bytes_text(holder.nbytes)}" for holder in found
        )
        rest = bytes_text(max(0, total - free - sum(holder.nbytes for holder in found)))
        return OutOfDeviceMemoryError(
            f"{failing}: {bytes_text(free)} of {bytes_text(total)} are free; held by {listed or 'no listed process'}, "
            f"{rest} by descriptors, contexts and other containers: stop a process ('nvidia-smi' lists them), or free "
            "a cache with 'weightcachectl drop'"
        )


def _adopt(
    gpu: Gpu, fds: Sequence[OwnedFd], nbytes: Sequence[int], handles: ExitStack, failing: str
) -> list[tuple[Allocation, int]]:
    pieces: list[tuple[Allocation, int]] = []
    for segment, (fd, size) in enumerate(zip(fds, nbytes, strict=True)):
        allocation = gpu.adopt(fd, f"{failing}: descriptor of segment {segment}")
        handles.callback(allocation.close)
        pieces.append((allocation, size))
    return pieces
