"""The README's four commands, from an empty home directory: pip, a real user manager, a real engine."""

from __future__ import annotations

import os
import sys

from bench.first_steps import COMMANDS
from tests.engine.conftest import ANSWER_TIMEOUT_S, ROOT, run_tree


def test_four_commands_lead_to_an_engine_that_has_attached() -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = run_tree(
        [sys.executable, ROOT / "bench/first_steps.py"], env, timeout_s=2 * ANSWER_TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    typed = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    assert typed == [*COMMANDS, "weightcachectl status"]
    assert any(line.startswith("attached tiny/target generation 1: ") for line in lines)
    head, row = (line.split() for line in lines[-2:])
    assert dict(zip(head[:4], row, strict=False)) == {
        "DEVICE": "cpu0", "CACHE": "tiny/target", "STATE": "ready", "GEN": "1",
    }  # fmt: skip
    assert row[6] == "1", "engines"
