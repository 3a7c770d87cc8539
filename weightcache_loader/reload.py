"""reload_weights(): new weights for a running engine, from the cache if the engine uses it."""

from __future__ import annotations

import logging
from typing import Any

import torch

from weightcached.errors import WeightCacheUnavailableError
from weightcached.model import mapped
from weightcached.vllm_compat import worker as vllm_worker
from weightcached.vllm_compat.build import all_ranks

log = logging.getLogger("vllm.weightcached")


def reload_weights(worker: Any) -> bool:
    """Let a worker's models take the newest weights that the daemon has. False if they come from
    disk: nothing is mapped, and the cache is not copied or not available. Raises the reason if the
    newest weights cannot be taken; nothing has changed then.
    """
    models = vllm_worker.mapped_of(worker)
    return _take_newest(worker, models) if models else _copy_again(worker)


def _take_newest(worker: Any, models: list[mapped.MappedModel]) -> bool:
    newer: list[tuple[mapped.MappedModel, mapped.MappedAttachment]] = []
    error: Exception | None = None
    try:
        for model in models:
            if (attachment := model.prepare_newest()) is not None:
                newer.append((model, attachment))
    except Exception as e:
        error = e
    on_host = any(not model.can_change for model, _ in newer)
    if not all_ranks(error is None, "target") or on_host:
        for _, attachment in newer:
            attachment.close()
        if on_host and error is None:
            # Post-processed weights belong to the engine there, so vLLM may write them.
            return False
        raise error or WeightCacheUnavailableError(
            "another rank of this engine cannot take the newest weights", code="another-rank"
        )
    for model, attachment in newer:
        model.take(attachment)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if newer:
        vllm_worker.reset_caches(worker)
    else:
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
