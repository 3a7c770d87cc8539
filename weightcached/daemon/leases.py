"""Leases: which engines hold which generation. A lease is an open connection; its end is the
connection's end.

Memory is not counted here: an engine's mappings keep segments alive by themselves. Leases say whom
a Drop or a Release would surprise.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from weightcached.wire.messages import EngineStatus

log = logging.getLogger(__name__)

# Unmapping 15 GiB takes some 10 ms, and more where the engine's host is busy.
UNMAP_TIMEOUT_S = 10.0


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
    """One engine's hold on one generation. `since` is in seconds since the epoch.

    A parked engine sleeps; `ask_to_unmap` sends it the question.
    """

    __slots__ = ("ask_to_unmap", "cache", "generation", "parked", "pid", "since")

    def __init__(
        self, cache: str, generation: int, pid: int, ask_to_unmap: Callable[[], object]
    ) -> None:
        self.cache = cache
        self.generation = generation
        self.pid = pid
        self.since = time.time()
        self.parked = False
        self.ask_to_unmap = ask_to_unmap


class Leases:
    """All leases of this daemon, in the order in which they began."""

    def __init__(self) -> None:
        # A dict as an ordered set.
        self._leases: dict[Lease, None] = {}
        self.changed = Broadcast()

    def begin(
        self,
        cache: str,
        generation: int,
        pid: int,
        ask_to_unmap: Callable[[], object] = lambda: None,
    ) -> Lease:
        lease = Lease(cache, generation, pid, ask_to_unmap)
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

    def awake(self, cache: str) -> list[Lease]:
        """The leases on a cache of engines that do not sleep, and would not unmap it."""
        return [lease for lease in self.on(cache) if not lease.parked]

    async def none_on(self, cache: str, generation: int) -> None:
        """Return once nobody holds this generation."""
        while self.on(cache, generation):
            await self.changed.wait()

    def park(self, lease: Lease, parked: bool) -> None:
        """Take notice that the engine of a lease sleeps, or that it has woken."""
        lease.parked = parked
        self.changed.fire()

    async def unmap_parked(
        self, cache: str, generation: int | None = None, *, timeout_s: float = UNMAP_TIMEOUT_S
    ) -> None:
        """Ask the parked engines of a cache, or of one generation, to unmap it, and wait until each
        has, or woke, or the timeout is over. Those that are awake keep it.
        """
        asked = [lease for lease in self.on(cache, generation) if lease.parked]
        for lease in asked:
            lease.ask_to_unmap()
        try:
            async with asyncio.timeout(timeout_s):
                while any(lease in self._leases and lease.parked for lease in asked):
                    await self.changed.wait()
        except TimeoutError:
            left = [lease.pid for lease in asked if lease in self._leases and lease.parked]
            log.warning("parked engines do not unmap cache=%s pids=%s", cache, left)

    def engines(self, cache: str) -> list[EngineStatus]:
        return [EngineStatus(pid=x.pid, since=x.since, parked=x.parked) for x in self.on(cache)]
