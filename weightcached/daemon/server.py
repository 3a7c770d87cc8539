"""The listening socket: accept peers, refuse strangers and crowds, give each of the others a
Session.

Owns the socket and the connections. session.py handles requests, fairness.py decides whose turn it
is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from weightcached.daemon import packets, untrusted_fds
from weightcached.daemon.fairness import CLOSE_UNITS, GREETING_UNITS, Queues, Ticket
from weightcached.daemon.peers import Peer, PeerRefusedError, identify
from weightcached.daemon.session import Session
from weightcached.errors import ProtocolError
from weightcached.system.waits import end_tasks, first_of, readable
from weightcached.wire.framing import send_packet
from weightcached.wire.messages import (
    PROTOCOL_VERSION,
    Hello,
    Message,
    Welcome,
    decode_reply,
    encode,
    refusal,
)

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
# Not for peers: to start a loader (10), for our own handshake (3), to reach the descriptor store
# (3), and as many again for files that libraries open for a moment.
_RESERVED_DESCRIPTORS = 32
# Out of descriptors or memory: open connections are served, new peers wait in the backlog.
_ACCEPT_PAUSE_S = 0.2
# So many are taken from the backlog before others get a turn: each costs little, and nobody can be
# served in it.
_ACCEPT_AT_ONCE = 32
_MAKE_ROOM_TIMEOUT_S = 0.1
_MAX_CLOSING = 512
HANDSHAKE_ERRORS = (OSError, TimeoutError, EOFError, ProtocolError)


class _Connection(NamedTuple):
    """One that is served. `session` tells whether it holds a lease."""

    peer: Peer
    session: Session


class Server:
    """Serves every connection of `listener` in its own task. open_session: makes a peer's Session."""

    def __init__(
        self,
        listener: socket.socket,
        open_session: Callable[[socket.socket, Peer], Session],
        queues: Queues,
    ) -> None:
        self._listener = listener
        self._open_session = open_session
        self._queues = queues
        # In the order in which they came.
        self._connections: dict[asyncio.Task[None], _Connection] = {}
        # Connections by pid.
        self._of_process: Counter[int] = Counter()
        # Connections that are over, but for descriptors in them that may take their time to close.
        self._closing: set[asyncio.Future[None]] = set()
        # The kernel gives the lowest free number, so a number tells how many are taken.
        self._first_reserved = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _RESERVED_DESCRIPTORS
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._accepting = asyncio.create_task(self._accept())

    async def accept_on(self, listener: socket.socket) -> None:
        """From now on, new peers come by another socket. Those who are connected stay."""
        await self.stop_accepting()
        self._listener = listener
        self.start()

    async def stop_accepting(self) -> None:
        if self._accepting is not None:
            await end_tasks(self._accepting)
        self._listener.close()

    async def close_connections(self) -> None:
        await end_tasks(*self._connections)

    async def _accept(self) -> None:
        at_once = 0
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                at_once = 0
                await readable(self._listener.fileno())
            except ConnectionAbortedError:
                continue
            except OSError as e:
                log.warning(
                    "cannot accept, pausing error=%s connections=%d",
                    e.strerror,
                    len(self._connections),
                )
                await asyncio.sleep(_ACCEPT_PAUSE_S)
            else:
                if len(self._closing) >= _MAX_CLOSING:
                    await first_of(*self._closing)
                await self._welcome(sock)
                at_once = (at_once + 1) % _ACCEPT_AT_ONCE
                if at_once == 0:
                    # A flood of connections must leave turns to those who are connected.
                    await asyncio.sleep(0)

    async def _welcome(self, sock: socket.socket) -> None:
        """Serve the connection from now on, or refuse it."""
        sock.setblocking(False)
        try:
            peer = identify(sock)
        except PeerRefusedError as e:
            log.warning("peer refused reason=%s", e)
            self._refuse(sock, Ticket(self._queues, 0), refusal("peer", str(e)))
            return
        ticket = Ticket(self._queues, peer.process)
        if untrusted_fds.has_left(sock):
            # Most of those that a flood left in the backlog.
            self._hang_up(sock, ticket)
            return
        limit = self._find_limit(sock)
        # Our own handshake is let in always: peers that fill the table must not make the watchdog
        # bite.
        if limit and peer.pid != os.getpid() and not await self._make_room(peer):
            log.warning(
                "peer refused pid=%d reason=busy connections=%d", peer.pid, len(self._connections)
            )
            message = f"this daemon has {limit}: close some, then try again"
            self._refuse(sock, ticket, refusal("busy", message))
            return
        peer.follow(sock)
        session = self._open_session(sock, peer)
        task = asyncio.create_task(self._serve(sock, peer, session, ticket))
        self._connections[task] = _Connection(peer, session)
        self._of_process[peer.process] += 1
        task.add_done_callback(self._forget_connection)

    def _forget_connection(self, task: asyncio.Task[None]) -> None:
        process = self._connections.pop(task).peer.process
        self._of_process[process] -= 1
        if not self._of_process[process]:
            del self._of_process[process]

    def _find_limit(self, sock: socket.socket) -> str:
        """Why one more connection is too many, or ""."""
        if len(self._connections) >= MAX_CONNECTIONS:
            return f"{MAX_CONNECTIONS} connections, the maximum"
        if sock.fileno() >= self._first_reserved:
            allowed = "the maximum for its limit of open files (LimitNOFILE=, ulimit -n)"
            return f"{len(self._connections)} connections, {allowed}"
        return ""

    async def _make_room(self, newcomer: Peer) -> bool:
        """Make room: end one connection of the process that has the most, if `newcomer` has fewer.

        It ends the last one that has no lease.
        """
        greediest, count = max(self._of_process.items(), key=lambda item: item[1], default=(0, 0))
        if count <= self._of_process[newcomer.process] + 1:
            return False
        for task, connection in reversed(self._connections.items()):
            if (
                connection.peer.process == greediest
                and not connection.session.is_needed
                and not task.cancelling()
            ):
                log.warning("connection ended to make room pid=%d connections=%d", greediest, count)
                task.cancel()
                ended, _ = await asyncio.wait({task}, timeout=_MAKE_ROOM_TIMEOUT_S)
                return bool(ended)
        return False

    def _refuse(self, sock: socket.socket, ticket: Ticket, message: Message) -> None:
        with contextlib.suppress(OSError):
            send_packet(sock, encode(message))
        self._hang_up(sock, ticket)

    def _hang_up(self, sock: socket.socket, ticket: Ticket) -> None:
        closing = untrusted_fds.hang_up(sock, ticket)
        if closing is not None:
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _serve(
        self, sock: socket.socket, peer: Peer, session: Session, ticket: Ticket
    ) -> None:
        try:
            await ticket.turn(GREETING_UNITS)
            await self._run_session(peer, session, ticket)
        finally:
            peer.close()
            self._hang_up(sock, ticket)

    async def _run_session(self, peer: Peer, session: Session, ticket: Ticket) -> None:
        talk = asyncio.create_task(session.run())
        try:
            # The peer's death shows in its pidfd even while other processes hold its socket open.
            await first_of(talk, *([readable(peer.pidfd.fileno())] if peer.pidfd else []))
            # Hundreds may end at once, with their process.
            await ticket.turn(CLOSE_UNITS)
            _log_end(peer, talk)
        finally:
            await end_tasks(talk)


def _log_end(peer: Peer, session: asyncio.Task[None]) -> None:
    if not session.done():
        log.info("peer died pid=%d", peer.pid)
        return
    error = session.exception()
    if isinstance(error, ProtocolError):
        log.warning("peer broke the protocol pid=%d error=%s", peer.pid, error)
    elif isinstance(error, TimeoutError):
        log.info("peer kept us waiting, closed pid=%d", peer.pid)
    elif error is None or isinstance(error, EOFError | OSError):
        log.debug("peer left pid=%d", peer.pid)
    else:
        log.error("session failed pid=%d", peer.pid, exc_info=error)


async def shake_hands(path: Path, *, timeout_s: float) -> None:
    """Go through our own socket as an engine would, up to Welcome. Raises HANDSHAKE_ERRORS."""
    async with asyncio.timeout(timeout_s):
        with await packets.connect(str(path), timeout_s=timeout_s) as sock:
            hello = encode(Hello(protocol=PROTOCOL_VERSION, purpose="self"))
            await packets.send(sock, hello, timeout_s=timeout_s)
            reply = decode_reply((await packets.recv(sock, max_fds=0)).data)
            if not isinstance(reply, Welcome):
                raise ProtocolError(f"our own socket answers {type(reply).__name__}")
            if reply.pid != os.getpid():
                raise ProtocolError(f"another daemon, pid {reply.pid}, answers on our socket")
