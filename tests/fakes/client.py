"""A peer of the daemon in a few blocking lines, which can also be silent, wrong or hostile."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self, TypeVar

from weightcached.index.key import WeightCacheKey
from weightcached.system.fds import OwnedFd, close_all
from weightcached.wire.framing import recv_packet, send_packet
from weightcached.wire.messages import (
    PROTOCOL_VERSION,
    Attach,
    Descriptors,
    Hello,
    Message,
    Progress,
    Ready,
    Reload,
    ReloadReply,
    Reply,
    Status,
    StatusReply,
    Welcome,
    decode_reply,
    encode,
)

# Nothing is held to it: a machine may be busy.
ANSWER_TIMEOUT_S = 120.0
_R = TypeVar("_R", bound=Message)


class Handout:
    """A generation as an engine receives it."""

    def __init__(self, ready: Ready, fds: list[OwnedFd]) -> None:
        self.ready = ready
        self.index_fd, *self.segment_fds = fds

    def close(self) -> None:
        close_all([self.index_fd, *self.segment_fds])


class Client:
    def __init__(self, path: Path, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Blocking, as the real one: with a timeout of Python's, connect() to a full backlog fails
        # at once.
        self.sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(timeout_s), 0)
        )
        try:
            self.sock.connect(str(path))
        except BaseException:
            self.sock.close()
            raise
        self.sock.settimeout(timeout_s)

    @classmethod
    def welcome(cls, path: Path, purpose: Literal["engine", "ctl", "self"] = "engine") -> Self:
        client = cls(path)
        try:
            client.expect(Hello(protocol=PROTOCOL_VERSION, purpose=purpose), Welcome)
        except BaseException:
            client.close()
            raise
        return client

    def send(self, message: Message) -> None:
        self.send_raw(encode(message))

    def send_raw(self, data: bytes, fds: Sequence[int] = ()) -> None:
        send_packet(self.sock, data, fds)

    def receive(self) -> Reply:
        """The next message; raises EOFError once the daemon has closed the connection."""
        return decode_reply(recv_packet(self.sock, max_fds=0).data)

    def ask(self, message: Message) -> Reply:
        # One that is refused may be hung up on before it has asked; the refusal can still be read.
        with contextlib.suppress(BrokenPipeError):
            self.send(message)
        return self.receive()

    def expect(self, message: Message, kind: type[_R]) -> _R:
        reply = self.ask(message)
        assert isinstance(reply, kind), reply
        return reply

    def status(self) -> StatusReply:
        return self.expect(Status(), StatusReply)

    def attach(self, key: WeightCacheKey) -> Handout:
        """Attach, waiting while it loads."""
        reply = self.ask(Attach(key=key))
        while type(reply).__name__ == "Loading":
            reply = self.receive()
        assert isinstance(reply, Ready), reply
        return self.take(reply)

    def take(self, ready: Ready) -> Handout:
        """The descriptors that follow a Ready."""
        fds: list[OwnedFd] = []
        while len(fds) < ready.descriptors:
            packet = recv_packet(self.sock, max_fds=250)
            message = decode_reply(packet.data)
            assert isinstance(message, Descriptors), message
            assert message.first == len(fds)
            fds += packet.fds
        return Handout(ready, fds)

    def closed_by_daemon(self) -> bool:
        """Wait for the end of the connection; False if something else comes first."""
        try:
            recv_packet(self.sock, max_fds=250)
        except (EOFError, ConnectionError):
            return True
        return False

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def reload(path: Path) -> int:
    """ExecReload= in the units of the tests: reload, wait, fail if any cache failed."""
    with Client.welcome(path, "ctl") as client:
        reply = client.ask(Reload())
        while isinstance(reply, Progress):
            reply = client.receive()
    assert isinstance(reply, ReloadReply), reply
    return int(bool(reply.error) or any(outcome.outcome == "failed" for outcome in reply.outcomes))


if __name__ == "__main__":
    sys.exit(reload(Path(sys.argv[1])))
