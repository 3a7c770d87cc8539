"""The daemon on a machine whose wall clock jumps by years, forwards and backwards, each time
somebody looks.
"""

from __future__ import annotations

import itertools
import time

YEAR_S = 365 * 86400.0


def main() -> None:
    real, jumps = time.time, itertools.cycle((0.0, 10 * YEAR_S, -10 * YEAR_S))
    # What counts in the log is one of those who look.
    time.time = lambda: real() + next(jumps)
    from weightcached.cli.weightcached import main as cli

    cli()


if __name__ == "__main__":
    main()
