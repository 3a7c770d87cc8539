"""The process at the other end of a connection: its user, its pid, its death."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket

from weightcached.system.fds import OwnedFd
from weightcached.system.process import peer_credentials, peer_pidfd


class PeerRefusedError(Exception):
    """The peer runs as another user, or its identity cannot be read."""


# Numbers of connections stay above those of processes.
_CONNECTIONS = 1 << 32
# Of peers that nothing tells apart but their connections.
_unseen = itertools.count(-1, -1)


class Peer:
    """A connected process of our user. pid: 0 if it lives in a pid namespace that we cannot see.

    process: tells processes apart nevertheless. label: the peer's own name, for people.
    """

    def __init__(self, pid: int, process: int = 0, label: str = "") -> None:
        self.pid = pid
        self.process = process or pid
        self.label = label
        self.pidfd: OwnedFd | None = None

    def follow(self, sock: socket.socket) -> None:
        """Open the pidfd that shows its death, if possible."""
        self.pidfd = peer_pidfd(sock, self.pid)

    def close(self) -> None:
        if self.pidfd is not None:
            self.pidfd.close()


def identify(sock: socket.socket) -> Peer:
    """The peer of a connected socket. Raises PeerRefusedError unless it runs as our own user."""
    try:
        pid, uid = peer_credentials(sock)
    except OSError as e:
        raise PeerRefusedError(
            f"cannot read the uid of this connection's peer ({e}): the connection is refused"
        ) from e
    if uid != os.getuid():
        raise PeerRefusedError(
            f"uid {uid} may not use this daemon, it serves uid {os.getuid()} alone: run the engine as that user"
        )
    return Peer(pid, pid or _unseen_process(sock))


def _unseen_process(sock: socket.socket) -> int:
    """A negative number for a process in another pid namespace.

    The same on each of its connections if the kernel numbers pidfds by process (Linux 6.9);
    otherwise one per connection.
    """
    pidfd = peer_pidfd(sock, 0)
    # Out of descriptors it is told apart by its connection: no peer may end the accepting of others.
    with contextlib.suppress(OSError):
        if pidfd is not None:
            with pidfd, OwnedFd(os.pidfd_open(os.getpid())) as ours:
                inode = os.fstat(pidfd.fileno()).st_ino
                if inode != os.fstat(ours.fileno()).st_ino:
                    return -inode - _CONNECTIONS
    return next(_unseen)
