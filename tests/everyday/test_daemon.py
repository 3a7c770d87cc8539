"""docs/faults.md, the daemon and its unit: retries, dropped caches, served caches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import ANSWER_TIMEOUT_S
from tests.fakes import pauses
from tests.fakes.checkpoints import key_of
from tests.fakes.daemon import (
    LOADER,
    DaemonProcess,
    environment,
    model,
    until,
    write_manifest,
)
from tests.fakes.pauses import Pauses
from tests.process.conftest import Engine
from tests.process.test_host_faults import memory_cgroup
from tests.systemd.conftest import Unit
from weightcached.wire.messages import (
    CacheStatus,
    Done,
    Drop,
    Progress,
    Refused,
    Reload,
    ReloadReply,
    StatusReply,
)

Launcher = Callable[..., DaemonProcess]


def ctl(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`weightcachectl …`, as an operator runs it."""
    return subprocess.run(
        [sys.executable, "-m", "weightcached.cli.weightcachectl", *arguments],
        env=environment(**(env or {})),
        capture_output=True,
        text=True,
        timeout=ANSWER_TIMEOUT_S,
        check=False,
    )


def caches(status: StatusReply) -> dict[str, CacheStatus]:
    return {cache.name: cache for cache in status.caches}


def reload(daemon: DaemonProcess, *names: str) -> ReloadReply | Refused:
    with daemon.client("ctl") as tool:
        reply = tool.ask(Reload(caches=list(names)))
        while isinstance(reply, Progress):
            reply = tool.receive()
    assert isinstance(reply, ReloadReply | Refused)
    return reply


# ---- what fails and may succeed later


def test_unit_whose_loader_fails_at_once_serves_when_the_reason_is_gone(
    unit: Unit, tmp_path: Path
) -> None:
    driver = tmp_path / "driver-is-ready"
    unit.configure(x_fault="exception-in-packing", x_until=str(driver))
    unit.install()
    started = ctl("start", unit.device, env=unit.manager.env)
    assert (started.returncode, started.stdout) == (1, f"{unit.device}: started\n")
    assert (
        f"{unit.device} m/target failed: loader of m/target ended with status 1" in started.stderr
    )
    assert "it is tried again" in started.stderr
    until(lambda: unit.loads() >= 3, "it is tried again and again")
    assert unit.show("ActiveState") == "active"
    shown = ctl("status", env=unit.manager.env)
    assert shown.returncode == 0
    assert "failed" in shown.stdout or "loading" in shown.stdout
    driver.touch()
    until(lambda: unit.cache().state == "ready", "it serves")
    assert unit.show("NRestarts") == "0"
    until(
        lambda: unit.show("StatusText") == "serving 1 of 1 caches, 3.0 MiB", "the unit says so too"
    )


def test_what_is_served_stays_served_while_another_model_is_tried_again(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    mount = short_tmp / "mounted"
    late = model("late", checkpoint, x_fault="exit-3-silently-in-packing", x_until=str(mount))
    daemon = make_daemon([model("tiny", checkpoint), late]).start()
    with daemon.client() as engine:
        engine.attach(key_of({"model": str(checkpoint)})).close()
        failed = daemon.until(lambda s: caches(s)["late/target"].retry_at is not None, "it failed")
        assert caches(failed)["tiny/target"].state == "ready"
        mount.touch()
        daemon.until(lambda s: caches(s)["late/target"].state == "ready", "it is served")
        assert not caches(daemon.status())["late/target"].error
        assert [e.pid for e in caches(daemon.status())["tiny/target"].engines] == [os.getpid()]


def test_what_only_the_operator_can_mend_is_not_tried_again(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    spawns = short_tmp / "spawns"
    broken = model("broken", checkpoint, x_fault="refuse-before-key", x_spawns=str(spawns))
    flaky = model("flaky", checkpoint, x_fault="exception-in-packing", x_spawns=str(spawns))
    daemon = make_daemon([model("tiny", checkpoint), broken, flaky]).start()
    until(lambda: spawns.read_text().count("flaky") >= 3, "the other one is tried again")
    assert spawns.read_text().count("broken") == 1
    assert caches(daemon.status())["broken/target"].retry_at is None


def test_drop_of_what_is_tried_again_ends_the_trying(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    spawns = short_tmp / "spawns"
    flaky = model("flaky", checkpoint, x_fault="exception-in-packing", x_spawns=str(spawns))
    daemon = make_daemon([flaky]).start()

    def dropped() -> bool:
        # While it is being tried, it is refused.
        with daemon.client("ctl") as tool:
            return isinstance(tool.ask(Drop(cache="flaky/target")), Done)

    until(dropped, "it is dropped between two attempts")
    (cache,) = daemon.status().caches
    assert (cache.state, cache.retry_at) == ("released", None)


def test_status_and_start_of_a_unit_that_systemd_gave_up_print_the_way_back(unit: Unit) -> None:
    crash = unit.spawns.with_name("crash")
    crash.write_text("#!/bin/sh\nexit 1\n")
    crash.chmod(0o755)
    unit.install("RestartSec=1ms", "ExecStart=", f"ExecStart={crash}")
    unit.systemctl("start", check=False)
    until(lambda: unit.show("ActiveState") == "failed", "the manager has given up")
    way_back = f"systemctl --user reset-failed {unit.name}, then weightcachectl start {unit.device}"
    for command in ("start", "status"):
        done = ctl(command, unit.device, env=unit.manager.env)
        assert way_back in done.stderr, (command, done)
        assert done.returncode == {"start": 1, "status": 3}[command]
    examined = ctl("doctor", env=unit.manager.env)
    assert f"systemctl --user reset-failed {unit.name}; weightcachectl start" in examined.stdout
    # And that is one.
    unit.install()
    unit.systemctl("reset-failed")
    assert ctl("start", unit.device, env=unit.manager.env).returncode == 0


# ---- memory


def test_loader_that_the_kernel_kills_leaves_the_unit_and_what_it_serves(
    unit: Unit, tmp_path: Path
) -> None:
    with memory_cgroup(200 << 20) as procs:
        script = tmp_path / "limited-loader"
        script.write_text(f"#!/bin/sh\necho $$ > {procs}\nexec {LOADER}\n")
        hungry = model("hungry", unit.checkpoint, unit.device, x_fault="eat-memory-in-packing")
        write_manifest(unit.manifest, [model("m", unit.checkpoint, unit.device), hungry])
        unit.install(
            "ExecStart=",
            f"ExecStart={sys.executable} -m weightcached serve %i --manifest {unit.manifest} "
            f'--loader-command "sh {script}"',
        ).systemctl("start")
        # Systemd itself notices the kernel's kills with cgroup version 2 only; it is told not to act.
        assert unit.show("OOMPolicy") == "continue"
        with unit.client() as engine:
            engine.attach(key_of(unit.engine)).close()
            found = caches(engine.status())
        assert (found["m/target"].state, unit.show("ActiveState")) == ("ready", "active")
        assert "loader of hungry/target died of SIGKILL" in unit.log()
        assert unit.show("NRestarts") == "0"
        unit.systemctl("stop")


# ---- more segments than the unit's descriptor store takes


def test_generation_that_the_store_cannot_hold_is_served_and_said_to_be_lost_at_a_restart(
    unit: Unit,
) -> None:
    unit.configure(x_segments=8)
    # systemd 254 and newer say it themselves.
    unit.install("FileDescriptorStoreMax=8", "Environment=FDSTORE=8").systemctl("start")
    cache = unit.cache()
    assert (cache.state, cache.segments) == ("ready", 8)
    assert cache.warning == (
        "a restart of the daemon will load it again: the descriptor store holds 1 of 8, these are 9 more: "
        "raise FileDescriptorStoreMax= with a drop-in"
    )
    assert cache.warning in ctl("status", env=unit.manager.env).stdout
    # Half a generation would be of no use.
    assert unit.show("NFileDescriptorStore") == "0"
    killed(unit)
    assert (unit.cache().source, unit.loads()) == ("loaded", 2)
    unit.install("FileDescriptorStoreMax=16", "Environment=FDSTORE=16").systemctl("restart")
    assert unit.cache().warning == ""
    killed(unit)
    assert (unit.cache().source, unit.loads()) == ("adopted", 3)


# ---- what was dropped


def killed(unit: Unit) -> None:
    pid = unit.pid
    os.kill(pid, signal.SIGKILL)
    until(
        lambda: unit.pid not in (0, pid) and unit.show("ActiveState") == "active",
        "systemd has restarted the unit",
    )


def restarted(unit: Unit) -> None:
    unit.systemctl("restart")


@pytest.mark.parametrize("event", [killed, restarted])
def test_dropped_cache_stays_dropped_until_a_reload(
    unit: Unit, event: Callable[[Unit], None]
) -> None:
    unit.install().systemctl("start")
    with unit.client() as tool:
        tool.expect(Drop(cache="m/target"), Done)
    event(unit)
    cache = unit.cache()
    assert (cache.state, cache.error) == (
        "released",
        "dropped: 'weightcachectl reload' brings it back",
    )
    assert unit.loads() == 1
    unit.systemctl("reload")
    assert (unit.cache().state, unit.loads()) == ("ready", 2)
    # Nothing is left of the note that would take it away again.
    event(unit)
    assert (unit.cache().state, unit.cache().source, unit.loads()) == ("ready", "adopted", 2)


def test_dropped_cache_is_loaded_after_a_stop_and_a_start(unit: Unit) -> None:
    unit.install().systemctl("start")
    with unit.client() as tool:
        tool.expect(Drop(cache="m/target"), Done)
    unit.systemctl("stop")
    unit.systemctl("start")
    assert (unit.cache().state, unit.loads()) == ("ready", 2)


@pytest.mark.parametrize("dropped", ["gone/target", "kept/target", "changed/target"])
def test_drop_during_a_reload_with_a_slow_store_ends(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path, dropped: str
) -> None:
    slow = Pauses(short_tmp / "pauses")
    daemon = make_daemon([model(name, checkpoint) for name in ("gone", "kept", "changed")])
    daemon.module = "tests.fakes.pauses"
    daemon.env = {pauses.VARIABLE: str(slow.directory)}
    daemon.start()
    # One whose first load failed has nothing to take out, and the next to be taken out would wait.
    until(daemon.is_ready, lambda: f"all are served: {daemon.status().caches}")
    write_manifest(
        daemon.manifest, [model("kept", checkpoint), model("changed", checkpoint, x_segments=3)]
    )
    slow.arm("unstore")
    with daemon.client("ctl") as tool, daemon.client("ctl") as other:
        tool.send(Reload())
        until(lambda: slow.reached("unstore"), "the reload waits for the store")
        other.send(Drop(cache=dropped, force=True))
        # A Drop that waits for the store as well is answered later.
        if dropped != "kept/target":
            refused = other.receive()
            assert isinstance(refused, Refused), refused
            assert refused.code == ("loading" if dropped == "changed/target" else "unknown-cache")
        slow.let_go("unstore", lambda: False)
        if dropped == "kept/target":
            assert isinstance(other.receive(), Done)
        reply = tool.receive()
        while isinstance(reply, Progress):
            reply = tool.receive()
    assert isinstance(reply, ReloadReply), reply
    states = {name: (c.state, c.phase) for name, c in caches(daemon.status()).items()}
    assert states == {
        "changed/target": ("ready", ""),
        "kept/target": ("released" if dropped == "kept/target" else "ready", ""),
    }
    assert "Traceback" not in daemon.log
    # And each can be had again.
    assert isinstance(reload(daemon), ReloadReply)
    assert {c.state for c in daemon.status().caches} == {"ready"}


# ---- a group


def test_peers_of_a_rank_that_lost_its_generation_load_along_and_keep_theirs(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path, gate: Path
) -> None:
    """With a loader that waits as in the meeting; test_real_loaders.py has two that meet."""
    spawns, devices = short_tmp / "spawns", ["cpu0", "cpu1"]

    def rank(device: str, **engine: Any) -> DaemonProcess:
        entry = model("m", checkpoint, x_spawns=str(spawns), tensor_parallel_size=2, **engine)
        entry |= {"devices": devices, "rendezvous": {"group": "127.0.0.1:29777"}}
        daemon = make_daemon(device=device)
        daemon.manifest = short_tmp / f"{device}.yaml"
        write_manifest(daemon.manifest, [entry])
        return daemon

    kept = rank("cpu0").start()
    lost = rank("cpu1", x_gate_before_key=str(gate)).launch()
    until(lambda: "loaded along cache=m/target" in kept.log, "the peer loads along")
    gate.write_bytes(b"")
    lost.notified("READY=1")
    (served,) = kept.until(lambda s: not s.caches[0].phase, "its load is over").caches
    assert (served.state, served.generation, served.error) == ("ready", 1, "")
    assert kept.status().old_generations == []
    assert lost.status().caches[0].state == "ready"
    # Its own, and the one along.
    assert len(spawns.read_text().splitlines()) == 3


# ---- old generations


def test_engine_on_an_old_generation_is_shown_and_does_not_keep_the_new_one_from_being_dropped(
    daemon: DaemonProcess, checkpoint: Path, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(daemon, checkpoint)
    engine.attached()
    here = ("--socket-dir", str(daemon.runtime))
    assert ctl("reload", *here, "--force").returncode == 0
    (cache,) = daemon.status().caches
    (held,) = cache.engines
    assert (cache.generation, held.pid, held.generation, held.bytes) == (
        2,
        engine.process.pid,
        1,
        3 << 20,
    )
    shown = ctl("status", *here).stdout.splitlines()
    assert [line.split()[1:6] for line in shown[1:]] == [
        ["tiny/target", "ready", "2", "3.0", "MiB"],
        ["tiny/target", "old", "1", "3.0", "MiB"],
    ]
    assert f"mapped by pid {engine.process.pid}" in shown[2]
    assert ctl("drop", *here, "tiny").stdout == "cpu0 tiny/target: dropped\n"
    (old,) = daemon.status().old_generations
    assert (old.cache, old.generation, old.bytes) == ("tiny/target", 1, 3 << 20)
    engine.kill()
    daemon.until(lambda status: not status.old_generations, "its end frees the generation")
