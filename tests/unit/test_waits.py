"""Waits on the event loop: the first of several, and the end of tasks, whatever they do."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any

import pytest

from weightcached.system.waits import end_tasks, first_of, readable, writable


def run(wait: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(wait, timeout=120))


def test_coroutines_are_ended_and_tasks_go_on() -> None:
    ended: list[str] = []

    async def forever(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def test() -> None:
        task = asyncio.create_task(forever("task"))
        await first_of(task, forever("coroutine"), asyncio.sleep(0))
        assert (ended, task.done()) == (["coroutine"], False)
        await end_tasks(task)
        assert (ended, task.cancelled()) == (["coroutine", "task"], True)

    run(test())


def test_coroutine_that_fails_raises_and_a_task_that_fails_keeps_it() -> None:
    async def fail() -> None:
        raise ValueError("no")

    async def test() -> None:
        with pytest.raises(ValueError, match="no"):
            await first_of(fail(), asyncio.Event().wait())
        task = asyncio.create_task(fail())
        await first_of(task, asyncio.Event().wait())
        assert isinstance(task.exception(), ValueError)
        await end_tasks(task)

    run(test())


def test_none_within_the_time_limit() -> None:
    async def test() -> None:
        task = asyncio.create_task(asyncio.Event().wait())
        await first_of(task, timeout_s=0.01)
        assert not task.done()
        await end_tasks(task)

    run(test())


def test_cancelled_wait_ends_its_coroutines() -> None:
    async def test() -> None:
        before = len(asyncio.all_tasks())
        waiting = asyncio.create_task(first_of(asyncio.Event().wait(), asyncio.Event().wait()))
        await asyncio.sleep(0)
        await end_tasks(waiting)
        assert len(asyncio.all_tasks()) == before

    run(test())


def test_pipe_is_writable_at_once_and_readable_at_its_end() -> None:
    async def test() -> None:
        reader, writer = os.pipe()
        await writable(writer)
        waiting = asyncio.create_task(readable(reader))
        await asyncio.sleep(0)
        assert not waiting.done()
        os.close(writer)
        await waiting
        os.close(reader)

    run(test())
