"""One rank of a vLLM model, set up and loaded alone. All of vLLM's internals on the loader's side
are here.

A solo rank has stand-in process groups of torch's `fake` backend, made by vLLM's own layout code,
so that layers see the sizes and ranks that they will have in the engine. A stand-in has no device
communicator: a loader that really needs its peers fails and says so, instead of computing with data
that nobody sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any
from unittest import mock

import torch
import torch.distributed
from torch import nn

from weightcached.errors import LoadError, ManifestError
from weightcached.system.text import near_miss
from weightcached.vllm_compat.build import stage_of_platform
from weightcached.wire.loader_job import LoaderJob

ByteCounter = Callable[[int], None]


def create_vllm_config(job: LoaderJob) -> Any:
    """The VllmConfig of `vllm serve` with these arguments. Raises ManifestError for an unknown one."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.usage.usage_lib import UsageContext

    known = {field.name for field in fields(EngineArgs)}
    for name in job.engine:
        if name not in known:
            raise ManifestError(
                f"{job.cache}: this vLLM has no engine argument {name!r}{near_miss(name, known)}"
            )
    load_general_plugins()
    try:
        # `mp`: otherwise vLLM would count the GPUs that this process sees, which is one for any
        # world size.
        defaults = {"skip_tokenizer_init": True, "distributed_executor_backend": "mp"}
        # The defaults of a server, as most engines are: max_num_batched_tokens sizes the tuning and
        # some tables.
        config = EngineArgs(**(defaults | job.engine)).create_engine_config(
            UsageContext.OPENAI_API_SERVER
        )
    except (ValueError, TypeError, OSError) as e:
        raise ManifestError(
            f"{job.cache}: vLLM refuses the engine arguments: {' '.join(str(e).split())}"
        ) from e
    become_replica(config, job.dp_rank)
    return config


def become_replica(vllm_config: Any, dp_rank: int) -> None:
    """Turn the configuration into that of one replica, as the engine does when it starts its cores."""
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size == 1:
        return
    parallel.data_parallel_index = dp_rank
    if vllm_config.model_config.is_moe:
        parallel.data_parallel_rank = dp_rank
    else:
        # Replicas of a dense model know nothing of each other.
        parallel.reconfigure_for_independent_dp_rank()


def configs_of(vllm_config: Any, role: str) -> tuple[Any, Any]:
    """The VllmConfig and the ModelConfig with which an engine builds the role's model.

    Raises ManifestError if there is no draft that is cached.
    """
    from weightcached.config.drafts import CACHED_METHODS
    from weightcached.vllm_compat import drafts

    if role == "target":
        return vllm_config, vllm_config.model_config
    method = drafts.method_of(vllm_config)
    if method not in CACHED_METHODS:
        raise ManifestError(
            f"role draft: for vLLM the speculative method is {method or 'one without a model'}, but only drafts of "
            f"{', '.join(CACHED_METHODS)} are cached: write the method into speculative_config"
        )
    return drafts.draft_config(vllm_config), vllm_config.speculative_config.draft_model_config


@contextmanager
def solo_rank(vllm_config: Any, rank: int) -> Iterator[None]:
    """Stand-in groups for `rank` of the configuration's world, for the time of the block.

    Raises LoadError for a rank outside the world.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    parallel = vllm_config.parallel_config
    world_size = parallel.world_size
    if not 0 <= rank < world_size:
        raise LoadError(f"rank {rank} is outside the world of {world_size} ranks")
    global_rank = parallel.data_parallel_rank * world_size + rank
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=global_rank, world_size=parallel.world_size_across_dp
    )
    try:
        with (
            set_current_vllm_config(vllm_config),
            _stand_in_coordinators(parallel_state, parallel.nnodes),
        ):
            parallel_state.init_distributed_environment(
                world_size, rank, "tcp://127.0.0.1:1", 0, "fake"
            )
            parallel_state.ensure_model_parallel_initialized(
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
                parallel.prefill_context_parallel_size,
                parallel.decode_context_parallel_size,
                backend="fake",
            )
        with set_current_vllm_config(vllm_config):
            yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


@contextmanager
def _stand_in_coordinators(parallel_state: Any, nnodes: int) -> Iterator[None]:
    new_group = torch.distributed.new_group
    make_coordinator = parallel_state.init_model_parallel_group

    def fake_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        return new_group(ranks, backend="fake")

    @functools.wraps(make_coordinator)
    def without_communicator(*args: Any, **kwargs: Any) -> Any:
        # use_all2all would build buffers together with peers.
        silent = {
            "use_message_queue_broadcaster": False,
            "use_device_communicator": False,
            "use_all2all": False,
        }
        return make_coordinator(*args, **(kwargs | silent))

    with (
        mock.patch.object(torch.distributed, "new_group", fake_group),
        mock.patch.object(parallel_state, "init_model_parallel_group", without_communicator),
        mock.patch.object(parallel_state, "_node_count", return_value=nnodes),
    ):
        yield


def load_for_stage(
    vllm_config: Any, model_config: Any, stage: str, count: ByteCounter
) -> nn.Module:
    """Load the model with vLLM's own loader for its load format; `processed` includes
    post-processing.

    `count` is called with the bytes of each checkpoint tensor as the model takes it.
    """
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.utils.torch_utils import set_default_torch_dtype

    loader = get_model_loader(vllm_config.load_config)
    create_model = loader.create_model

    def create_counting(*args: Any, **kwargs: Any) -> nn.Module:
        return _count_weights(create_model(*args, **kwargs), count)

    loader.create_model = create_counting
    if stage == "processed":
        model = loader.load_model(vllm_config=vllm_config, model_config=model_config)
    else:
        device = torch.device(vllm_config.load_config.device or vllm_config.device_config.device)
        with set_default_torch_dtype(model_config.dtype):
            with device:
                model = loader.create_model(vllm_config=vllm_config, model_config=model_config)
            loader.load_weights(model, model_config)
    del loader.create_model
    model.__dict__.pop("load_weights", None)
    return model.eval()


def _count_weights(model: nn.Module, count: ByteCounter) -> nn.Module:
    load_weights = model.load_weights

    def counting(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            # Some iterators yield lazy slices that know no nbytes.
            count(getattr(tensor, "nbytes", 0))
            yield name, tensor

    # In the instance's __dict__, the place of plain attributes; the caller removes it again.
    model.__dict__["load_weights"] = lambda weights, *args, **kwargs: load_weights(
        counting(weights), *args, **kwargs
    )
    return model


def init_workspace(vllm_config: Any) -> None:
    """Let attention backends take workspace when they are constructed, as in an engine's worker."""
    if stage_of_platform() != "processed":
        return
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(torch.device(vllm_config.device_config.device))
