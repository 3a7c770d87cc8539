"""Segments in host memory: memfds, sealed against write, grow and shrink before they are published.

Engines map them MAP_PRIVATE: reads share the pages with everybody, and writes of an engine's own
post-processing go to private pages of that process. With a read-only mapping the engine would die
of SIGSEGV there, because the stage on host memory is `loaded`. The seal keeps the shared pages
unchanged, however a process maps them.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import platform
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from weightcached.errors import OutOfDeviceMemoryError, SegmentError
from weightcached.segments.backend_name import BackendName
from weightcached.system.cgroups import machine_memory, memory_room
from weightcached.system.fds import READ_ONLY_SEALS, OwnedFd, close_all, is_sealed

if TYPE_CHECKING:
    import torch

# Not in Python's mmap module. Without MAP_NORESERVE, and with vm.overcommit_memory=2, the kernel
# would reserve that much memory for each private mapping of the weights.
_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value


class HostSegment:
    """A memfd being filled through a shared mapping."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._fd = OwnedFd(
            os.memfd_create("weightcached-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        )
        self._map: mmap.mmap | None = None
        try:
            # Allocates the pages now: a machine out of memory says ENOSPC or ENOMEM here instead of
            # SIGBUS later.
            os.posix_fallocate(self._fd.fileno(), 0, nbytes)
            self._map = mmap.mmap(self._fd.fileno(), nbytes)
        except OSError as e:
            self.close()
            raise OutOfDeviceMemoryError(
                f"cannot allocate a host segment of {nbytes} bytes: {e.strerror}; see 'free -m' and the unit's "
                "MemoryMax="
            ) from e

    def tensor(self) -> torch.Tensor:
        """uint8, shape (nbytes,), writable; to be gone before publish()."""
        import torch

        if self._map is None:
            raise SegmentError("the host segment is published or closed already")
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def write(self, offset_bytes: int, data: memoryview) -> None:
        """Copy bytes into the segment."""
        if self._map is None:
            raise SegmentError("the host segment is published or closed already")
        with memoryview(self._map) as held:
            held[offset_bytes : offset_bytes + len(data)] = data

    def publish(self) -> OwnedFd:
        """Unmap, seal, hand over the descriptor. Raises SegmentError if a tensor over it is left."""
        if self._map is None:
            raise SegmentError("the host segment is published or closed already")
        # Dropped, not closed: a tensor holds the mapping, but no buffer export that would keep
        # close() from unmapping it under the tensor. The kernel refuses the seal while the pages
        # are mapped for writing.
        self._map = None
        try:
            fcntl.fcntl(self._fd.fileno(), fcntl.F_ADD_SEALS, READ_ONLY_SEALS)
        except OSError as e:
            self._map = mmap.mmap(self._fd.fileno(), self.nbytes)
            raise SegmentError(
                "a tensor over the host segment is still alive: it could change sealed bytes"
            ) from e
        return OwnedFd(self._fd.take())

    def close(self) -> None:
        """Free an unpublished segment. A tensor over it keeps its pages until the tensor is gone."""
        # Dropped, not closed: closing would unmap it under a tensor; so it ends with its last user.
        self._map = None
        self._fd.close()


class HostStaging:
    """Staging of segments/api.py: ordinary memory."""

    def __init__(self, nbytes: int) -> None:
        self._memory = bytearray(nbytes)

    def view(self) -> memoryview:
        return memoryview(self._memory)

    def close(self) -> None:
        self._memory = bytearray()


def _view(buffer: mmap.mmap, offset_bytes: int, nbytes: int) -> torch.Tensor:
    import torch

    # The storage begins at the offset and holds a reference to the buffer.
    return torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes, offset=offset_bytes)


class HostCopy:
    """Anonymous memory with a copy of a segment."""

    def __init__(self, source: mmap.mmap) -> None:
        self._memory = mmap.mmap(-1, len(source), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with memoryview(source) as held:
            self._memory[:] = held

    def view(self, offset_bytes: int, nbytes: int) -> torch.Tensor:
        """uint8, shape (nbytes,), writable."""
        return _view(self._memory, offset_bytes, nbytes)


class HostMapping:
    """All segments of an index, one private mapping each."""

    def __init__(self, maps: Sequence[mmap.mmap]) -> None:
        self._maps = list(maps)

    def view(self, segment: int, offset_bytes: int, nbytes: int) -> torch.Tensor:
        """uint8, shape (nbytes,). Writing changes this process's copy of a page only."""
        return _view(self._at(segment, offset_bytes, nbytes), offset_bytes, nbytes)

    def read(self, segment: int, offset_bytes: int, nbytes: int) -> memoryview:
        """The mapped pages themselves."""
        return memoryview(self._at(segment, offset_bytes, nbytes))[
            offset_bytes : offset_bytes + nbytes
        ]

    def private_copy(self, segment: int) -> HostCopy:
        """A writable copy of one segment in anonymous memory."""
        return HostCopy(self._at(segment, 0, 0))

    def map_again(self, fds: Sequence[OwnedFd]) -> None:
        """Adopt the descriptors (closing each) and put their segments, of the same sizes, in place
        of this mapping's: all tensors keep their addresses. Pages that this process has written are
        lost.

        Raises SegmentError. If a descriptor cannot be adopted, the old mapping stays; after any
        other error part of it has changed.
        """
        try:
            if not self._maps:
                raise SegmentError("the mapping of host segments is closed")
            if len(fds) != len(self._maps):
                raise SegmentError(
                    f"{len(fds)} descriptors came for {len(self._maps)} mapped segments"
                )
            for number, (fd, there) in enumerate(zip(fds, self._maps, strict=True)):
                _check_segment(number, fd.fileno(), len(there))
            for number, (fd, there) in enumerate(zip(fds, self._maps, strict=True)):
                _map_over(there, number, fd.fileno())
        finally:
            close_all(fds)

    def close(self) -> None:
        """Drop the mappings; each is unmapped when its last tensor is gone."""
        self._maps.clear()

    def _at(self, segment: int, offset_bytes: int, nbytes: int) -> mmap.mmap:
        if not self._maps:
            raise SegmentError(
                "the mapping of host segments is closed: take its tensors before close()"
            )
        if not 0 <= segment < len(self._maps):
            raise SegmentError(
                f"segment {segment} is not one of the {len(self._maps)} that are mapped"
            )
        mapped = self._maps[segment]
        if not 0 <= offset_bytes <= offset_bytes + nbytes <= len(mapped):
            raise SegmentError(
                f"{nbytes} bytes at {offset_bytes} reach outside segment {segment} of {len(mapped)} bytes"
            )
        return mapped


class HostBackend:
    """Segments in the machine's memory, for device names cpuN."""

    name: BackendName = "host"

    def granularity(self) -> int:
        return mmap.PAGESIZE

    def driver(self) -> str:
        """memfds live as long as the kernel that made them."""
        return f"linux {platform.release()}"

    def create(self, nbytes: int) -> HostSegment:
        if nbytes <= 0 or nbytes % mmap.PAGESIZE:
            raise SegmentError(
                f"a host segment of {nbytes} bytes: a positive multiple of {mmap.PAGESIZE} is required"
            )
        return HostSegment(nbytes)

    def staging(self, nbytes: int) -> HostStaging:
        return HostStaging(nbytes)

    def map(self, fds: Sequence[OwnedFd], nbytes: Sequence[int]) -> HostMapping:
        maps: list[mmap.mmap] = []
        try:
            if len(fds) != len(nbytes):
                raise SegmentError(f"{len(fds)} descriptors came for {len(nbytes)} segments")
            for number, (fd, size) in enumerate(zip(fds, nbytes, strict=True)):
                maps.append(_map_private(number, fd.fileno(), size))
        finally:
            # The mapping took its own reference to the file.
            close_all(fds)
        return HostMapping(maps)

    def free_bytes(self) -> tuple[int, int]:
        free, total = machine_memory()
        # Beyond its group's limit the kernel kills a process, however much the machine has left.
        room = memory_room()
        return (free, total) if room is None else (min(free, room.free), min(total, room.limit))


def _map_private(number: int, fd: int, nbytes: int) -> mmap.mmap:
    _check_segment(number, fd, nbytes)
    try:
        # Python's mmap of a descriptor keeps a copy of it: the file would stay when another one is
        # mapped over it.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        there = mmap.mmap(-1, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as e:
        raise SegmentError(f"segment {number} of {nbytes} bytes does not map: {e.strerror}") from e
    _map_over(there, number, fd)
    return there


def _check_segment(number: int, fd: int, nbytes: int) -> None:
    if not is_sealed(fd):
        raise SegmentError(
            f"segment {number} is not a sealed memfd: its bytes could change under an engine"
        )
    held = os.fstat(fd).st_size
    if held != nbytes:
        raise SegmentError(f"segment {number} holds {held} bytes, its index says {nbytes}")


def _map_over(there: mmap.mmap, number: int, fd: int) -> None:
    """Map the file where another mapping of its size is, which the kernel takes away in the same
    step."""
    nbytes = len(there)
    address = ctypes.addressof(ctypes.c_char.from_buffer(there))
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    if _libc_mmap()(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0) == _MAP_FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise SegmentError(f"segment {number} of {nbytes} bytes does not map: {reason}")


@functools.cache
def _libc_mmap() -> Callable[..., int | None]:
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    size, number, pointer = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
    call.argtypes = (pointer, size, number, number, number, ctypes.c_int64)
    return call
