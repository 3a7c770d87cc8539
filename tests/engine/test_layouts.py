"""Engines of several ranks, one process each: mapped, they decode as one rank from disk."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.checkpoints import llama_config, with_experts, write_checkpoint
from tests.engine.conftest import ANSWER_TIMEOUT_S, Engines, Service, run_tree
from tests.engine.replicas import PROMPTS, TOKENS

# Engine arguments by model. In float32, because the ranks of a mixture add partial sums, and in
# bfloat16 these are rounded differently from one rank's.
LAYOUTS: dict[str, dict[str, Any]] = {
    "dense": {"pipeline_parallel_size": 2, "data_parallel_size": 2},
    "mixture": {"data_parallel_size": 2, "enable_expert_parallel": True, "dtype": "float32"},
}
DEVICES = {"dense": ["cpu0", "cpu1", "cpu2", "cpu3"], "mixture": ["cpu0", "cpu1"]}
ALL = DEVICES["dense"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("layouts")
    config = llama_config(
        hidden=256,
        intermediate=128,
        layers=4,
        heads=8,
        kv_heads=4,
        vocab=1024,
        dtype="bfloat16",
        tied=False,
    )
    write_checkpoint(base / "dense", config, seed=4)
    write_checkpoint(base / "mixture", with_experts(config, 8), seed=5)
    return {name: base / name for name in LAYOUTS}


@pytest.fixture(scope="module")
def serving(service: Service, models: dict[str, Path]) -> Iterator[Service]:
    """Every rank loaded alone, by the daemon of its device."""
    service.manifest(
        *(
            {
                "name": name,
                "devices": DEVICES[name],
                "engine": {"model": str(models[name]), **layout},
            }
            for name, layout in LAYOUTS.items()
        )
    )
    try:
        service.ctl("start", *ALL)
        yield service
    finally:
        service.ctl("stop", *ALL, check=False)


@pytest.fixture(scope="module")
def attached(serving: Service, models: dict[str, Path]) -> tuple[dict[str, Any], str]:
    """The tokens of each replica, by model, and the log; the engines run one after the other."""
    questions = [
        {"engine": {
            "model": str(models[name]), "load_format": "ipc_cache", "model_loader_extra_config": {"fallback": False},
            **layout,
        }}
        for name, layout in LAYOUTS.items()
    ]  # fmt: skip
    done = run_tree(
        [sys.executable, "-m", "tests.engine.replicas"],
        # One core for each rank, as far as there are any: left alone, vLLM wants a NUMA node for
        # each.
        serving.env | {"VLLM_CPU_OMP_THREADS_BIND": "0|1|0|1"},
        stdin="".join(json.dumps(question) + "\n" for question in questions),
        timeout_s=2 * ANSWER_TIMEOUT_S,
    )
    answers = [
        line.removeprefix("ANSWER ")
        for line in done.stdout.splitlines()
        if line.startswith("ANSWER ")
    ]
    assert len(answers) == len(LAYOUTS), done.stderr[-5000:]
    return dict(zip(LAYOUTS, map(json.loads, answers), strict=True)), done.stderr


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_replica_decodes_as_one_rank_from_disk(
    engines: Engines, attached: tuple[dict[str, Any], str], models: dict[str, Path], name: str
) -> None:
    dtype = LAYOUTS[name].get("dtype", "bfloat16")
    disk = engines.ask(
        engine={"model": str(models[name]), "dtype": dtype}, prompts=PROMPTS, tokens=TOKENS, alone=True
    )["tokens"]  # fmt: skip
    engines.ask(close=True)
    assert len({tuple(tokens) for tokens in disk}) == PROMPTS, (
        "prompts that decode alike would hide wrong weights"
    )
    answers, log = attached
    assert answers[name].get("tokens") == [disk, disk], answers[name].get("error") or log[-5000:]
    assert log.count(f"attached {name}/target generation 1") == len(DEVICES[name])


def test_every_worker_asked_the_daemon_that_the_plan_names(
    attached: tuple[dict[str, Any], str], serving: Service
) -> None:
    planned = json.loads(serving.ctl("plan", "--json").stdout)["ranks"]
    expected = {
        device: {f"{row['model']}/target": 1 for row in planned if row["device"] == device} for device in ALL
    }  # fmt: skip
    assert {device: serving.counters(device).attaches for device in ALL} == expected
