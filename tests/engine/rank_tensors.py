"""One rank of several small models, loaded in a real gloo group and then alone: digests of all its
tensors.

    python -m tests.engine.rank_tensors GLOBAL_RANK STORE_DIR <cases.json

A case is {"name": …, "world": N, "engine": {…}}; ranks outside of its world leave it out. Prints
{case: [{tensor: [dtype, shape, digest]} in the group, the same alone]}.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def digests(model: Any) -> dict[str, list[Any]]:
    import torch
    import xxhash

    found = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = [str(tensor.dtype), list(tensor.shape), xxhash.xxh3_128_hexdigest(data)]
    return found


@contextlib.contextmanager
def real_group(config: Any, store: Path, rank: int) -> Iterator[None]:
    """vLLM's groups over gloo, with peers in other processes."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    parallel = config.parallel_config
    world = parallel.world_size_across_dp
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(store), world), rank=rank, world_size=world
    )
    try:
        with set_current_vllm_config(config):
            parallel_state.init_distributed_environment(
                parallel.world_size, rank % parallel.world_size, "tcp://127.0.0.1:1", rank, "gloo"
            )
            parallel_state.ensure_model_parallel_initialized(
                parallel.tensor_parallel_size, parallel.pipeline_parallel_size, backend="gloo"
            )
            yield
            torch.distributed.barrier()
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def load(config: Any) -> dict[str, list[Any]]:
    from weightcached.vllm_compat.solo_rank import load_for_stage

    return digests(load_for_stage(config, config.model_config, "loaded", lambda nbytes: None))


def both(case: dict[str, Any], rank: int, store: Path) -> list[dict[str, list[Any]]]:
    from weightcached.config.ranks import layout_of
    from weightcached.vllm_compat.solo_rank import create_vllm_config, solo_rank
    from weightcached.wire.loader_job import LoaderJob

    placement = layout_of(case["engine"]).place(rank)
    job = LoaderJob(
        device=f"cpu{rank}", cache="m/target", role="target", generation=1, spec_digest="", engine=case["engine"],
        rank=placement.rank, dp_rank=placement.dp_rank, boot_id="", socket_fd=0,
    )  # fmt: skip
    config = create_vllm_config(job)
    with real_group(config, store / case["name"], rank):
        grouped = load(config)
    config = create_vllm_config(job)
    with solo_rank(config, job.rank):
        return [grouped, load(config)]


def main() -> None:
    """Load every case that this rank is part of."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    rank, store = int(sys.argv[1]), Path(sys.argv[2])
    cases = [case for case in json.load(sys.stdin) if rank < case["world"]]
    out.write(json.dumps({case["name"]: both(case, rank, store) for case in cases}))
    out.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
