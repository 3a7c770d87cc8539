"""One rank of several small models, loaded with its peers at a meeting place and then alone:
digests of all tensors.

    python -m tests.engine.group_ranks RANK PORT <cases.json

A case is {"name": …, "role": …, "engine": {…}}. Prints {case: [digests in the group, digests
alone]}.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.engine.rank_tensors import digests


def load(job: Any, meeting: Any) -> dict[str, list[Any]]:
    from weightcached.vllm_compat import solo_rank
    from weightcached.vllm_compat.group_rank import group_rank

    config, model_config = solo_rank.configs_of(solo_rank.create_vllm_config(job), job.role)
    if meeting is None:
        with solo_rank.solo_rank(config, job.rank):
            return digests(
                solo_rank.load_for_stage(config, model_config, "loaded", lambda nbytes: None)
            )
    with group_rank(config, job, meeting, lambda: None) as peers:
        found = digests(
            solo_rank.load_for_stage(config, model_config, "loaded", lambda nbytes: None)
        )
        peers.part("loaded")
        return found


def both(case: dict[str, Any], rank: int, port: int) -> list[dict[str, list[Any]]]:
    from weightcached.wire.loader_job import LoaderJob, Meeting

    job = LoaderJob(
        device=f"cpu{rank}", cache=f"{case['name']}/{case['role']}", role=case["role"], generation=1, spec_digest="",
        engine=case["engine"], rank=rank, boot_id="", socket_fd=0,
    )  # fmt: skip
    meeting = Meeting(host="127.0.0.1", port=port, timeout_s=900, devices=["cpu0", "cpu1"])
    return [load(job, meeting), load(job, None)]


def main() -> None:
    """Load every case, each at a port of its own."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    cases = json.load(sys.stdin)
    out.write(
        json.dumps({case["name"]: both(case, rank, port + n) for n, case in enumerate(cases)})
    )
    out.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
