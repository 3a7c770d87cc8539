"""Progress of loads: a bar for each on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TextIO

from weightcached.system.text import LoadState, progress_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

BAR_WIDTH = 24
# Without a terminal, a phase that goes on is repeated no more often than this.
REPEAT_S = 10.0


class ProgressDisplay:
    """Shows the progress of each load."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._moving = stream.isatty()
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._shown: dict[str, tuple[str, float]] = {}

    def show(self, label: str, load: LoadState) -> None:
        """Show the progress of the load of `label`, a device and cache."""
        self._draw(label, load.phase, progress_text(load), load.done_bytes, load.total_bytes)

    def show_text(self, label: str, text: str) -> None:
        """Show another text about `label`."""
        self._draw(label, text, text, 0, 0)

    def clear(self) -> None:
        """Remove the bars."""
        if self._bars is not None:
            self._bars.stop()
            self._bars, self._tasks = None, {}

    def _draw(self, label: str, phase: str, text: str, done: int, total: int) -> None:
        if self._moving:
            self._draw_bar(label, text, done, total)
        elif self._is_news(label, phase):
            self._stream.write(f"{label}: {text}\n")
            self._stream.flush()

    def _draw_bar(self, label: str, text: str, done: int, total: int) -> None:
        if self._bars is None:
            self._bars = _start_bars(self._stream)
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(label, text="", total=None)
        # Without a total the bar shows only that something goes on.
        self._bars.update(self._tasks[label], completed=done, total=total or None, text=text)
        self._bars.refresh()

    def _is_news(self, label: str, phase: str) -> bool:
        now_s = time.monotonic()
        old_phase, shown_s = self._shown.get(label, ("", -REPEAT_S))
        if phase == old_phase and now_s - shown_s < REPEAT_S:
            return False
        self._shown[label] = (phase, now_s)
        return True


def _start_bars(stream: TextIO) -> Progress:
    """Bars that are drawn when there is news, and leave nothing behind."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    bars = Progress(
        BarColumn(BAR_WIDTH),
        TextColumn("{task.description}: {task.fields[text]}", markup=False),
        console=Console(file=stream),
        transient=True,
        auto_refresh=False,
    )
    bars.start()
    return bars
