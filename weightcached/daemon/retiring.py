"""How a generation that is served no more is freed, and what a restart must not load again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from weightcached.daemon.caches import Caches, Generation
from weightcached.daemon.fdstore import FdStore, StoreError
from weightcached.daemon.holds import Holds
from weightcached.daemon.matching import Matcher
from weightcached.daemon.snapshots import Snapshots

log = logging.getLogger(__name__)


class Retirement:
    """Frees generations, as soon as no engine relies on the device's memory.

    unmap_parked: asks engines that sleep to give up their mappings.
    """

    def __init__(
        self,
        caches: Caches,
        matcher: Matcher,
        store: FdStore,
        snapshots: Snapshots,
        holds: Holds,
        unmap_parked: Callable[[Generation], Awaitable[None]] | None,
    ) -> None:
        self._caches = caches
        self._matcher = matcher
        self._store = store
        self._snapshots = snapshots
        self._holds = holds
        self._unmap_parked = unmap_parked
        self._freeing: set[asyncio.Task[None]] = set()
        self._noted = caches.aside()
        self._note_turn = asyncio.Lock()

    async def set_aside(self, generation: Generation | None, *, by: int | None = None) -> None:
        """Free it, and have a restart leave alone what was dropped, evicted or released."""
        self._caches.changed.fire()
        # Noted first: a daemon that dies in between finds both, and frees the rest. To the end,
        # also if the peer that asked for it leaves meanwhile.
        await asyncio.shield(asyncio.create_task(self._note_and_retire(generation, by)))

    async def _note_and_retire(self, generation: Generation | None, by: int | None) -> None:
        await self.note_aside()
        if generation is not None:
            await self.retire(generation, by=by)

    async def note_aside(self) -> None:
        """Have the manager keep which caches are to stay unloaded, if that has changed."""
        async with self._note_turn:
            aside = self._caches.aside()
            if aside == self._noted:
                return
            try:
                await asyncio.to_thread(self._store.note_aside, aside)
            except StoreError as e:
                log.warning("a restart will load dropped caches again error=%s", e)
            else:
                self._noted = aside

    async def retire(self, generation: Generation, *, by: int | None = None) -> None:
        """Free its memory, at once, or once no engine relies on the device's memory but process `by`."""
        self._snapshots.stop_writing(generation)
        self._matcher.forget(generation)
        if names := self._holds.names(but=by):
            log.info(
                "freed once engines have measured memory cache=%s engines=%s",
                generation.cache,
                names,
            )
            task = asyncio.create_task(self._free_later(generation, by))
            self._freeing.add(task)
            task.add_done_callback(self._freeing.discard)
        else:
            await self._free(generation)

    async def freed(self, *, timeout_s: float) -> None:
        """Return once what waited for engines is freed, or after so long."""
        if self._freeing:
            await asyncio.wait(self._freeing, timeout=timeout_s)

    async def _free_later(self, generation: Generation, by: int | None) -> None:
        await self._holds.none(but=by)
        await self._free(generation)

    async def _free(self, generation: Generation) -> None:
        generation.retire()
        # The client may leave meanwhile; then the store would keep the memory for good.
        await asyncio.shield(asyncio.create_task(self._take_out(generation)))
        # Engines that sleep need it no more than we do; those that are awake keep it mapped.
        if self._unmap_parked is not None:
            await self._unmap_parked(generation)

    async def _take_out(self, generation: Generation) -> None:
        try:
            await asyncio.to_thread(self._store.remove, generation)
        except StoreError as e:
            log.warning(
                "stays in the store until the unit stops cache=%s error=%s", generation.cache, e
            )
