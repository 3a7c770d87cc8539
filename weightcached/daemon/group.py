"""The other ranks on this node of a model that loads as a group.

A rank that lost its generation needs its peers in order to load it. They have theirs, and a reload
would not touch them; so this rank asks them to load along. They drop the result and go on serving.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from pathlib import Path

from weightcached.config.wanted import Wanted
from weightcached.errors import WeightcachedError
from weightcached.wire.connection import Connection
from weightcached.wire.messages import CacheStatus, Reload
from weightcached.wire.requests import ask_status

log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
# Until a peer begins: it looks at files and versions first.
_BEGIN_TIMEOUT_S = 60.0


# Phases of a loader that has met its peers.
_MET = frozenset({"weights", "packing", "proving", "publishing", "tuning"})


class GroupPeers:
    """Asks the daemons of a group's other ranks. socket_of: the socket path of a device."""

    def __init__(self, device: str, socket_of: Callable[[str], Path]) -> None:
        self._device = device
        self._socket_of = socket_of

    async def call(self, want: Wanted, *, but: Collection[str] = ()) -> set[str]:
        """Have those load along that would not come by themselves, `but` for some devices; the
        others load anyway. Returns the devices that were asked.
        """
        asked = set()
        for device, cache in (await self._caches(want)).items():
            if device not in but and cache.state == "ready" and not cache.phase:
                log.info("asked to load along cache=%s device=%s", want.name, device)
                await asyncio.to_thread(self._ask_along, device, want.name)
                asked.add(device)
        return asked

    async def lacks(self, want: Wanted) -> bool:
        """Whether a rank of the group waits for the others: one that loads, and is not beyond the
        meeting.
        """
        found = (await self._caches(want)).values()
        return any(cache.state == "loading" and cache.phase not in _MET for cache in found)

    async def _caches(self, want: Wanted) -> dict[str, CacheStatus]:
        devices = [device for device in want.spec.devices if device != self._device]
        return await asyncio.to_thread(
            lambda: {
                device: cache
                for device in devices
                if (cache := self._cache(device, want.name)) is not None
            }
        )

    def _cache(self, device: str, name: str) -> CacheStatus | None:
        try:
            status = ask_status(self._socket_of(device), timeout_s=_TIMEOUT_S)
        except WeightcachedError:
            # Its daemon is not up: when it is, it loads.
            return None
        return next((cache for cache in status.caches if cache.name == name), None)

    def _ask_along(self, device: str, name: str) -> None:
        path = self._socket_of(device)
        try:
            with Connection.connect(path, timeout_s=_TIMEOUT_S, purpose="ctl") as connection:
                # The reload goes on when we hang up; its first word shows that it has begun.
                connection.request(Reload(caches=[name], along=True), _BEGIN_TIMEOUT_S)
        except WeightcachedError as e:
            log.warning("peer does not load along cache=%s device=%s error=%s", name, device, e)
