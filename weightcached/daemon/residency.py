"""Which caches make room for others, within the device's `budget:`.

Only on-demand caches do, the least recently used first, and only those that no engine maps or waits
for: they come back when an engine asks, from a snapshot or by a load. A generation counts from its
load until nobody maps it any more. Without a budget nothing is evicted for others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from weightcached.daemon.caches import Cache, Caches, Generation
from weightcached.daemon.leases import Leases
from weightcached.system.text import bytes_text
from weightcached.wire.messages import EngineStatus

log = logging.getLogger(__name__)

# Engines that sleep for the sake of this: they miss nothing while we wait.
_SLEEP_TIMEOUT_S = 20.0


class WrittenSnapshots(Protocol):
    """As Snapshots."""

    async def settled(self, generation: Generation) -> None: ...


class Residency:
    """budget: bytes of weights that the daemon may hold, 0 for no limit."""

    def __init__(
        self, device: str, caches: Caches, leases: Leases, snapshots: WrittenSnapshots
    ) -> None:
        self._device = device
        self._caches = caches
        self._leases = leases
        self._snapshots = snapshots
        self.budget = 0

    def held_bytes(self) -> int:
        """Bytes of served generations, and of older ones that engines map."""
        served = self._served()
        old = self._leases.old(served)
        return sum(g.nbytes for g in served) + sum(g.bytes for g in old)

    def candidates(self) -> list[Cache]:
        """The caches that may be evicted, the least recently used first."""
        found = [
            cache for cache in self._caches if cache.resident == "on-demand" and self.is_idle(cache)
        ]
        return sorted(found, key=lambda cache: cache.generation.used_s if cache.generation else 0)

    def is_idle(self, cache: Cache) -> bool:
        """Whether a cache is served and nobody would miss it.

        Engines that sleep with our back end unmap it if asked.
        """
        generation = cache.generation
        return (
            generation is not None
            and cache.load is None
            and not cache.waiting
            and not self._leases.awake(generation)
        )

    def is_unmapped(self, generation: Generation) -> bool:
        """Whether no engine maps it but such that would unmap it if asked."""
        return not self._leases.awake(generation)

    async def unmap(self, generation: Generation) -> str:
        """Have the engines that sleep unmap it. Returns which ones hold it still, or ""."""
        try:
            async with asyncio.timeout(_SLEEP_TIMEOUT_S):
                # An engine says that it sleeps a little later than its service.
                while self._leases.awake(generation):
                    await self._leases.changed.wait()
        except TimeoutError:
            pass
        else:
            await self._leases.unmap_parked(generation, timeout_s=_SLEEP_TIMEOUT_S)
        return ", ".join(lease.status().name for lease in self._leases.on(generation))

    def is_held(self, cache: Cache) -> bool:
        """Whether an engine maps the served generation, asleep or not."""
        return cache.generation is not None and bool(self._leases.on(cache.generation))

    async def make_room(
        self, cache: Cache | None, nbytes: int, evict: Callable[[Cache], Awaitable[None]]
    ) -> bool:
        """Evict others until `nbytes` of `cache` fit beside what is held; whether they do.

        Evicts nothing if all of it would not be enough. Parked engines are asked to unmap first: one
        that wakes instead keeps its model.
        """
        kept: set[Cache] = set()
        while self.budget and self.held_bytes() + nbytes > self.budget:
            others = [x for x in self.candidates() if x is not cache and x not in kept]
            most = sum(other.generation.nbytes for other in others if other.generation)
            if self.held_bytes() - most + nbytes > self.budget:
                return False
            victim, generation = others[0], others[0].generation
            assert generation is not None
            # Or it would have to be loaded instead of restored.
            await self._snapshots.settled(generation)
            await self._leases.unmap_parked(generation)
            if self._leases.on(generation) or not self.is_idle(victim):
                kept.add(victim)
            elif victim.generation is generation:
                wanted = cache.name if cache else "a lower budget"
                log.info("evicted for room cache=%s for=%s", victim.name, wanted)
                await evict(victim)
        return True

    def no_room(self, cache: Cache, nbytes: int) -> str:
        """Why `nbytes` of `cache` do not fit: who holds the room."""
        text = (
            f"no room for {cache.name}: it needs {bytes_text(nbytes)}, the budget of {self._device} is "
            f"{bytes_text(self.budget)}"
        )
        if nbytes > self.budget:
            return f"{text}; raise budget: in the manifest"
        holders = [
            f"{other.name} {bytes_text(other.generation.nbytes)} ({self._why_held(other)})"
            for other in self._caches
            if other.generation is not None
        ]
        holders += [
            f"generation {old.generation} of {old.cache} {bytes_text(old.bytes)} "
            f"({_mapped_by(old.engines)})"
            for old in self._leases.old(self._served())
        ]
        return (
            f"{text}, and held are {', '.join(holders)}; stop an engine, evict a cache with "
            "'weightcachectl evict', or raise budget: in the manifest"
        )

    def _served(self) -> list[Generation]:
        return [cache.generation for cache in self._caches if cache.generation is not None]

    def _why_held(self, cache: Cache) -> str:
        assert cache.generation is not None
        if engines := [lease.status() for lease in self._leases.on(cache.generation)]:
            return _mapped_by(engines)
        if cache.waiting:
            return f"{', '.join(cache.waiting.values())} attaches"
        return "always resident" if cache.resident == "always" else "no engine"


def _mapped_by(engines: list[EngineStatus]) -> str:
    return f"mapped by {', '.join(engine.name for engine in engines)}"
