"""Waits on the event loop: for a descriptor, for the first of several, for the end of tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


def _wake(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


async def readable(fd: int) -> None:
    """Return once `fd` can be read or has reached its end. One waiter per descriptor."""
    loop = asyncio.get_running_loop()
    turn: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, _wake, turn)
    try:
        await turn
    finally:
        loop.remove_reader(fd)


async def writable(fd: int) -> None:
    """Return once `fd` can be written to. One waiter per descriptor."""
    loop = asyncio.get_running_loop()
    turn: asyncio.Future[None] = loop.create_future()
    loop.add_writer(fd, _wake, turn)
    try:
        await turn
    finally:
        loop.remove_writer(fd)


async def first_of(
    *waits: Coroutine[Any, Any, object] | asyncio.Future[Any], timeout_s: float | None = None
) -> None:
    """Return once the first of them is done, or after `timeout_s`.

    Coroutines are started and ended here, and their errors are raised here. Tasks and futures
    belong to the caller: they go on, and hold their results.
    """
    started = [asyncio.create_task(wait) for wait in waits if asyncio.iscoroutine(wait)]
    owned = [wait for wait in waits if isinstance(wait, asyncio.Future)]
    try:
        await asyncio.wait(
            {*started, *owned}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        for task in started:
            if task.done():
                task.result()
    finally:
        await end_tasks(*started)


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel them, and wait until each has ended, however it does."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
