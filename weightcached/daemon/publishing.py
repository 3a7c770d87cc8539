"""What comes of a load: a generation that is stored and served, or a failure that may be tried again."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from weightcached.daemon.caches import Cache, Generation
from weightcached.daemon.fdstore import FdStore, StoreError
from weightcached.daemon.loading import Delivery, LoadFailedError
from weightcached.daemon.retiring import Retirement
from weightcached.daemon.retries import Retries
from weightcached.daemon.room import NoRoomError
from weightcached.daemon.snapshots import Snapshots
from weightcached.index.key import WeightCacheKey

log = logging.getLogger(__name__)

_STAYS = (
    "; the present weights are served on, and do not make room for the new ones: {reason}. By hand: 'weightcachectl "
    "engine sleep' its service, 'weightcachectl drop {model}', reload or publish again, and wake the service"
)


class Publisher:
    """Puts the ends of loads on record."""

    def __init__(
        self, store: FdStore, retries: Retries, snapshots: Snapshots, retirement: Retirement
    ) -> None:
        self._store = store
        self._retries = retries
        self._snapshots = snapshots
        self._retirement = retirement

    async def publish(self, cache: Cache, delivery: Delivery) -> None:
        """Store it, then serve it.

        If the daemon dies in between, its successor finds both generations and keeps the newer one.
        """
        generation = Generation(
            delivery.index,
            delivery.index_digest,
            delivery.index_fd,
            delivery.segment_fds,
            delivery.source,
        )
        try:
            await asyncio.to_thread(self._store.put, generation)
        except StoreError as e:
            log.warning(
                "not in the store, a restart will load it again cache=%s error=%s", cache.name, e
            )
            generation.not_stored = f"a restart of the daemon will load it again: {e}"
        except BaseException:
            generation.retire()
            raise
        self._retries.settled(cache.name)
        if delivery.snapshot is not None:
            self._snapshots.restored(generation, delivery.snapshot)
            _take_over_digest(generation, cache.last_key)
        if generation.source == "loaded":
            await self._snapshots.rollbacks.end(cache.name)
        old = cache.publish(generation)
        log.info(
            "ready cache=%s generation=%d segments=%d bytes=%d seconds=%.1f",
            cache.name,
            generation.number,
            len(generation.segment_nbytes),
            generation.nbytes,
            generation.load_seconds,
        )
        if old is not None:
            await self._retirement.retire(old)

    def record_failure(self, cache: Cache, error: LoadFailedError, *, stays: str = "") -> None:
        """stays: why the served generation does not make room."""
        no_room, on_demand = isinstance(error, NoRoomError), cache.resident == "on-demand"
        if error.permanent or (no_room and (on_demand or cache.generation is not None)):
            self._retries.settled(cache.name)
        else:
            self._retries.failed(cache.name)
        text = str(error)
        if stays:
            text += _STAYS.format(reason=stays, model=cache.name.rpartition("/")[0])
        # Its next engine may find room.
        cache.fail_load(text, evicted=no_room and on_demand)
        log.error(
            "load failed cache=%s served_generation=%d permanent=%s error=%s",
            cache.name,
            served_number(cache),
            "yes" if error.permanent else "no",
            error,
        )


def served_number(cache: Cache) -> int:
    """The number of the served generation, 0 without one."""
    return cache.generation.number if cache.generation else 0


def _take_over_digest(generation: Generation, last_key: WeightCacheKey | None) -> None:
    """A restored generation was loaded from the same files as it was before its eviction."""
    if last_key is None or generation.full_digest:
        return
    last, now = last_key.checkpoint, generation.key.checkpoint
    if msgspec.structs.replace(last, full=now.full) == now:
        generation.full_digest = last.full
