"""What all tests have: figures held to limits (limits.py), and the examples of `make fuzz`."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import settings

from tests import limits

settings.register_profile("fuzz", max_examples=1500)
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
