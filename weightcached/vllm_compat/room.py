"""The least memory that a rank allocates when it loads its model: a proven bound, from the model as
vLLM builds it.

Not from the checkpoint's size: a float32 checkpoint may be loaded as bfloat16, experts are spread over TP × DP × EP,
and files lie beside the weights that no model reads.
"""

from __future__ import annotations

from typing import Any

from torch import nn

# vLLM narrows 16-bit weights to 4 bits at the least while it loads them.
_NARROWING = 4


def least_bytes(model: nn.Module, vllm_config: Any) -> int:
    """Least device memory, in bytes, for loading this model, which was built on the meta device.

    Tied tensors, and tensors of one storage, count once. 0 if nothing is proven, as with weights
    that vLLM moves to the host while it builds.
    """
    if _offloads(vllm_config):
        return 0
    sizes: dict[int, int] = {}
    for module in model.modules():
        # Narrowed layer by layer: the wide weights never exist all at once.
        online = getattr(getattr(module, "quant_method", None), "uses_meta_device", False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            # Nothing is proven for a tensor without a shape.
            if not isinstance(tensor, nn.parameter.UninitializedTensorMixin):
                storage = tensor.untyped_storage()
                sizes[storage._cdata] = storage.nbytes() // (_NARROWING if online else 1)
    return sum(sizes.values())


def _offloads(vllm_config: Any) -> bool:
    return any(offloaded(vllm_config).values())


def offloaded(vllm_config: Any) -> dict[str, Any]:
    """The options that move weights out of device memory, by name, with their values."""
    offload = getattr(vllm_config, "offload_config", None)
    # vLLM moved them: the cache's configuration had the first.
    return {
        "cpu_offload_gb": getattr(vllm_config.cache_config, "cpu_offload_gb", 0)
        or getattr(getattr(offload, "uva", None), "cpu_offload_gb", 0),
        "offload_group_size": getattr(getattr(offload, "prefetch", None), "offload_group_size", 0),
    }
