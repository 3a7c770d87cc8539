"""SIGKILL at the steps of a writer and of a restorer, to them and to their daemon.

A step is a call that changes a file or sends a packet; of each kind the first is tried, and mostly the last.
Nothing that was served is lost, nothing half written is used, and the next start removes it.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import crash_at
from tests.fakes.checkpoints import WEIGHTS
from tests.fakes.daemon import DaemonProcess, children_of, model, state_of, until, write_manifest
from tests.process.test_snapshots import Machine, reload
from weightcached.snapshot.files import open_snapshot
from weightcached.wire.messages import Done, Drop, Message, Progress, WriteSnapshot

pytestmark = pytest.mark.slow
WRITER, RESTORER = "weightcached.snapshot.writer", "weightcached.snapshot.restorer"


class Crashing(Machine):
    """Its children run by an interpreter that ends or stops them at a step."""

    def __init__(self, daemon: DaemonProcess, directory: Path, checkpoint: Path) -> None:
        self.file = directory / "crash"
        self.python = crash_at.interpreter(directory, self.file)
        super().__init__(daemon, directory, checkpoint)

    def manifest(self, *, keys: dict[str, Any] | None = None, **engine: Any) -> None:
        entry = model("tiny", self.checkpoint, x_spawns=str(self.spawns), **engine)
        entry["python"] = str(self.python)
        write_manifest(self.daemon.manifest, [entry], snapshots={"dir": str(self.snapshots)})

    def arm(self, module: str, step: int, sent: str = "KILL") -> None:
        self.reached.unlink(missing_ok=True)
        self.file.write_text(f"{module} {step} {sent}")

    def disarm(self) -> None:
        self.file.unlink()

    @property
    def reached(self) -> Path:
        return self.file.with_name("crash.reached")

    def steps(self, module: str, run: Callable[[], object], *, last_too: bool = True) -> list[int]:
        """The first and the last step of each kind, in the order of a run without a crash."""
        self.arm(module, 0)
        run()
        self.disarm()
        names = self.file.with_name("crash.steps").read_text().split()
        last = {name: number for number, name in enumerate(names, start=1)}
        first = {name: number for number, name in reversed(list(enumerate(names, start=1)))}
        return sorted({*first.values(), *(last.values() if last_too else ())})

    def write(self) -> Message:
        """Have the snapshot written. Returns the daemon's last answer."""
        with self.daemon.client("ctl") as client:
            reply = client.ask(WriteSnapshot(cache="tiny/target"))
            while isinstance(reply, Progress):
                reply = client.receive()
        return reply

    def write_anew(self) -> Message:
        for path in self.snapshots.glob("cpu0/tiny.target/[0-9a-f]*"):
            shutil.rmtree(path)
        return self.write()

    def come_back(self) -> None:
        """Drop the cache, and reload it."""
        with self.daemon.client("ctl") as client:
            assert isinstance(client.ask(Drop(cache="tiny/target")), Done)
            reload(client)

    def child(self) -> int:
        """The child that has stopped itself at its step."""
        until(self.reached.exists, "the step")
        found: list[int] = []

        def stopped() -> bool:
            found[:] = [pid for pid in children_of(self.daemon.pid) if state_of(pid) == "T"]
            return bool(found)

        until(stopped, "a stopped child")
        return found[0]

    def crash(self) -> None:
        """SIGKILL to the daemon, and the start of its successor."""
        child = self.child()
        self.daemon.signal(signal.SIGKILL)
        self.daemon.wait()
        until(lambda: state_of(child) in "ZX", "the child ends with it")
        self.disarm()
        self.daemon.launch(keep_store=True).notified("READY=1")

    def assert_sound(self) -> None:
        """What is served is right, and what counts as a snapshot is whole."""
        assert self.cache.state == "ready"
        assert self.served()[: 3 << 20] == (self.checkpoint / WEIGHTS).read_bytes()
        for path in self.snapshots.glob("cpu0/tiny.target/[0-9a-f]*"):
            with open_snapshot(path) as snapshot:
                snapshot.verify()

    def large_files(self) -> set[Path]:
        return {path for path in files_below(self.snapshots) if path.stat().st_size > 1 << 20}


def files_below(directory: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(directory):
        yield from (Path(folder, name) for name in names)


@pytest.fixture
def crashing(
    make_daemon: Callable[..., DaemonProcess], short_tmp: Path, checkpoint: Path
) -> Crashing:
    crashing = Crashing(make_daemon([]), short_tmp, checkpoint)
    crashing.start()
    crashing.written()
    return crashing


def test_a_writer_killed_at_any_step_leaves_nothing_that_counts(crashing: Crashing) -> None:
    for step in crashing.steps(WRITER, crashing.write_anew):
        crashing.arm(WRITER, step)
        crashing.write_anew()
        assert crashing.reached.exists(), step
        crashing.assert_sound()
    crashing.disarm()
    # The model goes, so nobody would write there again: the next start removes what was left.
    other = model("other", crashing.checkpoint)
    write_manifest(crashing.daemon.manifest, [other], snapshots={"dir": str(crashing.snapshots)})
    for path in crashing.snapshots.glob("cpu0/tiny.target/[0-9a-f]*"):
        (path / "header").unlink()
    leftover = crashing.snapshots / "cpu0" / "tiny.target" / ".0123"
    leftover.mkdir(exist_ok=True)
    (leftover / "data").write_bytes(bytes(2 << 20))
    before = crashing.large_files()
    assert leftover / "data" in before
    crashing.reboot()
    assert crashing.large_files() & before == set()


def test_a_daemon_killed_at_any_step_of_its_writer_has_it_written_by_its_successor(
    crashing: Crashing,
) -> None:
    for step in crashing.steps(WRITER, crashing.write_anew, last_too=False):
        for path in crashing.snapshots.glob("cpu0/tiny.target/[0-9a-f]*"):
            shutil.rmtree(path)
        crashing.arm(WRITER, step, "STOP")
        with crashing.daemon.client("ctl") as client:
            client.send(WriteSnapshot(cache="tiny/target"))
            crashing.crash()
        assert crashing.cache.source == "adopted"
        path = crashing.written()
        crashing.assert_sound()
        assert crashing.large_files() == {path / "data"}
        assert list(path.parent.glob(".*")) == []
    assert crashing.loads == 1


def test_a_restorer_killed_at_any_step_is_replaced_by_a_load(crashing: Crashing) -> None:
    killed = 0
    for step in crashing.steps(RESTORER, crashing.come_back):
        loads = crashing.loads
        crashing.arm(RESTORER, step)
        crashing.come_back()
        # How often it reports progress depends on its pace, so the last steps may not come.
        killed += crashing.reached.exists()
        crashing.assert_sound()
        # The last steps come after all is delivered.
        assert crashing.cache.source == ("loaded" if crashing.loads > loads else "restored")
        until(lambda: crashing.cache.snapshot == "written", "a snapshot")
    assert killed > 5
    crashing.disarm()
    crashing.reboot()
    assert crashing.cache.source == "restored"


def test_a_daemon_killed_at_any_step_of_its_restorer_starts_from_the_snapshot(
    crashing: Crashing,
) -> None:
    for step in crashing.steps(RESTORER, crashing.come_back, last_too=False):
        crashing.daemon.stop()
        crashing.arm(RESTORER, step, "STOP")
        crashing.daemon.launch()
        crashing.crash()
        assert crashing.cache.source == "restored"
        crashing.assert_sound()
    assert crashing.loads == 1
