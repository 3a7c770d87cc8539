"""The remembered size of a KV cache: taken only by a worker whose budget is that of the measurement."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from weightcached.vllm_compat import build, first_start
from weightcached.vllm_compat.first_start import Budget

GIB = 1 << 30
MIB = 1 << 20
SIZE = 96 * GIB
BUDGET = Budget(free_bytes=124 * GIB, external_bytes=15 * GIB, sources=["zero_copy"])


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker, whose engine has one rank."""
    monkeypatch.setattr(build, "all_ranks", lambda ok, role: ok)
    monkeypatch.setattr(first_start, "_settled", None)
    # Removed after the test, whoever sets it.
    monkeypatch.setenv(first_start.ENVIRONMENT, "")


def config(**parallel: Any) -> Any:
    of_one_rank = {
        "data_parallel_size": 1, "nnodes": 1, "rank": 0, "distributed_executor_backend": "mp",
    }  # fmt: skip
    return SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None),
        parallel_config=SimpleNamespace(**{**of_one_rank, **parallel}),
    )


def taken(made: Any, budget: Budget = BUDGET) -> int | None:
    first_start.settle(made, budget)
    size: int | None = made.cache_config.kv_cache_memory_bytes
    return size


def remembered(budget: Budget = BUDGET, **changed: Any) -> dict[str, Any]:
    return {"kv_cache_bytes": SIZE, "ranks": {"0": msgspec.to_builtins(budget)}, **changed}


def replaced(**changed: Any) -> Budget:
    return msgspec.structs.replace(BUDGET, **changed)


def test_what_one_engine_measured_the_next_one_takes(tmp_path: Path) -> None:
    first_start.begin(str(tmp_path), {})
    assert taken(config()) is None
    ranks = first_start.measured(tmp_path)
    assert ranks == {"0": msgspec.to_builtins(BUDGET)}
    (tmp_path / "2").mkdir()
    first_start.begin(str(tmp_path / "2"), {"kv_cache_bytes": SIZE, "ranks": ranks})
    assert taken(config()) == SIZE
    # It has measured nothing: the older measurement stays, and is not compared with itself.
    assert first_start.measured(tmp_path / "2") == {}


@pytest.mark.parametrize(
    ("now", "same"),
    [
        (replaced(free_bytes=124 * GIB + 60 * MIB), True),
        (replaced(free_bytes=124 * GIB - 60 * MIB), True),
        (replaced(free_bytes=124 * GIB + 65 * MIB), False),
        (replaced(free_bytes=64 * GIB), False),
        (replaced(external_bytes=15 * GIB + 60 * MIB), True),
        (replaced(external_bytes=30 * GIB), False),
        (replaced(external_bytes=0), False),
        (replaced(sources=["disk"]), False),
        (replaced(sources=["zero_copy", "disk"]), False),
    ],
)
def test_budget_is_the_same_both_ways_round(tmp_path: Path, now: Budget, same: bool) -> None:
    for then, present in ((BUDGET, now), (now, BUDGET)):
        first_start.begin(str(tmp_path), remembered(then))
        assert taken(config(), present) == (SIZE if same else None)


def test_all_ranks_take_it_or_all_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "all_ranks", lambda ok, role: False)
    both = {"0": msgspec.to_builtins(BUDGET), "1": msgspec.to_builtins(BUDGET)}
    first_start.begin(str(tmp_path), remembered(ranks=both))
    assert [taken(config(rank=rank)) for rank in (0, 1)] == [None, None]
    assert first_start.measured(tmp_path) == both


def test_rank_that_nothing_is_known_of_asks_the_others_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep them waiting."""
    asked: list[bool] = []

    def all_ranks(ok: bool, role: str) -> bool:
        asked.append(ok)
        return ok

    monkeypatch.setattr(build, "all_ranks", all_ranks)
    first_start.begin(str(tmp_path), remembered())
    assert (taken(config(rank=1)), asked) == (None, [False])


@pytest.mark.parametrize(
    "known",
    [
        # As an older weightcached kept it.
        {"kv_cache_bytes": SIZE, "free_bytes": 124 * GIB, "vllm": "0.33.0", "torch": "2.11"},
        {"kv_cache_bytes": None, "ranks": remembered()["ranks"]},
        {"kv_cache_bytes": SIZE, "ranks": {"0": {"free_bytes": 124 * GIB}}},
        {"kv_cache_bytes": SIZE, "ranks": []},
        {"kv_cache_bytes": "much", "ranks": remembered()["ranks"]},
    ],
)
def test_what_is_no_such_record_is_not_used(tmp_path: Path, known: dict[str, Any]) -> None:
    first_start.begin(str(tmp_path), known)
    assert taken(config()) is None
    assert first_start.measured(tmp_path)


def test_weights_from_disk_after_all_are_measured_and_not_remembered(tmp_path: Path) -> None:
    for known in (remembered(), {}):
        first_start.begin(str(tmp_path), known)
        made = config()
        taken(made)
        first_start.changed()
        assert made.cache_config.kv_cache_memory_bytes is None
        assert first_start.measured(tmp_path) == {}


def test_size_that_the_user_gives_is_neither_replaced_nor_remembered(tmp_path: Path) -> None:
    first_start.begin(str(tmp_path), remembered())
    made = config()
    made.cache_config.kv_cache_memory_bytes = 7
    assert taken(made) == 7
    first_start.changed()
    assert made.cache_config.kv_cache_memory_bytes == 7
    assert first_start.measured(tmp_path) == {}


@pytest.mark.parametrize(
    "parallel",
    [{"data_parallel_size": 2}, {"nnodes": 2}, {"distributed_executor_backend": "ray"}],
)
def test_engine_whose_workers_meet_others_measures(
    tmp_path: Path, parallel: dict[str, Any]
) -> None:
    first_start.begin(str(tmp_path), remembered())
    assert taken(config(**parallel)) is None


def test_engine_of_no_service_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(first_start.ENVIRONMENT)
    assert taken(config()) is None
    first_start.changed()


def test_directory_that_is_gone_keeps_no_engine_from_its_start(tmp_path: Path) -> None:
    first_start.begin(str(tmp_path / "gone"), {})
    assert taken(config()) is None
    first_start.changed()
    assert first_start.measured(tmp_path / "gone") == {}
    assert os.listdir(tmp_path) == []
