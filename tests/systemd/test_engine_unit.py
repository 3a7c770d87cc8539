"""The engine service's own unit file under a real user manager, with fake engines."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.daemon import BOUND_S, ROOT, print_log, until
from tests.fakes.service import MODULE, ClientLoop, Packages, ServiceProcess
from tests.systemd.manager import WATCHDOG_S, PrivateManager
from weightcached.system.units import source

NAME = "weightcached-engine@chat.service"


class UnitService(ServiceProcess):
    """The service as a unit of the private manager."""

    def __init__(self, manager: PrivateManager, directory: Path) -> None:
        super().__init__(directory)
        self.unit_manager = manager
        self.runtime = manager.runtime_dir / "weightcached"
        self.home = self.runtime / "engines/chat"
        python = f"{shlex.quote(sys.executable)} -m"
        commands = {
            "Start=/usr/bin/weightcached engine %i": (
                f"Start={python} weightcached engine %i --manifest {self.manifest} --engine-module {MODULE}"
            ),
            "Reload=/usr/bin/weightcachectl engine restart %i": (
                f"Reload={python} weightcached.cli.weightcachectl engine restart %i"
            ),
        }
        text = source("weightcached-engine@.service").read_text()
        for theirs, ours in commands.items():
            assert text.count(f"\nExec{theirs}\n") == 1
            text = text.replace(f"\nExec{theirs}\n", f"\nExec{ours}\n")
        more = f"Environment=PYTHONPATH={ROOT} PYTHONDONTWRITEBYTECODE=1\nWorkingDirectory={ROOT}\n"
        log = f"StandardOutput=append:{self.log_path}\nStandardError=append:{self.log_path}\n"
        manager.write_unit(
            NAME.replace("chat", ""), text.replace("[Service]\n", f"[Service]\n{more}{log}")
        )

    @contextlib.contextmanager
    def drop_in(self, line: str) -> Iterator[None]:
        """One more line of the unit's section [Service], for starts within the block."""
        directory = self.unit_manager.unit_dir / f"{NAME}.d"
        directory.mkdir()
        self.unit_manager.write_unit(f"{directory.name}/test.conf", f"[Service]\n{line}\n")
        try:
            yield
        finally:
            shutil.rmtree(directory)
            self.unit_manager.systemctl("daemon-reload")

    @property
    def supervisor(self) -> int:
        return int(self.unit_manager.show(NAME, "MainPID"))


@pytest.fixture
def service(manager: PrivateManager) -> Iterator[UnitService]:
    directory = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))
    service = UnitService(manager, directory)
    yield service
    print_log(service.log_path)
    manager.systemctl("stop", NAME, check=False)
    manager.systemctl("reset-failed", NAME, check=False)
    service.close()
    shutil.rmtree(directory)


def test_unit_is_ready_when_an_engine_serves_and_stop_leaves_nothing(service: UnitService) -> None:
    service.unit_manager.systemctl("start", NAME)
    assert service.get()["engine"] == 1
    service.until_standby()
    until(
        lambda: service.unit_manager.show(NAME, "StatusText").startswith("serving, engine 1"),
        "the manager has read what it serves",
    )
    service.unit_manager.systemctl("stop", NAME)
    assert service.unit_manager.show(NAME, "Result") == "success"
    assert service.processes() == []


def test_manager_restarts_a_killed_supervisor_with_socket_and_engines(service: UnitService) -> None:
    service.unit_manager.systemctl("start", NAME)
    before = service.until_standby()
    with ClientLoop(service) as clients:
        os.kill(service.supervisor, signal.SIGKILL)
        after = service.until(
            lambda s: s["supervisor_pid"] != before["supervisor_pid"] and s["state"] == "serving",
            "another supervisor has taken the engines back",
        )
        seen = len(clients.answers)
        until(lambda: len(clients.answers) > seen, "answers go on")
    assert clients.refused == clients.failed == []
    assert [e["pid"] for e in after["engines"]] == [e["pid"] for e in before["engines"]]
    assert "taken back" in service.log


def test_supervisor_and_all_engines_killed_refuse_nobody(service: UnitService) -> None:
    service.unit_manager.systemctl("start", NAME)
    service.until_standby()
    with ClientLoop(service) as clients:
        os.kill(service.supervisor, signal.SIGKILL)
        for pid in service.processes():
            # One of them ends with another.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        clients.until_answers(3)
    assert clients.refused == [], "the manager has kept the listening socket"


def test_supervisor_of_newer_software_has_process_socket_and_engines(service: UnitService) -> None:
    packages = Packages(service.directory)
    with service.drop_in(f"Environment=PYTHONPATH={packages.path}"):
        service.unit_manager.systemctl("start", NAME)
        before = service.until_standby()
        packages.upgrade()
        with ClientLoop(service) as clients:
            service.unit_manager.systemctl("reload", NAME)
            after = service.until_standby()
            assert after["supervisor_since"] > before["supervisor_since"]
            assert service.supervisor == before["supervisor_pid"]
            assert service.unit_manager.show(NAME, "NFileDescriptorStore") == "1"
            clients.until_answers(after["generation"])
        assert clients.refused == clients.failed == []
        os.kill(service.supervisor, signal.SIGKILL)
        service.until(
            lambda s: s["supervisor_pid"] != before["supervisor_pid"] and s["state"] == "serving",
            "another supervisor has taken the engines back",
        )
        service.unit_manager.systemctl("stop", NAME)
        assert service.unit_manager.show(NAME, "Result") == "success"
        assert service.processes() == []


@pytest.mark.slow
def test_supervisor_that_hangs_is_replaced(service: UnitService) -> None:
    service.unit_manager.systemctl("start", NAME)
    with service.drop_in(f"WatchdogSec={WATCHDOG_S}"):
        service.unit_manager.systemctl("restart", NAME)
        before = service.until_standby()
        os.kill(service.supervisor, signal.SIGSTOP)
        after = service.until(
            lambda s: s["supervisor_pid"] != before["supervisor_pid"], "another supervisor"
        )
        assert [e["pid"] for e in after["engines"]] == [e["pid"] for e in before["engines"]]


def test_start_that_fails_is_told_in_the_engines_words(
    service: UnitService, tmp_path: Path
) -> None:
    service.write_manifest(arguments={"x_fail": "no such quantization"})
    # Hears of the failure only when the manager has begun the next attempt, as on a busy machine.
    script, real = tmp_path / "systemctl", shutil.which("systemctl")
    script.write_text(
        f'#!/bin/sh\n{real} "$@"; status=$?\n'
        f'begun() {{ {real} --user show -p NRestarts --value {NAME} | grep -v "^0$"; }}\n'
        'case "$*" in *" start "*) until begun >&2; do sleep 0.05; done;; esac\n'
        "exit $status\n"
    )
    script.chmod(0o755)
    path = {"PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, "-m", "weightcached.cli.weightcachectl", "engine", "start", "chat"],
        env=service.unit_manager.env | path, capture_output=True, text=True, timeout=BOUND_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "the last start failed: no such quantization; journalctl --user -u " in done.stderr


def test_wrong_manifest_ends_the_unit_for_good(service: UnitService) -> None:
    service.manifest.write_text(
        json.dumps({"version": 1, "models": [service.model], "engines": []})
    )
    service.unit_manager.systemctl("start", NAME, check=False)
    assert service.unit_manager.show(NAME, "ExecMainStatus") == "78"
    assert service.unit_manager.show(NAME, "ActiveState") == "failed"
