"""A short soak. `python -m tests.process.soak --seconds 1800` is the long one."""

from __future__ import annotations

from tests.process.soak import soak

SECONDS = 120
SEED = 20


def test_random_operations_break_no_invariant() -> None:
    figures = soak(SECONDS, SEED)
    assert isinstance(figures["steps"], int)
    assert figures["steps"] > 60, figures
