"""Sleep, wake and new weights in vLLM's GPU worker, with weights that others map.

Calls that would write into shared pages are refused before the first byte; calls that free or
restore weights do not touch mapped ones. model/kv_scratch.py and model/mapped.py handle a sleeping
engine's memory.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightcached.errors import CacheConfigMismatchError, SharedWeightsError
from weightcached.index.tensors import TensorIndex
from weightcached.model import bind, kv_lending, mapped
from weightcached.model.bind import Storages
from weightcached.model.kv_scratch import KvPool, KvScratch
from weightcached.segments.cuda_driver import Gpu
from weightcached.system.process import holds_lock
from weightcached.vllm_compat import guarded, live, parked_start
from weightcached.vllm_compat.build import gpu_of_worker
from weightcached.vllm_compat.hooks import PostProcessing
from weightcached.vllm_compat.patching import wrap_once

log = logging.getLogger("vllm.weightcached")

_REFUSAL = (
    "{} would write into weights that other engines map: use mode 'copy' "
    '(--model-loader-extra-config \'{{"mode": "copy"}}\'), or load the new weights into the daemon '
    "('weightcachectl reload') and call reload_weights()"
)
_kv_pool: KvPool | None = None


def install(
    reload_weights: Callable[[Any], bool],
    *,
    prepare_swap: Callable[..., dict[str, Any]],
    swap: Callable[[Any], dict[str, Any]],
    on_started: Callable[[], None] = lambda: None,
    memory_kept: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:
    """Patch vLLM's GPU worker, from which the CPU's inherits, if this process has one. Again and
    again is fine.

    `reload_weights` gets a worker whose weights shall be read again, and says whether it did that;
    otherwise vLLM reads them from disk. `prepare_swap` and `swap` become methods of workers, to be
    called by collective_rpc(). `on_started` is called once a worker has measured memory,
    taken its KV cache and captured its graphs; within `memory_kept` it sleeps and wakes.
    """
    module = sys.modules.get("vllm.v1.worker.gpu_worker")
    worker = getattr(module, "Worker", None)
    wrap_once(worker, "sleep", lambda original: _within(memory_kept, _sleep(original)))
    wrap_once(
        worker,
        "wake_up",
        lambda original: _within(_skip_if_unmapped(memory_kept), _wake_up(original)),
    )
    wrap_once(worker, "compile_or_warm_up_model", lambda o: _then(on_started, _warm_up(o)))
    on_cpu = getattr(sys.modules.get("vllm.v1.worker.cpu_worker"), "CPUWorker", None)
    wrap_once(on_cpu, "compile_or_warm_up_model", lambda o: _then(on_started, o))
    wrap_once(worker, "_maybe_get_memory_pool_context", _memory_pool)
    wrap_once(worker, "shutdown", _shutdown)
    wrap_once(worker, "reload_weights", lambda original: _reload(original, reload_weights))
    for name in guarded.WRITERS:
        wrap_once(worker, name, _refusing)
    if worker is not None:
        worker.weightcached_prepare_swap = prepare_swap
        worker.weightcached_swap = swap
        worker.weightcached_labels = labels_of
        setattr(worker, live.EXPECT, _answering(expect_memory))
        setattr(worker, live.LEND, _answering(lend_memory))
        setattr(worker, live.FORGET, _answering(forget_memory))
        setattr(worker, guarded.CALL, guarded.call)


def models_of(worker: Any) -> list[nn.Module]:
    """Target and draft of a worker, as far as it has them."""
    runner = getattr(worker, "model_runner", None)
    found = [getattr(runner, name, None) for name in ("get_model", "get_draft_model")]
    models = []
    for get in found:
        with contextlib.suppress(AttributeError, AssertionError):
            models.append(get() if get else None)
    return [model for model in models if isinstance(model, nn.Module)]


def mapped_of(worker: Any) -> list[mapped.MappedModel]:
    """The mappings of a worker's models."""
    found = [mapped.of(model) for model in models_of(worker)]
    return [each for each in found if each is not None]


def labels_of(worker: Any) -> dict[str, str]:
    """The label of each mapped generation, by cache."""
    return {model.cache: model.index.label for model in mapped_of(worker)}


def refuse_writes(model: nn.Module) -> None:
    """Make load_weights() of a mapped model raise an error instead of faulting on a read-only page.

    A function sent to the workers may call it.
    """

    def load_weights(*arguments: Any, **named: Any) -> Any:
        raise SharedWeightsError(_REFUSAL.format("load_weights()"))

    if hasattr(model, "load_weights"):
        object.__setattr__(model, "load_weights", load_weights)


def settle_for_reloads(model: nn.Module, device: Any) -> None:
    """Make vLLM's layer by layer reload create its tensors on the device, not on the meta device.

    Also forget the progress of a load that never began.
    """
    try:
        from vllm.model_executor.model_loader.reload import layerwise
    except ImportError:
        return
    for layer in model.modules():
        info = layerwise.LAYERWISE_INFO.get(layer)
        if info is not None:
            info.reset()
            info.restore_device = device


def _within(context: Callable[[], AbstractContextManager[None]], function: Any) -> Any:
    def within(self: Any, *arguments: Any, **named: Any) -> Any:
        with context():
            return function(self, *arguments, **named)

    return within


def _skip_if_unmapped(
    memory_kept: Callable[[], AbstractContextManager[None]],
) -> Callable[[], AbstractContextManager[None]]:
    """An engine that was unmapped may have to wait for a load before it wakes: it must not hold that off."""

    def context() -> AbstractContextManager[None]:
        unmapped = any(model.state is mapped.State.UNMAPPED for model in mapped.of_process())
        return contextlib.nullcontext() if unmapped else memory_kept()

    return context


def _then(callback: Callable[[], None], function: Any) -> Any:
    def then(self: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return function(self, *arguments, **named)
        finally:
            callback()

    return then


# ---- sleep


def kv_pool() -> KvPool | None:
    """The pool of this process's KV cache, if it is ours."""
    return _kv_pool


def expect_memory(worker: Any, directory: str) -> None:
    """Let another engine lend memory to this one's KV cache. Raises OSError."""
    if _kv_pool is not None:
        home = Path(directory)
        _kv_pool.scratch.expect(
            kv_lending.path_of(home, worker.rank), lambda: _find_lender(home.parent)
        )


def _find_lender(service: Path) -> str:
    """Why an engine of the service may still use what it lent, or ""."""
    # Not the supervisor's order alone: vLLM's own wake_up() reaches a standby past it.
    if holds_lock(service / "fence"):
        return ""
    return (
        f"engine service {service.name} has not promoted this engine ('weightcachectl engine wake {service.name}' and "
        f"'restart {service.name}' do)"
    )


def lend_memory(worker: Any, directory: str) -> None:
    """Lend the KV cache's memory to the engine there. Raises OSError, ProtocolError."""
    if _kv_pool is not None:
        _kv_pool.scratch.lend(kv_lending.path_of(Path(directory), worker.rank))


def forget_memory(worker: Any) -> None:
    """Give back what was lent."""
    if _kv_pool is not None:
        _kv_pool.scratch.forget()


def _answering(function: Callable[..., None]) -> Callable[..., str]:
    # vLLM's executor cannot take errors of several workers at once (guarded.py).
    def answering(worker: Any, *arguments: Any) -> str:
        try:
            function(worker, *arguments)
        except Exception as e:
            return f"{type(e).__name__}: {e}"
        return ""

    return answering


def _sleep(original: Any) -> Any:
    def sleep(self: Any, level: int = 1) -> None:
        if level == 2 and mapped_of(self):
            # vLLM would copy the buffers back on wake, some of them into shared pages.
            _tell_of_level_2()
            level = 1
        try:
            original(self, level)
        except AssertionError as e:
            # vLLM measures the whole device, but another engine may wake meanwhile.
            if "Memory usage increased" not in str(e):
                raise
            log.warning("asleep; another process took memory of the device meanwhile")

    return sleep


@functools.cache
def _tell_of_level_2() -> None:
    """Once a process."""
    log.info(
        "sleep level 2 is done as level 1: the weights are mapped and cost this engine nothing"
    )


def _wake_up(original: Any) -> Any:
    def wake_up(self: Any, tags: list[str] | None = None) -> None:
        original(self, tags)
        parked = _kv_pool is not None and _kv_pool.scratch.parked
        # Not whatever stands there: refuse_steps() is for good.
        if not parked and vars(self).get("execute_model") is _refuse_to_execute:
            del self.execute_model

    return wake_up


def _warm_up(original: Any) -> Any:
    def compile_or_warm_up_model(self: Any) -> Any:
        times = original(self)
        if _kv_pool is not None and _kv_pool.scratch.parked:
            # Until its first wake. Results computed over scratch memory would be wrong.
            self.execute_model = _refuse_to_execute
        return times

    return compile_or_warm_up_model


def _refuse_to_execute(*arguments: Any, **named: Any) -> Any:
    raise RuntimeError("this engine is parked: wake_up() comes before its first request")


def refuse_steps(worker: Any, reason: str) -> None:
    """Let no request be computed any more, awake or not: the next one ends the engine."""

    def execute_model(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError(reason)

    worker.execute_model = execute_model


def _memory_pool(original: Any) -> Any:
    def _maybe_get_memory_pool_context(self: Any, tag: str) -> Any:
        if tag != "kv_cache" or not _uses_backend(self.vllm_config):
            return original(self, tag)
        parked = parked_start.starts_parked(self.vllm_config)
        reason = _find_obstacle(self.vllm_config)
        if not reason:
            return _in_kv_pool(parked)
        if parked:
            raise ValueError(f"this engine cannot start parked: {reason}")
        log.warning("the KV cache is left to vLLM's own sleep back end: %s", reason)
        return original(self, tag)

    return _maybe_get_memory_pool_context


def _uses_backend(vllm_config: Any) -> bool:
    model = vllm_config.model_config
    return (
        getattr(model, "enable_sleep_mode", False)
        and getattr(model, "sleep_mode_backend", None) == parked_start.BACKEND
    )


def _find_obstacle(vllm_config: Any) -> str:
    """Why this engine's KV cache cannot lie over scratch memory while it sleeps, or ""."""
    connector = getattr(vllm_config, "kv_transfer_config", None)
    if connector is not None:
        return f"the KV connector {connector.kv_connector} registers its memory"
    if getattr(getattr(vllm_config, "attention_config", None), "hisparse_config", None) is not None:
        return "hisparse_config places more than the KV cache there"
    if (name := _set_expandable_segments()) and _find_alloc_conf() is None:
        return f"this vLLM cannot set expandable_segments aside: leave it out of {name}"
    layers = vllm_config.compilation_config.static_forward_context
    for name, layer in layers.items():
        if any(kind.__name__ == "StaticSinkAttention" for kind in type(layer).__mro__):
            return f"{name} is StaticSinkAttention, which fills its part of the cache only once"
    return ""


@contextlib.contextmanager
def _in_kv_pool(parked: bool) -> Iterator[None]:
    global _kv_pool  # noqa: PLW0603  one engine a process, as vLLM's own allocator has it
    if _kv_pool is None:
        # Before the interpreter goes, and torch with it.
        atexit.register(_close_kv_pool)
    else:
        _kv_pool.close()
    _kv_pool = KvPool(KvScratch(Gpu(gpu_of_worker()), parked=parked))
    with _without_expandable_segments(), _kv_pool.use():
        yield
    log.info(
        "KV cache of %.1f GiB %s",
        _kv_pool.scratch.nbytes / 2**30,
        "over scratch until the first wake" if parked else "can be parked",
    )


@contextlib.contextmanager
def _without_expandable_segments() -> Iterator[None]:
    """Torch maps those itself, at addresses of its own, and asks no pool's allocator."""
    alloc_conf = _find_alloc_conf()
    if alloc_conf is None:
        # They are off: _find_obstacle().
        yield
        return
    before = alloc_conf.current_alloc_conf()
    name = alloc_conf.EXPANDABLE_SEGMENTS
    if not alloc_conf.conf_flag_enabled(before, name):
        yield
        return
    # The whole text: settings that are left out fall back to their defaults.
    alloc_conf.set_alloc_conf(alloc_conf.with_conf_flag(before, name, False))
    try:
        yield
    finally:
        alloc_conf.set_alloc_conf(before)


def _find_alloc_conf() -> Any:
    """vLLM's module that reads and writes the settings of torch's allocator; None in vLLM 0.30."""
    try:
        from vllm.device_allocator import alloc_conf
    except ImportError:
        return None
    return alloc_conf


def _set_expandable_segments() -> str:
    """The environment variable that turns them on, or ""."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return next(
        (name for name in names if "expandable_segments:True" in os.environ.get(name, "")), ""
    )


def _shutdown(original: Any) -> Any:
    def shutdown(self: Any) -> None:
        original(self)
        _close_kv_pool()

    return shutdown


def _close_kv_pool() -> None:
    if _kv_pool is not None:
        _kv_pool.close()


# ---- new weights


def _reload(original: Any, reload_weights: Callable[[Any], bool]) -> Any:
    def _reload_weights(self: Any, *arguments: Any, **named: Any) -> Any:
        given = [*arguments, *named.values()]
        if any(value not in (None, True) for value in given):
            if mapped_of(self):
                raise SharedWeightsError(
                    _REFUSAL.format("reload_weights() with weights of its own")
                )
            return original(self, *arguments, **named)
        if reload_weights(self):
            return None
        with _writable(models_of(self)):
            return original(self, *arguments, **named)

    return _reload_weights


@contextlib.contextmanager
def _writable(models: list[nn.Module]) -> Iterator[None]:
    refusals = [(model, vars(model).pop("load_weights", None)) for model in models]
    try:
        yield
    finally:
        for model, refusal in refusals:
            if refusal is not None:
                object.__setattr__(model, "load_weights", refusal)


def check_rebinds(worker: Any) -> None:
    """Raises CacheConfigMismatchError if other weights cannot be brought into this worker's models."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and getattr(worker.vllm_config, "lora_config", None) is not None:
        # Its layers wrap those that the index names.
        raise CacheConfigMismatchError(
            "enable_lora on the CPU: a running engine cannot take other weights; restart it",
            code="not-live",
        )


def rebinder(
    model: nn.Module, vllm_config: Any, model_config: Any, storages: Storages
) -> Callable[[TensorIndex], None] | None:
    """Brings other weights of a mapping into the model's own results of post-processing, where it
    has any: on the CPU all layers may have packed copies.
    """
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    # The model would never be freed: what it refers to refers to this function.
    of = weakref.ref(model)

    def rebind(index: TensorIndex) -> None:
        if (model := of()) is None:
            return
        device = torch.device("cpu")
        with set_current_vllm_config(vllm_config):
            bind.Binder(model, index, storages).attach(
                PostProcessing(model_config, device, stage=index.stage)
            )
        settle_for_reloads(model, device)

    return rebind


def reset_caches(worker: Any) -> None:
    """Forget results of the old weights, as vLLM does after a reload."""
    for name in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
        if (reset := getattr(worker.model_runner, name, None)) is not None:
            reset()


def _refusing(original: Any) -> Any:
    def refused(self: Any, *arguments: Any, **named: Any) -> Any:
        if mapped_of(self):
            raise SharedWeightsError(_REFUSAL.format(f"{original.__name__}()"))
        return original(self, *arguments, **named)

    return refused
