"""A service gives way to the daemons of all its ranks, or to none; and to each until it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from weightcached.engine import giving_way
from weightcached.engine.control import Peer
from weightcached.engine.giving_way import GivingWay
from weightcached.engine.states import Phase, Service
from weightcached.errors import EngineError


class Scene:
    """A service whose engines do at once what is decided."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.service = Service(standby=0)
        self.taken = 0
        self.daemon_is_back = asyncio.Event()
        self.daemon_is_back.set()
        self.tasks: list[asyncio.Task[Any]] = []
        self.ways = GivingWay(
            self.service,
            step=self.step,
            wait=self.wait,
            keep=self.keep,
            take_newest=self.take_newest,
        )
        self.step()

    def step(self) -> None:
        for action in self.service.decide(0.0):
            if action.what == "start":
                self.service.started(self.service.version)
                self.service.ready(action.number)
                self.step()
            elif action.what == "promote":
                self.service.serves(action.number)
            elif action.what == "drain":
                self.service.engines[action.number].to(Phase.PARKED)

    async def wait(self, condition: Callable[[], bool]) -> None:
        while not (condition() or self.service.stopping):
            await asyncio.sleep(0)

    def keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    async def take_newest(self) -> None:
        await self.daemon_is_back.wait()
        self.taken += 1

    def ask(self, peer: Peer, device: str) -> asyncio.Task[dict[str, Any]]:
        asked = self.ways.begin(peer, device, ranks=self.ranks, on_swap="drain")
        return asyncio.create_task(asked)

    def state(self) -> str:
        return self.service.state()


def run(test: Callable[[Scene], Coroutine[Any, Any, None]], *, ranks: int = 1) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await test(Scene(ranks))

    asyncio.run(within())


def test_engines_sleep_until_the_daemon_resumes() -> None:
    async def test(scene: Scene) -> None:
        peer = Peer()
        assert scene.state() == "serving"
        assert (await scene.ask(peer, "cpu0"))["drain_s"] >= 0
        assert scene.state() == "asleep"
        said = await scene.ways.end(peer)
        assert (said["serving"], said["waits"]) == (True, False)
        peer.gone.set()
        await asyncio.gather(*scene.tasks)
        assert (scene.state(), scene.taken) == ("serving", 0)

    run(test)


def test_engines_serve_until_the_daemons_of_all_ranks_have_asked_and_sleep_for_the_last() -> None:
    async def test(scene: Scene) -> None:
        first, second = Peer(), Peer()
        asked = scene.ask(first, "cpu0")
        # The same device, as of a second cache.
        again = scene.ask(Peer(), "cpu0")
        for _ in range(10):
            await asyncio.sleep(0)
        assert not asked.done()
        assert scene.state() == "serving"
        await scene.ask(second, "cpu1")
        await asked
        await again
        assert scene.state() == "asleep"
        assert (await scene.ways.end(first))["waits"]
        assert scene.state() == "asleep"

    run(test, ranks=2)


def test_nobody_sleeps_if_the_daemon_of_another_rank_does_not_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(giving_way, "_BEGIN_TIMEOUT_S", 0.05)

    async def test(scene: Scene) -> None:
        with pytest.raises(EngineError, match="of its 2 devices only cpu0 needed room"):
            await scene.ask(Peer(), "cpu0")
        assert scene.state() == "serving"

    run(test, ranks=2)


def test_engine_that_starts_is_waited_for_because_it_would_map_the_old_weights_awake() -> None:
    async def test(scene: Scene) -> None:
        scene.service.started(1)
        asked = scene.ask(Peer(), "cpu0")
        for _ in range(10):
            await asyncio.sleep(0)
        assert scene.state() == "serving"
        scene.service.ready(2)
        await asked
        assert scene.state() == "asleep"

    run(test)


def test_engines_of_a_daemon_that_died_take_what_the_next_one_serves_before_they_wake() -> None:
    async def test(scene: Scene) -> None:
        peer = Peer()
        await scene.ask(peer, "cpu0")
        scene.daemon_is_back.clear()
        peer.gone.set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert (scene.state(), scene.taken) == ("asleep", 0)
        scene.daemon_is_back.set()
        await asyncio.gather(*scene.tasks)
        assert (scene.state(), scene.taken) == ("serving", 1)

    run(test)


def test_daemon_that_leaves_before_the_others_have_asked_lets_nobody_sleep() -> None:
    async def test(scene: Scene) -> None:
        peer = Peer()
        asked = scene.ask(peer, "cpu0")
        await asyncio.sleep(0)
        peer.gone.set()
        with pytest.raises(EngineError, match="hung up"):
            await asked
        await asyncio.gather(*scene.tasks)
        assert (scene.state(), scene.taken) == ("serving", 0)

    run(test, ranks=2)
