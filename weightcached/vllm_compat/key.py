"""The key of an engine's rank: everything in vLLM's configuration and environment that can change
the weights' bytes.

One function makes both keys: the loader child calls it for the cache, the plug-in for the engine.
The key does not repeat the classes, shapes and dtypes that follow from a configuration: the index
carries a digest of the freshly built model (bind.skeleton_of), and the engine compares it before it
maps anything. docs/identity.md has a table of the fields and the faults that they guard against,
and lists the settings that are left out on purpose.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import torch

from weightcached.checkpoint.identity import record_checkpoint
from weightcached.config.load_formats import OWN_LOAD_FORMATS
from weightcached.index.key import ABSENT, WeightCacheKey
from weightcached.system.versions import LIBRARIES
from weightcached.vllm_compat.build import stage_of_platform

# Names of vLLM's variables that choose a kernel, a layout or a value at load time.
_LAYOUT_ENVIRONMENT = re.compile(
    r"VLLM_.*(GEMM|MOE|MARLIN|FP8|FP4|QUANT|KERNEL|MLA|FLASHINFER|CUTLASS|INT4|PREPACK|INVARIANT|PADDING|WEIGHT"
    r"|HUMMING|B12X|HPC_OPS|AGNOSTIC|AWQ|MATMUL_PRECISION|REPLICATE|SHARD_SP|ATTENTION)"
)
# Exceptions: they act on activations, communication, scheduling or memory, or on platforms without
# a segment backend. VLLM_PP_LAYER_PARTITION is a field of its own.
_HARMLESS_ENVIRONMENT = re.compile(
    r"VLLM_(ROCM|XPU|TPU)_|VLLM_.*(SAMPLER|ALLREDUCE|WARMUP|AUTOTUNE|CACHE_DIR|CACHE_ROOT|WORKSPACE|PIN_MEMORY|UVA"
    r"|THRESHOLD|SIMULATION|LOW_PRECISION_COMBINE|ATOMIC_ADD|MAX_TOKENS_PER_EXPERT|GROUPED_TOPK|SKIP_PADDING|DUAL_STREAM"
    r"|GEMM_AR|GEMM_RS|CHUNKED_LOCAL|CHUNK_SIZE|DECODE_KERNEL)"
)
# Entries of config.json about generation, training and origin. No layer reads them.
_HARMLESS_CONFIG = frozenset(
    {
        "_name_or_path", "name_or_path", "transformers_version", "eos_token_id", "bos_token_id", "use_cache",
        "initializer_range", "output_attentions", "output_hidden_states", "return_dict",
    }
)  # fmt: skip
# The longest text of a field on the wire is 4000 characters.
_MAX_TEXT = 1_000


def build_key(vllm_config: Any, model_config: Any, *, role: str) -> WeightCacheKey:
    """The key of this process's rank. To be called before loading: post-processing may change the
    configuration.

    Needs vLLM's process groups. Raises CheckpointError if the checkpoint cannot be identified.
    """
    from vllm.distributed import get_dp_group, get_pp_group, get_tp_group

    load, parallel, cache = (
        vllm_config.load_config,
        vllm_config.parallel_config,
        vllm_config.cache_config,
    )
    tp, pp, dp = get_tp_group(), get_pp_group(), get_dp_group()
    ep_size, ep_rank = _expert_rank(parallel)
    hf_config = model_config.hf_config
    device_name, capability = _device_properties()
    checkpoint = record_checkpoint(
        model_config.model,
        revision=model_config.revision,
        download_dir=load.download_dir,
        load_format=_disk_format(load),
    )
    return WeightCacheKey(
        checkpoint=checkpoint,
        role=role,
        architecture=",".join(getattr(hf_config, "architectures", None) or []) or ABSENT,
        config_digest=_digest(_effective(hf_config.to_dict())),
        dtype=str(model_config.dtype),
        quantization=str(model_config.quantization),
        quant_config_digest=_digest(
            [
                _plain(getattr(hf_config, "quantization_config", None)),
                _plain(getattr(model_config, "quantization_config", None)),
            ]
        ),
        kv_cache_dtype=str(cache.cache_dtype),
        kv_cache_skip_layers=_shorten(
            ",".join(sorted(set(getattr(cache, "kv_cache_dtype_skip_layers", [ABSENT]))))
        ),
        stage=stage_of_platform() or ABSENT,
        tp_size=tp.world_size,
        tp_rank=tp.rank_in_group,
        pp_size=pp.world_size,
        pp_rank=pp.rank_in_group,
        dp_size=dp.world_size,
        dp_rank=dp.rank_in_group,
        ep_size=ep_size,
        ep_rank=ep_rank,
        context_parallel=_attributes(
            parallel,
            "prefill_context_parallel_size",
            "decode_context_parallel_size",
            "dcp_q_replicate",
            "enable_hc_sp",
        ),
        pp_layer_partition=os.environ.get("VLLM_PP_LAYER_PARTITION", ABSENT)
        if pp.world_size > 1
        else ABSENT,
        expert_placement=_expert_placement(parallel),
        multimodal_limits=_multimodal(getattr(model_config, "multimodal_config", None)),
        lora_layout=_lora(vllm_config.lora_config, model_config),
        model_impl=_attributes(model_config, "model_impl", "convert_type", "runner_type"),
        speculative=_speculative(vllm_config.speculative_config) if role == "draft" else ABSENT,
        kernel_backends=_kernel_backends(vllm_config),
        environment=layout_environment(),
        additional_config=_additional(vllm_config),
        versions=dict(_versions()),
        device_name=device_name,
        compute_capability=capability,
        code_revision=_code_revision(model_config, checkpoint.root),
    )


def with_checkpoint_as_now(
    key: WeightCacheKey, vllm_config: Any, model_config: Any
) -> Callable[[], WeightCacheKey]:
    """The key again whenever it is called, with the checkpoint as it lies on disk then.

    The rest of it cannot be built again: post-processing may have changed the configuration.
    """
    record = functools.partial(
        record_checkpoint,
        model_config.model,
        revision=model_config.revision,
        download_dir=vllm_config.load_config.download_dir,
        load_format=_disk_format(vllm_config.load_config),
    )
    return lambda: msgspec.structs.replace(key, checkpoint=record())


def layout_environment() -> dict[str, str]:
    """The values in force of vLLM's variables that can change the bytes: by name, those unset with
    their defaults.

    A variable that this vLLM does not list is nothing to it: a deployment's own, such as VLLM_WEIGHTS_DIR.
    """
    from vllm import envs

    known = envs.environment_variables
    values = {name: str(read()) for name, read in known.items() if changes_layout(name)}
    return {name: _shorten(values[name]) for name in sorted(values)}


def changes_layout(name: str) -> bool:
    """Whether a variable of this name can change the bytes of loaded or post-processed weights."""
    return bool(_LAYOUT_ENVIRONMENT.match(name)) and not _HARMLESS_ENVIRONMENT.match(name)


def _disk_format(load_config: Any) -> str:
    return "auto" if load_config.load_format in OWN_LOAD_FORMATS else str(load_config.load_format)


def _expert_rank(parallel: Any) -> tuple[int, int]:
    from vllm.distributed import parallel_state

    if not getattr(parallel, "enable_expert_parallel", False) or parallel_state._EP is None:
        return 1, 0
    group = parallel_state.get_ep_group()
    return group.world_size, group.rank_in_group


def _expert_placement(parallel: Any) -> str:
    # The placement and format of experts only matter if ranks share them.
    if not getattr(parallel, "enable_expert_parallel", False):
        return ABSENT
    return _attributes(
        parallel, "expert_placement_strategy", "all2all_backend", "enable_eplb", "enable_elastic_ep"
    )


def _effective(config: Any) -> Any:
    """The configuration without entries that no layer reads; text, vision and draft parts too."""
    if isinstance(config, dict):
        return {str(k): _effective(v) for k, v in config.items() if k not in _HARMLESS_CONFIG}
    return [_effective(v) for v in config] if isinstance(config, list | tuple) else config


def _multimodal(config: Any) -> str:
    """How the encoders are built. Of a limit only zero counts: it leaves the encoder out."""
    if config is None:
        return ABSENT
    limits = getattr(config, "limit_per_prompt", {})
    unused = sorted(modality for modality in limits if config.get_limit_per_prompt(modality) == 0)
    return f"without={unused} " + _attributes(
        config,
        "language_model_only",
        "enable_mm_embeds",
        "mm_encoder_only",
        "mm_encoder_tp_mode",
        "mm_encoder_attn_backend",
        "mm_encoder_attn_dtype",
        "mm_device_do_normalize",
    )


def _lora(config: Any, model_config: Any) -> str:
    """Parts of the base whose layout changes for adapters.

    Adapters wrap layers that are loaded already. But experts get kernels for adapters, with another
    layout, and towers are built differently if adapters may be added to them.
    """
    if config is None:
        return ABSENT
    changed = ["experts"] if getattr(model_config, "is_moe", True) else []
    if getattr(config, "enable_tower_connector_lora", False):
        changed.append("towers")
    return ",".join(changed) or ABSENT


def _speculative(config: Any) -> str:
    return _attributes(
        config,
        "method",
        "quantization",
        "moe_backend",
        "attention_backend",
        "draft_tensor_parallel_size",
        "draft_lm_head_quantization",
        "use_heterogeneous_vocab",
        "parallel_drafting",
    )


def _kernel_backends(vllm_config: Any) -> dict[str, str]:
    # The requested values. The skeleton shows the choice of `auto`: it digests the class of every
    # layer's method and kernel, and every backend that is an enum.
    kernel = getattr(vllm_config, "kernel_config", None)
    names = ("moe_backend", "linear_backend", "linear_backend_per_quant")
    backends = {name: _text(getattr(kernel, name, ABSENT)) for name in names}
    attention = getattr(vllm_config, "attention_config", None)
    return backends | {"attention": _text(getattr(attention, "backend", ABSENT))}


def _additional(vllm_config: Any) -> str:
    # Free for models and platforms to read: some choose kernels by it.
    config = getattr(vllm_config, "additional_config", None)
    return _digest(config) if config else ABSENT


def _code_revision(model_config: Any, root: str) -> str:
    """Revision and digest of the checkpoint's Python files, if its model may come from them."""
    config = model_config.hf_config
    if not (
        getattr(model_config, "trust_remote_code", False) and getattr(config, "auto_map", None)
    ):
        return ABSENT
    digest = hashlib.sha256()
    for file in sorted(Path(root).glob("*.py")):
        digest.update(f"{file.name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return f"{getattr(model_config, 'code_revision', ABSENT)} {digest.hexdigest()}"


@functools.cache
def _versions() -> dict[str, str]:
    import vllm

    versions = {
        "vllm": vllm.__version__,
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
    }
    for module, library in LIBRARIES.items():
        versions[library] = ABSENT
        with contextlib.suppress(metadata.PackageNotFoundError):
            # A distribution that is not there is looked for in every directory of sys.path, which
            # takes milliseconds.
            if module in sys.modules or importlib.util.find_spec(module) is not None:
                versions[library] = metadata.version(library)
    return versions


def _device_properties() -> tuple[str, str]:
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return current_platform.device_name, str(torch.backends.cpu.get_cpu_capability())
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return properties.name, f"{properties.major}.{properties.minor}"


def _attributes(config: Any, *names: str) -> str:
    if config is None:
        return ABSENT
    return _shorten(" ".join(f"{name}={_text(getattr(config, name, ABSENT))}" for name in names))


def _text(value: Any) -> str:
    """One text for one value, in any order of its entries."""
    if isinstance(value, dict):
        return str(dict(sorted((str(k), _text(v)) for k, v in value.items())))
    return str(value)


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"sha256 {hashlib.sha256(text.encode()).hexdigest()}"


def _plain(value: Any) -> Any:
    return value.to_dict() if hasattr(value, "to_dict") else value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
