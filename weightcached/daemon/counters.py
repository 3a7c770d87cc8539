"""Counts for metrics: attaches, refusals and their reasons, reported fallbacks. From zero."""

from __future__ import annotations

from collections import Counter

from weightcached.daemon.caches import Caches
from weightcached.wire.messages import Counters, Message, Mismatch

# Field names hold names of the engine's environment variables, so a peer could invent them without
# end; codes likewise.
MAX_FIELDS = 100
OTHER = "other"


class Tally:
    """Counts, as sessions report them."""

    def __init__(self, *, adoptions: int) -> None:
        self._adoptions = adoptions
        self._attaches: Counter[str] = Counter()
        self._attach_seconds: dict[str, float] = {}
        self._hits: Counter[str] = Counter()
        self._evictions: Counter[str] = Counter()
        self._restores: Counter[str] = Counter()
        self._restore_seconds: dict[str, float] = {}
        self._mismatches: Counter[str] = Counter()
        self._refusals: Counter[str] = Counter()
        self._fallbacks: Counter[str] = Counter()

    def attached(self, cache: str, seconds: float, *, hit: bool = False) -> None:
        """A generation of `cache` was handed out. hit: without waiting for a load."""
        self._hits[cache] += hit
        self._attaches[cache] += 1
        self._attach_seconds[cache] = self._attach_seconds.get(cache, 0.0) + seconds

    def evicted(self, cache: str) -> None:
        """A generation was freed until an engine asks for it."""
        self._evictions[cache] += 1

    def restored(self, cache: str, seconds: float) -> None:
        """A generation was read from a snapshot."""
        self._restores[cache] += 1
        self._restore_seconds[cache] = self._restore_seconds.get(cache, 0.0) + seconds

    def refused(self, answer: Message) -> None:
        """An engine got a final answer other than a generation."""
        self._refusals[type(answer).__name__] += 1
        if isinstance(answer, Mismatch):
            for field in answer.fields:
                _count(self._mismatches, field.field)

    def fell_back(self, reason: str) -> None:
        """An engine loads from disk, for the reason with this code."""
        _count(self._fallbacks, reason)

    def counters(self, caches: Caches, *, digest_failures: int) -> Counters:
        """All counts, with the load times of served generations."""
        return Counters(
            attaches=dict(self._attaches),
            attach_seconds=dict(self._attach_seconds),
            mismatches=dict(self._mismatches),
            refusals=dict(self._refusals),
            fallbacks=dict(self._fallbacks),
            adoptions=self._adoptions,
            digest_failures=digest_failures,
            hits=dict(+self._hits),
            evictions=dict(self._evictions),
            restores=dict(self._restores),
            restore_seconds=dict(self._restore_seconds),
            phase_seconds={
                cache.name: cache.generation.load_phases for cache in caches if cache.generation
            },
        )


def _count(counter: Counter[str], name: str) -> None:
    counter[name if name in counter or len(counter) < MAX_FIELDS else OTHER] += 1
