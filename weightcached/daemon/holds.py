"""Who may change the device's memory, and when: loads of ours, and engines that rely on it staying as it is.

vLLM asserts on the free memory of the whole device while it measures how much a KV cache may have,
and when it sleeps. Loading or freeing meanwhile would end that engine, or cost it KV cache. So an
engine holds loads off, by a connection that it keeps open for that time; a load waits until nobody
does. An engine that comes while a load has the device waits for its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator

from weightcached.daemon.caches import Cache
from weightcached.daemon.leases import Broadcast

log = logging.getLogger(__name__)

# An engine's start from its first question to its first request; capturing many graphs takes minutes.
LIMIT_S = 600.0


class Hold:
    """One engine's hold. process: tells it from others; name: for people."""

    __slots__ = ("name", "process")

    def __init__(self, process: int, name: str) -> None:
        self.process = process
        self.name = name


class Holds:
    """All holds, and the cache whose load has the device.

    A hold longer than `limit_s` is ended: an engine that hangs must not prevent loads for ever.
    """

    def __init__(self, *, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._holds: dict[Hold, asyncio.TimerHandle] = {}
        self.loading: Cache | None = None
        self.changed = Broadcast()
        # Processes that wait for a load themselves, with the number of their questions.
        self._waiting: Counter[int] = Counter()

    def begin(self, process: int, name: str) -> Hold | None:
        """A new hold; None while a load has the device."""
        if self.loading is not None:
            return None
        hold = Hold(process, name)
        log.debug("loads are held off engine=%s", name)
        loop = asyncio.get_running_loop()
        self._holds[hold] = loop.call_later(self._limit_s, self._expire, hold)
        return hold

    def end(self, hold: Hold) -> None:
        """End a hold; one that has ended already is left alone."""
        timer = self._holds.pop(hold, None)
        if timer is not None:
            timer.cancel()
            self.changed.fire()

    def _expire(self, hold: Hold) -> None:
        log.warning("%s held loads off for %.0f s: that is over", hold.name, self._limit_s)
        self.end(hold)

    @contextlib.contextmanager
    def waiting(self, process: int) -> Iterator[None]:
        """In the block this process waits for a load itself, which its own hold must not prevent."""
        self._waiting[process] += 1
        self.changed.fire()
        try:
            yield
        finally:
            self._waiting[process] -= 1
            if not self._waiting[process]:
                del self._waiting[process]

    def names(self, *, but: int | None = None) -> list[str]:
        """The processes that hold loads off, without one of them."""
        return [
            hold.name
            for hold in self._holds
            if hold.process != but and hold.process not in self._waiting
        ]

    async def none(self, *, but: int | None = None) -> None:
        """Return once nobody but one process holds loads off."""
        while self.names(but=but):
            await self.changed.wait()

    @contextlib.asynccontextmanager
    async def device_for(self, cache: Cache) -> AsyncIterator[None]:
        """The device for a load of this cache, as soon as no engine relies on its memory."""
        if names := self.names():
            log.info(
                "load waits for engines that measure memory cache=%s engines=%s", cache.name, names
            )
        await self.none()
        self.loading = cache
        try:
            yield
        finally:
            self.loading = None
            self.changed.fire()
