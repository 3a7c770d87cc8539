"""Which draft models are cached, and which checkpoint each role has, from a manifest's engine
arguments alone; no vLLM.

vLLM resolves the method when it makes its configuration. The daemon has to know before: it is
resolved here by the same words, the draft's name and its config.json. A loader that finds another
method says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Drafts of other methods load from disk in the engine.
CACHED_METHODS = ("mtp", "eagle", "eagle3")
_WITHOUT_MODEL = (
    "ngram",
    "[ngram]",
    "ngram_gpu",
    "suffix",
    "custom_class",
    "extract_hidden_states",
)
# In the order in which vLLM looks for them in a draft's name.
_IN_NAME = (("eagle-", "eagle"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dspark"))


def has_cached_draft(engine: Mapping[str, Any]) -> bool:
    """Whether a model with these engine arguments has a draft model that is cached."""
    speculative = engine.get("speculative_config")
    # A load configuration of its own is followed by the engine, past the cache.
    own_load = isinstance(speculative, dict) and speculative.get("draft_load_config")
    return not own_load and draft_method(engine) in CACHED_METHODS


def checkpoint_arguments(engine: Mapping[str, Any], role: str) -> dict[str, Any]:
    """The arguments of record_checkpoint() for a role of a model with these engine arguments."""
    named: Mapping[str, Any] = engine
    speculative = engine.get("speculative_config")
    if role == "draft" and isinstance(speculative, dict) and speculative.get("model"):
        named = speculative
    return {
        "model": str(named.get("model", "")),
        "revision": named.get("revision"),
        "download_dir": engine.get("download_dir"),
        "load_format": str(engine.get("load_format", "auto")),
    }


def draft_method(engine: Mapping[str, Any]) -> str | None:
    """The method of speculative_config as vLLM resolves it; None without speculation."""
    speculative = engine.get("speculative_config")
    if not isinstance(speculative, dict):
        return None
    method, model = speculative.get("method"), speculative.get("model")
    if method in (*CACHED_METHODS, *_WITHOUT_MODEL):
        return str(method)
    if isinstance(method, str) and method.endswith("_mtp"):
        return "mtp"
    if method not in (None, "draft_model"):
        return str(method)
    return _method_of(model) if isinstance(model, str) else None


def _method_of(model: str) -> str:
    if model in _WITHOUT_MODEL:
        return "ngram"
    for part, method in _IN_NAME:
        if part in model.lower():
            return method
    if model.startswith("/") and not Path(model).is_dir():
        # Missing now. But its served draft must not count as unwanted.
        return CACHED_METHODS[0]
    try:
        config = json.loads(Path(model, "config.json").read_bytes())
    except (OSError, ValueError):
        return "draft_model"
    kind = config.get("model_type") if isinstance(config, dict) else None
    return "mtp" if isinstance(kind, str) and kind.endswith("mtp") else "draft_model"
