"""The public socket: bound once, kept while engines and supervisors come and go.

While no engine accepts, the kernel queues connections: a client waits, it is not refused.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from weightcached.config.engines import Listen
from weightcached.errors import ListenError
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


def _holder_hint(where: Listen) -> str:
    return f"'ss -ltnp sport = :{where.port}' names who has it" if where.port else "remove it"


def _bind_port(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    address = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, 0, socket.AI_PASSIVE)[0][4]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _bind_path(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.lexists(path) and stat.S_ISSOCK(os.lstat(path).st_mode) and not _answers(path):
            Path(path).unlink()
        sock.bind(path)
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


def is_at(fd: OwnedFd, where: Listen) -> bool:
    """Whether a descriptor is a socket that listens there."""
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
        return sock.family != socket.AF_UNIX and name[1] == where.port
