"""Small models of several architectures: the configuration as transformers writes it, and each
tensor's name and shape.

Shapes are the least that the GPU kernels take: head sizes 64 and 128, everything else a multiple of
128.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Config = dict[str, Any]
Tensors = Iterator[tuple[str, tuple[int, ...]]]

_COMMON: Config = {
    "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def qwen3_moe_config() -> Config:
    """Eight experts in each layer; as llm-compressor names them, each projection on its own."""
    return _COMMON | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 64, "intermediate_size": 1024,
        "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "rope_theta": 1e6, "attention_bias": False,
    }  # fmt: skip


def qwen3_moe_tensors(config: Config) -> Tensors:
    """Of qwen3_moe_config()."""
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield from _attention(prefix + "self_attn.", config)
        yield prefix + "self_attn.q_norm.weight", (config["head_dim"],)
        yield prefix + "self_attn.k_norm.weight", (config["head_dim"],)
        yield from _norms(prefix, hidden)
        yield prefix + "mlp.gate.weight", (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            yield from _mlp(f"{prefix}mlp.experts.{expert}.", hidden, width)
    yield from _head(config)


def gpt_oss_config() -> Config:
    """Attention sinks, a sliding window in every other layer, fused experts with biases."""
    return _COMMON | {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 64, "intermediate_size": 512,
        "num_local_experts": 8, "num_experts_per_tok": 2, "experts_per_token": 2, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"], "attention_bias": True, "attention_dropout": 0.0,
        "initial_context_length": 4096, "swiglu_limit": 7.0, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }  # fmt: skip


def gpt_oss_tensors(config: Config) -> Tensors:
    """Of gpt_oss_config(). Experts' matrices are (experts, out, in), as they are packed."""
    hidden, width, experts = (
        config["hidden_size"],
        config["intermediate_size"],
        config["num_local_experts"],
    )
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, shape in _attention(prefix + "self_attn.", config):
            yield name, shape
            yield name.removesuffix("weight") + "bias", shape[:1]
        yield prefix + "self_attn.sinks", (config["num_attention_heads"],)
        yield from _norms(prefix, hidden)
        yield prefix + "mlp.router.weight", (experts, hidden)
        yield prefix + "mlp.router.bias", (experts,)
        yield prefix + "mlp.experts.gate_up_proj", (experts, 2 * width, hidden)
        yield prefix + "mlp.experts.gate_up_proj_bias", (experts, 2 * width)
        yield prefix + "mlp.experts.down_proj", (experts, hidden, width)
        yield prefix + "mlp.experts.down_proj_bias", (experts, hidden)
    yield from _head(config)


def deepseek_config() -> Config:
    """Multi-head latent attention, with ranks that kernels support; a dense layer, then experts."""
    return _COMMON | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_attention_heads": 16,
        "num_key_value_heads": 16, "q_lora_rank": 256, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 1024, "moe_intermediate_size": 256,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "norm_topk_prob": True, "routed_scaling_factor": 1.0, "rope_theta": 10000.0, "attention_bias": False,
        "num_nextn_predict_layers": 0,
    }  # fmt: skip


def deepseek_tensors(config: Config) -> Tensors:
    """Of deepseek_config()."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank, rope = (
        config["q_lora_rank"],
        config["kv_lora_rank"],
        config["qk_rope_head_dim"],
    )
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "self_attn.q_a_proj.weight", (q_rank, hidden)
        yield prefix + "self_attn.q_a_layernorm.weight", (q_rank,)
        yield prefix + "self_attn.q_b_proj.weight", (heads * (nope + rope), q_rank)
        yield prefix + "self_attn.kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden)
        yield prefix + "self_attn.kv_a_layernorm.weight", (kv_rank,)
        yield prefix + "self_attn.kv_b_proj.weight", (heads * (nope + value), kv_rank)
        yield prefix + "self_attn.o_proj.weight", (hidden, heads * value)
        yield from _norms(prefix, hidden)
        if layer < config["first_k_dense_replace"]:
            yield from _mlp(prefix + "mlp.", hidden, config["intermediate_size"])
            continue
        yield prefix + "mlp.gate.weight", (config["n_routed_experts"], hidden)
        yield prefix + "mlp.gate.e_score_correction_bias", (config["n_routed_experts"],)
        width = config["moe_intermediate_size"]
        for expert in range(config["n_routed_experts"]):
            yield from _mlp(f"{prefix}mlp.experts.{expert}.", hidden, width)
        yield from _mlp(prefix + "mlp.shared_experts.", hidden, width * config["n_shared_experts"])
    yield from _head(config)


def nemotron_h_config() -> Config:
    """Mamba 2, attention and feed-forward layers in turn."""
    return _COMMON | {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "num_hidden_layers": 4, "head_dim": 64,
        "hybrid_override_pattern": "M*-M", "intermediate_size": 1024, "mlp_hidden_act": "relu2", "mlp_bias": False,
        "ssm_state_size": 64, "mamba_num_heads": 16, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "n_groups": 1,
        "conv_kernel": 4, "expand": 2, "use_conv_bias": True, "use_bias": False, "chunk_size": 128,
        "layer_norm_epsilon": 1e-5, "attention_bias": False,
    }  # fmt: skip


def nemotron_h_tensors(config: Config) -> Tensors:
    """Of nemotron_h_config()."""
    hidden, heads = config["hidden_size"], config["mamba_num_heads"]
    inner = heads * config["mamba_head_dim"]
    conv = inner + 2 * config["n_groups"] * config["ssm_state_size"]
    yield "backbone.embeddings.weight", (config["vocab_size"], hidden)
    for layer, kind in enumerate(config["hybrid_override_pattern"]):
        prefix = f"backbone.layers.{layer}.mixer."
        yield f"backbone.layers.{layer}.norm.weight", (hidden,)
        if kind == "*":
            yield from _attention(prefix, config)
        elif kind == "-":
            yield prefix + "up_proj.weight", (config["intermediate_size"], hidden)
            yield prefix + "down_proj.weight", (hidden, config["intermediate_size"])
        else:
            yield prefix + "in_proj.weight", (inner + conv + heads, hidden)
            yield prefix + "conv1d.weight", (conv, 1, config["conv_kernel"])
            yield prefix + "conv1d.bias", (conv,)
            for name in ("A_log", "D", "dt_bias"):
                yield prefix + name, (heads,)
            yield prefix + "norm.weight", (inner,)
            yield prefix + "out_proj.weight", (hidden, inner)
    yield "backbone.norm_f.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def llava_config() -> Config:
    """A CLIP tower of two layers before a Llama of two."""
    text = _COMMON | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 64, "intermediate_size": 1024,
        "rope_theta": 10000.0,
    }  # fmt: skip
    return {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "torch_dtype": "bfloat16",
        "image_token_index": 8000, "image_seq_length": 16, "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu", "tie_word_embeddings": False,
        "text_config": text, "vocab_size": text["vocab_size"],
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
            "num_attention_heads": 4, "image_size": 56, "patch_size": 14, "num_channels": 3, "projection_dim": 256,
            "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "torch_dtype": "bfloat16",
        },
    }  # fmt: skip


def llava_tensors(config: Config) -> Tensors:
    """Of llava_config()."""
    vision, text = config["vision_config"], config["text_config"]
    width, patch = vision["hidden_size"], vision["patch_size"]
    tower = "vision_tower.vision_model."
    yield tower + "embeddings.class_embedding", (width,)
    yield tower + "embeddings.patch_embedding.weight", (width, vision["num_channels"], patch, patch)
    yield (
        tower + "embeddings.position_embedding.weight",
        ((vision["image_size"] // patch) ** 2 + 1, width),
    )
    yield from _with_bias(tower + "pre_layrnorm.", (width,))
    for layer in range(vision["num_hidden_layers"]):
        prefix = f"{tower}encoder.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _with_bias(f"{prefix}self_attn.{name}.", (width, width))
        yield from _with_bias(prefix + "layer_norm1.", (width,))
        yield from _with_bias(prefix + "layer_norm2.", (width,))
        yield from _with_bias(prefix + "mlp.fc1.", (vision["intermediate_size"], width))
        yield from _with_bias(prefix + "mlp.fc2.", (width, vision["intermediate_size"]))
    yield from _with_bias("multi_modal_projector.linear_1.", (text["hidden_size"], width))
    yield from _with_bias(
        "multi_modal_projector.linear_2.", (text["hidden_size"], text["hidden_size"])
    )
    yield "language_model.model.embed_tokens.weight", (text["vocab_size"], text["hidden_size"])
    for layer in range(text["num_hidden_layers"]):
        prefix = f"language_model.model.layers.{layer}."
        yield from _attention(prefix + "self_attn.", text)
        yield from _norms(prefix, text["hidden_size"])
        yield from _mlp(prefix + "mlp.", text["hidden_size"], text["intermediate_size"])
    for name, shape in _head(text):
        yield f"language_model.{name}", shape


def llava_files(config: Config) -> dict[str, Config]:
    """Files for the processor of llava_config(), by name: a word for each token id."""
    vision, image = config["vision_config"], config["image_token_index"]
    words = {
        "<image>" if token == image else f"w{token}": token for token in range(config["vocab_size"])
    }
    placeholder = {
        "id": image, "content": "<image>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        "special": True,
    }  # fmt: skip
    size = {"height": vision["image_size"], "width": vision["image_size"]}
    return {
        "tokenizer.json": {
            "version": "1.0", "added_tokens": [placeholder], "pre_tokenizer": {"type": "Whitespace"},
            "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
        },
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "pad_token": "w0"},
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": vision["image_size"]},
            "crop_size": size, "do_center_crop": True, "do_resize": True, "do_rescale": True, "do_normalize": True,
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor", "patch_size": vision["patch_size"], "image_token": "<image>",
            "vision_feature_select_strategy": config["vision_feature_select_strategy"],
            "num_additional_image_tokens": 1,
        },
    }  # fmt: skip


def _attention(prefix: str, config: Config) -> Tensors:
    hidden, head = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield prefix + "q_proj.weight", (q, hidden)
    yield prefix + "k_proj.weight", (kv, hidden)
    yield prefix + "v_proj.weight", (kv, hidden)
    yield prefix + "o_proj.weight", (hidden, q)


def _mlp(prefix: str, hidden: int, width: int) -> Tensors:
    yield prefix + "gate_proj.weight", (width, hidden)
    yield prefix + "up_proj.weight", (width, hidden)
    yield prefix + "down_proj.weight", (hidden, width)


def _norms(prefix: str, hidden: int) -> Tensors:
    yield prefix + "input_layernorm.weight", (hidden,)
    yield prefix + "post_attention_layernorm.weight", (hidden,)


def _with_bias(prefix: str, shape: tuple[int, ...]) -> Tensors:
    yield prefix + "weight", shape
    yield prefix + "bias", shape[:1]


def _head(config: Config) -> Tensors:
    yield "model.norm.weight", (config["hidden_size"],)
    yield "lm_head.weight", (config["vocab_size"], config["hidden_size"])


# By the name on the command line.
CONFIGS: dict[str, Callable[[], Config]] = {
    "qwen3-moe": qwen3_moe_config,
    "gpt-oss": gpt_oss_config,
    "deepseek": deepseek_config,
    "nemotron-h": nemotron_h_config,
    "llava": llava_config,
}
# By model_type.
TENSORS: dict[str, Callable[[Config], Tensors]] = {
    "qwen3_moe": qwen3_moe_tensors,
    "gpt_oss": gpt_oss_tensors,
    "deepseek_v3": deepseek_tensors,
    "nemotron_h": nemotron_h_tensors,
    "llava": llava_tensors,
}
# Files beside configuration and weights, by model_type.
FILES: dict[str, Callable[[Config], dict[str, Config]]] = {"llava": llava_files}
