"""Quantize a checkpoint with torchao, as transformers saves one: python -m … SOURCE TARGET.

Prints torchao's configuration, by which an engine quantizes the source itself while it loads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torchao.core.config import config_to_dict
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization import Int8WeightOnlyConfig, quantize_


def quantized(weight: torch.Tensor) -> torch.Tensor:
    """A tensor of torchao's class, whose data lie in tensors inside it."""
    with torch.device("meta"):
        layers = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    layers[0].weight = nn.Parameter(weight, requires_grad=False)
    quantize_(layers, Int8WeightOnlyConfig())
    found: torch.Tensor = layers[0].weight.detach()
    return found


def main(source: Path, target: Path) -> None:
    how: dict[str, Any] = config_to_dict(Int8WeightOnlyConfig())
    target.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            tensors[name] = quantized(tensor) if "_proj." in name else tensor
    data, metadata = flatten_tensor_state_dict(tensors)
    save_file(data, target / "model.safetensors", metadata={**metadata, "format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "torchao", "quant_type": {"default": how}, "modules_to_not_convert": [],
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    print(json.dumps(how))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
