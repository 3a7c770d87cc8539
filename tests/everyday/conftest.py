"""Fixtures of the tests of docs/faults.md: real daemons, real engines' processes, a real user
manager.
"""

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
