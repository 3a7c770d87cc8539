"""`weightcachectl plan`: ranks and sizes of real checkpoints, before anything loads."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from weightcached.cli.weightcachectl import main

MIB = 1 << 20


def checkpoint(path: Path, **tensors: int) -> Path:
    """A safetensors checkpoint of uint8 tensors with these sizes; values are holes."""
    path.mkdir()
    (path / "config.json").write_text("{}")
    header: dict[str, Any] = {}
    end = 0
    for name, nbytes in tensors.items():
        header[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [end, end + nbytes]}
        end += nbytes
    raw = json.dumps(header).encode()
    with open(path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)
    return path


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dense model on two devices, and one with experts and a draft on four; two are shared."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    dense = checkpoint(tmp_path / "dense", **{"model.w": 8 * MIB})
    moe = checkpoint(
        tmp_path / "moe", **{"model.w": 4 * MIB, "model.layers.0.experts.3.w1": 32 * MIB}
    )
    experts = {
        "model": str(moe), "tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True,
    }  # fmt: skip
    models = [
        {
            "name": "dense",
            "devices": ["cpu0", "cpu1"],
            "engine": {"model": str(dense), "pipeline_parallel_size": 2},
        },
        {"name": "moe", "devices": ["cpu1", "cpu2", "cpu3", "cpu4"], "engine": experts},
    ]
    path = tmp_path / "weightcached/manifest.yaml"
    path.parent.mkdir()
    path.write_text(json.dumps({"version": 1, "models": models}))
    return path


def test_table_has_every_rank_with_its_size_and_the_sum_of_a_shared_device(manifest: Path) -> None:
    result = CliRunner().invoke(main, ["plan"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["MODEL", "ROLE", "DEVICE", "RANK", "DP", "PP", "TP", "EP", "SIZE"],
        ["dense", "target", "cpu0", "0", "0", "0", "0", "0", "about", "4.0", "MiB"],
        ["dense", "target", "cpu1", "1", "0", "1", "0", "0", "about", "4.0", "MiB"],
        ["moe", "target", "cpu1", "0", "0", "0", "0", "0", "about", "10.0", "MiB"],
        ["moe", "target", "cpu2", "1", "0", "0", "1", "1", "about", "10.0", "MiB"],
        ["moe", "target", "cpu3", "2", "1", "0", "0", "2", "about", "10.0", "MiB"],
        ["moe", "target", "cpu4", "3", "1", "0", "1", "3", "about", "10.0", "MiB"],
        ["cpu1:", "about", "14.0", "MiB", "in", "2", "models"],
    ]


def test_json_has_the_same(manifest: Path) -> None:
    ranks = json.loads(CliRunner().invoke(main, ["plan", "--json"]).stdout)["ranks"]
    assert ranks[-1] == {
        "model": "moe", "role": "target", "device": "cpu4", "local": 3, "global_rank": 3, "dp_rank": 1, "pp_rank": 0,
        "tp_rank": 1, "ep_rank": 3, "rank": 1, "about_bytes": 10 * MIB,
    }  # fmt: skip


def test_draft_and_model_on_all_are_shown_and_a_missing_checkpoint_is_no_fault(
    manifest: Path, tmp_path: Path
) -> None:
    (tmp_path / "dense/model.safetensors").unlink()
    engine = {
        "model": str(tmp_path / "dense"),
        "speculative_config": {"method": "eagle", "model": "org/draft"},
    }
    manifest.write_text(
        json.dumps({"version": 1, "models": [{"name": "m", "devices": "all", "engine": engine}]})
    )
    result = CliRunner().invoke(main, ["plan"])
    assert result.exit_code == 0
    assert result.stderr.startswith("weightcachectl: m: no size: ")
    assert [line.split() for line in result.stdout.splitlines()[1:]] == [
        ["m", "target", "all", "0", "0", "0", "0", "0", "unknown"],
        ["m", "draft", "all", "0", "0", "0", "0", "0", "unknown"],
    ]


DEVICES = "; 'weightcachectl devices' prints their names"
PLAN = "; then 'weightcachectl plan' shows every rank"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "world_not_divisible": (
        {"tensor_parallel_size": 3, "nnodes": 2},
        f"engine.nnodes: nnodes 2 does not divide the 3 ranks of this model: choose one that does{PLAN}",
    ),
    "too_few_devices": (
        {"tensor_parallel_size": 2, "data_parallel_size": 2},
        f"devices: 1 devices are listed, tensor_parallel_size 2 × data_parallel_size 2 needs 4{DEVICES}",
    ),
    "past_the_last_replica": (
        {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_start_rank": 3},
        "engine.data_parallel_start_rank: data_parallel_start_rank 3 + data_parallel_size_local 2 is 5: "
        f"data_parallel_size is 4{PLAN}",
    ),
    "moving_experts": (
        {"enable_expert_parallel": True, "enable_eplb": True},
        f"engine.enable_eplb: enable_eplb moves experts while serving, cached weights cannot move: leave it out{PLAN}",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_laid_out_is_refused_in_one_line_with_the_next_command(
    manifest: Path, tmp_path: Path, name: str
) -> None:
    layout, said = REFUSED[name]
    engine = {"model": str(tmp_path / "dense"), **layout}
    manifest.write_text(
        json.dumps({"version": 1, "models": [{"name": "m", "devices": ["cpu0"], "engine": engine}]})
    )
    result = CliRunner().invoke(main, ["plan"])
    assert (result.exit_code, result.stdout) == (78, "")
    assert result.stderr == f"weightcachectl: {manifest}:1: models[0].{said}\n"
