"""Engines that start parked: asleep from their first moment on, without the memory for a KV cache.

vLLM starts an engine awake and lets its owner send it to sleep. Beside an engine that serves there
is no memory for that, and a request that came in between would be computed over scratch memory. So
the engine core sleeps before it takes its first request, and free memory is checked at the first
wake, not at the start.
"""

from __future__ import annotations

import logging
import math
import sys
from typing import Any

from weightcached.config.load_formats import OWN_LOAD_FORMATS
from weightcached.vllm_compat.patching import wrap_once

log = logging.getLogger("vllm.weightcached")

BACKEND = "weightcached"


def starts_parked(vllm_config: Any) -> bool:
    """Whether this engine was asked to start parked: `start_parked` in its model_loader_extra_config."""
    load = vllm_config.load_config
    extra = load.model_loader_extra_config
    if load.load_format not in OWN_LOAD_FORMATS or not isinstance(extra, dict):
        return False
    return str(extra.get("start_parked", False)).lower() in ("true", "1")


def check(vllm_config: Any) -> None:
    """Raises ValueError if an engine that shall start parked could not sleep."""
    from vllm.platforms import current_platform

    if not starts_parked(vllm_config) or current_platform.is_cpu():
        return
    model = vllm_config.model_config
    backend = getattr(model, "sleep_mode_backend", None)
    if not getattr(model, "enable_sleep_mode", False) or backend != BACKEND:
        raise ValueError(
            "start_parked needs enable_sleep_mode and sleep_mode_backend 'weightcached', "
            f"sleep_mode_backend is {backend!r}: add --enable-sleep-mode --sleep-mode-backend weightcached"
        )


def install() -> None:
    """Patch the modules of vLLM that this process has imported. May be called again."""
    core = sys.modules.get("vllm.v1.engine.core")
    if core is not None and hasattr(core, "EngineCoreProc"):
        wrap_once(core.EngineCore, "__init__", _sleeping_init)
        for name in ("EngineCoreProc", "DPEngineCoreProc"):
            # Not at the end of __init__: this process's plug-ins are loaded inside of that.
            wrap_once(getattr(core, name, None), "run_busy_loop", _sleeping_loop)


def _sleeping_init(original: Any) -> Any:
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        # An engine core within its client's process; others are not complete yet.
        if type(self).__name__ == "EngineCore":
            _begin(self)

    return __init__


def _sleeping_loop(original: Any) -> Any:
    def run_busy_loop(self: Any) -> Any:
        _begin(self)
        return original(self)

    return run_busy_loop


def _begin(core: Any) -> None:
    # It imports this module.
    from weightcached.vllm_compat import guarded, live

    # By now the executor is imported, which sleep and wake call without the core.
    guarded.install()
    if core.vllm_config.load_config.load_format in OWN_LOAD_FORMATS:
        live.name_weights(core)
    _fall_asleep(core)


def _fall_asleep(core: Any) -> None:
    if not starts_parked(core.vllm_config):
        return
    core.sleep(level=1)
    log.info("started parked: requests wait until the engine is woken")


def do_not_check_free_memory() -> None:
    """Let this worker's next request_memory(), the only one of its start, ignore free memory.

    Another engine has that memory now.
    """
    worker: Any = sys.modules["vllm.v1.worker.gpu_worker"]
    original = worker.request_memory

    def request_memory(*arguments: Any, **named: Any) -> int:
        worker.request_memory = original
        return _budget(*arguments, **named)

    worker.request_memory = request_memory


def _budget(snapshot: Any, cache_config: Any, external_weight_memory: int = 0) -> int:
    # Rounded as in vLLM.
    total: int = math.ceil(snapshot.total_memory * cache_config.gpu_memory_utilization)
    budget: int = total - external_weight_memory
    if budget <= 0:
        raise ValueError(
            f"gpu_memory_utilization {cache_config.gpu_memory_utilization} gives {total} bytes, weights outside of "
            f"this process take {external_weight_memory}: raise it"
        )
    return budget
