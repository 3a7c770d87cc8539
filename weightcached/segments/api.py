"""The interface that host.py and cuda.py implement, and the choice between them.

A loader creates segments, fills and publishes them; an engine adopts descriptors and maps them all
or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from weightcached.segments.backend_name import BackendName
from weightcached.system.fds import OwnedFd
from weightcached.system.paths import is_host_device

if TYPE_CHECKING:
    import torch


class WritableSegment(Protocol):
    """A segment that its creator still fills."""

    nbytes: int

    def tensor(self) -> torch.Tensor:
        """uint8, shape (nbytes,), on the backend's device. Drop its tensors before publish()."""
        ...

    def write(self, offset_bytes: int, data: memoryview) -> None:
        """Copy bytes from host memory into the segment, without torch; blocks. Raises SegmentError."""
        ...

    def publish(self) -> OwnedFd:
        """Make the content final, unmap it here, return its descriptor. Raises SegmentError."""
        ...

    def close(self) -> None:
        """Free a segment that was not published; may be called twice."""
        ...


class Staging(Protocol):
    """Host memory from which write() is fast. Belongs to one thread at a time."""

    def view(self) -> memoryview:
        """The bytes, writable; not to be used after close()."""
        ...

    def close(self) -> None:
        """Give the memory back; may be called twice."""
        ...


class PrivateCopy(Protocol):
    """Memory of this process alone, e.g. of the private segment."""

    def view(self, offset_bytes: int, nbytes: int) -> torch.Tensor:
        """uint8, shape (nbytes,), writable, with a storage of its own that keeps the copy alive."""
        ...


class Mapping(Protocol):
    """All segments of one index, mapped for reading, until closed and no tensor over it is left."""

    def view(self, segment: int, offset_bytes: int, nbytes: int) -> torch.Tensor:
        """uint8, shape (nbytes,), with a storage of its own that begins at the offset and keeps the
        mapping alive.

        With one storage for all, torch.compile and CUDA graphs would treat the tensors as aliases.
        The backend decides whether writing faults or stays private.
        """
        ...

    def read(self, segment: int, offset_bytes: int, nbytes: int) -> memoryview:
        """The bytes in host memory, without torch; a copy if the segment is in device memory."""
        ...

    def private_copy(self, segment: int) -> PrivateCopy:
        """This process's own writable copy of one segment, made in one operation."""
        ...

    def close(self) -> None:
        """Drop this reference; unmaps once no tensor over it is left. May be called twice."""
        ...


class Backend(Protocol):
    """Creates and maps segments in one kind of memory."""

    name: BackendName

    def granularity(self) -> int:
        """Bytes; every segment's size is a multiple of it."""
        ...

    def driver(self) -> str:
        """The driver and its version; segments do not survive a change of it."""
        ...

    def create(self, nbytes: int) -> WritableSegment:
        """A new segment of `nbytes`, a multiple of granularity().

        Raises SegmentError, OutOfDeviceMemoryError.
        """
        ...

    def staging(self, nbytes: int) -> Staging:
        """Host memory to fill segments from, page-locked for a GPU. Raises SegmentError."""
        ...

    def map(self, fds: Sequence[OwnedFd], nbytes: Sequence[int]) -> Mapping:
        """Adopt the descriptors (closing each) and map all segments read-only, in order, or none at
        all.

        Raises SegmentError; nothing stays mapped and no descriptor stays open then.
        """
        ...

    def free_bytes(self) -> tuple[int, int]:
        """(free, total) bytes of the device's memory."""
        ...


def open_backend(device: str) -> Backend:
    """The backend for a device name. Raises SegmentError if its driver is missing or too old."""
    if is_host_device(device):
        from weightcached.segments.host import HostBackend

        return HostBackend()
    from weightcached.segments.cuda import CudaBackend

    return CudaBackend(device)
