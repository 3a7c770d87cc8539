"""How many bytes one rank holds at least, by vLLM's configuration."""

from __future__ import annotations

from typing import Any


def least_bytes(checkpoint_bytes: int, vllm_config: Any, model_config: Any) -> int:
    """A lower bound of what one rank holds: its share of the checkpoint, a quarter of it if
    quantized online.

    0 for a draft inside of its target's checkpoint, of which it is a small part.
    """
    target = vllm_config.model_config
    if model_config is not target and model_config.model == target.model:
        return 0
    share = checkpoint_bytes // max(1, int(vllm_config.parallel_config.world_size))
    return share // 4 if model_config.quantization else share
