"""The daemon under a real user manager: the promises of its unit to an operator."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.checkpoints import key_of
from tests.fakes.daemon import BOUND_S, has_ended, until
from tests.systemd.conftest import Unit, holds
from tests.systemd.manager import WATCHDOG_S, PrivateManager
from weightcached.wire.messages import Rejoin, Rejoined


def content(unit: Unit) -> list[tuple[int, str]]:
    """Inode and sha256 of every segment, as an engine receives them."""
    with unit.client() as client:
        handout = client.attach(key_of(unit.engine))
        found = []
        for fd in handout.segment_fds:
            info = os.fstat(fd.fileno())
            found.append(
                (info.st_ino, hashlib.sha256(os.pread(fd.fileno(), info.st_size, 0)).hexdigest())
            )
        handout.close()
    return found


def replaced(unit: Unit, pid: int) -> Callable[[], bool]:
    """Whether another process than `pid` serves the unit now."""
    return lambda: unit.pid not in (0, pid) and unit.show("ActiveState") == "active"


def killed(unit: Unit) -> None:
    pid = unit.pid
    os.kill(pid, signal.SIGKILL)
    until(replaced(unit, pid), "systemd has restarted the unit")


def restarted(unit: Unit) -> None:
    unit.systemctl("restart")


def reexecuted_and_killed(unit: Unit) -> None:
    unit.manager.reexecute()
    killed(unit)


def stalled(unit: Unit) -> None:
    pid = unit.pid
    os.kill(pid, signal.SIGSTOP)
    until(replaced(unit, pid), "the watchdog has replaced the daemon")


def test_start_returns_when_the_weights_are_served(unit: Unit) -> None:
    unit.configure(x_steps=5)
    unit.install().systemctl("start")
    assert unit.cache().state == "ready"
    unit.says("serving 1 of 1 caches, 3.0 MiB")


@pytest.mark.parametrize("event", [killed, restarted, reexecuted_and_killed, stalled])
def test_weights_outlive_the_daemon_without_a_load(
    unit: Unit, event: Callable[[Unit], None]
) -> None:
    unit.install(f"WatchdogSec={WATCHDOG_S}" if event is stalled else "").systemctl("start")
    before, pid = content(unit), unit.pid
    with unit.client() as engine:
        ready = engine.attach(key_of(unit.engine)).ready
        event(unit)
        assert engine.closed_by_daemon()
    assert unit.pid != pid
    assert content(unit) == before
    assert (unit.cache().source, unit.cache().generation, unit.loads()) == ("adopted", 1, 1)
    with unit.client() as engine:
        rejoin = Rejoin(
            cache=ready.cache, generation=ready.generation, index_digest=ready.index_digest
        )
        engine.expect(rejoin, Rejoined)


def test_weights_outlive_two_daemons(unit: Unit) -> None:
    unit.install().systemctl("start")
    before = content(unit)
    killed(unit)
    killed(unit)
    assert content(unit) == before
    assert unit.loads() == 1


def test_stop_frees_what_daemon_and_manager_hold(unit: Unit, manager: PrivateManager) -> None:
    unit.install().systemctl("start")
    # Two segments and an index.
    holds(manager, 3)
    unit.systemctl("stop")
    holds(manager, 0)
    assert unit.show("Result") == "success"
    assert not unit.socket.exists()


def test_reload_leaves_one_generation_in_the_store(unit: Unit, manager: PrivateManager) -> None:
    unit.install().systemctl("start")
    unit.configure(x_segments=4)
    unit.systemctl("reload")
    assert unit.cache().generation == 2
    holds(manager, 5)
    killed(unit)
    assert (unit.cache().source, unit.cache().generation, unit.loads()) == ("adopted", 2, 2)


@pytest.mark.slow
def test_watchdog_is_fed_while_the_daemon_serves(unit: Unit) -> None:
    unit.install(f"WatchdogSec={WATCHDOG_S}").systemctl("start")
    pid, fed = unit.pid, set()

    def fed_often() -> bool:
        fed.add(unit.show("WatchdogTimestampMonotonic"))
        return len(fed) == 4

    until(fed_often, "the watchdog was fed again and again")
    assert (unit.pid, unit.show("NRestarts")) == (pid, "0")


@pytest.mark.slow
def test_start_longer_than_its_timeout_survives_with_progress(unit: Unit) -> None:
    # Long enough for the daemon to say that it makes progress, also on a busy machine.
    unit.configure(x_steps=200)
    unit.install("TimeoutStartSec=15s").systemctl("start")
    assert unit.cache().load_seconds > 15


@pytest.mark.slow
def test_start_without_progress_is_killed_with_its_loader(unit: Unit) -> None:
    unit.configure(x_fault="hang-at-start")
    # Long enough for a loader to start.
    unit.install("TimeoutStartSec=15s", "Restart=no")
    assert unit.systemctl("start", check=False) != 0
    assert unit.show("Result") == "timeout"
    (loader,) = unit.spawns.read_text().splitlines()
    until(lambda: has_ended(int(loader.split()[-1])), "the loader is gone")


@pytest.mark.parametrize("fault", ["manifest", "refuse-before-key"])
def test_what_only_the_operator_can_mend_is_not_tried_again(unit: Unit, fault: str) -> None:
    if fault == "manifest":
        unit.manifest.write_text("version: 1\nmodels: 7\n")
    else:
        unit.configure(x_fault=fault)
    unit.install()
    assert unit.systemctl("start", check=False) != 0
    assert (unit.show("ExecMainStatus"), unit.show("NRestarts")) == ("78", "0")
    assert unit.show("ActiveState") == "failed"


def test_load_that_may_succeed_later_is_tried_again_without_a_restart(unit: Unit) -> None:
    unit.configure(x_fault="exception-in-packing")
    unit.install().systemctl("start")
    assert unit.show("ActiveState") == "active"
    # Between two attempts.
    until(lambda: unit.cache().state == "failed", "it fails")
    unit.says("m/target: loader of m/target ended with status 1: RuntimeError: CUDA error")
    until(lambda: unit.loads() > 2, "it is tried again")
    assert unit.show("NRestarts") == "0"


def test_reload_waits_until_the_new_generation_is_served(unit: Unit, tmp_path: Path) -> None:
    unit.install().systemctl("start")
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    unit.configure(x_gate=str(gate))
    command = ["systemctl", "--user", "reload", unit.name]
    with subprocess.Popen(command, env=unit.manager.env) as systemctl:
        until(lambda: unit.show("ActiveState") == "reloading", "the unit reloads")
        until(lambda: unit.cache().phase == "weights", "the loader runs")
        assert unit.cache().generation == 1
        assert systemctl.poll() is None
        gate.write_bytes(b"")
        assert systemctl.wait(BOUND_S) == 0
    assert unit.cache().generation == 2
    assert unit.show("ActiveState") == "active"


def test_failed_reload_keeps_what_is_served(unit: Unit) -> None:
    unit.install().systemctl("start")
    before = content(unit)
    unit.configure(x_fault="sigkill-in-packing")
    assert unit.systemctl("reload", check=False) != 0
    assert unit.show("ActiveState") == "active"
    assert content(unit) == before
    unit.says("m/target: loader of m/target died of SIGKILL")


def test_two_units_for_one_device_are_told_apart(unit: Unit, manager: PrivateManager) -> None:
    unit.install().systemctl("start")
    pid = unit.pid
    second = f"second-{unit.name}"
    text = (manager.unit_dir / unit.name).read_text()
    manager.write_unit(second, text + "Restart=no\n")
    assert manager.systemctl("start", second, check=False).returncode != 0
    assert manager.show(second, "ExecMainStatus") == "75"
    assert f"device {unit.device} is served by another weightcached (pid {pid})" in unit.log()
    assert unit.cache().state == "ready"
    manager.systemctl("reset-failed", second)
