"""FlashInfer's autotuning in the loader: vLLM's function and CPU runner, a fake tuner."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import ANSWER_TIMEOUT_S, ENVIRONMENT, ROOT
from tests.engine.test_placement_oracle import model as checkpoint
from tests.fakes.daemon import DaemonProcess, model

ENGINE: dict[str, Any] = {"enforce_eager": True, "max_model_len": 64, "max_num_batched_tokens": 64}


class Tuned(DaemonProcess):
    """A daemon after two loads: with a tuning that works, and with one that fails."""

    def until_served(self) -> None:
        # Two loads, each with vLLM's imports.
        deadline_s = time.monotonic() + 2 * ANSWER_TIMEOUT_S
        assert self.manager
        assert self.process
        while not any("READY=1" in state for state in self.manager.states):
            assert self.process.poll() is None, self.log[-3000:]
            assert time.monotonic() < deadline_s, self.log[-3000:]
            time.sleep(0.2)

    @property
    def files(self) -> dict[Path, Any]:
        """The files written, by directory."""
        return {
            path: json.loads(path.read_text())
            for path in (self.directory / "tuned").rglob("*.json")
        }

    @property
    def expected(self) -> dict[str, Path]:
        """The directories in which engines look, by cache."""
        lines = (self.directory / "expected").read_text().splitlines()
        return {cache: Path(path) for cache, path in (line.split(" ", 1) for line in lines)}


@pytest.fixture(scope="module")
def tuned() -> Iterator[Tuned]:
    base = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))
    works, fails = checkpoint(base / "works"), checkpoint(base / "TUNING_FAILS")
    daemon = Tuned(base, [model("works", works, **ENGINE), model("fails", fails, **ENGINE)])
    daemon.loader_command = f"{shlex.quote(sys.executable)} -m tests.engine.tuning_loader"
    daemon.env = ENVIRONMENT | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/fakes")]),
        "VLLM_HAS_FLASHINFER_CUBIN": "1",
        "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": str(base / "tuned"),
        "TUNING_EXPECTED": str(base / "expected"),
    }
    try:
        daemon.launch().until_served()
        yield daemon
    finally:
        daemon.close()
        shutil.rmtree(base)


def test_tuned_file_is_where_an_engine_looks(tuned: Tuned) -> None:
    ((path, table),) = tuned.files.items()
    assert path == tuned.expected["works/target"] / "autotune_configs_dp0_rank0.json"
    assert table["tuned"] == [1, ENGINE["max_num_batched_tokens"]]


def test_dummy_run_is_on_the_mapped_generation(tuned: Tuned) -> None:
    (table,) = tuned.files.values()
    (cache,) = [cache for cache in tuned.status().caches if cache.name == "works/target"]
    assert table["bytes_mapped"] >= cache.bytes > 0


def test_tuning_that_fails_is_told_and_fails_no_load(tuned: Tuned) -> None:
    assert [(cache.name, cache.state, cache.error) for cache in tuned.status().caches] == [
        ("works/target", "ready", ""),
        ("fails/target", "ready", ""),
    ]
    (said,) = [line for line in tuned.log.splitlines() if "was not tuned" in line]
    assert "cache=fails/target" in said
    assert said.endswith(
        "FlashInfer was not tuned, the first engine does it: RuntimeError: no tactic works"
    )
