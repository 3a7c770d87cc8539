"""Descriptors with an owner: each is closed exactly once, by the object that holds it."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable
from types import TracebackType
from typing import Self


class OwnedFd:
    """One descriptor and the duty to close it. close() may be called twice; take() passes it on."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @property
    def closed(self) -> bool:
        return self._fd < 0

    def fileno(self) -> int:
        """The descriptor, still owned here. Raises ValueError once closed or taken."""
        if self._fd < 0:
            raise ValueError("descriptor is closed or was taken")
        return self._fd

    def take(self) -> int:
        """Give the descriptor away; the caller closes it."""
        fd = self.fileno()
        self._fd = -1
        return fd

    def dup(self) -> OwnedFd:
        """A second descriptor on the same object, close-on-exec."""
        return OwnedFd(fcntl.fcntl(self.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # A half-built object has no _fd.
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def __repr__(self) -> str:
        return f"OwnedFd({self._fd if self._fd >= 0 else 'closed'})"


def close_all(fds: Iterable[OwnedFd]) -> None:
    """Close every descriptor given; those already closed or taken are left alone."""
    for fd in fds:
        fd.close()


READ_ONLY_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def sealed_memfd(name: str, data: bytes) -> OwnedFd:
    """An anonymous file holding `data` that nobody can change any more. Raises OSError."""
    with OwnedFd(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)) as fd:
        view = memoryview(data)
        while view:
            view = view[os.write(fd.fileno(), view) :]
        fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, READ_ONLY_SEALS)
        return OwnedFd(fd.take())


def is_sealed(fd: int) -> bool:
    """Whether the descriptor is a memfd sealed against write, grow and shrink."""
    # Before any other question: of a descriptor from a file system that hangs, fstat() would hang,
    # too.
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & READ_ONLY_SEALS == READ_ONLY_SEALS
    except OSError:
        return False
    return sealed and stat.S_ISREG(os.fstat(fd).st_mode)


def sealed_nbytes(fd: int, *, max_nbytes: int) -> int:
    """The size of a readable sealed memfd. Raises ValueError for anything else or larger."""
    if not is_sealed(fd):
        raise ValueError("the descriptor is not a memfd sealed against change")
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
        raise ValueError("the descriptor is not open for reading")
    nbytes = os.fstat(fd).st_size
    if nbytes > max_nbytes:
        raise ValueError(f"the memfd holds {nbytes} bytes, at most {max_nbytes} are allowed")
    return nbytes


def read_sealed(fd: int, *, max_nbytes: int) -> bytes:
    """The whole content of a sealed memfd, from offset 0. Raises as sealed_nbytes() does."""
    return os.pread(fd, sealed_nbytes(fd, max_nbytes=max_nbytes), 0)
