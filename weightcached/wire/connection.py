"""One blocking connection to a daemon, with a deadline on every step: for weightcachectl and the
engine.

Checks its peer before it sends a byte. Knows nothing of the meaning of requests.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from os import getuid
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from weightcached import errors
from weightcached.errors import (
    ProtocolError,
    RuntimePathError,
    WeightcachedError,
    WeightCacheUnavailableError,
)
from weightcached.system.fds import OwnedFd, close_all
from weightcached.system.paths import check_socket
from weightcached.system.process import label_of_this_process, peer_credentials
from weightcached.wire.framing import MAX_PACKET_FDS, Packet, recv_packet, send_packet
from weightcached.wire.messages import (
    PROTOCOL_VERSION,
    Descriptors,
    Hello,
    Message,
    Refused,
    Reply,
    Welcome,
    decode_reply,
    encode,
)

Purpose = Literal["engine", "ctl", "self"]
_TIMEVAL = struct.Struct("ll")


def error_of(refused: Refused) -> WeightcachedError:
    """The error for a Refused: the class with its code, or the base class for an unknown code."""
    classes = {
        c.code: c
        for c in vars(errors).values()
        if isinstance(c, type) and issubclass(c, WeightcachedError)
    }
    error = classes.get(refused.code, WeightcachedError)(refused.message)
    error.code = refused.code
    return error


class Connection:
    """A connection that was welcomed. Not for several threads at once.

    `welcome` is the daemon's first answer. After an error other than a missed deadline of receive()
    the connection is closed, because a later packet could be the answer to an earlier request.
    """

    def __init__(self, sock: socket.socket, path: Path, welcome: Welcome) -> None:
        self._sock = sock
        self._path = path
        self.welcome = welcome

    @classmethod
    def connect(cls, path: Path, *, timeout_s: float, purpose: Purpose, software: str = "") -> Self:
        """Connect to the daemon's socket at `path` and shake hands within `timeout_s` seconds.

        Raises WeightCacheUnavailableError if no daemon answers, RuntimePathError if socket or peer
        belong to another user, ProtocolError if the daemon speaks another version, and the error of
        a Refused.
        """
        deadline_s = time.monotonic() + timeout_s
        check_socket(path)
        sock = _open_socket(path, timeout_s)
        try:
            _check_peer(sock, path)
            half = cls(sock, path, Welcome(protocol=PROTOCOL_VERSION, device="?", pid=0))
            hello = Hello(
                protocol=PROTOCOL_VERSION,
                software=software,
                purpose=purpose,
                label=label_of_this_process() if purpose == "engine" else "",
            )
            half.welcome = _check_welcome(
                half.request(hello, max(deadline_s - time.monotonic(), 0.001)), path
            )
        except BaseException:
            sock.close()
            raise
        return half

    def request(self, message: Message, timeout_s: float) -> Reply:
        """Send a request, wait for its first reply or Refused. A missed deadline closes this."""
        with self._close_on_error():
            self.send(message, timeout_s)
            return self.receive(timeout_s)[0]

    def send(self, message: Message, timeout_s: float) -> None:
        """Send a message. Raises WeightCacheUnavailableError, ProtocolError."""
        self._sock.settimeout(timeout_s)
        try:
            send_packet(self._sock, encode(message))
        except TimeoutError as e:
            raise self._timeout_error(timeout_s) from e
        except (BrokenPipeError, ConnectionResetError):
            # A daemon that refuses a connection answers and closes at once: receive() reads that
            # answer, or the end.
            pass
        except OSError as e:
            raise WeightCacheUnavailableError(
                f"sending to the daemon on {self._path} failed: {e.strerror}",
                code="connection-lost",
            ) from e

    def receive(self, timeout_s: float, max_fds: int = 0) -> tuple[Reply, list[OwnedFd]]:
        """Wait for the next message, with at most `max_fds` descriptors, which the caller closes.

        Raises WeightCacheUnavailableError at the deadline (the connection stays open then) and when
        the daemon is gone, ProtocolError for anything but a reply.
        """
        packet = self._receive_packet(timeout_s, max_fds)
        try:
            return decode_reply(packet.data), packet.fds
        except BaseException:
            close_all(packet.fds)
            raise

    def receive_descriptors(self, count: int, timeout_s: float) -> list[OwnedFd]:
        """Collect `count` descriptors from Descriptors packets, in order; all of them or none.

        The caller closes them. Raises as receive() does, and ProtocolError when a packet is
        missing, doubled, empty or carries more than asked for; every descriptor is closed and the
        connection too then.
        """
        deadline_s = time.monotonic() + timeout_s
        fds: list[OwnedFd] = []
        try:
            while len(fds) < count:
                left_s = max(deadline_s - time.monotonic(), 0.001)
                reply, more = self.receive(left_s, min(count - len(fds), MAX_PACKET_FDS))
                first = len(fds)
                fds.extend(more)
                _check_numbering(reply, first, len(more), count)
        except BaseException:
            close_all(fds)
            self.close()
            raise
        return fds

    def fileno(self) -> int:
        """The socket, for select() and the like; -1 once closed."""
        return self._sock.fileno()

    def close(self) -> None:
        """End the connection, and with it any lease. May be called twice."""
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def _receive_packet(self, timeout_s: float, max_fds: int) -> Packet:
        self._sock.settimeout(timeout_s)
        try:
            try:
                return recv_packet(self._sock, max_fds=max_fds)
            except ConnectionResetError:
                # Reported once, ahead of packets that the daemon sent before it closed.
                return recv_packet(self._sock, max_fds=max_fds)
        except TimeoutError as e:
            raise self._timeout_error(timeout_s) from e
        except ProtocolError:
            self.close()
            raise
        except (EOFError, OSError) as e:
            self.close()
            raise WeightCacheUnavailableError(
                f"the daemon on {self._path} closed the connection", code="connection-lost"
            ) from e

    def _timeout_error(self, timeout_s: float) -> WeightCacheUnavailableError:
        return WeightCacheUnavailableError(
            f"the daemon on {self._path} did not answer within {timeout_s:.1f} s", code="timeout"
        )

    @contextmanager
    def _close_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


def _open_socket(path: Path, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        # A non-blocking connect() to a full backlog fails at once; a blocking one waits for as long
        # as SO_SNDTIMEO.
        whole_s, part_s = divmod(max(timeout_s, 0.001), 1)
        sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(whole_s), int(part_s * 1e6))
        )
        sock.connect(str(path))
    except BaseException as e:
        sock.close()
        if isinstance(e, OSError):
            raise _connect_error(path, timeout_s, e) from e
        raise
    return sock


def _connect_error(path: Path, timeout_s: float, e: OSError) -> WeightCacheUnavailableError:
    if isinstance(e, BlockingIOError):
        return WeightCacheUnavailableError(
            f"the daemon on {path} accepted no connection within {timeout_s:.1f} s", code="timeout"
        )
    if isinstance(e, ConnectionRefusedError):
        return WeightCacheUnavailableError(
            f"no weightcached daemon listens on {path}, which a dead one left behind: "
            f"systemctl --user start weightcached@{path.stem}.service",
            code="no-daemon",
        )
    return WeightCacheUnavailableError(
        f"cannot connect to {path}: {e.strerror}", code="unreachable"
    )


def _check_peer(sock: socket.socket, path: Path) -> None:
    try:
        uid = peer_credentials(sock).uid
    except OSError as e:
        raise RuntimePathError(
            f"cannot tell who listens on {path}: {e}; refusing to talk to it"
        ) from e
    if uid != getuid():
        raise RuntimePathError(
            f"the daemon on {path} runs as uid {uid}, expected {getuid()}: refusing to talk to it"
        )


def _check_welcome(reply: Reply, path: Path) -> Welcome:
    if isinstance(reply, Refused):
        raise error_of(reply)
    if not isinstance(reply, Welcome):
        raise ProtocolError(
            f"the daemon on {path} answered Hello with {type(reply).__name__}, expected Welcome"
        )
    if reply.protocol != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the daemon on {path} ({reply.software or 'unknown version'}) speaks protocol {reply.protocol}, this "
            f"software speaks {PROTOCOL_VERSION}: bring both to the same weightcached version and restart the unit",
            code="protocol-version",
        )
    return reply


def _check_numbering(reply: Reply, first: int, received: int, count: int) -> None:
    if not isinstance(reply, Descriptors):
        raise ProtocolError(
            f"{type(reply).__name__} came after {first} of {count} descriptors, expected Descriptors"
        )
    if reply.first != first or not received:
        raise ProtocolError(
            f"a packet of {received} descriptors says that it begins at number {reply.first}, "
            f"expected {first} of {count}"
        )
