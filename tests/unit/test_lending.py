"""Who holds the memory of a KV cache while the engines of a service die, hang, sleep and are replaced.

A supervisor with engines of this process, on a device that has room for one KV cache.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.daemon import BOUND_S
from weightcached.config.manifest import load_manifest
from weightcached.engine import states, supervisor
from weightcached.engine.lending import Lending
from weightcached.engine.records import Record
from weightcached.engine.states import Phase
from weightcached.engine.supervisor import Options, Supervisor
from weightcached.errors import EngineError

MANIFEST = """
version: 1
models:
  - {name: tiny, devices: [cpu0], engine: {model: org/tiny}}
engines:
  - {name: chat, model: tiny, listen: "127.0.0.1:8000", nursery: false}
"""
# So often an engine looks for free memory; so many looks later one that hangs is given up. As in life,
# the first is longer.
LOOKS = 2000
PATIENCE = 500


class Memory:
    """Of one KV cache."""


class Engine:
    """What a supervisor asks, and what it has of the device."""

    def __init__(self, world: World, number: int, *, lends: bool) -> None:
        self.world = world
        self.directory = Path(str(number))
        self.record = Record(
            number=number, digest="", pid=0, start=0, boot="", since=0.0, facts={"lends": lends}
        )
        self.activity = SimpleNamespace(requests=0, active=0, stopped=False)
        self.active_s = 0.0
        self.tree = SimpleNamespace(members={})
        self.lends = lends
        self.mapped: Memory | None = None
        self.held: Memory | None = None
        self.expects = self.hangs = self.dead = False
        self.refuses = ""
        # Otherwise the kernel still frees its memory.
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.asked: list[str] = []
        # As an engine's core: one after the other.
        self._turn = asyncio.Lock()

    @property
    def number(self) -> int:
        return self.record.number

    async def ask(self, command: str, *, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        self.asked.append(command)
        async with self._turn:
            await self.world.pass_time()
            for _ in range(PATIENCE):
                self._check()
                if not self.hangs:
                    break
                await asyncio.sleep(0)
            else:
                raise EngineError(f"it did not answer {command!r}", timed_out=True)
            if command == self.refuses:
                raise EngineError(f"no command {command!r}")
            done = getattr(self, f"_{command}")
            return (await done(**arguments)) or {}

    def _check(self) -> None:
        if self.dead:
            raise EngineError("no answer: the connection was closed")

    async def _ready(self) -> dict[str, Any]:
        return {"lends": self.lends, "sleeps": True, "asleep": self.mapped is None}

    async def _promote(self, *, fence_s: float) -> dict[str, Any]:
        memory, self.held, self.expects = self.held, None, False
        for _ in range(LOOKS):
            self._check()
            if memory is not None or not self.world.used():
                break
            await asyncio.sleep(0)
        else:
            self.world.found_no_room.append(self.number)
            raise EngineError("no room")
        assert not any(engine.mapped for engine in self.world.engines), "one engine at a time"
        self.mapped = memory or Memory()
        return {"fence_s": 0.0, "wake_s": 0.0}

    async def _demote(self, *, drain_s: float) -> dict[str, Any]:
        await self.world.pass_time()
        self._check()
        self.mapped = None
        return {"drain_s": 0.0, "sleep_s": 0.0, "cut": 0}

    async def _expect_memory(self) -> None:
        self.expects, self.held = True, None

    async def _lend_memory(self, *, directory: str) -> None:
        to = self.world.engines[int(directory) - 1]
        if self.mapped is not None:
            if not to.expects:
                raise EngineError("nobody listens")
            to.held = self.mapped

    async def _forget_memory(self) -> None:
        self.expects, self.held = False, None

    async def ping(self, *, timeout_s: float) -> None:
        if self.hangs:
            raise EngineError("it does not answer", timed_out=True)

    def kill(self) -> None:
        self.dead, self.expects, self.held, self.mapped = True, False, None, None

    async def end(self) -> float:
        await self.world.pass_time()
        await self.may_end.wait()
        self.kill()
        return 0.0

    async def bury(self) -> None: ...

    def watch(self) -> None: ...

    def keep_record(self) -> None: ...

    def last_words(self) -> str:
        return ""


class World:
    """One service and its device."""

    def __init__(self, made: Supervisor, seed: int) -> None:
        self.made = made
        self.service = made.service
        self.chance = random.Random(seed)
        self.engines: list[Engine] = []
        self.found_no_room: list[int] = []
        self.lends = True
        made._spawn = self._spawn  # type: ignore[method-assign]
        made._follow = self._follow  # type: ignore[method-assign]

    async def _spawn(self, engine: Any, plan: Any, *, parked: bool) -> Record:
        self.engines.append(Engine(self, engine.number, lends=self.lends))
        assert self.engines[engine.number - 1].number == engine.number
        return self.engines[-1].record

    def _follow(self, record: Record) -> None:
        self.made._running[record.number] = self.engines[record.number - 1]  # type: ignore[assignment]

    async def pass_time(self) -> None:
        # An answer by a socket takes no fewer steps of the loop.
        for _ in range(self.chance.randrange(4, 9)):
            await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.check()
            await asyncio.sleep(0)
        self.check()

    async def until_lent(self) -> None:
        """An engine serves, and another holds its memory."""
        await self.until(lambda: self.serving is not None and self.standby is not None)
        await self.until(lambda: bool(self.serving and self.standby and self.standby.held))

    @property
    def serving(self) -> Engine | None:
        found = self.service.serving
        return self.engines[found.number - 1] if found else None

    @property
    def standby(self) -> Engine | None:
        found = self.service.successor
        return self.engines[found.number - 1] if found else None

    def used(self) -> set[Memory]:
        """What is not free."""
        return {m for engine in self.engines for m in (engine.mapped, engine.held) if m is not None}

    def check(self) -> None:
        """A service that sleeps has nothing, but for what engines that are being ended have yet."""
        if self.service.holder is None and not self.service.may_serve:
            up = [engine for engine in self.engines if self.service.is_up(engine.number)]
            assert not [engine for engine in up if engine.mapped or engine.held]

    def kill(self, engine: Engine) -> None:
        engine.kill()
        self.made._end_failed(engine.number, "killed")

    def sleep(self, *, gives_way: bool = False) -> None:
        if gives_way:
            self.service.gives_way = True
        else:
            self.service.awake = False
        self.made._step()

    def wake(self) -> None:
        self.service.awake, self.service.gives_way = True, False
        self.made._step()

    def forget(self) -> None:
        """As a new supervisor, which knows nothing of lent memory."""
        made = self.made
        made._lending = Lending(
            made.service, made._running, keep=made._keep, failed=made._end_failed, wait=made._wait
        )
        for number in self.service.engines:
            made._lending.taken_back(number)
        made._step()

    def restart(self) -> None:
        version = self.service.restart()
        self.made._plans[version] = self.made._plans[1]
        self.made._step()


Play = Callable[..., None]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """Runs a coroutine in a world of its own."""

    def fail(status: int) -> None:
        pytest.fail(f"internal fault, it would end with status {status}")

    monkeypatch.setattr(os, "_exit", fail)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(supervisor, "PROMOTE_PAUSE_S", 0.0)
    monkeypatch.setattr(supervisor, "FIRST_PROBE_S", 0.001)
    monkeypatch.setattr(supervisor, "PROBE_PERIOD_S", 0.001)
    monkeypatch.setattr(supervisor, "MAX_FIRST_FAILURES", 10**6)
    monkeypatch.setattr(states, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(states, "LONGEST_PAUSE_S", 0.001)
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text(MANIFEST)
    home = tmp_path / "engines/chat"
    home.mkdir(parents=True)

    def play(
        test: Callable[[World], Coroutine[Any, Any, None]], *, seed: int = 0, standby: int = 1
    ) -> None:
        async def within() -> None:
            spec, model = load_manifest(manifest).service("chat")
            made = Supervisor(Options("chat", manifest), spec, model, home)
            made.service.standby = standby
            with socket.socket() as made._public:
                made._begun = True
                world = World(made, seed)
                made._step()
                async with asyncio.timeout(BOUND_S):
                    await test(world)
                asyncio.get_running_loop().remove_reader(made._public.fileno())
                made._ended.set()
                tasks = list(made._tasks)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(within())

    return play


@pytest.mark.parametrize("gives_way", [False, True])
def test_engine_killed_on_its_way_to_sleep_leaves_its_memory_to_nobody(
    play: Play, gives_way: bool
) -> None:
    async def test(world: World) -> None:
        await world.until_lent()
        assert world.serving
        world.sleep(gives_way=gives_way)
        world.kill(world.engines[0])
        await world.until(lambda: world.service.holder is None)
        assert not world.used()
        assert (world.made._share is not None) == gives_way, "who gives way has it yet"
        world.wake()
        await world.until_lent()
        assert not world.found_no_room

    play(test)


def test_memory_of_an_engine_that_sleeps_by_vllms_own_call_is_free_until_it_wakes(
    play: Play,
) -> None:
    async def test(world: World) -> None:
        await world.until_lent()
        serving = world.serving
        assert serving
        serving.mapped, serving.activity.stopped = None, True
        await world.until(lambda: not world.used())
        assert world.serving is serving
        serving.mapped, serving.activity.stopped = Memory(), False
        await world.until_lent()
        assert world.standby
        assert world.standby.held is serving.mapped
        world.kill(serving)
        await world.until_lent()
        assert not world.found_no_room

    play(test)


@pytest.mark.parametrize("how", ["hangs", "refuses", "ends"])
def test_service_sleeps_once_a_standby_that_keeps_memory_is_gone(play: Play, how: str) -> None:
    async def test(world: World) -> None:
        await world.until_lent()
        standby = world.standby
        assert standby
        if how == "hangs":
            standby.hangs = True
            # Only the question tells.
            standby.ping = world.engines[0].ping  # type: ignore[method-assign]
        elif how == "refuses":
            standby.refuses = "forget_memory"
        else:
            world.made._end_behind(standby.number)
        standby.may_end.clear()
        world.sleep()
        await world.until(lambda: world.service.engines[standby.number].phase is Phase.ENDING)
        for _ in range(100):
            assert world.service.holder
            await asyncio.sleep(0)
        standby.may_end.set()
        await world.until(lambda: world.service.holder is None)
        assert standby.dead

    play(test)


def test_takeover_waits_for_no_other_engine_that_keeps_memory(play: Play) -> None:
    """The old standby hangs, and the engine of the new version takes over from one that was killed."""

    async def test(world: World) -> None:
        await world.until_lent()
        serving, standby = world.engines
        standby.hangs = True
        standby.ping = serving.ping  # type: ignore[method-assign]
        standby.held = None
        world.restart()
        await world.until(lambda: world.service.engines[1].phase is Phase.DRAINING)
        world.kill(serving)
        await world.until(lambda: world.serving is world.engines[2])
        assert not standby.dead, "it has not been given up yet"

    play(test)


def test_memory_of_a_dead_engine_does_not_keep_out_an_engine_that_holds_none(play: Play) -> None:
    """The old standby holds it, and the engine of the new version takes over."""

    async def test(world: World) -> None:
        await world.until_lent()
        world.restart()
        await world.until(lambda: world.service.engines[1].phase is Phase.DRAINING)
        world.kill(world.engines[0])
        await world.until(lambda: world.serving is world.engines[2])
        await world.until_lent()
        assert not world.found_no_room

    play(test)


def test_engine_of_a_new_version_has_the_memory_of_the_old(play: Play) -> None:
    async def test(world: World) -> None:
        await world.until_lent()
        memory = world.engines[0].mapped
        world.restart()
        await world.until(lambda: bool(world.serving and world.serving.number > 2))
        assert world.engines[2].mapped is memory
        await world.until_lent()
        assert not world.found_no_room

    play(test)


def test_engine_that_knows_no_lending_is_not_asked(play: Play) -> None:
    """Of an older weightcached, and taken back by a new supervisor."""

    async def test(world: World) -> None:
        world.lends = False
        await world.until(lambda: world.serving is not None and world.standby is not None)
        standby = world.standby
        assert standby
        standby.refuses = "forget_memory"
        world.made._lending.taken_back(standby.number)
        world.sleep()
        await world.until(lambda: world.service.holder is None)
        assert not standby.dead
        known = {"ready", "promote", "demote"}
        assert {command for engine in world.engines for command in engine.asked} <= known

    play(test)


@pytest.mark.parametrize("seed", range(20))
def test_memory_is_never_left_with_anybody(play: Play, seed: int) -> None:
    """Anything at any time: who sleeps holds nothing, who takes over finds room."""

    async def test(world: World) -> None:
        chance = random.Random(seed)
        for _ in range(60):
            for _ in range(chance.randrange(60)):
                world.check()
                await asyncio.sleep(0)
            alive = [e for e in world.engines if world.service.is_up(e.number) and not e.dead]
            match chance.randrange(9):
                case 0 | 1 if alive:
                    world.kill(chance.choice(alive))
                case 2 if alive:
                    chance.choice(alive).hangs = True
                case 3 | 4:
                    world.sleep(gives_way=chance.random() < 0.5)
                case 5 | 6:
                    world.wake()
                case 7:
                    world.restart()
                case 8:
                    world.forget()
        world.wake()
        await world.until_lent()
        assert len({engine for engine in world.engines if engine.mapped or engine.held}) == 2
        assert not world.found_no_room

    play(test, seed=seed, standby=1 + seed % 2)
