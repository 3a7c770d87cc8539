"""How an engine takes and leaves the public socket: a real uvicorn server with an application of its
own in vLLM's place.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from weightcached.vllm_compat.server import VllmEngine
from weightcached.wire.engine_job import Job

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
# Above what a busy machine needs; nothing is held to it.
BOUND_S = 120


class Client:
    """Stands for vLLM's engine client."""

    def __init__(self, *, sleeps: bool) -> None:
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(enable_sleep_mode=sleeps),
            cache_config=SimpleNamespace(num_gpu_blocks=7),
        )
        self.done: list[str] = []

    async def sleep(self, level: int) -> None:
        self.done.append(f"sleep {level}")

    async def wake_up(self) -> None:
        self.done.append("wake")

    async def is_sleeping(self) -> bool:
        self.done.append("asked")
        return False


class Slow:
    """GET /slow: `begun` once it is under way, answered once `gate` is open."""

    def __init__(self) -> None:
        self.begun, self.gate = asyncio.Event(), asyncio.Event()


async def application(slow: Slow, scope: Any, receive: Any, send: Any) -> None:
    """Answers GET / at once."""
    if scope["type"] != "http":
        return
    if scope["path"] == "/slow":
        slow.begun.set()
        await slow.gate.wait()
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
    )
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def running(
    directory: Path, *, sleeps: bool = False, asleep: bool = False
) -> AsyncIterator[Any]:
    """An engine, and its public address."""
    slow = Slow()
    config = uvicorn.Config(
        functools.partial(application, slow), log_level="error", lifespan="off",
        interface="asgi3", timeout_keep_alive=BOUND_S,
    )  # fmt: skip
    config.load()
    server = uvicorn.Server(config)
    private = socket.socket(socket.AF_UNIX)
    private.bind(str(directory / "http.sock"))
    serving = asyncio.ensure_future(server._serve([private]))
    while not server.started:
        await asyncio.sleep(0.01)
    job = Job(
        service="chat", number=1, digest="", directory=str(directory), host="", port=0, path="", arguments={}
    )  # fmt: skip
    client = Client(sleeps=sleeps)
    engine = VllmEngine(job, client, server, serving, asleep=asleep)
    with socket.create_server(("127.0.0.1", 0)) as public:
        yield SimpleNamespace(engine=engine, public=public, client=client, slow=slow, config=config)
    await engine.stop_accepting(0.1)
    server.should_exit = True
    await serving


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str = "/") -> bytes:
    writer.write(REQUEST.replace(b"GET /", b"GET " + path.encode()))
    async with asyncio.timeout(BOUND_S):
        return await reader.readuntil(b"ok")


async def connect(found: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*found.public.getsockname())


def keep_alive_of_all(found: Any, seconds: int) -> None:
    """How long its connections may be idle, from their next answer on."""
    for protocol in found.engine._server.server_state.connections:
        protocol.timeout_keep_alive = seconds


async def _drains(directory: Path) -> None:
    async with running(directory) as found:
        await found.engine.accept_on(found.public.dup())
        kept, idle, busy = [await connect(found) for _ in range(3)]
        assert b"connection: close" not in await ask(*kept)
        answer = asyncio.ensure_future(ask(*busy, "/slow"))
        await found.slow.begun.wait()
        # Each answer begins the keep-alive time of its connection.
        keep_alive_of_all(found, 1)
        assert b"connection: close" not in await ask(*idle)
        keep_alive_of_all(found, BOUND_S)
        stopping = asyncio.ensure_future(found.engine.stop_accepting(BOUND_S))
        # It has taken the first step: nobody else is accepted.
        await asyncio.sleep(0)
        later = await connect(found)
        later[1].write(REQUEST)
        assert b"connection: close" in await ask(*kept), "one more answer, and then it is closed"
        assert await kept[0].read() == b""
        found.slow.gate.set()
        assert b"connection: close" in await answer, "the request under way ends"
        assert await idle[0].read() == b"", "closed after the keep-alive time"
        assert await stopping == 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await later[0].read(1)
        await found.engine.accept_on(found.public.dup())
        async with asyncio.timeout(BOUND_S):
            head = await later[0].readuntil(b"ok")
        assert b"connection: close" not in head, "who connected meanwhile has waited"
        for _, writer in (kept, idle, busy, later):
            writer.close()


async def _cuts_off(directory: Path) -> None:
    async with running(directory) as found:
        await found.engine.accept_on(found.public.dup())
        reader, writer = await connect(found)
        assert await ask(reader, writer)
        assert await found.engine.stop_accepting(0.1) == 1
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


async def _sleeps_and_wakes(directory: Path) -> None:
    async with running(directory, sleeps=True, asleep=True) as found:
        engine, done = found.engine, found.client.done
        assert engine.asleep
        assert engine.facts["asleep"]
        await engine.sleep()
        assert done == [], "it sleeps already"
        await engine.wake()
        await engine.wake()
        assert not engine.asleep
        await engine.sleep()
        activity = await engine.ping()
        assert done == ["wake", "sleep 1", "asked"]
        assert (activity.requests, activity.active) == (0, 0)


async def _parks_awake(directory: Path) -> None:
    async with running(directory) as found:
        await found.engine.sleep()
        assert not found.engine.asleep
        assert found.client.done == []


@pytest.mark.parametrize("play", [_drains, _cuts_off, _sleeps_and_wakes, _parks_awake])
def test_engine(play: Callable[[Path], Coroutine[Any, Any, None]], tmp_path: Path) -> None:
    asyncio.run(play(tmp_path))
