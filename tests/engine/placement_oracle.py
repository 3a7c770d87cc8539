"""vLLM's own layouts: reads a JSON list of engine arguments, prints one answer for each.

{"refused": "…"}                                   vLLM's words
{"plan": […], "groups": […], "places": […]}                    one entry for each local rank, in order:
    plan      [local, dp, pp, tp], from vLLM's own weight cache
    groups    [global, dp, pp, tp, ep], ranks in the groups that layers see, and [dp_size, ep_size]
    places    where its worker looks for a daemon: the number in cpuN
"""

from __future__ import annotations

import copy
import json
import os
import sys
from typing import Any


def ranks_seen(config: Any, dp_rank: int, rank: int) -> list[int]:
    """Ranks and sizes in the stand-in groups of one rank."""
    import torch
    from vllm.distributed import get_dp_group, get_pp_group, get_tp_group, parallel_state

    from weightcached.vllm_compat.solo_rank import become_replica, solo_rank

    config = copy.deepcopy(config)
    become_replica(config, dp_rank)
    with solo_rank(config, rank):
        seen = [torch.distributed.get_rank()]
        seen += [group.rank_in_group for group in (get_dp_group(), get_pp_group(), get_tp_group())]
        expert = parallel_state._EP
        seen += [
            expert.rank_in_group if expert else 0,
            get_dp_group().world_size,
            expert.world_size if expert else 1,
        ]
    return seen


def place_of_worker(config: Any, first_dp_rank: int, local: int, dp_rank: int) -> int:
    """The place that the plug-in works out in the worker that vLLM starts for this rank."""
    from weightcached.vllm_compat.build import place_on_node
    from weightcached.vllm_compat.solo_rank import become_replica

    config = copy.deepcopy(config)
    parallel = config.parallel_config
    local_rank = local % parallel.local_world_size
    # Set by the process of each engine core, before it starts its workers.
    parallel.data_parallel_rank_local = dp_rank - first_dp_rank
    become_replica(config, dp_rank)
    return place_on_node(config.parallel_config, local_rank)


def answer(engine: dict[str, Any]) -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.weight_cache import daemon

    try:
        config = EngineArgs(
            **engine, skip_tokenizer_init=True, distributed_executor_backend="mp", max_model_len=64
        ).create_engine_config()
        daemon._reject_unsupported_parallelism(config.parallel_config)
    except (ValueError, AssertionError) as e:
        return {"refused": str(e)}
    plan = daemon.plan_local_ranks(config.parallel_config)
    tp = config.parallel_config.tensor_parallel_size
    groups = [
        ranks_seen(config, dp_rank, pp_rank * tp + tp_rank) for _, dp_rank, pp_rank, tp_rank in plan
    ]
    places = [place_of_worker(config, plan[0][1], local, dp_rank) for local, dp_rank, _, _ in plan]
    return {"plan": plan, "groups": groups, "places": places}


def main() -> None:
    """Answer on the process's first standard output; vLLM's output goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    out.write(json.dumps([answer(engine) for engine in json.load(sys.stdin)]))
    out.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
