"""Fixtures of the tests of docs/faults.md: real daemons, real engines' processes, a real user
manager.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.conftest import TEST_TIMEOUT_S
from tests.process.conftest import checkpoint, daemon, gate, make_daemon, make_engine, short_tmp
from tests.systemd.conftest import manager, unit

__all__ = [
    "checkpoint",
    "daemon",
    "gate",
    "make_daemon",
    "make_engine",
    "manager",
    "short_tmp",
    "unit",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))
