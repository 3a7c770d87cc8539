"""The other ranks on this node of a model that loads as a group.

A rank that lost its generation needs its peers in order to load it. They have theirs, and a reload
would not touch them; so this rank asks them to load along. They drop the result and go on serving.

To restore a snapshot takes no peers. But if one rank of several that start has none, all load: the
others would have to load beside what they have just restored, in twice the memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
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


# Phases of a loader that has met its peers, and of a restorer, which needs none.
_MET = frozenset(
    {"weights", "packing", "proving", "publishing", "tuning", "opening", "segments", "restoring"}
)
# Phases before it is known whether there is a snapshot, and those of a restorer.
_MAY_RESTORE = frozenset({"queued", "waiting", "opening", "segments", "restoring"})
_POLL_S = 0.1
# From the manager's start of several units until the last one's daemon answers.
_UP_TIMEOUT_S = 5.0


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

    async def loading(self, want: Wanted, *, timeout_s: float) -> str | None:
        """The device of a rank that is due and has no snapshot that fits; None if each has one.

        Ranks that serve, and those that nobody loads, do not count. Waits until all that load know,
        at most `timeout_s`; for daemons that are about to start, at boot, a moment.
        """
        began_s = time.monotonic()
        deadline_s, up_s = began_s + timeout_s, began_s + min(timeout_s, _UP_TIMEOUT_S)
        while True:
            found = await self._caches(want)
            due = {
                device: cache
                for device, cache in found.items()
                if cache.phase or cache.state == "loading"
            }
            for device, cache in due.items():
                # An older daemon does not say, but its phase does.
                if cache.load_from == "checkpoint" or (
                    not cache.load_from and cache.phase not in _MAY_RESTORE
                ):
                    return device
            unknown = [device for device, cache in due.items() if not cache.load_from]
            if len(found) < len(want.spec.devices) - 1 and time.monotonic() < up_s:
                await asyncio.sleep(_POLL_S)
                continue
            if not unknown:
                return None
            if time.monotonic() > deadline_s:
                log.warning(
                    "restored, although peers do not say whether they can cache=%s devices=%s",
                    want.name,
                    unknown,
                )
                return None
            await asyncio.sleep(_POLL_S)

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
