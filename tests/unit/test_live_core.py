"""The engine core's part in a swap: no request under way, no result of the old weights afterwards."""

from __future__ import annotations

import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from weightcached.errors import EngineError
from weightcached.vllm_compat import live


def request(*, computed: int = 0, output: int = 0) -> Any:
    return SimpleNamespace(num_computed_tokens=computed, num_output_tokens=output)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Any:
    class EngineCore:
        def __init__(self) -> None:
            self.asked: list[Any] = []
            self.version = "default"
            self.answer = {"changed": True, "labels": {"m/draft": "d", "m/target": "step-2"}}
            self.has_reset = True
            model = SimpleNamespace(sleep_mode_backend=None)
            self.vllm_config = SimpleNamespace(model_config=model)
            self.model_executor = SimpleNamespace(is_sleeping=False)
            self.scheduler = SimpleNamespace(
                requests={}, reset_encoder_cache=lambda: self.asked.append("encoder")
            )

        def collective_rpc(self, method: str, *arguments: Any, **named: Any) -> Any:
            self.asked.append(method)
            return [self.answer, self.answer]

        def reset_prefix_cache(
            self, reset_running_requests: bool = False, reset_connector: bool = False
        ) -> bool:
            self.asked.append(("prefix", reset_running_requests, reset_connector))
            return self.has_reset

        def set_weight_version(self, version: str) -> None:
            self.version = version

    module: Any = ModuleType("vllm.v1.engine.core")
    module.EngineCore = EngineCore
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", module)
    live.install()
    live.install()
    return EngineCore()


def test_swap_is_followed_by_a_reset_and_the_new_name(core: Any) -> None:
    core.scheduler.requests = {"waits": request()}
    began_s = time.monotonic()
    for result in core.collective_rpc(live.SWAP):
        assert began_s <= result.pop("ended_s") <= time.monotonic()
        assert result == core.answer
    assert core.asked == [live.SWAP, ("prefix", True, True), "encoder"]
    assert core.version == "step-2"


def test_nothing_is_reset_without_a_change(core: Any) -> None:
    core.answer["changed"] = False
    core.collective_rpc(live.SWAP)
    core.collective_rpc("reload_weights")
    assert core.asked == [live.SWAP, "reload_weights"]


@pytest.mark.parametrize("begun", [request(computed=8), request(output=1)])
def test_swap_under_a_request_is_refused_before_the_workers_are_asked(
    core: Any, begun: Any
) -> None:
    core.scheduler.requests = {"a": begun, "b": request()}
    with pytest.raises(EngineError, match=r"^1 requests are under way, whose answers would come"):
        core.collective_rpc(live.SWAP)
    assert core.asked == []


def test_engine_that_sleeps_without_its_private_weights_is_to_be_woken(core: Any) -> None:
    core.model_executor.is_sleeping = True
    with pytest.raises(EngineError, match="sleeps with the back end of vLLM: wake it, then swap"):
        core.collective_rpc(live.SWAP)
    core.vllm_config.model_config.sleep_mode_backend = "weightcached"
    core.collective_rpc(live.SWAP)


def test_results_of_the_old_weights_that_stay_are_an_error(core: Any) -> None:
    core.has_reset = False
    with pytest.raises(EngineError, match="the prefix cache still has results of the old ones"):
        core.collective_rpc(live.SWAP)


@pytest.mark.parametrize(
    ("labels", "version"),
    [({"m/target": "step-1"}, "step-1"), ({"m/target": ""}, "default"), ({}, "default")],
)
def test_engine_that_starts_has_the_label_of_its_weights(
    core: Any, labels: dict[str, str], version: str
) -> None:
    core.model_executor.collective_rpc = lambda method: [labels, labels]
    live.name_weights(core)
    assert core.version == version


def test_start_goes_on_without_a_label(core: Any) -> None:
    def fail(method: str) -> None:
        raise RuntimeError(f"no {method}")

    core.model_executor.collective_rpc = fail
    live.name_weights(core)
    assert core.version == "default"
