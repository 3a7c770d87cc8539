"""Room for a load, within the device's `budget:`: beside what is served, or in its place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from weightcached.config.ranks import layout_of
from weightcached.config.wanted import Wanted
from weightcached.daemon.caches import Cache
from weightcached.daemon.loading import Delivery, LoadFailedError
from weightcached.daemon.residency import Residency
from weightcached.daemon.retiring import Retirement
from weightcached.daemon.snapshots import Snapshots
from weightcached.system.fds import close_all

# How long a load waits for memory that was given up before.
_FREEING_S = 5.0


class NoRoomError(LoadFailedError):
    """The budget has no room beside what engines use, and what must stay resident."""

    def __init__(self, message: str) -> None:
        super().__init__(message, no_room=True)


class Replaced(NamedTuple):
    """A generation that had to go before its successor was there, and its snapshot."""

    path: Path
    spec_digest: str


class Room:
    """Makes room for loads. evict: stops serving a cache until an engine asks for it."""

    def __init__(
        self,
        residency: Residency,
        retirement: Retirement,
        snapshots: Snapshots,
        evict: Callable[[Cache], Awaitable[None]],
    ) -> None:
        self._residency = residency
        self._retirement = retirement
        self._snapshots = snapshots
        self._evict = evict

    async def make(
        self, cache: Cache, want: Wanted, *, keeps_held: bool = False
    ) -> Replaced | None:
        """Evict what stands in the way of a load, as far as its size is known.

        The served generation of the same cache goes last, if it can be restored: it is returned.
        Raises NoRoomError, but only for a size that is known; with `keeps_held` also if it would
        have to go and engines that sleep hold it: a load in place keeps these asleep.
        """
        if self._residency.budget:
            # No engine measures memory now, so that these end.
            await self._retirement.freed(timeout_s=_FREEING_S)
        old = cache.generation
        nbytes = old.nbytes if old else cache.last_nbytes or _estimated_bytes(cache, want)
        if await self._residency.make_room(cache, nbytes, self._evict):
            return None
        if old is not None:
            path = self._snapshots.path_of(old)
            if path is None or not self._residency.is_unmapped(old):
                # The new one may be smaller.
                return None
            if keeps_held and self._residency.is_held(cache):
                raise NoRoomError(self._residency.no_room(cache, nbytes))
            await self._evict(cache)
            return Replaced(path, old.spec_digest)
        if cache.last_nbytes:
            raise NoRoomError(self._residency.no_room(cache, nbytes))
        return None

    async def check(self, cache: Cache, delivery: Delivery) -> None:
        """Evict others if a load turned out to be larger than expected. Raises NoRoomError.

        The delivery is freed then.
        """
        nbytes, old = delivery.index.nbytes, cache.generation
        # Publishing frees it.
        beside = nbytes - old.nbytes if old and self._residency.is_unmapped(old) else nbytes
        if await self._residency.make_room(cache, beside, self._evict):
            return
        close_all([delivery.index_fd, *delivery.segment_fds])
        cache.last_nbytes = nbytes
        raise NoRoomError(self._residency.no_room(cache, nbytes))


def _estimated_bytes(cache: Cache, want: Wanted) -> int:
    """The weight files' share of one rank; 0 if they are unknown before the load."""
    if cache.checkpoint is None:
        return 0
    layout = layout_of(want.spec.engine)
    nbytes = sum(file.size for file in cache.checkpoint.files)
    return nbytes // (layout.tp_size * layout.pp_size)
