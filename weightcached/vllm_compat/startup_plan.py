"""vLLM's startup plan (VLLM_ENABLE_STARTUP_PLAN): more inputs for the key of its record.

vLLM keys the record by the configuration's hash, which has neither the utilization nor the load
format. If an engine that maps its weights saves a record, and an engine that loads from disk uses
it, that one asks for the weights' memory twice. So the inputs of our budget go into the key of
engines of our load format; keys of other engines stay the same.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from weightcached.config.load_formats import OWN_LOAD_FORMATS

# Inputs of this process's engine: utilization, external bytes, and the source of target and draft.
_factors: list[Any] = []


def note(utilization: float, external_bytes: int, sources: Sequence[str]) -> None:
    """Set our part of the key."""
    _factors[:] = [utilization, external_bytes, *sources]
    _install()


def changed(source: str) -> None:
    """The earlier decision does not hold: the weights come from elsewhere."""
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
        if vllm_config.load_config.load_format not in OWN_LOAD_FORMATS:
            return plain
        ours = hashlib.sha256(f"{plain} {json.dumps(_factors)}".encode()).hexdigest()
        return ours[: len(plain)]

    return fingerprint
