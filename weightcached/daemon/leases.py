"""Leases: which engines hold which generation. A lease is an open connection; its end is the
connection's end.

Memory is not counted here: an engine's mappings keep segments alive by themselves. Leases say whom
a Drop or a Release would surprise.
"""

from __future__ import annotations

import asyncio
import time

from weightcached.wire.messages import EngineStatus


class Broadcast:
    """Wakes everybody who waits, each time it fires."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    def next(self) -> asyncio.Event:
        """The next fire(), to be taken before looking at what may change and given to wait()
        afterwards.
        """
        return self._event

    async def wait(
        self, event: asyncio.Event | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Return once `event`, by default the next one, has fired, or after the timeout."""
        event = event or self._event
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            pass


class Lease:
    """One engine's hold on one generation. `since` is in seconds since the epoch."""

    __slots__ = ("cache", "generation", "pid", "since")

    def __init__(self, cache: str, generation: int, pid: int) -> None:
        self.cache = cache
        self.generation = generation
        self.pid = pid
        self.since = time.time()


class Leases:
    """All leases of this daemon, in the order in which they began."""

    def __init__(self) -> None:
        # A dict as an ordered set.
        self._leases: dict[Lease, None] = {}
        self.changed = Broadcast()

    def begin(self, cache: str, generation: int, pid: int) -> Lease:
        lease = Lease(cache, generation, pid)
        self._leases[lease] = None
        self.changed.fire()
        return lease

    def end(self, lease: Lease) -> None:
        """End a lease; one that has ended already is left alone."""
        if lease in self._leases:
            del self._leases[lease]
            self.changed.fire()

    def on(self, cache: str, generation: int | None = None) -> list[Lease]:
        """The leases on a cache, or on one generation of it."""
        return [x for x in self._leases if x.cache == cache and generation in (None, x.generation)]

    async def none_on(self, cache: str, generation: int) -> None:
        """Return once nobody holds this generation."""
        while self.on(cache, generation):
            await self.changed.wait()

    def engines(self, cache: str) -> list[EngineStatus]:
        return [EngineStatus(pid=x.pid, since=x.since) for x in self.on(cache)]
