"""Caches and their generations: served, loading, evicted, or failed.

State only: loads are run by runs.py, keys are compared by matching.py, leases are counted by
leases.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Literal, TypeVar

import msgspec

from weightcached.checkpoint.identity import CheckpointIdentity
from weightcached.daemon.leases import Broadcast, Leases
from weightcached.index.key import WeightCacheKey
from weightcached.index.tensors import TensorIndex
from weightcached.system.fds import OwnedFd, close_all
from weightcached.wire.messages import (
    CacheState,
    CacheStatus,
    LoadFrom,
    LoadMessage,
    Residence,
    Role,
    Source,
)

_M = TypeVar("_M", bound=LoadMessage)
# The allowed transitions. A ready cache stays ready while its next generation loads, and if that
# fails.
TRANSITIONS: dict[CacheState, frozenset[CacheState]] = {
    "loading": frozenset({"ready", "failed", "evicted"}),
    "ready": frozenset({"ready", "released", "loading", "evicted"}),
    "failed": frozenset({"loading", "released", "evicted"}),
    "released": frozenset({"loading", "released", "evicted"}),
    "evicted": frozenset({"loading", "released", "evicted"}),
}
QUEUED = "queued"
DROPPED = "dropped: 'weightcachectl reload' brings it back"


class Generation:
    """One complete load: its descriptors, and as much of its index as the daemon needs.

    Immutable but for `full_digest`, which is filled in when a child has made it. The index itself
    stays in its memfd: that of a large model would be most of this process's memory.
    """

    def __init__(
        self,
        index: TensorIndex,
        index_digest: str,
        index_fd: OwnedFd,
        segment_fds: Sequence[OwnedFd],
        source: Source,
    ) -> None:
        self.cache = index.cache
        self.role: Role = index.role
        self.number = index.generation
        self.key = index.key
        self.versions = index.versions
        self.environment = index.environment
        self.spec_digest = index.spec_digest
        self.label = index.label
        self.segment_nbytes = [segment.nbytes for segment in index.segments]
        self.tensors = len(index.tensors)
        self.load_seconds = index.load.seconds
        self.load_phases = index.load.phases
        self.index_digest = index_digest
        self.source: Source = source
        self.full_digest = index.key.checkpoint.full
        # Why the descriptor store does not have it, or "".
        self.not_stored = ""
        # When an engine began or ended to hold it, by time.monotonic().
        self.used_s = time.monotonic()
        self._fds = [index_fd, *segment_fds]
        self._handouts = 0
        self._retired = False

    @property
    def nbytes(self) -> int:
        return sum(self.segment_nbytes)

    @property
    def checkpoint(self) -> CheckpointIdentity:
        """The record of the loaded files, with the full digest if it has been made since."""
        return msgspec.structs.replace(self.key.checkpoint, full=self.full_digest)

    @property
    def fds(self) -> list[OwnedFd]:
        """The index, then the segments in order; owned here."""
        return self._fds

    @contextlib.contextmanager
    def handout(self) -> Iterator[list[OwnedFd]]:
        """Keep the descriptors open in the block, even if a reload retires the generation."""
        self._handouts += 1
        try:
            yield self._fds
        finally:
            self._handouts -= 1
            self._close_if_unused()

    def retire(self) -> None:
        """Close the descriptors once no handout uses them. Engines keep their own references."""
        self._retired = True
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._retired and not self._handouts:
            close_all(self._fds)


class LoadProgress:
    """A load that waits for its turn or runs. Bytes count within the phase."""

    def __init__(self) -> None:
        self.phase = QUEUED
        self.done_bytes = 0
        self.total_bytes = 0
        self.key: WeightCacheKey | None = None
        # Whether there is a snapshot that fits; "" before that is known.
        self.source: LoadFrom = ""
        # Of a cache that was served before: what the load will most probably make.
        self.expected_key: WeightCacheKey | None = None
        self._phase_began = time.monotonic()

    def advance(self, phase: str, done_bytes: int, total_bytes: int) -> bool:
        """Note the loader's progress. False if it only repeats its last report."""
        if (phase, done_bytes, total_bytes) == (self.phase, self.done_bytes, self.total_bytes):
            return False
        if phase != self.phase:
            self._phase_began = time.monotonic()
        self.phase, self.done_bytes, self.total_bytes = phase, done_bytes, total_bytes
        return True

    def message(self, kind: type[_M], cache: str) -> _M:
        """The load's progress, as a message about `cache`."""
        return kind(
            cache=cache,
            phase=self.phase,
            done_bytes=self.done_bytes,
            total_bytes=self.total_bytes,
            eta_s=self.eta_s,
        )

    @property
    def eta_s(self) -> float | None:
        """Seconds left in this phase at its mean rate so far; None until there is one."""
        elapsed_s = time.monotonic() - self._phase_began
        if not self.done_bytes or self.total_bytes < self.done_bytes or elapsed_s <= 0:
            return None
        return (self.total_bytes - self.done_bytes) * elapsed_s / self.done_bytes


class Cache:
    """One model shard in one role. `state` moves along TRANSITIONS only."""

    def __init__(self, name: str, role: Role) -> None:
        self.name = name
        self.role: Role = role
        self.state: CacheState = "loading"
        self.generation: Generation | None = None
        self.load: LoadProgress | None = None
        self.error = ""
        # From the manifest: the rung at which comparing checkpoints may stop.
        self.identity: Literal["full", "sampled"] = "full"
        # Outlives its generation, so that an engine learns that its cache failed or was released.
        self.last_key: WeightCacheKey | None = None
        # Of the load that is due, as far as the manifest tells: its key comes later, from vLLM.
        self.checkpoint: CheckpointIdentity | None = None
        # From the manifest: whether it may make room for others, and is loaded only if asked for.
        self.resident: Residence = "always"
        # From the manifest: whether engines that run get new generations.
        self.live = False
        # Of the last generation, or of its snapshot; 0 if there was none.
        self.last_nbytes = 0
        # Engines that wait for its load, by connection: names for people.
        self.waiting: dict[object, str] = {}
        self._last_number = 0

    @property
    def next_number(self) -> int:
        return self._last_number + 1

    def begin_load(self) -> LoadProgress:
        """A load is due. A ready cache stays ready."""
        if self.state == "released":
            self.error = ""
        if self.state in ("failed", "released", "evicted"):
            self._move("loading")
        self.load = LoadProgress()
        return self.load

    def publish(self, generation: Generation) -> Generation | None:
        """Serve `generation` from now on. Returns the one it replaces, for the caller to retire."""
        self._move("ready")
        old, self.generation = self.generation, generation
        self._last_number = generation.number
        self.last_key, self.last_nbytes = generation.key, generation.nbytes
        self.load, self.error = None, ""
        return old

    def fail_load(self, error: str, *, evicted: bool = False) -> None:
        """The load failed. A ready cache stays ready; evicted: it is begun again if asked for."""
        if self.generation is None and evicted:
            self._move("evicted")
        elif self.generation is None:
            self._move("failed")
            self.last_key = self.load.key if self.load else self.last_key
        self.load, self.error = None, error

    def end_load(self) -> None:
        """A load for the sake of others is over, or came to nothing: all stays as it was."""
        self.load = None
        if self.state == "loading":
            # Released meanwhile, when a load seemed to be coming.
            self.state = "released"

    def release(self) -> Generation:
        """Stop serving the generation, which the caller retires. The next may be loading."""
        generation = self.generation
        self._move("loading" if self.load else "released")
        if generation is None:
            raise AssertionError(f"cache {self.name} is ready without a generation")
        self.generation = None
        return generation

    def evict(self) -> Generation:
        """Stop serving the generation, which the caller retires, until an engine asks for it."""
        generation = self.generation
        self._move("loading" if self.load else "evicted")
        if generation is None:
            raise AssertionError(f"cache {self.name} is ready without a generation")
        # With what is known of the checkpoint by now.
        self.last_key = msgspec.structs.replace(generation.key, checkpoint=generation.checkpoint)
        self.generation = None
        return generation

    def offer(self, key: WeightCacheKey | None, nbytes: int) -> None:
        """It is loaded or restored when an engine asks for it.

        key: None if only a load can tell; nbytes: 0 if unknown.
        """
        self._move("evicted")
        self.last_key, self.last_nbytes, self.error = key, nbytes, ""

    def drop(self) -> Generation | None:
        """Serve nothing until a reload. Returns the generation for the caller to retire."""
        self._move("released")
        generation, self.generation = self.generation, None
        self.error = DROPPED
        return generation

    def _move(self, to: CacheState) -> None:
        if to not in TRANSITIONS[self.state]:
            raise AssertionError(f"cache {self.name} cannot go from {self.state} to {to}")
        self.state = to

    def status(self, leases: Leases, *, retry_at: float | None = None) -> CacheStatus:
        """The cache as `weightcachectl status` shows it. generation: the served one."""
        generation, load = self.generation, self.load
        return CacheStatus(
            name=self.name,
            role=self.role,
            state=self.state,
            generation=generation.number if generation else 0,
            source=generation.source if generation else "loaded",
            bytes=generation.nbytes if generation else 0,
            segments=len(generation.segment_nbytes) if generation else 0,
            tensors=generation.tensors if generation else 0,
            load_seconds=generation.load_seconds if generation else 0.0,
            phase=load.phase if load else "",
            done_bytes=load.done_bytes if load else 0,
            total_bytes=load.total_bytes if load else 0,
            error=self.error,
            engines=leases.engines(self.name),
            eta_s=load.eta_s if load else None,
            retry_at=retry_at,
            warning=generation.not_stored if generation else "",
            resident=self.resident,
            label=generation.label if generation else "",
            live=self.live,
            load_from=load.source if load else "",
        )


class Aside(msgspec.Struct, frozen=True, array_like=True):
    """A cache that a Drop or an engine in copy mode took out of service."""

    role: Role
    error: str = ""


class Caches:
    """All caches of the device, by name. changed: fires if an answer to an engine may have changed."""

    def __init__(self) -> None:
        self._caches: dict[str, Cache] = {}
        self.changed = Broadcast()

    def __iter__(self) -> Iterator[Cache]:
        return iter(list(self._caches.values()))

    def get(self, name: str) -> Cache | None:
        return self._caches.get(name)

    def names(self) -> str:
        """For messages to a person."""
        return ", ".join(sorted(self._caches)) or "none"

    def ensure(self, name: str, role: Role) -> Cache:
        """The cache of this name, new if need be."""
        return self._caches.setdefault(name, Cache(name, role))

    def adopt(self, generation: Generation) -> None:
        """Serve a generation from the descriptor store."""
        self.ensure(generation.cache, generation.role).publish(generation)

    def set_aside(self, name: str, aside: Aside) -> None:
        """A cache that was released or dropped before this daemon started."""
        cache = self.ensure(name, aside.role)
        cache.state, cache.error = "released", aside.error

    def aside(self) -> dict[str, Aside]:
        """Caches that stay unloaded until a reload asks for them, also across a restart."""
        return {x.name: Aside(x.role, x.error) for x in self if x.state == "released"}

    def remove(self, name: str) -> Generation | None:
        """Forget a cache, if known. Returns its generation for the caller to retire."""
        cache = self._caches.pop(name, None)
        self.changed.fire()
        return cache.generation if cache else None

    @property
    def state(self) -> CacheState:
        """The device's state in one word: the state that most needs attention."""
        states = {cache.state for cache in self} | {"loading" for cache in self if cache.load}
        order: tuple[CacheState, ...] = ("loading", "failed", "ready", "evicted", "released")
        return next((s for s in order if s in states), "ready")
