"""The vLLM plug-in: load format `ipc_cache` (and `weightcached`) maps a daemon's weights."""

from __future__ import annotations

import logging
import os

from weightcached.config.load_formats import OWN_LOAD_FORMATS
from weightcached.vllm_compat import live, parked_start

log = logging.getLogger("vllm.weightcached")


def register() -> None:
    """Entry point in vllm.general_plugins, called in every engine process; may be called again."""
    from vllm.model_executor import model_loader

    from weightcache_loader.ipc_loader import IpcModelLoader

    parked_start.install()
    live.install()
    _register_sleep_backend()
    loaders = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    for name in OWN_LOAD_FORMATS:
        present = loaders.get(name)
        if present is IpcModelLoader:
            continue
        if present is not None:
            log.info(
                "weightcached now provides load format %s, instead of %s",
                name,
                present.__module__,
            )
            # The user wants the replacement; vLLM would warn about it in every process.
            del loaders[name]
        model_loader.register_model_loader(name)(IpcModelLoader)
    if "WEIGHTCACHED_ENGINE_ERROR_FILE" in os.environ:
        from weightcached.vllm_compat.server import join_engine

        join_engine()


def _register_sleep_backend() -> None:
    try:
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory as Factory
    except ImportError:
        log.debug("this vLLM has no choice of sleep back ends")
        return
    if parked_start.BACKEND not in Factory._registry:
        Factory.register_backend(
            parked_start.BACKEND, "weightcache_loader.sleep", "WeightcachedBackend"
        )
