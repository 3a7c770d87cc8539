"""Questions between a supervisor and its engines, asked and answered on the event loop.

Replies may come in any order, and every question has a deadline: without an answer the engine
hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from weightcached.errors import EngineError, ProtocolError, WeightcachedError
from weightcached.system.fds import OwnedFd, close_all
from weightcached.system.waits import readable
from weightcached.wire.framing import recv_packet, send_packet
from weightcached.wire.services import Reply, Request

_MAX_FDS = 1


class Peer:
    """The other end of one connection. gone: set at its end, whatever the reason."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()


Handler = Callable[[str, dict[str, Any], Peer], Awaitable[tuple[dict[str, Any], int | None]]]


class ControlServer:
    """Answers requests on a listening socket, each in its own task, so that a long one blocks none."""

    def __init__(self, sock: socket.socket, handler: Handler) -> None:
        """handler: returns a result and a descriptor to send; its EngineError is sent to the peer."""
        self._sock = sock
        self._handler = handler
        self._tasks: set[asyncio.Task[None]] = set()
        self._keep(self._accept())

    def _keep(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        with self._sock:
            while True:
                await readable(self._sock.fileno())
                try:
                    peer, _ = self._sock.accept()
                except (BlockingIOError, ConnectionError):
                    continue
                except OSError:
                    # Out of descriptors: others must be closed first.
                    await asyncio.sleep(0.1)
                    continue
                peer.setblocking(False)
                self._keep(self._talk(peer))

    async def _talk(self, sock: socket.socket) -> None:
        peer = Peer()
        try:
            with sock:
                while True:
                    try:
                        packet = recv_packet(sock, max_fds=0)
                        request = msgspec.json.decode(packet.data, type=Request)
                    except BlockingIOError:
                        await readable(sock.fileno())
                        continue
                    except (EOFError, OSError, ProtocolError, msgspec.MsgspecError):
                        return
                    self._keep(self._answer(sock, peer, request))
        finally:
            peer.gone.set()

    async def _answer(self, sock: socket.socket, peer: Peer, request: Request) -> None:
        fd = None
        try:
            result, fd = await self._handler(request.command, request.arguments, peer)
            data = msgspec.json.encode(Reply(number=request.number, result=result))
        except WeightcachedError as e:
            data = msgspec.json.encode(Reply(number=request.number, error=str(e)))
        except Exception as e:
            reason = f"{type(e).__name__}: {e}"
            data = msgspec.json.encode(Reply(number=request.number, error=reason))
        # Nobody waits for the reply of a peer that has gone, nor of one that reads none.
        with contextlib.suppress(OSError, ProtocolError):
            send_packet(sock, data, [] if fd is None else [fd])

    def close(self) -> None:
        """Take no more requests.

        Each task closes its own socket after it has stopped waiting on it, because another socket
        could get the number.
        """
        for task in self._tasks:
            task.cancel()


class Link:
    """A connection on which questions are asked, several at a time."""

    def __init__(self, path: Path) -> None:
        """Connect. Raises EngineError if nobody listens."""
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._sock.setblocking(False)
            self._sock.connect(os.fspath(path))
        except OSError as e:
            self._sock.close()
            raise EngineError(f"cannot reach {path}: {e.strerror or e}") from e
        self._waiting: dict[int, asyncio.Future[tuple[Reply, list[OwnedFd]]]] = {}
        self._numbers = 0
        self._reader = asyncio.ensure_future(self._read())
        # Called even if it is cancelled before its first step.
        self._reader.add_done_callback(self._end)

    async def _read(self) -> None:
        while True:
            try:
                packet = recv_packet(self._sock, max_fds=_MAX_FDS)
            except BlockingIOError:
                await readable(self._sock.fileno())
                continue
            reply = msgspec.json.decode(packet.data, type=Reply)
            waiting = self._waiting.pop(reply.number, None)
            if waiting is None or waiting.done():
                close_all(packet.fds)
            else:
                waiting.set_result((reply, packet.fds))

    def _end(self, reader: asyncio.Future[None]) -> None:
        """No reply comes any more: whoever waits for one must not wait until the deadline."""
        self._sock.close()
        error = None if reader.cancelled() else reader.exception()
        reason = str(error or "") or "the connection was closed"
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineError(f"no answer: {reason}"))
        self._waiting.clear()

    async def ask(self, command: str, *, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """The result of `command`. Raises EngineError, TimeoutError."""
        result, fds = await self.ask_for_fd(command, timeout_s=timeout_s, **arguments)
        close_all(fds)
        return result

    async def ask_for_fd(
        self, command: str, *, timeout_s: float, **arguments: Any
    ) -> tuple[dict[str, Any], list[OwnedFd]]:
        """The same, with the descriptors that came with the reply."""
        if self._reader.done():
            raise EngineError("no answer: the connection was closed")
        self._numbers += 1
        number = self._numbers
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            request = Request(number=number, command=command, arguments=arguments)
            send_packet(self._sock, msgspec.json.encode(request))
            async with asyncio.timeout(timeout_s):
                reply, fds = await future
        except BlockingIOError as e:
            raise TimeoutError from e
        except OSError as e:
            if isinstance(e, TimeoutError):
                raise
            raise EngineError(f"no answer: {e.strerror or e}") from e
        finally:
            self._waiting.pop(number, None)
        if reply.error:
            close_all(fds)
            raise EngineError(reply.error)
        return reply.result, fds

    def close(self) -> None:
        """Ask no more, and wait for no reply. The socket is closed once nobody waits on it."""
        self._reader.cancel()
