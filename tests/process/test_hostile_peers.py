"""Peers that are silent, slow, wrong or hostile; everybody else is served as without them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import limits
from tests.fakes.checkpoints import key_of
from tests.fakes.client import Client
from tests.fakes.daemon import ROOT, DaemonProcess, environment, model, until
from weightcached.wire.messages import (
    PROTOCOL_VERSION,
    Attach,
    Hello,
    Refused,
    Release,
    Status,
    Welcome,
    encode,
)

pytestmark = pytest.mark.timed
STATUS_LIMIT_S = 0.05
ATTACH_LIMIT_S = 0.5
HELLO_LIMIT_S = 5.0
LINGER_S = 120
Launcher = Callable[..., DaemonProcess]


@contextlib.contextmanager
def others_are_served(daemon: DaemonProcess) -> Iterator[None]:
    """Ask for the status and attach at the end of the block, each with the connect."""
    yield
    key = key_of({"model": str(daemon.directory / "checkpoint")})
    took, attached = [], []
    for _ in range(20):
        began_s = time.monotonic()
        daemon.status()
        took.append(time.monotonic() - began_s)
        began_s = time.monotonic()
        with daemon.client() as engine:
            engine.attach(key).close()
        attached.append(time.monotonic() - began_s)
    # The machine may be busy with something else for some of them.
    limits.hold("status beside it, median", statistics.median(took), STATUS_LIMIT_S, took)
    limits.hold("attach beside it, third longest", sorted(attached)[-3], ATTACH_LIMIT_S, attached)


def raw(daemon: DaemonProcess) -> Client:
    return Client(daemon.socket)


@pytest.mark.slow
def test_silent_peers_are_closed_after_the_hello_deadline(daemon: DaemonProcess) -> None:
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(raw(daemon)) for _ in range(50)]
        with others_are_served(daemon):
            pass
        assert all(client.closed_by_daemon() for client in silent)
    waited_s = time.monotonic() - began_s
    assert waited_s > HELLO_LIMIT_S - 0.5
    limits.hold("silent peers are closed", waited_s, HELLO_LIMIT_S + 3)


def test_idle_tool_is_closed_and_idle_engine_is_not(
    make_daemon: Launcher, checkpoint: Path
) -> None:
    daemon = make_daemon([model("tiny", checkpoint)])
    daemon.options = ["--idle-timeout", "0.3"]
    daemon.start()
    with daemon.client() as engine, daemon.client("ctl") as tool:
        assert tool.closed_by_daemon()
        engine.attach(key_of({"model": str(checkpoint)})).close()
    assert "peer kept us waiting, closed" in daemon.log


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (encode(Hello(protocol=1))[:-3], "message does not decode: Input data was truncated"),
        (b"\x00", "message does not decode: Expected `object`, got `int`"),
        (b"\x91" * 5000, None),
        (encode(Status()), "the first message is Status, expected Hello"),
        (
            encode(Welcome(protocol=1, device="d", pid=1)),
            "message does not decode: Invalid value 'Welcome' - at `$.type`",
        ),
    ],
    ids=["half", "number", "deep", "status-first", "a-daemons-message"],
)
def test_wrong_first_message_is_refused_and_the_connection_closed(
    daemon: DaemonProcess, data: bytes, message: str | None
) -> None:
    with raw(daemon) as client:
        client.send_raw(data)
        refused = client.receive()
        assert isinstance(refused, Refused)
        assert refused.code == "protocol"
        assert message is None or refused.message == message
        assert client.closed_by_daemon()
    with others_are_served(daemon):
        pass


def test_other_protocol_version_is_told_both_versions(daemon: DaemonProcess) -> None:
    with raw(daemon) as client:
        refused = client.expect(
            Hello(protocol=PROTOCOL_VERSION + 1, software="9.9\nforged line"), Refused
        )
        assert client.closed_by_daemon()
    assert refused == Refused(
        code="protocol-version",
        message="the peer (weightcached 9.9?forged line) speaks protocol 2, this daemon (0.1.0) speaks 1: "
        "install the same weightcached on both sides",
    )


def test_second_hello_is_refused(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        refused = client.expect(Hello(protocol=PROTOCOL_VERSION), Refused)
        assert client.closed_by_daemon()
    assert refused.message == "a second Hello: it is the first message and comes once"


def test_flood_of_requests_delays_nobody(daemon: DaemonProcess) -> None:
    stop = threading.Event()

    def flood() -> None:
        with daemon.client() as client:
            while not stop.is_set():
                client.status()

    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        with others_are_served(daemon):
            pass
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_peer_that_never_reads_its_answers_delays_nobody(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        client.sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                client.send(Status())
        with others_are_served(daemon):
            pass


def test_flood_of_connections_leaves_room_for_the_daemons_own_handshake(
    make_daemon: Launcher, checkpoint: Path
) -> None:
    daemon = make_daemon([model("tiny", checkpoint)])
    daemon.env = {"WATCHDOG_USEC": "200000"}
    daemon.start()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(daemon.client()) for _ in range(512)]
        with raw(daemon) as late:
            refused = late.receive()
            assert late.closed_by_daemon()
        assert refused == Refused(
            code="busy",
            message="this daemon has 512 connections, the maximum: close some, then try again",
        )
        for _ in range(3):
            daemon.notified("WATCHDOG=1")
        assert clients[0].status().state == "ready"

    until(lambda: len(daemon.descriptors()) < 100, "the daemon has let go of those who left")
    with others_are_served(daemon):
        pass


@contextlib.contextmanager
def crowd(daemon: DaemonProcess, size: int) -> Iterator[None]:
    """A process with so many connections, silent ones. Those that are refused are kept, too."""
    script = (
        "import sys; from pathlib import Path; from tests.fakes.client import Client\n"
        f"clients = [Client.welcome(Path(sys.argv[1])) for _ in range({size})]\n"
        "print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(daemon.socket)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment()
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == b"\n"
        yield


def test_crowds_of_silent_processes_give_way_to_a_newcomer(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    key = key_of({"model": str(checkpoint)})
    with daemon.client() as engine, contextlib.ExitStack() as stack:
        engine.attach(key).close()
        stack.enter_context(crowd(daemon, 200))
        stack.enter_context(crowd(daemon, 311))
        # They hold all that there is, and each of these replaces one of theirs. An engine's lease
        # is left alone.
        with others_are_served(daemon):
            pass
        assert "connection ended to make room" in daemon.log
        assert engine.status().caches[0].engines[0].pid == os.getpid()
        assert sum("pidfd" in target for target in daemon.descriptors()) <= 512


def test_descriptors_sent_with_a_request_are_closed_with_the_connection(
    daemon: DaemonProcess,
) -> None:
    with others_are_served(daemon):
        before = len(daemon.descriptors())
        for _ in range(20):
            reader, writer = os.pipe()
            with daemon.client() as client:
                client.send_raw(encode(Status()), [writer] * 250)
                refused = client.receive()
                assert isinstance(refused, Refused)
                assert refused.code == "protocol"
                assert client.closed_by_daemon()
            os.close(writer)
            # The end of the pipe comes only when the daemon holds no copy.
            assert os.read(reader, 1) == b""
            os.close(reader)
        daemon.until(lambda _: len(daemon.descriptors()) <= before + 2, "no descriptor is left")


def lingering() -> tuple[socket.socket, socket.socket]:
    """A TCP connection whose last descriptor takes LINGER_S to close; and its listener."""
    listener = socket.create_server(("127.0.0.1", 0))
    sock = socket.create_connection(listener.getsockname())
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sock.send(bytes(65536))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
    return sock, listener


@pytest.mark.parametrize("packet", ["refused", "memfd", "unread", "never-welcomed"])
def test_descriptor_that_is_slow_to_close_holds_nobody_up(
    daemon: DaemonProcess, packet: str
) -> None:
    sock, listener = lingering()
    with listener, raw(daemon) if packet == "never-welcomed" else daemon.client() as client:
        # It looks at nothing until we have closed our own: if that were the last, we would wait.
        daemon.signal(signal.SIGSTOP)
        if packet == "unread":
            # The first of them ends the connection, the last is never looked at.
            client.send_raw(b"x")
        data = b"\xc1large" if packet == "memfd" else encode(Status())
        client.send_raw(data, [sock.fileno()] * (1 if packet == "memfd" else 3))
        sock.close()
        daemon.signal(signal.SIGCONT)
        if packet == "unread":
            assert isinstance(client.receive(), Refused)
        client.close()
        began_s = time.monotonic()
        with others_are_served(daemon):
            pass
        assert daemon.stop() == 0
        # Before it was closed, so that it has held up nobody.
        assert time.monotonic() - began_s < LINGER_S


def test_peer_that_leaves_in_the_middle_of_a_handout_leaves_nothing(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    key = key_of({"model": str(checkpoint)})
    before = len(daemon.descriptors())
    for _ in range(50):
        with daemon.client() as client:
            client.send(Attach(key=key))
    daemon.until(lambda status: status.caches[0].engines == [], "all leases have ended")
    daemon.until(lambda _: len(daemon.descriptors()) <= before + 2, "no descriptor is left")


def test_requests_sent_ahead_are_answered_in_turn(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        for _ in range(3):
            client.send(Status())
            client.send(Release())
        kinds = [type(client.receive()).__name__ for _ in range(6)]
    assert kinds == ["StatusReply", "Refused"] * 3


def test_other_user_is_refused_by_uid(daemon: DaemonProcess) -> None:
    """The stranger keeps the one capability that gets it past the file modes."""
    setpriv = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    setpriv += ["--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    script = (
        "import sys; from pathlib import Path; from tests.fakes.client import Client\n"
        "with Client(Path(sys.argv[1])) as client:\n"
        "    refused = client.receive()\n"
        "    print(refused.code, client.closed_by_daemon(), refused.message, sep='; ')"
    )
    command = [*setpriv, sys.executable, "-c", script, str(daemon.socket)]
    stranger = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment()
    )
    assert stranger.stdout == (
        "peer; True; uid 65534 may not use this daemon, it serves uid 0 alone: run the engine as that user\n"
    )
    with others_are_served(daemon):
        pass


def test_socket_is_for_its_owner_alone(daemon: DaemonProcess) -> None:
    assert oct(daemon.socket.stat().st_mode & 0o7777) == "0o600"
    assert oct(daemon.runtime.stat().st_mode & 0o7777) == "0o700"


def test_stream_socket_cannot_connect(daemon: DaemonProcess) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream,
        pytest.raises(OSError, match="rotocol wrong type"),
    ):
        stream.connect(str(daemon.socket))
