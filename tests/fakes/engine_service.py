"""An engine for the service's tests: HTTP and a core process of its own, without vLLM.

Arguments that it knows, all optional:
    x_fail      fail to start with this message
    x_fail_late the same, but its process ends long after its connections
    x_fail_file fail with what this file says, while it is there
    x_no_fork   fail to start where it was forked
    x_wake_fails a file with a number: so many wakes fail
    x_delay_file a file with a number: that engine starts once the file is gone
    x_starts    a file that gets one line for each start
    x_swaps     a file with the answers to swaps, JSON by number of the engine: outcome, reason, code; and "newest",
                the weights that an engine has afterwards if it swaps
    x_maps      a daemon's socket: map the weights of `model` from it; "weights" is their digest then
    x_lends     a file with a line for each word about memory that engines lend each other
    x_keeps_lent do not give such memory back
    x_keeps     keep them mapped while asleep, and say so; "secretly": and do not say so

GET / answers {"engine": N, "pid": …, "core": …, "arguments": …, "at": …}, the last one by the clock of all
processes; GET /until?PATH does so once PATH is there, GET /closing once the engine takes no more connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightcached.errors import EngineError
from weightcached.wire.engine_job import Activity, Job, say_error

if TYPE_CHECKING:
    from tests.fakes.mapped_weights import MappedWeights

# Longer than a client that asks all the time ever rests: its next request would be cut off.
_KEEP_ALIVE_S = 300.0


def prepare() -> str:
    """Forks, unless the test says otherwise."""
    return os.environ.get("FAKE_ENGINE_REFUSAL", "")


def try_in_fork() -> None:
    """As the test wants it."""
    how = os.environ.get("FAKE_ENGINE_TRIAL", "")
    if how == "crash":
        os._exit(7)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def _text_of(path: Path) -> str:
    """The file's text, "" if a test has taken it away."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text()
    return ""


def _set_once(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class FakeEngine:
    def __init__(self, job: Job, core: int, to_core: int, from_core: int) -> None:
        self.job = job
        self.core = core
        self.asleep = job.parked
        self._to_core, self._from_core = to_core, from_core
        self._turn = asyncio.Lock()
        self._requests = self._active = 0
        self.weights = job.arguments["model"]
        self.mapped: MappedWeights | None = None
        self._public: asyncio.Server | None = None
        self._closing = False
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def facts(self) -> dict[str, Any]:
        unmaps = (
            self.mapped is not None and self.job.arguments.get("x_keeps", "secretly") == "secretly"
        )
        return {
            "asleep": self.asleep,
            "core": self.core,
            "kv_cache_bytes": 1 << 20,
            "unmaps": unmaps,
            "lends": "x_lends" in self.job.arguments,
        }

    def map(self) -> None:
        """Takes the time of a load."""
        from tests.fakes.mapped_weights import MappedWeights

        arguments = self.job.arguments
        self.mapped = MappedWeights(
            Path(arguments["x_maps"]), arguments["model"], keeps="x_keeps" in arguments
        )
        if self.asleep:
            self.mapped.park()

    async def ping(self) -> Activity:
        async with self._turn:
            await self._ask_core(b"p")
        return Activity(requests=self._requests, active=self._active)

    async def _ask_core(self, what: bytes) -> None:
        loop = asyncio.get_running_loop()
        os.write(self._to_core, what)
        answered: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._from_core, _set_once, answered)
        try:
            await answered
        finally:
            loop.remove_reader(self._from_core)
        if not os.read(self._from_core, 64):
            raise EngineError("the core has ended")

    async def wake(self) -> None:
        failures = Path(self.job.arguments.get("x_wake_fails", "/nonexistent"))
        if (left := int(_text_of(failures) or 0)) > 0:
            failures.write_text(str(left - 1))
            raise RuntimeError("no memory")
        if self.mapped is not None:
            await asyncio.to_thread(self.mapped.wake)
        self.asleep = False

    async def sleep(self) -> None:
        self.asleep = True
        if self.mapped is not None:
            self.mapped.park()

    async def expect_memory(self, directory: str) -> None:
        self.note(f"{self.job.number} expects")

    async def lend_memory(self, directory: str) -> None:
        self.note(f"{self.job.number} lends to {Path(directory).name}")

    async def forget_memory(self) -> None:
        if "x_keeps_lent" in self.job.arguments:
            raise EngineError("not this one")
        self.note(f"{self.job.number} forgets")

    def note(self, text: str) -> None:
        if "x_lends" in self.job.arguments:
            with open(self.job.arguments["x_lends"], "a", encoding="utf-8") as file:
                file.write(f"{text}\n")

    async def swap(self, *, on_swap: str, drain_s: float) -> dict[str, Any]:
        answers = json.loads(
            Path(self.job.arguments.get("x_swaps", os.devnull)).read_text() or "{}"
        )
        if self.mapped is not None and str(self.job.number) not in answers:
            return await asyncio.to_thread(self.mapped.swap)
        answer = answers.get(str(self.job.number), {"outcome": "swapped", "generation": 2})
        if "after" in answer and not Path(answer["after"]).exists():
            return {"outcome": "left", "reason": "not yet", "code": "another-rank"}
        answer.pop("after", None)
        if answer["outcome"] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if answer["outcome"] == "dies":
            # As one whose core is dead: it says so first.
            asyncio.get_running_loop().call_later(0.5, os.kill, os.getpid(), signal.SIGKILL)
            raise RuntimeError("the core has ended")
        if answer["outcome"] == "swapped":
            self.weights = answers["newest"]
        return {"pause_s": 0.01, **answer} if on_swap == "drain" else answer

    async def accept_on(self, sock: socket.socket) -> None:
        self._closing = False
        self._public = await asyncio.start_server(self._serve, sock=sock)

    async def stop_accepting(self, drain_s: float) -> int:
        assert self._public
        self._closing = True
        self._public.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                while self._writers:
                    await asyncio.sleep(0.005)
        left = list(self._writers)
        for writer in left:
            writer.transport.abort()
        return len(left)

    async def ended(self) -> None:
        await asyncio.Event().wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _KEEP_ALIVE_S)
        path, _, query = head.split()[1].decode().partition("?")
        self._requests += 1
        self._active += 1
        try:
            while (path == "/until" and not Path(query).exists()) or (
                path == "/closing" and not self._closing
            ):
                await asyncio.sleep(0.01)
            body = {
                "engine": self.job.number, "pid": os.getpid(), "core": self.core, "asleep": self.asleep,
                "arguments": self.job.arguments,
                "weights": self.mapped.digest() if self.mapped else self.weights,
                "at": time.monotonic(),
            }  # fmt: skip
            text = json.dumps(body).encode()
            close = "close" if self._closing else "keep-alive"
            writer.write(
                f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\nConnection: {close}\r\n\r\n".encode()
                + text
            )
            await writer.drain()
        finally:
            self._active -= 1
        return not self._closing


def _core(commands: int, answers: int) -> None:
    """Answers pings until nobody is left to ask."""
    while True:
        select.select([commands], [], [])
        data = os.read(commands, 1)
        if not data:
            os._exit(3)
        os.write(answers, b"a")


@contextlib.asynccontextmanager
async def start(job: Job, fence_fd: int) -> AsyncIterator[FakeEngine]:
    arguments = job.arguments
    if "x_starts" in arguments:
        with open(arguments["x_starts"], "a", encoding="utf-8") as file:
            file.write(f"{job.number}\n")
    if arguments.get("x_fail"):
        raise RuntimeError(arguments["x_fail"])
    if arguments.get("x_fail_late"):
        say_error(job.error_file, RuntimeError(arguments["x_fail_late"]))
        # Its listening socket is among them.
        os.closerange(3, 1024)
        time.sleep(1000)
    if arguments.get("x_no_fork") and "weightcached.engine.nursery" in (
        sys.modules["__main__"].__doc__ or ""
    ):
        raise RuntimeError("it does not start after a fork")
    fail_file = Path(arguments.get("x_fail_file", "/nonexistent"))
    if fails := _text_of(fail_file):
        raise RuntimeError(fails)
    delay = Path(arguments.get("x_delay_file", "/nonexistent"))
    while _text_of(delay) == str(job.number):
        await asyncio.sleep(0.01)
    commands, to_core = os.pipe()
    from_core, answers = os.pipe()
    core = os.fork()
    if core == 0:
        os.close(to_core)
        os.close(from_core)
        _core(commands, answers)
    os.close(commands)
    os.close(answers)
    engine = FakeEngine(job, core, to_core, from_core)
    if "x_maps" in arguments:
        await asyncio.to_thread(engine.map)
    sys.stderr.write(f"fake engine {job.number} is up\n")
    yield engine
