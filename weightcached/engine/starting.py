"""Starting an engine: forked by the nursery, or by exec if that is impossible."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence

import msgspec

from weightcached.engine.child import CONTROL_FD, PUBLIC_FD
from weightcached.engine.nursery import SOCKET_FD, Answer
from weightcached.engine.plan import StartPlan
from weightcached.errors import EngineError, ProtocolError
from weightcached.system.fds import OwnedFd, sealed_memfd
from weightcached.system.waits import readable
from weightcached.wire.engine_job import Job
from weightcached.wire.framing import recv_packet, send_packet

log = logging.getLogger(__name__)

# Imports of vLLM from a cold disk, on a machine that is busy.
_IMPORT_TIMEOUT_S = 300.0
_FORK_TIMEOUT_S = 30.0


def start_process(
    command: Sequence[str], environment: Mapping[str, str], fds: Mapping[int, int]
) -> int:
    """Start `command` in its own session, with `fds` (its number: ours). Returns its pid.

    Raises OSError.
    """
    # Above the numbers that they will have, so that placing one does not overwrite another.
    high = max(fds) + 1
    moved = {to: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, high) for to, fd in fds.items()}
    try:
        return os.posix_spawn(
            command[0],
            list(command),
            dict(environment),
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, to) for to, fd in moved.items()],
            setsid=True,
            setsigdef=range(1, 32),
            setsigmask=(),
        )
    finally:
        for fd in moved.values():
            os.close(fd)


def start_by_exec(
    python: str, module: str, job: Job, environment: Mapping[str, str], public: int, control: int
) -> int:
    """Start an engine that imports everything itself. Returns its process number."""
    with sealed_memfd("weightcached-job", msgspec.json.encode(job)) as stdin:
        os.lseek(stdin.fileno(), 0, os.SEEK_SET)
        return start_process(
            [python, "-m", "weightcached.engine.child", module],
            environment,
            {0: stdin.fileno(), PUBLIC_FD: public, CONTROL_FD: control},
        )


class Nursery:
    """The process that forks engines, from the supervisor's side."""

    def __init__(self, python: str, module: str, environment: Mapping[str, str]) -> None:
        """Start it; it imports while others work. Raises OSError."""
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        with theirs, open(os.devnull, "rb") as null:
            command = [python, "-m", "weightcached.engine.nursery", module]
            fds = {0: null.fileno(), SOCKET_FD: theirs.fileno()}
            pid = start_process(command, environment, fds)
        self._pidfd = OwnedFd(os.pidfd_open(pid))
        self._turn = asyncio.Lock()
        # "" once it can fork; None before it has said so.
        self._refusal: str | None = None
        # Why another nursery is wanted, or "".
        self.outdated = ""

    async def refusal(self) -> str:
        """Why it cannot fork, once its imports are done, or ""."""
        async with self._turn:
            if self._refusal is None:
                try:
                    self._refusal = (await self._answer(_IMPORT_TIMEOUT_S)).refusal
                except (EOFError, OSError, ProtocolError, msgspec.MsgspecError) as e:
                    self._kill()
                    self._refusal = f"the nursery ended, its lines say why ({e or 'no answer'})"
            return self._refusal

    async def fork(self, job: Job, public: int, control: int) -> int | None:
        """The pid of a new engine; None if it could not be forked, with a log line."""
        if await self.refusal():
            return None
        async with self._turn:
            try:
                send_packet(self._sock, msgspec.json.encode(job), [public, control])
                answer = await self._answer(_FORK_TIMEOUT_S)
            except (EOFError, OSError, ProtocolError, msgspec.MsgspecError) as e:
                # One that is only late must not fork the engine later, beside another.
                self._kill()
                self._refusal = f"the nursery is gone ({e or 'no answer'})"
                return None
            self._refusal = answer.refusal
            self.outdated = answer.refusal if answer.outdated else ""
            return answer.pid or None

    async def _answer(self, timeout_s: float) -> Answer:
        async with asyncio.timeout(timeout_s):
            # A descriptor of its own: close() may come meanwhile, and the number be another's.
            with self._sock.dup() as sock:
                while True:
                    try:
                        data = recv_packet(sock, max_fds=0).data
                        return msgspec.json.decode(data, type=Answer)
                    except BlockingIOError:
                        await readable(sock.fileno())

    def abort_imports(self) -> None:
        """Do not wait for imports that nobody needs any more."""
        if self._refusal is None:
            self._kill()

    def close(self) -> None:
        """End it; who waits for an answer of it gets none. Engines that it has forked go on."""
        self._kill()
        # It may be dead, and the other end with it.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._pidfd.close()

    def _kill(self) -> None:
        if not self._pidfd.closed:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd.fileno(), signal.SIGKILL)


class Starter:
    """Starts the engines of one service: forked by a nursery, or by exec where that does not work.

    stopping: whether the service ends.
    """

    def __init__(self, module: str, stopping: Callable[[], bool]) -> None:
        self._module = module
        self._stopping = stopping
        self._nursery: Nursery | None = None
        self._told = False
        self._forked: set[int] = set()
        # The last engine that failed to start was a forked one: is it the fork?
        self._distrusts_fork = False

    async def start(
        self, job: Job, plan: StartPlan, public: int, control: int, *, nursery: bool
    ) -> tuple[int, str]:
        """The pid of a new engine, and how it was started. Raises OSError, EngineError."""
        pid = None
        if nursery and not self._distrusts_fork:
            pid = await self._fork(job, plan, public, control)
        if pid is not None:
            self._forked.add(job.number)
            return pid, "forked"
        pid = start_by_exec(plan.python, self._module, job, plan.environment, public, control)
        return pid, "executed"

    async def _fork(self, job: Job, plan: StartPlan, public: int, control: int) -> int | None:
        """The pid of the engine; None if none can be forked. Raises EngineError."""
        if self._nursery is None:
            self._nursery = Nursery(plan.python, self._module, plan.environment)
        nursery = self._nursery
        refusal = await nursery.refusal()
        self._check_in_use(nursery)
        if not refusal:
            pid = await nursery.fork(job, public, control)
            if pid is None:
                self._check_in_use(nursery)
                if nursery.outdated:
                    # This one imports by itself; the next is forked by another nursery.
                    log.info("service=%s imports anew: %s", job.service, nursery.outdated)
                    self.import_anew()
            return pid
        if not self._told:
            self._told = True
            log.info("service=%s engines are executed, not forked: %s", job.service, refusal)
        return None

    def _check_in_use(self, nursery: Nursery) -> None:
        """Raises EngineError if what its engines were for was given up while they were waited for."""
        if self._stopping():
            raise EngineError("the service is stopping")
        if nursery is not self._nursery:
            raise EngineError("engines of another version are wanted by now")

    def import_anew(self) -> None:
        """Another vLLM may have been installed."""
        self.close()
        self._nursery, self._told, self._distrusts_fork = None, False, False

    def failed(self, number: int, *, starts: bool) -> None:
        """An engine has failed. starts: before it was up."""
        if starts:
            self._distrusts_fork = number in self._forked
        self._forked.discard(number)

    def abort_imports(self) -> None:
        """Do not wait for imports that nobody needs any more."""
        if self._nursery is not None:
            self._nursery.abort_imports()

    def close(self) -> None:
        """End the nursery. Engines go on."""
        if self._nursery is not None:
            self._nursery.close()
