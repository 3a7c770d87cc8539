"""Download a Hub model as `vllm serve` does before it loads."""

from __future__ import annotations

import logging
import os
from typing import Any

log = logging.getLogger("weightcached.loader")


def fetch(vllm_config: Any, model_config: Any) -> str:
    """Fetch the missing files of the current revision into the local Hub cache. Returns why that
    failed, or "".

    The load itself would do it, but its files are recorded before it begins. A failure counts only
    if the local cache does not have the model either.
    """
    from vllm.model_executor.model_loader import get_model_loader

    if os.path.exists(model_config.model):
        return ""
    try:
        get_model_loader(vllm_config.load_config).download_model(model_config)
    except Exception as e:  # of huggingface_hub, of HTTP, of the network, of vLLM
        reason = f"{type(e).__name__}: {' '.join(str(e).split())}"[:1000]
        log.warning("%s cannot be downloaded: %s", model_config.model, reason)
        return reason
    return ""
