"""Placement against vLLM's own functions, for generated layouts, in one child process."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.checkpoints import llama_config, with_experts, write_checkpoint
from tests.engine.conftest import ANSWER_TIMEOUT_S, ENVIRONMENT, ROOT
from weightcached.config.ranks import layout_of
from weightcached.errors import PlacementError

EXPERTS = 8


def model(path: Path, *, experts: int = 0) -> Path:
    config = llama_config(
        hidden=64,
        intermediate=64,
        layers=4,
        heads=8,
        kv_heads=8,
        vocab=128,
        dtype="bfloat16",
        tied=False,
    )
    write_checkpoint(path, with_experts(config, experts) if experts else config)
    return path


def layouts() -> list[dict[str, Any]]:
    """At least 40 that can be laid out, several for each way to say it, and some that cannot."""
    found: list[dict[str, Any]] = []
    for tp, pp, dp in itertools.product((1, 2, 4), (1, 2), (1, 2, 4)):
        sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": dp}
        if tp * pp * dp <= 8:
            found += [sizes, sizes | {"enable_expert_parallel": True}]
        for nnodes in (2, 4):
            if tp * pp * dp >= nnodes:
                found.append(
                    sizes | {"nnodes": nnodes, "node_rank": nnodes - 1, "master_addr": "10.0.0.1"}
                )
        if dp == 4:
            local = {"data_parallel_size_local": 2, "data_parallel_address": "10.0.0.1"}
            found.append(
                sizes | local | {"data_parallel_start_rank": 2, "enable_expert_parallel": True}
            )
            found.append(sizes | {"data_parallel_size_local": 4, "data_parallel_start_rank": 2})
    found.append({"data_parallel_size": 4, "data_parallel_rank": 3, "tensor_parallel_size": 2})
    found.append({"tensor_parallel_size": 3, "nnodes": 2})
    found.append({"tensor_parallel_size": 2, "nnodes": 2, "node_rank": 2})
    return found


@pytest.fixture(scope="module")
def answers(
    tmp_path_factory: pytest.TempPathFactory,
) -> list[tuple[dict[str, Any], bool, dict[str, Any]]]:
    """(engine arguments, whether the model has experts, vLLM's answer)."""
    base = tmp_path_factory.mktemp("layouts")
    moe, dense = str(model(base / "moe", experts=EXPERTS)), str(model(base / "dense"))
    asked = [{"model": moe, **layout} for layout in layouts()]
    asked += [
        {"model": dense, "data_parallel_size": 2, "tensor_parallel_size": tp} for tp in (1, 2)
    ]
    import os

    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.placement_oracle"], input=json.dumps(asked), capture_output=True,
        text=True, check=False, timeout=ANSWER_TIMEOUT_S, cwd=ROOT, env=os.environ | ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answered = json.loads(done.stdout)
    return [
        (engine, engine["model"] == moe, answer)
        for engine, answer in zip(asked, answered, strict=True)
    ]


def test_ranks_are_those_that_vllm_assigns(
    answers: list[tuple[dict[str, Any], bool, dict[str, Any]]],
) -> None:
    compared = 0
    for engine, has_experts, answer in answers:
        if "refused" in answer:
            continue
        compared += 1
        layout = layout_of(engine)
        ours = [layout.place(local) for local in range(layout.local_ranks)]
        assert [[p.local, p.dp_rank, p.pp_rank, p.tp_rank] for p in ours] == answer["plan"], engine
        assert [p.local for p in ours] == answer["places"], engine
        if has_experts:
            # Layers always have an expert group; it matters only with expert parallelism.
            seen = [
                [*group[:4], group[4] if layout.ep_size > 1 else 0] for group in answer["groups"]
            ]
            assert [
                [p.global_rank, p.dp_rank, p.pp_rank, p.tp_rank, p.ep_rank] for p in ours
            ] == seen, engine
            assert {group[5] for group in answer["groups"]} == {layout.dp_size}, engine
            if layout.ep_size > 1:
                assert {group[6] for group in answer["groups"]} == {layout.ep_size}, engine
        else:
            replicas = [[p.rank, 0, p.pp_rank, p.tp_rank, 0, 1, 1] for p in ours]
            assert replicas == answer["groups"], "replicas of a dense model are independent"
    assert compared >= 40


def test_what_vllm_refuses_is_refused_here(
    answers: list[tuple[dict[str, Any], bool, dict[str, Any]]],
) -> None:
    refused = [engine for engine, _, answer in answers if "refused" in answer]
    assert len(refused) >= 4
    for engine in refused:
        with pytest.raises(PlacementError):
            layout_of(engine)
