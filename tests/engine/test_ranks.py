"""Two tensor-parallel ranks over gloo: wherever one of them fails, both take the same path."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.checkpoints import llama_config, write_checkpoint
from tests.engine.conftest import ANSWER_TIMEOUT_S, ENVIRONMENT, ROOT

# The fault of one rank, from the first step to the last, and the code of its reason.
FAULTS = {
    "unforeseen-while-asking": "attach-failed",
    "checkpoint": "checkpoint",
    "absent-daemon": "no-daemon",
    "wrong-owner": "runtime-path",
    "hangs-up": "connection-lost",
    "truncated": "protocol",
    "silent": "timeout",
    "mismatch": "key-mismatch",
    "loading": "still-loading",
    "failed": "failed",
    "stage": "key-mismatch",
    "unsupported-quantization": "unsupported-quantization",
    "unforeseen-while-binding": "attach-failed",
}
WHILE_BINDING = ("unsupported-quantization", "unforeseen-while-binding")
OPTIONS = {"fallback_load_format": "user_disk", "state_timeout_s": 0.3}
# Without a daemon an engine that may not fall back waits for one.
OPTIONS_OF = {"absent-daemon": {"connect_timeout_s": 0.3}}


class Ranks:
    """Both ranks' processes."""

    def __init__(self, model: Path, base: Path) -> None:
        # Where they meet: until both have imported vLLM, a port could be somebody else's.
        store = str(base / "store")
        self._logs = [base / f"log-{rank}" for rank in (0, 1)]
        self.processes = []
        for rank, path in enumerate(self._logs):
            with open(path, "w", encoding="utf-8") as log:
                command = [sys.executable, "-m", "tests.engine.ranks", str(rank), store, str(model)]
                self.processes.append(
                    subprocess.Popen(
                        command, env=os.environ | ENVIRONMENT, cwd=ROOT, text=True, stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE, stderr=log,
                    )
                )  # fmt: skip

    def ask(self, *cases: str, **options: Any) -> list[dict[str, Any]]:
        """One case a rank; the answers in order."""
        for process, case in zip(self.processes, cases, strict=True):
            assert process.stdin is not None
            question = {"case": case, "options": OPTIONS | OPTIONS_OF.get(case, {}) | options}
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        return [self._answer(rank) for rank in (0, 1)]

    def _answer(self, rank: int) -> dict[str, Any]:
        stdout = self.processes[rank].stdout
        assert stdout is not None
        assert select.select([stdout], [], [], ANSWER_TIMEOUT_S)[0], (
            f"rank {rank} waits for the other one"
        )
        line = stdout.readline()
        assert line.startswith("ANSWER "), self._logs[rank].read_text(encoding="utf-8")[-3000:]
        answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
        return answer

    def close(self) -> None:
        for process in self.processes:
            process.communicate(timeout=ANSWER_TIMEOUT_S)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    base = tmp_path_factory.mktemp("ranks")
    config = llama_config(
        hidden=64,
        intermediate=128,
        layers=2,
        heads=4,
        kv_heads=2,
        vocab=256,
        dtype="bfloat16",
        tied=False,
    )
    write_checkpoint(base / "model", config)
    ranks = Ranks(base / "model", base)
    yield ranks
    ranks.close()


def test_both_ranks_map_when_both_can(ranks: Ranks) -> None:
    for answer in ranks.ask("ready", "ready"):
        assert answer["mapped"], answer
        assert (answer["memory"], answer["counted"]) == (4096, {})


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_both_ranks_load_from_disk_when_one_cannot_map(
    ranks: Ranks, fault: str, failing: int
) -> None:
    answers = ranks.ask(*[fault if rank == failing else "ready" for rank in (0, 1)])
    assert [answer.get("loaded") for answer in answers] == [["user_disk", {}]] * 2, answers
    assert [answer["memory"] for answer in answers] == [4096 if fault in WHILE_BINDING else 0] * 2
    assert answers[failing]["counted"] == {FAULTS[fault]: 1}
    assert answers[1 - failing]["counted"] == {"another-rank": 1}
    verb = "failed to attach" if fault in WHILE_BINDING else "cannot attach"
    assert answers[1 - failing]["log"] == [
        f"loading from disk (user_disk): another rank of this engine {verb}"
    ]


@pytest.mark.parametrize(
    "fault", ["absent-daemon", "unforeseen-while-asking", "unsupported-quantization"]
)
def test_both_ranks_raise_when_one_cannot_map_and_fallback_is_off(ranks: Ranks, fault: str) -> None:
    here, there = ranks.ask("ready", fault, fallback=False)
    assert here["error"][0] == "WeightCacheUnavailableError"
    assert here["error"][1].startswith("another rank of this engine ")
    assert there["counted"] == {FAULTS[fault]: 1}
    assert "error" in there


@pytest.mark.parametrize("failing", [0, 1])
def test_both_ranks_end_when_one_has_no_room_for_a_load_from_disk(
    ranks: Ranks, failing: int
) -> None:
    answers = ranks.ask(*["no-room" if rank == failing else "ready" for rank in (0, 1)])
    assert [answer["error"][0] for answer in answers] == ["OutOfDeviceMemoryError"] * 2
    assert answers[1 - failing]["error"][1] == (
        "the cache cannot be used (another rank of this engine cannot attach), and another rank has no room for a "
        "load from disk beside it"
    )


def test_ranks_map_again_after_all_that(ranks: Ranks) -> None:
    assert all(answer["mapped"] for answer in ranks.ask("ready", "ready"))
