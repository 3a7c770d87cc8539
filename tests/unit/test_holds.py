"""Who may change the device's memory: engines that measure it, and loads."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from weightcached.daemon.caches import Cache
from weightcached.daemon.holds import Holds


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test(), 120))


def test_a_load_waits_until_nobody_holds_the_device() -> None:
    async def test() -> None:
        holds, cache = Holds(), Cache("a/target", "target")
        first, second = holds.begin(1, "pid 1"), holds.begin(2, "pid 2")
        assert first
        assert second
        loaded = asyncio.Event()

        async def load() -> None:
            async with holds.device_for(cache):
                loaded.set()

        task = asyncio.create_task(load())
        for hold in (first, second):
            await asyncio.sleep(0)
            assert not loaded.is_set()
            holds.end(hold)
        await task
        assert holds.loading is None
        # Ended twice, and after the load.
        holds.end(first)

    run(test)


def test_nobody_holds_a_device_that_a_load_has() -> None:
    async def test() -> None:
        holds, cache = Holds(), Cache("a/target", "target")
        async with holds.device_for(cache):
            assert holds.loading is cache
            assert holds.begin(1, "pid 1") is None
            event = holds.changed.next()
        await holds.changed.wait(event)
        assert holds.begin(1, "pid 1")

    run(test)


def test_a_load_that_fails_gives_the_device_back() -> None:
    async def test() -> None:
        holds = Holds()
        with pytest.raises(OSError, match="broken"):
            async with holds.device_for(Cache("a/target", "target")):
                raise OSError("broken")
        assert holds.begin(1, "pid 1")

    run(test)


def test_a_process_is_not_in_its_own_way() -> None:
    async def test() -> None:
        holds = Holds()
        own = holds.begin(1, "pid 1")
        assert own
        assert holds.names(but=1) == []
        await holds.none(but=1)
        holds.begin(2, "pid 2")
        assert holds.names(but=1) == ["pid 2"]

    run(test)


def test_a_hold_ends_by_itself() -> None:
    async def test() -> None:
        holds = Holds(limit_s=0.01)
        holds.begin(1, "pid 1")
        await holds.none()

    run(test)
