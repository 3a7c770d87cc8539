"""Serve the caches that the manifest names: at start, at `weightcachectl reload`, and on SIGHUP.

planning.plan() decides; Reconciler carries it out, with the loaders that runs.py starts. Loads use
the device one at a time: two would need twice the memory beside what is served. Children of the next
loads start ahead, because importing vLLM takes longer than loading many models; they wait for their
turn. If a load fails, the served generation stays.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path

from weightcached.checkpoint.identity import CheckpointIdentity, record_checkpoint, with_sample
from weightcached.config.drafts import checkpoint_arguments
from weightcached.config.manifest import ModelSpec, load_manifest
from weightcached.config.wanted import Wanted, wanted_caches
from weightcached.daemon.caches import Cache, Caches, Generation, LoadProgress
from weightcached.daemon.counters import Tally
from weightcached.daemon.fdstore import FdStore
from weightcached.daemon.group import GroupPeers
from weightcached.daemon.holds import Holds
from weightcached.daemon.in_place import Ways
from weightcached.daemon.loading import LoadFailedError
from weightcached.daemon.logs import printable
from weightcached.daemon.matching import Matcher
from weightcached.daemon.planning import is_current, plan
from weightcached.daemon.publishing import Publisher, served_number
from weightcached.daemon.residency import Residency
from weightcached.daemon.retiring import Retirement
from weightcached.daemon.retries import Retries
from weightcached.daemon.rollbacks import HELD, Before
from weightcached.daemon.room import NoRoomError, Replaced, Room
from weightcached.daemon.runs import QueuedRun, Runs, loaders_ahead, wait_for_need
from weightcached.daemon.snapshots import Snapshots
from weightcached.daemon.staleness import Staleness
from weightcached.errors import (
    ManifestError,
    SnapshotError,
    UnknownCacheError,
    WeightcachedError,
)
from weightcached.system.fds import close_all
from weightcached.system.paths import manifest_path
from weightcached.wire.messages import CacheOutcome

log = logging.getLogger(__name__)

# How soon a cache that is due to be evicted is looked at again, if its snapshot is being written.
_IDLE_LOOK_S = 0.25


class Reconciler:
    """Runs reconciliations one after the other."""

    def __init__(
        self,
        caches: Caches,
        matcher: Matcher,
        store: FdStore,
        runs: Runs,
        *,
        device: str,
        manifest: Path | None,
        ahead: int | None = None,
        look: Callable[[], Staleness],
        snapshots: Snapshots,
        residency: Residency,
        ways: Ways,
        tally: Tally,
        unmap_parked: Callable[[Generation], Awaitable[None]] | None = None,
        holds: Holds | None = None,
        peers: GroupPeers | None = None,
    ) -> None:
        self._caches = caches
        self._matcher = matcher
        self._runs = runs
        self._device = device
        self._holds = holds or Holds()
        self._looking: set[asyncio.Task[None]] = set()
        self._peers = peers
        self._explicit_manifest = manifest
        self._ahead = loaders_ahead() if ahead is None else ahead
        self._look = look
        self._last_look = look()
        self._snapshots = snapshots
        self._residency = residency
        self._ways = ways
        self._retirement = Retirement(caches, matcher, store, snapshots, self._holds, unmap_parked)
        self._room = Room(residency, self._retirement, snapshots, self.evict)
        self._tally = tally
        self._lock = asyncio.Lock()
        # Failed caches that may load if tried again without a change.
        self.retries = Retries()
        self._publisher = Publisher(store, self.retries, snapshots, self._retirement)
        self._wanted: dict[str, Wanted] = {}
        self.manifest = str(manifest or "")
        self.manifest_error = ""
        # Set once the caches that the manifest names are known, or the manifest was refused.
        self.settled = asyncio.Event()

    async def run(
        self,
        *,
        force: bool = False,
        only: Collection[str] = (),
        starting: bool = False,
        along: bool = False,
        live: bool = False,
    ) -> list[CacheOutcome]:
        """Read the manifest and reconcile. along: load current caches too, for another rank of
        their group; live: as if all models were.

        Raises ManifestError, UnknownCacheError; nothing has changed then.
        """
        async with self._lock:
            try:
                wanted = await self._read_manifest()
                if starting:
                    await self._snapshots.sweep()
                chosen = self._chosen(only, wanted)
                look = self._last_look = self._look()
                stale = await self._find_stale(wanted, look)
                todo = plan(
                    wanted, self._caches, stale=stale, force=force, only=chosen, starting=starting
                )
                # Nothing is awaited between the plan and its marks on the caches: a Drop would
                # come in between.
                kept = [self._keep_unchanged(want) for want in todo.unchanged]
                for want in todo.load:
                    self.retries.settled(want.name)
                    # It may be of another size by now.
                    self._queue(want).last_nbytes = 0
                kept += [self._offer(want) for want in todo.offer]
                self._wanted = {want.name: want for want in wanted}
                outcomes = [await self._drop(name) for name in todo.drop] + kept
                for want in todo.offer:
                    await self._find_key(want, look)
            finally:
                self.settled.set()
            await self._retirement.note_aside()
            self._caches.changed.fire()
            # A forced reload distrusts the snapshots too.
            outcomes += await self._load_all(todo.load, None if force else look, live=live)
            # The budget may be another one.
            await self._residency.make_room(None, 0, self.evict)
            if along:
                await self._load_along(todo.unchanged)
            return outcomes

    async def _load_along(self, wanted: Sequence[Wanted]) -> None:
        """Load with a rank that lost its generation, for its sake alone."""
        for want in wanted:
            cache = self._caches.get(want.name)
            if want.spec.rendezvous is None or self._peers is None or cache is None:
                continue
            # Asked for by several that were lost, they all met the first time.
            if cache.generation is None or not await self._peers.lacks(want):
                continue
            async with self._holds.device_for(cache):
                run = self._runs.start(want, None, at_once=True, along=True)
                try:
                    delivery = await run.delivery()
                except (LoadFailedError, OSError) as e:
                    log.warning("did not load along cache=%s error=%s", want.name, e)
                else:
                    close_all([delivery.index_fd, *delivery.segment_fds])
                    log.info("loaded along cache=%s", want.name)
                finally:
                    cache.end_load()
                    await run.discard()
                    self._caches.changed.fire()

    def _offer(self, want: Wanted) -> CacheOutcome:
        """On demand and not served: nothing is loaded before an engine asks."""
        cache = self._ensure(want)
        self.retries.settled(want.name)
        if cache.state != "evicted":
            cache.offer(None, 0)
        return CacheOutcome(cache=cache.name, outcome="unchanged")

    async def _find_key(self, want: Wanted, look: Staleness) -> None:
        """By what an engine is told that an offered cache is its own: the key in its snapshot, or
        the checkpoint.
        """
        path = await self._snapshots.find(want, look.reason)
        self._snapshots.offered(want.name)
        checkpoint = await asyncio.to_thread(_checkpoint_of, want)
        kept, cache = self._snapshots.kept(want.name), self._caches.get(want.name)
        if cache is not None and cache.state == "evicted":
            cache.checkpoint = checkpoint
            cache.offer(*((kept.key, kept.nbytes) if path and kept else (None, 0)))

    async def bring_back(self, cache: Cache) -> None:
        """Load or restore a cache for which an engine has asked, and whose load has begun."""
        async with self._lock:
            want = self._wanted.get(cache.name)
            if self._caches.get(cache.name) is not cache or cache.load is None:
                # Dropped, or loaded by a reload meanwhile.
                return
            if want is None:
                # A reload of other caches read the manifest, and left this one alone.
                cache.fail_load(f"{cache.name} is in the manifest no longer")
                self._caches.changed.fire()
                return
            # An evicted cache is as old as a served one: only a reload asks the interpreter for its
            # versions again, which takes as long as reading some GiB.
            await self._load_all([want], self._last_look)

    async def evict(self, cache: Cache) -> None:
        """Stop serving a cache until an engine asks for it; free its memory."""
        self.retries.settled(cache.name)
        if cache.generation is None:
            cache.offer(cache.last_key, cache.last_nbytes)
            await self._retirement.set_aside(None)
            return
        generation = cache.evict()
        self._tally.evicted(cache.name)
        log.info(
            "evicted cache=%s generation=%d bytes=%d",
            cache.name,
            generation.number,
            generation.nbytes,
        )
        await self._retirement.set_aside(generation)

    def is_writing(self, cache: Cache) -> bool:
        """Whether the snapshot of the served generation is being written, or is to be."""
        return cache.generation is not None and self._snapshots.is_writing(cache.generation)

    async def evict_idle(self) -> float | None:
        """Evict on-demand caches that no engine has held for their `idle_evict_s`.

        Returns the seconds until the next may be due; None if none may.
        """
        left: list[float] = []
        for name, want in self._wanted.items():
            cache = self._caches.get(name)
            generation = cache.generation if cache else None
            if cache is None or generation is None or not want.spec.idle_evict_s:
                continue
            if not self._residency.is_idle(cache) or self._residency.is_held(cache):
                continue
            due_s = generation.used_s + want.spec.idle_evict_s - time.monotonic()
            # Or it would have to be loaded instead of restored.
            if due_s <= 0 and not self.is_writing(cache):
                log.info("evicted after its idle time cache=%s", name)
                await self.evict(cache)
            else:
                left.append(max(due_s, _IDLE_LOOK_S))
        return min(left, default=None)

    def live_models(
        self, outcomes: Sequence[CacheOutcome], only: Collection[str] = (), *, asked: bool = False
    ) -> list[ModelSpec]:
        """The models whose engines are to map what is served now, after a round with `outcomes`:
        those that are live, with `asked` all that the round was about. None with a cache that failed.
        """
        failed = {o.cache.rpartition("/")[0] for o in outcomes if o.outcome == "failed"}
        # May be empty: what the round was about may have been dropped in it.
        chosen = _named(only, self._wanted)
        found = {
            want.spec.name: want.spec
            for want in self._wanted.values()
            if (not only or want.name in chosen) and (want.spec.live or asked)
        }
        return [spec for name, spec in found.items() if name not in failed]

    async def retry(self) -> list[CacheOutcome]:
        """Load the caches that are due to be tried again, by the manifest as last read."""
        async with self._lock:
            due = self.retries.take_due()
            look = self._look()
            known = [self._wanted[name] for name in due if name in self._wanted]
            stale = await self._find_stale(known, look)
            todo: list[Wanted] = []
            for name in due:
                want, cache = self._wanted.get(name), self._caches.get(name)
                # Dropped while we looked.
                dropped = cache is not None and cache.state in ("released", "evicted")
                if want is None or dropped or is_current(want, self._caches, stale):
                    self.retries.settled(name)
                else:
                    self._queue(want)
                    todo.append(want)
            return await self._load_all(todo, look)

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
        self._snapshots.spec = manifest.snapshots
        self._residency.budget = manifest.budget_of(self._device)
        wanted = wanted_caches(manifest, self._device)
        await self._snapshots.rollbacks.read(manifest.snapshots, [want.name for want in wanted])
        if not wanted:
            log.warning("manifest places no model here manifest=%s device=%s", path, self._device)
        return wanted

    def _chosen(self, only: Collection[str], wanted: list[Wanted]) -> set[str]:
        """The caches that `only` names, each by its own name or its model's.

        Raises UnknownCacheError if none is on this device.
        """
        known = {want.name for want in wanted} | {cache.name for cache in self._caches}
        chosen = _named(only, known)
        if only and not chosen:
            raise UnknownCacheError(
                f"no cache {printable(', '.join(map(repr, only)), 1000)} on {self._device}: it has "
                f"{', '.join(sorted(known)) or 'none'}"
            )
        return chosen

    async def _find_stale(self, wanted: Sequence[Wanted], look: Staleness) -> set[str]:
        """Served caches that a load would make differently now."""
        stale = set()
        for want in wanted:
            cache = self._caches.get(want.name)
            generation = cache.generation if cache else None
            if generation is None or generation.spec_digest != want.spec_digest:
                continue
            if reason := await look.reason(generation, want):
                if await self._snapshots.rollbacks.holds(generation, want, look.reason):
                    continue
                log.info("stale cache=%s reason=%s", want.name, printable(reason, 1000))
                stale.add(want.name)
        return stale

    def _keep_unchanged(self, want: Wanted) -> CacheOutcome:
        cache = self._ensure(want)
        # The failure of an earlier reload does not concern the served generation.
        cache.error = ""
        rolled_back = cache.generation and self._snapshots.rollbacks.at(cache.generation)
        return CacheOutcome(
            cache=cache.name,
            outcome="unchanged",
            generation=served_number(cache),
            note=HELD if rolled_back else "",
        )

    def _ensure(self, want: Wanted) -> Cache:
        cache = self._caches.ensure(want.name, want.role)
        cache.identity, cache.resident = want.spec.identity, want.spec.resident
        cache.live = want.spec.live
        return cache

    def _queue(self, want: Wanted) -> Cache:
        cache = self._ensure(want)
        cache.checkpoint = None
        cache.begin_load()
        looking = asyncio.create_task(self._look_at_checkpoint(cache, want))
        self._looking.add(looking)
        looking.add_done_callback(self._looking.discard)
        return cache

    async def _look_at_checkpoint(self, cache: Cache, want: Wanted) -> None:
        """Find loads that an engine must not wait for: those of other weights than its own."""
        checkpoint = await asyncio.to_thread(_checkpoint_of, want)
        if self._wanted.get(want.name) is want:
            cache.checkpoint = checkpoint
            self._caches.changed.fire()

    async def _load_all(
        self, wanted: Sequence[Wanted], look: Staleness | None, *, live: bool = False
    ) -> list[CacheOutcome]:
        """Load, or restore if `look` finds a snapshot that equals the result of a load.

        live: engines of every model may sleep for its new weights, not only of those that are.
        """
        outcomes: list[CacheOutcome] = []
        started: dict[str, QueuedRun] = {}
        left = list(wanted)
        try:
            for position, want in enumerate(wanted):
                await self._end_ways(outcomes, but=want.spec.name)
                cache = self._caches.ensure(want.name, want.role)
                outcome: CacheOutcome | LoadFailedError
                async with self._holds.device_for(cache):
                    try:
                        replaced = await self._room.make(cache, want, keeps_held=cache.live or live)
                    except NoRoomError as e:
                        outcome = e
                        if want.name in started:
                            await started[want.name].discard()
                    else:
                        for coming in wanted[position : position + 1 + self._ahead]:
                            if coming.name not in started:
                                at_once = coming is want
                                started[coming.name] = self._runs.start(
                                    coming, look, at_once=at_once
                                )
                        outcome = await self._load(want, started[want.name], live=live)
                        if replaced is not None and cache.generation is None:
                            await self._restore_replaced(cache, want, replaced)
                if isinstance(outcome, LoadFailedError):
                    in_place = cache.generation is not None
                    outcome = (
                        await self._load_in_place(cache, want, look, outcome)
                        if in_place
                        else self._refuse(cache, outcome)
                    )
                outcomes.append(outcome)
                left.remove(want)
            await self._end_ways(outcomes)
        finally:
            self._ways.drop()
            for want in left:
                self._give_up(want)
            for run in started.values():
                await run.discard()
            # Not beside a load, which reads the same disk.
            self._matcher.make_digests()
            self._write_snapshots()
        return outcomes

    async def _load_in_place(
        self, cache: Cache, want: Wanted, look: Staleness | None, error: LoadFailedError
    ) -> CacheOutcome:
        """There is no room beside the served generation: its engines sleep, it goes, the next comes.

        It stays if it could not come back, or if an engine would keep it mapped. The engines sleep
        until _end_ways().
        """
        began_s, old = time.monotonic(), cache.generation
        assert old is not None
        cache.begin_load()
        run: QueuedRun | None = None
        try:
            reason, path = await self._find_way_back(old)
            if path is not None:
                # It imports what it needs while the engines serve.
                run = self._runs.start(want, look, at_once=False, prepares=True)
                reason = await wait_for_need(cache, run)
                if run.is_over:
                    return await self._load_without(want, run)
                if not reason:
                    reason = await self._ways.open(want.spec.name, want.spec.on_swap, old)
                if not reason:
                    async with self._holds.device_for(cache):
                        if not (reason := await self._residency.unmap(old)):
                            log.info("makes room for its next generation cache=%s", cache.name)
                            # Or an engine with a copy of its own had it released meanwhile.
                            if cache.generation is old:
                                await self.evict(cache)
                            outcome = await self._load_without(want, run)
                            if cache.generation is None:
                                replaced = Replaced(path, old.spec_digest)
                                await self._restore_replaced(cache, want, replaced)
                            return outcome
                        reason = f"{reason} keeps them mapped"
            self._publisher.record_failure(cache, error, stays=reason)
            if want.spec.name in self._ways.disturbed:
                # Not again and again: engines have slept for it.
                self.retries.settled(cache.name)
        finally:
            if run is not None:
                await run.discard()
            self._caches.changed.fire()
        return CacheOutcome(
            cache=cache.name,
            outcome="failed",
            generation=served_number(cache),
            seconds=time.monotonic() - began_s,
            error=cache.error,
        )

    async def _find_way_back(self, generation: Generation) -> tuple[str, Path | None]:
        """Why it could not come back, or "" and its snapshot."""
        try:
            return "", await self._snapshots.way_back(generation)
        except SnapshotError as e:
            return str(e), None

    async def _load_without(self, want: Wanted, run: QueuedRun) -> CacheOutcome:
        """As _load(), whether or not there is room."""
        outcome = await self._load(want, run)
        if isinstance(outcome, LoadFailedError):
            return self._refuse(self._caches.ensure(want.name, want.role), outcome)
        return outcome

    async def _end_ways(self, outcomes: Sequence[CacheOutcome], *, but: str = "") -> None:
        """Have engines wake that sleep for models whose loads are over, with what these brought."""
        loaded = {o.cache.rpartition("/")[0] for o in outcomes if o.outcome == "loaded"}
        for model in self._ways.open_models:
            if model != but:
                await self._ways.close(model, swap=model in loaded)

    def _refuse(self, cache: Cache, error: LoadFailedError) -> CacheOutcome:
        self._publisher.record_failure(cache, error)
        self._caches.changed.fire()
        return CacheOutcome(
            cache=cache.name,
            outcome="failed",
            generation=served_number(cache),
            error=cache.error,
        )

    async def _restore_replaced(self, cache: Cache, want: Wanted, replaced: Replaced) -> None:
        """The load failed for which the served generation had to go: bring that one back."""
        error = cache.error
        load = cache.begin_load()
        try:
            delivery = await self._runs.restore(cache, want, load, *replaced)
        except (LoadFailedError, OSError) as e:
            log.error("the generation before cannot be restored cache=%s error=%s", cache.name, e)
            cache.fail_load(f"{error}; the generation before cannot be restored: {e}")
        else:
            log.info("the generation before is restored cache=%s", cache.name)
            await self._publisher.publish(cache, delivery)
            cache.error = error
        finally:
            self._caches.changed.fire()

    def _write_snapshots(self) -> None:
        for want in self._wanted.values():
            cache = self._caches.get(want.name)
            generation = cache.generation if cache else None
            if generation is not None and generation.spec_digest == want.spec_digest:
                self._snapshots.write_later(generation, want.spec.python)

    async def before(self, name: str) -> Before:
        """The generation to which a rollback would go. Raises UnknownCacheError, SnapshotError."""
        want, generation = self._served(name)
        return await self._snapshots.rollbacks.before(want, generation, self._look().other_software)

    def _served(self, name: str) -> tuple[Wanted, Generation]:
        want, cache = self._wanted.get(name), self._caches.get(name)
        if want is None or cache is None or cache.generation is None:
            what = f"its state is {cache.state}" if cache else "there is no such cache"
            raise UnknownCacheError(f"{printable(name, 300)} is not served: {what}")
        return want, cache.generation

    async def rollback(self, name: str, snapshot: str) -> list[CacheOutcome]:
        """Go back to the generation before, whose snapshot has this name.

        The served one stays until that is there, and if it cannot be had. Raises UnknownCacheError,
        SnapshotError.
        """
        async with self._lock:
            found = await self.before(name)
            if found.path.name != snapshot:
                raise SnapshotError(
                    f"the generation before of {name} is {found.path.name} by now, not {snapshot}"
                )
            want, generation = self._served(name)
            cache = self._caches.ensure(name, want.role)
            rollbacks, earlier = self._snapshots.rollbacks, self._snapshots.rollbacks.note(name)
            await rollbacks.begin(want, generation, found.path)
            began_s, load = time.monotonic(), cache.begin_load()
            try:
                async with self._holds.device_for(cache):
                    error = await self._restore_before(cache, want, load, found.path)
            finally:
                if cache.load is load:
                    cache.end_load()
                if cache.generation is None or rollbacks.at(cache.generation) is None:
                    await rollbacks.restore_note(name, earlier)
                self._caches.changed.fire()
            return [
                CacheOutcome(
                    cache=name,
                    outcome="failed" if error else "loaded",
                    generation=served_number(cache),
                    seconds=time.monotonic() - began_s,
                    error=error,
                )
            ]

    async def _restore_before(
        self, cache: Cache, want: Wanted, load: LoadProgress, path: Path
    ) -> str:
        """Serve a snapshot in place of the served generation. Returns why that failed, or ""."""
        began_s, replaced = time.monotonic(), None
        try:
            replaced = await self._room.make(cache, want)
            delivery = await self._runs.restore(cache, want, load, path, want.spec_digest)
            await self._room.check(cache, delivery)
        except (LoadFailedError, OSError) as e:
            error = f"cannot go back to {path}: {e}; the served generation stays"
            log.error("rollback failed cache=%s error=%s", cache.name, error)
            if replaced is not None and cache.generation is None:
                cache.error = error
                await self._restore_replaced(cache, want, replaced)
            return error
        await self._publisher.publish(cache, delivery)
        self._tally.restored(cache.name, time.monotonic() - began_s)
        log.info("rolled back cache=%s path=%s", cache.name, path)
        return ""

    async def write_snapshot(self, generation: Generation) -> str:
        """Write the snapshot of a served generation now. Returns why it was not, or "".

        Raises SnapshotError without a directory.
        """
        want = self._wanted.get(generation.cache)
        return await self._snapshots.write_now(generation, want.spec.python if want else None)

    def _give_up(self, want: Wanted) -> None:
        """A fault of ours ended the round before it was this cache's turn, or in it."""
        cache = self._caches.get(want.name)
        if cache is not None and cache.load is not None:
            cache.fail_load(f"{cache.name} was not loaded: the daemon's log says why")
            self.retries.failed(cache.name)

    async def _load(
        self, want: Wanted, run: QueuedRun, *, live: bool = False
    ) -> CacheOutcome | LoadFailedError:
        """What came of it, recorded; for _load_in_place() an error is returned as it is."""
        cache = self._caches.ensure(want.name, want.role)
        began_s = time.monotonic()
        try:
            delivery = await run.delivery()
            await self._room.check(cache, delivery)
        except LoadFailedError as e:
            if e.no_room and (cache.live or live) and cache.generation is not None:
                return e
            self._publisher.record_failure(cache, e)
        except OSError as e:
            self._publisher.record_failure(
                cache, LoadFailedError(f"loader of {cache.name} cannot be run: {e.strerror or e}")
            )
        else:
            await self._publisher.publish(cache, delivery)
            if delivery.source == "restored":
                self._tally.restored(cache.name, time.monotonic() - began_s)
        finally:
            self._caches.changed.fire()
        return CacheOutcome(
            cache=cache.name,
            outcome="failed" if cache.error else "loaded",
            generation=served_number(cache),
            seconds=time.monotonic() - began_s,
            error=cache.error,
        )

    async def _drop(self, name: str) -> CacheOutcome:
        log.info("dropped, not in the manifest any more cache=%s", name)
        await self.forget(name)
        return CacheOutcome(cache=name, outcome="dropped")

    async def forget(self, name: str) -> None:
        """Stop serving a cache that the manifest lacks; free its memory, except engines' mappings."""
        generation = self._caches.remove(name)
        self.retries.settled(name)
        if generation is not None:
            await self._retirement.retire(generation)

    async def drop(self, cache: Cache) -> None:
        """Stop serving a cache until a reload; free its memory, except engines' mappings."""
        self.retries.settled(cache.name)
        await self._retirement.set_aside(cache.drop())

    async def release(self, cache: Cache, *, by: int) -> None:
        """Free the generation of a cache whose engines have copies of their own, the last one process `by`."""
        generation = cache.evict() if cache.resident == "on-demand" else cache.release()
        log.info(
            "released cache=%s generation=%d bytes=%d",
            cache.name,
            generation.number,
            generation.nbytes,
        )
        await self._retirement.set_aside(generation, by=by)


def _checkpoint_of(want: Wanted) -> CheckpointIdentity | None:
    """The checkpoint that a load of this entry reads, with its sample.

    None if it is unknown before the load, e.g. for a model that is downloaded first.
    """
    try:
        return with_sample(record_checkpoint(**checkpoint_arguments(want.spec.engine, want.role)))
    except (WeightcachedError, OSError, TypeError, ValueError) as e:
        log.debug("cannot tell which checkpoint will be loaded cache=%s: %s", want.name, e)
        return None


def _named(only: Collection[str], known: Collection[str]) -> set[str]:
    """The known caches that `only` names, each by its own name or its model's."""
    return {x for x in known if x in only or x.rpartition("/")[0] in only}
