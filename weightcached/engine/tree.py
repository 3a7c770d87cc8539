"""All processes of one engine: found by session and descent, watched by pidfds, ended together.

Not a cgroup: a user manager delegates none to a unit's children, and without systemd there is none.
The supervisor is the subreaper of its engines (prctl(2)), so it still finds processes that lose
their parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from weightcached.system import waits
from weightcached.system.fds import OwnedFd
from weightcached.system.process import holds_file

_KILL_TIMEOUT_S = 30.0
# It unlinks the shared memory of the processes that it served, once all of them are gone.
_TRACKER = b"multiprocessing.resource_tracker"
_TRACKER_TIMEOUT_S = 2.0


class Stat(NamedTuple):
    """The identity of a process: pids are used again, pairs of pid and start time (ticks) are not."""

    pid: int
    parent: int
    session: int
    start: int
    state: str


def stat_of(pid: int, *, dead_too: bool = False) -> Stat | None:
    """The process `pid` now; None if there is none, or only a zombie, unless that counts."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    # The name, in parentheses, may hold anything.
    fields = text[text.rindex(")") + 2 :].split()
    if fields[0] in "ZX" and not dead_too:
        return None
    return Stat(pid, int(fields[1]), int(fields[3]), int(fields[19]), fields[0])


def all_processes() -> list[Stat]:
    """Every process of the machine that this user may look at, also those that may be dead: has_ended()
    tells.
    """
    found = (stat_of(int(name), dead_too=True) for name in os.listdir("/proc") if name.isdecimal())
    return [stat for stat in found if stat is not None]


class Tree:
    """The processes of the engine whose first process is `head`, a session leader.

    Once seen, a process belongs to the tree wherever it goes; its pidfd is held until it is gone.
    """

    def __init__(self, head: int) -> None:
        self.head = head
        self._members: dict[int, OwnedFd] = {}
        self._add(head)
        self.refresh()

    def refresh(self, processes: Iterable[Stat] | None = None) -> None:
        """Look for members that have come, and forget those that have gone."""
        for pid in [pid for pid, fd in self._members.items() if has_ended(fd)]:
            self._members.pop(pid).close()
        found = list(all_processes() if processes is None else processes)
        members = set(self._members)
        grown = True
        while grown:
            grown = False
            for stat in found:
                if stat.pid not in members and (
                    stat.session == self.head or stat.parent in members
                ):
                    members.add(stat.pid)
                    grown = True
        for pid in members - set(self._members):
            self._add(pid)

    def _add(self, pid: int) -> None:
        try:
            fd = OwnedFd(os.pidfd_open(pid))
        except OSError as e:
            # Before Linux 6.16 not ESRCH, if the number is still that of the dead process's session.
            if e.errno not in (errno.ESRCH, errno.EINVAL):
                raise
            return
        if has_ended(fd):
            fd.close()
        else:
            self._members[pid] = fd

    @property
    def members(self) -> dict[int, OwnedFd]:
        """pidfds by process number, owned here."""
        return self._members

    def essential(self, fence: Path) -> dict[int, OwnedFd]:
        """The members whose end is the engine's end."""
        return {
            pid: fd
            for pid, fd in self._members.items()
            if holds_file(pid, fence) and not _is_tracker(pid)
        }

    def kill(self, *, trackers: bool) -> dict[int, OwnedFd]:
        """Send SIGKILL to all members, with or without resource trackers, until no new one comes.

        Returns those that have not ended yet.
        """
        killed: set[int] = set()
        while True:
            self.refresh()
            left = {
                pid: fd for pid, fd in self._members.items() if trackers or not _is_tracker(pid)
            }
            if left.keys() <= killed:
                return left
            for pid in left.keys() - killed:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(left[pid].fileno(), signal.SIGKILL)
                killed.add(pid)

    def close(self) -> None:
        for fd in self._members.values():
            fd.close()
        self._members.clear()


def _is_tracker(pid: int) -> bool:
    try:
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


class TreeError(Exception):
    """A process does not end: it hangs in the kernel."""


def has_ended(pidfd: OwnedFd) -> bool:
    """Whether only the exit status of the process is left.

    /proc calls a process dead if its first thread has ended, while others still free device memory.
    """
    poll = select.poll()
    poll.register(pidfd.fileno(), select.POLLIN)
    return bool(poll.poll(0))


async def end(tree: Tree) -> float:
    """Kill the engine and wait until its processes have freed their memory. Returns the seconds.
    Resource trackers are left, to clear away shared memory: bury() ends them.

    Raises TreeError if a process survives SIGKILL for 30 s, as one in a driver's call may.
    """
    began_s = time.monotonic()
    await _until_ended(tree, trackers=False, timeout_s=_KILL_TIMEOUT_S)
    return time.monotonic() - began_s


async def bury(tree: Tree) -> None:
    """Let the resource trackers do their work, and end remaining processes. Raises TreeError."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_TRACKER_TIMEOUT_S):
            for fd in list(tree.members.values()):
                await waits.readable(fd.fileno())
    await _until_ended(tree, trackers=True, timeout_s=_KILL_TIMEOUT_S)
    tree.close()


async def _until_ended(tree: Tree, *, trackers: bool, timeout_s: float) -> None:
    left: dict[int, OwnedFd] = {}
    try:
        async with asyncio.timeout(timeout_s):
            while left := tree.kill(trackers=trackers):
                for fd in left.values():
                    await waits.readable(fd.fileno())
    except TimeoutError as e:
        pids = ", ".join(map(str, left))
        raise TreeError(f"processes {pids} do not end after SIGKILL") from e
