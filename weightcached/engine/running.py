"""One engine, as its supervisor sees it: its directory, its processes, its answers.

<service>/<number>/          0700, removed with the engine
    record.json for a new supervisor, to take the engine back
    control.sock             the supervisor's questions
    http.sock                the engine's API, from its start
    error                    why it ended, in its own words
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from weightcached.engine import tree
from weightcached.engine.control import Link
from weightcached.engine.records import Record, write_record
from weightcached.engine.tree import Tree, stat_of
from weightcached.errors import EngineError
from weightcached.system.fds import OwnedFd
from weightcached.wire.engine_job import Activity

log = logging.getLogger(__name__)

_LONGEST_ERROR = 2000


class Running:
    """An engine's processes. `on_death` is called once, with the reason, when one of them ends."""

    def __init__(
        self, record: Record, directory: Path, fence: Path, on_death: Callable[[str], None]
    ) -> None:
        self.record = record
        self.directory = directory
        self.tree = Tree(record.pid)
        self.activity = Activity(requests=0, active=0)
        self.active_s = time.monotonic()
        self._fence = fence
        self._on_death = on_death
        self._watched: dict[int, OwnedFd] = {}
        self._seen: set[int] = set()
        self._link: Link | None = None
        self._ending = False
        self.watch()
        if self.tree.head not in self.tree.members:
            asyncio.get_running_loop().call_soon(self._report_death, self.tree.head)

    @property
    def number(self) -> int:
        return self.record.number

    def watch(self) -> None:
        """Hear of the end of every process that the engine cannot do without.

        One counts from the second look on: for a moment after its fork every program that the
        engine runs has the fence, and its end means nothing.
        """
        if self._ending:
            # The task that ends the tree waits on its descriptors.
            return
        self.tree.refresh()
        essential = self.tree.essential(self._fence)
        wanted = {pid: fd for pid, fd in essential.items() if pid in self._seen}
        self._seen = set(essential)
        if self.tree.head in self.tree.members:
            wanted[self.tree.head] = self.tree.members[self.tree.head]
        loop = asyncio.get_running_loop()
        for pid, fd in wanted.items():
            if pid not in self._watched:
                self._watched[pid] = own = fd.dup()
                loop.add_reader(own.fileno(), self._report_death, pid)

    def processes(self) -> list[int]:
        """All that the engine has now. One that starts has got some since it was last looked at."""
        if not self._ending:
            self.tree.refresh()
        return sorted(self.tree.members)

    def _report_death(self, pid: int) -> None:
        self.unwatch()
        what = "its first process" if pid == self.tree.head else f"its process {pid}"
        self._on_death(self.last_words() or f"{what} ended")

    def unwatch(self) -> None:
        loop = asyncio.get_running_loop()
        for fd in self._watched.values():
            loop.remove_reader(fd.fileno())
            fd.close()
        self._watched.clear()

    def last_words(self) -> str:
        """Why the engine ended, in its own words, or ""."""
        try:
            with open(self.directory / "error", encoding="utf-8", errors="replace") as file:
                return " ".join(file.read(_LONGEST_ERROR).split())
        except OSError:
            return ""

    async def ask(self, command: str, *, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Raises EngineError, also if no answer comes in time."""
        if self._link is None:
            self._link = Link(self.directory / "control.sock")
        try:
            return await self._link.ask(command, timeout_s=timeout_s, **arguments)
        except TimeoutError as e:
            raise EngineError(
                f"it did not answer {command!r} within {timeout_s:g} s", timed_out=True
            ) from e

    async def public_socket(self, *, timeout_s: float) -> OwnedFd | None:
        """The public socket, from an engine that has it."""
        try:
            if self._link is None:
                self._link = Link(self.directory / "control.sock")
            _, fds = await self._link.ask_for_fd("socket", timeout_s=timeout_s)
        except (EngineError, TimeoutError):
            return None
        return fds[0] if fds else None

    async def ping(self, *, timeout_s: float) -> None:
        """Check that the engine's core answers, and get its counts. Raises EngineError."""
        answer = await self.ask("ping", timeout_s=timeout_s)
        activity = msgspec.convert(answer, Activity)
        if activity.active or activity.requests != self.activity.requests:
            self.active_s = time.monotonic()
        self.activity = activity

    def keep_record(self) -> None:
        """Write the record. A full file system must not stop the service."""
        try:
            write_record(self.directory, self.record)
        except OSError as e:
            log.warning("engine=%d its record cannot be written: %s", self.number, e)

    async def end(self) -> float:
        """End all processes. Returns the seconds until their memory was free. Raises TreeError."""
        self._ending = True
        self.unwatch()
        if self._link is not None:
            self._link.close()
            self._link = None
        return await tree.end(self.tree)

    async def bury(self) -> None:
        """Remove the remains: shared memory, sockets, the directory."""
        with contextlib.suppress(tree.TreeError):
            await tree.bury(self.tree)
        shutil.rmtree(self.directory, ignore_errors=True)


def is_alive(record: Record) -> bool:
    """Whether the record's first process still runs, and is not another with its number."""
    stat = stat_of(record.pid)
    return stat is not None and stat.start == record.start


async def end_remains(record: Record) -> None:
    """End the remaining processes of an engine whose first process is gone."""
    stat = stat_of(record.pid, dead_too=True)
    if stat is not None and stat.start != record.start:
        # The number is another process's by now, so nobody is left in the engine's session.
        return
    remains = Tree(record.pid)
    if remains.members:
        log.warning(
            "engine=%d ending its remaining processes: %s", record.number, sorted(remains.members)
        )
        await tree.end(remains)
        await tree.bury(remains)


def remove_directory(directory: Path) -> None:
    """Remove an engine's files; no error if there are none."""
    shutil.rmtree(directory, ignore_errors=True)
