"""The daemon's life: start order, signals, stop order. Read it top to bottom.

Only run() decides how the process ends.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from weightcached import __version__
from weightcached.daemon import fdstore
from weightcached.daemon.caches import Aside, Cache, Caches, Generation
from weightcached.daemon.children import make_full_digest
from weightcached.daemon.counters import Tally
from weightcached.daemon.endpoint import Endpoint
from weightcached.daemon.fairness import Queues
from weightcached.daemon.group import GroupPeers
from weightcached.daemon.holds import LIMIT_S, Holds
from weightcached.daemon.in_place import Ways
from weightcached.daemon.leases import Leases
from weightcached.daemon.live import swap_engines
from weightcached.daemon.loading import DEFAULT_STALL_TIMEOUT_S, LoaderRun
from weightcached.daemon.matching import Matcher
from weightcached.daemon.notify import Notifier
from weightcached.daemon.peers import Peer
from weightcached.daemon.reconcile import Reconciler
from weightcached.daemon.residency import Residency
from weightcached.daemon.runs import Runs
from weightcached.daemon.server import HANDSHAKE_ERRORS, Server, shake_hands
from weightcached.daemon.session import IDLE_TIMEOUT_S, Session
from weightcached.daemon.snapshots import WRITTEN, Snapshots
from weightcached.daemon.staleness import Staleness
from weightcached.errors import (
    EXIT_CONFIG,
    EXIT_FAILURE,
    DeviceBusyError,
    ManifestError,
    RuntimePathError,
    SnapshotError,
    UnknownCacheError,
)
from weightcached.system.notify import Stored, inherited, watchdog_period_s
from weightcached.system.paths import check_device, runtime_dir, socket_path
from weightcached.system.text import bytes_text
from weightcached.system.waits import end_tasks, first_of
from weightcached.wire import resident
from weightcached.wire.messages import (
    CacheOutcome,
    CacheStatus,
    Refused,
    ReloadReply,
    StatusReply,
    SwapOutcome,
    refusal,
)
from weightcached.wire.resident import boot_id

log = logging.getLogger(__name__)

_HANDSHAKE_TIMEOUT_S = 10.0
MAX_RELOADS = 16
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# The manager waits this much longer for a stalled loader than we do, because we can say where it
# stalled.
_EXTEND_MARGIN_S = 15.0
# How often we look whether our socket is still there.
_LOOK_PERIOD_S = 5.0
_SWITCH_INTERVAL_S = 0.001


@dataclass(frozen=True)
class ServeOptions:
    """The command line. `loader_command` and the two times are for tests and for emergencies."""

    device: str
    manifest: Path | None = None
    socket_dir: Path | None = None
    loaders_ahead: int | None = None
    loader_command: Sequence[str] | None = None
    # Whether the daemon tries passing failures again; if not, a daemon with nothing to serve ends
    # with status 1.
    retry: bool = True
    stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S
    idle_timeout_s: float = IDLE_TIMEOUT_S
    hold_limit_s: float = LIMIT_S


def run(options: ServeOptions) -> int:
    """Serve one device until told to stop. Returns the exit status.

    Raises WeightcachedError before it serves.
    """
    # Signals before the event loop listens are kept for it: then an early stop is orderly too.
    signal.pthread_sigmask(signal.SIG_BLOCK, [*STOP_SIGNALS, signal.SIGHUP])
    device = check_device(options.device)
    directory = options.socket_dir or runtime_dir()
    with Endpoint(device, directory) as endpoint:
        _raise_descriptor_limit()
        store = fdstore.FdStore(os.environ.get("NOTIFY_SOCKET") or None, limit=_store_limit())
        stored = inherited(os.environ)
        aside = store.take_note(stored)
        adopted = _adopt(device, store, stored, aside)
        return asyncio.run(_live(options, endpoint, endpoint.listen(), store, adopted, aside))


def _raise_descriptor_limit() -> None:
    """One descriptor per segment, two per peer. Also bounds the descriptors in flight to engines."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _store_limit() -> int:
    """The number of descriptors that the manager keeps for us.

    Older managers do not tell: a drop-in that raises FileDescriptorStoreMax= must set FDSTORE= in
    Environment= too.
    """
    said = os.environ.get("FDSTORE", "")
    return int(said) if said.isdecimal() else fdstore.DEFAULT_MAX


def _adopt(
    device: str,
    store: fdstore.FdStore,
    stored: list[Stored],
    aside: Mapping[str, Aside],
) -> list[Generation]:
    """Take back descriptors from the manager, before anything can fail for another reason."""
    expected = fdstore.Expected(device, boot_id(), fdstore.current_driver(device))
    generations = fdstore.adopt(stored, expected, store.remove_names)
    for g in [g for g in generations if g.cache in aside]:
        # The daemon before ended while it freed this one.
        generations.remove(g)
        g.retire()
        try:
            store.remove(g)
        except fdstore.StoreError as e:
            log.warning("stays in the store until the unit stops cache=%s error=%s", g.cache, e)
    for g in generations:
        store.kept(g)
        log.info(
            "adopted cache=%s generation=%d segments=%d bytes=%d",
            g.cache,
            g.number,
            len(g.fds) - 1,
            g.nbytes,
        )
    return generations


async def _live(
    options: ServeOptions,
    endpoint: Endpoint,
    listener: socket.socket,
    store: fdstore.FdStore,
    adopted: list[Generation],
    aside: Mapping[str, Aside],
) -> int:
    """From the bound socket to the exit status."""
    _shorten_stalls()
    daemon = Daemon(options, endpoint, listener, store, adopted, aside)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, daemon.reload_on_signal)
    # Before any child: it would inherit the mask.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [*STOP_SIGNALS, signal.SIGHUP])
    starting = asyncio.create_task(daemon.start())
    try:
        await first_of(starting, stop.wait())
        if starting.done() and (status := starting.result()) is not None:
            return status
        await stop.wait()
        return 0
    finally:
        await end_tasks(starting)
        await daemon.stop()


def _shorten_stalls() -> None:
    """Shorten Python's pauses: a full collection took 10 ms, a thread may run for 5 ms."""
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


ReloadResult = ReloadReply | Refused
Work = Callable[[], Awaitable[list[CacheOutcome]]]


class Daemon:
    """State shared by all sessions, and the order of start and stop."""

    def __init__(
        self,
        options: ServeOptions,
        endpoint: Endpoint,
        listener: socket.socket,
        store: fdstore.FdStore,
        adopted: list[Generation],
        aside: Mapping[str, Aside],
    ) -> None:
        self.device = options.device
        self.pid = os.getpid()
        self.caches = Caches()
        for generation in adopted:
            self.caches.adopt(generation)
        for name, note in aside.items():
            self.caches.set_aside(name, note)
        self.leases = Leases()
        self.holds = Holds(limit_s=options.hold_limit_s)
        self.tally = Tally(adoptions=len(adopted))
        self._notifier = Notifier(extend_s=options.stall_timeout_s + _EXTEND_MARGIN_S)
        digest = partial(make_full_digest, on_progress=self._notifier.digesting)
        self.matcher = Matcher(self.caches, self.device, digest)
        self._snapshots = Snapshots(self.device, endpoint.socket.parent)
        self._residency = Residency(self.device, self.caches, self.leases, self._snapshots)
        self._ways = Ways(self.device, endpoint.socket.parent, self.leases, self._served)
        peers = GroupPeers(self.device, lambda x: socket_path(x, endpoint.socket.parent))
        self.reconciler = Reconciler(
            self.caches,
            self.matcher,
            store,
            Runs(
                self.caches,
                self._notifier,
                partial(
                    LoaderRun,
                    stall_timeout_s=options.stall_timeout_s,
                    command=options.loader_command,
                ),
                self._snapshots,
                device=self.device,
                boot_id=boot_id(),
                peers=peers,
            ),
            device=self.device,
            manifest=options.manifest,
            ahead=options.loaders_ahead,
            look=partial(Staleness, self.matcher.full_digest, partial(digest, idle=False)),
            snapshots=self._snapshots,
            residency=self._residency,
            ways=self._ways,
            tally=self.tally,
            unmap_parked=self.leases.unmap_parked,
            holds=self.holds,
            peers=peers,
        )
        self._endpoint = endpoint
        # Why there is no socket, and none could be made; or "".
        self._unreachable = ""
        self._since = time.time()
        self._idle_timeout_s = options.idle_timeout_s
        self._retry = options.retry
        self.queues = Queues()
        self._server = Server(listener, self._open_session, self.queues)
        self._started = asyncio.Event()
        self._reload_turn = asyncio.Lock()
        self._endpoint_turn = asyncio.Lock()
        self._reloads = 0
        self._tasks: set[asyncio.Task[object]] = set()
        # The content of the file beside the socket.
        self._written: resident.Resident | None = None

    async def start(self) -> int | None:
        """Serve, load missing caches, notify. Returns an exit status if there is nothing to serve."""
        # Adopted generations are served before the manifest is even read.
        self._server.start()
        self._keep(asyncio.create_task(self._write_resident()))
        status = await self._first_reconcile()
        if status is not None:
            self._notifier.status(f"failed: {self._summary()}")
            return status
        try:
            await shake_hands(self._endpoint.socket, timeout_s=_HANDSHAKE_TIMEOUT_S)
        except HANDSHAKE_ERRORS as e:
            log.error(
                "handshake with our own socket failed, giving up socket=%s error=%r",
                self._endpoint.socket,
                e,
            )
            return EXIT_FAILURE
        await self._notifier.ready(self._summary())
        log.info(
            "serving device=%s socket=%s %s", self.device, self._endpoint.socket, self._summary()
        )
        self._started.set()
        self._keep(asyncio.create_task(self._stay_reachable()))
        if self._retry:
            self._keep(asyncio.create_task(self._keep_retrying()))
        self._keep(asyncio.create_task(self._keep_evicting()))
        period_s = watchdog_period_s(os.environ)
        if period_s is not None:
            self._keep(asyncio.create_task(self._feed_watchdog(period_s)))
        return None

    async def _first_reconcile(self) -> int | None:
        """Load missing caches. Returns the exit status if nothing can be served, now or later."""
        try:
            outcomes = await self.reconciler.run(starting=True)
            # Also what a daemon before this one had no time to tell.
            self._keep(asyncio.create_task(self._swap_engines(outcomes)))
        except ManifestError as e:
            return None if any(cache.generation for cache in self.caches) else e.exit_status
        failed = [outcome.cache for outcome in outcomes if outcome.outcome == "failed"]
        if not failed or any(x.generation or x.state == "evicted" for x in self.caches):
            return None
        if not any(name in self.reconciler.retries for name in failed):
            return EXIT_CONFIG
        return None if self._retry else EXIT_FAILURE

    async def _keep_retrying(self) -> None:
        while True:
            await self.reconciler.retries.until_due()
            try:
                outcomes = await self.reconciler.retry()
                if outcomes:
                    self._keep(asyncio.create_task(self._swap_engines(outcomes)))
            except Exception:
                # A fault of ours in one round must not end the rounds.
                log.exception("trying again failed")
            self._notifier.status(self._summary())

    async def _keep_evicting(self) -> None:
        """Evict on-demand caches that have been idle for long enough."""
        while True:
            changed = [self.caches.changed.next(), self.leases.changed.next()]
            left_s = await self.reconciler.evict_idle()
            try:
                async with asyncio.timeout(left_s):
                    await first_of(*(event.wait() for event in changed))
            except TimeoutError:
                pass

    async def stop(self) -> None:
        """The reverse of start: no new peer, no child, no peer, no descriptor.

        The manager frees its own copies.
        """
        await self._notifier.stopping()
        # 1. Nobody new.
        await self._server.stop_accepting()
        self._endpoint.leave()
        # 2. The loader child and the digest child, with everything they started.
        await end_tasks(*self._tasks)
        await self._snapshots.close()
        await self.matcher.close()
        self._write(stopped=True)
        # 3. Engines: they keep their mappings.
        await self._server.close_connections()
        # 4. Our descriptors.
        for cache in self.caches:
            if cache.generation is not None:
                cache.generation.retire()
        self._notifier.close()
        log.info("stopped device=%s", self.device)

    def _open_session(self, sock: socket.socket, peer: Peer) -> Session:
        return Session(sock, peer, self, idle_timeout_s=self._idle_timeout_s)

    def _keep(self, task: asyncio.Task[object]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- reload

    def reload_on_signal(self) -> None:
        log.info("reload asked by=SIGHUP")
        # If it is refused, a waiting reload will read the manifest as it is now.
        self.reload(force=False, only=[])

    def reload(
        self, *, force: bool, only: list[str], along: bool = False, live: bool = False
    ) -> asyncio.Task[ReloadResult] | Refused:
        """Begin a reload, which goes on even if nobody waits for it. Reloads run one after the
        other.

        Refused if too many wait already: peers that ask and leave must not pile them up.
        """
        work = partial(self.reconciler.run, force=force, only=only, along=along, live=live)
        # A reload along is another rank's affair.
        return self._in_turn(work, swaps=not along, only=only, live=live)

    def rollback(self, cache: str, snapshot: str) -> asyncio.Task[ReloadResult] | Refused:
        """Begin to go back to a cache's generation before; a reload as the others."""
        return self._in_turn(partial(self.reconciler.rollback, cache, snapshot), only=[cache])

    def _in_turn(
        self, work: Work, *, only: Sequence[str], swaps: bool = True, live: bool = False
    ) -> asyncio.Task[ReloadResult] | Refused:
        if self._reloads >= MAX_RELOADS:
            message = f"{MAX_RELOADS} reloads are waiting already: try again later"
            return refusal("busy", message)
        self._reloads += 1
        task = asyncio.create_task(self._reload_and_swap(work, only, swaps=swaps, live=live))
        task.add_done_callback(self._count_ended_reload)
        self._keep(task)
        return task

    async def _reload_and_swap(
        self, work: Work, only: Sequence[str], *, swaps: bool, live: bool
    ) -> ReloadResult:
        result = await self._reload(work)
        if isinstance(result, Refused) or result.error or not swaps:
            return result
        done = await self._swap_engines(result.outcomes, only, asked=live)
        return msgspec.structs.replace(result, swaps=done)

    async def _reload(self, work: Work) -> ReloadResult:
        # RELOADING=1 before the first READY=1 would end the start-up in the manager's eyes.
        await self._started.wait()
        async with self._reload_turn:
            await self._notifier.reloading()
            try:
                return ReloadReply(outcomes=await work())
            except ManifestError as e:
                return ReloadReply(error=str(e))
            except (UnknownCacheError, SnapshotError) as e:
                return Refused(code=e.code, message=str(e))
            finally:
                await self._notifier.ready(self._summary())

    async def _swap_engines(
        self, outcomes: Sequence[CacheOutcome], only: Sequence[str] = (), *, asked: bool = False
    ) -> list[SwapOutcome]:
        """Have engines of live models map what is served after a round; not within its turn, since
        requests may take long to end.
        """
        swaps: list[SwapOutcome] = []
        for spec in self.reconciler.live_models(outcomes, only, asked=asked):
            done = self._ways.take_outcomes(spec.name)
            if done is None:
                directory = self._endpoint.socket.parent
                done = await swap_engines(
                    spec.name, spec.on_swap, directory, self.leases, self._served()
                )
            swaps += done
        return swaps

    def _served(self) -> list[Generation]:
        return [cache.generation for cache in self.caches if cache.generation]

    def _count_ended_reload(self, _: asyncio.Task[ReloadResult]) -> None:
        self._reloads -= 1

    def bring_back(self, cache: Cache) -> None:
        """Begin to load or restore an evicted cache, which goes on even if nobody waits for it."""
        log.info("asked for, it comes back cache=%s", cache.name)
        cache.error = ""
        cache.begin_load().expected_key = cache.last_key
        self._keep(asyncio.create_task(self._bring_back(cache)))

    async def _bring_back(self, cache: Cache) -> None:
        try:
            await self.reconciler.bring_back(cache)
        except Exception:
            log.exception("bringing back failed cache=%s", cache.name)
            if cache.load is not None:
                cache.fail_load(f"{cache.name} was not loaded: the daemon's log says why")
                self.caches.changed.fire()
        self._notifier.status(self._summary())

    # ---- inspection

    def status(self) -> StatusReply:
        return StatusReply(
            device=self.device,
            pid=self.pid,
            state=self.caches.state if self.reconciler.settled.is_set() else "loading",
            since=self._since,
            caches=[self._cache_status(cache) for cache in self.caches],
            manifest=self.reconciler.manifest,
            manifest_error=self.reconciler.manifest_error,
            software=__version__,
            counters=self.tally.counters(self.caches, digest_failures=self.matcher.digest_failures),
            old_generations=self.leases.old(self._served()),
            budget=self._residency.budget,
        )

    def _cache_status(self, cache: Cache) -> CacheStatus:
        retry_at = self.reconciler.retries.at(cache.name) if self._retry else None
        status = cache.status(self.leases, retry_at=retry_at)
        kept = self._snapshots.kept(cache.name)
        outcome = WRITTEN if kept else ""
        if cache.generation:
            outcome = self._snapshots.outcome(cache.generation)
        rollbacks = self._snapshots.rollbacks
        return msgspec.structs.replace(
            status,
            snapshot=outcome,
            snapshot_use=self._snapshots.use(cache.name),
            snapshot_bytes=kept.nbytes if kept else 0,
            rolled_back_at=rollbacks.at(cache.generation) if cache.generation else None,
        )

    def release(self, generation: Generation, *, by: int) -> asyncio.Task[None]:
        """Free a generation of which process `by` has a copy, as soon as nobody holds it."""
        task = asyncio.create_task(self._release(generation, by))
        self._keep(task)
        return task

    async def _release(self, generation: Generation, by: int) -> None:
        await self.leases.none_on(generation)
        cache = self.caches.get(generation.cache)
        # Another engine's Release, a reload or a Drop may have been first.
        if cache is not None and cache.generation is generation:
            await self.reconciler.release(cache, by=by)

    async def _write_resident(self) -> None:
        """Keep the file beside the socket as true as an answer would be."""
        while True:
            changed = [self.caches.changed.next(), self.leases.changed.next()]
            self._write()
            await first_of(*(event.wait() for event in changed))

    def _write(self, *, stopped: bool = False) -> None:
        now = resident.Resident(
            device=self.device,
            boot_id=boot_id(),
            generations=resident.held(self.status()),
            stopped=stopped,
        )
        if now == self._written:
            return
        try:
            resident.write(self._endpoint.socket, now)
        except OSError as e:
            # Logged once for each state. Engines that reach us ask us instead.
            log.warning("cannot write the resident file error=%s", e)
        self._written = now

    def _summary(self) -> str:
        """One line for `systemctl status`."""
        served = [cache.generation for cache in self.caches if cache.generation]
        size = bytes_text(sum(generation.nbytes for generation in served))
        parts = [f"serving {len(served)} of {len(list(self.caches))} caches, {size}"]
        parts += [
            f"{cache.name}: {cache.error}{self._again(cache)}"
            for cache in self.caches
            if cache.error
        ]
        if evicted := [cache.name for cache in self.caches if cache.state == "evicted"]:
            parts.append(f"on demand: {', '.join(evicted)}")
        if self.reconciler.manifest_error:
            parts.append(f"manifest refused: {self.reconciler.manifest_error}")
        return "; ".join(parts)

    def _again(self, cache: Cache) -> str:
        return " (is tried again)" if self._retry and cache.name in self.reconciler.retries else ""

    # ---- being reachable

    async def _stay_reachable(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_PERIOD_S)
            await self._restore_endpoint()

    async def _restore_endpoint(self) -> None:
        """Make the socket again if somebody removed it; say so if that cannot be done."""
        async with self._endpoint_turn:
            if not self._endpoint.is_lost():
                self._unreachable = ""
                return
            try:
                await self._server.accept_on(self._endpoint.restore())
            except DeviceBusyError as e:
                # Not unreachable: once the manager has replaced us, the other's end is all that is
                # needed.
                log.error("our place was taken socket=%s error=%s", self._endpoint.socket, e)
            except (RuntimePathError, OSError) as e:
                # OSError: out of descriptors. It is tried again, and nobody else would.
                if str(e) != self._unreachable:
                    log.error(
                        "our socket is gone and cannot be made again socket=%s error=%s",
                        self._endpoint.socket,
                        e,
                    )
                    self._notifier.status(f"unreachable: {e}")
                self._unreachable = str(e)
            else:
                self._unreachable = ""
                self._written = None
                self._write()
                log.warning(
                    "our socket was removed, it is made again socket=%s", self._endpoint.socket
                )
                self._notifier.status(self._summary())

    async def _feed_watchdog(self, period_s: float) -> None:
        """Feed the watchdog, but only while peers are served.

        Also while there can be no socket: a new daemon could not make one either and would give up,
        and the weights would be lost.
        """
        while True:
            try:
                await shake_hands(self._endpoint.socket, timeout_s=period_s)
                self._notifier.alive()
            except HANDSHAKE_ERRORS as e:
                await self._restore_endpoint()
                if self._unreachable:
                    self._notifier.alive()
                else:
                    log.error(
                        "handshake with our own socket failed, the watchdog is not fed error=%r", e
                    )
            await asyncio.sleep(period_s)
