"""Leases: which engines hold which generation. A lease is an open connection; its end is the
connection's end.

Memory is not counted here: an engine's mappings keep segments alive by themselves. Leases say whom
a Drop or a Release would surprise.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from typing import Protocol

from weightcached.wire.messages import EngineStatus, OldGeneration

log = logging.getLogger(__name__)

# Unmapping 15 GiB takes some 10 ms. weightcachectl waits for it.
UNMAP_TIMEOUT_S = 3.0


class Broadcast:
    """Wakes everybody who waits, each time it fires."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    def next(self) -> asyncio.Event:
        """The next fire(): take it before you look at the state, and give it to wait() afterwards."""
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


class Leased(Protocol):
    """A generation, as leases see it.

    Identity distinguishes them, not their numbers: numbers begin again once a cache has been
    forgotten.
    """

    cache: str
    number: int
    label: str
    used_s: float

    @property
    def nbytes(self) -> int: ...


class Lease:
    """One engine's hold on one generation. `since` is in seconds since the epoch.

    A parked engine sleeps; `ask_to_unmap` sends it the question.
    """

    __slots__ = ("ask_to_unmap", "generation", "label", "parked", "pid", "since")

    def __init__(
        self, generation: Leased, pid: int, ask_to_unmap: Callable[[], object], label: str
    ) -> None:
        self.generation = generation
        self.pid = pid
        self.label = label
        self.since = time.time()
        self.parked = False
        self.ask_to_unmap = ask_to_unmap

    def status(self) -> EngineStatus:
        held = self.generation
        return EngineStatus(
            pid=self.pid,
            label=self.label,
            since=self.since,
            generation=held.number,
            bytes=held.nbytes,
            parked=self.parked,
        )


class Leases:
    """All leases of this daemon, in the order in which they began."""

    def __init__(self) -> None:
        # A dict as an ordered set.
        self._leases: dict[Lease, None] = {}
        self.changed = Broadcast()

    def begin(
        self,
        generation: Leased,
        pid: int,
        ask_to_unmap: Callable[[], object] = lambda: None,
        *,
        label: str = "",
    ) -> Lease:
        lease = Lease(generation, pid, ask_to_unmap, label)
        self._leases[lease] = None
        generation.used_s = time.monotonic()
        self.changed.fire()
        return lease

    def end(self, lease: Lease) -> None:
        """End a lease; one that has ended already is left alone."""
        if lease in self._leases:
            del self._leases[lease]
            lease.generation.used_s = time.monotonic()
            self.changed.fire()

    def on(self, generation: Leased) -> list[Lease]:
        """The leases on one generation."""
        return [lease for lease in self._leases if lease.generation is generation]

    def awake(self, generation: Leased) -> list[Lease]:
        """The leases on a generation of engines that do not sleep, and would not unmap it."""
        return [lease for lease in self.on(generation) if not lease.parked]

    async def none_on(self, generation: Leased) -> None:
        """Return once nobody holds this generation."""
        while self.on(generation):
            await self.changed.wait()

    def park(self, lease: Lease, parked: bool) -> None:
        """Take notice that the engine of a lease sleeps, or that it has woken."""
        lease.parked = parked
        self.changed.fire()

    async def unmap_parked(self, generation: Leased, *, timeout_s: float = UNMAP_TIMEOUT_S) -> None:
        """Ask the parked engines of a generation to unmap it.

        Waits until each has unmapped it or woken, or the timeout is over. Awake engines keep it.
        """
        asked = [lease for lease in self.on(generation) if lease.parked]
        for lease in asked:
            lease.ask_to_unmap()
        try:
            async with asyncio.timeout(timeout_s):
                while any(lease in self._leases and lease.parked for lease in asked):
                    await self.changed.wait()
        except TimeoutError:
            left = [lease.pid for lease in asked if lease in self._leases and lease.parked]
            log.warning("parked engines do not unmap cache=%s pids=%s", generation.cache, left)

    def engines(self, cache: str) -> list[EngineStatus]:
        """The engines that hold any generation of a cache."""
        return [lease.status() for lease in self._leases if lease.generation.cache == cache]

    def old(self, served: Collection[Leased]) -> list[OldGeneration]:
        """Generations that are no longer `served` but held by engines, whose end frees them."""
        current = {id(generation) for generation in served}
        held = {id(x.generation): x.generation for x in self._leases}
        return [
            OldGeneration(
                cache=generation.cache,
                generation=generation.number,
                bytes=generation.nbytes,
                engines=[lease.status() for lease in self.on(generation)],
                label=generation.label,
            )
            for key, generation in held.items()
            if key not in current
        ]
