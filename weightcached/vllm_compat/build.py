"""vLLM's internals on the engine's side: the device, and building on the meta device.

A new vLLM release may need changes here, in hooks.py, in key.py and in solo_rank.py.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn

from weightcached.system.gpus import mig_device


def stage_of_platform() -> str:
    """`processed` on a GPU; `loaded` on the CPU, where kernel handles are opaque; "" elsewhere."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        return "processed"
    return "loaded" if current_platform.is_cpu() else ""


def device_of_worker(parallel_config: Any) -> str:
    """The device name of this worker's daemon: GPU-<uuid>, MIG-<uuid>, or cpuN by its number on
    this node.

    `weightcachectl plan` shows the same device for the rank, if the manifest lists devices from the
    first one on.
    """
    from vllm.distributed import get_world_group
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return f"cpu{place_on_node(parallel_config, get_world_group().local_rank)}"
    return gpu_of_worker()


def gpu_of_worker() -> str:
    """GPU-<uuid> or MIG-<uuid> of the GPU that this worker has chosen, for its replica too."""
    # As CUDA reports it: right under CUDA_VISIBLE_DEVICES remaps. It says digits alone, for slices too.
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    digits = str(properties.uuid).removeprefix("GPU-").removeprefix("MIG-")
    if " MIG " not in f"{properties.name} ":
        return f"GPU-{digits}"
    return mig_device(digits, os.environ.get("CUDA_VISIBLE_DEVICES"))


def place_on_node(parallel_config: Any, local_rank: int) -> int:
    """This worker's place among all ranks of its node. `local_rank` counts within its data parallel
    replica.

    As a GPU worker counts to choose its device; a CPU worker has none to choose.
    """
    launched_elsewhere = (
        parallel_config.distributed_executor_backend in ("ray", "external_launcher")
        or parallel_config.data_parallel_backend == "ray"
    )
    # Of a replica that spans nodes, this node has one part and nothing else.
    if launched_elsewhere or parallel_config.nnodes_within_dp > 1:
        return local_rank
    replica = parallel_config.data_parallel_rank_local
    if replica is None:
        replica = parallel_config.data_parallel_index
    return local_rank + int(replica) * int(parallel_config.world_size)


def device_memory() -> tuple[int, int] | None:
    """(free, total) bytes of this worker's GPU, as in vLLM's own check.

    None if vLLM has no budget of device memory.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return None
    from vllm.utils.mem_utils import MemorySnapshot

    snapshot = MemorySnapshot(device=torch.device("cuda", torch.cuda.current_device()))
    return int(snapshot.free_memory), int(snapshot.total_memory)


@dataclass
class Build:
    """Whether a build's entries in process-wide registries stay after its block."""

    keep: bool


@contextmanager
def isolated_build(vllm_config: Any, *, keep: bool) -> Iterator[Build]:
    """Hide the entries of an earlier build in process-wide registries, and remove those of this
    build.

    With `keep`, which the block may still change, the new entries stay, unless the block raises: a
    following load from disk must not find layers or rotary tables that are still on the meta
    device.
    """
    build = Build(keep)
    from vllm.model_executor.layers import rotary_embedding

    compilation = vllm_config.compilation_config
    registries = [rotary_embedding._ROPE_DICT, compilation.static_forward_context]
    lists = [getattr(compilation, "static_all_moe_layers", [])]
    saved: list[tuple[Any, Any]] = [
        (registry, registry.copy()) for registry in (*registries, *lists)
    ]
    if not keep:
        for registry, _ in saved:
            registry.clear()
    # A compiled model registers itself there for good: nobody would ever free it or its mapping.
    dynamo = getattr(sys.modules.get("torch._dynamo.convert_frame"), "_bytecode_hooks", {})
    saved.append((dynamo, dynamo.copy()))
    # A rotary table of an earlier model would be shared with this one, whose tensors are about to
    # be replaced.
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

    with (
        set_default_torch_dtype(model_config.dtype),
        torch.device("meta"),
        _imports_on_host(),
        _expert_maps_on_host(),
    ):
        return initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)


@contextmanager
def _imports_on_host() -> Iterator[None]:
    """Modules that are imported inside the block make their tensors on the host, not on meta.

    vLLM imports kernels while it builds layers, and some have tables at module level: made on the
    meta device, such a table would be without values for the rest of the process.
    """
    load = SourceFileLoader.exec_module

    def exec_module(loader: SourceFileLoader, module: ModuleType) -> None:
        with torch.device("cpu"):
            load(loader, module)

    with mock.patch.object(SourceFileLoader, "exec_module", exec_module):
        yield


@contextmanager
def _expert_maps_on_host() -> Iterator[None]:
    # Layers read back which experts their rank holds while they are built, so that tensor needs
    # values.
    from vllm.model_executor.layers.fused_moe import expert_map_manager

    make = expert_map_manager.determine_expert_map

    def make_on_host(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):
            return make(*args, **kwargs)

    with mock.patch.object(expert_map_manager, "determine_expert_map", make_on_host):
        yield


@contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage collection inside the block.

    A model is many objects. Searching an engine's heap after each few thousand of them costs more
    than building and binding the model.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_heap() -> None:
    """Keep the present objects out of later garbage collections, until the engine shuts down.

    An engine collects all of its heap several times while it loads and profiles, about a third of a
    second each: ten times as long as mapping the weights. vLLM freezes the same objects itself once
    it has started, and thaws them when it ends.
    """
    gc.freeze()


def of_all_ranks(value: str) -> list[str]:
    """What each rank says, in one small collective, none for a single rank."""
    from vllm.distributed import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return [value]
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, value, group=group.cpu_group)
    return [str(each) for each in found]


def all_ranks(ok: bool, role: str) -> bool:
    """Whether every rank says yes; one small collective, none for a single rank."""
    from vllm.distributed import get_tp_group, get_world_group

    # Only the last pipeline stage loads a draft, so the world would wait for ranks that never come.
    group = get_tp_group() if role == "draft" else get_world_group()
    if group.world_size == 1:
        return ok
    flag = torch.tensor([int(ok)], dtype=torch.int32)
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(flag.item())
