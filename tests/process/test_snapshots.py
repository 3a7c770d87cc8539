"""A daemon that writes snapshots and starts from them: real children, real files, real kills."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import other_boot
from tests.fakes.checkpoints import WEIGHTS, key_of, write_checkpoint
from tests.fakes.client import Client
from tests.fakes.daemon import DaemonProcess, environment, model, until, write_manifest
from weightcached.wire.messages import (
    CacheStatus,
    Done,
    Drop,
    HoldLoads,
    Progress,
    Reload,
    ReloadReply,
)

Launcher = Callable[..., DaemonProcess]


class Machine:
    """A daemon with snapshots, of one model whose loads are counted."""

    def __init__(self, daemon: DaemonProcess, directory: Path, checkpoint: Path) -> None:
        self.daemon = daemon
        self.checkpoint = checkpoint
        self.snapshots = directory / "snapshots"
        self.spawns = directory / "spawns"
        self.manifest()

    def manifest(self, *, keys: dict[str, Any] | None = None, **engine: Any) -> None:
        entry = model("tiny", self.checkpoint, x_spawns=str(self.spawns), **engine)
        spec = {"dir": str(self.snapshots)} if keys is None else keys
        write_manifest(self.daemon.manifest, [entry], snapshots=spec)

    @property
    def loads(self) -> int:
        return len(self.spawns.read_text().splitlines()) if self.spawns.exists() else 0

    @property
    def cache(self) -> CacheStatus:
        (cache,) = self.daemon.status().caches
        return cache

    def written(self) -> Path:
        """Wait for the snapshot, the only one."""
        until(lambda: self.cache.snapshot == "written", "a snapshot")
        (path,) = self.snapshots.glob("cpu0/tiny.target/[0-9a-f]*")
        return path

    def kept(self) -> set[str]:
        """The names of all snapshots."""
        return {path.name for path in self.snapshots.glob("cpu0/tiny.target/[0-9a-f]*")}

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run weightcachectl for this daemon."""
        return self.ctl(*arguments, f"--socket-dir={self.daemon.runtime}")

    def start(self) -> None:
        """A new daemon, with nothing in the manager's store: as after a reboot."""
        self.daemon.start()

    def reboot(self) -> None:
        self.daemon.stop()
        self.start()

    def served(self) -> bytes:
        """The bytes that an engine gets."""
        with self.daemon.client() as engine:
            handout = engine.attach(key_of({"model": str(self.checkpoint)}))
            try:
                segments = handout.segment_fds
                return b"".join(os.pread(fd.fileno(), 1 << 30, 0) for fd in segments)
            finally:
                handout.close()

    def ctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run weightcachectl for this daemon."""
        return subprocess.run(
            [sys.executable, "-m", "weightcached.cli.weightcachectl", *arguments],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def machine(make_daemon: Launcher, short_tmp: Path, checkpoint: Path) -> Machine:
    return Machine(make_daemon([]), short_tmp, checkpoint)


def test_a_reboot_restores_what_was_loaded_before(machine: Machine) -> None:
    machine.start()
    assert machine.cache.source == "loaded"
    machine.written()
    machine.reboot()
    assert (machine.cache.source, machine.cache.state, machine.loads) == ("restored", "ready", 1)
    assert machine.served()[: 3 << 20] == (machine.checkpoint / WEIGHTS).read_bytes()


def test_in_another_boot_nothing_of_the_store_is_used_and_the_snapshot_is(
    machine: Machine,
) -> None:
    """The manager cannot keep descriptors across a reboot; if it did, they would be of no use."""
    boot = machine.snapshots.with_name("boot-id")
    machine.daemon.module = "tests.fakes.other_boot"
    machine.daemon.env[other_boot.VARIABLE] = str(boot)
    boot.write_text("boot-1\n")
    machine.start()
    machine.written()
    machine.daemon.stop()
    boot.write_text("boot-2\n")
    machine.daemon.launch(keep_store=True).notified("READY=1")
    assert (machine.cache.source, machine.loads) == ("restored", 1)
    assert "it is from boot boot-1, this is boot boot-2" in machine.daemon.log
    assert machine.served()[: 3 << 20] == (machine.checkpoint / WEIGHTS).read_bytes()
    # What it restored belongs to this boot.
    machine.daemon.signal(signal.SIGKILL)
    machine.daemon.wait()
    machine.daemon.launch(keep_store=True).notified("READY=1")
    assert machine.cache.source == "adopted"


def test_without_the_key_nothing_is_written_and_nothing_read(machine: Machine) -> None:
    machine.start()
    machine.written()
    write_manifest(
        machine.daemon.manifest, [model("tiny", machine.checkpoint, x_spawns=str(machine.spawns))]
    )
    machine.reboot()
    assert (machine.cache.source, machine.cache.snapshot, machine.loads) == ("loaded", "", 2)


def test_a_restored_generation_is_not_written_again(machine: Machine) -> None:
    machine.start()
    path = machine.written()
    before = (path / "header").stat().st_mtime_ns
    machine.reboot()
    assert machine.written() == path
    assert (path / "header").stat().st_mtime_ns == before


def test_an_adopted_generation_is_written_if_its_snapshot_is_missing(machine: Machine) -> None:
    """The daemon died before it was written."""
    machine.manifest(keys={"dir": str(machine.snapshots)})
    machine.start()
    path = machine.written()
    machine.daemon.signal(signal.SIGKILL)
    machine.daemon.wait()
    (path / "data").unlink()
    machine.daemon.launch(keep_store=True).notified("READY=1")
    assert machine.cache.source == "adopted"
    until(lambda: (path / "data").exists() and machine.cache.snapshot == "written", "written anew")


@pytest.mark.parametrize("name", ["header", "index", "data"])
def test_a_flipped_byte_is_named_and_loaded_instead(machine: Machine, name: str) -> None:
    machine.start()
    path = machine.written()
    data = bytearray((path / name).read_bytes())
    data[-1] ^= 1
    (path / name).write_bytes(data)
    machine.reboot()
    assert (machine.cache.source, machine.loads) == ("loaded", 2)
    assert "snapshot not used" in machine.daemon.log
    assert str(path) in machine.daemon.log
    # Written anew, or the next start would stumble over it again.
    machine.written()
    machine.reboot()
    assert (machine.cache.source, machine.loads) == ("restored", 2)


def test_other_weights_under_the_same_names_are_loaded(machine: Machine) -> None:
    machine.start()
    machine.written()
    machine.daemon.stop()
    write_checkpoint(machine.checkpoint, seed=2)
    machine.start()
    assert (machine.cache.source, machine.loads) == ("loaded", 2)
    assert machine.served()[: 3 << 20] == (machine.checkpoint / WEIGHTS).read_bytes()


def test_other_engine_arguments_are_loaded(machine: Machine) -> None:
    machine.start()
    machine.written()
    machine.daemon.stop()
    machine.manifest(dtype="float16")
    machine.start()
    assert (machine.cache.source, machine.loads) == ("loaded", 2)
    assert "its spec_digest is" in machine.daemon.log


@pytest.mark.slow
def test_a_snapshot_is_written_on_request_and_only_once(machine: Machine) -> None:
    write_manifest(
        machine.daemon.manifest, [model("tiny", machine.checkpoint, x_spawns=str(machine.spawns))]
    )
    machine.daemon.env["XDG_CACHE_HOME"] = str(machine.snapshots.parent)
    machine.start()
    assert machine.cache.snapshot == ""
    socket_dir = f"--socket-dir={machine.daemon.runtime}"
    for arguments in (["tiny"], ["--all"]):
        done = machine.ctl("snapshot", *arguments, socket_dir)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            "cpu0 tiny/target: the snapshot is there",
            "starts do not use it: the manifest has no key snapshots; 'snapshots: {}' is enough",
        ]
    machine.snapshots = machine.snapshots.parent / "weightcached" / "snapshots"
    path = machine.written()
    before = (path / "header").stat().st_mtime_ns
    # With the key it is used, and not written again.
    machine.manifest()
    machine.reboot()
    assert (machine.cache.source, machine.loads) == ("restored", 1)
    assert machine.ctl("snapshot", "tiny/target", socket_dir).returncode == 0
    assert (path / "header").stat().st_mtime_ns == before
    # It was removed, and the daemon's memory of having written it must not count.
    shutil.rmtree(path)
    assert machine.ctl("snapshot", "tiny", socket_dir).returncode == 0
    assert (path / "header").exists()


def test_what_is_not_served_has_no_snapshot_written(machine: Machine) -> None:
    machine.start()
    machine.written()
    socket_dir = f"--socket-dir={machine.daemon.runtime}"
    with machine.daemon.client("ctl") as client:
        client.ask(Drop(cache="tiny/target"))
    done = machine.ctl("snapshot", "tiny", socket_dir)
    assert done.returncode == 1
    assert "cpu0 tiny/target: tiny/target is not served: its state is released" in done.stderr


@pytest.mark.slow
def test_explain_says_whether_a_snapshot_was_used_and_why_not(machine: Machine) -> None:
    def told() -> str:
        done = machine.ctl("explain", "tiny", f"--socket-dir={machine.daemon.runtime}")
        assert done.returncode == 0, done.stderr
        return done.stdout

    machine.start()
    path = machine.written()
    assert f"snapshot at the last load: none in {path.parent}\n" in told()
    assert "snapshot of this generation: written\n" in told()
    machine.reboot()
    assert f"snapshot at the last load: used: {path}\n" in told()
    (path / "data").write_bytes(b"x" * (path / "data").stat().st_size)
    machine.reboot()
    assert f"snapshot at the last load: not used: {path}: {path}/data: the 1572864 bytes" in told()
    machine.written()
    machine.manifest(dtype="float16")
    machine.reboot()
    assert f"not used: {path}: its spec_digest is " in told()
    with machine.daemon.client("ctl") as client:
        reload(client, force=True)
    assert "snapshot at the last load: not looked for: 'reload --force' always loads\n" in told()


def reload(client: Client, *, force: bool = False) -> None:
    reply = client.ask(Reload(force=force))
    while isinstance(reply, Progress):
        reply = client.receive()
    assert isinstance(reply, ReloadReply)


def test_a_forced_reload_loads(machine: Machine) -> None:
    machine.start()
    machine.written()
    with machine.daemon.client("ctl") as client:
        reload(client, force=True)
    assert (machine.cache.generation, machine.cache.source, machine.loads) == (2, "loaded", 2)


def test_a_dropped_cache_comes_back_from_its_snapshot(machine: Machine) -> None:
    machine.start()
    machine.written()
    with machine.daemon.client("ctl") as client:
        client.ask(Drop(cache="tiny/target"))
        reload(client)
    assert (machine.cache.source, machine.loads) == ("restored", 1)


@pytest.mark.parametrize("fault", ["file", "read-only", "others"])
def test_a_directory_that_cannot_be_used_costs_a_line(machine: Machine, fault: str) -> None:
    if fault == "file":
        machine.snapshots.write_text("")
    else:
        machine.snapshots.mkdir(mode=0o777 if fault == "others" else 0o500)
        machine.snapshots.chmod(0o777 if fault == "others" else 0o500)
    if fault == "read-only" and os.geteuid() == 0:
        pytest.skip("root writes there all the same")
    machine.start()
    until(lambda: machine.cache.snapshot not in ("", "writing"), "the writer's end")
    assert str(machine.snapshots) in machine.cache.snapshot
    assert "no snapshot cache=tiny/target" in machine.daemon.log
    assert machine.cache.state == "ready"


def test_no_room_is_said_with_the_bound(machine: Machine) -> None:
    machine.manifest(keys={"dir": str(machine.snapshots), "max_bytes": 4096})
    machine.start()
    until(lambda: machine.cache.snapshot not in ("", "writing"), "the writer's end")
    assert "no room for a snapshot of 3145728 bytes" in machine.cache.snapshot
    assert list(machine.snapshots.glob("*/*/*")) == []


def test_the_oldest_of_a_cache_go(machine: Machine) -> None:
    machine.start()
    first = machine.written()
    machine.manifest(dtype="float16")
    machine.reboot()
    assert machine.written() != first
    assert not first.exists()


@pytest.mark.slow
def test_as_many_as_the_manifest_keeps_stay(machine: Machine) -> None:
    machine.manifest(keys={"dir": str(machine.snapshots), "keep": 2})
    machine.start()
    machine.written()
    machine.manifest(keys={"dir": str(machine.snapshots), "keep": 2}, dtype="float16")
    machine.reboot()
    until(lambda: machine.cache.snapshot == "written", "the second")
    machine.manifest(keys={"dir": str(machine.snapshots), "keep": 2})
    machine.reboot()
    assert (machine.cache.source, machine.loads) == ("restored", 2)


class Group:
    """Daemons of the two ranks of one model, which load together."""

    def __init__(self, make_daemon: Launcher, directory: Path, checkpoint: Path) -> None:
        self.snapshots, self.spawns = directory / "snapshots", directory / "spawns"
        # Real loaders wait for each other. These wait for this; a file stops nobody.
        self.meeting = directory / "meeting"
        self.meeting.write_bytes(b"")
        entry = model(
            "tiny",
            checkpoint,
            x_spawns=str(self.spawns),
            x_gate_before_key=str(self.meeting),
            tensor_parallel_size=2,
        )
        entry |= {"devices": ["cpu0", "cpu1"], "rendezvous": {"group": "127.0.0.1:29779"}}
        self.daemons = [make_daemon(device=device) for device in entry["devices"]]
        write_manifest(self.daemons[0].manifest, [entry], snapshots={"dir": str(self.snapshots)})

    def start(self) -> list[str]:
        """Start both at once. Returns sources()."""
        self.meeting.unlink()
        self.meeting.write_bytes(b"")
        for daemon in self.daemons:
            daemon.launch()
        for daemon in self.daemons:
            daemon.notified("READY=1")
        return self.sources()

    def reboot(self) -> list[str]:
        for daemon in self.daemons:
            daemon.stop()
        return self.start()

    def reload_dropped(self) -> list[str]:
        """Drop both and reload both; no loader is done before both are there."""
        for daemon in self.daemons:
            with daemon.client("ctl") as client:
                client.ask(Drop(cache="tiny/target"))
        self.meeting.unlink()
        os.mkfifo(self.meeting)
        with contextlib.ExitStack() as stack:
            # The second cannot begin, and so cannot tell the first whether it has one.
            hold = stack.enter_context(self.daemons[1].client())
            assert isinstance(hold.ask(HoldLoads()), Done)
            for daemon in reversed(self.daemons):
                stack.enter_context(daemon.client("ctl")).send(Reload())
                daemon.until(lambda status: status.caches[0].state == "loading", "a load")
            hold.close()
            before = self.loads
            until(lambda: self.loads == before + 2 or self.are_ready(), "two loaders, or none")
            until(lambda: self.let_through() or self.are_ready(), "both are ready")
        return self.sources()

    def let_through(self) -> bool:
        """Let loaders go on that are at the meeting now."""
        with contextlib.suppress(OSError):
            os.close(os.open(self.meeting, os.O_WRONLY | os.O_NONBLOCK))
        return False

    def are_ready(self) -> bool:
        return all(daemon.status().caches[0].state == "ready" for daemon in self.daemons)

    def sources(self) -> list[str]:
        """Where each has its weights from, once it has a snapshot."""
        for daemon in self.daemons:
            daemon.until(lambda status: status.caches[0].snapshot == "written", "a snapshot")
        return [daemon.status().caches[0].source for daemon in self.daemons]

    @property
    def loads(self) -> int:
        return len(self.spawns.read_text().splitlines())


@pytest.mark.slow
def test_ranks_that_load_together_all_restore_or_all_load(
    make_daemon: Launcher, short_tmp: Path, checkpoint: Path
) -> None:
    group = Group(make_daemon, short_tmp, checkpoint)
    assert group.start() == ["loaded", "loaded"]
    assert group.reboot() == ["restored", "restored"]
    assert group.reload_dropped() == ["restored", "restored"]
    assert group.loads == 2
    shutil.rmtree(group.snapshots / "cpu1")
    assert group.reload_dropped() == ["loaded", "loaded"]
    # Nobody had to load along, beside what it had restored.
    assert group.loads == 4
    assert "cpu1 of the same group loads" in group.daemons[0].log
    assert group.reboot() == ["restored", "restored"]
    # One that is alone lost restores alone: the other serves.
    group.daemons[1].stop()
    group.daemons[1].start()
    assert group.daemons[1].status().caches[0].source == "restored"
    assert group.loads == 4
