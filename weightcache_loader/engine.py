"""Everything of vLLM's internals on the engine's side: building on the meta device, hooks, and the key.

build_key() is called by the loader child as well: one function makes both keys. A new vLLM release is mended here
and in weightcached/loader/rank.py.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import nn

from weightcached.identity import record_checkpoint
from weightcached.key import ABSENT, WeightCacheKey

# Environment variables of vLLM that choose kernels or layouts, and those of similar name that cannot.
_LAYOUT_ENVIRONMENT = re.compile(
    r"VLLM_.*(GEMM|MOE|MARLIN|FP8|FP4|QUANT|LAYOUT|KERNEL|MLA|AITER|FLASHINFER|CUTLASS|INT4|PREPACK|INVARIANT|PADDING"
    r"|WEIGHT|HUMMING|B12X|PP_LAYER|ATTENTION)"
)
_HARMLESS_ENVIRONMENT = re.compile(
    r"VLLM_.*(SAMPLER|ALLREDUCE|WARMUP|AUTOTUNE|CACHE_DIR|CACHE_ROOT|WORKSPACE|PIN_MEMORY)"
)
_KERNEL_LIBRARIES = ("triton", "flashinfer-python", "deep-gemm", "compressed-tensors", "torchao", "bitsandbytes")
_VOLATILE_CONFIG = ("_name_or_path", "transformers_version", "name_or_path")


def stage_of_platform() -> str:
    """`processed` on a GPU; `loaded` on CPU, where post-processing ends in opaque kernel handles. Empty elsewhere."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        return "processed"
    return "loaded" if current_platform.is_cpu() else ""


def device_of_worker() -> str:
    """The device name of this worker, as daemons are named: GPU-<uuid>, MIG-<uuid>, or cpuN by local rank."""
    from vllm.distributed import get_world_group
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return f"cpu{get_world_group().local_rank}"
    # As CUDA reports it: right under CUDA_VISIBLE_DEVICES remaps and for MIG slices.
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    return f"GPU-{uuid}" if not str(uuid).startswith(("GPU-", "MIG-")) else str(uuid)


@dataclass
class Build:
    """Whether a build's entries in process-wide registries stay after its block."""

    keep: bool


@contextmanager
def isolated_build(vllm_config: Any, *, keep: bool) -> Iterator[Build]:
    """Hide what an earlier build left in process-wide registries, and undo what this one leaves there.

    With `keep`, which the block may still change, the new entries stay, unless the block raises: a following load
    from disk must not find layers or rotary tables that are still on the meta device.
    """
    build = Build(keep)
    from vllm.model_executor.layers import rotary_embedding

    compilation = vllm_config.compilation_config
    registries = [rotary_embedding._ROPE_DICT, compilation.static_forward_context]
    lists = [getattr(compilation, "static_all_moe_layers", [])]
    saved: list[tuple[Any, Any]] = [(registry, registry.copy()) for registry in (*registries, *lists)]
    if not keep:
        for registry, _ in saved:
            registry.clear()
    # A rotary table of an earlier model would be shared with this one, whose tensors are about to be replaced.
    rotary_embedding._ROPE_DICT.clear()
    restore = True
    try:
        yield build
        restore = not build.keep
    finally:
        if restore:
            for registry, content in saved:
                registry.clear()
                (registry.extend if isinstance(registry, list) else registry.update)(content)


def build_on_meta(vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
    """The model as the engine would build it, without memory for its tensors."""
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(model_config.dtype), torch.device("meta"):
        return initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)


@contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage collection inside: a model is many objects, and looking through an engine's heap for each few
    thousand of them costs more than building and binding it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def run_hooks(model: nn.Module, model_config: Any, device: torch.device, *, stage: str) -> None:
    """Post-processing as the stage needs it: whole on `loaded` weights, rebuilding only Python state on `processed`."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(model_config.dtype):
        if stage == "loaded":
            process_weights_after_loading(model, model_config, device)
            return
        from vllm.model_executor.utils import weights_already_processed

        with weights_already_processed(), _hooks_left_out(model):
            process_weights_after_loading(model, model_config, device)


@contextmanager
def _hooks_left_out(model: nn.Module) -> Iterator[None]:
    """Leave out the hooks of methods that cannot run on processed weights.

    What such a hook would have done is bound and restored from the index instead, and proven like everything else.
    """
    left_out = []
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is None or getattr(method, "supports_pre_processed_weights", True) or method in left_out:
            continue
        left_out.append(method)
        vars(method)["process_weights_after_loading"] = _nothing
        vars(method)["supports_pre_processed_weights"] = True
    try:
        yield
    finally:
        for method in left_out:
            del vars(method)["process_weights_after_loading"], vars(method)["supports_pre_processed_weights"]


def _nothing(layer: nn.Module) -> None:
    pass


def build_key(vllm_config: Any, model_config: Any, *, role: str) -> WeightCacheKey:
    """The key of this process's rank. To be called before loading: post-processing may change the configuration.

    Needs vLLM's process groups. Raises CheckpointError where the checkpoint cannot be identified.
    """
    from vllm.distributed import get_dp_group, get_pp_group, get_tp_group

    load = vllm_config.load_config
    parallel = vllm_config.parallel_config
    tp, pp, dp = get_tp_group(), get_pp_group(), get_dp_group()
    ep_size, ep_rank = _expert_rank(parallel)
    hf_config = model_config.hf_config
    device_name, capability = _device_properties()
    return WeightCacheKey(
        checkpoint=record_checkpoint(
            model_config.model,
            revision=model_config.revision,
            download_dir=load.download_dir,
            load_format=_disk_format(load),
        ),
        role=role,
        architecture=",".join(getattr(hf_config, "architectures", None) or []) or ABSENT,
        config_digest=_digest_json(_config_dict(hf_config)),
        dtype=str(model_config.dtype),
        quantization=str(model_config.quantization),
        quant_config_digest=_digest_json(
            [
                _plain(getattr(hf_config, "quantization_config", None)),
                _plain(getattr(model_config, "quantization_config", None)),
            ]
        ),
        kv_cache_dtype=str(vllm_config.cache_config.cache_dtype),
        stage=stage_of_platform() or ABSENT,
        tp_size=tp.world_size,
        tp_rank=tp.rank_in_group,
        pp_size=pp.world_size,
        pp_rank=pp.rank_in_group,
        dp_size=dp.world_size,
        dp_rank=dp.rank_in_group,
        ep_size=ep_size,
        ep_rank=ep_rank,
        pp_layer_partition=os.environ.get("VLLM_PP_LAYER_PARTITION", ABSENT),
        expert_placement=_attributes(parallel, "enable_expert_parallel", "expert_placement_strategy", "enable_eplb"),
        multimodal_limits=_multimodal_limits(model_config),
        lora_layout=_attributes(vllm_config.lora_config, "fully_sharded_loras", "enable_tower_connector_lora"),
        model_impl=_attributes(model_config, "model_impl", "convert_type", "runner_type"),
        speculative=_attributes(vllm_config.speculative_config, "method") if role == "draft" else ABSENT,
        kernel_backends=_kernel_backends(vllm_config),
        environment=layout_environment(),
        versions=_versions(),
        device_name=device_name,
        compute_capability=capability,
        code_revision=str(getattr(model_config, "code_revision", ABSENT)),
    )


def _disk_format(load_config: Any) -> str:
    ours = ("ipc_cache", "weightcached")
    return "auto" if load_config.load_format in ours else str(load_config.load_format)


def _expert_rank(parallel: Any) -> tuple[int, int]:
    from vllm.distributed import parallel_state

    if not getattr(parallel, "enable_expert_parallel", False) or parallel_state._EP is None:
        return 1, 0
    group = parallel_state.get_ep_group()
    return group.world_size, group.rank_in_group


def _config_dict(hf_config: Any) -> Any:
    return {k: v for k, v in hf_config.to_dict().items() if k not in _VOLATILE_CONFIG}


def _multimodal_limits(model_config: Any) -> str:
    return _attributes(
        getattr(model_config, "multimodal_config", None),
        "limit_per_prompt",
        "language_model_only",
        "mm_encoder_tp_mode",
        "mm_encoder_only",
    )


def _kernel_backends(vllm_config: Any) -> dict[str, str]:
    # What `auto` resolves to shows in the skeleton: it digests the class of every layer's method and kernel.
    kernel = getattr(vllm_config, "kernel_config", None)
    names = ("moe_backend", "linear_backend", "linear_backend_per_quant")
    backends = {name: str(getattr(kernel, name, ABSENT)) for name in names}
    attention = getattr(vllm_config, "attention_config", None)
    return backends | {"attention": str(getattr(attention, "backend", ABSENT))}


def layout_environment() -> dict[str, str]:
    """vLLM's environment variables set in this process that can change the bytes of post-processed weights."""
    return {
        name: value[:4_000]
        for name, value in sorted(os.environ.items())
        if _LAYOUT_ENVIRONMENT.match(name) and not _HARMLESS_ENVIRONMENT.match(name)
    }


def _versions() -> dict[str, str]:
    import vllm

    versions = {"vllm": vllm.__version__, "torch": str(torch.__version__), "cuda": str(torch.version.cuda)}
    for library in _KERNEL_LIBRARIES:
        try:
            versions[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            versions[library] = ABSENT
    return versions


def _device_properties() -> tuple[str, str]:
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return current_platform.device_name, _cpu_capability()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return properties.name, f"{properties.major}.{properties.minor}"


def _cpu_capability() -> str:
    return str(torch.backends.cpu.get_cpu_capability())


def _attributes(config: Any, *names: str) -> str:
    if config is None:
        return ABSENT
    return " ".join(f"{name}={_plain(getattr(config, name, ABSENT))}" for name in names)


def _plain(value: Any) -> Any:
    return value.to_dict() if hasattr(value, "to_dict") else value


def _digest_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
