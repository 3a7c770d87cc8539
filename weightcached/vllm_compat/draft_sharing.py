"""Tensors that a draft takes from its target: the engine replaces the draft's own embeddings or
lm_head by the target's.

If the draft's checkpoint has none, they are uninitialised memory; if it has, they are a second copy
of a GiB and more. Neither is packed: the tensors keep their shape, over one element.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

log = logging.getLogger("weightcached.loader")

# Proposers that share by rules of their own.
_OWN_RULES = ("use_gemma4_mtp", "use_step3p5_mtp")


def leave_out(model: nn.Module, vllm_config: Any) -> list[str]:
    """Free the weights that the engine replaces by the target's; returns the paths of their layers.

    The rules are vLLM's own, for both of its runners, as far as they need no look at the target's
    weights.
    """
    left_out = []
    for path, layer in _layers_of_target(model, vllm_config):
        for parameter in layer.parameters(recurse=False):
            parameter.data = torch.zeros(1, dtype=parameter.dtype, device=parameter.device).expand(
                parameter.shape
            )
        left_out.append(path)
    if left_out:
        log.info("not packed, the engine takes the target's: %s", ", ".join(left_out))
    return left_out


def _layers_of_target(model: nn.Module, vllm_config: Any) -> Iterator[tuple[str, nn.Module]]:
    """The layers that the engine takes from the target, if nothing else uses their weights."""
    found = {path: layer for path, layer in _candidates(model, vllm_config) if _is_plain(layer)}
    inside = {id(layer) for layer in found.values()}
    others = {
        id(parameter)
        for module in model.modules()
        if id(module) not in inside
        for parameter in module.parameters(recurse=False)
    }
    for path, layer in found.items():
        if others.isdisjoint(map(id, layer.parameters(recurse=False))):
            yield path, layer


def _candidates(model: nn.Module, vllm_config: Any) -> Iterator[tuple[str, Any]]:
    spec, inner = vllm_config.speculative_config, getattr(model, "model", None)
    if any(getattr(spec, name, bool)() for name in _OWN_RULES):
        return
    # With pipeline stages the target's embeddings are on another rank.
    embed, one_stage = (
        getattr(inner, "embed_tokens", None),
        vllm_config.parallel_config.pipeline_parallel_size == 1,
    )
    if (
        one_stage
        and not getattr(model, "has_own_embed_tokens", False)
        and _as_wide(embed, vllm_config)
    ):
        yield "model.embed_tokens", embed
    if getattr(model, "has_own_lm_head", False):
        return
    yield "lm_head", getattr(model, "lm_head", None)
    layers = getattr(inner, "layers", ())
    for name, layer in layers.items() if isinstance(layers, nn.ModuleDict) else enumerate(layers):
        yield (
            f"model.layers.{name}.shared_head.head",
            getattr(getattr(layer, "shared_head", None), "head", None),
        )


def _as_wide(embed: Any, vllm_config: Any) -> bool:
    weight = getattr(embed, "weight", None)
    return (
        isinstance(weight, torch.Tensor)
        and weight.shape[-1] == vllm_config.model_config.get_hidden_size()
    )


def _is_plain(layer: Any) -> bool:
    """Whether it is an embedding or head of its own whose weights are as loaded."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    return isinstance(layer, VocabParallelEmbedding) and isinstance(
        getattr(layer, "quant_method", None), UnquantizedEmbeddingMethod
    )
