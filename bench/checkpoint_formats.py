"""Quantized weights in each format, and the matching entries of a checkpoint's configuration.

Quantized are the projections of attention, feed-forward layers and experts; routers, embeddings and
the head are not.
"""

from __future__ import annotations

from typing import Any

import torch

GROUP = 128
BLOCK = 128
_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max
# Covers the output of a norm, whose standard deviation is about one.
_STATIC_INPUT_SCALE = 8.0 / _FP8_MAX
# Magnitudes of a 4-bit float (e2m1), and the bounds between them.
_FP4_MAX = 6.0
_FP4_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_NOT_QUANTIZED = ["lm_head", "re:.*gate$"]

Tensors = dict[str, torch.Tensor]


def _compressed(
    form: str, weights: dict[str, Any], activations: dict[str, Any] | None
) -> dict[str, Any]:
    """The configuration of a format of compressed-tensors with one scheme for all linear layers."""
    group: dict[str, Any] = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False} | weights,
    }
    group["input_activations"] = None if activations is None else {"symmetric": True} | activations
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": _NOT_QUANTIZED,
        "config_groups": {"group_0": group},
    }  # fmt: skip


_FLOAT8 = {"num_bits": 8, "type": "float"}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
# The config entries of each quantization made here.
QUANTIZATION: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8-block": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    },
    "ct-fp8-static": _compressed(
        "float-quantized",
        _FLOAT8 | {"strategy": "tensor"},
        _FLOAT8 | {"strategy": "tensor", "dynamic": False},
    ),
    "ct-fp8-channel": _compressed(
        "float-quantized",
        _FLOAT8 | {"strategy": "channel"},
        _FLOAT8 | {"strategy": "token", "dynamic": True},
    ),
    "int8": _compressed(
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
    ),
    "w4a16": _compressed(
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP},
        None,
    ),
    "nvfp4": _compressed("nvfp4-pack-quantized", _NVFP4, _NVFP4 | {"dynamic": "local"}),
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "re:.*router"]},
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
    },
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": False,
        "sym": True,
    },
}


def quantization_config(method: str, config: dict[str, Any]) -> dict[str, Any]:
    """The quantization entry of this configuration; `fp8` takes names, not patterns."""
    entry = QUANTIZATION[method]
    if entry["quant_method"] != "fp8":
        return entry
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(config["num_hidden_layers"])]
    return entry | {"ignored_layers": ["lm_head", *routers]}


def quantize(method: str, name: str, value: torch.Tensor) -> Tensors:
    """A linear layer's weight, shape (out, in), as the method stores it; other tensors unchanged.

    mxfp4: gpt-oss's experts, shape (experts, out, in), instead of linear layers.
    """
    if method == "mxfp4":
        return (
            quantize_mxfp4(name, value)
            if name.endswith(("gate_up_proj", "down_proj"))
            else {name: value}
        )
    if (
        value.ndim != 2
        or not name.endswith(".weight")
        or ("proj" not in name and ".experts." not in name)
    ):
        return {name: value}
    prefix = name.removesuffix("weight")
    if method == "fp8-block":
        return quantize_fp8_block(prefix, value)
    if method in ("fp8", "ct-fp8-static", "ct-fp8-channel"):
        return quantize_fp8(method, prefix, value)
    if method == "nvfp4":
        return quantize_nvfp4(prefix, value)
    if method == "int8":
        scale = value.float().abs().amax(dim=1, keepdim=True) / 127
        return {
            name: (value.float() / scale).round().to(torch.int8),
            f"{prefix}weight_scale": scale.to(value.dtype),
        }
    return quantize_int4(method, prefix, value)


def quantize_fp8(method: str, prefix: str, value: torch.Tensor) -> Tensors:
    """float8_e4m3fn with one scale, or one per output channel, and one for static activations."""
    weight = value.float()
    largest = (
        weight.abs().amax(dim=1, keepdim=True)
        if method == "ct-fp8-channel"
        else weight.abs().max().reshape(1)
    )
    scale = (largest / _FP8_MAX).clamp(min=1e-12)
    made = {f"{prefix}weight": (weight / scale).to(_FP8), f"{prefix}weight_scale": scale}
    if method == "ct-fp8-static":
        made[f"{prefix}input_scale"] = torch.tensor([_STATIC_INPUT_SCALE])
    return made


def quantize_fp8_block(prefix: str, value: torch.Tensor) -> Tensors:
    """float8_e4m3fn, one float32 scale per block of BLOCK x BLOCK; the last ones may be smaller."""
    out, inputs = value.shape
    rows, columns = -(-out // BLOCK), -(-inputs // BLOCK)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[:out, :inputs] = value.float()
    blocks = padded.reshape(rows, BLOCK, columns, BLOCK)
    scale = (blocks.abs().amax(dim=(1, 3)) / _FP8_MAX).clamp(min=1e-12)
    codes = (blocks / scale[:, None, :, None]).reshape_as(padded)[:out, :inputs]
    return {f"{prefix}weight": codes.to(_FP8).contiguous(), f"{prefix}weight_scale_inv": scale}


def quantize_nvfp4(prefix: str, value: torch.Tensor) -> Tensors:
    """Two 4-bit floats in a byte; a float8 scale per 16 inputs, and one float32 scale over those."""
    out, inputs = value.shape
    groups = value.float().reshape(out, inputs // 16, 16)
    largest = groups.abs().amax(dim=2)
    global_scale = _FP8_MAX * _FP4_MAX / largest.max().clamp(min=1e-12)
    scale = (largest / _FP4_MAX * global_scale).to(_FP8)
    codes = _fp4_codes(groups / (scale.float() / global_scale).clamp(min=1e-12)[:, :, None])
    return {
        f"{prefix}weight_packed": _pack2(codes.reshape(out, inputs)),
        f"{prefix}weight_scale": scale,
        f"{prefix}weight_global_scale": global_scale.reshape(1),
        f"{prefix}input_global_scale": torch.tensor([_FP8_MAX * _FP4_MAX / 8.0]),
    }


def quantize_mxfp4(name: str, value: torch.Tensor) -> Tensors:
    """(…, in) as blocks (…, in / 32, 16) of 4-bit floats in pairs, and exponents (…, in / 32) that count from -127."""
    blocks = value.float().reshape(*value.shape[:-1], -1, 32)
    exponent = (blocks.abs().amax(dim=-1).clamp(min=2.0**-100) / _FP4_MAX).log2().ceil()
    codes = _fp4_codes(blocks / exponent.exp2()[..., None])
    return {f"{name}_blocks": _pack2(codes), f"{name}_scales": (exponent + 127).to(torch.uint8)}


def _fp4_codes(values: torch.Tensor) -> torch.Tensor:
    magnitude = torch.bucketize(values.abs(), torch.tensor(_FP4_BOUNDS))
    return magnitude + 8 * (values < 0)


def _pack2(codes: torch.Tensor) -> torch.Tensor:
    # The first of two neighbours in the low half of the byte.
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)


def quantize_int4(method: str, prefix: str, value: torch.Tensor) -> Tensors:
    """Groups of GROUP inputs share a scale; codes are 0 to 15 around 8, eight in an int32."""
    inputs, outputs = value.shape[1], value.shape[0]
    groups = value.float().t().reshape(inputs // GROUP, GROUP, outputs)
    scale = groups.abs().amax(dim=1, keepdim=True) / 7
    codes = ((groups / scale).round() + 8).clamp(0, 15).to(torch.int64).reshape(inputs, outputs)
    scales = scale.squeeze(1).to(value.dtype)
    if method == "w4a16":
        return {
            f"{prefix}weight_packed": _pack8(codes.t().reshape(outputs, -1, 8)),
            f"{prefix}weight_scale": scales.t().contiguous(),
            f"{prefix}weight_shape": torch.tensor([outputs, inputs]),
        }
    packed = {f"{prefix}scales": scales}
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
