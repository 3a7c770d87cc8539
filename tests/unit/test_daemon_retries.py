"""The pauses before a failed load is tried again."""

from __future__ import annotations

import asyncio

import pytest

from weightcached.daemon.retries import Retries


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock, in seconds, to be set by the test; the wall clock is 1000 s ahead."""
    now_s = [50.0]
    monkeypatch.setattr("weightcached.daemon.retries.time.monotonic", lambda: now_s[0])
    monkeypatch.setattr("weightcached.daemon.retries.time.time", lambda: now_s[0] + 1000)
    return now_s


def test_pauses_grow_from_a_second_to_five_minutes(clock: list[float]) -> None:
    tried = Retries()
    pauses = [tried.failed("m/target") for _ in range(11)]
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


def test_each_cache_has_pauses_of_its_own_that_end_with_a_success(clock: list[float]) -> None:
    tried = Retries()
    tried.failed("a/target")
    assert (tried.failed("a/target"), tried.failed("b/target")) == (2, 1)
    tried.settled("a/target")
    assert tried.failed("a/target") == 1


def test_what_is_due_is_taken_once(clock: list[float]) -> None:
    tried = Retries()
    tried.failed("a/target")
    tried.failed("b/target")
    tried.failed("b/target")
    assert (tried.at("a/target"), tried.at("b/target"), tried.at("c/target")) == (1051, 1052, None)
    assert tried.take_due() == []
    clock[0] += 1
    assert tried.take_due() == ["a/target"]
    assert tried.take_due() == []
    assert "a/target" not in tried
    assert tried.failed("a/target") == 2


def test_waiting_ends_for_what_fails_meanwhile() -> None:
    async def main() -> list[str]:
        tried = Retries(first_s=0.01)
        waiting = asyncio.create_task(tried.until_due())
        await asyncio.sleep(0)
        tried.failed("a/target")
        async with asyncio.timeout(60):
            await waiting
        return tried.take_due()

    assert asyncio.run(main()) == ["a/target"]
