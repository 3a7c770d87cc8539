"""What all tests have: figures held to limits (limits.py), and the examples of `make fuzz`."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

from tests import limits

# By default an example that takes 200 ms fails, and so does a strategy that is slow to draw: on a busy
# machine any of them may. The same examples each time; `make fuzz` draws others.
settings.register_profile(
    "tests", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("tests")
settings.register_profile("fuzz", max_examples=1500, derandomize=False)
# Some machines have it set. Each of hundreds of processes would compile what it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--limits", action="store_true", help="hold what timed tests measure to their limits"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--limits"):
        limits.figures = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if limits.figures:
        terminalreporter.section("figures and their limits")
        for line in limits.table(limits.figures):
            terminalreporter.write_line(line)
