"""weightcached.checkpoint.files chooses the same files as the installed vLLM's default loader."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.conftest import ANSWER_TIMEOUT_S
from weightcached.checkpoint.identity import record_checkpoint
from weightcached.errors import CheckpointError

FORMATS = ("auto", "hf", "safetensors", "mistral", "pt", "npcache")
SHARDS = [f"model-{i}-of-11.safetensors" for i in range(1, 12)]
LAYOUTS: dict[str, tuple[list[str], dict[str, list[str]]]] = {
    "one-file": (["model.safetensors", "config.json"], {}),
    "shards": (SHARDS, {}),
    "shards-and-a-stray-file": (
        [*SHARDS, "stray.safetensors"],
        {"model.safetensors.index.json": SHARDS},
    ),
    "missing-shard": (SHARDS[1:], {"model.safetensors.index.json": SHARDS}),
    "both-formats": (
        ["consolidated.safetensors", *SHARDS],
        {
            "model.safetensors.index.json": SHARDS,
            "consolidated.safetensors.index.json": ["consolidated.safetensors"],
        },
    ),
    "bin": (
        [
            "pytorch_model-1.bin",
            "pytorch_model-2.bin",
            "training_args.bin",
            "optimizer.bin",
            "scheduler.pt",
        ],
        {},
    ),
    "bin-and-safetensors": (["model.safetensors", "pytorch_model.bin", "a.pt"], {}),
    "pt": (["a.pt", "b.pt", "optimizer.pt"], {}),
    "hidden": (["model.safetensors", ".model.safetensors"], {}),
}

# In a child: importing vLLM warns, patches and starts things that the other tests should not meet.
ASK_VLLM = """
import json, os, sys
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.weight_utils import _natural_sort_key
answers = []
for directory, load_format in json.load(sys.stdin):
    loader = DefaultModelLoader(LoadConfig(load_format=load_format))
    try:
        _, files, *_ = loader._prepare_weights(directory, None, None, True, None)
    except (RuntimeError, FileNotFoundError):
        files = []
    answers.append([os.path.basename(file) for file in sorted(files, key=_natural_sort_key)])
with open(sys.argv[1], "w") as out:
    json.dump(answers, out)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layouts")
    for layout, (names, indexes) in LAYOUTS.items():
        (root / layout).mkdir()
        for name in names:
            (root / layout / name).write_bytes(b"content")
        for name, shards in indexes.items():
            (root / layout / name).write_text(
                json.dumps({"weight_map": {shard: shard for shard in shards}})
            )
    return root


@pytest.fixture(scope="module")
def read_by_vllm(made: Path) -> dict[tuple[str, str], list[str]]:
    """The files that the default loader reads, by layout and format, in order; none if it fails."""
    cases = list(itertools.product(LAYOUTS, FORMATS))
    questions = json.dumps([(str(made / layout), load_format) for layout, load_format in cases])
    command = [sys.executable, "-c", ASK_VLLM, str(made / "answers.json")]
    subprocess.run(
        command, input=questions.encode(), check=True, timeout=ANSWER_TIMEOUT_S, capture_output=True
    )
    return dict(zip(cases, json.loads((made / "answers.json").read_text()), strict=True))


@pytest.mark.parametrize("load_format", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_default_loader_reads_the_recorded_files_in_the_recorded_order(
    made: Path, read_by_vllm: dict[tuple[str, str], list[str]], layout: str, load_format: str
) -> None:
    try:
        recorded = [
            file.name
            for file in record_checkpoint(str(made / layout), load_format=load_format).files
        ]
    except CheckpointError:
        recorded = []
    assert recorded == read_by_vllm[layout, load_format]


def test_the_comparison_compares_something(read_by_vllm: dict[tuple[str, str], list[str]]) -> None:
    assert read_by_vllm["shards", "auto"] == SHARDS
    assert sum(map(bool, read_by_vllm.values())) > 20
