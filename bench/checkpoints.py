"""Make random checkpoints of a given shape: a transformers config beside safetensors shards.

No tokenizer is written; engines get token ids. Values come from a seeded generator, scaled so that greedy decoding
does not collapse onto one token.

    python bench/checkpoints.py llama /tmp/tiny --hidden 256 --layers 4 --dtype bfloat16 --shards 3
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file


def llama_config(
    *, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, dtype: str, tied: bool
) -> dict[str, Any]:
    """A Llama configuration as transformers writes it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.02,
    }


def llama_tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the checkpoint's tensors, in file order."""
    hidden, head = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "self_attn.q_proj.weight", (q, hidden)
        yield prefix + "self_attn.k_proj.weight", (kv, hidden)
        yield prefix + "self_attn.v_proj.weight", (kv, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, q)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        if "num_local_experts" in config:
            yield prefix + "block_sparse_moe.gate.weight", (config["num_local_experts"], hidden)
            for expert in range(config["num_local_experts"]):
                base = f"{prefix}block_sparse_moe.experts.{expert}."
                yield base + "w1.weight", (config["intermediate_size"], hidden)
                yield base + "w2.weight", (hidden, config["intermediate_size"])
                yield base + "w3.weight", (config["intermediate_size"], hidden)
        else:
            yield prefix + "mlp.gate_proj.weight", (config["intermediate_size"], hidden)
            yield prefix + "mlp.up_proj.weight", (config["intermediate_size"], hidden)
            yield prefix + "mlp.down_proj.weight", (hidden, config["intermediate_size"])
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def random_tensor(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: str
) -> torch.Tensor:
    """Norm weights near one, everything else normal with variance 1/fan-in."""
    if len(shape) == 1:
        return (1 + 0.1 * torch.randn(shape, generator=generator, device=device)).to(dtype).cpu()
    # Small embeddings: a tied head would otherwise only ever repeat the token that stands in the residual stream.
    scale = 0.02 if "embed" in name else shape[-1] ** -0.5
    return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype).cpu()


GROUP = 128
# What a checkpoint's config says about each quantization made here.
QUANTIZATION: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
                "input_activations": {
                    "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
                },
            }
        },
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
}  # fmt: skip


def quantize(method: str, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """A linear layer's weight, shape (out, in), as the method stores it; other tensors unchanged."""
    if value.ndim != 2 or "proj" not in name:
        return {name: value}
    prefix = name.removesuffix("weight")
    if method == "fp8":
        return quantize_fp8(name, value)
    if method == "int8":
        scale = value.float().abs().amax(dim=1, keepdim=True) / 127
        return {name: (value.float() / scale).round().to(torch.int8), f"{prefix}weight_scale": scale.to(value.dtype)}
    return quantize_int4(method, prefix, value)


def quantize_int4(method: str, prefix: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Groups of GROUP inputs share a scale; codes are 0 to 15 around 8, eight in an int32."""
    inputs, outputs = value.shape[1], value.shape[0]
    groups = value.float().t().reshape(inputs // GROUP, GROUP, outputs)
    scale = groups.abs().amax(dim=1, keepdim=True) / 7
    codes = ((groups / scale).round() + 8).clamp(0, 15).to(torch.int64).reshape(inputs, outputs)
    packed = {f"{prefix}scales": scale.squeeze(1).to(torch.float16 if value.dtype == torch.float16 else value.dtype)}
    zeros = torch.full((inputs // GROUP, outputs), 8 if method == "awq" else 7, dtype=torch.int64)
    if method == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        packed[f"{prefix}qweight"] = _pack8(codes.reshape(inputs, -1, 8)[:, :, order])
        packed[f"{prefix}qzeros"] = _pack8(zeros.reshape(inputs // GROUP, -1, 8)[:, :, order])
    else:
        packed[f"{prefix}qweight"] = _pack8(codes.reshape(-1, 8, outputs).transpose(1, 2))
        packed[f"{prefix}qzeros"] = _pack8(zeros.reshape(inputs // GROUP, -1, 8))
        packed[f"{prefix}g_idx"] = torch.arange(inputs, dtype=torch.int32) // GROUP
    return packed


def _pack8(codes: torch.Tensor) -> torch.Tensor:
    # The last dimension's eight 4-bit codes in one int32, the first lowest.
    shifts = torch.arange(0, 32, 4, dtype=torch.int64)
    word = (codes << shifts).sum(dim=-1)
    return torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)


def quantize_fp8(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """A linear layer's weight as float8_e4m3fn with one scale, as vLLM's `fp8` method reads it."""
    scale = (value.abs().max().float() / torch.finfo(torch.float8_e4m3fn).max).clamp(min=1e-12)
    return {name: (value.float() / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale.reshape(1)}


def write_checkpoint(
    path: Path, config: dict[str, Any], *, shards: int = 1, seed: int = 0, device: str = "cpu",
    quantization: str | None = None,
) -> int:  # fmt: skip
    """Write config and shards under `path` and return the bytes of all tensors.

    quantization: a key of QUANTIZATION, for the linear layers.
    """
    if quantization is not None:
        config = config | {"quantization_config": QUANTIZATION[quantization]}
    path.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, config["torch_dtype"])
    generator = torch.Generator(device=device).manual_seed(seed)
    tensors = list(llama_tensors(config))
    per_shard = -(-len(tensors) // shards)
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(shards):
        part = tensors[number * per_shard : (number + 1) * per_shard]
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        values = {name: random_tensor(name, shape, dtype, generator, device) for name, shape in part}
        if quantization is not None:
            quantized = [quantize(quantization, name, value) for name, value in values.items()]
            values = {name: value for tensors in quantized for name, value in tensors.items()}
        save_file(values, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(values, file)
        total += sum(t.nbytes for t in values.values())
    if shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (path / "config.json").write_text(json.dumps(config, indent=1))
    return total


@click.group()
def main() -> None:
    """Make random checkpoints."""


@main.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--hidden", default=256, show_default=True)
@click.option("--intermediate", default=512, show_default=True)
@click.option("--layers", default=4, show_default=True)
@click.option("--heads", default=8, show_default=True)
@click.option("--kv-heads", default=4, show_default=True)
@click.option("--vocab", default=1024, show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True, type=click.Choice(["bfloat16", "float16", "float32"]))
@click.option("--tied", is_flag=True, help="Tie lm_head to the embeddings.")
@click.option("--experts", default=0, show_default=True, help="Write a Mixtral-shaped model with that many experts.")
@click.option("--quantization", default=None, type=click.Choice(sorted(QUANTIZATION)), help="Of the linear layers.")
@click.option("--shards", default=1, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--device", default="cpu", show_default=True, help="Where the random values are drawn.")
def llama(
    path: Path, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, dtype: str,
    tied: bool, experts: int, quantization: str | None, shards: int, seed: int, device: str,
) -> None:  # fmt: skip
    """Write a Llama-shaped checkpoint to PATH."""
    config = llama_config(
        hidden=hidden, intermediate=intermediate, layers=layers, heads=heads, kv_heads=kv_heads, vocab=vocab,
        dtype=dtype, tied=tied,
    )  # fmt: skip
    if experts:
        config |= {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": experts,
            "num_experts_per_tok": 2,
        }
    nbytes = write_checkpoint(path, config, shards=shards, seed=seed, device=device, quantization=quantization)
    click.echo(f"{path}: {nbytes / 2**30:.2f} GiB in {shards} shards")


if __name__ == "__main__":
    main()
