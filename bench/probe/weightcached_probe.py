"""A vLLM plug-in for benchmarks: times every load the same way, with any loader.

With this directory on PYTHONPATH and WEIGHTCACHED_PROBE naming a file, every process of an engine
appends one JSON line for each load phase: the wall time of load_model() and of the question for
external memory before it (a loader may do its work there), the time that building the model
(initialize_model) took inside, and the wall time of the worker's whole load_model(), in which vLLM
also collects garbage and prepares the model's use.
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
# A record waits here until the worker's load_model() is through as well.
_record: dict[str, Any] | None = None
_in_worker = False


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
        _time_workers(path)
        self.load_model = _timed_load(self.load_model, path, type(self))
        # vLLM 0.30 and 0.31 do not ask.
        if hasattr(self, "get_external_weight_memory"):
            self.get_external_weight_memory = _timed_query(self.get_external_weight_memory)

    vars(probing_init)["_weightcached_probe"] = True
    base_loader.BaseModelLoader.__init__ = probing_init
    original, timed = utils.initialize_model, _timed_build(utils.initialize_model)
    for module in list(sys.modules.values()):
        # Loaders imported the function by name. vars(), since getattr() makes lazy packages import
        # all they have.
        if vars(module).get("initialize_model") is original:
            vars(module)["initialize_model"] = timed


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


def _time_workers(path: str) -> None:
    # Not at registration: the module is large, and an engine imports it when it is needed.
    worker = getattr(sys.modules.get("vllm.v1.worker.gpu_worker"), "Worker", None)
    if worker is None or getattr(worker.load_model, "_weightcached_probe", False):
        return
    load = worker.load_model

    @functools.wraps(load)
    def timed(*args: Any, **kwargs: Any) -> Any:
        global _in_worker
        _in_worker = True
        began = time.perf_counter()
        try:
            return load(*args, **kwargs)
        finally:
            _in_worker = False
            _write(path, worker_seconds=time.perf_counter() - began)

    timed._weightcached_probe = True  # type: ignore[attr-defined]
    worker.load_model = timed


def _write(path: str, **more: float) -> None:
    global _record
    if _record is not None:
        with open(path, "a", encoding="utf-8") as out:
            out.write(json.dumps(_record | more) + "\n")
    _record = None


def _timed_load(load: Callable[..., Any], path: str, loader: type) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        global _build_seconds, _query_seconds, _depth, _record
        if _depth == 0:
            _build_seconds = 0.0
        _depth += 1
        began = time.perf_counter()
        try:
            model = load(*args, **kwargs)
            _synchronize()
        finally:
            _depth -= 1
        # A loader that falls back calls another one inside; only the outermost is the engine's load
        # phase.
        if _depth == 0:
            _record = {
                "loader": f"{loader.__module__}.{loader.__qualname__}",
                "load_seconds": _query_seconds + time.perf_counter() - began,
                "query_seconds": _query_seconds,
                "build_seconds": _build_seconds,
                "pid": os.getpid(),
            }
            _query_seconds = 0.0
            if not _in_worker:
                _write(path)
        return model

    return timed


def _synchronize() -> None:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
