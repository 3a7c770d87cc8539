"""The daemon's place in the runtime directory: lock and socket, taken at the start, and again if
somebody removes them.

/run/user/<uid> goes with a user's last session, and people tidy up. The weights survive that in
memory, but engines find the daemon only if it makes lock and socket again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

from weightcached.errors import DeviceBusyError, RuntimePathError
from weightcached.system.paths import create_runtime_dir, lock_path, socket_path

log = logging.getLogger(__name__)

# Short: a peer in it waits behind a flood. Further peers wait in connect(), each as one of many.
_BACKLOG = 32


class Endpoint:
    """Lock and socket of `device` in `directory`. Raises RuntimePathError, and DeviceBusyError for
    a lock that is held.

    Enter it to hold the lock; leave it to give both up.
    """

    def __init__(self, device: str, directory: Path) -> None:
        self.socket = socket_path(device, directory)
        self._device = device
        self._directory = directory
        self._lock_path = lock_path(device, directory)
        self._lock_fd = -1
        # Of the socket's name; the socket itself has other numbers.
        self._bound: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        create_runtime_dir(self._directory)
        self._lock_fd = _take_lock(self._device, self._lock_path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.leave()
        os.close(self._lock_fd)

    def listen(self) -> socket.socket:
        """Bind with mode 0600, replacing a dead daemon's socket; only the holder of the lock may."""
        _unlink_stale(self.socket)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # From the first moment on: between bind() and a chmod() others could connect.
        umask = os.umask(0o177)
        try:
            sock.bind(os.fspath(self.socket))
            sock.listen(_BACKLOG)
            sock.setblocking(False)
            self._bound = _identity(self.socket)
        except OSError as e:
            sock.close()
            raise RuntimePathError(f"cannot listen on {self.socket}: {e.strerror or e}") from e
        finally:
            os.umask(umask)
        return sock

    def is_lost(self) -> bool:
        """Whether the socket's name is gone, or leads to another file than the bound socket."""
        return self._bound is not None and _identity(self.socket) != self._bound

    def restore(self) -> socket.socket:
        """Make directory, lock and socket again if they are gone. Files of others stay."""
        create_runtime_dir(self._directory)
        if _identity(self._lock_path) != _identity(self._lock_fd):
            lock_fd = _take_lock(self._device, self._lock_path)
            os.close(self._lock_fd)
            self._lock_fd = lock_fd
        return self.listen()

    def leave(self) -> None:
        """Remove the socket, if it is still ours."""
        if self._bound is not None and not self.is_lost():
            self.socket.unlink(missing_ok=True)


def _identity(file: Path | int) -> tuple[int, int] | None:
    try:
        info = os.fstat(file) if isinstance(file, int) else os.lstat(file)
    except OSError:
        return None
    return info.st_dev, info.st_ino


def _take_lock(device: str, path: Path) -> int:
    """A descriptor that holds the lock.

    The file stays: if it were unlinked, two daemons could lock two files.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = (
            f"free space or inodes: df -i {path.parent}"
            if full
            else "if something else is there, remove it"
        )
        raise RuntimePathError(f"cannot open the lock {path}: {e.strerror}; {remedy}") from e
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise RuntimePathError(f"the lock {path} is not a regular file: remove it")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            who = f"pid {holder}" if holder.isdecimal() else "a process that left no pid"
            raise DeviceBusyError(
                f"device {device} is served by another weightcached ({who}), which holds {path}: "
                f"systemctl --user stop weightcached@{device}.service, or end that process"
            ) from e
        # Only for the message above: a full file system must not stop the daemon.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _unlink_stale(path: Path) -> None:
    try:
        info = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(info.st_mode):
        raise RuntimePathError(f"{path} is not a socket (symbolic links are refused): remove it")
    log.info("stale socket removed path=%s", path)
    path.unlink()
