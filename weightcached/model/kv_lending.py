"""The memory of one engine's KV cache, passed to the engine that will take its place.

Memory lives as long as a descriptor on it. A successor that holds one maps the memory as soon as
its predecessor is gone. Otherwise the kernel first takes the memory back, and the driver clears it
before it gives it out again: 0.4 s for 110 GiB on an H200 (bench/README.md).

The descriptors wait in a socket that the successor listens on: nobody has to receive them before
they are wanted, and they are gone with the process.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from weightcached.errors import ProtocolError
from weightcached.system.fds import OwnedFd, close_all
from weightcached.wire.framing import MAX_PACKET_FDS, listen, recv_packet, send_packet


class Lent(NamedTuple):
    """Pieces of memory of one device: bytes of each, and descriptors."""

    device: str
    nbytes: list[int]
    fds: list[OwnedFd]


def path_of(directory: Path, rank: int) -> Path:
    """Where the worker of that rank of the engine in `directory` listens."""
    return directory / f"kv-{rank}.sock"


class Inbox:
    """Takes what is lent. Raises OSError. obstacle: why it cannot be used now, or ""."""

    def __init__(self, path: Path, obstacle: Callable[[], str]) -> None:
        self.obstacle = obstacle
        self._path = path
        self._sock = listen(path)

    def take(self) -> Lent | None:
        """The newest that came; the others are given back."""
        found: Lent | None = None
        while True:
            try:
                peer, _ = self._sock.accept()
            except OSError:
                return found
            with peer, contextlib.suppress(OSError, EOFError, ProtocolError, msgspec.MsgspecError):
                peer.setblocking(False)
                packet = recv_packet(peer, max_fds=MAX_PACKET_FDS)
                said = msgspec.json.decode(packet.data, type=tuple[str, list[int]])
                if found is not None:
                    close_all(found.fds)
                found = Lent(*said, packet.fds)

    def close(self) -> None:
        """Give back what came, and take no more. May be called twice."""
        self._sock.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


def lend(path: Path, device: str, nbytes: Sequence[int], fds: Sequence[OwnedFd]) -> None:
    """Send descriptors, which the caller keeps open, to an Inbox. Raises OSError, ProtocolError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.setblocking(False)
        sock.connect(os.fspath(path))
        send_packet(sock, msgspec.json.encode((device, nbytes)), [fd.fileno() for fd in fds])
