"""Questions of a supervisor to its engines: what becomes of them when nobody answers any more."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from weightcached.engine.control import ControlServer, Link, listen
from weightcached.errors import EngineError


def test_question_under_way_ends_when_the_supervisor_hangs_up(tmp_path: Path) -> None:
    """As it does on an engine that it ends: its answer would be waited for up to an hour."""

    async def test() -> None:
        asked = asyncio.Event()

        async def never(command: str, arguments: dict[str, Any]) -> Any:
            asked.set()
            await asyncio.Event().wait()

        server = ControlServer(listen(tmp_path / "control.sock"), never)
        link = Link(tmp_path / "control.sock")
        asking = asyncio.create_task(link.ask("swap", timeout_s=3600))
        await asked.wait()
        link.close()
        async with asyncio.timeout(60):
            with pytest.raises(EngineError, match="no answer: the connection was closed"):
                await asking
        server.close()
        await asyncio.sleep(0)

    asyncio.run(test())


def test_question_under_way_ends_with_the_engine(tmp_path: Path) -> None:
    async def test() -> None:
        path = tmp_path / "control.sock"
        with listen(path) as listener:
            link = Link(path)
            asking = asyncio.create_task(link.ask("ready", timeout_s=3600))
            await asyncio.sleep(0)
            listener.setblocking(True)
            peer: socket.socket = (await asyncio.to_thread(listener.accept))[0]
            peer.close()
            async with asyncio.timeout(60):
                with pytest.raises(EngineError, match="no answer"):
                    await asking

    asyncio.run(test())
