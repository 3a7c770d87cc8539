"""A vLLM plug-in for benchmarks: times every load the same way, whoever's loader runs.

With this directory on PYTHONPATH and WEIGHTCACHED_PROBE naming a file, every process of an engine appends one JSON
line for each load phase: the wall time of load_model() and of the question for external memory before it (a loader
may do its work there), and the time that building the model (initialize_model) took inside.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

_build_seconds = 0.0
_query_seconds = 0.0
_depth = 0


def register() -> None:
    """Wrap loaders and the model builder, if a file to write to is named."""
    path = os.environ.get("WEIGHTCACHED_PROBE")
    if not path:
        return
    from vllm.model_executor.model_loader import base_loader, utils

    init = base_loader.BaseModelLoader.__init__
    if getattr(init, "_weightcached_probe", False):
        return

    @functools.wraps(init)
    def probing_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.load_model = _timed_load(self.load_model, path, type(self))
        self.get_external_weight_memory = _timed_query(self.get_external_weight_memory)

    probing_init._weightcached_probe = True
    base_loader.BaseModelLoader.__init__ = probing_init
    original, timed = utils.initialize_model, _timed_build(utils.initialize_model)
    for module in list(sys.modules.values()):
        # Loaders imported the function by name. vars(), since getattr() makes lazy packages import all they have.
        if vars(module).get("initialize_model") is original:
            module.initialize_model = timed


def _timed_build(build: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(build)
    def timed(*args: Any, **kwargs: Any) -> Any:
        global _build_seconds
        began = time.perf_counter()
        try:
            return build(*args, **kwargs)
        finally:
            _build_seconds += time.perf_counter() - began

    return timed


def _timed_query(query: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(query)
    def timed(*args: Any, **kwargs: Any) -> Any:
        global _query_seconds
        began = time.perf_counter()
        try:
            return query(*args, **kwargs)
        finally:
            _query_seconds += time.perf_counter() - began

    return timed


def _timed_load(load: Callable[..., Any], path: str, loader: type) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        global _build_seconds, _query_seconds, _depth
        if _depth == 0:
            _build_seconds = 0.0
        _depth += 1
        began = time.perf_counter()
        try:
            model = load(*args, **kwargs)
            _synchronize()
        finally:
            _depth -= 1
        # A loader that falls back calls another one inside; only the outermost is the engine's load phase.
        if _depth == 0:
            record = {
                "loader": f"{loader.__module__}.{loader.__qualname__}",
                "load_seconds": _query_seconds + time.perf_counter() - began,
                "query_seconds": _query_seconds,
                "build_seconds": _build_seconds,
                "pid": os.getpid(),
            }
            _query_seconds = 0.0
            with open(path, "a", encoding="utf-8") as out:
                out.write(json.dumps(record) + "\n")
        return model

    return timed


def _synchronize() -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
