"""When to try a load again that failed for a passing reason: driver not ready, late mount, no room.

The daemon tries again, without a restart: it goes on serving meanwhile, and the unit's few restarts
are kept for crashes.
"""

from __future__ import annotations

import time

from weightcached.daemon.leases import Broadcast

FIRST_S = 1.0
LONGEST_S = 300.0


class Retries:
    """Pauses by cache. Each failure in a row doubles them, from `first_s` to `longest_s`."""

    def __init__(self, *, first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._pause_s: dict[str, float] = {}
        self._due_s: dict[str, float] = {}
        self._changed = Broadcast()

    def __contains__(self, name: str) -> bool:
        return name in self._due_s

    def failed(self, name: str) -> float:
        """It failed and may succeed later. Returns the pause until it is tried again."""
        pause_s = min(self._pause_s.get(name, self._first_s / 2) * 2, self._longest_s)
        self._pause_s[name] = pause_s
        self._due_s[name] = time.monotonic() + pause_s
        self._changed.fire()
        return pause_s

    def settled(self, name: str) -> None:
        """It succeeded, failed for good, or is not wanted any more."""
        self._pause_s.pop(name, None)
        self._due_s.pop(name, None)

    def at(self, name: str) -> float | None:
        """The time of the next attempt, in seconds since the epoch; None if there is none."""
        due_s = self._due_s.get(name)
        return None if due_s is None else time.time() + due_s - time.monotonic()

    def take_due(self) -> list[str]:
        """The caches to try now; each gets a new pause only once it has failed again."""
        due = [name for name, due_s in self._due_s.items() if due_s <= time.monotonic()]
        for name in due:
            del self._due_s[name]
        return due

    async def until_due(self) -> None:
        """Return once something is due."""
        while True:
            event = self._changed.next()
            left_s = min(self._due_s.values(), default=float("inf")) - time.monotonic()
            if left_s <= 0:
                return
            await self._changed.wait(event, timeout_s=left_s if self._due_s else None)
