"""The Quadlet files: known keys, and what daemon and engine must have in common is the same in both."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from weightcached.cli.weightcached import main

QUADLET = Path(__file__).parents[2] / "etc/quadlet"
# Of podman-systemd.unit(5); Quadlet refuses others.
CONTAINER_KEYS = {
    "AddDevice", "Environment", "Exec", "Image", "Notify", "PublishPort", "Ulimit", "UserNS", "Volume",
}  # fmt: skip
Unit = dict[str, dict[str, list[str]]]


def read(path: Path) -> Unit:
    """Sections, keys and all values of each."""
    unit: Unit = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = unit.setdefault(line.strip("[]"), defaultdict(list))
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            section[key].append(value)
    return unit


@pytest.fixture
def daemon() -> Unit:
    return read(QUADLET / "weightcached.container")


@pytest.fixture
def engine() -> Unit:
    return read(QUADLET / "llama-8b.container")


def test_keys_are_known(daemon: Unit, engine: Unit) -> None:
    for unit in (daemon, engine):
        assert list(unit) == ["Unit", "Container", "Service", "Install"]
        assert set(unit["Container"]) <= CONTAINER_KEYS


def test_user_versions_devices_and_sockets_are_the_same(daemon: Unit, engine: Unit) -> None:
    for key in ("Image", "UserNS", "AddDevice", "Environment"):
        assert daemon["Container"][key] == engine["Container"][key], key
    sockets = "%t/weightcached:%t/weightcached"
    assert sockets in daemon["Container"]["Volume"]
    # Read-only is enough to connect.
    assert f"{sockets}:ro" in engine["Container"]["Volume"]
    assert "XDG_RUNTIME_DIR=%t" in engine["Container"]["Environment"]
    # Podman does not make the source of a volume with the mode that the daemon requires.
    assert daemon["Service"]["ExecStartPre"] == ["mkdir -p -m 0700 %t/weightcached"]


def test_engine_starts_when_the_weights_are_served(daemon: Unit, engine: Unit) -> None:
    assert daemon["Container"]["Notify"] == ["true"]
    assert engine["Unit"]["After"] == engine["Unit"]["Requires"] == ["weightcached.service"]


def test_both_name_the_same_model(daemon: Unit, engine: Unit) -> None:
    (preload,), (serve,) = daemon["Container"]["Exec"], engine["Container"]["Exec"]
    program, command, option, model, snapshots, directory = preload.split()
    assert (program, option) == ("weightcached", "--model")
    options = [name for p in main.commands[command].params for name in p.opts]
    assert snapshots in options
    # In a volume that outlives the container.
    assert directory.startswith("%h/.cache/")
    assert "%h/.cache:%h/.cache" in daemon["Container"]["Volume"]
    assert serve == f"vllm serve {model} --load-format ipc_cache"
    for unit in (daemon, engine):
        assert f"{Path(model).parent}:{Path(model).parent}:ro" in unit["Container"]["Volume"]
