"""Packets on a SOCK_SEQPACKET socket: bytes and the descriptors that travel with them.

One message is one packet of at most 64 KiB with at most 250 descriptors. A message that does not
fit travels as a sealed memfd whose packet says so; that way a status of many engines or a key of
many shards has no special case, and a reader still never allocates more than MAX_LARGE_BYTES for a
peer. Blocking only in that the socket may be blocking: daemon/server.py calls the same functions on
non-blocking ones.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from weightcached.errors import ProtocolError
from weightcached.system.fds import OwnedFd, close_all, read_sealed, sealed_memfd, sealed_nbytes

# A connection that finds it full is refused at once, not kept waiting.
_BACKLOG = 128
MAX_PACKET_BYTES = 64 * 1024
# The kernel refuses more than 253 in one message (SCM_MAX_FD).
MAX_PACKET_FDS = 250
MAX_LARGE_BYTES = 16 * 1024 * 1024
# The daemon's limit for a request: room for a key of 4096 files. Decoding 16 MiB would take it 0.2
# s.
MAX_REQUEST_BYTES = 1024 * 1024
# Not a msgpack map or array, so it cannot begin a message.
_LARGE = b"\xc1large"
_T = TypeVar("_T")
_FD_BYTES = array.array("i").itemsize


class Packet(NamedTuple):
    """One received packet. The list owns the descriptors from the moment the kernel installed them."""

    data: bytes
    fds: list[OwnedFd]


def listen(path: Path) -> socket.socket:
    """A socket that takes connections, in a directory of this user alone. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        sock.bind(os.fspath(path))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def send_packet(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send one packet; the caller keeps its descriptors.

    Raises ProtocolError when the limits are exceeded, BlockingIOError on a full non-blocking socket
    (nothing is sent then), OSError from the socket otherwise.
    """
    if len(fds) > MAX_PACKET_FDS:
        raise ProtocolError(f"{len(fds)} descriptors in one packet, at most {MAX_PACKET_FDS} fit")
    if not data:
        raise ProtocolError("an empty packet cannot be told from the end of the connection")
    if len(data) <= MAX_PACKET_BYTES:
        _sendmsg(sock, data, fds)
        return
    if len(data) > MAX_LARGE_BYTES:
        raise ProtocolError(f"message of {len(data)} bytes, at most {MAX_LARGE_BYTES} are allowed")
    if fds:
        raise ProtocolError("a message larger than one packet cannot carry descriptors of its own")
    with sealed_memfd("weightcached-message", data) as large:
        _sendmsg(sock, _LARGE, [large.fileno()])


def _sendmsg(sock: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)


def recv_packet(sock: socket.socket, *, max_fds: int) -> Packet:
    """Receive one packet with at most `max_fds` descriptors, or a message of at most
    MAX_LARGE_BYTES in a memfd.

    Raises as recv_unread() and read_large() do.
    """
    packet = recv_unread(sock, max_fds=max_fds)
    return read_large(packet, max_nbytes=MAX_LARGE_BYTES) if is_large(packet) else packet


def is_large(packet: Packet) -> bool:
    """Whether the packet only says that its message is in the one descriptor that it carries."""
    return packet.data == _LARGE and len(packet.fds) == 1


def large_nbytes(packet: Packet, *, max_nbytes: int) -> int:
    """The length of a large packet's message. Raises ProtocolError if it is unsealed or too long."""
    return _of_memfd(sealed_nbytes, packet.fds[0], max_nbytes)


def read_large(packet: Packet, *, max_nbytes: int) -> Packet:
    """The message of a large packet, whose descriptor is closed. Raises as large_nbytes() does."""
    with packet.fds[0] as large:
        return Packet(_of_memfd(read_sealed, large, max_nbytes), [])


def _of_memfd(ask: Callable[..., _T], fd: OwnedFd, max_nbytes: int) -> _T:
    try:
        return ask(fd.fileno(), max_nbytes=max_nbytes)
    except ValueError as e:
        raise ProtocolError(f"message in a memfd: {e}") from e


def recv_unread(sock: socket.socket, *, max_fds: int) -> Packet:
    """Receive one packet as it is: is_large() tells whether there is more to read.

    Raises EOFError at the end of the connection, ProtocolError for anything cut off or out of
    limits (every descriptor that came is closed first), BlockingIOError on an empty non-blocking
    socket, OSError otherwise.
    """
    # Room for one more than allowed: then an excess has its own error, not only that of truncation.
    space = socket.CMSG_SPACE((min(max_fds, MAX_PACKET_FDS) + 1) * _FD_BYTES)
    data, ancillary, flags, _ = sock.recvmsg(MAX_PACKET_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    fds = _adopt(ancillary)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(fds)
        raise ProtocolError(
            "a packet was cut off: too many bytes or descriptors for this message, or more descriptors than this "
            "process may still open (LimitNOFILE=, ulimit -n)"
        )
    if not data:
        close_all(fds)
        if ancillary:
            raise ProtocolError("a packet without data carried descriptors")
        raise EOFError("the peer closed the connection")
    packet = Packet(data, fds)
    if len(fds) > max_fds and not is_large(packet):
        close_all(fds)
        raise ProtocolError(f"{len(fds)} descriptors came with a message that may carry {max_fds}")
    return packet


def _adopt(ancillary: list[tuple[int, int, bytes]]) -> list[OwnedFd]:
    fds: list[OwnedFd] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(payload[: len(payload) - len(payload) % _FD_BYTES])
            fds.extend(OwnedFd(n) for n in numbers)
    return fds
