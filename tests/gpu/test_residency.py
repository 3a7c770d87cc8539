"""Two models that share the room of one on a GPU: memory goes back, weights come back equal.

PYTHONPATH=. python3 -m pytest tests/gpu/test_residency.py
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from bench.attach import Memory
from tests.engine.conftest import READY_TIMEOUT_S, Engines, Service
from tests.gpu.conftest import settled
from tests.gpu.test_engines import ENGINE, make
from tests.systemd.manager import PrivateManager

MIB = 1 << 20


@pytest.fixture(scope="module")
def service(manager: PrivateManager) -> Service:
    return Service(manager)


def test_evicted_models_give_their_memory_back_and_come_back_equal(
    service: Service, engines: Engines, device: str, memory: Memory, tmp_path: Path
) -> None:
    models = {"first": make(tmp_path / "first"), "second": make(tmp_path / "second", tied=True)}
    disk = {name: engines.tokens(path, **ENGINE) for name, path in models.items()}
    engines.ask(close=True)
    before = settled(memory)
    entries = [
        {
            "name": name,
            "devices": [device],
            "engine": {"model": str(path), "max_model_len": 1024},
            "resident": "on-demand",
        }
        for name, path in models.items()
    ]
    # Known after the first load: until then there is room for both.
    keys: dict[str, Any] = {"snapshots": {"dir": str(tmp_path / "snapshots")}}
    service.manifest(*entries, **keys)
    service.ctl("start", device)
    try:
        assert settled(memory) - before <= 16 * MIB
        sizes = []
        for name, path in models.items():
            assert attached(engines, path) == disk[name]
            engines.ask(close=True)
            sizes.append(written(service, device, name)["bytes"])
        service.manifest(*entries, budget=max(sizes), **keys)
        service.ctl("reload", device)
        for name in ("first", "second", "first"):
            assert attached(engines, models[name]) == disk[name]
            engines.ask(close=True)
            found = cache(service, device, name)
            assert (found["state"], found["source"]) == ("ready", "restored")
            assert sum(c["bytes"] for c in service.caches(device)) == found["bytes"]
            assert service.ctl("verify", f"{name}/target").returncode == 0
        held = settled(memory)
        assert service.ctl("evict", "first").returncode == 0
        assert held - settled(memory) >= sizes[0] - 16 * MIB
    finally:
        engines.ask(close=True)
        service.ctl("stop", device, check=False)
    # The process of the engines may have grown meanwhile.
    assert abs(settled(memory) - before) <= 64 * MIB


def attached(engines: Engines, model: Path) -> Any:
    return engines.tokens(model, "ipc_cache", loader={"fallback": False}, **ENGINE)


def cache(service: Service, device: str, name: str) -> dict[str, Any]:
    return next(c for c in service.caches(device) if c["name"] == f"{name}/target")


def written(service: Service, device: str, name: str) -> dict[str, Any]:
    """Wait for the snapshot."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while (found := cache(service, device, name))["snapshot"] != "written":
        assert time.monotonic() < deadline_s, f"no snapshot of {name}: {found['snapshot']}"
        time.sleep(0.1)
    return found
