"""A unit's whole life on a GPU: start, engines, kill -9, adoption, restart, stop; the memory comes
back.

PYTHONPATH=. python3 -m pytest tests/gpu/test_life.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.attach import Memory
from bench.harness import Engine, Unit
from tests.engine.conftest import ENVIRONMENT
from tests.gpu.conftest import settled, visible
from tests.gpu.test_engines import make
from tests.systemd.manager import PrivateManager

MIB = 1 << 20


def test_whole_life_of_a_unit_gives_all_memory_back(
    manager: PrivateManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = visible()[0]
    memory = Memory(device)
    model = str(make(tmp_path / "bf16"))
    for name, value in manager.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"] + ":" + sys_path())
    before = settled(memory)
    unit = Unit(device, tmp_path)
    unit.install(model, {"max_model_len": 1024})
    # Compiled and with CUDA graphs, as a user has it.
    options = {"gpu_memory_utilization": 0.3, "max_model_len": 1024}
    loader = {"socket_dir": str(unit.socket_dir), "fallback": False}
    try:
        unit.start()
        index = unit.index()
        assert memory.used() - before <= index.nbytes + 16 * MIB, (
            "the daemon holds nothing beside the weights"
        )
        with Engine(model, "auto", options, tmp_path / "disk") as disk:
            expected, blocks = disk.first["tokens"], disk.first["kv_blocks"]
        with Engine(
            model, "ipc_cache", options | {"model_loader_extra_config": loader}, tmp_path / "first"
        ) as engine:
            assert engine.first["tokens"] == expected
            assert abs(engine.first["kv_blocks"] - blocks) <= 0.005 * blocks
            killed_at, _ = unit.kill()
            assert engine.again() == expected
            assert unit.bytes_read_since(killed_at) == 0
        with Engine(
            model, "ipc_cache", options | {"model_loader_extra_config": loader}, tmp_path / "next"
        ) as engine:
            assert engine.first["tokens"] == expected
        subprocess.run(["systemctl", "--user", "restart", unit.name], check=True)
        assert unit.status().caches[0].source == "adopted"
        unit.stop()
        assert abs(settled(memory) - before) <= 16 * MIB
    finally:
        unit.remove()


def sys_path() -> str:
    return ":".join(path for path in sys.path if path)
