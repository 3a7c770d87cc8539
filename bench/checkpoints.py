"""Make random checkpoints of a given shape: a transformers config beside safetensors shards.

Engines get token ids; a tokenizer is written only if a processor needs one. Values come from a
seeded generator, scaled so that greedy decoding does not collapse onto one token.

    python bench/checkpoints.py llama /tmp/tiny --hidden 256 --layers 4 --dtype bfloat16 --shards 3
    python bench/checkpoints.py small deepseek /tmp/mla --quantization fp8-block
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file

# As a script, Python searches this file's own directory only.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.checkpoint_formats import QUANTIZATION, quantization_config, quantize
from bench.checkpoint_models import CONFIGS, FILES, TENSORS


def llama_config(
    *,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    dtype: str,
    tied: bool,
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


def with_experts(config: dict[str, Any], count: int) -> dict[str, Any]:
    """A Llama configuration turned into a Mixtral: `count` experts per layer, two per token."""
    return config | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": count,
        "num_experts_per_tok": 2,
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
    """Norm weights near one, biases near zero, everything else normal with variance 1/fan-in."""
    if name.endswith(("bias", "sinks", "A_log", "class_embedding")):
        return (0.02 * torch.randn(shape, generator=generator, device=device)).to(dtype).cpu()
    if len(shape) == 1:
        return (1 + 0.1 * torch.randn(shape, generator=generator, device=device)).to(dtype).cpu()
    # Small embeddings: a tied head would otherwise only ever repeat the token that stands in the
    # residual stream.
    scale = 0.02 if "embed" in name else shape[-1] ** -0.5
    return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype).cpu()


def write_checkpoint(
    path: Path, config: dict[str, Any], *, shards: int = 1, seed: int = 0, device: str = "cpu",
    quantization: str | None = None,
) -> int:  # fmt: skip
    """Write config and shards under `path` and return the bytes of all tensors.

    quantization: a key of QUANTIZATION, for the linear layers.
    """
    if quantization is not None:
        config = config | {"quantization_config": quantization_config(quantization, config)}
    path.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, config["torch_dtype"])
    generator = torch.Generator(device=device).manual_seed(seed)
    tensors = list(TENSORS.get(config["model_type"], llama_tensors)(config))
    per_shard = -(-len(tensors) // shards)
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(shards):
        part = tensors[number * per_shard : (number + 1) * per_shard]
        file = (
            f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            if shards > 1
            else "model.safetensors"
        )
        values = {
            name: random_tensor(name, shape, dtype, generator, device) for name, shape in part
        }
        if quantization is not None:
            quantized = [quantize(quantization, name, value) for name, value in values.items()]
            values = {name: value for tensors in quantized for name, value in tensors.items()}
        save_file(values, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(values, file)
        total += sum(t.nbytes for t in values.values())
    if shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    others = FILES[config["model_type"]](config) if config["model_type"] in FILES else {}
    for name, content in {"config.json": config, **others}.items():
        (path / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return total


def write_checkpoint_apart(path: Path, config: dict[str, Any], **options: Any) -> None:
    """write_checkpoint() in a process of its own.

    torch keeps the device memory that it used until its process ends: 4.6 GiB after a checkpoint of
    8B, which a benchmark would then count as an engine's.
    """
    process = multiprocessing.get_context("spawn").Process(
        target=write_checkpoint, args=(path, config), kwargs=options
    )
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"writing {path} ended with status {process.exitcode}")


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
@click.option(
    "--dtype",
    default="bfloat16",
    show_default=True,
    type=click.Choice(["bfloat16", "float16", "float32"]),
)
@click.option("--tied", is_flag=True, help="Tie lm_head to the embeddings.")
@click.option(
    "--experts",
    default=0,
    show_default=True,
    help="Write a Mixtral-shaped model with that many experts.",
)
@click.option(
    "--quantization",
    default=None,
    type=click.Choice(sorted(QUANTIZATION)),
    help="Of the linear layers.",
)
@click.option("--shards", default=1, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--device", default="cpu", show_default=True, help="Device that draws the random values."
)
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
        config = with_experts(config, experts)
    nbytes = write_checkpoint(
        path, config, shards=shards, seed=seed, device=device, quantization=quantization
    )
    click.echo(f"{path}: {nbytes / 2**30:.2f} GiB in {shards} shards")


@main.command()
@click.argument("architecture", type=click.Choice(sorted(CONFIGS)))
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--quantization",
    default=None,
    type=click.Choice(sorted(QUANTIZATION)),
    help="Of the linear layers.",
)
@click.option("--shards", default=1, show_default=True)
@click.option("--seed", default=0, show_default=True)
def small(architecture: str, path: Path, quantization: str | None, shards: int, seed: int) -> None:
    """Write a small checkpoint of ARCHITECTURE to PATH."""
    nbytes = write_checkpoint(
        path, CONFIGS[architecture](), shards=shards, seed=seed, quantization=quantization
    )
    click.echo(f"{path}: {nbytes / 2**20:.0f} MiB in {shards} shards")


if __name__ == "__main__":
    main()
