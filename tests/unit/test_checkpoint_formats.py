"""Random checkpoints: each format stores the weight, within the precision of its bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.checkpoint_formats import BLOCK, GROUP, QUANTIZATION, quantize
from bench.checkpoint_models import CONFIGS, TENSORS
from bench.checkpoints import write_checkpoint

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def a_weight(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def error(weight: torch.Tensor, back: torch.Tensor) -> float:
    """Relative to the weight's size."""
    return float((weight.float() - back).norm() / weight.float().norm())


def halves(packed: torch.Tensor) -> torch.Tensor:
    """4-bit codes of bytes, the low half first."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).long()


def eighths(packed: torch.Tensor) -> torch.Tensor:
    """4-bit codes of int32 words, the lowest first."""
    return torch.stack([packed >> shift & 15 for shift in range(0, 32, 4)], dim=-1).flatten(-2)


def test_fp8_blocks_at_the_edge_are_smaller() -> None:
    weight = a_weight(192, 256)
    made = quantize("fp8-block", "x_proj.weight", weight)
    scale = made["x_proj.weight_scale_inv"]
    assert scale.shape == (2, 2)
    whole = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:192, :256]
    assert error(weight, made["x_proj.weight"].float() * whole) < 0.04


@pytest.mark.parametrize("method", ["fp8", "ct-fp8-static", "ct-fp8-channel", "int8"])
def test_eight_bits_times_scale_is_the_weight(method: str) -> None:
    weight = a_weight(192, 256)
    made = quantize(method, "x_proj.weight", weight)
    assert error(weight, made["x_proj.weight"].float() * made["x_proj.weight_scale"].float()) < 0.04


def test_nvfp4_codes_times_both_scales_are_the_weight() -> None:
    weight = a_weight(64, 256)
    made = quantize("nvfp4", "x_proj.weight", weight)
    scale = made["x_proj.weight_scale"].float() / made["x_proj.weight_global_scale"]
    back = FP4[halves(made["x_proj.weight_packed"])] * scale.repeat_interleave(16, 1)
    assert error(weight, back) < 0.12


def test_mxfp4_codes_times_power_of_two_are_the_weight() -> None:
    weight = a_weight(2, 64, 256)
    made = quantize("mxfp4", "mlp.experts.down_proj", weight)
    assert made["mlp.experts.down_proj_blocks"].shape == (2, 64, 8, 16)
    scale = (made["mlp.experts.down_proj_scales"].float() - 127).exp2()
    back = FP4[halves(made["mlp.experts.down_proj_blocks"])] * scale[..., None]
    assert error(weight, back.flatten(-2)) < 0.16


def test_w4a16_codes_around_eight_are_the_weight() -> None:
    weight = a_weight(64, 256)
    made = quantize("w4a16", "x_proj.weight", weight)
    scale = made["x_proj.weight_scale"].float().repeat_interleave(GROUP, 1)
    assert error(weight, (eighths(made["x_proj.weight_packed"]) - 8) * scale) < 0.16
    assert made["x_proj.weight_shape"].tolist() == [64, 256]


def test_gptq_codes_lie_along_the_inputs() -> None:
    weight = a_weight(64, 256)
    made = quantize("gptq", "x_proj.weight", weight)
    codes = eighths(made["x_proj.qweight"].t())
    zeros = eighths(made["x_proj.qzeros"]) + 1
    scale = (made["x_proj.scales"].float().t()).repeat_interleave(GROUP, 1)
    assert error(weight, (codes - zeros.t().repeat_interleave(GROUP, 1)) * scale) < 0.16


@pytest.mark.parametrize("method", QUANTIZATION)
@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.0.mlp.gate.weight", "lm_head.weight"]
)
def test_norms_routers_and_head_stay_as_they_are(method: str, name: str) -> None:
    value = a_weight(256) if "norm" in name else a_weight(8, 256)
    assert quantize(method, name, value) == {name: value}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_checkpoint_has_the_tensors_of_its_architecture_and_a_configuration(
    architecture: str, tmp_path: Path
) -> None:
    config = CONFIGS[architecture]()
    for part in (config, config.get("text_config", {})):
        part["vocab_size"] = 256
    nbytes = write_checkpoint(tmp_path, config)
    weights = load_file(tmp_path / "model.safetensors")
    expected = dict(TENSORS[config["model_type"]](config))
    assert {name: tuple(value.shape) for name, value in weights.items()} == expected
    assert sum(value.nbytes for value in weights.values()) == nbytes < 100 << 20
    assert all(bool(value.isfinite().all()) for value in weights.values())
    assert (
        json.loads((tmp_path / "config.json").read_text())["architectures"]
        == config["architectures"]
    )
