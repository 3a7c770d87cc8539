"""Fairness between processes, for anything that they send."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests import limits
from weightcached.daemon.fairness import FairQueue


async def order(turns: FairQueue, asked: list[tuple[int, int]]) -> list[int]:
    """Ask for turns of (pid, units) at once; returns the pids in the order of their turns."""
    served: list[int] = []
    accounts = {pid: turns.account(pid) for pid, _ in asked}

    async def one(pid: int, units: int) -> None:
        await turns.take(accounts[pid], units)
        served.append(pid)

    await asyncio.gather(*[one(pid, units) for pid, units in asked])
    return served


def test_newcomer_waits_for_no_more_than_one_item_of_a_flood() -> None:
    served = asyncio.run(order(FairQueue(units=1), [(1, 1)] * 500 + [(2, 1)]))
    assert served.index(2) == 1


def test_two_floods_share() -> None:
    served = asyncio.run(order(FairQueue(units=4), [(1, 1)] * 100 + [(2, 1)] * 100))
    assert served[:100].count(1) == 50


def test_large_items_count_for_what_they_cost() -> None:
    served = asyncio.run(order(FairQueue(units=4), [(1, 10)] * 20 + [(2, 1)] * 100))
    assert served[:50].count(1) == 5


def test_charge_afterwards_counts_against_the_next_turn() -> None:
    async def run() -> list[int]:
        turns = FairQueue(units=1)
        account = turns.account(1)
        await turns.take(account)
        turns.charge(account, 50)
        return await order(turns, [(2, 1), (1, 1)] + [(2, 1)] * 60)

    assert 45 < asyncio.run(run()).index(1) < 55


def test_idle_time_is_no_credit() -> None:
    async def run() -> list[int]:
        turns = FairQueue(units=1)
        idle, busy = turns.account(1), turns.account(2)
        await turns.take(idle)
        for _ in range(1000):
            await turns.take(busy)
        return await order(turns, [(1, 1)] * 100 + [(2, 1)] * 100)

    assert asyncio.run(run())[:100].count(1) == pytest.approx(50, abs=1)


def test_who_leaves_the_queue_takes_no_turn() -> None:
    async def run() -> int:
        turns = FairQueue(units=1)
        accounts = [turns.account(pid) for pid in range(100)]
        leaving = [asyncio.ensure_future(turns.take(account)) for account in accounts[:99]]
        await asyncio.sleep(0)
        last = asyncio.ensure_future(turns.take(accounts[99]))
        for future in leaving:
            future.cancel()
        count = 0
        while not last.done():
            await asyncio.sleep(0)
            count += 1
        return count

    assert asyncio.run(run()) < 5


@pytest.mark.timed
def test_pause_is_kept_between_turns_and_not_before_the_first() -> None:
    async def run() -> tuple[float, float]:
        turns = FairQueue(units=1, pause_s=0.05)
        began_s = time.monotonic()
        await turns.take(turns.account(1))
        first_s = time.monotonic() - began_s
        for _ in range(3):
            await turns.take(turns.account(1))
        return first_s, time.monotonic() - began_s

    first_s, all_s = asyncio.run(run())
    limits.hold("the first turn", first_s, 0.05)
    assert all_s >= 0.15


def test_process_without_connections_is_forgotten() -> None:
    turns = FairQueue(units=1)
    account = turns.account(1)
    assert turns.account(1) is account
    account.start = 7
    del account
    assert turns.account(1).start == 0
