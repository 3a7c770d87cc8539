"""wire/framing.py for the event loop: the same packets on non-blocking sockets."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence

from weightcached.system.waits import readable, writable
from weightcached.wire.framing import Packet, recv_packet, send_packet

# How long a sender waits when too many descriptors of this user are in flight (unix(7),
# ETOOMANYREFS).
_IN_FLIGHT_RETRY_S = 0.05
_CONNECT_RETRY_S = 0.001


async def recv(sock: socket.socket, *, max_fds: int) -> Packet:
    """The next packet; raises as recv_packet() does. No deadline of its own."""
    # One turn of the loop per packet; otherwise a flooding peer would be the only one served.
    await asyncio.sleep(0)
    while True:
        try:
            return recv_packet(sock, max_fds=max_fds)
        except BlockingIOError:
            await readable(sock.fileno())


async def send(
    sock: socket.socket, data: bytes, fds: Sequence[int] = (), *, timeout_s: float
) -> None:
    """Send one packet; the caller keeps its descriptors. Raises TimeoutError, and as send_packet()."""
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                return send_packet(sock, data, fds)
            except BlockingIOError:
                await writable(sock.fileno())
            except OSError as e:
                if e.errno != errno.ETOOMANYREFS:
                    raise
                await asyncio.sleep(_IN_FLIGHT_RETRY_S)


async def connect(path: str, *, timeout_s: float) -> socket.socket:
    """A connection to the socket at `path`; the caller closes it. Raises TimeoutError, OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    sock.connect(path)
                    return sock
                except BlockingIOError:
                    # The listener's backlog is full, and nothing reports a free place. Other peers
                    # take places as soon as they are free.
                    await asyncio.sleep(_CONNECT_RETRY_S)
    except BaseException:
        sock.close()
        raise
