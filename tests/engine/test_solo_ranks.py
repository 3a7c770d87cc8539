"""Every tensor of a rank that was loaded alone is byte-equal to the same rank's in a real group."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.checkpoint_models import deepseek_config
from bench.checkpoints import write_checkpoint
from tests.engine.conftest import answers_of_ranks
from tests.engine.test_placement_oracle import EXPERTS, model

RANKS = 4
# Of the latent sizes, which attention kernels are made for, only the queries' is smaller.
SMALL_MLA = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "vocab_size": 128,
    "max_position_embeddings": 512, "routed_scaling_factor": 2.5,
}  # fmt: skip
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dense_tp2": ("dense", 2, {"tensor_parallel_size": 2}),
    "dense_tp4": ("dense", 4, {"tensor_parallel_size": 4}),
    "dense_pp2_tp2": ("dense", 4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    "moe_tp4": ("moe", 4, {"tensor_parallel_size": 4}),
    "moe_ep4": ("moe", 4, {"tensor_parallel_size": 4, "enable_expert_parallel": True}),
    "moe_dp2_tp2_ep4": (
        "moe",
        4,
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
    ),
    "mla_tp4": ("mla", 4, {"tensor_parallel_size": 4}),
    "mla_ep4": ("mla", 4, {"tensor_parallel_size": 4, "enable_expert_parallel": True}),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[dict[str, Any]]]]:
    """By rank, by layout: digests in the group, and alone."""
    base = tmp_path_factory.mktemp("ranks")
    models = {
        "dense": model(base / "dense"),
        "moe": model(base / "moe", experts=EXPERTS),
        "mla": base / "mla",
    }
    write_checkpoint(models["mla"], deepseek_config() | SMALL_MLA, seed=6)
    common = {"max_model_len": 64, "enforce_eager": True}
    cases = [
        {"name": name, "world": world, "engine": {"model": str(models[which]), **common, **sizes}}
        for name, (which, world, sizes) in LAYOUTS.items()
    ]
    # Another instance each: vLLM would use shared memory among ranks of one, which needs an engine
    # around it.
    environments = [{"VLLM_DIST_IDENT": f"r{rank}"} for rank in range(RANKS)]
    return answers_of_ranks("rank_tensors", str(base), json.dumps(cases), base, environments)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_solo_rank_equals_the_rank_in_a_group(
    loaded: list[dict[str, list[dict[str, Any]]]], layout: str
) -> None:
    world = LAYOUTS[layout][1]
    seen = []
    for rank in range(world):
        grouped, solo = loaded[rank][layout]
        assert len(grouped) > 5
        assert solo == grouped
        if layout.startswith("mla"):
            assert any(name.endswith("self_attn.fused_qkv_a_proj.weight") for name in solo), (
                "latent attention it is"
            )
        seen.append(json.dumps(solo, sort_keys=True))
    assert len(set(seen)) == world, "ranks that hold the same would hide a wrong rank"
