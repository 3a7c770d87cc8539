"""Small checkpoints of a target and of its draft models: EAGLE and EAGLE3 heads, and a model with
an MTP layer inside.

Random, but made so that a draft is right about as often as wrong: the target's layers add little to
the token's own embedding, and the heads pass that on. Then acceptance depends on the draft's own
weights, and a draft that lost one is seen in the figure, which one that is never right would hide.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from bench.checkpoints import llama_config

Tensors = Iterator[tuple[str, torch.Tensor]]
# How much the layers add to the residual stream.
_TARGET_GAIN, _DRAFT_GAIN = 0.15, 0.1


class Shape(NamedTuple):
    """Heads times head size is the hidden size; `draft_vocab` is EAGLE3's."""

    hidden: int = 256
    intermediate: int = 512
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    vocab: int = 1024
    draft_vocab: int = 512
    dtype: str = "bfloat16"

    def config(self, **changed: Any) -> dict[str, Any]:
        base = llama_config(
            hidden=self.hidden, intermediate=self.intermediate, layers=self.layers, heads=self.heads,
            kv_heads=self.kv_heads, vocab=self.vocab, dtype=self.dtype, tied=False,
        )  # fmt: skip
        return base | changed


class Maker:
    """Values by name: the same name always has the same values. device: where they are drawn."""

    def __init__(self, shape: Shape, seed: int = 0, device: str = "cpu") -> None:
        self.shape, self._seed, self._device = shape, seed, device

    def normal(self, name: str, *size: int, gain: float = 1.0) -> torch.Tensor:
        generator = torch.Generator(self._device).manual_seed(
            zlib.crc32(name.encode()) + self._seed
        )
        values = torch.randn(size, generator=generator, device=self._device)
        return (values * gain * size[-1] ** -0.5).cpu()

    def norm(self, name: str) -> torch.Tensor:
        return 1 + 0.1 * self.normal(name, 1, self.shape.hidden)[0] * self.shape.hidden**0.5

    def embedding(self) -> torch.Tensor:
        size = self.shape.vocab, self.shape.hidden
        return self.normal("model.embed_tokens.weight", *size, gain=self.shape.hidden**0.5)

    def head(self) -> torch.Tensor:
        return self.normal("lm_head.weight", self.shape.vocab, self.shape.hidden)

    def layer(self, prefix: str, gain: float, *, bias: bool = False) -> Tensors:
        s = self.shape
        kv = s.kv_heads * (s.hidden // s.heads)
        for part, rows in (("q", s.hidden), ("k", kv), ("v", kv)):
            yield (
                f"{prefix}self_attn.{part}_proj.weight",
                self.normal(f"{prefix}{part}", rows, s.hidden),
            )
            if bias:
                yield (
                    f"{prefix}self_attn.{part}_proj.bias",
                    self.normal(f"{prefix}{part}b", 1, rows)[0],
                )
        yield (
            f"{prefix}self_attn.o_proj.weight",
            self.normal(f"{prefix}o", s.hidden, s.hidden, gain=gain),
        )
        yield from self.mlp(prefix, gain)
        yield f"{prefix}input_layernorm.weight", self.norm(f"{prefix}in")
        yield f"{prefix}post_attention_layernorm.weight", self.norm(f"{prefix}post")

    def mlp(self, prefix: str, gain: float) -> Tensors:
        s = self.shape
        yield (
            f"{prefix}mlp.gate_proj.weight",
            self.normal(f"{prefix}gate", s.intermediate, s.hidden),
        )
        yield f"{prefix}mlp.up_proj.weight", self.normal(f"{prefix}up", s.intermediate, s.hidden)
        yield (
            f"{prefix}mlp.down_proj.weight",
            self.normal(f"{prefix}down", s.hidden, s.intermediate, gain=gain),
        )

    def target(self, *, bias: bool = False) -> Tensors:
        yield "model.embed_tokens.weight", self.embedding()
        for number in range(self.shape.layers):
            yield from self.layer(f"model.layers.{number}.", _TARGET_GAIN, bias=bias)
        yield "model.norm.weight", self.norm("norm")
        yield "lm_head.weight", self.head()

    def passing(self, name: str, *gains: float) -> torch.Tensor:
        """Reduces hidden states side by side to one: their sum by these gains, and a little noise."""
        eye = torch.eye(self.shape.hidden)
        noise = self.normal(name, self.shape.hidden, self.shape.hidden * len(gains), gain=0.1)
        return torch.cat([eye * gain for gain in gains], dim=1) + noise

    def eagle(self, *, own_embedding: bool) -> Tensors:
        yield "fc.weight", self.passing("fc", 1.0, 0.0)
        for name, value in self.layer("layers.0.", _DRAFT_GAIN):
            # The first layer takes the sum as it is.
            if "input_layernorm" not in name:
                yield name, value
        if own_embedding:
            size = self.shape.vocab, self.shape.hidden
            yield (
                "embed_tokens.weight",
                self.embedding() + self.normal("own", *size, gain=self.shape.hidden**0.5 / 10),
            )

    def eagle3(self) -> Tensors:
        """Its one layer looks at the newest token alone, and takes that token's embedding on."""
        s = self.shape
        looking = torch.cat(
            [2 * self.normal("look", s.hidden, s.hidden), torch.zeros(s.hidden, s.hidden)], dim=1
        )
        yield "midlayer.self_attn.q_proj.weight", looking
        yield "midlayer.self_attn.k_proj.weight", looking.clone()
        yield "midlayer.self_attn.v_proj.weight", self.passing("v", 1.0, 0.0)
        yield "midlayer.self_attn.o_proj.weight", torch.eye(s.hidden)
        yield from self.mlp("midlayer.", _DRAFT_GAIN)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            yield f"midlayer.{name}.weight", self.norm(name)
        yield "norm.weight", self.norm("norm")
        yield "fc.weight", self.normal("fc3", s.hidden, 3 * s.hidden, gain=0.1)
        known = (
            torch.randperm(s.vocab, generator=torch.Generator().manual_seed(5))[: s.draft_vocab]
            .sort()
            .values
        )
        yield "lm_head.weight", self.head()[known]
        yield "d2t", known - torch.arange(s.draft_vocab)
        yield "t2d", torch.isin(torch.arange(s.vocab), known)

    def mtp(self) -> Tensors:
        """A MiMo-shaped target with its MTP layer."""
        yield from self.target(bias=True)
        prefix = "model.mtp_layers.0."
        yield f"{prefix}input_proj.weight", self.passing("input_proj", 0.0, 1.0)
        yield from self.layer(prefix, _DRAFT_GAIN, bias=True)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            yield f"{prefix}{name}.weight", self.norm(name)


def write(path: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """Write config.json and one file of weights, floats in the configuration's dtype."""
    path.mkdir(parents=True)
    dtype = getattr(torch, config["torch_dtype"])
    values = {
        name: (value.to(dtype) if value.is_floating_point() else value) for name, value in tensors
    }
    save_file(
        {name: value.contiguous() for name, value in values.items()}, path / "model.safetensors"
    )
    (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return path


def write_llama(path: Path, maker: Maker) -> Path:
    """The target of the EAGLE and EAGLE3 heads of the same maker."""
    return write(path, maker.shape.config(), maker.target())


def write_eagle(path: Path, maker: Maker, *, own_embedding: bool = False) -> Path:
    """An EAGLE head with the target's lm_head, and the target's embeddings if it has none."""
    return write(
        path, maker.shape.config(num_hidden_layers=1), maker.eagle(own_embedding=own_embedding)
    )


def write_eagle3(path: Path, maker: Maker) -> Path:
    """An EAGLE3 head with its own, smaller vocabulary and lm_head; the target's embeddings."""
    shape = maker.shape
    config = shape.config(
        architectures=["LlamaForCausalLMEagle3"], num_hidden_layers=1, num_key_value_heads=shape.heads,
        draft_vocab_size=shape.draft_vocab, eagle_aux_hidden_state_layer_ids=[1, shape.layers // 2, shape.layers - 1],
    )  # fmt: skip
    return write(path, config, maker.eagle3())


def write_mtp(path: Path, maker: Maker) -> Path:
    """A MiMo-shaped model with one MTP layer: target and draft in one checkpoint."""
    config = maker.shape.config(
        architectures=["MiMoForCausalLM"], model_type="qwen2", num_nextn_predict_layers=1,
        use_sliding_window=False, sliding_window=None, max_window_layers=maker.shape.layers,
    )  # fmt: skip
    return write(path, config, maker.mtp())
