"""Progress of loads: a moving line with a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import TextIO

from weightcached.system.text import LoadState, progress_text

BAR_WIDTH = 24
# Without a terminal, a phase that goes on is repeated no more often than this.
REPEAT_S = 10.0


class ProgressDisplay:
    """Shows the progress of each load."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._moving = stream.isatty()
        self._drawn = False
        self._shown: dict[str, tuple[str, float]] = {}

    def show(self, label: str, load: LoadState) -> None:
        """Show the progress of the load of `label`, a device and cache."""
        self._draw(label, load.phase, _bar(load), progress_text(load))

    def show_text(self, label: str, text: str) -> None:
        """Show another text about `label`."""
        self._draw(label, text, _BAR, text)

    def _draw(self, label: str, phase: str, bar: str, text: str) -> None:
        if self._moving:
            self._stream.write(f"\r\x1b[K{bar} {label}: {text}")
            self._stream.flush()
            self._drawn = True
        elif self._is_news(label, phase):
            self._stream.write(f"{label}: {text}\n")
            self._stream.flush()

    def clear(self) -> None:
        """Remove the moving line."""
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._drawn = False

    def _is_news(self, label: str, phase: str) -> bool:
        now_s = time.monotonic()
        old_phase, shown_s = self._shown.get(label, ("", -REPEAT_S))
        if phase == old_phase and now_s - shown_s < REPEAT_S:
            return False
        self._shown[label] = (phase, now_s)
        return True


def _bar(load: LoadState) -> str:
    if not load.total_bytes:
        return _BAR
    filled = min(BAR_WIDTH, BAR_WIDTH * load.done_bytes // load.total_bytes)
    return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}]"


_BAR = f"[{'.' * BAR_WIDTH}]"
