"""Every tensor of a rank that was loaded alone is byte-equal to the same rank's in a real group."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.engine.conftest import ANSWER_TIMEOUT_S, ENVIRONMENT, ROOT
from tests.engine.deepseek import write_deepseek
from tests.engine.test_placement_oracle import MIXTRAL, model

RANKS = 4
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dense_tp2": ("dense", 2, {"tensor_parallel_size": 2}),
    "dense_tp4": ("dense", 4, {"tensor_parallel_size": 4}),
    "dense_pp2_tp2": ("dense", 4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    "moe_tp4": ("moe", 4, {"tensor_parallel_size": 4}),
    "moe_ep4": ("moe", 4, {"tensor_parallel_size": 4, "enable_expert_parallel": True}),
    "moe_dp2_tp2_ep4": (
        "moe",
        4,
        {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True},
    ),
    "mla_tp4": ("mla", 4, {"tensor_parallel_size": 4}),
    "mla_ep4": ("mla", 4, {"tensor_parallel_size": 4, "enable_expert_parallel": True}),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[dict[str, Any]]]]:
    """By rank, by layout: digests in the group, and alone."""
    base = tmp_path_factory.mktemp("ranks")
    models = {
        "dense": model(base / "dense"), "moe": model(base / "moe", **MIXTRAL), "mla": write_deepseek(base / "mla"),
    }  # fmt: skip
    common = {"max_model_len": 64, "enforce_eager": True}
    cases = [
        {"name": name, "world": world, "engine": {"model": str(models[which]), **common, **sizes}}
        for name, (which, world, sizes) in LAYOUTS.items()
    ]
    # Another instance each: vLLM would use shared memory among ranks of one, which needs an engine around it.
    environment = [
        os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": "1", "VLLM_DIST_IDENT": f"r{n}"} for n in range(RANKS)
    ]
    with contextlib.ExitStack() as stack:
        children = []
        for rank in range(RANKS):
            log = stack.enter_context(open(base / f"log{rank}", "wb"))
            command = [sys.executable, "-m", "tests.engine.rank_tensors", str(rank), str(base)]
            child = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment[rank],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            stack.callback(child.wait)
            stack.callback(child.kill)
            children.append(child)
            assert child.stdin
            child.stdin.write(json.dumps(cases))
            child.stdin.close()
            child.stdin = None
        answers = [child.communicate(timeout=ANSWER_TIMEOUT_S)[0] for child in children]
    said = [(base / f"log{rank}").read_text()[-2000:] for rank in range(RANKS)]
    assert [child.returncode for child in children] == [0] * RANKS, "\n".join(said)
    return [json.loads(answer) for answer in answers]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_solo_rank_equals_the_rank_in_a_group(loaded: list[dict[str, list[dict[str, Any]]]], layout: str) -> None:
    world = LAYOUTS[layout][1]
    seen = []
    for rank in range(world):
        grouped, solo = loaded[rank][layout]
        assert len(grouped) > 5
        assert solo == grouped
        if layout.startswith("mla"):
            assert any(name.endswith("self_attn.fused_qkv_a_proj.weight") for name in solo), "latent attention it is"
        seen.append(json.dumps(solo, sort_keys=True))
    assert len(set(seen)) == world, "ranks that hold the same would hide a wrong rank"
