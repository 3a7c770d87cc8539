"""Which cache fits a key: the daemon's side of "never the wrong weights".

All fields of the key but the checkpoint compare by equality; the checkpoint goes through
identity.decide(). A child makes each generation's own full digest, soon after its load and only
from files that are unchanged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import NamedTuple

from weightcached.checkpoint.identity import (
    CheckpointIdentity,
    Different,
    Equal,
    Need,
    changed_files,
    decide,
    names_to_compare,
)
from weightcached.daemon.caches import Cache, Caches, Generation, LoadProgress
from weightcached.errors import CheckpointError, WeightcachedError
from weightcached.index.key import WeightCacheKey
from weightcached.system.waits import end_tasks
from weightcached.wire.messages import (
    Absent,
    Failed,
    FieldMismatch,
    Loading,
    Mismatch,
    NeedDigest,
    Released,
)

log = logging.getLogger(__name__)


class Evicted(NamedTuple):
    """The cache that matches, as far as its key is known, once it is loaded or restored."""

    cache: Cache


# Answers without a generation that nothing but a change elsewhere makes another.
Final = Mismatch | Absent | Failed | Released
Answer = Generation | Evicted | Loading | NeedDigest | Final
DigestChild = Callable[[CheckpointIdentity], Coroutine[None, None, str]]

CHANGED = "the checkpoint changed since it was loaded: weightcachectl reload"


class _Offer(NamedTuple):
    """Something that a key may match: a generation, a load under way, or one that is over."""

    cache: Cache
    key: WeightCacheKey | None
    what: Generation | LoadProgress | None


class _Undecided(NamedTuple):
    offer: _Offer
    need: Need


class Matcher:
    """Answers keys. `digest_child` makes the full digest of a checkpoint, at low priority."""

    def __init__(self, caches: Caches, device: str, digest_child: DigestChild) -> None:
        self._caches = caches
        self._device = device
        self._digest_child = digest_child
        self._digests: dict[Generation, asyncio.Task[str]] = {}
        self._one_at_a_time = asyncio.Lock()
        self.digest_failures = 0

    async def match(self, key: WeightCacheKey, *, sampled: bool = False) -> Answer:
        """The generation that `key` matches, or the message that says why there is none (yet).

        Equal samples of the checkpoints are enough if the manifest says so for the cache, or
        `sampled` for the engine.
        """
        offers = self._offers(key)
        if not offers:
            return Absent(
                reason=f"no cache in role {key.role} on {self._device}: the manifest gives it {self._caches.names()}"
            )
        nearest: list[Mismatch] = []
        undecided: list[_Undecided] = []
        for offer in offers:
            if offer.key is None:
                continue
            fields = offer.key.mismatched_fields(key)
            if fields:
                nearest.append(_mismatch(offer.cache, [FieldMismatch(*field) for field in fields]))
                continue
            verdict = decide(
                _identity(offer, offer.key),
                key.checkpoint,
                mode="sampled" if sampled else offer.cache.identity,
            )
            if isinstance(verdict, Equal):
                return _final(offer)
            if isinstance(verdict, Different):
                nearest.append(_checkpoint_mismatch(offer.cache, offer.key, key, verdict.reason))
            elif isinstance(verdict, Need):
                undecided.append(_Undecided(offer, verdict))
        if undecided:
            return await self._settle(undecided[0], key, sampled=sampled)
        return self._by_checkpoint(offers, nearest, key, sampled=sampled)

    def newest(self, name: str, key: WeightCacheKey) -> Answer:
        """The served generation of a cache, for an engine that maps an older one of it.

        Its checkpoint may be another one; whether the engine can take it is the engine's to check.
        """
        cache = self._caches.get(name)
        if cache is None:
            return Absent(
                reason=f"no cache {name!r} on {self._device}: it has {self._caches.names()}"
            )
        if cache.generation is None:
            return _final(_Offer(cache, cache.last_key, cache.load))
        fields = cache.generation.key.mismatched_fields(key)
        if fields:
            return _mismatch(cache, [FieldMismatch(*field) for field in fields])
        return cache.generation

    def _by_checkpoint(
        self, offers: list[_Offer], nearest: list[Mismatch], key: WeightCacheKey, *, sampled: bool
    ) -> Answer:
        """No known key matches. A load whose key is not known yet still may, unless it reads another checkpoint."""
        unknown: list[_Offer] = []
        for offer in offers:
            cached = offer.cache.checkpoint
            if offer.key is not None:
                continue
            if cached is None or not (
                isinstance(offer.what, LoadProgress) or offer.cache.state == "evicted"
            ):
                unknown.append(offer)
                continue
            verdict = decide(
                cached, key.checkpoint, mode="sampled" if sampled else offer.cache.identity
            )
            if isinstance(verdict, Different):
                field = FieldMismatch(
                    "checkpoint", f"{cached.root} ({verdict.reason})", key.checkpoint.root
                )
                nearest.append(_mismatch(offer.cache, [field]))
            elif (
                isinstance(verdict, Need) and verdict.rung == "sample" and not key.checkpoint.sample
            ):
                return NeedDigest(rung="sample", files=names_to_compare(cached, key.checkpoint))
            else:
                unknown.append(offer)
        return _without_match(unknown, nearest)

    def forget(self, generation: Generation) -> None:
        """The generation is no longer served: its digest is not needed any more."""
        task = self._digests.pop(generation, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._digests.values())
        self._digests.clear()
        await end_tasks(*tasks)

    def _offers(self, key: WeightCacheKey) -> list[_Offer]:
        caches = [cache for cache in self._caches if cache.role == key.role]
        served = [_Offer(c, c.generation.key, c.generation) for c in caches if c.generation]
        loading = [_Offer(c, c.load.key or c.load.expected_key, c.load) for c in caches if c.load]
        gone = [_Offer(c, c.last_key, None) for c in caches if not c.generation and not c.load]
        return served + loading + gone

    async def _settle(
        self, undecided: _Undecided, asked: WeightCacheKey, *, sampled: bool
    ) -> Answer:
        """Undecided so far: have the missing digest made, by us or by the engine."""
        offer, need = undecided
        if not isinstance(offer.what, Generation) or offer.key is None:
            # A load is compared completely once it is served; a failed or released cache never is.
            return _final(offer)
        generation = offer.what
        if "cached" in need.sides and need.rung != "full":
            reason = f"it was loaded without its {need.rung} digest: weightcachectl reload"
            return _checkpoint_mismatch(offer.cache, offer.key, asked, reason)
        if "cached" in need.sides:
            # Ours first: the engine's would be made in vain if there were none.
            task = self._full_digest(generation)
            if not task.done():
                return Loading(cache=offer.cache.name, phase="digest")
            self.forget(generation)
            if task.result():
                return _digest_failure(offer.cache, offer.key, asked, task.result())
            return await self.match(asked, sampled=sampled)
        names = names_to_compare(offer.key.checkpoint, asked.checkpoint)
        return NeedDigest(rung=need.rung, files=names)

    def make_digests(self) -> None:
        """Make the missing full digests of served generations, one after the other.

        Before anybody asks: once a file has another status, nobody can tell its old content.
        """
        for cache in self._caches:
            generation = cache.generation
            if generation and not generation.full_digest and cache.identity == "full":
                self._full_digest(generation)

    async def full_digest(self, generation: Generation) -> str:
        """The generation's full digest, made if need be. Raises CheckpointError."""
        if not generation.full_digest:
            error = await asyncio.shield(self._full_digest(generation))
            self.forget(generation)
            if error:
                raise CheckpointError(error)
        return generation.full_digest

    def _full_digest(self, generation: Generation) -> asyncio.Task[str]:
        if generation not in self._digests:
            self._digests[generation] = asyncio.create_task(self._make_digest(generation))
        return self._digests[generation]

    async def _make_digest(self, generation: Generation) -> str:
        """Fill in the generation's full digest. Returns the error, or ""."""
        identity = generation.key.checkpoint
        try:
            async with self._one_at_a_time:
                log.info(
                    "digest begins cache=%s generation=%d", generation.cache, generation.number
                )
                generation.full_digest = await self._digest_child(identity)
        except WeightcachedError as e:
            if await asyncio.to_thread(changed_files, identity):
                log.warning(
                    "no digest, the checkpoint has changed since it was loaded cache=%s generation=%d",
                    generation.cache,
                    generation.number,
                )
                return CHANGED
            self.digest_failures += 1
            log.error(
                "digest failed cache=%s generation=%d error=%s",
                generation.cache,
                generation.number,
                e,
            )
            return str(e)
        else:
            log.info("digest made cache=%s generation=%d", generation.cache, generation.number)
            return ""
        finally:
            self._caches.changed.fire()


def _identity(offer: _Offer, cached: WeightCacheKey) -> CheckpointIdentity:
    """Our side of the comparison."""
    return offer.what.checkpoint if isinstance(offer.what, Generation) else cached.checkpoint


def _final(offer: _Offer) -> Answer:
    """The answer for an offer that matches."""
    cache = offer.cache
    if isinstance(offer.what, Generation):
        return offer.what
    if isinstance(offer.what, LoadProgress):
        return loading(cache, offer.what)
    if cache.state == "evicted":
        return Evicted(cache)
    return (
        Released(cache=cache.name)
        if cache.state == "released"
        else Failed(cache=cache.name, error=cache.error)
    )


def loading(cache: Cache, load: LoadProgress) -> Loading:
    """The Loading message for a load under way."""
    return load.message(Loading, cache.name)


def _without_match(unknown: list[_Offer], nearest: list[Mismatch]) -> Answer:
    """No known key matches. A load with an unknown key still may, also one that is yet to begin;
    else name the nearest cache.
    """
    for offer in unknown:
        if isinstance(offer.what, LoadProgress):
            return loading(offer.cache, offer.what)
    for offer in unknown:
        if offer.cache.state == "evicted":
            return Evicted(offer.cache)
    if nearest:
        return min(nearest, key=lambda mismatch: len(mismatch.fields))
    return _final(unknown[0])


def _mismatch(cache: Cache, fields: list[FieldMismatch]) -> Mismatch:
    return Mismatch(cache=cache.name, fields=fields)


def _checkpoint_mismatch(
    cache: Cache, cached: WeightCacheKey, asked: WeightCacheKey, reason: str
) -> Mismatch:
    field = FieldMismatch(
        "checkpoint", f"{cached.checkpoint.root} ({reason})", asked.checkpoint.root
    )
    return _mismatch(cache, [field])


def _digest_failure(
    cache: Cache, cached: WeightCacheKey, asked: WeightCacheKey, error: str
) -> Answer:
    if error == CHANGED:
        return _checkpoint_mismatch(cache, cached, asked, CHANGED)
    return Failed(
        cache=cache.name, error=f"the full digest of its checkpoint could not be made: {error}"
    )
