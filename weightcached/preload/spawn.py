"""Start a process that ends with this one, and that begins with given descriptors as
sd_listen_fds(3) has it.

Not subprocess: a service's first descriptors have fixed numbers, and LISTEN_PID is known only after
the fork.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from weightcached.system.fds import OwnedFd
from weightcached.system.notify import LISTEN_FDS_START, listen_variables
from weightcached.system.process import ParentDeath
from weightcached.system.waits import readable

_NOT_STARTED = 127
# Signals that an event loop handles or Python ignores; a new program needs the default.
_RESET = (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)


class Process:
    """One child. Its number stays its own until wait() returns."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = OwnedFd(os.pidfd_open(pid))
        self.status: int | None = None

    async def wait(self) -> int:
        """The exit status, negative for a signal. Only one task may wait."""
        if self.status is None:
            await readable(self._pidfd.fileno())
            _, status = os.waitpid(self.pid, 0)
            self.status = os.waitstatus_to_exitcode(status)
            self._pidfd.close()
        return self.status

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it has not been waited for."""
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd.fileno(), number)


def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    listen: Mapping[str, OwnedFd] | None = None,
    stdout: int = 1,
) -> Process:
    """Start `command`, whose first word is a path, in a session of its own.

    `listen` are descriptors that the process begins with, by the names that it is told. A command
    that cannot be started ends with status 127. Only for a process without threads. Raises OSError
    when there can be no new process.
    """
    held = listen or {}
    parent = os.getpid()
    parent_death = ParentDeath()
    # Above the numbers that they will have, so that moving one does not overwrite another.
    moved = [
        fcntl.fcntl(fd.fileno(), fcntl.F_DUPFD_CLOEXEC, LISTEN_FDS_START + len(held))
        for fd in held.values()
    ]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _RESET)
    try:
        pid = os.fork()
        if pid == 0:
            _become(command, env, list(held), moved, stdout, parent, parent_death, blocked)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for fd in moved:
            os.close(fd)
    return Process(pid)


def _become(
    command: Sequence[str],
    env: Mapping[str, str],
    names: list[str],
    fds: list[int],
    stdout: int,
    parent: int,
    parent_death: ParentDeath,
    mask: set[signal.Signals] | set[int],
) -> NoReturn:
    try:
        # Ctrl-C is for us: we stop our children in order.
        os.setsid()
        if not parent_death.follow(parent):
            os._exit(_NOT_STARTED)
        # The loop's wake-up socket is shared with the parent until exec.
        signal.set_wakeup_fd(-1)
        for number in _RESET:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if stdout != 1:
            os.dup2(stdout, 1)
        for place, fd in enumerate(fds, LISTEN_FDS_START):
            os.dup2(fd, place)
        os.execve(command[0], list(command), {**env, **listen_variables(names)})
    except BaseException as e:
        sys.stderr.write(f"{command[0]} cannot be started: {e}\n")
        sys.stderr.flush()
    finally:
        os._exit(_NOT_STARTED)
