"""Tensors that an engine copies: the rule, every exception, and an index's own account."""

from __future__ import annotations

from typing import Any

import pytest

from weightcached.index.sharing import EXCEPTIONS, NOT_A_PARAMETER, SMALL, explain_written, reasons
from weightcached.index.tensors import StorageRecord, TensorRecord
from weightcached.segments.packing import SMALL_NBYTES

# As vLLM names them, with the layer that has them.
WRITTEN = [
    "model.layers.3.mlp.experts.quant_method.kernel.workspace",  # Marlin, w4a16
    "model.layers.0.self_attn.attn.impl.kv_scratch",
    "model.layers.0.mlp.experts.locks",
    "encoder.layers.0.conv.norm.running_mean",
    "model.layers.0.self_attn.attn._k_scale",
    "model.layers.0.self_attn.attn._prob_scale",
    "model.layers.0.mlp.experts._empty_topk_weights",
    "model.layers.0.mlp.experts.expert_load_view",
]
READ = [
    "model.layers.0.self_attn.rotary_emb.cos_sin_cache",
    "model.layers.0.self_attn.rotary_emb.cos_sin_cache_bf16",
    "model.layers.0.self_attn.rotary_emb.cos_sin_q_cache",
    "visual.rotary_pos_emb.freqs_cache",
    "model.layers.0.self_attn.mla_attn.W_UV",
    "model.layers.0.self_attn.mla_attn.W_UK_T",
    "model.layers.0.self_attn.mla_attn.W_K_scale",
    "model.layers.0.mlp.gate._bf16x3_weight",
    "model.layers.0.mlp.experts.w13_scale",
    "model.layers.0.mlp.qzeros",
    "model.layers.0.mlp.qkv.weight.bnb_quant_state[0].absmax",
    "vpm.pos_embed",
    "resampler.temporal_pos_embed",
    "encoder.pos_enc",
]
# Scratch, states and per-request embeddings under names of their models' own.
UNLISTED = [
    "deepstack_input_embeds[0]",
    "per_layer_embeddings",
    "model.positions",
    "model.hidden_states",
    "model.layers.0.self_attn.indexer.topk_indices_buffer",
    "canvas",
    "model.layers.0.mixer.ssm_state",
]


@pytest.mark.parametrize("kind", ["parameter", "buffer", "attribute"])
@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_forward_pass_writes_is_private(name: str, kind: str) -> None:
    assert explain_written([name], [kind]) not in ("", NOT_A_PARAMETER)  # type: ignore[list-item]


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
@pytest.mark.parametrize("name", READ)
def test_what_is_only_read_is_shared(name: str, kind: str) -> None:
    assert explain_written([name], [kind]) == ""  # type: ignore[list-item]


@pytest.mark.parametrize(
    "name",
    [
        # gpt-oss, whose kernels take objects of triton_kernels in place of parameters.
        "model.layers.0.mlp.experts.w13_weight.storage.data",
        "model.layers.0.mlp.experts.quant_method.w2_precision_config.weight_scale.storage.data",
        "model.layers.0.mlp.experts.quant_method.w2_precision_config.flex_ctx.rhs_data.scale",
        "model.layers.0.mlp.down_proj.weight.quant_state.code",
    ],
)
def test_what_is_inside_of_a_weight_is_shared(name: str) -> None:
    assert explain_written([name], ["attribute"]) == ""


def test_scratch_inside_of_a_weight_is_private() -> None:
    assert (
        explain_written(["mlp.experts.w13_weight.storage.workspace"], ["attribute"])
        == "workspace of a kernel"
    )
    assert explain_written(["model.weight_net.hidden.states.kept"], ["buffer"]) == NOT_A_PARAMETER


@pytest.mark.parametrize("name", UNLISTED)
def test_what_nobody_listed_is_private_unless_it_is_a_parameter(name: str) -> None:
    if "topk_indices" not in name:
        assert explain_written([name], ["attribute"]) == NOT_A_PARAMETER
        assert explain_written([name], ["parameter"]) == ""
    assert explain_written([name], ["buffer"]) != ""


def test_view_of_a_parameter_is_shared_with_it() -> None:
    assert explain_written(["conv1d.weight", "conv_state_view"], ["parameter", "buffer"]) == ""


def test_storage_with_one_tensor_that_is_written_is_private() -> None:
    names = ["layer.weight", "layer.kernel.workspace"]
    assert explain_written(names, ["parameter", "attribute"]) == "workspace of a kernel"


@pytest.mark.parametrize("row", EXCEPTIONS, ids=lambda row: row.reason)
def test_every_exception_is_seen_in_these_tests(row: object) -> None:
    leaves = [name.rpartition(".")[2].partition("[")[0] for name in WRITTEN + READ]
    assert any(row.pattern.search(leaf) for leaf in leaves)  # type: ignore[attr-defined]


def test_index_says_why_each_private_storage_is() -> None:
    def record(name: str, kind: Any, storage: int) -> TensorRecord:
        return TensorRecord(
            names=[name], kind=kind, dtype="float32", shape=[1], stride=[1], storage=storage
        )

    tensors = [
        record("weight", "parameter", 0),
        record("bias", "parameter", 1),
        record("small_buffer", "buffer", 2),
        record("workspace", "attribute", 3),
        record("hidden_states", "attribute", 4),
        TensorRecord(names=["empty"], kind="buffer", dtype="float32", shape=[0], stride=[1]),
    ]
    sizes = [SMALL_NBYTES, 4, 4, 4, SMALL_NBYTES]
    storages = [StorageRecord(0, 0, nbytes, bytes(16)) for nbytes in sizes]
    assert reasons(tensors, storages) == {
        1: SMALL,
        2: SMALL,
        3: "workspace of a kernel",
        4: NOT_A_PARAMETER,
    }
