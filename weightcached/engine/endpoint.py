"""The public socket: bound once, kept while engines and supervisors come and go.

While no engine accepts, the kernel queues connections: a client waits, it is not refused.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path
from typing import Any

from weightcached.config.engines import Listen
from weightcached.errors import EngineError, ListenError
from weightcached.system.fds import OwnedFd

STORE_NAME = "wc1.public"
# The kernel cuts it to net.core.somaxconn, 4096 by default.
BACKLOG = 4096


def bind(where: Listen) -> socket.socket:
    """A socket that listens there. Raises ListenError."""
    try:
        return _bind_path(where.path) if where.path else _bind_port(where.host, where.port)
    except OSError as e:
        raise ListenError(
            f"cannot listen on {where}: {e.strerror or e}; "
            f"{_holder_hint(where)}, or change listen: in the manifest"
        ) from e


def moved(before: object, now: object) -> EngineError:
    """The error of a manifest that has another address than the socket."""
    return EngineError(
        f"listen: changed from {before} to {now}: a socket cannot move, so stop the service and start "
        "it again"
    )


def _holder_hint(where: Listen) -> str:
    return f"'ss -ltnp sport = :{where.port}' names who has it" if where.port else "remove it"


def _bind_port(host: str, port: int) -> socket.socket:
    return _listening(_family(host), _resolved(host, port))


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _resolved(host: str, port: int) -> Any:
    """The address as a socket has it. Raises OSError."""
    kind, passive = socket.SOCK_STREAM, socket.AI_PASSIVE
    return socket.getaddrinfo(host, port, _family(host), kind, 0, passive)[0][4]


def _bind_path(path: str) -> socket.socket:
    if os.path.lexists(path) and stat.S_ISSOCK(os.lstat(path).st_mode) and not _answers(path):
        Path(path).unlink()
    return _listening(socket.AF_UNIX, path)


def _listening(family: socket.AddressFamily, address: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Without a meaning for a path.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _answers(path: str) -> bool:
    """Whether somebody listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
        return True


def is_at(fd: OwnedFd, where: Listen, *, any_host: bool = False) -> bool:
    """Whether a descriptor is a socket that listens there; any_host: the port alone counts."""
    try:
        sock = socket.socket(fileno=os.dup(fd.fileno()))
    except OSError:
        return False
    with sock:
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        name = sock.getsockname()
        if where.path:
            # A name that was removed leads no client here.
            return name == where.path and os.path.lexists(where.path)
        if sock.family == socket.AF_UNIX or name[1] != where.port:
            return False
        try:
            return any_host or name[:2] == _resolved(where.host, where.port)[:2]
        except OSError:
            return False


def stop_listening(fd: OwnedFd) -> None:
    """Free the address of a socket, although the manager closes its copy only a little later."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd.fileno())) as sock:
        sock.shutdown(socket.SHUT_RDWR)
