"""A small checkpoint shaped as DeepSeek-V3: multi-head latent attention, one dense layer, experts with a shared one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.checkpoints import random_tensor

# The latent sizes are the real ones: attention kernels are made for them.
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the checkpoint's tensors."""
    hidden, heads = CONFIG["hidden_size"], CONFIG["num_attention_heads"]
    query, latent, rope = CONFIG["q_lora_rank"], CONFIG["kv_lora_rank"], CONFIG["qk_rope_head_dim"]
    nope, value = CONFIG["qk_nope_head_dim"], CONFIG["v_head_dim"]
    yield "model.embed_tokens.weight", (CONFIG["vocab_size"], hidden)
    for number in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{number}."
        yield layer + "input_layernorm.weight", (hidden,)
        yield layer + "post_attention_layernorm.weight", (hidden,)
        attention = layer + "self_attn."
        yield attention + "q_a_proj.weight", (query, hidden)
        yield attention + "q_a_layernorm.weight", (query,)
        yield attention + "q_b_proj.weight", (heads * (nope + rope), query)
        yield attention + "kv_a_proj_with_mqa.weight", (latent + rope, hidden)
        yield attention + "kv_a_layernorm.weight", (latent,)
        yield attention + "kv_b_proj.weight", (heads * (nope + value), latent)
        yield attention + "o_proj.weight", (hidden, heads * value)
        if number < CONFIG["first_k_dense_replace"]:
            yield from _mlp(layer + "mlp.", CONFIG["intermediate_size"])
            continue
        yield layer + "mlp.gate.weight", (CONFIG["n_routed_experts"], hidden)
        yield layer + "mlp.gate.e_score_correction_bias", (CONFIG["n_routed_experts"],)
        yield from _mlp(layer + "mlp.shared_experts.", CONFIG["moe_intermediate_size"])
        for expert in range(CONFIG["n_routed_experts"]):
            yield from _mlp(f"{layer}mlp.experts.{expert}.", CONFIG["moe_intermediate_size"])
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (CONFIG["vocab_size"], hidden)


def _mlp(prefix: str, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = CONFIG["hidden_size"]
    yield prefix + "gate_proj.weight", (size, hidden)
    yield prefix + "up_proj.weight", (size, hidden)
    yield prefix + "down_proj.weight", (hidden, size)


def write_deepseek(path: Path, seed: int = 6) -> Path:
    """Write config and weights under `path`."""
    path.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    values = {name: random_tensor(name, shape, torch.bfloat16, generator, "cpu") for name, shape in tensors()}
    save_file(values, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(CONFIG, indent=1))
    return path
