"""reload_weights(): new weights for a running engine, from the cache if the engine uses it."""

from __future__ import annotations

import logging
from typing import Any

from weightcache_loader import swap
from weightcached.vllm_compat import worker as vllm_worker

log = logging.getLogger("vllm.weightcached")


def reload_weights(worker: Any) -> bool:
    """Let a worker's models take the newest weights that the daemon has. False if they come from
    disk: nothing is mapped, and the cache is not copied or not available. Raises the reason if the
    newest weights cannot be taken; nothing has changed then.
    """
    if not vllm_worker.mapped_of(worker):
        return _copy_again(worker)
    if not swap.take_newest(worker):
        log.info("reload_weights: the newest weights are mapped already")
    return True


def _copy_again(worker: Any) -> bool:
    from vllm.model_executor.model_loader import get_model_loader

    loader = get_model_loader(worker.vllm_config.load_config)
    copy_again = getattr(loader, "copy_again", None)
    if copy_again is None or not copy_again(
        worker.vllm_config, worker.model_config, worker.model_runner.get_model()
    ):
        return False
    vllm_worker.reset_caches(worker)
    return True
