"""Limits in time: `make bench` holds figures to them, `make test` must pass at any speed.

A test that measures is marked `timed` and says each figure to hold(). Without `--limits` that does
nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple


class Figure(NamedTuple):
    """What one test measured, in seconds. `test` is its name without its parameters."""

    test: str
    what: str
    figure_s: float
    limit_s: float


# None: nobody asked for limits.
figures: list[Figure] | None = None


def hold(what: str, figure_s: float, limit_s: float, details: object = "") -> None:
    """With `--limits`, note the figure and fail if it is over its limit."""
    if figures is None:
        return
    name = os.environ["PYTEST_CURRENT_TEST"].partition("::")[2].rpartition(" ")[0]
    figures.append(Figure(name.partition("[")[0], what, figure_s, limit_s))
    assert figure_s <= limit_s, f"{what}: {figure_s:.4f} s, at most {limit_s} s; {details}"


def table(figures: list[Figure]) -> Iterator[str]:
    """One line for each figure of each test; of many by one name the largest."""
    largest: dict[tuple[str, str], Figure] = {}
    for figure in sorted(figures, key=lambda figure: figure.figure_s):
        largest[figure.test, figure.what] = figure
    yield f"{'figure':>10} {'limit':>8}"
    for test, what, figure_s, limit_s in sorted(largest.values()):
        word = "ok" if figure_s <= limit_s else "OVER"
        yield f"{1000 * figure_s:10.1f} {1000 * limit_s:8.0f} ms  {word:<4}  {what} ({test})"
