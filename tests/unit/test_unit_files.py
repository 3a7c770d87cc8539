"""The unit files as systemd reads them, and the example manifest as the daemon reads it."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.daemon import BOUND_S
from weightcached.config import manifest as manifests
from weightcached.config.engines import EngineEntry
from weightcached.config.manifest import load_manifest
from weightcached.config.ranks import SIZES
from weightcached.errors import EXIT_BUSY, EXIT_CONFIG
from weightcached.system.units import UNITS, install, source

GPU = "GPU-0e3f0000-0000-4000-8000-00000000000a"


def settings(name: str) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(delimiters=("=",), comment_prefixes=("#",), strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(source(name))
    return {section: dict(parser[section]) for section in parser.sections()}


@pytest.fixture(params=["bin", "with %i; and space"])
def installed(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The directory of the installed unit files; the commands in them exist, under plain and under
    odd paths.
    """
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / request.param
    folder.mkdir()
    for name in ("weightcached", "weightcachectl"):
        (folder / name).symlink_to("/bin/true")
    install(bin_dir=folder)
    return tmp_path / "config/systemd/user"


def verify(tmp_path: Path, *units: Path) -> subprocess.CompletedProcess[str]:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700, exist_ok=True)
    environment = os.environ | {"XDG_RUNTIME_DIR": str(runtime)}
    command = ["systemd-analyze", "verify", "--user", "--man=no", *map(str, units)]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=BOUND_S, check=False
    )


@pytest.mark.parametrize("instance", [GPU, GPU.replace("GPU", "MIG"), "cpu0", "cpu999"])
def test_systemd_finds_nothing_to_complain_about(
    installed: Path, tmp_path: Path, instance: str
) -> None:
    service, *others = (installed / name for name in UNITS)
    engine = service.with_name("weightcached-engine@chat.service")
    seen = verify(
        tmp_path, service.with_name(f"weightcached@{instance}.service"), engine, service, *others
    )
    assert (seen.returncode, seen.stdout, seen.stderr) == (0, "", "")


def test_systemd_would_complain_about_a_command_that_is_gone(
    installed: Path, tmp_path: Path
) -> None:
    for command in tmp_path.glob("*/weightcached"):
        if command.is_symlink():
            command.unlink()
    assert (
        "is not executable: No such file or directory"
        in verify(tmp_path, installed / UNITS[0]).stderr
    )


def test_systemd_would_complain_about_a_misspelt_setting(installed: Path, tmp_path: Path) -> None:
    service = installed / UNITS[0]
    service.write_text(service.read_text().replace("WatchdogSec=", "WatchDogSeconds="))
    assert "WatchDogSeconds" in verify(tmp_path, service).stderr


def test_service_behaves_as_the_daemon_expects() -> None:
    service = settings("weightcached@.service")["Service"]
    expected = {
        "Type": "notify",
        "NotifyAccess": "main",
        "ExecStart": "/usr/bin/weightcached serve %i",
        "ExecReload": "/usr/bin/weightcachectl reload %i",
        "Restart": "on-failure",
        "RestartPreventExitStatus": str(EXIT_CONFIG),
        "KillMode": "mixed",
        "WatchdogSec": "30s",
        "FileDescriptorStoreMax": "1024",
        "UMask": "0077",
        "NoNewPrivileges": "yes",
    }
    assert {key: service.get(key) for key in expected} == expected
    assert str(EXIT_BUSY) not in service["RestartPreventExitStatus"]


def test_back_off_gives_up_after_ten_failures_of_the_slowest_start() -> None:
    unit = settings("weightcached@.service")
    assert (unit["Unit"]["StartLimitBurst"], unit["Unit"]["StartLimitIntervalSec"]) == (
        "10",
        "30min",
    )
    assert (unit["Service"]["RestartSec"], unit["Service"]["TimeoutStartSec"]) == ("200ms", "90s")
    # A start that hangs until its time is up, ten times, with the pauses: inside the interval, or
    # it never gives up.
    assert 10 * (90 + 30 + 1) < 30 * 60


def test_nothing_is_set_that_needs_a_user_namespace_or_breaks_the_loader() -> None:
    service = settings("weightcached@.service")["Service"]
    forbidden = {
        "ProtectSystem", "ProtectHome", "PrivateTmp", "PrivateDevices", "PrivateNetwork", "PrivateUsers",
        "MemoryDenyWriteExecute", "RestrictNamespaces", "ReadWritePaths", "ProtectKernelTunables", "DevicePolicy",
    }  # fmt: skip
    assert not forbidden & service.keys()


def test_exporter_is_the_command_on_loopback_and_comes_with_the_target() -> None:
    exporter = settings("weightcached-exporter.service")
    assert exporter["Service"]["ExecStart"] == "/usr/bin/weightcached exporter"
    assert (exporter["Service"]["Type"], exporter["Service"]["Restart"]) == ("notify", "on-failure")
    assert exporter["Unit"]["PartOf"] == exporter["Install"]["WantedBy"] == "weightcached.target"


def test_engines_outlive_their_supervisor_and_keep_their_socket() -> None:
    service = settings("weightcached-engine@.service")["Service"]
    expected = {
        "Type": "notify",
        "NotifyAccess": "main",
        "ExecStart": "/usr/bin/weightcached engine %i",
        "ExecReload": "/usr/bin/weightcachectl engine restart %i",
        "Restart": "on-failure",
        "RestartPreventExitStatus": str(EXIT_CONFIG),
        "KillMode": "process",
        "OOMPolicy": "continue",
        "WatchdogSec": "30s",
    }
    assert {key: service.get(key) for key in expected} == expected
    assert int(service["FileDescriptorStoreMax"]) >= 1


def test_target_groups_all_instances() -> None:
    service, target = settings("weightcached@.service"), settings("weightcached.target")
    assert service["Unit"]["PartOf"] == "weightcached.target"
    assert service["Install"] == {"WantedBy": "weightcached.target", "Also": "weightcached.target"}
    assert target["Install"] == {"WantedBy": "default.target"}


# ---- the example manifest


def example(tmp_path: Path, text: str) -> Any:
    checkpoint = tmp_path / "ckpt"
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "config.json").write_text("{}")
    path = tmp_path / "manifest.yaml"
    path.write_text(
        text.replace("/srv/models/example", str(checkpoint)).replace(
            "/opt/vllm/bin/python", "/bin/sh"
        )
    )
    return load_manifest(path)


def uncommented(text: str) -> str:
    """The example with every commented key in force."""
    return re.sub(r"^( +)# ([a-z_]+: \S+)$", r"\1\2", text, flags=re.MULTILINE)


def test_example_manifest_loads_as_it_is_and_with_every_key_in_force(tmp_path: Path) -> None:
    text = source("manifest.yaml").read_text()
    # idle_evict_s is for models on demand alone, which is not the default.
    every = uncommented(text).replace("resident: always", "resident: on-demand")
    both = example(tmp_path, text), example(tmp_path, every)
    plain, full = (manifest.models[0] for manifest in both)
    (engine,), (full_engine,) = (manifest.engines for manifest in both)
    assert full_engine == engine, "what is commented out is not the default"
    assert plain.devices == ["all"]
    defaults = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    assert full.engine == plain.engine | defaults
    assert (full.python, full.rendezvous, full.identity) == (
        "/bin/sh",
        plain.rendezvous,
        plain.identity,
    )


def test_example_manifest_has_every_key_once() -> None:
    text = uncommented(source("manifest.yaml").read_text())
    for key in manifests.Document.__struct_fields__:
        assert len(re.findall(rf"^(?:# )?{key}:", text, re.MULTILINE)) == 1, key
    models, engines = text.split("\nengines:\n")
    for key in (*manifests.ModelEntry.__struct_fields__, *SIZES):
        assert len(re.findall(rf"^[ -]*{key}:", models, re.MULTILINE)) == 1, key
    for key in EngineEntry.__struct_fields__:
        assert len(re.findall(rf"^[ -]*{key}:", engines, re.MULTILINE)) == 1, key
