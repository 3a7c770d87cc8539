"""Additions to vLLM's CPU worker for layouts that its GPU worker runs, in these tests' engines.

Given to engines as `worker_extension_cls`. Seen with vLLM 0.32 from disk without any plug-in, and
in 0.33's sources:

- pipeline_parallel_size=2 with enforce_eager: "assert self.intermediate_tensors is not None" in the first step of the
  second stage. A dummy run makes the buffer, and CPUModelRunner.warming_up_model() leaves that out without compilation.
- enable_expert_parallel over data parallel replicas: NotImplementedError. CpuCommunicator has neither all_gatherv() nor
  reduce_scatterv(), which its own all2all manager calls.
- enable_expert_parallel at all: a segmentation fault in cpu_fused_moe. CPUUnquantizedExperts ignores the expert map, so
  that the kernel looks for experts of other ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


class Extension:
    """Adds nothing to the worker: only the import of this module matters."""


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Each rank's tensor, of sizes[rank] in dimension 0, one after the other."""
    assert dim == 0
    if isinstance(input_, list):
        return [all_gatherv(self, tensor, dim, sizes) for tensor in input_]
    sizes = sizes or [input_.shape[0]] * self.world_size
    padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
    padded[: input_.shape[0]] = input_
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatterv(
    self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """This rank's sizes[rank] rows of the sum over all ranks."""
    assert dim == 0
    sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
    total = input_.contiguous().clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    first = sum(sizes[: self.rank_in_group])
    return total[first : first + sizes[self.rank_in_group]]


CpuCommunicator.all_gatherv = all_gatherv
CpuCommunicator.reduce_scatterv = reduce_scatterv

_apply = CPUUnquantizedExperts.apply


def with_expert_map(self: Any, **kwargs: Any) -> None:
    """Count this rank's experts from 0, and give others no weight: their own ranks add them."""
    if (expert_map := kwargs["expert_map"]) is not None:
        local = expert_map[kwargs["topk_ids"].long()]
        kwargs["topk_weights"] = kwargs["topk_weights"].masked_fill(local < 0, 0.0)
        kwargs["topk_ids"] = local.clamp(min=0).to(kwargs["topk_ids"].dtype)
    _apply(self, **kwargs)


CPUUnquantizedExperts.apply = with_expert_map

_gather = CPUModelRunner.sync_and_gather_intermediate_tensors


def with_buffer(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Make the buffer that a dummy run would have made."""
    if self.intermediate_tensors is None:
        self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
            batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
        )
    return _gather(self, *args, **kwargs)


CPUModelRunner.sync_and_gather_intermediate_tensors = with_buffer
