"""Draft models: which of them are cached, and the configuration with which vLLM builds one.

Needs vLLM; the daemon, which has none, decides by weightcached/config/drafts.py. Like build.py, it
may need changes for a new vLLM.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from weightcached.config.drafts import CACHED_METHODS


def is_draft(vllm_config: Any, model_config: Any) -> bool:
    """Whether `model_config` is the draft's. Methods without their own model use the target's."""
    spec = vllm_config.speculative_config
    return (
        spec is not None
        and model_config is spec.draft_model_config
        and model_config is not spec.target_model_config
    )


def method_of(vllm_config: Any) -> str | None:
    """The speculative method as vLLM resolved it; None without a draft model."""
    spec = vllm_config.speculative_config
    return (
        spec.method if spec is not None and is_draft(vllm_config, spec.draft_model_config) else None
    )


def is_cached(vllm_config: Any) -> bool:
    return method_of(vllm_config) in CACHED_METHODS


def loads_here(vllm_config: Any) -> bool:
    """Whether this rank loads a cached draft, as ranks of the last pipeline stage do.

    Needs vLLM's process groups.
    """
    from vllm.distributed import get_pp_group

    return is_cached(vllm_config) and bool(get_pp_group().is_last_rank)


def draft_config(vllm_config: Any) -> Any:
    """The VllmConfig with which an engine with this one builds its draft: the target's, with the
    draft's overrides.

    How the draft is loaded is not in it: load_config_of().
    """
    spec = vllm_config.speculative_config
    if vllm_config.use_v2_model_runner:
        return spec.apply_draft_overrides(vllm_config)
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    # Its own rule, without a proposer, which would need a device and a runner.
    asking = SimpleNamespace(speculative_config=spec, vllm_config=vllm_config)
    return SpecDecodeBaseProposer._create_draft_vllm_config(asking)


def load_config_of(vllm_config: Any) -> Any:
    """The LoadConfig by which an engine loads its draft."""
    try:
        from vllm.model_executor.model_loader.utils import get_draft_load_config
    except ImportError:
        # vLLM 0.30: the draft's own, or the target's.
        return vllm_config.speculative_config.draft_load_config or vllm_config.load_config
    return get_draft_load_config(vllm_config)


def message(vllm_config: Any) -> str:
    """A log line about a draft that has no cache; "" if it has one, or if there is no draft."""
    method, spec = method_of(vllm_config), vllm_config.speculative_config
    if method is None or (method in CACHED_METHODS and spec.draft_load_config is None):
        return ""
    if method not in CACHED_METHODS:
        return f"the draft of method {method} loads from disk: those of {', '.join(CACHED_METHODS)} are cached"
    return (
        f"the draft loads as its own draft_load_config says ({spec.draft_load_config.load_format})"
    )
