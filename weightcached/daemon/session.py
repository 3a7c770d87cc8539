"""One connection: hello, then requests and answers in turn, until either side has had enough.

A session owns its leases and nothing else. It never trusts its peer's pace: every wait has a
deadline, or ends with the peer. Which cache fits a key is decided in matching.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Iterator
from typing import Protocol

from weightcached import __version__
from weightcached.daemon import packets, untrusted_fds
from weightcached.daemon.caches import QUEUED, Cache, Caches, Generation
from weightcached.daemon.counters import Tally
from weightcached.daemon.fairness import REQUEST_UNITS, Queues, Ticket
from weightcached.daemon.holds import Hold, Holds
from weightcached.daemon.leases import Lease, Leases
from weightcached.daemon.logs import printable
from weightcached.daemon.matching import Answer, Evicted, Final, Matcher, loading
from weightcached.daemon.peers import Peer
from weightcached.daemon.reconcile import Reconciler
from weightcached.errors import ProtocolError, SnapshotError, UnknownCacheError
from weightcached.index.key import WeightCacheKey
from weightcached.system.waits import end_tasks, first_of
from weightcached.wire.framing import MAX_PACKET_FDS, MAX_REQUEST_BYTES, Packet
from weightcached.wire.messages import (
    PROTOCOL_VERSION,
    Absent,
    Attach,
    Descriptors,
    Done,
    Drop,
    Evict,
    Failed,
    Fallback,
    Hello,
    HoldLoads,
    Loading,
    Memory,
    Message,
    NeedDigest,
    Parked,
    Progress,
    Ready,
    Refused,
    Rejoin,
    Rejoined,
    Release,
    Released,
    Reload,
    ReloadReply,
    Request,
    Rollback,
    RollbackReply,
    Status,
    StatusReply,
    Unmap,
    Verify,
    Welcome,
    WriteSnapshot,
    decode_request,
    encode,
    refusal,
)

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
# A peer that does not take its answer for this long is not going to.
SEND_TIMEOUT_S = 10.0
# Tools ask and leave. An engine may be silent for weeks, and keeps its lease.
IDLE_TIMEOUT_S = 60.0
# Loading and Progress are repeated at least this often.
REPEAT_S = 1.0
PROGRESS_S = 0.25
# The load is over, but the old generation is still being freed.
PUBLISHING = "publishing"
WRITING_SNAPSHOT = "writing the snapshot"
_LABEL_CHARS = 200
_FILES_PER_UNIT = 256


class SessionHost(Protocol):
    """The parts of main.py's Daemon that sessions use."""

    device: str
    pid: int
    caches: Caches
    leases: Leases
    matcher: Matcher
    holds: Holds
    tally: Tally
    queues: Queues
    reconciler: Reconciler

    def status(self) -> StatusReply: ...

    def bring_back(self, cache: Cache) -> None: ...

    def release(self, generation: Generation, *, by: int) -> asyncio.Task[None]: ...

    def reload(
        self, *, force: bool, only: list[str], along: bool = False, live: bool = False
    ) -> asyncio.Task[ReloadReply | Refused] | Refused: ...

    def rollback(
        self, cache: str, snapshot: str
    ) -> asyncio.Task[ReloadReply | Refused] | Refused: ...


class Session:
    """Serves one peer."""

    def __init__(
        self,
        sock: socket.socket,
        peer: Peer,
        service: SessionHost,
        *,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        self._sock = sock
        self._peer = peer
        self._service = service
        self._idle_timeout_s = idle_timeout_s
        self._purpose = "ctl"
        self._leases: dict[Generation, Lease] = {}
        self._asking: set[asyncio.Task[None]] = set()
        self._hold: Hold | None = None
        self._ticket = Ticket(service.queues, peer.process)

    @property
    def is_needed(self) -> bool:
        """Whether its end would matter to an engine that runs."""
        return bool(self._leases) or self._hold is not None

    async def run(self) -> None:
        """Serve until the peer leaves.

        Raises EOFError, OSError, TimeoutError or ProtocolError, by the kind of its end.
        """
        try:
            if await self._hello():
                await self._dialogue()
        except ProtocolError as e:
            await self._send(Refused(code=e.code, message=str(e)))
            raise
        finally:
            for lease in self._leases.values():
                self._service.leases.end(lease)
            if self._hold is not None:
                self._service.holds.end(self._hold)
            await end_tasks(*self._asking)

    async def _hello(self) -> bool:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            packet = await self._recv()
        hello = decode_request(packet.data)
        if not isinstance(hello, Hello):
            raise ProtocolError(f"the first message is {type(hello).__name__}, expected Hello")
        if hello.protocol != PROTOCOL_VERSION:
            await self._send(
                refusal(
                    "protocol-version",
                    f"the peer (weightcached {printable(hello.software, 100) or 'unknown'}) speaks protocol "
                    f"{hello.protocol}, this daemon ({__version__}) speaks {PROTOCOL_VERSION}: install the same "
                    "weightcached on both sides",
                )
            )
            return False
        self._purpose = hello.purpose
        self._peer.label = printable(hello.label, _LABEL_CHARS)
        service = self._service
        await self._send(
            Welcome(
                protocol=PROTOCOL_VERSION,
                device=service.device,
                pid=service.pid,
                software=__version__,
                parking=True,
            )
        )
        return True

    async def _dialogue(self) -> None:
        request = decode_request((await self._next_packet()).data)
        while True:
            # Listen while the answer is made, in order to notice at once that a peer leaves. A
            # request that comes meanwhile waits.
            listener = asyncio.create_task(self._recv())
            answer = asyncio.create_task(self._answer(request))
            try:
                await first_of(listener, answer)
                if listener.done():
                    # Raises when the peer left.
                    listener.result()
                await answer
                request = decode_request((await self._within_idle_limit(listener)).data)
            finally:
                await end_tasks(listener, answer)

    async def _recv(self) -> Packet:
        """The next packet. Until it is this peer's turn, it stays in the socket."""
        packet = await untrusted_fds.recv(
            self._sock, self._ticket, max_large_bytes=MAX_REQUEST_BYTES
        )
        self._ticket.charge(len(packet.data))
        return packet

    async def _next_packet(self) -> Packet:
        return await self._within_idle_limit(self._recv())

    async def _within_idle_limit(self, packet: Awaitable[Packet]) -> Packet:
        async with asyncio.timeout(None if self._purpose == "engine" else self._idle_timeout_s):
            return await packet

    async def _answer(self, request: Request) -> None:
        match request:
            case Status():
                await self._send(self._service.status())
            case Attach():
                await self._attach(request)
            case Memory():
                await self._memory(request)
            case Release():
                await self._release()
            case Rejoin():
                await self._rejoin(request)
            case HoldLoads():
                await self._hold_loads(request)
            case Parked():
                await self._park(request)
            case Hello():
                raise ProtocolError("a second Hello: it is the first message and comes once")
            case _:
                await self._answer_tool(request)

    async def _answer_tool(self, request: Request) -> None:
        match request:
            case Reload():
                await self._reload(request)
            case Drop() | Evict():
                await self._free(request)
            case Verify():
                await self._verify(request)
            case WriteSnapshot():
                await self._write_snapshot(request)
            case Rollback():
                await self._rollback(request)
            case Fallback():
                await self._count_fallback(request)

    # ---- engines

    async def _attach(self, request: Attach) -> None:
        changed = self._service.caches.changed
        hit = True
        # The caches that this request has brought back.
        asked: set[str] = set()
        while True:
            event = changed.next()
            began_s = time.monotonic()
            answer = await self._match(
                request.key,
                asked,
                wait=request.wait,
                sampled=request.identity == "sampled",
                cache=request.cache,
            )
            if isinstance(answer, Generation):
                # Before anything is awaited: from here on a Drop or a Release sees this engine.
                self._begin_lease(answer)
                await self._hand_out(answer)
                self._service.tally.attached(answer.cache, time.monotonic() - began_s, hit=hit)
                return
            hit = False
            await self._send(answer)
            if not isinstance(answer, Loading | NeedDigest):
                self._service.tally.refused(answer)
            if not (request.wait and isinstance(answer, Loading)):
                log.info("attach refused pid=%d answer=%s", self._peer.pid, type(answer).__name__)
                return
            with self._waiting(answer.cache):
                await changed.wait(event, timeout_s=REPEAT_S)
            # Hundreds may be woken at once, and comparing long lists of files takes its time.
            await self._ticket.turn(
                REQUEST_UNITS + len(request.key.checkpoint.files) // _FILES_PER_UNIT
            )

    async def _match(
        self,
        key: WeightCacheKey,
        asked: set[str],
        *,
        wait: bool = False,
        sampled: bool = False,
        cache: str = "",
    ) -> Generation | Final | Loading | NeedDigest:
        """The matcher's answer. A daemon that starts waits for the manifest if no key matches.

        An evicted cache comes back, but once for each question: `asked` has those that did. With
        `cache` the newest generation of that one matches, if it is not the checkpoint that differs.
        """
        service = self._service

        async def match() -> Answer:
            if cache:
                return service.matcher.newest(cache, key)
            return await service.matcher.match(key, sampled=sampled)

        answer = await match()
        settled = service.reconciler.settled
        if not isinstance(answer, Generation) and not settled.is_set():
            while not settled.is_set():
                await first_of(settled.wait(), timeout_s=REPEAT_S)
                if wait and not settled.is_set():
                    # The daemon may read checkpoints first. An engine takes silence for a hang.
                    await self._send(Loading(cache=service.device, phase=QUEUED))
            answer = await match()
        if not isinstance(answer, Evicted):
            return answer
        evicted = answer.cache
        if evicted.name in asked and evicted.error:
            return Failed(cache=evicted.name, error=evicted.error)
        asked.add(evicted.name)
        service.bring_back(evicted)
        if evicted.load:
            return loading(evicted, evicted.load)
        return Loading(cache=evicted.name, phase=QUEUED)

    @contextlib.contextmanager
    def _waiting(self, name: str) -> Iterator[None]:
        """While this engine waits for a cache, that one is not evicted once it is there, and this
        engine's own hold does not keep it from loading.
        """
        cache = self._service.caches.get(name)
        if cache is None:
            yield
            return
        cache.waiting[self] = _name(self._peer)
        try:
            with self._service.holds.waiting(self._peer.process):
                yield
        finally:
            del cache.waiting[self]

    def _begin_lease(self, generation: Generation) -> None:
        if generation not in self._leases:
            lease = self._service.leases.begin(
                generation, self._peer.pid, self._ask_to_unmap, label=self._peer.label
            )
            self._leases[generation] = lease
            log.info(
                "attached %s cache=%s generation=%d",
                _logged(self._peer),
                generation.cache,
                generation.number,
            )

    async def _hand_out(self, generation: Generation) -> None:
        """Ready, then the index and the segments."""
        with generation.handout() as fds:
            await self._send(_ready(generation, descriptors=len(fds)))
            for first in range(0, len(fds), MAX_PACKET_FDS):
                numbers = [fd.fileno() for fd in fds[first : first + MAX_PACKET_FDS]]
                await packets.send(
                    self._sock, encode(Descriptors(first=first)), numbers, timeout_s=SEND_TIMEOUT_S
                )

    async def _memory(self, request: Memory) -> None:
        answer = await self._match(request.key, set())
        await self._send(_ready(answer) if isinstance(answer, Generation) else answer)

    async def _release(self) -> None:
        """End the leases; free each generation once its last holder has left or released it too.

        Answers at once if there are other holders.
        """
        service = self._service
        if not self._leases:
            await self._send(
                refusal("no-lease", "this connection holds no generation: attach first")
            )
            return
        for generation in list(self._leases):
            service.leases.end(self._leases.pop(generation))
            # The daemon's own from here on: others may hold it for days, and this engine may leave.
            release = service.release(generation, by=self._peer.process)
            if not service.leases.on(generation):
                await asyncio.wait({release})
        await self._send(Done())

    async def _hold_loads(self, request: HoldLoads) -> None:
        holds = self._service.holds
        while True:
            event = holds.changed.next()
            if self._hold is None:
                self._hold = holds.begin(self._peer.process, _name(self._peer))
            if self._hold is not None:
                await self._send(Done())
                return
            if (cache := holds.loading) is not None:
                load = cache.load
                busy = loading(cache, load) if load else Loading(cache=cache.name, phase=PUBLISHING)
                await self._send(busy)
            if not request.wait:
                return
            await holds.changed.wait(event, timeout_s=REPEAT_S)
            await self._ticket.turn(REQUEST_UNITS)

    async def _rejoin(self, request: Rejoin) -> None:
        cache = self._service.caches.get(request.cache)
        generation = cache.generation if cache else None
        if generation is None or (generation.number, generation.index_digest) != (
            request.generation,
            request.index_digest,
        ):
            have = f"generation {generation.number}" if generation else "no generation"
            message = (
                f"{printable(request.cache, 300)}: generation {request.generation} is not served any more, the daemon "
                f"has {have} of it; the weights that the engine has mapped stay valid"
            )
            await self._send(refusal("generation-gone", message))
            return
        self._begin_lease(generation)
        await self._send(Rejoined())

    async def _park(self, request: Parked) -> None:
        for lease in self._leases.values():
            self._service.leases.park(lease, request.parked)
        await self._send(Done())

    def _ask_to_unmap(self) -> None:
        """Send Unmap at any time: an engine that sleeps waits for no answer."""
        task = asyncio.create_task(self._send(Unmap()))
        self._asking.add(task)
        task.add_done_callback(self._end_asking)

    def _end_asking(self, task: asyncio.Task[None]) -> None:
        self._asking.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("a parked engine is not reached pid=%d error=%r", self._peer.pid, error)

    async def _count_fallback(self, request: Fallback) -> None:
        self._service.tally.fell_back(request.reason)
        log.info("engine loads from disk pid=%d reason=%s", self._peer.pid, request.reason)
        await self._send(Done())

    # ---- tools

    async def _reload(self, request: Reload) -> None:
        """The reload is the daemon's, not this session's: it goes on if the tool leaves."""
        await self._follow(
            self._service.reload(
                force=request.force, only=request.caches, along=request.along, live=request.live
            )
        )

    async def _rollback(self, request: Rollback) -> None:
        if request.snapshot:
            await self._follow(self._service.rollback(request.cache, request.snapshot))
            return
        try:
            found = await self._service.reconciler.before(request.cache)
        except (SnapshotError, UnknownCacheError) as e:
            await self._send(Refused(code=e.code, message=str(e)))
        else:
            await self._send(RollbackReply(snapshot=found.path.name, created_at=found.created_at))

    async def _follow(self, task: asyncio.Task[ReloadReply | Refused] | Refused) -> None:
        if isinstance(task, Refused):
            await self._send(task)
            return
        while not task.done():
            for cache in self._service.caches:
                if cache.load is not None:
                    await self._send(cache.load.message(Progress, cache.name))
            await asyncio.wait({task}, timeout=PROGRESS_S)
        await self._send(task.result())

    async def _free(self, request: Drop | Evict) -> None:
        reconciler = self._service.reconciler
        cache = self._find_unused(request)
        if isinstance(cache, Refused):
            await self._send(cache)
            return
        verb = "dropped" if isinstance(request, Drop) else "evicted"
        log.info("%s on request cache=%s pid=%d", verb, cache.name, self._peer.pid)
        await (reconciler.drop(cache) if isinstance(request, Drop) else reconciler.evict(cache))
        await self._send(Done())

    def _find_unused(self, request: Drop | Evict) -> Cache | Refused:
        """The cache, if nobody would be surprised by its end; else the reason why it stays."""
        service = self._service
        verb, force = ("drop", request.force) if isinstance(request, Drop) else ("evict", False)
        cache = service.caches.get(request.cache)
        if cache is None:
            name = printable(request.cache, 300)
            return refusal(
                "unknown-cache",
                f"no cache {name!r} on {service.device}: it has {service.caches.names()}",
            )
        if cache.load is not None:
            return refusal(
                "loading",
                f"{cache.name} is being loaded ({cache.load.phase}): {verb} it when that is over",
            )
        if verb == "evict" and service.reconciler.is_writing(cache):
            return refusal(
                "busy", f"the snapshot of {cache.name} is being written: evict it when that is over"
            )
        # Engines on an older generation keep it in any case.
        awake = service.leases.awake(cache.generation) if cache.generation is not None else []
        if awake and not force:
            engines = ", ".join(lease.status().name for lease in awake)
            forced = ", or drop it with --force" if verb == "drop" else ""
            return refusal(
                "in-use",
                f"{cache.name} is in use by {engines}: stop the engine{forced}; weights "
                "that an engine has mapped stay valid",
            )
        return cache

    async def _verify(self, request: Verify) -> None:
        cache = self._service.caches.get(request.cache)
        if cache is not None and cache.generation is not None:
            await self._hand_out(cache.generation)
        else:
            await self._send(self._nothing_to_verify(request.cache, cache))

    async def _write_snapshot(self, request: WriteSnapshot) -> None:
        cache = self._service.caches.get(request.cache)
        if cache is None or cache.generation is None:
            name = printable(request.cache, 300)
            what = f"its state is {cache.state}" if cache else "there is no such cache"
            await self._send(refusal("unknown-cache", f"{name} is not served: {what}"))
            return
        writing = asyncio.create_task(self._service.reconciler.write_snapshot(cache.generation))
        try:
            while not writing.done():
                await self._send(Progress(cache=cache.name, phase=WRITING_SNAPSHOT))
                await asyncio.wait({writing}, timeout=REPEAT_S)
            error = writing.result()
        except SnapshotError as e:
            error = str(e)
        finally:
            # The writer is the daemon's and goes on.
            await end_tasks(writing)
        await self._send(Refused(code=SnapshotError.code, message=error) if error else Done())

    def _nothing_to_verify(self, name: str, cache: Cache | None) -> Message:
        if cache is None:
            known = self._service.caches.names()
            return Absent(
                reason=f"no cache {printable(name, 300)!r} on {self._service.device}: it has {known}"
            )
        if cache.load is not None:
            return loading(cache, cache.load)
        if cache.state == "released":
            return Released(cache=cache.name)
        if cache.state == "evicted":
            return refusal(
                "evicted",
                f"{cache.name} is evicted: 'weightcachectl reload --cache {cache.name}' brings it back",
            )
        return Failed(cache=cache.name, error=cache.error)

    async def _send(self, message: Message) -> None:
        await packets.send(self._sock, encode(message), timeout_s=SEND_TIMEOUT_S)


def _name(peer: Peer) -> str:
    return f"pid {peer.pid}" if peer.pid or not peer.label else peer.label


def _logged(peer: Peer) -> str:
    unseen = f" label={peer.label!r}" if not peer.pid and peer.label else ""
    return f"pid={peer.pid}{unseen}"


def _ready(generation: Generation, *, descriptors: int = 0) -> Ready:
    return Ready(
        cache=generation.cache,
        generation=generation.number,
        nbytes=generation.nbytes,
        segment_nbytes=generation.segment_nbytes,
        index_digest=generation.index_digest,
        descriptors=descriptors,
    )
