"""Snapshots of one device's caches: the one that fits the manifest, and the child that writes one.

Nothing here is needed to serve: a directory that is full, read-only, another user's or tampered
with costs a line in the log, and the weights are loaded.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from weightcached.config.snapshots import SnapshotSpec, default_directory
from weightcached.config.wanted import Wanted
from weightcached.daemon.caches import Generation
from weightcached.daemon.children import Child
from weightcached.daemon.logs import printable
from weightcached.daemon.rollbacks import HELD, Rollbacks, WhyStale, generation_of
from weightcached.errors import SnapshotError
from weightcached.index.key import WeightCacheKey
from weightcached.index.tensors import TensorIndex
from weightcached.snapshot.files import (
    cache_directory,
    list_snapshots,
    open_snapshot,
    sweep,
)
from weightcached.snapshot.writer import WriterJob
from weightcached.system.waits import end_tasks

log = logging.getLogger(__name__)

WRITING, WRITTEN = "writing", "written"
_MAX_USE_CHARS = 4000


@dataclass
class _Writing:
    """A snapshot that waits to be written, is written, or was. task: None if it was there."""

    generation: Generation
    task: asyncio.Task[None] | None
    outcome: str = ""
    path: Path | None = None


class Kept(NamedTuple):
    """A cache's snapshot, as last seen."""

    path: Path
    nbytes: int
    key: WeightCacheKey


class Snapshots:
    """spec: from the manifest; without it nothing is read, and written only on request.

    socket_dir: directory of the daemon's socket, at which a writer asks for the descriptors.
    """

    def __init__(self, device: str, socket_dir: Path) -> None:
        self._device = device
        self._socket_dir = socket_dir
        self.spec: SnapshotSpec | None = None
        self._writing: dict[str, _Writing] = {}
        # All of them, also those whose writer is being ended.
        self._tasks: set[asyncio.Task[None]] = set()
        self._one_at_a_time = asyncio.Lock()
        self._kept: dict[str, Kept] = {}
        # By cache: what became of the snapshots that its last load could have used.
        self._uses: dict[str, str] = {}
        self.rollbacks = Rollbacks(device)

    async def sweep(self) -> None:
        """Remove what writers left that were killed with an earlier daemon; before any of ours."""
        if self.spec is None:
            return
        removed = await asyncio.to_thread(sweep, self.spec.directory, self._device)
        if removed:
            log.info("removed unfinished snapshots count=%d", removed)

    async def find(self, want: Wanted, why_stale: WhyStale | None) -> Path | None:
        """The newest snapshot that equals the result of a load of `want` now, or None.

        The log and use() say why each other one is not used. Without `why_stale` none is looked at.
        """
        self._kept.pop(want.name, None)
        if self.spec is None:
            self._uses.pop(want.name, None)
            return None
        if why_stale is None:
            self._uses[want.name] = "not looked for: 'reload --force' always loads"
            return None
        directory = cache_directory(self.spec.directory, self._device, want.name)
        self._uses[want.name] = f"none in {directory}"
        if path := await self.rollbacks.find(want, why_stale):
            try:
                index = await asyncio.to_thread(_index_of, path)
            except SnapshotError as e:
                self.reject(want.name, path, str(e))
            else:
                self._uses[want.name] = f"used: {path}, {HELD}"
                self._kept[want.name] = Kept(path, index.nbytes, index.key)
                return path
        for path in await asyncio.to_thread(
            list_snapshots, self.spec.directory, self._device, want.name
        ):
            reason = await self._find_misfit(path, want, why_stale)
            if not reason:
                self._uses[want.name] = f"used: {path}"
                return path
            self.reject(want.name, path, reason)
        return None

    def offered(self, cache: str) -> None:
        """What find() found is not read before an engine asks for it."""
        use = self._uses.get(cache, "")
        if use.startswith("used: "):
            self._uses[cache] = f"to be {use}"

    def reject(self, cache: str, path: Path, reason: str) -> None:
        """A snapshot is not used."""
        reason = printable(reason, 1000)
        log.info("snapshot not used cache=%s path=%s reason=%s", cache, path, reason)
        before = self._uses.get(cache, "")
        earlier = f"{before}; " if before.startswith("not used") else ""
        self._uses[cache] = f"{earlier}not used: {path}: {reason}"[:_MAX_USE_CHARS]

    def use(self, cache: str) -> str:
        """Whether the cache's last load by this daemon used a snapshot, and why not; for people.

        "" without the manifest's key, or if this daemon loaded nothing.
        """
        return self._uses.get(cache, "")

    async def _find_misfit(self, path: Path, want: Wanted, why_stale: WhyStale) -> str:
        try:
            index = await asyncio.to_thread(_index_of, path)
        except SnapshotError as e:
            return str(e)
        for field, wanted in (
            ("device", self._device),
            ("cache", want.name),
            ("role", want.role),
            ("spec_digest", want.spec_digest),
        ):
            if getattr(index, field) != wanted:
                return f"its {field} is {getattr(index, field)}, wanted is {wanted}"
        reason = await why_stale(generation_of(index), want)
        if not reason:
            self._kept[want.name] = Kept(path, index.nbytes, index.key)
        return reason

    def kept(self, name: str) -> Kept | None:
        """The cache's snapshot that was written or found last."""
        return self._kept.get(name)

    def path_of(self, generation: Generation) -> Path | None:
        """The complete snapshot of a served generation."""
        begun = self._writing.get(generation.cache)
        return begun.path if begun and begun.generation is generation else None

    async def way_back(self, generation: Generation) -> Path:
        """The snapshot that would bring a served generation back. Raises SnapshotError without one.

        Waits while it is being written.
        """
        await self.settled(generation)
        path = self.path_of(generation)
        if path is None:
            raise SnapshotError(
                f"{generation.cache} has no snapshot that would bring it back if they fail: run "
                f"'weightcachectl snapshot {generation.cache.rpartition('/')[0]}' first"
            )
        await asyncio.to_thread(_index_of, path)
        return path

    def restorer(self, path: Path, python: str | None) -> list[str]:
        """The command that brings a snapshot back, in place of the loader."""
        return [python or sys.executable, "-m", "weightcached.snapshot.restorer", str(path)]

    def write_later(self, generation: Generation, python: str | None) -> None:
        """Have the generation written, after those before it, unless it is there already."""
        name = generation.cache
        begun = self._writing.get(name)
        if self.spec is None or (begun and begun.generation is generation):
            return
        if self.rollbacks.at(generation) is not None:
            # It has its snapshot, under the entry that the manifest had then.
            return
        # Loaded although it was there: then it was no good.
        self._begin(generation, python, self.spec, replace=generation.source == "loaded")

    async def write_now(self, generation: Generation, python: str | None) -> str:
        """Have it written, also without the manifest's key; returns why it was not, or "".

        Raises SnapshotError without a directory.
        """
        if self.rollbacks.at(generation) is not None:
            # That is where it came from.
            return ""
        begun = self._writing.get(generation.cache)
        mine = begun is not None and begun.generation is generation
        if begun is None or not mine or begun.task is None or begun.task.done():
            spec = self.spec or SnapshotSpec(directory=default_directory())
            again = self.spec is not None and generation.source == "loaded"
            written = mine and begun is not None and begun.outcome == WRITTEN
            begun = self._begin(generation, python, spec, replace=again and not written)
        assert begun.task is not None
        # Not to be ended with whoever waits for it.
        await asyncio.wait({begun.task})
        if begun.task.cancelled():
            return f"generation {generation.number} of {generation.cache} is not served any more"
        return "" if begun.outcome == WRITTEN else begun.outcome

    def _begin(
        self, generation: Generation, python: str | None, spec: SnapshotSpec, *, replace: bool
    ) -> _Writing:
        task = asyncio.create_task(self._write(generation, python, spec, replace=replace))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        begun = self._writing[generation.cache] = _Writing(generation, task)
        return begun

    def restored(self, generation: Generation, path: Path) -> None:
        """The generation was read from this snapshot: it needs no other."""
        self._writing[generation.cache] = _Writing(generation, None, WRITTEN, path)

    def is_writing(self, generation: Generation) -> bool:
        """Whether its snapshot is being written, or is to be."""
        begun = self._writing.get(generation.cache)
        return bool(
            begun
            and begun.generation is generation
            and begun.task
            and not begun.path
            and not begun.task.done()
        )

    async def settled(self, generation: Generation) -> None:
        """Return once the generation's snapshot is written, or cannot be."""
        begun = self._writing.get(generation.cache)
        if begun is not None and begun.generation is generation and begun.task is not None:
            await asyncio.wait({begun.task})

    def stop_writing(self, generation: Generation) -> None:
        """The generation is served no longer."""
        begun = self._writing.get(generation.cache)
        if begun is not None and begun.generation is generation:
            if begun.task is not None:
                begun.task.cancel()
            del self._writing[generation.cache]

    def outcome(self, generation: Generation) -> str:
        """The state of the generation's snapshot: "", "writing", "written", or why it failed."""
        begun = self._writing.get(generation.cache)
        return begun.outcome if begun and begun.generation is generation else ""

    async def close(self) -> None:
        """End the writer. The next one removes its unfinished files."""
        await end_tasks(*self._tasks)
        self._writing.clear()

    async def _write(
        self, generation: Generation, python: str | None, spec: SnapshotSpec, *, replace: bool
    ) -> None:
        name = generation.cache
        job = WriterJob(
            root=str(spec.directory),
            device=self._device,
            cache=name,
            generation=generation.number,
            socket_dir=str(self._socket_dir),
            keep=spec.keep,
            max_bytes=spec.max_bytes,
            replace=replace,
        )
        command = [python or sys.executable, "-m", "weightcached.snapshot.writer"]
        async with self._one_at_a_time:
            self._note(generation, WRITING)
            error, path = await self._run(command, name, job)
        self._note(generation, error or WRITTEN, path)
        if error:
            log.warning("no snapshot cache=%s generation=%d error=%s", name, job.generation, error)
        else:
            log.info("snapshot written cache=%s generation=%d", name, job.generation)

    def _note(self, generation: Generation, outcome: str, path: Path | None = None) -> None:
        begun = self._writing.get(generation.cache)
        if begun is not None and begun.generation is generation:
            begun.outcome, begun.path = outcome, path
        if path is not None:
            self._kept[generation.cache] = Kept(path, generation.nbytes, generation.key)

    async def _run(self, command: list[str], name: str, job: WriterJob) -> tuple[str, Path | None]:
        """Why the child wrote nothing, or "" and the snapshot's path."""
        try:
            child = Child(
                command, name, stdin=msgspec.json.encode(job), device=self._device, capture=True
            )
        except OSError as e:
            return f"{command[0]} cannot be started: {e.strerror}", None
        async with child:
            status = await asyncio.shield(child.exit)
        if status == 0:
            return "", Path(os.fsdecode(bytes(child.output or b"").strip()))
        return child.last_error_line or f"the writer ended with status {status}", None


def _index_of(path: Path) -> TensorIndex:
    """The index of a snapshot whose header and index are right. Raises SnapshotError."""
    with open_snapshot(path) as snapshot:
        return snapshot.index
