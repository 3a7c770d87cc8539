"""What the loader records as read is what the kernel saw it open, below the checkpoint's root."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench.checkpoints import llama_config, write_checkpoint
from tests.engine.conftest import ANSWER_TIMEOUT_S, ENVIRONMENT, ROOT
from tests.fakes.drafts import Maker, Shape, write_eagle3, write_llama, write_mtp

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
# Engine arguments, files read and names looked for in vain, of the checkpoint of this name.
EXPECTED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "shards": ({}, [*SHARDS, INDEX], []),
    "threads": (
        {"model_loader_extra_config": {"enable_multithread_load": True}}, [*SHARDS, INDEX], [],
    ),
    "both": ({}, ["consolidated.safetensors"], ["consolidated.safetensors.index.json"]),
    "bin": ({}, ["pytorch_model.bin"], []),
    "pt": ({"load_format": "pt"}, ["model.pt"], []),
    "dense": (
        {"runner": "pooling"},
        ["model.safetensors", "2_Dense/config.json", "modules.json", "2_Dense/pytorch_model.bin"],
        ["2_Dense/model.safetensors", INDEX],
    ),
    "eagle3": ({}, ["model.safetensors"], [INDEX]),
    "mtp": ({}, ["model.safetensors"], [INDEX]),
}  # fmt: skip


def make(base: Path) -> list[dict[str, Any]]:
    """The checkpoints, beside each what nobody reads. Returns the cases by EXPECTED's order."""
    config = llama_config(
        hidden=64, intermediate=128, layers=2, heads=2, kv_heads=2, vocab=128, dtype="bfloat16",
        tied=False,
    )  # fmt: skip
    write_checkpoint(base / "shards", config, shards=3)
    write_checkpoint(base / "one", config)
    weights = load_file(base / "one/model.safetensors")
    for name in ("threads", "both"):
        shutil.copytree(base / "shards", base / name)
    shutil.copy(base / "one/model.safetensors", base / "both/consolidated.safetensors")
    for name, file in (("bin", "pytorch_model.bin"), ("pt", "model.pt")):
        (base / name).mkdir()
        shutil.copy(base / "one/config.json", base / name)
        torch.save(weights, base / name / file)
    dense(base)
    maker = Maker(Shape())
    target = write_llama(base / "target", maker)
    write_eagle3(base / "eagle3", maker)
    write_mtp(base / "mtp", maker)
    cases: list[dict[str, Any]] = []
    for name, (arguments, _, _) in EXPECTED.items():
        # What training leaves behind, and a Git LFS pointer.
        for folder, content in (("checkpoint-500", b"weights"), ("original", b"version https://")):
            (base / name / folder).mkdir()
            (base / name / folder / "model.safetensors").write_bytes(content)
        engine = {"model": str(base / name), **arguments}
        role = "target"
        if name in ("eagle3", "mtp"):
            role = "draft"
            speculative = {"method": name, "num_speculative_tokens": 1}
            if name == "eagle3":
                engine, speculative = (
                    {"model": str(target)},
                    speculative | {"model": str(base / name)},
                )
            engine["speculative_config"] = speculative
        cases.append({"engine": engine, "role": role})
    return cases


def dense(base: Path) -> None:
    """An embedding model with a projection in a sub-folder, as sentence-transformers saves it."""
    root = base / "dense"
    shutil.copytree(base / "one", root)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense")]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules)
    ]
    (root / "modules.json").write_text(json.dumps(entries))
    (root / "1_Pooling").mkdir()
    (root / "1_Pooling/config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (root / "2_Dense").mkdir()
    (root / "2_Dense/config.json").write_text('{"in_features": 64, "out_features": 32}')
    projection = {"linear.weight": torch.ones(32, 64), "linear.bias": torch.zeros(32)}
    torch.save(projection, root / "2_Dense/pytorch_model.bin")


OPEN = re.compile(r'open(?:at2?)?\((?:[^,"]+, )?"([^"]*)", .*\) += (-?\d+)')


def opened(trace: Path, root: str) -> Iterator[set[str]]:
    """Of each load, the files below any root that it opened and got."""
    names: set[str] | None = None
    for line in trace.read_text(errors="replace").splitlines():
        call = OPEN.search(line)
        if call is None:
            continue
        path, result = call[1], int(call[2])
        if path == "/begin":
            names = set()
        elif path == "/end" and names is not None:
            yield names
            names = None
        elif names is not None and result >= 0 and path.startswith(root) and os.path.isfile(path):
            names.add(path)


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], set[str]]]:
    """By name: what the watch recorded, and what strace saw."""
    base = tmp_path_factory.mktemp("watched")
    cases = make(base)
    trace, out = base / "trace", base / "out.json"
    command = [
        "strace", "-f", "--seccomp-bpf", "-qq", "-s", "4096", "-e", "trace=open,openat,openat2", "-o", str(trace),
        sys.executable, "-m", "tests.engine.watched_loads", str(out),
    ]  # fmt: skip
    done = subprocess.run(
        command, input=json.dumps(cases).encode(), env=os.environ | ENVIRONMENT, cwd=ROOT,
        capture_output=True, timeout=ANSWER_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    seen = list(opened(trace, str(base)))
    return dict(zip(EXPECTED, zip(json.loads(out.read_text()), seen, strict=True), strict=True))


@pytest.mark.parametrize("name", EXPECTED)
def test_files_recorded_are_those_that_the_kernel_saw_opened(
    loads: dict[str, tuple[dict[str, Any], set[str]]], name: str
) -> None:
    recorded, seen = loads[name]
    assert {os.path.join(recorded["root"], file) for file in recorded["read"]} == seen
    _, read, absent = EXPECTED[name]
    assert (recorded["read"], recorded["absent"], recorded["unread"]) == (read, absent, [])
