"""Real vLLM engines that start parked, take new weights, and are asked to write into mapped ones.

A CPU engine cannot sleep: it parks without giving memory back. bench/sleep.py measures sleep on a
GPU, tests/unit has its mechanism (test_kv_scratch.py, test_mapped.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Engines, Service
from tests.engine.test_end_to_end import entry, serving

FLOAT: dict[str, Any] = {"dtype": "float32"}
REFUSED = (
    "SharedWeightsError: {}() would write into weights that other engines map: use mode 'copy' "
)


@pytest.fixture(scope="module")
def disk(engines: Engines, models: dict[str, Path]) -> Any:
    """The model's tokens from disk."""
    return engines.tokens(models["tied"], **FLOAT)


@pytest.mark.filterwarnings("ignore")
def test_back_end_is_registered_once() -> None:
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory

    from weightcache_loader import register

    register()
    register()
    backend = SleepModeBackendFactory.get_backend_class("weightcached")
    assert issubclass(backend, CuMemBackend)
    assert not backend.is_supported(), "there is no GPU here"


def test_mapped_weights_are_read_again_and_never_written(
    service: Service, engines: Engines, models: dict[str, Path], disk: Any
) -> None:
    with serving(service, "cpu0", entry("tied", models["tied"], "cpu0", **FLOAT)):
        engines.log()
        assert (
            engines.tokens(models["tied"], "ipc_cache", loader={"fallback": False}, **FLOAT) == disk
        )
        assert engines.ask(call="restore_devices")["result"] == ["cpu"]

        answers = engines.ask(call="writes")["result"]
        for name, answer in answers.items():
            if answer == f"NotImplementedError: Method '{name}' is not implemented.":
                # An older vLLM has no such call.
                continue
            said = (
                "reload_weights() with weights of its own"
                if name == "reload_weights"
                else f"{name}()"
            )
            assert answer.startswith(REFUSED.replace("{}()", said)), answer
        assert engines.ask(again=True)["tokens"] == disk

        assert engines.ask(call="reload")["result"] == ""
        assert "reload_weights: the newest weights are mapped already" in engines.log()
        service.ctl("reload", "--force")
        assert engines.ask(call="reload")["result"] == ""
        assert engines.ask(again=True)["tokens"] == disk
        assert service.ctl("verify").returncode == 0
        engines.ask(close=True)


def test_weights_from_disk_are_read_again_after_a_fallback(
    engines: Engines, models: dict[str, Path], disk: Any
) -> None:
    assert engines.tokens(models["tied"], "ipc_cache", loader={}, **FLOAT) == disk
    assert engines.ask(call="reload")["result"] == ""
    assert engines.ask(again=True)["tokens"] == disk
    engines.ask(close=True)


def test_copied_weights_are_read_again_from_disk(
    service: Service, engines: Engines, models: dict[str, Path], disk: Any
) -> None:
    copy = {"mode": "copy", "fallback": False}
    with serving(service, "cpu0", entry("tied", models["tied"], "cpu0", **FLOAT)):
        assert engines.tokens(models["tied"], "ipc_cache", loader=copy, **FLOAT) == disk
        assert engines.ask(call="restore_devices")["result"] == ["cpu"]
        # From disk: on the CPU the cache holds weights as loaded, the model has processed ones.
        assert engines.ask(call="reload")["result"] == ""
        assert engines.ask(again=True)["tokens"] == disk
        engines.ask(close=True)


def test_engine_that_starts_parked_serves_after_its_first_wake(
    engines: Engines, models: dict[str, Path], disk: Any
) -> None:
    engine = {
        "model": str(models["tied"]),
        "load_format": "ipc_cache",
        "model_loader_extra_config": {"start_parked": True},
        **FLOAT,
    }
    assert engines.ask(engine=engine, only="start") == {}
    assert engines.ask(call="sleeping")["result"] is True
    assert engines.ask(call="wake")["result"] is False
    assert engines.ask(again=True)["tokens"] == disk
    engines.ask(close=True)
