"""Placement: the ranks of one node, and refusals. tests/engine compares it with vLLM's layout."""

from __future__ import annotations

from typing import Any

import pytest

from weightcached.config.ranks import Placement, layout_of, needs, place
from weightcached.errors import PlacementError


def ranks(**engine: Any) -> list[tuple[int, int, int, int, int]]:
    """(global, dp, pp, tp, ep) of each local rank."""
    layout = layout_of(engine)
    placed = [layout.place(local) for local in range(layout.local_ranks)]
    return [(p.global_rank, p.dp_rank, p.pp_rank, p.tp_rank, p.ep_rank) for p in placed]


def test_tensor_ranks_come_before_pipeline_ranks_before_replicas() -> None:
    assert ranks(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2) == [
        (0, 0, 0, 0, 0),
        (1, 0, 0, 1, 0),
        (2, 0, 1, 0, 0),
        (3, 0, 1, 1, 0),
        (4, 1, 0, 0, 0),
        (5, 1, 0, 1, 0),
        (6, 1, 1, 0, 0),
        (7, 1, 1, 1, 0),
    ]


def test_expert_ranks_count_within_a_pipeline_stage() -> None:
    engine = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2}
    assert [rank[4] for rank in ranks(**engine, enable_expert_parallel=True)] == [
        0,
        1,
        0,
        1,
        2,
        3,
        2,
        3,
    ]


def test_last_node_of_two_has_the_last_block() -> None:
    assert ranks(tensor_parallel_size=4, nnodes=2, node_rank=1) == [
        (2, 0, 0, 2, 0),
        (3, 0, 0, 3, 0),
    ]


def test_launcher_with_a_start_rank_has_its_own_replicas() -> None:
    engine = {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_start_rank": 2}
    assert ranks(**engine) == [(2, 2, 0, 0, 0), (3, 3, 0, 0, 0)]


def test_rank_within_the_replica_is_what_a_loader_gets() -> None:
    placed = place(
        {"tensor_parallel_size": 2, "data_parallel_size": 2}, ["cpu0", "cpu1", "cpu2", "cpu3"]
    )
    assert placed[3] == ("cpu3", Placement(3, 3, 1, 0, 1, 0, 1))


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ({}, "one rank needs 1"),
        (
            {"tensor_parallel_size": 2, "data_parallel_size": 2},
            "tensor_parallel_size 2 × data_parallel_size 2 needs 4",
        ),
        (
            {"tensor_parallel_size": 4, "nnodes": 2},
            "tensor_parallel_size 4 has 4 ranks, of which this node serves 2",
        ),
    ],
)
def test_need_is_told_with_its_reason(engine: dict[str, Any], text: str) -> None:
    assert needs(engine) == text


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "world_not_divisible": (
        {"tensor_parallel_size": 3, "nnodes": 2},
        "nnodes",
        "nnodes 2 does not divide the 3 ranks of this model: choose one that does",
    ),
    "node_outside": (
        {"tensor_parallel_size": 2, "nnodes": 2, "node_rank": 2},
        "node_rank",
        "node_rank is 2: with nnodes 2 expected 0 to 1",
    ),
    "node_without_nodes": (
        {"node_rank": 1},
        "node_rank",
        "node_rank 1 needs nnodes, the number of nodes",
    ),
    "past_the_end": (
        {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_start_rank": 3},
        "data_parallel_start_rank",
        "data_parallel_start_rank 3 + data_parallel_size_local 2 is 5: data_parallel_size is 4",
    ),
    "rank_past_the_end": (
        {"data_parallel_size": 2, "data_parallel_rank": 2},
        "data_parallel_rank",
        "data_parallel_rank 2 + data_parallel_size_local 1 is 3: data_parallel_size is 2",
    ),
    "external_without_rank": (
        {"data_parallel_size": 2, "data_parallel_external_lb": True},
        "data_parallel_rank",
        "data_parallel_external_lb needs data_parallel_rank",
    ),
    "external_with_several": (
        {"data_parallel_size": 2, "data_parallel_rank": 0, "data_parallel_size_local": 2},
        "data_parallel_size_local",
        "data_parallel_size_local is 2: with data_parallel_rank expected 1",
    ),
    "start_against_node": (
        {"data_parallel_size": 4, "nnodes": 2, "node_rank": 1, "data_parallel_start_rank": 1},
        "data_parallel_start_rank",
        "data_parallel_start_rank 1 contradicts node_rank 1 of 2, which begins with 2",
    ),
    "local_against_nodes": (
        {"data_parallel_size": 4, "nnodes": 2, "data_parallel_size_local": 4},
        "data_parallel_size_local",
        "data_parallel_size_local 4 contradicts nnodes 2, which puts 2 on each node",
    ),
    "eplb": (
        {"enable_eplb": True},
        "enable_eplb",
        "enable_eplb moves experts while serving, cached weights cannot move: leave it out",
    ),
    "context": (
        {"prefill_context_parallel_size": 2},
        "prefill_context_parallel_size",
        "prefill_context_parallel_size 2 cannot be cached: leave it out",
    ),
    "negative": (
        {"node_rank": -1},
        "node_rank",
        "node_rank is -1: expected a whole number, at least 0",
    ),
    "not_a_number": (
        {"tensor_parallel_size": "2"},
        "tensor_parallel_size",
        "tensor_parallel_size is '2': expected a whole number, at least 1",
    ),
    "flag_as_number": (
        {"data_parallel_size": True},
        "data_parallel_size",
        "data_parallel_size is True: expected a whole number, at least 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_laid_out_is_refused_by_name(name: str) -> None:
    engine, key, text = REFUSED[name]
    with pytest.raises(PlacementError) as e:
        layout_of(engine)
    assert (e.value.key, str(e.value)) == (key, text)


def test_number_of_devices_must_be_that_of_the_local_ranks() -> None:
    with pytest.raises(PlacementError) as e:
        place({"tensor_parallel_size": 2}, ["cpu0"])
    assert str(e.value) == "1 devices are listed, tensor_parallel_size 2 needs 2"


def test_placement_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, weightcached.config.ranks, weightcached.cli.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
