"""Runs of loaders for the caches that are wanted: from a snapshot that fits, or as a load.

One of several that start ahead waits for its turn (QueuedRun); the ranks of a group call each other.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from weightcached.config.wanted import Wanted
from weightcached.daemon.caches import Cache, Caches, LoadProgress
from weightcached.daemon.group import GroupPeers
from weightcached.daemon.loading import (
    Delivery,
    LoaderRun,
    LoadFailedError,
    LoadRequest,
    OnKey,
    OnProgress,
)
from weightcached.daemon.notify import Notifier
from weightcached.daemon.planning import meeting_of
from weightcached.daemon.snapshots import Snapshots
from weightcached.daemon.staleness import Staleness
from weightcached.index.key import WeightCacheKey
from weightcached.system.fds import close_all

log = logging.getLogger(__name__)

_MAX_AHEAD = 3
_CORES_FOR_EACH_AHEAD = 4
# How often a rank looks for peers that have restored theirs, or had it all along.
_PEERS_PERIOD_S = 2.0
# A loader that has imported all it needs, and may use the device from now on.
_WAITING = "waiting"
_WAITING_LOOK_S = 0.02
_WAITING_TIMEOUT_S = 600.0


class Loader(Protocol):
    """Runs one loader child, as LoaderRun does."""

    def __call__(
        self,
        request: LoadRequest,
        *,
        on_progress: OnProgress,
        on_key: OnKey,
        turn: asyncio.Event,
        command: Sequence[str] = ...,
    ) -> LoaderRun: ...


class QueuedRun:
    """A loader run that waits for its turn, or has it."""

    def __init__(self, turn: asyncio.Event, run: asyncio.Task[Delivery]) -> None:
        self._turn = turn
        self._run = run
        self._taken = False

    async def delivery(self) -> Delivery:
        """Let it use the device; its delivery, owned by the caller. Raises as LoaderRun.run()."""
        self._turn.set()
        delivery = await self._run
        self._taken = True
        return delivery

    @property
    def is_over(self) -> bool:
        return self._run.done()

    async def discard(self) -> None:
        """End it, and free a delivery that nobody took."""
        if self._taken:
            return
        self._run.cancel()
        (result,) = await asyncio.gather(self._run, return_exceptions=True)
        if isinstance(result, Delivery):
            close_all([result.index_fd, *result.segment_fds])


async def wait_for_need(cache: Cache, run: QueuedRun) -> str:
    """Return once a run needs the device, or is over; why it does not come to that, or ""."""
    try:
        async with asyncio.timeout(_WAITING_TIMEOUT_S):
            while not run.is_over and not (cache.load and cache.load.phase == _WAITING):
                await asyncio.sleep(_WAITING_LOOK_S)
    except TimeoutError:
        return f"their loader still prepares after {_WAITING_TIMEOUT_S:.0f} s"
    return ""


def loaders_ahead() -> int:
    """How many children may import ahead: each takes a core, and 1 to 2 GB of host memory."""
    return min(_MAX_AHEAD, (os.cpu_count() or 1) // _CORES_FOR_EACH_AHEAD)


class Runs:
    """Starts the loaders and restorers of one device. peers: the other ranks of its groups."""

    def __init__(
        self,
        caches: Caches,
        notifier: Notifier,
        loader: Loader,
        snapshots: Snapshots,
        *,
        device: str,
        boot_id: str,
        peers: GroupPeers | None = None,
    ) -> None:
        self._caches = caches
        self._notifier = notifier
        self._loader = loader
        self._snapshots = snapshots
        self._device = device
        self._boot_id = boot_id
        self._peers = peers

    def start(
        self,
        want: Wanted,
        look: Staleness | None,
        *,
        at_once: bool,
        along: bool = False,
        prepares: bool = False,
    ) -> QueuedRun:
        """Load, or restore if `look` finds a snapshot that equals the result of a load.

        at_once: it has its turn; along: for another rank of the group; prepares: as in LoaderJob.
        """
        turn = asyncio.Event()
        if at_once:
            turn.set()
        cache = self._caches.ensure(want.name, want.role)
        run = self._run_loader(cache, want, look, turn, along=along, prepares=prepares)
        return QueuedRun(turn, asyncio.create_task(run))

    async def restore(
        self, cache: Cache, want: Wanted, load: LoadProgress, path: Path, spec_digest: str
    ) -> Delivery:
        """Read this snapshot, whatever a load would make. Raises LoadFailedError, OSError."""
        request = self._request(cache, want)._replace(spec_digest=spec_digest)
        turn = asyncio.Event()
        turn.set()
        return await self._restore(self._child(cache, request, load, turn), want, path)

    async def _run_loader(
        self,
        cache: Cache,
        want: Wanted,
        look: Staleness | None,
        turn: asyncio.Event,
        *,
        along: bool,
        prepares: bool,
    ) -> Delivery:
        expected_key = cache.load.expected_key if cache.load else None
        load = cache.begin_load()
        load.expected_key = expected_key
        request = self._request(cache, want)._replace(prepares=prepares)
        run = self._child(cache, request, load, turn)
        path = None if along else await self._find_snapshot(want, load, look)
        if path is not None:
            try:
                return await self._restore(run, want, path)
            except LoadFailedError as e:
                if e.no_room:
                    # A load needs no less.
                    raise
                log.warning("a snapshot could not be restored, it is loaded cache=%s", cache.name)
                self._snapshots.reject(cache.name, path, str(e))
        if want.spec.rendezvous is None or self._peers is None or along:
            return await run().run()
        caller = asyncio.create_task(self._call_peers(self._peers, want, load, turn))
        try:
            return await run().run()
        finally:
            caller.cancel()
            await asyncio.gather(caller, return_exceptions=True)

    async def _restore(self, run: Callable[..., LoaderRun], want: Wanted, path: Path) -> Delivery:
        restored = run(command=self._snapshots.restorer(path, want.spec.python))
        return replace(await restored.run(), source="restored", snapshot=path)

    def _child(
        self, cache: Cache, request: LoadRequest, load: LoadProgress, turn: asyncio.Event
    ) -> Callable[..., LoaderRun]:
        """Makes the run of a loader or a restorer, whose progress is that of the cache."""

        def on_progress(phase: str, done_bytes: int, total_bytes: int) -> bool:
            advanced = load.advance(phase, done_bytes, total_bytes)
            if advanced and turn.is_set():
                self._notifier.progress(cache, load)
            return advanced

        def on_key(key: WeightCacheKey) -> None:
            load.key = key
            self._caches.changed.fire()

        return partial(self._loader, request, on_progress=on_progress, on_key=on_key, turn=turn)

    async def _find_snapshot(
        self, want: Wanted, load: LoadProgress, look: Staleness | None
    ) -> Path | None:
        """The snapshot to restore; for a rank of a group only if the others have theirs too."""
        path = await self._snapshots.find(want, look.reason if look else None)
        load.source = "snapshot" if path else "checkpoint"
        place = want.spec.rendezvous
        if path is None or place is None or self._peers is None:
            return path
        device = await self._peers.loading(want, timeout_s=place.timeout_s)
        if device is None:
            return path
        # It would wait for this rank, which would have to load beside what it has restored.
        self._snapshots.reject(want.name, path, f"{device} of the same group loads")
        load.source = "checkpoint"
        return None

    async def _call_peers(
        self, peers: GroupPeers, want: Wanted, load: LoadProgress, turn: asyncio.Event
    ) -> None:
        """Until the ranks have met, ask those to load along that serve and would not come."""
        await turn.wait()
        asked: set[str] = set()
        while True:
            asked |= await peers.call(want, but=asked)
            await asyncio.sleep(_PEERS_PERIOD_S)
            # The key is told right after the meeting.
            if load.key is not None:
                return

    def _request(self, cache: Cache, want: Wanted) -> LoadRequest:
        placement = want.spec.placement_of(self._device)
        return LoadRequest(
            device=self._device,
            cache=cache.name,
            role=cache.role,
            generation=cache.next_number,
            spec_digest=want.spec_digest,
            engine=want.spec.engine,
            rank=placement.rank,
            dp_rank=placement.dp_rank,
            rendezvous=meeting_of(want.spec, cache.role),
            identity=want.spec.identity,
            python=want.spec.python,
            boot_id=self._boot_id,
            env=want.spec.env,
            label=want.spec.label,
        )
