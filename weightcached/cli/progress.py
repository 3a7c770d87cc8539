"""Progress of loads for a person: one moving line with a bar on a terminal, plain lines
elsewhere.
"""

from __future__ import annotations

import time
from typing import TextIO

from weightcached.cli.status import progress_text

BAR_WIDTH = 24
# Where the output is no terminal, a phase that goes on is repeated no more often than this.
REPEAT_S = 10.0


class ProgressDisplay:
    """Shows where each load is. `line()` prints something that stays."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._moving = stream.isatty()
        self._drawn = False
        self._shown: dict[str, tuple[str, float]] = {}

    def show(
        self, label: str, phase: str, done_bytes: int, total_bytes: int, eta_s: float | None
    ) -> None:
        """Show that `label`, a device and cache, is in `phase`."""
        text = f"{label}: {progress_text(phase, done_bytes, total_bytes, eta_s)}"
        if self._moving:
            self._stream.write(f"\r\x1b[K{_bar(done_bytes, total_bytes)} {text}")
            self._stream.flush()
            self._drawn = True
        elif self._is_news(label, phase):
            self._stream.write(f"{text}\n")
            self._stream.flush()

    def line(self, text: str, stream: TextIO | None = None) -> None:
        """Print a line that stays, on the display's stream or another one."""
        self.clear()
        target = stream or self._stream
        target.write(f"{text}\n")
        target.flush()

    def clear(self) -> None:
        """Take the moving line away."""
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


def _bar(done_bytes: int, total_bytes: int) -> str:
    filled = min(BAR_WIDTH, BAR_WIDTH * done_bytes // total_bytes) if total_bytes else 0
    return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}]"
