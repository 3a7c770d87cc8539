"""Leases and the broadcast that those who wait for a change rely on."""

from __future__ import annotations

import asyncio
from functools import partial

from weightcached.daemon.leases import Broadcast, Leases


def test_change_between_looking_and_waiting_is_not_missed() -> None:
    async def main() -> None:
        broadcast = Broadcast()
        event = broadcast.next()
        broadcast.fire()
        # Without a timeout: a missed one would hang.
        async with asyncio.timeout(5):
            await broadcast.wait(event)

    asyncio.run(main())


def test_wait_returns_at_its_timeout() -> None:
    asyncio.run(Broadcast().wait(timeout_s=0.01))


def test_generation_is_free_when_its_last_lease_ends() -> None:
    async def main() -> None:
        leases = Leases()
        first, second = leases.begin("m/target", 1, 10), leases.begin("m/target", 1, 11)
        leases.begin("m/target", 2, 12)
        free = asyncio.create_task(leases.none_on("m/target", 1))
        leases.end(first)
        await asyncio.sleep(0)
        assert not free.done()
        leases.end(second)
        leases.end(second)
        async with asyncio.timeout(5):
            await free
        assert [engine.pid for engine in leases.engines("m/target")] == [12]

    asyncio.run(main())


def test_parked_engine_that_neither_unmaps_nor_wakes_is_not_waited_for() -> None:
    async def main() -> list[int]:
        leases, asked = Leases(), []
        for pid in (10, 11):
            leases.park(leases.begin("m/target", 1, pid, partial(asked.append, pid)), True)
        leases.begin("m/target", 1, 12, partial(asked.append, 12))
        await leases.unmap_parked("m/target", 1, timeout_s=0.01)
        assert [lease.pid for lease in leases.awake("m/target")] == [12]
        return asked

    assert asyncio.run(main()) == [10, 11]
