"""A daemon's side of the protocol on a real socket, scripted by the test."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weightcached.wire.framing import recv_packet, send_packet
from weightcached.wire.messages import (
    PROTOCOL_VERSION,
    CacheStatus,
    EngineStatus,
    Hello,
    Message,
    Request,
    StatusReply,
    Welcome,
    decode_request,
    encode,
)


@dataclass
class Packet:
    """Bytes and descriptors to send as they are; `then_close` ends the connection after them."""

    data: bytes
    fds: Sequence[int] = ()
    then_close: bool = False


@dataclass
class Silence:
    """Answer nothing until the peer leaves."""


Answer = Message | Packet | Silence
Script = Callable[[Request], Iterable[Answer]]


def welcome(device: str = "cpu0", protocol: int = PROTOCOL_VERSION) -> Welcome:
    return Welcome(protocol=protocol, device=device, pid=os.getpid(), software="weightcached 0.1.0")


@dataclass
class StubDaemon:
    """Listens on `path` from __enter__ on. `greeting` answers Hello, `script` the rest."""

    path: Path
    script: Script = lambda request: []
    greeting: Sequence[Answer] = ()
    requests: list[Request] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.path))
        self.path.chmod(0o600)
        self._listener.listen(8)
        self._peers: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        # The thread in accept() wakes up with EINVAL, those in recvmsg() with the end of the
        # connection.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for sock in (self._listener, *self._peers):
            sock.close()
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self._peers.append(peer)
            thread = threading.Thread(target=self._serve, args=(peer,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, peer: socket.socket) -> None:
        # The peer may leave at any time, which is its right.
        with contextlib.suppress(EOFError, OSError):
            while True:
                request = decode_request(recv_packet(peer, max_fds=0).data)
                self.requests.append(request)
                if isinstance(request, Hello):
                    answers: Iterable[Answer] = self.greeting or [welcome(self.path.stem)]
                else:
                    answers = self.script(request)
                for answer in answers:
                    if not _send(peer, answer):
                        peer.shutdown(socket.SHUT_RDWR)
                        return


def _send(peer: socket.socket, answer: Answer) -> bool:
    """Carry out one answer; whether the connection goes on."""
    if isinstance(answer, Silence):
        recv_packet(peer, max_fds=0)
        return False
    packet = answer if isinstance(answer, Packet) else Packet(encode(answer))
    if packet.data:
        send_packet(peer, packet.data, packet.fds)
    return not packet.then_close


def cache(name: str = "tiny/target", **changed: Any) -> CacheStatus:
    """A ready cache of 3 GiB with one engine."""
    fields: dict[str, object] = {
        "name": name,
        "role": "target",
        "state": "ready",
        "generation": 1,
        "source": "loaded",
        "bytes": 3 << 30,
        "segments": 3,
        "tensors": 40,
        "load_seconds": 12.34,
        "phase": "",
        "done_bytes": 0,
        "total_bytes": 0,
        "error": "",
        "engines": [EngineStatus(pid=4242, since=1700000100.5)],
    }
    return CacheStatus(**(fields | changed))  # type: ignore[arg-type]


def status(device: str = "cpu0", *caches: CacheStatus, **changed: object) -> StatusReply:
    fields: dict[str, object] = {
        "device": device,
        "pid": 77,
        "state": "ready",
        "since": 1700000000.25,
        "caches": list(caches),
        "software": "weightcached 0.1.0",
    }
    return StatusReply(**(fields | changed))  # type: ignore[arg-type]
