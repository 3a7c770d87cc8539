"""Make what is served what the manifest says: at start, at `weightcachectl reload`, and on SIGHUP.

plan() decides, as a function of data; Reconciler carries it out. Loads use the device one at a
time: two would need twice the memory beside what is served. Children of the next ones are started
ahead, since importing vLLM takes longer than loading many a model; they wait for their turn.
Whatever fails, what is served stays served.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from weightcached.checkpoint.identity import changed_files
from weightcached.config.manifest import ModelSpec, load_manifest
from weightcached.config.wanted import Wanted, wanted_caches
from weightcached.daemon.caches import Cache, Caches, Generation
from weightcached.daemon.fdstore import FdStore, StoreError
from weightcached.daemon.loading import (
    Delivery,
    LoaderRun,
    LoadFailedError,
    LoadRequest,
    OnKey,
    OnProgress,
)
from weightcached.daemon.logs import printable
from weightcached.daemon.matching import Matcher
from weightcached.daemon.notify import Notifier
from weightcached.errors import ManifestError
from weightcached.index.key import WeightCacheKey
from weightcached.system.fds import close_all
from weightcached.system.paths import manifest_path
from weightcached.wire.loader_job import Meeting
from weightcached.wire.messages import CacheOutcome, Role

log = logging.getLogger(__name__)

_MAX_AHEAD = 3
_CORES_FOR_EACH_AHEAD = 4


class Plan(NamedTuple):
    load: list[Wanted]
    unchanged: list[Wanted]
    drop: list[str]


class Loader(Protocol):
    """Runs one loader child, as LoaderRun does."""

    def __call__(
        self, request: LoadRequest, *, on_progress: OnProgress, on_key: OnKey, turn: asyncio.Event
    ) -> LoaderRun: ...


class QueuedRun:
    """A loader run that waits for its turn, or has it."""

    def __init__(self, turn: asyncio.Event, run: asyncio.Task[Delivery]) -> None:
        self._turn = turn
        self._run = run
        self._taken = False

    async def delivery(self) -> Delivery:
        """Let it use the device and wait for what it makes; the caller owns that. Raises what
        LoaderRun.run() does.
        """
        self._turn.set()
        delivery = await self._run
        self._taken = True
        return delivery

    async def discard(self) -> None:
        """End it, and free what nobody took."""
        if self._taken:
            return
        self._run.cancel()
        (result,) = await asyncio.gather(self._run, return_exceptions=True)
        if isinstance(result, Delivery):
            close_all([result.index_fd, *result.segment_fds])


def loaders_ahead() -> int:
    """How many children may import ahead: each takes a core, and 1 to 2 GB of host memory."""
    return min(_MAX_AHEAD, (os.cpu_count() or 1) // _CORES_FOR_EACH_AHEAD)


class UnknownCacheError(Exception):
    """A reload names a cache that neither the manifest nor the daemon has."""


def meeting_of(spec: ModelSpec, role: Role) -> Meeting | None:
    """Where the role's loaders meet; None where each loads alone."""
    place = spec.rendezvous
    if place is None:
        return None
    return Meeting(
        host=place.host, port=place.port_of(role), timeout_s=place.timeout_s, devices=spec.devices
    )


def plan(
    wanted: Sequence[Wanted],
    caches: Caches,
    *,
    stale: Collection[str],
    force: bool,
    only: Collection[str],
) -> Plan:
    """What to load, keep and drop. `stale` are caches whose checkpoint changed on disk; empty
    `only` means all.
    """
    chosen = [want for want in wanted if not only or want.name in only]
    load: list[Wanted] = []
    unchanged: list[Wanted] = []
    for want in chosen:
        cache = caches.get(want.name)
        served = cache.generation if cache else None
        current = (
            served is not None and served.spec_digest == want.spec_digest and want.name not in stale
        )
        (unchanged if current and not force else load).append(want)
    names = {want.name for want in wanted}
    drop = [
        cache.name
        for cache in caches
        if cache.name not in names and (not only or cache.name in only)
    ]
    return Plan(load, unchanged, drop)


class Reconciler:
    """Runs reconciliations one after the other. `loads` counts loader runs since the daemon
    started.
    """

    def __init__(
        self,
        caches: Caches,
        matcher: Matcher,
        store: FdStore,
        notifier: Notifier,
        loader: Loader,
        *,
        device: str,
        boot_id: str,
        manifest: Path | None,
        ahead: int | None = None,
        unmap_parked: Callable[[str, int], Awaitable[None]] | None = None,
    ) -> None:
        self._caches = caches
        self._matcher = matcher
        self._store = store
        self._notifier = notifier
        self._loader = loader
        self._device = device
        self._boot_id = boot_id
        self._unmap_parked = unmap_parked
        self._explicit_manifest = manifest
        self._ahead = loaders_ahead() if ahead is None else ahead
        self._lock = asyncio.Lock()
        # What failed and may succeed if tried again without a change.
        self.transient_failures: set[str] = set()
        self.manifest = str(manifest or "")
        self.manifest_error = ""
        # Set once what the manifest wants is among the caches, or the manifest was refused.
        self.settled = asyncio.Event()

    async def run(self, *, force: bool = False, only: Collection[str] = ()) -> list[CacheOutcome]:
        """Read the manifest and reconcile. Raises ManifestError, UnknownCacheError; nothing has
        changed then.
        """
        async with self._lock:
            try:
                wanted = await self._read_manifest()
                self._check_names(only, wanted)
                stale = await self._find_stale()
                todo = plan(wanted, self._caches, stale=stale, force=force, only=only)
                outcomes = [await self._drop(name) for name in todo.drop]
                outcomes += [self._keep_unchanged(want) for want in todo.unchanged]
                for want in todo.load:
                    self._queue(want)
            finally:
                self.settled.set()
            self._caches.changed.fire()
            return outcomes + await self._load_all(todo.load)

    async def _read_manifest(self) -> list[Wanted]:
        try:
            path = manifest_path(self._explicit_manifest)
            self.manifest = str(path)
            manifest = await asyncio.to_thread(load_manifest, path)
        except ManifestError as e:
            self.manifest_error = str(e)
            log.error("manifest refused error=%s", e)
            raise
        self.manifest_error = ""
        wanted = wanted_caches(manifest, self._device)
        if not wanted:
            log.warning("manifest places no model here manifest=%s device=%s", path, self._device)
        return wanted

    def _check_names(self, only: Collection[str], wanted: list[Wanted]) -> None:
        known = {want.name for want in wanted} | {cache.name for cache in self._caches}
        unknown = [name for name in only if name not in known]
        if unknown:
            raise UnknownCacheError(
                f"no cache {printable(', '.join(map(repr, unknown)), 1000)} on {self._device}: it has "
                f"{', '.join(sorted(known)) or 'none'}"
            )

    async def _find_stale(self) -> set[str]:
        """Caches whose checkpoint is no longer what was loaded."""
        stale = set()
        for cache in self._caches:
            if cache.generation is not None:
                changed = await asyncio.to_thread(changed_files, cache.generation.key.checkpoint)
                if changed:
                    log.info(
                        "checkpoint changed cache=%s files=%d first=%s",
                        cache.name,
                        len(changed),
                        changed[0],
                    )
                    stale.add(cache.name)
        return stale

    def _keep_unchanged(self, want: Wanted) -> CacheOutcome:
        cache = self._caches.ensure(want.name, want.role)
        cache.identity = want.spec.identity
        # The failure of an earlier reload says nothing about what is served now.
        cache.error = ""
        return CacheOutcome(cache=cache.name, outcome="unchanged", generation=_served_number(cache))

    def _queue(self, want: Wanted) -> None:
        cache = self._caches.ensure(want.name, want.role)
        cache.identity = want.spec.identity
        cache.begin_load()

    async def _load_all(self, wanted: Sequence[Wanted]) -> list[CacheOutcome]:
        outcomes: list[CacheOutcome] = []
        started: dict[str, QueuedRun] = {}
        try:
            for position, want in enumerate(wanted):
                for coming in wanted[position : position + 1 + self._ahead]:
                    if coming.name not in started:
                        started[coming.name] = self._start(coming, at_once=coming is want)
                outcomes.append(await self._load(want, started[want.name]))
        finally:
            for run in started.values():
                await run.discard()
        return outcomes

    def _start(self, want: Wanted, *, at_once: bool) -> QueuedRun:
        turn = asyncio.Event()
        if at_once:
            turn.set()
        cache = self._caches.ensure(want.name, want.role)
        return QueuedRun(turn, asyncio.create_task(self._run_loader(cache, want, turn)))

    async def _load(self, want: Wanted, run: QueuedRun) -> CacheOutcome:
        cache = self._caches.ensure(want.name, want.role)
        began_s = time.monotonic()
        try:
            delivery = await run.delivery()
        except LoadFailedError as e:
            self._record_failure(cache, e)
        except OSError as e:
            self._record_failure(
                cache, LoadFailedError(f"loader of {cache.name} cannot be run: {e.strerror or e}")
            )
        else:
            await self._publish(cache, delivery)
        finally:
            self._caches.changed.fire()
        return CacheOutcome(
            cache=cache.name,
            outcome="failed" if cache.error else "loaded",
            generation=_served_number(cache),
            seconds=time.monotonic() - began_s,
            error=cache.error,
        )

    async def _run_loader(self, cache: Cache, want: Wanted, turn: asyncio.Event) -> Delivery:
        load = cache.begin_load()

        def on_progress(phase: str, done_bytes: int, total_bytes: int) -> bool:
            advanced = load.advance(phase, done_bytes, total_bytes)
            if advanced and turn.is_set():
                self._notifier.progress(cache, load)
            return advanced

        def on_key(key: WeightCacheKey) -> None:
            load.key = key
            self._caches.changed.fire()

        request = self._request(cache, want)
        return await self._loader(request, on_progress=on_progress, on_key=on_key, turn=turn).run()

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
        )

    async def _publish(self, cache: Cache, delivery: Delivery) -> None:
        """Stored first, then served: a daemon that dies in between finds the new generation and
        keeps the higher.
        """
        generation = Generation(
            delivery.index, delivery.index_digest, delivery.index_fd, delivery.segment_fds, "loaded"
        )
        try:
            await asyncio.to_thread(self._store.put, generation)
        except StoreError as e:
            log.warning(
                "not in the store, a restart will load it again cache=%s error=%s", cache.name, e
            )
        except BaseException:
            generation.retire()
            raise
        self.transient_failures.discard(cache.name)
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
            await self._retire(old)

    def _record_failure(self, cache: Cache, error: LoadFailedError) -> None:
        (self.transient_failures.discard if error.permanent else self.transient_failures.add)(
            cache.name
        )
        cache.fail_load(str(error))
        log.error(
            "load failed cache=%s served_generation=%d permanent=%s error=%s",
            cache.name,
            _served_number(cache),
            "yes" if error.permanent else "no",
            error,
        )

    async def _drop(self, name: str) -> CacheOutcome:
        log.info("dropped, not in the manifest any more cache=%s", name)
        await self.forget(name)
        return CacheOutcome(cache=name, outcome="dropped")

    async def forget(self, name: str) -> None:
        """Stop serving a cache and free its memory, engines' own mappings apart."""
        generation = self._caches.remove(name)
        self.transient_failures.discard(name)
        if generation is not None:
            await self._retire(generation)

    async def release(self, cache: Cache) -> None:
        """Free the generation of a cache whose engines have copies of their own."""
        generation = cache.release()
        log.info(
            "released cache=%s generation=%d bytes=%d",
            cache.name,
            generation.number,
            generation.nbytes,
        )
        self._caches.changed.fire()
        await self._retire(generation)

    async def _retire(self, generation: Generation) -> None:
        generation.retire()
        self._matcher.forget(generation)
        # Whoever asked for it may leave meanwhile; the store would then keep the memory for good.
        await asyncio.shield(asyncio.create_task(self._take_out(generation)))
        # Engines that sleep need it no more than we do; those that are awake keep it mapped.
        if self._unmap_parked is not None:
            await self._unmap_parked(generation.cache, generation.number)

    async def _take_out(self, generation: Generation) -> None:
        try:
            await asyncio.to_thread(self._store.remove, generation)
        except StoreError as e:
            log.warning(
                "stays in the store until the unit stops cache=%s error=%s", generation.cache, e
            )


def _served_number(cache: Cache) -> int:
    return cache.generation.number if cache.generation else 0
