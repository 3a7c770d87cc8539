"""docs/faults.md, the tools: no home, no runtime directory, several daemons, running units."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.engine.conftest import ANSWER_TIMEOUT_S
from tests.everyday.test_daemon import ctl
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.daemon import DaemonProcess, environment, model, until, write_manifest
from tests.systemd.manager import PrivateManager
from weightcached.cli.weightcachectl import main
from weightcached.system import host_checks

Launcher = Callable[..., DaemonProcess]
# No passwd entry has it.
NOBODY_KNOWN = 987654
# Another uid, which may still read an interpreter that lies in root's home.
BECOME = [
    "setpriv",
    *(f"--reuid={NOBODY_KNOWN}", f"--regid={NOBODY_KNOWN}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
]


# ---- a shell that lacks something


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another uid")
@pytest.mark.parametrize(
    "command",
    [
        *(["weightcached.cli.weightcachectl", x] for x in ("doctor", "plan", "devices", "install")),
        ["weightcached.cli.weightcachectl", "uninstall"],
        ["weightcached", "serve", "cpu0", "--socket-dir", "{run}"],
    ],
    ids=lambda command: command[1],
)
def test_no_home_is_one_line_and_status_78(command: list[str], tmp_path: Path) -> None:
    kept = {x: os.environ[x] for x in ("PATH", "LANG") if x in os.environ}
    # In a directory that this uid may enter.
    run = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        os.chown(run, NOBODY_KNOWN, NOBODY_KNOWN)
        done = subprocess.run(
            [*BECOME, sys.executable, "-m", *(word.format(run=run) for word in command)],
            env=kept | {"PYTHONPATH": environment()["PYTHONPATH"], "XDG_RUNTIME_DIR": str(run)},
            cwd=run,
            capture_output=True,
            text=True,
            timeout=ANSWER_TIMEOUT_S,
            check=False,
        )
    finally:
        shutil.rmtree(run)
    assert done.returncode == 78, done
    assert "Traceback" not in done.stderr
    (line,) = [x for x in done.stderr.splitlines() if "INFO" not in x]
    assert (
        f"no home directory: HOME is not set and uid {NOBODY_KNOWN} has no passwd entry: set HOME"
        in line
    )


def test_tools_reach_a_daemon_in_a_directory_of_its_own(daemon: DaemonProcess) -> None:
    nowhere = {"XDG_RUNTIME_DIR": ""}
    here = ("--socket-dir", str(daemon.runtime))
    for command in (
        ["status"],
        ["explain", "tiny"],
        ["verify"],
        ["reload", "cpu0"],
        ["drop", "tiny/target"],
    ):
        done = ctl(*command, *here, env=nowhere)
        assert done.returncode == 0, done
        assert "cpu0" in done.stdout + done.stderr
    listed = ctl("devices", *here, env=nowhere)
    assert any(line.split()[0] == "cpu0" and "yes" in line for line in listed.stdout.splitlines())
    examined = ctl("doctor", *here, env=nowhere)
    assert f"{daemon.socket}: pid {daemon.pid}" in examined.stdout
    # Without the option they look elsewhere.
    assert ctl("status", "cpu0", env=nowhere).returncode != 0


# ---- several daemons


@pytest.fixture
def two(make_daemon: Launcher, checkpoint: Path, short_tmp: Path) -> list[DaemonProcess]:
    """Daemons of cpu0 with model a, and of cpu1 with model b."""
    other = write_checkpoint(short_tmp / "other", seed=2)
    models = [model("a", checkpoint), model("b", other, "cpu1")]
    return [make_daemon(models, device=device).start() for device in ("cpu0", "cpu1")]


def reload(daemon: DaemonProcess, *caches: str) -> tuple[int, str, str]:
    named = [word for cache in caches for word in ("--cache", cache)]
    done = ctl("reload", "--socket-dir", str(daemon.runtime), *named)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", ["a/target", "a"])
def test_reload_of_a_cache_passes_over_daemons_that_lack_it(
    two: list[DaemonProcess], name: str
) -> None:
    assert reload(two[0], name) == (
        0,
        f"cpu1: has no {name}, nothing to do\ncpu0 a/target: unchanged, generation 1\n",
        "",
    )


def test_reload_of_caches_of_different_daemons_does_each(two: list[DaemonProcess]) -> None:
    status, out, _ = reload(two[0], "a", "b/target")
    assert status == 0
    assert out.splitlines() == [
        "cpu0 a/target: unchanged, generation 1",
        "cpu1 b/target: unchanged, generation 1",
    ]


def test_reload_of_a_misspelt_cache_fails(two: list[DaemonProcess]) -> None:
    status, _, err = reload(two[0], "c")
    assert status == 1
    assert "no cache 'c' on cpu0: it has a/target" in err
    status, _, err = reload(two[0], "a", "c")
    assert (status, err) == (1, "weightcachectl: no daemon has a cache 'c'\n")


# ---- units


@pytest.fixture
def installed() -> Iterator[PrivateManager]:
    """A user manager with the units of `weightcachectl install`, and no model on cpu0."""
    with PrivateManager() as manager:
        assert ctl("install", env=manager.env).returncode == 0
        write_manifest(manager.config_dir / "weightcached/manifest.yaml", [])
        yield manager


def test_uninstall_beside_a_running_unit_is_refused(
    installed: PrivateManager, checkpoint: Path
) -> None:
    unit, manifest = (
        "weightcached@cpu0.service",
        installed.config_dir / "weightcached/manifest.yaml",
    )
    write_manifest(manifest, [model("elsewhere", checkpoint, "cpu5")])
    assert ctl("start", "cpu0", env=installed.env).returncode == 0
    refused = ctl("uninstall", env=installed.env)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"{unit} runs, and would lose resident weights" in refused.stderr
    assert f"systemctl --user disable --now {unit}" in refused.stderr
    assert (installed.unit_dir / "weightcached@.service").exists()
    assert installed.show(unit, "ActiveState") == "active"
    installed.systemctl("disable", "--now", unit)
    until(lambda: installed.show(unit, "ActiveState") == "inactive", "it is stopped")
    removed = ctl("uninstall", env=installed.env)
    assert removed.returncode == 0
    assert not (installed.unit_dir / "weightcached@.service").exists()


# ---- the driver's device nodes


def test_doctor_says_who_must_make_the_device_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first program of root: the driver is loaded, and there is no node yet."""
    dev, proc = tmp_path / "dev", tmp_path / "proc"
    gpu = proc / "gpus/0000:1b:00.0"
    gpu.mkdir(parents=True)
    dev.mkdir()
    (gpu / "information").write_text("Model: \t\t NVIDIA H200\nDevice Minor: \t 0\n")
    monkeypatch.setattr(host_checks, "DEV", dev)
    monkeypatch.setattr(host_checks, "PROC_NVIDIA", proc)

    def said() -> str:
        lines = CliRunner().invoke(main, ["doctor"]).stdout.splitlines()
        return next((line for line in lines if "device nodes:" in line), "")

    assert said().startswith(
        f"warn  device nodes: {dev}/nvidiactl, {dev}/nvidia-uvm, {dev}/nvidia0 not there: nvidia-modprobe"
    )
    assert "sudo nvidia-modprobe -u -c 0" in said()
    for name in ("nvidiactl", "nvidia0"):
        (dev / name).touch()
    # What NVML has made is not all that CUDA opens.
    assert said().startswith(f"warn  device nodes: {dev}/nvidia-uvm not there")
    (dev / "nvidia-uvm").touch()
    assert said() == "ok    device nodes: those of the NVIDIA driver are there"
    shutil.rmtree(proc)
    assert said() == ""
