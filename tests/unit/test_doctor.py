"""doctor: each fault is found on a machine made to have it, and fixed by the printed command."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from tests.fakes.commands import Commands
from tests.fakes.stub_daemon import StubDaemon, cache, status
from weightcached import __version__
from weightcached.cli import doctor
from weightcached.cli.doctor import Finding
from weightcached.cli.weightcachectl import main
from weightcached.system import host_checks
from weightcached.system.host_checks import lingers
from weightcached.system.units import install

GPU = "GPU-0e3f0000-0000-4000-8000-00000000000a"
UID = os.getuid()


class Machine:
    """A healthy one, in temporary directories; tests break it."""

    def __init__(self, base: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.base, self.run, self.config, self.monkeypatch = base, run, base / "config", monkeypatch
        self.commands = Commands(base / "commands")
        for name, value in (
            ("PATH", f"{self.commands.folder}:{os.environ['PATH']}"),
            ("HOME", str(base)),
            ("XDG_RUNTIME_DIR", str(run)),
            ("XDG_CONFIG_HOME", str(self.config)),
            ("XDG_DATA_HOME", str(base / "data")),
            ("XDG_CACHE_HOME", str(base / "cache")),
        ):
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        self.bin = base / "bin"
        self.bin.mkdir()
        for name in ("weightcached", "weightcachectl"):
            (self.bin / name).symlink_to("/bin/true")
        install(bin_dir=self.bin)
        self.python = base / "python"
        self.interpreter()
        self.manifest = self.config / "weightcached/manifest.yaml"
        self.place("[cpu0]")
        self.gpus: list[Any] = []
        self.persistence: dict[str, str] = {}
        monkeypatch.setattr(doctor, "list_gpus", lambda: self.gpus)
        # Also where the tests run in one.
        monkeypatch.setattr(doctor, "in_container", lambda: False)
        monkeypatch.setattr(doctor, "persistence_warning", self.persistence.get)
        self.processor("fpu avx avx2 avx512f avx512dq avx512bw avx512vl amx_tile")
        self.linger, self.manager, self.systemd = "yes", "running", "systemd 252 (252.1)"
        self.failed_units = self.active_units = ""

    def place(self, devices: str) -> None:
        self.manifest.write_text(
            f"version: 1\nmodels:\n  - {{name: a, devices: {devices}, engine: {{model: o/m}}, python: {self.python}}}\n"
        )

    def processor(self, flags: str) -> None:
        cpuinfo = self.base / "cpuinfo"
        cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: none\n\n")
        self.monkeypatch.setattr(doctor, "CPUINFO", cpuinfo)

    def interpreter(self, **changed: object) -> None:
        """An interpreter whose environment has the given packages and versions."""
        seen = {
            "plugin": ["x:y"],
            "vllm": "0.32.0",
            "torch": "2.11",
            "weightcached": __version__,
        } | changed
        self.python.write_text(f"#!/bin/sh\necho '{json.dumps(seen)}'\n")
        self.python.chmod(0o755)

    def findings(self, check: str) -> list[Finding]:
        if self.systemd:
            self.commands.answer("systemctl", "--version", self.systemd)
        self.commands.answer("systemctl", "--user is-system-running", self.manager)
        self.commands.answer(
            "systemctl",
            "--user list-units --state=failed --plain --no-legend weightcached@?",
            self.failed_units,
        )
        self.commands.answer(
            "systemctl",
            "--user list-units --state=active --plain --no-legend weightcached@?",
            self.active_units,
        )
        self.commands.answer("loginctl", f"show-user {UID} --property=Linger --value", self.linger)
        self.commands.finish()
        return [finding for finding in doctor.examine() if finding.check == check]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(prefix="wc-") as run:
        yield Machine(tmp_path, Path(run), monkeypatch)


def test_variables_that_the_manager_lacks_are_named(machine: Machine) -> None:
    for name, value in (
        ("HF_HOME", "/srv/hf"), ("VLLM_USE_DEEP_GEMM", "0"), ("VLLM_MLA_DISABLE", "1"), ("VLLM_LOGGING_LEVEL", "DEBUG"),
    ):  # fmt: skip
        machine.monkeypatch.setenv(name, value)
    machine.commands.answer(
        "systemctl", "--user show-environment", "PATH=/bin\nVLLM_USE_DEEP_GEMM=1\nVLLM_MLA_DISABLE=1\n"
    )  # fmt: skip
    first, second = machine.findings("environment")
    assert first.text == "HF_HOME is '/srv/hf' here, units of the user manager do not have it"
    assert first.fix.startswith(
        "systemctl --user import-environment HF_HOME; weightcachectl restart;"
    )
    assert second.text == "VLLM_USE_DEEP_GEMM is '0' here, units of the user manager have '1'"


def test_healthy_machine_has_only_ok_findings(machine: Machine) -> None:
    machine.findings("")
    socket = machine.run / "weightcached/cpu0.sock"
    with StubDaemon(socket, lambda request: [status("cpu0", cache())]):
        result = CliRunner().invoke(main, ["doctor"])
    assert (result.exit_code, result.stderr) == (0, "")
    units = machine.config / "systemd/user"
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert result.stdout.splitlines() == [
        f"ok    version: weightcached {__version__}, Python {sys.version.split()[0]}, {sys.executable}",
        f"ok    kernel: Linux {os.uname().release}",
        "ok    systemd: systemd 252",
        f"ok    open files: at most {hard}",
        "ok    linger: units of this user run without a login",
        f"ok    XDG_RUNTIME_DIR: {machine.run}",
        "ok    user manager: running",
        f"ok    unit: {units}/weightcached@.service",
        f"ok    unit: {units}/weightcached-exporter.service",
        f"ok    unit: {units}/weightcached-engine@.service",
        f"ok    unit: {units}/weightcached.target",
        f"ok    runtime directory: {machine.run}/weightcached",
        f"ok    cache directory: {machine.base}/cache/weightcached",
        f"ok    manifest: {machine.manifest}: a",
        f"ok    plug-in: {machine.python}: vLLM 0.32.0, torch 2.11",
        "ok    processor: AVX-512: vLLM's CPU build runs 4-bit weights too",
        f"ok    socket: {socket}: pid 77, ready",
    ]


def test_formats_that_need_avx512_are_named_if_a_model_is_placed_on_the_cpu(
    machine: Machine,
) -> None:
    machine.processor("fpu avx avx2")
    (finding,) = machine.findings("processor")
    assert finding.text == (
        "no AVX-512: engines of vLLM's CPU build end on 4-bit weights (AWQ, GPTQ, W4A16), from disk too"
    )
    machine.place(f"[{GPU}]")
    assert machine.findings("processor") == []


def test_failure_exits_1_and_a_warning_does_not(machine: Machine) -> None:
    machine.linger = "no"
    machine.findings("")
    warned = CliRunner().invoke(main, ["doctor", "--json"])
    assert warned.exit_code == 0
    linger = next(f for f in json.loads(warned.stdout)["findings"] if f["check"] == "linger")
    assert linger == {
        "check": "linger",
        "level": "warn",
        "text": "off: units of this user end with the last login, and their memory is freed",
        "fix": f"loginctl enable-linger {UID} (as root if that is denied)",
    }
    machine.manifest.unlink()
    failed = CliRunner().invoke(main, ["doctor"])
    assert failed.exit_code == 1
    assert (
        f"fail  manifest: no model manifest at {machine.manifest} or /etc/weightcached/manifest.yaml: "
        "'weightcachectl install' writes an example to edit; fix: weightcachectl install\n"
    ) in failed.stdout


def test_linger_is_read_from_logind_s_files_where_it_does_not_answer(machine: Machine) -> None:
    machine.linger = ""
    assert [finding.level for finding in machine.findings("linger")] == ["warn"]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("ann", "ann"),
        ("DOMAIN\\ann o'b", "DOMAIN\\\\ann o\\'b"),
        ("j\u00f6rg", "j\\303\\266rg"),
    ],
)
def test_linger_file_of_a_user_with_odd_characters_is_found(
    machine: Machine, name: str, file: str
) -> None:
    machine.linger = ""
    machine.monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name=name))
    directory = machine.base / "linger"
    directory.mkdir()
    machine.monkeypatch.setattr(host_checks, "LINGER_DIR", directory)
    assert not lingers(UID)
    (directory / file).touch()
    assert [finding.level for finding in machine.findings("linger")] == ["ok"]


def test_old_or_missing_systemd_fails(machine: Machine) -> None:
    machine.systemd = "systemd 245 (245.4)"
    fix = "run 'weightcached preload' without systemd instead"
    text = "systemd 245, needed is 246 (FDPOLL=0)"
    assert machine.findings("systemd") == [Finding("systemd", "fail", text, fix)]
    machine.monkeypatch.setenv("PATH", "/nonexistent")
    text = "systemctl is missing or does not answer"
    assert doctor._systemd() == Finding("systemd", "fail", text, fix)


def test_old_kernel_fails(machine: Machine) -> None:
    machine.monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release="4.18.0-553.el8"))
    expected = Finding(
        "kernel", "fail", "Linux 4.18.0-553.el8, needed is 5.3 (pidfd_open)", "boot a newer kernel"
    )
    assert machine.findings("kernel") == [expected]


def test_silent_user_manager_fails(machine: Machine) -> None:
    machine.manager = "offline"
    assert machine.findings("user manager") == [
        Finding(
            "user manager",
            "fail",
            "does not answer (offline)",
            f"loginctl enable-linger {UID}; systemctl start user@{UID}.service (as root)",
        )
    ]


def test_runtime_directory_of_the_session_is_judged(machine: Machine) -> None:
    machine.run.chmod(0o755)
    (machine.run / "weightcached").mkdir(mode=0o700)
    text = f"{machine.run} has mode 0755, expected 0700"
    found = machine.findings("XDG_RUNTIME_DIR")
    assert found == [Finding("XDG_RUNTIME_DIR", "fail", text, f"chmod 700 {machine.run}")]
    machine.monkeypatch.setenv("XDG_RUNTIME_DIR", "/nonexistent")
    fix = f"loginctl enable-linger {UID}; export XDG_RUNTIME_DIR=/run/user/{UID}"
    expected = Finding("XDG_RUNTIME_DIR", "fail", "/nonexistent: No such file or directory", fix)
    assert doctor._xdg_runtime_dir(UID) == expected
    machine.monkeypatch.delenv("XDG_RUNTIME_DIR")
    fix = f"export XDG_RUNTIME_DIR=/run/user/{UID}"
    text = f"is not set, /run/user/{UID} is used"
    assert doctor._xdg_runtime_dir(UID) == Finding("XDG_RUNTIME_DIR", "warn", text, fix)


def test_own_runtime_directory_is_judged(machine: Machine) -> None:
    directory = machine.run / "weightcached"
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    text = f"runtime directory {directory} has mode 0755, expected 0700: chmod 700 {directory}"
    fix = f"chmod 700 {directory}"
    assert machine.findings("runtime directory") == [
        Finding("runtime directory", "fail", text, fix)
    ]


def test_something_else_in_the_runtime_directory_s_place_is_moved_away(machine: Machine) -> None:
    directory = machine.run / "weightcached"
    directory.symlink_to(machine.base)
    text = f"runtime directory {directory} is a symbolic link: a real directory is required"
    fix = f"mv {directory} {directory}.old"
    assert machine.findings("runtime directory") == [
        Finding("runtime directory", "fail", text, fix)
    ]


@contextlib.contextmanager
def mounted(directory: Path, options: str) -> Iterator[None]:
    """A tmpfs at `directory`."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"{options},mode=0700", "wc-test", str(directory)],
        check=True,
    )
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_full_runtime_directory_is_found(machine: Machine) -> None:
    with mounted(machine.run, "nr_inodes=1"):
        found = machine.findings("runtime directory")
    text = f"{machine.run} has no room for another file"
    fix = f"df -i {machine.run}; rm files that are not needed there"
    assert found[0] == Finding("runtime directory", "fail", text, fix)


AGAIN = "it cannot keep digests, so each start of an engine may read its checkpoint again"


@pytest.mark.parametrize("fault", ["full", "read-only", "others", "not ours"])
def test_cache_directory_that_keeps_nothing_is_found(machine: Machine, fault: str) -> None:
    directory = machine.base / "cache/weightcached"
    directory.mkdir(parents=True, mode=0o700)
    expected = {
        "full": (f"{directory} is full", f"df -h {directory}; rm files that are not needed there"),
        "read-only": (
            f"{directory} is read-only",
            f"mount -o remount,rw {directory} (as root), or export XDG_CACHE_HOME=…",
        ),
        "others": (f"{directory} can be written by others", f"chmod go-w {directory}"),
        "not ours": (f"{directory} is not writable", f"chmod u+wx {directory}"),
    }
    with contextlib.ExitStack() as stack:
        if fault == "full":
            stack.enter_context(mounted(directory, "size=4k"))
            (directory / "filler").write_bytes(b"x" * 4096)
        elif fault == "read-only":
            stack.enter_context(mounted(directory, "ro"))
        elif fault == "others":
            directory.chmod(0o777)
        else:
            # Root may write everywhere.
            machine.monkeypatch.setattr(os, "access", lambda path, mode: path != directory)
        text, fix = expected[fault]
        assert machine.findings("cache directory") == [
            Finding("cache directory", "warn", f"{text}: {AGAIN}", fix)
        ]


def test_low_limit_of_open_files_is_found(machine: Machine) -> None:
    machine.monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 64))
    assert machine.findings("open files") == [
        Finding(
            "open files",
            "warn",
            "at most 64 for each process of this session, a large GPU and its engines need 2048",
            "printf '[Service]\\nLimitNOFILE=8192\\n' | sudo install -D /dev/stdin "
            "/etc/systemd/system/user@.service.d/weightcached.conf; log in again",
        )
    ]


def test_unit_that_the_manager_has_given_up_is_found(machine: Machine) -> None:
    machine.failed_units = (
        "weightcached@cpu0.service loaded failed failed Resident model weights on cpu0\n"
    )
    name = "weightcached@cpu0.service"
    fix = f"journalctl --user -u {name}; systemctl --user reset-failed {name}; weightcachectl start cpu0"
    assert machine.findings("unit")[-1] == Finding(
        "unit", "fail", f"{name} has failed and is not started again", fix
    )


def test_unit_whose_socket_is_not_in_this_session_s_directory_is_found(machine: Machine) -> None:
    machine.active_units = (
        "weightcached@cpu0.service loaded active running Resident model weights on cpu0\n"
    )
    path = machine.run / "weightcached/cpu0.sock"
    text = f"weightcached@cpu0.service is active, but {path} is not there, so no engine of this session finds it"
    fix = "compare $XDG_RUNTIME_DIR with 'systemctl --user show-environment', or weightcachectl restart cpu0"
    assert machine.findings("unit")[-1] == Finding("unit", "fail", text, fix)
    with StubDaemon(path, lambda request: [status("cpu0", cache())]):
        assert all(finding.level == "ok" for finding in machine.findings("unit"))


def test_checkpoint_that_is_gone_is_found(machine: Machine) -> None:
    gone = machine.base / "gone"
    machine.manifest.write_text(machine.manifest.read_text().replace("o/m", str(gone)))
    assert machine.findings("manifest")[0].level == "ok"
    (found,) = machine.findings("model a")
    assert (found.level, found.fix) == ("fail", "mount it, then 'weightcachectl reload'")
    assert str(gone) in found.text


def test_runtime_directory_that_went_with_the_last_logout_is_found(machine: Machine) -> None:
    machine.monkeypatch.setenv("XDG_RUNTIME_DIR", str(machine.run / "gone"))
    (found,) = machine.findings("runtime directory")
    assert found.fix == f"loginctl enable-linger {UID}; export XDG_RUNTIME_DIR=/run/user/{UID}"
    assert found.text.startswith(f"the runtime directory {machine.run}/gone does not exist")


def test_missing_unit_fails(machine: Machine) -> None:
    (machine.config / "systemd/user/weightcached.target").unlink()
    missing = Finding(
        "unit", "fail", "weightcached.target is not installed", "weightcachectl install"
    )
    assert machine.findings("unit")[3] == missing


def test_unit_of_an_environment_that_is_gone_fails(machine: Machine) -> None:
    (machine.bin / "weightcached").unlink()
    unit = machine.config / "systemd/user/weightcached@.service"
    text = f"{unit} runs {machine.bin}/weightcached, which is not an executable"
    assert machine.findings("unit")[0] == Finding("unit", "fail", text, "weightcachectl install")


def test_wrong_manifest_fails_with_its_line(machine: Machine) -> None:
    machine.place("[gpu0]")
    (found,) = machine.findings("manifest")
    assert (found.level, found.fix) == ("fail", f"edit {machine.manifest}")
    assert found.text.startswith(
        f"{machine.manifest}:3: models[0].devices[0]: 'gpu0' is not a device name: "
    )


@pytest.mark.parametrize(
    ("changed", "level", "text", "fix"),
    [
        (
            {"vllm": None},
            "fail",
            "PY has no vLLM",
            "name the engine's interpreter as python: in MANIFEST",
        ),
        (
            {"plugin": []},
            "fail",
            "PY (vLLM 0.32.0) has no weightcached plug-in",
            f"PY -m pip install weightcached=={__version__}",
        ),
        (
            {"weightcached": "0.0.1"},
            "warn",
            f"PY has weightcached 0.0.1, the daemon's is {__version__}",
            f"PY -m pip install weightcached=={__version__}",
        ),
    ],
)
def test_interpreter_without_plug_in_is_found(
    machine: Machine, changed: dict[str, object], level: str, text: str, fix: str
) -> None:
    machine.interpreter(**changed)
    (found,) = machine.findings("plug-in")
    seen = [
        s.replace(str(machine.python), "PY").replace(str(machine.manifest), "MANIFEST")
        for s in found
    ]
    assert seen == ["plug-in", level, text, fix]


def test_interpreter_that_does_not_run_is_found(machine: Machine) -> None:
    machine.python.write_text("#!/bin/sh\necho broken\nexit 1\n")
    text = f"{machine.python} does not run"
    assert machine.findings("plug-in") == [
        Finding("plug-in", "fail", text, f"{machine.python} --version")
    ]


def test_question_to_the_interpreter_is_answered_by_a_real_one(machine: Machine) -> None:
    """This environment has vLLM, with or without the plug-in: both answer without importing vLLM."""
    assert doctor._interpreter(sys.executable).text.partition("vLLM ")[2] != ""


def test_plug_in_that_the_environment_switches_off_is_found(machine: Machine) -> None:
    machine.monkeypatch.setenv("VLLM_PLUGINS", "lora")
    text = "VLLM_PLUGINS is 'lora', so engines started from here leave weightcached out"
    found = machine.findings("plug-in")[1]
    assert found == Finding("plug-in", "warn", text, "export VLLM_PLUGINS=lora,weightcached")


def test_gpus_are_compared_with_the_manifest_and_asked_for_persistence(machine: Machine) -> None:
    other = GPU.replace("0e3f", "ffff")
    machine.place(f"[{GPU}]")
    machine.gpus.append(SimpleNamespace(uuid=other))
    machine.persistence[other] = "persistence mode is off"
    assert machine.findings("GPU") == [
        Finding(
            "GPU",
            "fail",
            f"the manifest names {GPU}, which is not in this machine",
            "weightcachectl devices",
        ),
        Finding("GPU", "warn", "persistence mode is off", f"sudo nvidia-smi -i {other} -pm 1"),
    ]
    machine.persistence.clear()
    assert list(doctor._gpus(None)) == [
        Finding("GPU", "ok", f"{other}: persistence mode is on, or cannot be read")
    ]


def test_stale_socket_fails(machine: Machine) -> None:
    path = machine.run / "weightcached/cpu0.sock"
    with StubDaemon(path):
        os.link(path, path.with_name("cpu1.sock"))
    stale = path.with_name("cpu1.sock")
    text = (
        f"no weightcached daemon listens on {stale}, which a dead one left behind: "
        "systemctl --user start weightcached@cpu1.service"
    )
    fix = f"weightcachectl restart cpu1, or rm {stale}"
    assert machine.findings("socket") == [Finding("socket", "fail", text, fix)]


@pytest.mark.parametrize(
    ("changed", "level", "text", "fix"),
    [
        (
            {"manifest_error": "m:1: x"},
            "warn",
            "the daemon refused the manifest: m:1: x",
            "edit it, then: weightcachectl reload cpu0",
        ),
        (
            {"caches": [cache(state="failed", error="no\nmemory")]},
            "fail",
            "tiny/target failed: no memory",
            "weightcachectl reload cpu0",
        ),
        (
            {"software": "weightcached 0.0.1"},
            "warn",
            f"the daemon is weightcached 0.0.1, installed is {__version__}",
            "weightcachectl restart cpu0",
        ),
    ],
)
def test_what_a_daemon_tells_is_judged(
    machine: Machine, changed: dict[str, object], level: str, text: str, fix: str
) -> None:
    path = machine.run / "weightcached/cpu0.sock"
    with StubDaemon(path, lambda request: [status("cpu0", **changed)]):
        assert machine.findings("socket") == [Finding("socket", level, f"{path}: {text}", fix)]  # type: ignore[arg-type]


def test_socket_open_to_others_fails(machine: Machine) -> None:
    path = machine.run / "weightcached/cpu0.sock"
    with StubDaemon(path):
        path.chmod(0o666)
        expected = Finding(
            "socket", "fail", f"{path} has mode 0666, expected 0600", f"chmod 600 {path}"
        )
        assert machine.findings("socket") == [expected]


# ---- in a container, whose namespaces tests/process/test_containers.py makes


@pytest.fixture
def contained(machine: Machine) -> Machine:
    """A container without a service manager, in which nothing was mounted."""
    machine.monkeypatch.setattr(doctor, "in_container", lambda: True)
    machine.monkeypatch.setattr(doctor, "own_pids", lambda: True)
    machine.monkeypatch.setattr(doctor, "outside_uid", lambda uid: uid)
    machine.manager = "offline"
    return machine


def limit_memlock(machine: Machine, nbytes: int) -> None:
    limits = {resource.RLIMIT_MEMLOCK: (nbytes, nbytes)}
    real = resource.getrlimit
    machine.monkeypatch.setattr(resource, "getrlimit", lambda n: limits.get(n) or real(n))


def test_container_is_asked_for_what_an_engine_needs_and_no_more(contained: Machine) -> None:
    limit_memlock(contained, resource.RLIM_INFINITY)
    contained.findings("")
    contained.manifest.unlink()
    socket = contained.run / "weightcached/cpu0.sock"
    with StubDaemon(socket, lambda request: [status("cpu0", cache())]):
        lines = CliRunner().invoke(main, ["doctor"]).stdout.splitlines()
    checks = [line[6:].partition(":")[0] for line in lines]
    assert checks == [
        "version", "kernel", "container", "user", "memlock", "open files", "runtime directory",
        "cache directory", "manifest", "plug-in", "socket",
    ]  # fmt: skip
    assert f"ok    runtime directory: {contained.run}/weightcached" in lines
    assert f"ok    user: uid {UID}, which must be the daemon's" in lines


def test_system_that_boots_in_a_container_is_examined_like_a_host(contained: Machine) -> None:
    contained.manager = "running"
    assert contained.findings("linger")
    assert not contained.findings("container")


def test_manifest_of_a_container_is_examined_if_there_is_one(contained: Machine) -> None:
    contained.manifest.write_text("version: 2\n")
    (finding,) = contained.findings("manifest")
    assert finding.level == "fail"


def test_container_with_the_hosts_pids_says_so(contained: Machine) -> None:
    contained.monkeypatch.setattr(doctor, "own_pids", lambda: False)
    (finding,) = contained.findings("container")
    assert finding.text == "has the host's pids; for the daemon's units run doctor on the host"


@pytest.mark.parametrize(("nbytes", "level"), [(64 << 10, "warn"), (1 << 30, "ok")])
def test_little_locked_memory_is_named_where_a_gpu_is(
    contained: Machine, nbytes: int, level: str
) -> None:
    limit_memlock(contained, nbytes)
    assert [finding.level for finding in contained.findings("memlock")] == ["ok"], "no GPU here"
    contained.gpus.append(SimpleNamespace(uuid=GPU))
    (finding,) = contained.findings("memlock")
    assert finding.level == level
    if level == "warn":
        assert finding == Finding(
            "memlock", "warn",
            "at most 64 KiB; a daemon that restores a snapshot to a GPU here locks up to 768.0 MiB",
            "start a daemon's container with --ulimit memlock=-1",
        )  # fmt: skip


def test_device_nodes_that_a_container_lacks_are_the_runtimes_to_give(contained: Machine) -> None:
    missing = [Path("/dev/nvidiactl")]
    contained.monkeypatch.setattr(doctor, "missing_device_nodes", lambda: missing)
    (finding,) = contained.findings("device nodes")
    assert finding.level == "warn"
    assert finding.text == "/dev/nvidiactl not there: this container was given no GPU"
    assert "--device nvidia.com/gpu=all" in finding.fix
