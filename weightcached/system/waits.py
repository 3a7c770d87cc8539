"""Waits on the event loop: until a descriptor can be read or written."""

from __future__ import annotations

import asyncio


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
