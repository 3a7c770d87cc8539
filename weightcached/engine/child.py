"""One engine of a service, in its own process: it answers the supervisor's questions.

    python -m weightcached.engine.child MODULE     the job on standard input, sockets as descriptors 3 and 4

MODULE makes the engine: vllm_compat/server.py, or a test's. It serves on a private Unix socket from
its start, and on the public one while it is promoted. The fence is a lock in the service's
directory, held while promoted by all processes that the engine has forked: as long as one of a dead
engine's is left, no other engine can serve.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib
import os
import socket
import sys
import time
import traceback
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from weightcached.engine import control
from weightcached.engine.records import record_of, write_record
from weightcached.errors import EngineError
from weightcached.wire.engine_job import Activity, Job, say_error

PUBLIC_FD = 3
CONTROL_FD = 4
_FENCE_RETRY_S = 0.002


class AsyncEngine(Protocol):
    """The interface of the engine that MODULE makes. facts: for the supervisor's record."""

    @property
    def asleep(self) -> bool: ...
    @property
    def facts(self) -> dict[str, Any]: ...
    async def ping(self) -> Activity:
        """Ask the engine's core; returns once it answers."""

    async def wake(self) -> None: ...
    async def sleep(self) -> None:
        """Free memory that an engine without requests does not need, if there is any."""

    async def expect_memory(self, directory: str) -> None:
        """While it sleeps: hold what another engine lends to the one in `directory`, this one."""

    async def lend_memory(self, directory: str) -> None:
        """Lend what sleep() would free to the engine in `directory`, to be taken when it wakes."""

    async def forget_memory(self) -> None:
        """Give back what was lent."""

    async def swap(self, *, on_swap: str, drain_s: float) -> dict[str, Any]:
        """Map the newest weights while it runs; as SwapOutcome, with a `code` if it does not.

        Returns after at most drain_s and the time of the swap.
        """

    async def accept_on(self, sock: socket.socket) -> None:
        """Serve clients of `sock`, which is owned from here on."""

    async def stop_accepting(self, drain_s: float) -> int:
        """Take no new connection; let present ones end, for at most `drain_s`.

        Returns how many were cut off.
        """

    async def ended(self) -> None:
        """Return when the engine ends by itself."""


class Module(Protocol):
    """The interface of MODULE."""

    def prepare(self) -> str:
        """Import what engines need. Returns why engines cannot be forked after that, or ""."""

    def try_in_fork(self) -> None:
        """Do an operation that would hang in a badly forked process."""

    def run(self, main: Any) -> None:
        """Run the coroutine to its end on the event loop that the engine wants."""

    def start(self, job: Job, fence_fd: int) -> AbstractAsyncContextManager[AsyncEngine]: ...


class EngineChild:
    """Answers the supervisor."""

    def __init__(self, engine: AsyncEngine, job: Job, fence_fd: int, public: socket.socket) -> None:
        self._engine = engine
        self._job = job
        self._fence_fd = fence_fd
        self._public = public
        self._promoted = False
        self._turn = asyncio.Lock()

    async def handle(
        self, command: str, arguments: dict[str, Any], peer: control.Peer
    ) -> tuple[dict[str, Any], int | None]:
        """One request of the supervisor. Raises EngineError."""
        if command == "ready":
            return {**self._engine.facts, "serving": self._promoted}, None
        if command == "ping":
            return cast(dict[str, Any], msgspec.to_builtins(await self._engine.ping())), None
        if command == "promote":
            async with self._turn:
                return await self._promote(**arguments), None
        if command == "demote":
            async with self._turn:
                return await self._demote(**arguments), None
        if command == "swap":
            async with self._turn:
                return await self._engine.swap(**arguments), None
        if command == "expect_memory":
            await self._engine.expect_memory(self._job.directory)
            return {}, None
        if command == "lend_memory":
            await self._engine.lend_memory(**arguments)
            return {}, None
        if command == "forget_memory":
            await self._engine.forget_memory()
            return {}, None
        if command == "socket":
            return {}, self._public.fileno()
        raise EngineError(f"no command {command!r}")

    async def _promote(self, *, fence_s: float) -> dict[str, Any]:
        began_s = time.monotonic()
        await self._take_fence(fence_s)
        fenced_s = time.monotonic()
        if self._engine.asleep:
            await self._engine.wake()
        woken_s = time.monotonic()
        if not self._promoted:
            await self._engine.accept_on(self._public.dup())
            self._promoted = True
        return {"fence_s": fenced_s - began_s, "wake_s": woken_s - fenced_s}

    async def _take_fence(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(self._fence_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as e:
                if time.monotonic() > deadline_s:
                    raise EngineError(
                        f"{self._job.fence} is locked by another engine of this service: "
                        "a process of it is left; 'fuser' names it"
                    ) from e
            await asyncio.sleep(_FENCE_RETRY_S)

    async def _demote(self, *, drain_s: float) -> dict[str, Any]:
        began_s = time.monotonic()
        cut = await self._engine.stop_accepting(drain_s) if self._promoted else 0
        self._promoted = False
        drained_s = time.monotonic()
        await self._engine.sleep()
        fcntl.flock(self._fence_fd, fcntl.LOCK_UN)
        return {
            "cut": cut,
            "drain_s": drained_s - began_s,
            "sleep_s": time.monotonic() - drained_s,
        }


async def _serve(job: Job, module: Module, public: socket.socket, control_fd: int) -> None:
    fence_fd = os.open(job.fence, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    async with module.start(job, fence_fd) as engine:
        if not (Path(job.directory) / "record.json").exists():
            # A new supervisor has found no record yet, and does not know of this engine.
            raise EngineError(f"{job.directory} was removed: no supervisor knows of this engine")
        child = EngineChild(engine, job, fence_fd, public)
        with socket.socket(fileno=control_fd) as sock:
            sock.setblocking(False)
            server = control.ControlServer(sock, child.handle)
            await engine.ended()
            server.close()


def run(job: Job, module: Module, *, public_fd: int, control_fd: int) -> int:
    """Serve until the engine ends or is ended. Returns the exit status."""
    os.environ.update(job.environment)
    try:
        record = record_of(job.number, job.digest, os.getpid(), job.arguments)
        write_record(Path(job.directory), record)
        module.run(_serve(job, module, socket.socket(fileno=public_fd), control_fd))
    except KeyboardInterrupt:
        return 1
    except BaseException as e:
        traceback.print_exc()
        say_error(job.error_file, e)
        return 1
    say_error(job.error_file, RuntimeError("the engine ended by itself"))
    return 0


def main() -> None:
    """An engine by exec."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    os.environ.update(job.environment)
    for fd in (PUBLIC_FD, CONTROL_FD):
        os.set_inheritable(fd, False)
    module = cast(Module, importlib.import_module(sys.argv[1]))
    status = run(job, module, public_fd=PUBLIC_FD, control_fd=CONTROL_FD)
    # Threads of torch and vLLM that do not end must not hold up the end.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
