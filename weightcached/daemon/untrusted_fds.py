"""Receive, read and close descriptors of peers without blocking the event loop.

If a descriptor is the last one of a lingering socket, or of a file on a dead network mount, closing
it takes as long as its sender likes. The kernel closes it in the thread that receives the packet
with it, or that closes the connection on which the packet still waits. So packets with descriptors
are handled in a thread of their own.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import re
import socket
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from weightcached.daemon.fairness import Ticket
from weightcached.system.waits import readable
from weightcached.wire.framing import (
    MAX_PACKET_BYTES,
    Packet,
    is_large,
    large_nbytes,
    read_large,
    recv_packet,
    recv_unread,
)

_T = TypeVar("_T")
_QUEUED = re.compile(rb"^scm_fds:\s*([0-9]+)$", re.MULTILINE)


async def recv(
    sock: socket.socket,
    ticket: Ticket,
    *,
    max_large_bytes: int,
) -> Packet:
    """The next packet, or the message in a memfd that it stands for, once it is there and its turn
    has come.

    Until then it stays in the socket, and a message that is longer than a packet in its memfd.
    Raises as recv_packet() does.
    """
    while True:
        await readable(sock.fileno())
        await ticket.turn()
        try:
            if not _carries_descriptors(sock):
                return recv_packet(sock, max_fds=0)
            await ticket.descriptors_turn()
            # Its own descriptor: the connection may be given up meanwhile.
            ours = sock.dup()
            packet = await _in_thread(partial(_recv_and_close, ours, max_large_bytes))
        except BlockingIOError:
            continue
        if not is_large(packet):
            return packet
        with packet.fds[0]:
            await ticket.large_turn()
            return read_large(packet, max_nbytes=max_large_bytes)


def _carries_descriptors(sock: socket.socket) -> bool:
    """Whether descriptors are with the next packet. A look does not take them over."""
    _, _, flags, _ = sock.recvmsg(1, 0, socket.MSG_PEEK)
    return bool(flags & socket.MSG_CTRUNC)


def _recv_and_close(ours: socket.socket, max_large_bytes: int) -> Packet:
    """One packet. Its only descriptor may be a sealed memfd, which takes no time to close."""
    with ours:
        packet = recv_unread(ours, max_fds=0)
        if not is_large(packet):
            return packet
        with contextlib.ExitStack() as stack:
            stack.callback(packet.fds[0].close)
            if large_nbytes(packet, max_nbytes=max_large_bytes) > MAX_PACKET_BYTES:
                stack.pop_all()
                return packet
            return read_large(packet, max_nbytes=max_large_bytes)


def has_left(sock: socket.socket) -> bool:
    """Whether the peer is gone and has said nothing."""
    try:
        data, _, flags, _ = sock.recvmsg(1, 0, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return not data and not flags & socket.MSG_CTRUNC


def hang_up(sock: socket.socket, ticket: Ticket) -> asyncio.Future[None] | None:
    """Close a connection so that the peer can still read our last answer. Returns a future or None.

    Unread data at close() would give the peer ECONNRESET in place of the last answer. Its data is
    thrown away, and its sends fail with EPIPE from here on.
    """
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RD)
    # Nothing can be added any more.
    if _queued_descriptors(sock) == 0:
        _drain_and_close(sock)
        return None
    return asyncio.ensure_future(_hang_up_in_turn(sock, ticket))


async def _hang_up_in_turn(sock: socket.socket, ticket: Ticket) -> None:
    await ticket.close_turn()
    await _in_thread(partial(_drain_and_close, sock))


def _queued_descriptors(sock: socket.socket) -> int | None:
    """The number of descriptors that wait in the socket; None on kernels before 5.13."""
    try:
        with open(f"/proc/self/fdinfo/{sock.fileno()}", "rb", buffering=0) as f:
            found = _QUEUED.search(f.read(4096))
    except OSError:
        return None
    return int(found[1]) if found else None


def _drain_and_close(sock: socket.socket) -> None:
    with sock, contextlib.suppress(OSError):
        # Ends at b"". Descriptors among it are closed by the kernel.
        while sock.recv(1):
            pass


async def _in_thread(work: Callable[[], _T]) -> _T:
    """Run work that may never end, in a thread that does not hold up the end of the process."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as e:
            error = e
        # The loop may have ended.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, error)

    # Not a threading.Thread: its start() waits for the thread to run, and on a busy machine that
    # takes its time.
    _thread.start_new_thread(run, ())
    return await done
