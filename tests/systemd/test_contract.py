"""Promises of the product's unit under a real manager: limits, grouping, upgrade, hardening."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes import pauses
from tests.fakes.checkpoints import key_of, write_checkpoint
from tests.fakes.daemon import (
    LOADER,
    ROOT,
    has_ended,
    model,
    remove_tree,
    until,
    write_manifest,
)
from tests.fakes.pauses import Pauses
from tests.systemd.conftest import SETTINGS, Unit, holds, product_unit
from tests.systemd.manager import WATCHDOG_S, PrivateManager
from weightcached.index.tensors import FORMAT_VERSION

BURST = 10


def test_unit_is_active_only_after_the_handshake_with_its_own_socket(
    unit: Unit, tmp_path: Path
) -> None:
    gates = Pauses(tmp_path / "pauses")
    gates.arm("handshake")
    unit.install(f"Environment={pauses.VARIABLE}={gates.directory}", module="tests.fakes.pauses")
    unit.systemctl("start", block=False)
    until(lambda: gates.reached("handshake"), "it is about to shake hands")
    # Everything is loaded and stored, and the unit is not yet up.
    assert unit.show("ActiveState") == "activating"
    gates.let_go("handshake", lambda: False)
    until(lambda: unit.show("ActiveState") == "active", "the unit is up")
    # Logged after the manager has been told.
    until(lambda: "serving device=" in unit.log(), "it says that it serves")
    assert unit.log().count("serving device=") == 1


def test_daemon_that_always_crashes_is_given_up_after_the_burst(unit: Unit, tmp_path: Path) -> None:
    crash = tmp_path / "crash"
    crash.write_text("#!/bin/sh\nexit 1\n")
    crash.chmod(0o755)
    unit.install("RestartSec=1ms", "ExecStart=", f"ExecStart={crash}").systemctl(
        "start", check=False
    )
    until(
        lambda: (unit.show("ActiveState"), unit.show("NRestarts")) == ("failed", str(BURST)),
        "the manager has given up",
    )
    # And after the fix the unit works again.
    unit.install()
    unit.systemctl("reset-failed")
    unit.systemctl("start")
    assert unit.cache().state == "ready"


def test_daemon_reexec_of_the_manager_loses_nothing(unit: Unit, manager: PrivateManager) -> None:
    unit.install().systemctl("start")
    pid = unit.pid
    with unit.client() as engine:
        engine.attach(key_of(unit.engine)).close()
        manager.reexecute()
        assert (unit.pid, unit.show("ActiveState"), unit.show("NRestarts")) == (pid, "active", "0")
        holds(manager, 3)
        assert engine.status().caches[0].engines[0].pid == os.getpid()
    unit.systemctl("stop")
    holds(manager, 0)


def test_index_of_an_older_format_in_the_store_is_loaded_anew(
    unit: Unit, manager: PrivateManager
) -> None:
    unit.install(module="tests.fakes.older").systemctl("start")
    holds(manager, 3)
    unit.install().systemctl("restart")
    assert (unit.cache().source, unit.cache().state, unit.loads()) == ("loaded", "ready", 2)
    assert (
        f"descriptors=3 reason=tensor index has format version 0, this software reads {FORMAT_VERSION}"
        in unit.log()
    )
    # Of the old set nothing is left.
    holds(manager, 3)
    assert unit.log().count("Traceback") == 0


@pytest.mark.slow
def test_runtime_directory_removed_under_the_daemon_is_made_again_without_a_restart(
    unit: Unit,
) -> None:
    unit.install(f"WatchdogSec={WATCHDOG_S}").systemctl("start")
    pid = unit.pid
    remove_tree(unit.socket.parent)
    until(unit.answers, "the daemon has noticed")
    assert (unit.cache().source, unit.loads()) == ("loaded", 1)
    assert (unit.pid, unit.show("NRestarts"), unit.show("ActiveState")) == (pid, "0", "active")


@pytest.mark.slow
def test_session_directory_removed_under_the_manager_costs_no_weights(tmp_path: Path) -> None:
    """As logind removes /run/user/<uid>, with the manager's sockets, but while the manager lives."""
    with PrivateManager() as manager:
        unit = Unit(manager, tmp_path, "cpu900")
        unit.install(f"WatchdogSec={WATCHDOG_S}").systemctl("start")
        pid = unit.pid
        with unit.client() as engine:
            ready = engine.attach(key_of(unit.engine)).ready
            remove_tree(manager.runtime_dir)
            until(
                lambda: "our socket is gone and cannot be made again" in unit.log(),
                "the daemon says so",
            )
            # Longer than the watchdog waits.
            silent_until_s = time.monotonic() + 1.5 * WATCHDOG_S
            until(lambda: time.monotonic() > silent_until_s, "the watchdog would have bitten")
            assert engine.status().caches[0].engines[0].pid == os.getpid()
            holds(manager, 3)
            manager.runtime_dir.mkdir(mode=0o700)
            until(unit.answers, "its socket is made again")
        with unit.client() as engine:
            assert engine.status().pid == pid
            assert engine.attach(key_of(unit.engine)).ready == ready
        # No systemctl reaches it any more.
        os.kill(manager.pid, signal.SIGTERM)
        until(
            lambda: has_ended(pid),
            "the manager has stopped the unit on its way out",
        )
        assert unit.log().count("stopped device=cpu900") == 1


def test_hardening_of_the_unit_is_in_force_on_daemon_and_loader(unit: Unit, tmp_path: Path) -> None:
    gates = Pauses(tmp_path / "pauses")
    gates.arm("weights")
    unit.configure(x_pauses=str(gates.directory))
    unit.install().systemctl("start", block=False)
    until(lambda: gates.reached("weights"), "the loader runs")
    loader = unit.spawns.read_text().split()[-1]
    for pid in (str(unit.pid), loader):
        status = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        # All options but two are filters of mode 2.
        assert (status["NoNewPrivs"], status["Seccomp"], status["Umask"]) == ("1", "2", "0077")
        assert int(status["Seccomp_filters"]) >= 6
    limits = Path(f"/proc/{unit.pid}/limits").read_text()
    assert "8192                 8192                 files" in limits
    gates.let_go("weights", lambda: False)
    until(lambda: unit.show("ActiveState") == "active", "the unit is up")


FORBIDDEN = """
import ctypes, errno, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def family(number):
    try: socket.socket(number, socket.SOCK_DGRAM).close()
    except OSError as e: return errno.errorcode[e.errno]
    return "works"
for name in ("AF_INET", "AF_INET6", "AF_NETLINK", "AF_UNIX", "AF_ALG", "AF_PACKET"):
    print(name, family(getattr(socket, name)))
for call in ("swapoff", "umount"):
    getattr(libc, call)(b"/nowhere")
    print(call, errno.errorcode[ctypes.get_errno()])
"""


def test_filters_of_the_unit_forbid_and_allow_what_they_should(unit: Unit, tmp_path: Path) -> None:
    script, out = tmp_path / "forbidden.py", tmp_path / "out"
    script.write_text(FORBIDDEN)
    start = f"ExecStart={sys.executable} {script}"
    unit.install(
        "Type=oneshot", "Restart=no", "ExecStart=", start, f"StandardOutput=file:{out}"
    ).systemctl("start")
    assert out.read_text().split() == [
        *("AF_INET", "works", "AF_INET6", "works", "AF_NETLINK", "works", "AF_UNIX", "works"),
        *("AF_ALG", "EAFNOSUPPORT", "AF_PACKET", "EAFNOSUPPORT"),
        # Without the filter it would be ENOENT.
        *("swapoff", "EPERM", "umount", "ENOENT"),
    ]


# ---- the target


class Group:
    """Two enabled units of the template, and the target."""

    def __init__(self, manager: PrivateManager, directory: Path) -> None:
        self.manager = manager
        self.units = ["weightcached@cpu901.service", "weightcached@cpu902.service"]
        manifest = directory / "manifest.yaml"
        checkpoint = write_checkpoint(directory / "checkpoint")
        write_manifest(manifest, [model(f"m{n}", checkpoint, f"cpu90{n}") for n in (1, 2)])
        start = f'{sys.executable} -m weightcached serve %i --manifest {manifest} --loader-command "{LOADER}"'
        text = product_unit(
            start, f"{sys.executable} -m tests.fakes.client %t/weightcached/%i.sock"
        )
        text += SETTINGS.format(root=ROOT, log=directory / "daemon.log")
        (manager.unit_dir / "weightcached@.service").write_text(text)
        manager.write_unit(
            "weightcached.target", (ROOT / "systemd/weightcached.target").read_text()
        )
        manager.systemctl("enable", *self.units)

    def states(self) -> list[str]:
        return [self.manager.show(unit, "ActiveState") for unit in self.units]

    def close(self) -> None:
        self.manager.systemctl("stop", "weightcached.target", *self.units, check=False)
        self.manager.systemctl("disable", "weightcached.target", *self.units, check=False)
        for name in ("weightcached@.service", "weightcached.target"):
            (self.manager.unit_dir / name).unlink()
        self.manager.systemctl("daemon-reload")


@pytest.fixture
def group(manager: PrivateManager, tmp_path: Path) -> Iterator[Group]:
    group = Group(manager, tmp_path)
    yield group
    group.close()
    holds(manager, 0)


def test_target_starts_restarts_and_stops_every_enabled_unit(
    group: Group, manager: PrivateManager
) -> None:
    assert group.states() == ["inactive", "inactive"]
    manager.systemctl("start", "weightcached.target")
    until(lambda: group.states() == ["active", "active"], "both units are up")
    pids = [manager.show(unit, "MainPID") for unit in group.units]
    manager.systemctl("restart", "weightcached.target")
    until(lambda: group.states() == ["active", "active"], "both units are up again")
    assert not {manager.show(unit, "MainPID") for unit in group.units} & set(pids)
    manager.systemctl("stop", "weightcached.target")
    until(lambda: group.states() == ["inactive", "inactive"], "both units have stopped")
    holds(manager, 0)


def test_one_unit_of_the_group_restarts_without_the_other(
    group: Group, manager: PrivateManager
) -> None:
    manager.systemctl("start", "weightcached.target")
    until(lambda: group.states() == ["active", "active"], "both units are up")
    first, second = (int(manager.show(unit, "MainPID")) for unit in group.units)
    os.kill(first, signal.SIGKILL)
    until(
        lambda: int(manager.show(group.units[0], "MainPID")) not in (0, first),
        "the first is replaced",
    )
    until(lambda: group.states() == ["active", "active"], "both units are up")
    assert int(manager.show(group.units[1], "MainPID")) == second


def test_exposure_that_systemd_reckons_is_no_worse_than_documented(
    group: Group, manager: PrivateManager
) -> None:
    command = ["systemd-analyze", "--user", "--no-pager", "security", group.units[0]]
    done = subprocess.run(command, env=manager.env, capture_output=True, text=True, check=True)
    overall = done.stdout.strip().splitlines()[-1]
    documented = (ROOT / "docs/security.md").read_text()
    line = next(line for line in documented.splitlines() if "Overall exposure level" in line)
    assert float(overall.split(": ")[1].split()[0]) <= float(line.split(": ")[1].split()[0])
