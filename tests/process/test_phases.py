"""Every signal in every phase of the daemon's life: nothing half published, nothing leaked."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import pauses
from tests.fakes.checkpoints import key_of
from tests.fakes.daemon import DaemonProcess, has_ended, model, until, write_manifest
from tests.fakes.pauses import Pauses
from tests.process.conftest import Engine
from weightcached.wire.messages import Release, Reload, StatusReply

Launcher = Callable[..., DaemonProcess]
MakeEngine = Callable[..., Engine]
SEGMENTS = 2

# Phases of a first start, in their order; those of the loader child are waited in by the child.
STARTING = [
    "lock", "adopt", "bind", "configuring", "weights", "packing", "proof", "handover", "publish", "store", "stored",
    "handshake",
]  # fmt: skip
# Phases that begin with a request to a daemon that serves and has an engine.
SERVING = [
    "serving",
    "reload-weights",
    "reload-handover",
    "reload-store",
    "reload-stored",
    "reload-unstore",
]
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGSTOP]
# Before the event loop runs, a signal has its default effect.
BEFORE_THE_LOOP = {"lock", "adopt", "bind"}


class Stage:
    """A daemon, its pauses, and its invariants."""

    def __init__(self, make_daemon: Launcher, checkpoint: Path, directory: Path) -> None:
        self.checkpoint = checkpoint
        self.pauses = Pauses(directory / "pauses")
        self.spawns = directory / "spawns"
        self.daemon = make_daemon([])
        self.daemon.module = "tests.fakes.pauses"
        self.daemon.env = {pauses.VARIABLE: str(self.pauses.directory)}
        self.configure(segments=SEGMENTS)

    def configure(self, *, segments: int) -> None:
        options: dict[str, Any] = {
            "x_segments": segments,
            "x_spawns": str(self.spawns),
            "x_pauses": str(self.pauses.directory),
        }
        write_manifest(self.daemon.manifest, [model("tiny", self.checkpoint, **options)])

    def reach(self, phase: str) -> None:
        process = self.daemon.process
        assert process
        until(
            lambda: self.pauses.reached(phase) or process.poll() is not None, f"it waits in {phase}"
        )
        assert process.poll() is None, self.daemon.log

    def let_go(self, phase: str) -> None:
        process = self.daemon.process
        assert process
        self.pauses.let_go(phase, lambda: process.poll() is not None)

    def strike(
        self, number: signal.Signals, phase: str | None, *, before_the_loop: bool = False
    ) -> None:
        """Send the signal in the phase, let the daemon go on, and check that it ends or goes on."""
        self.daemon.signal(number)
        if number is signal.SIGSTOP:
            self.daemon.signal(signal.SIGCONT)
        if number is signal.SIGKILL:
            assert self.daemon.wait() == -signal.SIGKILL
        if phase is not None:
            self.let_go(phase)
        if number in (signal.SIGTERM, signal.SIGINT):
            assert self.daemon.wait() == 0
            assert not self.daemon.socket.exists()
            assert "Traceback" not in self.daemon.log, self.daemon.log
        if number is not signal.SIGSTOP:
            self.no_loader_is_left()

    def no_loader_is_left(self) -> None:
        pids = (
            [int(line.split()[-1]) for line in self.spawns.read_text().splitlines()]
            if self.spawns.exists()
            else []
        )
        until(lambda: all(has_ended(pid) for pid in pids), "no loader is left")

    def start_again(self) -> None:
        """As systemd after a crash and in a restart: pass the stored descriptors on."""
        self.daemon.launch(keep_store=True).notified("READY=1")

    def serves(self, segments: int = SEGMENTS) -> StatusReply:
        """One complete generation with the checkpoint's bytes, and nothing else in store or daemon."""
        status = self.daemon.until(lambda s: s.state == "ready", "it serves")
        (cache,) = status.caches
        assert (cache.state, cache.segments, cache.error) == ("ready", segments, "")
        with self.daemon.client() as client:
            handout = client.attach(key_of({"model": str(self.checkpoint)}))
            data = b"".join(fd_content(fd.fileno()) for fd in handout.segment_fds)
            handout.close()
        assert data == self.content()
        manager = self.daemon.manager
        assert manager
        until(lambda: len(manager.stored) == segments + 1, "one generation is stored")
        # The input of a child that makes a digest is there for a moment, too.
        until(
            lambda: sum("memfd" in fd for fd in self.daemon.descriptors()) == segments + 1,
            "nothing else is open",
        )
        return status

    def content(self) -> bytes:
        return (self.checkpoint / "model.safetensors").read_bytes()


def fd_content(fd: int) -> bytes:
    with open(fd, "rb", closefd=False, buffering=0) as f:
        f.seek(0)
        return f.readall()


@pytest.fixture
def stage(make_daemon: Launcher, checkpoint: Path, short_tmp: Path) -> Stage:
    return Stage(make_daemon, checkpoint, short_tmp)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda n: n.name)
@pytest.mark.parametrize("phase", STARTING)
def test_signal_in_a_phase_of_the_start(stage: Stage, phase: str, number: signal.Signals) -> None:
    stage.pauses.arm(phase)
    stage.daemon.launch()
    stage.reach(phase)
    stage.strike(number, phase)
    if number is signal.SIGSTOP:
        stage.daemon.notified("READY=1")
    else:
        manager = stage.daemon.manager
        assert manager
        assert not any("READY=1" in state for state in manager.states)
        stage.start_again()
    status = stage.serves()
    # Complete in the store before the end: taken back. Otherwise loaded again.
    complete = phase in ("stored", "handshake") or (
        phase in ("publish", "store") and number is signal.SIGTERM
    )
    if number is signal.SIGKILL:
        assert status.caches[0].source == ("adopted" if complete else "loaded")
    assert stage.daemon.stop() == 0


@pytest.mark.parametrize("number", SIGNALS, ids=lambda n: n.name)
@pytest.mark.parametrize("phase", ["adopt", "handshake"])
def test_signal_while_what_was_stored_is_taken_back(
    stage: Stage, make_engine: MakeEngine, phase: str, number: signal.Signals
) -> None:
    stage.daemon.start()
    engine = make_engine(stage.daemon, stage.checkpoint)
    engine.attached()
    stage.daemon.signal(signal.SIGKILL)
    stage.daemon.wait()
    stage.pauses.arm(phase)
    stage.daemon.launch(keep_store=True)
    stage.reach(phase)
    stage.strike(number, phase)
    if number is signal.SIGSTOP:
        stage.daemon.notified("READY=1")
    else:
        stage.start_again()
    # The one generation that there was, in every case.
    assert stage.serves().caches[0].source == "adopted"
    assert len(stage.spawns.read_text().splitlines()) == 1
    assert engine.digest() == hashlib.sha256(stage.content()).hexdigest().encode()
    assert stage.daemon.stop() == 0


@pytest.mark.parametrize("number", SIGNALS, ids=lambda n: n.name)
@pytest.mark.parametrize("phase", SERVING)
def test_signal_while_an_engine_is_served(
    stage: Stage, make_engine: MakeEngine, phase: str, number: signal.Signals
) -> None:
    stage.daemon.start()
    engine = make_engine(stage.daemon, stage.checkpoint)
    engine.attached()
    point = phase.removeprefix("reload-") if phase != "serving" else None
    with stage.daemon.client("ctl") as tool:
        if point:
            stage.configure(segments=3)
            stage.pauses.arm(point)
            tool.send(Reload())
            stage.reach(point)
        stage.strike(number, point)
        if number is signal.SIGSTOP and point:
            stage.daemon.until(
                lambda s: s.caches[0].generation == 2 and not s.caches[0].phase, "it is reloaded"
            )
    if number is not signal.SIGSTOP:
        stage.start_again()
    stage.serves(segments=3 if point else SEGMENTS)
    # The engine's earlier mapping is unchanged.
    assert engine.digest() == hashlib.sha256(stage.content()).hexdigest().encode()
    assert stage.daemon.stop() == 0
    assert engine.digest() == hashlib.sha256(stage.content()).hexdigest().encode()


@pytest.mark.parametrize("number", SIGNALS, ids=lambda n: n.name)
def test_signal_while_a_generation_is_released(stage: Stage, number: signal.Signals) -> None:
    stage.daemon.start()
    with stage.daemon.client() as engine:
        engine.attach(key_of({"model": str(stage.checkpoint)})).close()
        stage.pauses.arm("release")
        engine.send(Release())
        stage.reach("release")
        stage.strike(number, "release")
    if number is signal.SIGSTOP:
        stage.daemon.until(lambda s: s.caches[0].state == "released", "it is released")
        manager = stage.daemon.manager
        assert manager
        until(lambda: all("aside" in name for name in manager.stored), "its stored copy is gone")
    else:
        # What was released stays so across a restart; the release itself may not have got far.
        stage.start_again()
        (cache,) = stage.daemon.status().caches
        assert cache.state == ("ready" if number is signal.SIGKILL else "released")
    with stage.daemon.client("ctl") as tool:
        tool.send(Reload())
        stage.daemon.until(lambda s: s.caches[0].state == "ready", "it is loaded again")
    stage.serves()


def test_stopped_daemon_holds_a_client_no_longer_than_its_deadline(stage: Stage) -> None:
    from weightcached.errors import WeightCacheUnavailableError
    from weightcached.wire.connection import Connection

    stage.daemon.start()
    stage.daemon.signal(signal.SIGSTOP)
    with pytest.raises(WeightCacheUnavailableError, match=r"did not answer within 0\.5 s"):
        Connection.connect(stage.daemon.socket, timeout_s=0.5, purpose="ctl")
    stage.daemon.signal(signal.SIGCONT)
    stage.serves()


@pytest.mark.parametrize("phase", ["lock", "bind", "weights"])
def test_early_hangup_is_a_reload_after_the_start(stage: Stage, phase: str) -> None:
    stage.pauses.arm(phase)
    stage.daemon.launch()
    stage.reach(phase)
    stage.daemon.signal(signal.SIGHUP)
    stage.let_go(phase)
    for word in ("READY=1", "RELOADING=1", "READY=1"):
        stage.daemon.notified(word)
    stage.serves()


def test_daemon_that_cannot_reach_its_own_socket_never_says_ready(stage: Stage) -> None:
    stage.pauses.arm("handshake")
    stage.daemon.launch()
    stage.reach("handshake")
    stage.daemon.socket.unlink()
    stage.let_go("handshake")
    assert stage.daemon.wait() == 1
    manager = stage.daemon.manager
    assert manager
    assert not any("READY=1" in state for state in manager.states)
    assert (
        f"handshake with our own socket failed, giving up socket={stage.daemon.socket}"
        in stage.daemon.log
    )
    stage.start_again()
    stage.serves()
