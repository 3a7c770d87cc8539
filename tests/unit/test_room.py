"""The bound on a load's memory: from the built model, never from the files' sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from weightcached.vllm_compat.room import least_bytes

BF16 = 2


def config(**offload: Any) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(cpu_offload_gb=0),
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=offload.get("cpu_offload_gb", 0)),
            prefetch=SimpleNamespace(offload_group_size=offload.get("offload_group_size", 0)),
        ),
    )


def on_meta() -> nn.Module:
    with torch.device("meta"):
        model = nn.ModuleDict({
            "embed": nn.Embedding(100, 8, dtype=torch.bfloat16),
            "head": nn.Linear(8, 100, bias=False, dtype=torch.bfloat16),
        })  # fmt: skip
        model.register_buffer("table", torch.empty(10, dtype=torch.float32))
    return model


def test_counts_what_is_allocated_in_the_dtype_that_it_has() -> None:
    assert least_bytes(on_meta(), config()) == 2 * 100 * 8 * BF16 + 10 * 4


def test_what_is_tied_counts_once() -> None:
    model = on_meta()
    model["head"].weight = model["embed"].weight
    assert least_bytes(model, config()) == 100 * 8 * BF16 + 10 * 4


def test_layers_that_are_made_narrower_as_they_load_count_a_quarter() -> None:
    model = on_meta()
    model["head"].quant_method = SimpleNamespace(uses_meta_device=True)
    assert least_bytes(model, config()) == 100 * 8 * BF16 * 5 // 4 + 10 * 4


def test_nothing_is_proven_of_weights_on_the_host_or_without_a_shape() -> None:
    assert least_bytes(on_meta(), config(cpu_offload_gb=1.5)) == 0
    assert least_bytes(on_meta(), config(offload_group_size=2)) == 0
    model = on_meta()
    model["head"].weight = nn.UninitializedParameter()
    assert least_bytes(model, config()) == 100 * 8 * BF16 + 10 * 4
