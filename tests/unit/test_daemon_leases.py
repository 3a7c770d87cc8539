"""Leases and the broadcast that those who wait for a change rely on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from weightcached.daemon.leases import Broadcast, Leases


@dataclass(eq=False)
class Held:
    """A generation, as leases see it."""

    number: int
    nbytes: int
    cache: str = "m/target"
    used_s: float = 0.0
    label: str = ""


def test_change_between_looking_and_waiting_is_not_missed() -> None:
    async def main() -> None:
        broadcast = Broadcast()
        event = broadcast.next()
        broadcast.fire()
        # Without a timeout: a missed one would hang.
        async with asyncio.timeout(60):
            await broadcast.wait(event)

    asyncio.run(main())


def test_wait_returns_at_its_timeout() -> None:
    asyncio.run(Broadcast().wait(timeout_s=0.01))


def test_generation_is_free_when_its_last_lease_ends() -> None:
    async def main() -> None:
        leases = Leases()
        one, two = Held(1, 100), Held(2, 200)
        first, second = leases.begin(one, 10), leases.begin(one, 11)
        leases.begin(two, 12)
        free = asyncio.create_task(leases.none_on(one))
        leases.end(first)
        await asyncio.sleep(0)
        assert not free.done()
        leases.end(second)
        leases.end(second)
        async with asyncio.timeout(60):
            await free
        assert [engine.pid for engine in leases.engines("m/target")] == [12]

    asyncio.run(main())


def test_old_generation_is_listed_while_an_engine_holds_it() -> None:
    leases = Leases()
    # Numbers begin again once a cache has been forgotten: these two are not one.
    gone, served = Held(1, 100), Held(1, 200)
    lease = leases.begin(gone, 10)
    leases.begin(served, 11)
    (old,) = leases.old([served])
    assert (old.cache, old.generation, old.bytes) == ("m/target", 1, 100)
    assert [engine.pid for engine in old.engines] == [10]
    assert [(e.pid, e.bytes) for e in leases.engines("m/target")] == [(10, 100), (11, 200)]
    leases.end(lease)
    assert leases.old([served]) == []


def test_parked_engine_that_neither_unmaps_nor_wakes_is_not_waited_for() -> None:
    async def main() -> list[int]:
        leases, one = Leases(), Held(1, 100)
        asked: list[int] = []
        for pid in (10, 11):
            leases.park(leases.begin(one, pid, partial(asked.append, pid)), True)
        leases.begin(one, 12, partial(asked.append, 12))
        await leases.unmap_parked(one, timeout_s=0.01)
        assert [lease.pid for lease in leases.awake(one)] == [12]
        return asked

    assert asyncio.run(main()) == [10, 11]


def test_a_generation_is_used_when_an_engine_comes_and_when_it_leaves() -> None:
    leases = Leases()
    held = Held(1, 100)
    lease = leases.begin(held, 11)
    came_s, held.used_s = held.used_s, 0.0
    leases.end(lease)
    assert 0 < came_s <= held.used_s
