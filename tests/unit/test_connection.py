"""The client: untrusted daemons, deadlines, and descriptors that come all or not at all."""

from __future__ import annotations

import gc
import os
import re
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import limits
from tests.fakes.daemon import BOUND_S
from tests.fakes.stub_daemon import Answer, Packet, Silence, StubDaemon, status, welcome
from weightcached import errors
from weightcached.errors import (
    DeviceBusyError,
    ProtocolError,
    RuntimePathError,
    WeightcachedError,
    WeightCacheUnavailableError,
)
from weightcached.system.fds import close_all
from weightcached.wire.connection import Connection, error_of
from weightcached.wire.messages import Descriptors, Done, Refused, Status, encode

TIMEOUT_S = BOUND_S
SHORT_S = 0.1


@pytest.fixture
def path(tmp_path: Path) -> Path:
    directory = tmp_path / "weightcached"
    directory.mkdir(mode=0o700)
    return directory / "cpu0.sock"


def open_descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@pytest.fixture(autouse=True)
def no_descriptor_leaks() -> Iterator[None]:
    # What earlier tests left for the collector is theirs.
    gc.collect()
    before = open_descriptors()
    yield
    gc.collect()
    assert open_descriptors() == before


def connect(path: Path, timeout_s: float = TIMEOUT_S) -> Connection:
    return Connection.connect(path, timeout_s=timeout_s, purpose="ctl", software="test")


def refused(path: Path, kind: type[WeightcachedError], *, timeout_s: float = TIMEOUT_S) -> str:
    with pytest.raises(kind) as caught:
        connect(path, timeout_s)
    assert type(caught.value) is kind
    return str(caught.value).replace(str(path.parent), "DIR")


def test_handshake_tells_who_answers(path: Path) -> None:
    with StubDaemon(path) as daemon, connect(path) as connection:
        assert connection.welcome == welcome()
        assert [type(request).__name__ for request in daemon.requests] == ["Hello"]
        assert (daemon.requests[0].software, daemon.requests[0].purpose) == ("test", "ctl")  # type: ignore[union-attr]


def test_request_gets_its_reply(path: Path) -> None:
    with StubDaemon(path, lambda request: [status()]), connect(path) as connection:
        assert connection.request(Status(), TIMEOUT_S) == status()


def test_refusal_of_a_request_is_a_reply(path: Path) -> None:
    no = Refused(code="key-mismatch", message="no")
    with StubDaemon(path, lambda request: [no]), connect(path) as connection:
        assert connection.request(Status(), TIMEOUT_S) == no
        assert connection.request(Status(), TIMEOUT_S) == no


def test_no_socket_names_the_command_that_starts_the_daemon(path: Path) -> None:
    text = "no weightcached daemon listens on DIR/cpu0.sock: systemctl --user start weightcached@cpu0.service"
    assert refused(path, WeightCacheUnavailableError) == text


def test_dead_socket_is_told_from_no_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
    assert refused(path, WeightCacheUnavailableError) == (
        "no weightcached daemon listens on DIR/cpu0.sock, which a dead one left behind: "
        "systemctl --user start weightcached@cpu0.service"
    )


def test_socket_of_another_type_is_unavailable(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen()
        text = "cannot connect to DIR/cpu0.sock: Protocol wrong type for socket"
        assert refused(path, WeightCacheUnavailableError) == text


def test_link_to_a_socket_is_refused(path: Path) -> None:
    with StubDaemon(path.with_name("cpu1.sock")):
        path.symlink_to("cpu1.sock")
        text = "DIR/cpu0.sock is not a socket (symbolic links are refused): remove it"
        assert refused(path, RuntimePathError) == text


def test_directory_open_to_others_is_refused(path: Path) -> None:
    with StubDaemon(path):
        path.parent.chmod(0o755)
        text = "runtime directory DIR has mode 0755, expected 0700: chmod 700 DIR"
        assert refused(path, RuntimePathError) == text


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_peer_of_another_user_is_refused(path: Path) -> None:
    """The kernel records the caller of listen(): here another user, on a socket of root."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        pid = os.fork()
        if pid == 0:
            os.setuid(65534)
            listener.listen()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        text = f"the daemon on DIR/cpu0.sock runs as uid 65534, expected {os.getuid()}: refusing to talk to it"
        assert refused(path, RuntimePathError) == text


def test_peer_whose_user_cannot_be_read_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Blind(socket.socket):
        def getsockopt(self, *args: int) -> bytes:  # type: ignore[override]
            return b""

    with StubDaemon(path):
        monkeypatch.setattr(socket, "socket", Blind)
        text = "cannot tell who listens on DIR/cpu0.sock: SO_PEERCRED gave 0 bytes; refusing to talk to it"
        assert refused(path, RuntimePathError) == text


def test_daemon_that_accepts_nobody_is_given_up_on(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.bind(str(path))
        deaf.listen(0)
        waiting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with waiting:
            waiting.connect(str(path))
            text = "the daemon on DIR/cpu0.sock accepted no connection within 0.1 s"
            assert refused(path, WeightCacheUnavailableError, timeout_s=SHORT_S) == text


def test_daemon_that_does_not_greet_is_given_up_on(path: Path) -> None:
    with StubDaemon(path, greeting=[Silence()]):
        text = "the daemon on DIR/cpu0.sock did not answer within 0.1 s"
        assert refused(path, WeightCacheUnavailableError, timeout_s=SHORT_S) == text


def test_daemon_that_closes_at_once_is_unavailable(path: Path) -> None:
    with StubDaemon(path, greeting=[Packet(b"", then_close=True)]):
        text = "the daemon on DIR/cpu0.sock closed the connection"
        assert refused(path, WeightCacheUnavailableError) == text


def test_refusal_is_read_though_the_daemon_closed_before_it_read_hello(path: Path) -> None:
    """As a daemon at its limit of connections: it never reads, so the kernel reports a reset first."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        pid = os.fork()
        if pid == 0:
            peer, _ = listener.accept()
            peer.send(encode(Refused(code="unavailable", message="too many connections")))
            peer.recv(1, socket.MSG_PEEK)
            peer.close()
            os._exit(0)
        assert refused(path, WeightCacheUnavailableError) == "too many connections"
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize(
    ("greeting", "kind", "text"),
    [
        (
            welcome(protocol=2),
            ProtocolError,
            "the daemon on DIR/cpu0.sock (weightcached 0.1.0) speaks protocol 2, this software speaks 1: "
            "bring both to the same weightcached version and restart the unit",
        ),
        (
            Done(),
            ProtocolError,
            "the daemon on DIR/cpu0.sock answered Hello with Done, expected Welcome",
        ),
        (Refused(code="device-busy", message="busy"), DeviceBusyError, "busy"),
        (Refused(code="made-up-later", message="new"), WeightcachedError, "new"),
        (
            Packet(b"\xc1"),
            ProtocolError,
            "message does not decode: MessagePack data is malformed: invalid opcode '\\xc1' (byte 0)",
        ),
    ],
)
def test_wrong_greeting_is_named(
    path: Path, greeting: Answer, kind: type[WeightcachedError], text: str
) -> None:
    with StubDaemon(path, greeting=[greeting]):
        assert refused(path, kind) == text


def test_every_code_names_one_class() -> None:
    classes = [
        c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, WeightcachedError)
    ]
    assert len({c.code for c in classes}) == len(classes)
    assert [type(error_of(Refused(code=c.code, message="x"))) for c in classes] == classes
    assert [error_of(Refused(code=code, message="x")).code for code in ("key-mismatch", "new")] == [
        "key-mismatch",
        "new",
    ]


def test_missed_deadline_of_a_request_closes_the_connection(path: Path) -> None:
    with StubDaemon(path, lambda request: [Silence()]), connect(path) as connection:
        text = f"the daemon on {path} did not answer within 0.1 s"
        with pytest.raises(WeightCacheUnavailableError, match=f"^{re.escape(text)}$"):
            connection.request(Status(), SHORT_S)
        assert connection.fileno() == -1


def test_missed_deadline_of_receive_leaves_the_connection_open(path: Path) -> None:
    with StubDaemon(path, lambda request: [Done()]), connect(path) as connection:
        with pytest.raises(WeightCacheUnavailableError):
            connection.receive(0.01)
        connection.send(Status(), TIMEOUT_S)
        assert connection.receive(TIMEOUT_S) == (Done(), [])


def test_end_of_the_daemon_wakes_a_waiting_client(path: Path) -> None:
    with (
        StubDaemon(path, lambda request: [Packet(b"", then_close=True)]),
        connect(path) as connection,
    ):
        text = f"the daemon on {path} closed the connection"
        with pytest.raises(WeightCacheUnavailableError, match=f"^{re.escape(text)}$"):
            connection.request(Status(), TIMEOUT_S)
        assert connection.fileno() == -1


def test_close_may_be_called_twice(path: Path) -> None:
    with StubDaemon(path):
        connection = connect(path)
        connection.close()
        connection.close()
        assert connection.fileno() == -1


def numbered_files(count: int) -> list[int]:
    """Descriptors of memfds that hold their own number."""
    fds = []
    for number in range(count):
        fds.append(os.memfd_create(f"n{number}"))
        os.write(fds[-1], struct.pack("i", number))
    return fds


def test_descriptors_come_in_order_over_several_packets(path: Path) -> None:
    files = numbered_files(300)
    packets = [
        Packet(encode(Descriptors(first=0)), files[:250]),
        Packet(encode(Descriptors(first=250)), files[250:]),
    ]
    with StubDaemon(path, lambda request: packets), connect(path) as connection:
        connection.send(Status(), TIMEOUT_S)
        fds = connection.receive_descriptors(300, TIMEOUT_S)
        assert [struct.unpack("i", os.pread(fd.fileno(), 4, 0))[0] for fd in fds] == list(
            range(300)
        )
        assert not any(os.get_inheritable(fd.fileno()) for fd in fds)
        close_all(fds)
    for fd in files:
        os.close(fd)


def test_no_descriptors_need_no_packet(path: Path) -> None:
    with StubDaemon(path), connect(path) as connection:
        assert connection.receive_descriptors(0, SHORT_S) == []


@pytest.mark.parametrize(
    ("packets", "text"),
    [
        (
            [(0, 2), (3, 1)],
            "a packet of 1 descriptors says that it begins at number 3, expected 2 of 4",
        ),
        (
            [(0, 2), (0, 2)],
            "a packet of 2 descriptors says that it begins at number 0, expected 2 of 4",
        ),
        ([(0, 0)], "a packet of 0 descriptors says that it begins at number 0, expected 0 of 4"),
        ([(0, 3), (3, 2)], "2 descriptors came with a message that may carry 1"),
        (
            [(0, 9)],
            "a packet was cut off: too many bytes or descriptors for this message, or more descriptors than this "
            "process may still open (LimitNOFILE=, ulimit -n)",
        ),
        ([(0, 2), None], "Done came after 2 of 4 descriptors, expected Descriptors"),
    ],
)
def test_wrong_descriptors_are_refused_and_none_is_kept(
    path: Path, packets: list[tuple[int, int] | None], text: str
) -> None:
    files = numbered_files(9)
    answers = [
        Packet(encode(Descriptors(first=p[0])), files[: p[1]]) if p else Done() for p in packets
    ]
    with StubDaemon(path, lambda request: answers), connect(path) as connection:
        connection.send(Status(), TIMEOUT_S)
        with pytest.raises(ProtocolError, match=f"^{re.escape(text)}$"):
            connection.receive_descriptors(4, TIMEOUT_S)
        assert connection.fileno() == -1
    for fd in files:
        os.close(fd)


@pytest.mark.timed
def test_descriptors_that_stop_coming_are_given_back_at_the_deadline(path: Path) -> None:
    files = numbered_files(2)
    answers: list[Answer] = [Packet(encode(Descriptors(first=0)), files), Silence()]
    with StubDaemon(path, lambda request: answers), connect(path) as connection:
        connection.send(Status(), TIMEOUT_S)
        begun_s = time.monotonic()
        with pytest.raises(WeightCacheUnavailableError):
            connection.receive_descriptors(4, SHORT_S)
        limits.hold("the deadline", time.monotonic() - begun_s, 20 * SHORT_S)
        assert connection.fileno() == -1
    for fd in files:
        os.close(fd)


def test_leak_check_sees_a_leaked_descriptor() -> None:
    before = open_descriptors()
    fd = os.memfd_create("leak")
    assert open_descriptors() != before
    os.close(fd)
