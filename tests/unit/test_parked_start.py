"""Engines that start parked: which ones do, refusals, and that vLLM's functions are wrapped once."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from weightcached.vllm_compat import parked_start


def config(extra: Any, load_format: str = "ipc_cache", **model: Any) -> Any:
    load = SimpleNamespace(load_format=load_format, model_loader_extra_config=extra)
    return SimpleNamespace(load_config=load, model_config=SimpleNamespace(**model))


@pytest.mark.parametrize(
    ("extra", "load_format", "parked"),
    [
        ({"start_parked": True}, "ipc_cache", True),
        ({"start_parked": "true"}, "weightcached", True),
        ({"start_parked": False}, "ipc_cache", False),
        ({}, "ipc_cache", False),
        (None, "ipc_cache", False),
        ({"start_parked": True}, "auto", False),
    ],
)
def test_who_starts_parked(extra: Any, load_format: str, parked: bool) -> None:
    assert parked_start.starts_parked(config(extra, load_format)) is parked


class Core:
    """As vLLM's EngineCore, and EngineCoreProc by its name."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config, self.done = vllm_config, ["init"]

    def sleep(self, level: int) -> None:
        self.done.append(f"sleep {level}")


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Any:
    class EngineCore(Core):
        def __init__(self, vllm_config: Any) -> None:
            super().__init__(vllm_config)

    class EngineCoreProc(EngineCore):
        def run_busy_loop(self) -> None:
            self.done.append("loop")

    module: Any = ModuleType("vllm.v1.engine.core")
    module.EngineCore, module.EngineCoreProc = EngineCore, EngineCoreProc
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", module)
    parked_start.install()
    parked_start.install()
    return module


def test_engine_core_sleeps_before_its_first_request(core: Any) -> None:
    engine = core.EngineCoreProc(config({"start_parked": True}))
    engine.run_busy_loop()
    assert engine.done == ["init", "sleep 1", "loop"]


def test_engine_core_in_its_clients_process_is_asleep_when_it_is_made(core: Any) -> None:
    assert core.EngineCore(config({"start_parked": True})).done == ["init", "sleep 1"]


def test_other_engine_cores_start_awake(core: Any) -> None:
    engine = core.EngineCoreProc(config({}))
    engine.run_busy_loop()
    assert engine.done == ["init", "loop"]


def test_free_memory_is_left_alone_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> int:
        raise ValueError("Free memory is less than desired")

    module: Any = ModuleType("vllm.v1.worker.gpu_worker")
    module.request_memory = refuse
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", module)
    parked_start.do_not_check_free_memory()
    snapshot = SimpleNamespace(total_memory=1000, free_memory=10)
    cache = SimpleNamespace(gpu_memory_utilization=0.8)
    assert module.request_memory(snapshot, cache, 150) == 650
    with pytest.raises(ValueError, match="is less than desired"):
        module.request_memory(snapshot, cache, 150)
    parked_start.do_not_check_free_memory()
    with pytest.raises(ValueError, match=r"0\.8 gives 800 bytes"):
        module.request_memory(snapshot, cache, 800)
