"""How an engine takes and leaves the public socket: a real uvicorn server with an application of its
own in vLLM's place.
"""

from __future__ import annotations

import asyncio
import contextlib
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


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answers GET / at once and GET /slow after a moment."""
    if scope["type"] != "http":
        return
    if scope["path"] == "/slow":
        await asyncio.sleep(0.3)
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]}
    )
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def running(
    directory: Path, *, sleeps: bool = False, asleep: bool = False
) -> AsyncIterator[Any]:
    """An engine, and its public address."""
    config = uvicorn.Config(application, log_level="error", lifespan="off", timeout_keep_alive=1)
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
    engine = VllmEngine(job, client, server, serving, asleep=asleep, free=0)
    with socket.create_server(("127.0.0.1", 0)) as public:
        yield SimpleNamespace(engine=engine, public=public, client=client)
    await engine.stop_accepting(0.1)
    server.should_exit = True
    await serving


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str = "/") -> bytes:
    writer.write(REQUEST.replace(b"GET /", b"GET " + path.encode()))
    async with asyncio.timeout(10):
        return await reader.readuntil(b"ok")


async def connect(found: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*found.public.getsockname())


async def _drains(directory: Path) -> None:
    async with running(directory) as found:
        await found.engine.accept_on(found.public.dup())
        kept, idle, busy = [await connect(found) for _ in range(3)]
        for connection in (kept, idle):
            assert b"connection: close" not in await ask(*connection)
        answer = asyncio.ensure_future(ask(*busy, "/slow"))
        await asyncio.sleep(0.1)
        stopping = asyncio.ensure_future(found.engine.stop_accepting(10))
        await asyncio.sleep(0.05)
        later = await connect(found)
        later[1].write(REQUEST)
        assert b"connection: close" in await ask(*kept), "one more answer, and then it is closed"
        assert await kept[0].read() == b""
        assert b"connection: close" in await answer, "the request under way ends"
        assert await idle[0].read() == b"", "closed after the keep-alive time"
        assert await stopping == 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await later[0].read(1)
        await found.engine.accept_on(found.public.dup())
        async with asyncio.timeout(10):
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
