"""The host of the engine tests (tests/engine/conftest.py) dies: one test fails, the next gets
another.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.conftest import ROOT

# As tests/engine has them: one host for all, and tests that know nothing of each other.
TESTS = """
import os, signal
import pytest
from tests.engine.conftest import Engines

@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    engines = Engines(dict(os.environ), tmp_path_factory.mktemp("engines") / "log")
    yield engines
    engines.close()

def kill(engines):
    os.kill(engines.process.pid, signal.SIGKILL)

def test_before(engines):
    assert engines.ask(close=True) == {}

def test_that_ends_it_under_a_question(engines):
    os.kill(engines.process.pid, signal.SIGSTOP)
    engines.send(close=True)
    kill(engines)
    engines.answer()

def test_between(engines):
    assert engines.ask(close=True) == {}

def test_that_finds_it_ended(engines):
    kill(engines)
    os.waitid(os.P_PID, engines.process.pid, os.WEXITED | os.WNOWAIT)
    engines.ask(close=True)

def test_after(engines):
    assert engines.ask(close=True) == {}

def test_last_leaves_it_ended(engines):
    kill(engines)
"""


@pytest.mark.slow
def test_host_that_dies_fails_one_test_alone_and_leaves_no_pipe_open(tmp_path: Path) -> None:
    file = tmp_path / "test_engines.py"
    file.write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-p", "no:cacheprovider", "-v", file],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    outcomes = {
        line.split()[0].split("::")[1]: line.split()[1]
        for line in done.stdout.splitlines()
        if "::" in line and "%]" in line
    }
    assert outcomes == {
        "test_before": "PASSED",
        "test_that_ends_it_under_a_question": "FAILED",
        "test_between": "PASSED",
        "test_that_finds_it_ended": "FAILED",
        "test_after": "PASSED",
        "test_last_leaves_it_ended": "PASSED",
    }, done.stdout
    assert done.stdout.count("AssertionError: the engine host ended with status -9") >= 2
    assert "BrokenPipe" not in done.stdout + done.stderr
    # Of pipes that nobody closed.
    assert "ResourceWarning" not in done.stdout + done.stderr
    assert done.stderr == ""
