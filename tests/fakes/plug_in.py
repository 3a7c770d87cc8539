"""A quantization plug-in as others write them: registered with vLLM, its classes outside of vLLM's
packages.

Every linear layer of a model gets the method that the checkpoint's quantization_config names for
it. All of them compute what an unquantized layer computes; they differ in what their hook does to
the weight after loading.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.parameter import ModelWeightParameter

NAME = "weightcached-test"


class Kernel:
    """An object that a hook makes and a layer computes with."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.workspace = torch.zeros(4, device=weight.device)
        self.columns = weight.shape[1]

    def __repr__(self) -> str:
        return f"Kernel({tuple(self.weight.shape)})"


class Method(LinearMethodBase):
    """Keeps weights as vLLM's unquantized layers do."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        weight = ModelWeightParameter(
            data=torch.empty(
                sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype
            ),
            input_dim=1,
            output_dim=0,
            weight_loader=extra["weight_loader"],
        )
        layer.register_parameter("weight", weight)

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return nn.functional.linear(x, layer.weight, bias)


class Turning(Method):
    """Turns the weight, and makes an object that holds it and a workspace: for `replay`."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.weight = nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)
        layer.kernel = Kernel(layer.weight)

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return x @ layer.kernel.weight


class Counting(Turning):
    """The same, and counts elements, which needs memory: a value to restore after the replay."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.counted = 0 if layer.weight.is_meta else int((layer.weight != 0).sum())
        super().process_weights_after_loading(layer)


class OtherKernel(Kernel):
    pass


class Branching(Turning):
    """Makes different objects with and without memory: a replay cannot be trusted with it."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        kind = OtherKernel if layer.weight.is_meta else Kernel
        super().process_weights_after_loading(layer)
        layer.kernel = kind(layer.weight)


class Measuring(Method):
    """Scales by the largest element, a number that it reads back: for `restore`."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.largest = float(layer.weight.abs().max())
        layer.packed = nn.Parameter((layer.weight.data / layer.largest).t(), requires_grad=False)
        del layer.weight

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return (x @ layer.packed) * layer.largest


class MeasuringKernel(Measuring):
    """The same with an object: no plan brings that to an engine."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        super().process_weights_after_loading(layer)
        layer.kernel = Kernel(layer.packed)


class InPlace(Method):
    """Declares that it runs on processed weights, but writes into them: not for `rerun`."""

    supports_pre_processed_weights = True

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        doubled = layer.weight.data * 2
        if not hasattr(layer, "doubled"):
            layer.register_parameter(
                "doubled", nn.Parameter(torch.empty_like(doubled), requires_grad=False)
            )
        layer.doubled.data.copy_(doubled)

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return nn.functional.linear(x, layer.doubled, bias) / 2


class Embedding(UnquantizedEmbeddingMethod):
    """Without the CPU's repacking into handles."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        pass

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return nn.functional.linear(x, layer.weight, bias)


METHODS = {
    cls.__name__: cls
    for cls in (Method, Counting, Branching, Turning, Measuring, MeasuringKernel, InPlace)
}


@register_quantization_config(NAME)
class Config(QuantizationConfig):
    """A checkpoint's quantization_config: {"quant_method": NAME, "methods": {"qkv_proj": …}}."""

    def __init__(self, methods: dict[str, str]) -> None:
        super().__init__()
        self.methods = methods

    @classmethod
    def get_name(cls) -> str:
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Config:
        return cls(config["methods"])

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, LinearBase):
            method: QuantizeMethodBase = METHODS[self.methods[prefix.rpartition(".")[2]]]()
            return method
        return Embedding() if isinstance(layer, VocabParallelEmbedding) else None
