"""Run the daemon with a clock on its event loop: `python -m tests.fakes.lag serve …`.

The length of the loop's turns shows the cost of our faults for everybody else. From outside it
looks like a busy machine; in here the processor time of the loop's own thread tells them apart.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

# A file to which turns above NOTED_CPU_S are appended at once, so that it survives the process.
VARIABLE = "WEIGHTCACHED_TEST_LAG"
NOTED_CPU_S = 0.003


class Turn(NamedTuple):
    """One turn of the loop: from the return of select(), at_s on the monotonic clock, to the next
    call of it.

    `cpu_s` is processor time of the loop's thread. `worst` is the callback of this turn that cost
    the most of it. The last turn of a process that ends by itself stands for all: its times are
    sums, `callbacks` counts turns.
    """

    at_s: float
    wall_s: float
    cpu_s: float
    callbacks: int
    worst: str
    worst_cpu_s: float


ALL = "all"


def read(path: Path) -> list[Turn]:
    return (
        [msgspec.json.decode(line, type=Turn) for line in path.read_bytes().splitlines()]
        if path.exists()
        else []
    )


def longest(turns: list[Turn]) -> Turn | None:
    return max(
        (turn for turn in turns if turn.worst != ALL), key=lambda turn: turn.cpu_s, default=None
    )


class Clock:
    """Wraps the selector's select() and the callbacks of the loop."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self._began: tuple[float, float] | None = None
        self._turns, self._wall_s, self._cpu_s = 0, 0.0, 0.0
        self._callbacks, self._worst = 0, ("", 0.0)

    def install(self) -> None:
        select, run = selectors.EpollSelector.select, asyncio.events.Handle._run

        def timed_select(selector: Any, timeout: float | None = None) -> Any:
            self._turn_ends()
            ready = select(selector, timeout)
            self._began = time.monotonic(), time.thread_time()
            return ready

        def timed_run(handle: Any) -> None:
            began_s, callback = time.thread_time(), handle._callback
            run(handle)
            took_s = time.thread_time() - began_s
            self._callbacks += 1
            if took_s > self._worst[1]:
                self._worst = repr(getattr(callback, "__self__", callback))[:300], took_s

        setattr(selectors.EpollSelector, "select", timed_select)  # noqa: B010
        setattr(asyncio.events.Handle, "_run", timed_run)  # noqa: B010

    def _turn_ends(self) -> None:
        if self._began is not None:
            wall_s, cpu_s = time.monotonic() - self._began[0], time.thread_time() - self._began[1]
            self._turns += 1
            self._wall_s += wall_s
            self._cpu_s += cpu_s
            if cpu_s > NOTED_CPU_S:
                self._note(Turn(self._began[0], wall_s, cpu_s, self._callbacks, *self._worst))
        self._callbacks, self._worst = 0, ("", 0.0)

    def _note(self, turn: Turn) -> None:
        self._file.write(msgspec.json.encode(turn) + b"\n")

    def close(self) -> None:
        self._note(Turn(time.monotonic(), self._wall_s, self._cpu_s, self._turns, ALL, 0.0))
        self._file.close()


def main() -> None:
    from weightcached.cli import weightcached as cli

    clock = Clock(Path(os.environ[VARIABLE]))
    clock.install()
    try:
        cli.main()
    finally:
        clock.close()


if __name__ == "__main__":
    main()
