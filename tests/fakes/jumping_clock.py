"""The daemon on a machine whose wall clock jumps by years, back and forth, at each look."""

from __future__ import annotations

import itertools
import time

YEAR_S = 365 * 86400.0


def main() -> None:
    real, jumps = time.time, itertools.cycle((0.0, 10 * YEAR_S, -10 * YEAR_S))
    # Log lines look at the clock too.
    time.time = lambda: real() + next(jumps)
    from weightcached.cli.weightcached import main as cli

    cli()


if __name__ == "__main__":
    main()
