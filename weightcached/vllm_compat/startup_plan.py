"""vLLM's startup plan (VLLM_ENABLE_STARTUP_PLAN): what else its record of KV cache bytes depends on.

vLLM keys the record by the configuration's hash, which has neither the utilization nor the load format. One saved by an
engine that maps its weights, used by one that loads them from disk, would ask for the weights' memory twice. So
what decides the budget here goes into the key of engines of our load format; others' keys stay as they are.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

_OUR_LOAD_FORMATS = ("ipc_cache", "weightcached")
# What this process's engine was told: utilization, external bytes, and where target and draft come from.
_factors: list[Any] = []


def note(utilization: float, external_bytes: int, sources: Sequence[str]) -> None:
    """Make this the part of the key that is ours, from now on."""
    _factors[:] = [utilization, external_bytes, *sources]
    _install()


def changed(source: str) -> None:
    """What was decided before came to nothing: the weights come from elsewhere."""
    if _factors:
        _factors.append(source)


def _install() -> None:
    try:
        from vllm.v1.worker import startup_plan
    except ImportError:
        # A vLLM without such plans.
        return
    compute = startup_plan.compute_plan_fingerprint
    if not hasattr(compute, "__wrapped__"):
        startup_plan.compute_plan_fingerprint = _with_factors(compute)


def _with_factors(compute: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(compute)
    def fingerprint(vllm_config: Any, *args: Any, **kwargs: Any) -> str:
        plain = compute(vllm_config, *args, **kwargs)
        # A later engine of this process may not be one of ours.
        if vllm_config.load_config.load_format not in _OUR_LOAD_FORMATS:
            return plain
        ours = hashlib.sha256(f"{plain} {json.dumps(_factors)}".encode()).hexdigest()
        return ours[: len(plain)]

    return fingerprint
