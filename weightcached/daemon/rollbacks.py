"""Caches that went back to the generation before, until a load would have other inputs.

A rollback says: not these weights. So a `reload` that would load just these keeps what the rollback
restored, and so do a restart and a reboot. Once the manifest's entry, the checkpoint, the versions
or the environment differ from those that were gone away from, or with `reload --force`, it is over.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from weightcached.config.snapshots import SnapshotSpec
from weightcached.config.wanted import Wanted
from weightcached.daemon.caches import Generation
from weightcached.daemon.logs import printable
from weightcached.errors import SnapshotError
from weightcached.index.key import WeightCacheKey
from weightcached.index.tensors import TensorIndex, read_index
from weightcached.snapshot.files import cache_directory, list_snapshots, name_of, open_snapshot
from weightcached.snapshot.rollback import RolledBack, inputs_of, read_rollback, write_rollback
from weightcached.system.fds import OwnedFd

log = logging.getLogger(__name__)

WhyStale = Callable[[Generation, Wanted], Awaitable[str]]
HELD = "rolled back: 'weightcachectl reload --force' loads what the manifest names"


class Before(NamedTuple):
    """The generation before the served one: its snapshot, and when that was written."""

    path: Path
    created_at: float


class _Held(NamedTuple):
    note: RolledBack
    # The generation gone away from, as staleness looks at it.
    replaced: Generation

    @property
    def away(self) -> WeightCacheKey:
        return _known_at_once(self.replaced)


def generation_of(index: TensorIndex) -> Generation:
    """A generation that holds no memory, so it has no descriptors; for comparing inputs."""
    return Generation(index, "", OwnedFd(-1), [], "restored")


class Rollbacks:
    """The rollbacks of one device's caches. Without the manifest's key there are none."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._spec: SnapshotSpec | None = None
        self._held: dict[str, _Held] = {}

    async def read(self, spec: SnapshotSpec | None, caches: Collection[str]) -> None:
        """Take what the files say; once the manifest is known."""
        self._spec = spec
        self._held = await asyncio.to_thread(self._read, spec, caches) if spec else {}

    def _read(self, spec: SnapshotSpec, caches: Collection[str]) -> dict[str, _Held]:
        found: dict[str, _Held] = {}
        for name in caches:
            try:
                note = read_rollback(cache_directory(spec.directory, self._device, name))
            except (SnapshotError, OSError) as e:
                log.warning("rollback passed over cache=%s error=%s", name, e)
                continue
            if note is not None:
                found[name] = _Held(note, generation_of(note.index()))
        return found

    def at(self, generation: Generation) -> float | None:
        """When the cache went back to this generation; None if it did not."""
        held = self._held.get(generation.cache)
        # The note is written first: a daemon that died in between serves what it goes away from.
        return held.note.at if held and _known_at_once(generation) != held.away else None

    async def find(self, want: Wanted, why_stale: WhyStale) -> Path | None:
        """The snapshot that is to be restored, whatever a load would make now; or None.

        Ends a rollback that is over.
        """
        held, spec = self._held.get(want.name), self._spec
        if held is None or spec is None:
            return None
        path = cache_directory(spec.directory, self._device, want.name) / held.note.to
        reason = await self._why_over(held, want, why_stale)
        if not reason and not await asyncio.to_thread(path.exists):
            reason = f"{path} is gone"
        if not reason:
            return path
        log.info("rollback is over cache=%s reason=%s", want.name, printable(reason, 1000))
        await self.end(want.name)
        return None

    async def holds(self, generation: Generation, want: Wanted, why_stale: WhyStale) -> bool:
        """Whether the served generation stays, although a load would make another now."""
        held = self._held.get(want.name)
        if held is None or self.at(generation) is None:
            return False
        reason = await self._why_over(held, want, why_stale)
        if reason:
            # Ended by the load, or it would be lost if that fails.
            log.info("rollback is over cache=%s reason=%s", want.name, printable(reason, 1000))
        return not reason

    async def _why_over(self, held: _Held, want: Wanted, why_stale: WhyStale) -> str:
        if held.note.spec_digest != want.spec_digest:
            return "the manifest has another entry"
        return await why_stale(held.replaced, want)

    async def before(
        self, want: Wanted, generation: Generation, other_software: WhyStale
    ) -> Before:
        """The newest snapshot that is older than the served generation, with other weights.

        other_software: why engines of now could not attach it. Raises SnapshotError with the
        reasons, if there is none.
        """
        spec = self._spec
        if spec is None:
            raise SnapshotError(
                f"{want.name} has no generation to go back to: the manifest has no key snapshots; "
                "'snapshots: {keep: 2}' keeps the one before"
            )
        held = self._held.get(want.name)
        with generation.handout() as fds:
            index, _ = await asyncio.to_thread(read_index, fds[0])
        if held is not None and self.at(generation) is not None:
            # Restored under another entry, so it would have another name.
            served = held.note.to
        else:
            served = await asyncio.to_thread(name_of, index)
        paths = await asyncio.to_thread(list_snapshots, spec.directory, self._device, want.name)
        names = [path.name for path in paths]
        older = paths[names.index(served) + 1 :] if served in names else paths
        reasons: list[str] = []
        for path in older:
            try:
                found, created_at = await asyncio.to_thread(_open, path)
            except SnapshotError as e:
                reasons.append(f"{path}: {e}")
                continue
            reason = _difference(found, index) or await other_software(generation_of(found), want)
            if not reason:
                return Before(path, created_at)
            reasons.append(f"{path}: {reason}")
        why = "; ".join(reasons) or (
            f"none in {cache_directory(spec.directory, self._device, want.name)} is older; "
            f"snapshots: keep is {spec.keep}, keep: {max(2, spec.keep)} keeps "
            f"{'more' if spec.keep > 1 else 'the one before'}, from the next load on"
        )
        raise SnapshotError(f"{want.name} has no generation to go back to: {printable(why, 4000)}")

    async def begin(self, want: Wanted, generation: Generation, to: Path) -> None:
        """The cache goes from its served generation to a snapshot. Raises SnapshotError."""
        held = self._held.get(want.name)
        if held is not None and self.at(generation) is not None:
            # Further back: what was gone away from at first stays that.
            note = msgspec.structs.replace(held.note, to=to.name, at=time.time())
        else:
            with generation.handout() as fds:
                index, _ = await asyncio.to_thread(read_index, fds[0])
            key = msgspec.structs.replace(index.key, checkpoint=generation.checkpoint)
            note = RolledBack(
                to=to.name,
                at=time.time(),
                spec_digest=want.spec_digest,
                replaced=inputs_of(msgspec.structs.replace(index, key=key)),
            )
        await self._write(want.name, note)

    async def end(self, name: str) -> None:
        """The cache is not rolled back any more: it was loaded anew."""
        held, spec = self._held.get(name), self._spec
        if held is None or spec is None:
            return
        # Not the weights that were gone away from are the ones before the new ones.
        with suppress(OSError):
            os.utime(cache_directory(spec.directory, self._device, name) / held.note.to)
        try:
            await self._write(name, None)
        except SnapshotError as e:
            log.warning("a restart may roll back again cache=%s error=%s", name, e)

    async def restore_note(self, name: str, note: RolledBack | None) -> None:
        """The rollback failed: as it was before. Raises SnapshotError."""
        await self._write(name, note)

    def note(self, name: str) -> RolledBack | None:
        """The present rollback of a cache."""
        held = self._held.get(name)
        return held.note if held else None

    async def _write(self, name: str, note: RolledBack | None) -> None:
        assert self._spec is not None
        directory = cache_directory(self._spec.directory, self._device, name)
        await asyncio.to_thread(write_rollback, directory, note)
        if note is None:
            self._held.pop(name, None)
        else:
            self._held[name] = _Held(note, generation_of(note.index()))


def _known_at_once(generation: Generation) -> WeightCacheKey:
    """The key without the checkpoint's full digest, which is made later."""
    key = generation.key
    return msgspec.structs.replace(key, checkpoint=msgspec.structs.replace(key.checkpoint, full=""))


def _open(path: Path) -> tuple[TensorIndex, float]:
    with open_snapshot(path) as snapshot:
        return snapshot.index, snapshot.header.created_at


def _difference(found: TensorIndex, served: TensorIndex) -> str:
    """Why this is no earlier generation of the cache, or ""."""
    for field in ("device", "cache", "role"):
        if getattr(found, field) != getattr(served, field):
            return f"its {field} is {getattr(found, field)}, wanted is {getattr(served, field)}"
    same = [x.digest for x in found.storages] == [x.digest for x in served.storages]
    return "it has the same weights" if same else ""
