"""New weights under a running engine, on the side of vLLM's engine core.

`collective_rpc("weightcached_swap")` reaches the core between two steps. Here it is made sure that
no request is under way, so that every answer comes from one generation, and that no result of the
old weights is used again. To each rank's result it adds `ended_s`, when all was done, by the
monotonic clock.
"""

from __future__ import annotations

import inspect
import logging
import sys
import time
from typing import Any

from weightcached.errors import EngineError
from weightcached.vllm_compat import guarded, parked_start
from weightcached.vllm_compat.patching import wrap_once

log = logging.getLogger("vllm.weightcached")

SWAP = "weightcached_swap"
PREPARE = "weightcached_prepare_swap"
LABELS = "weightcached_labels"
# Each returns why it could not, or "".
EXPECT = "weightcached_expect_memory"
LEND = "weightcached_lend_memory"
FORGET = "weightcached_forget_memory"


def install() -> None:
    """Patch the engine core, if this process has imported it. May be called again."""
    guarded.install()
    core = sys.modules.get("vllm.v1.engine.core")
    wrap_once(getattr(core, "EngineCore", None), "collective_rpc", _collective_rpc)


def _collective_rpc(original: Any) -> Any:
    def collective_rpc(self: Any, method: Any, *arguments: Any, **named: Any) -> Any:
        # The executor may have been imported after the plug-ins were loaded.
        guarded.install()
        if method != SWAP:
            return original(self, method, *arguments, **named)
        _check_idle(self)
        results = original(self, method, *arguments, **named)
        if any(result["changed"] for result in results):
            _forget_results(self)
            _tell_version(self, results)
        ended_s = time.monotonic()
        return [{**result, "ended_s": ended_s} for result in results]

    return collective_rpc


def _check_idle(core: Any) -> None:
    """Raises EngineError if a request is under way, or the engine sleeps without its private weights."""
    scheduler = core.scheduler
    # Requests that wait for their first step have used no weights.
    begun = [r for r in scheduler.requests.values() if r.num_computed_tokens or r.num_output_tokens]
    if begun:
        raise EngineError(
            f"{len(begun)} requests are under way, whose answers would come from two generations: "
            "await pause_generation(mode='wait'), swap, then resume_generation()"
        )
    model = core.vllm_config.model_config
    backend = getattr(model, "sleep_mode_backend", None)
    if backend != parked_start.BACKEND and core.model_executor.is_sleeping:
        raise EngineError(
            f"the engine sleeps with the back end {backend or 'of vLLM'}: wake it, then swap"
        )


def _forget_results(core: Any) -> None:
    """The prefix cache, also a connector's, and the encoders' results."""
    options = {"reset_running_requests": True, "reset_connector": True}
    known = inspect.signature(core.reset_prefix_cache).parameters
    if not core.reset_prefix_cache(**{name: options[name] for name in options if name in known}):
        raise EngineError(
            "the new weights are mapped, but the prefix cache still has results of the old ones: "
            "reset_prefix_cache() before the next request"
        )
    if hasattr(core.scheduler, "reset_encoder_cache"):
        core.scheduler.reset_encoder_cache()


def name_weights(core: Any) -> None:
    """Tell an engine that starts the label of the weights that it maps, if it maps any."""
    if not hasattr(core, "set_weight_version"):
        return
    try:
        _tell_version(core, [{"labels": core.model_executor.collective_rpc(LABELS)[0]}])
    except Exception as e:
        # Not worth an engine's start.
        log.debug("cannot tell the label of the weights: %s", e)


def _tell_version(core: Any, results: list[dict[str, Any]]) -> None:
    """vLLM's own name for the weights, which it gives with each answer."""
    labels = results[0]["labels"]
    label = next((labels[name] for name in labels if name.endswith("/target")), "")
    if label and hasattr(core, "set_weight_version"):
        core.set_weight_version(label)
