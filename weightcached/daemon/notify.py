"""Messages to systemd: readiness, progress, reloads, watchdog, end. Does nothing outside a unit.

Descriptors go to the manager through fdstore.py.
"""

from __future__ import annotations

import asyncio
import time

import sdnotify

from weightcached.daemon.caches import Cache, LoadProgress
from weightcached.system.notify import status_line
from weightcached.system.text import progress_text

# Start-up may take an hour and shows it; one status line a second within a phase is enough for
# that.
_PROGRESS_PERIOD_S = 1.0
_MANAGER_TIMEOUT_S = 30.0


class Notifier:
    """Speaks to the manager named in NOTIFY_SOCKET.

    Messages that the manager must not miss are sent from a thread, which may wait; status and
    watchdog never wait. extend_s: how long the manager waits for the next progress. It is longer
    than the loader's stall timeout, so that we end a stalled loader, with a reason.
    """

    def __init__(self, *, extend_s: float) -> None:
        self._waiting = sdnotify.SystemdNotifier()
        self._hasty = sdnotify.SystemdNotifier()
        if self._waiting.socket is not None:
            # A manager that hangs must not keep us from ending.
            self._waiting.socket.settimeout(_MANAGER_TIMEOUT_S)
        if self._hasty.socket is not None:
            self._hasty.socket.setblocking(False)
        self._extend_usec = int(extend_s * 1_000_000)
        self._next_progress_s = 0.0
        self._phase = ("", "")

    async def ready(self, status: str) -> None:
        await self._say(f"READY=1\n{status_line(status)}")

    async def reloading(self) -> None:
        await self._say(
            f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}\nSTATUS=reloading"
        )

    async def stopping(self) -> None:
        await self._say("STOPPING=1")

    def status(self, text: str) -> None:
        self._hasty.notify(status_line(text))

    def alive(self) -> None:
        self._hasty.notify("WATCHDOG=1")

    def progress(self, cache: Cache, load: LoadProgress) -> None:
        """A load has made progress: show it, and ask for more time."""
        now_s = time.monotonic()
        phase = (cache.name, load.phase)
        if now_s >= self._next_progress_s or phase != self._phase:
            self._phase = phase
            self._next_progress_s = now_s + _PROGRESS_PERIOD_S
            self._hasty.notify(
                f"EXTEND_TIMEOUT_USEC={self._extend_usec}\n{status_line('loading ' + describe(cache.name, load))}"
            )

    def digesting(self) -> None:
        """A digest has got further, for which a start or a reload may wait."""
        self._hasty.notify(f"EXTEND_TIMEOUT_USEC={self._extend_usec}")

    def close(self) -> None:
        for notifier in (self._waiting, self._hasty):
            if notifier.socket is not None:
                notifier.socket.close()

    async def _say(self, state: str) -> None:
        await asyncio.to_thread(self._waiting.notify, state)


def describe(name: str, load: LoadProgress) -> str:
    """E.g. "llama-8b/target: weights, 3.2 of 16.1 GiB, 12 s left"."""
    return f"{name}: {progress_text(load)}"
