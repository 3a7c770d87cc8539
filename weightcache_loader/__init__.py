"""The vLLM plug-in: load format `ipc_cache` (and `weightcached`) maps weights that a weightcached
daemon holds.
"""

from __future__ import annotations

import logging

from weightcached.vllm_compat import parked_start

log = logging.getLogger("vllm.weightcached")

LOAD_FORMATS = ("ipc_cache", "weightcached")


def register() -> None:
    """Entry point in vllm.general_plugins: called once in every process of an engine; a second call
    changes nothing.
    """
    from vllm.model_executor import model_loader

    from weightcache_loader.ipc_loader import IpcModelLoader

    parked_start.install()
    _register_sleep_backend()
    loaders = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    for name in LOAD_FORMATS:
        present = loaders.get(name)
        if present is IpcModelLoader:
            continue
        if present is not None:
            log.info(
                "load format %s is weightcached's from here on, instead of %s",
                name,
                present.__module__,
            )
            # Replacing is what was asked for; vLLM would warn about it in every process.
            del loaders[name]
        model_loader.register_model_loader(name)(IpcModelLoader)


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
