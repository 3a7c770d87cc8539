"""The process at the other end of a connection: its user, its pid, its death."""

from __future__ import annotations

import os
import socket

from weightcached.system.fds import OwnedFd
from weightcached.system.process import peer_credentials, peer_pidfd


class PeerRefusedError(Exception):
    """The peer runs as another user, or its identity cannot be read."""


class Peer:
    """A connected process of our user. pid: 0 if it lives in a pid namespace that we cannot see."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
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
    return Peer(pid)
