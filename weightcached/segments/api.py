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
        """uint8, shape (nbytes,), on the backend's device. Every tensor over it must be gone before
        publish().
        """
        ...

    def publish(self) -> OwnedFd:
        """Make the content final, unmap it here and return the descriptor that keeps it alive.
        Raises SegmentError.
        """
        ...

    def close(self) -> None:
        """Give up what publish() did not pass on; may be called twice."""
        ...


class PrivateCopy(Protocol):
    """Memory of this process alone, e.g. of the private segment."""

    def view(self, offset_bytes: int, nbytes: int) -> torch.Tensor:
        """uint8, shape (nbytes,), writable, with a storage of its own that keeps the copy alive."""
        ...


class Mapping(Protocol):
    """All segments of one index, mapped for reading. Lives as long as any tensor over it, or until
    closed.
    """

    def view(self, segment: int, offset_bytes: int, nbytes: int) -> torch.Tensor:
        """uint8, shape (nbytes,), with a storage of its own that begins at the offset and keeps the
        mapping alive.

        A storage of its own, since torch.compile and CUDA graphs take tensors of one storage for
        aliases. Whether writing faults or stays private is the backend's promise.
        """
        ...

    def read(self, segment: int, offset_bytes: int, nbytes: int) -> memoryview:
        """The bytes, in host memory, without torch; a copy where the segment is in device
        memory.
        """
        ...

    def private_copy(self, segment: int) -> PrivateCopy:
        """This process's own writable copy of one segment, made in one operation."""
        ...

    def close(self) -> None:
        """Drop this reference; the memory is unmapped once no tensor over it is left. May be called
        twice.
        """
        ...


class Backend(Protocol):
    """Where segments live and how they are created and mapped."""

    name: BackendName

    def granularity(self) -> int:
        """Bytes; every segment's size is a multiple of it."""
        ...

    def driver(self) -> str:
        """Identifies what keeps the segments alive, e.g. a driver version; segments do not outlive
        a change of it.
        """
        ...

    def create(self, nbytes: int) -> WritableSegment:
        """A new segment of `nbytes`, a multiple of granularity(). Raises SegmentError,
        OutOfDeviceMemoryError.
        """
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
    """The backend for a device name. Raises SegmentError where its driver is missing or too old."""
    if is_host_device(device):
        from weightcached.segments.host import HostBackend

        return HostBackend()
    from weightcached.segments.cuda import CudaBackend

    return CudaBackend(device)
