"""Which caches make room, in which order, and what those are told who find none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.checkpoints import MIB, write_checkpoint
from tests.unit.test_fdstore import EXPECTED, Set
from weightcached.daemon.caches import Cache, Caches, Generation
from weightcached.daemon.fdstore import adopt
from weightcached.daemon.leases import Leases
from weightcached.daemon.residency import Residency


class Scene:
    """On-demand caches a, b and c of 1 MiB, used in this order; the budget holds three."""

    def __init__(self, checkpoint: Path) -> None:
        self.caches = Caches()
        self.leases = Leases()
        self.waited_for: list[Generation] = []
        self.residency = Residency("cpu0", self.caches, self.leases, self)
        self.evicted: list[str] = []
        for number, name in enumerate("abc"):
            stored = Set(checkpoint, cache=f"{name}/target").stored
            (generation,) = adopt(stored, EXPECTED, lambda names: None)
            generation.segment_nbytes = [MIB]
            generation.used_s = float(number)
            self.caches.adopt(generation)
            self.cache(name).resident = "on-demand"
        self.residency.budget = 3 * MIB

    def cache(self, name: str) -> Cache:
        found = self.caches.get(f"{name}/target")
        assert found is not None
        return found

    def generation(self, name: str) -> Generation:
        generation = self.cache(name).generation
        assert generation is not None
        return generation

    async def settled(self, generation: Generation) -> None:
        self.waited_for.append(generation)

    async def evict(self, cache: Cache) -> None:
        self.evicted.append(cache.name.partition("/")[0])
        cache.evict().retire()

    def make_room(self, nbytes: int) -> bool:
        new = self.caches.ensure("new/target", "target")
        return asyncio.run(self.residency.make_room(new, nbytes, self.evict))


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(write_checkpoint(tmp_path / "checkpoint", nbytes=4096))
    yield made
    for cache in made.caches:
        if cache.generation is not None:
            cache.generation.retire()


def test_what_fits_evicts_nothing(scene: Scene) -> None:
    scene.residency.budget = 4 * MIB
    assert scene.make_room(MIB)
    assert scene.evicted == []


def test_without_a_budget_nothing_is_evicted(scene: Scene) -> None:
    scene.residency.budget = 0
    assert scene.make_room(100 * MIB)
    assert scene.evicted == []


def test_the_least_recently_used_go_until_it_fits(scene: Scene) -> None:
    scene.generation("a").used_s = 9.0
    first = scene.generation("b")
    assert scene.make_room(2 * MIB)
    assert scene.evicted == ["b", "c"]
    assert scene.waited_for[0] is first


def test_nothing_is_evicted_if_all_of_it_would_not_be_enough(scene: Scene) -> None:
    scene.cache("a").resident = "always"
    assert not scene.make_room(2 * MIB + 1)
    assert scene.evicted == []


def test_mapped_waited_for_and_loading_caches_stay(scene: Scene) -> None:
    scene.leases.begin(scene.generation("a"), 11)
    scene.cache("b").waiting["connection"] = "pid 12"
    scene.cache("c").begin_load()
    assert not scene.make_room(1)
    text = scene.residency.no_room(scene.cache("c"), MIB)
    assert text == (
        "no room for c/target: it needs 1.0 MiB, the budget of cpu0 is 3.0 MiB, and held are "
        "a/target 1.0 MiB (mapped by pid 11), b/target 1.0 MiB (pid 12 attaches), "
        "c/target 1.0 MiB (no engine); stop an engine, evict a cache with 'weightcachectl evict', or "
        "raise budget: in the manifest"
    )


def test_an_old_generation_counts_while_an_engine_maps_it(scene: Scene) -> None:
    old = scene.generation("a")
    lease = scene.leases.begin(old, 11)
    scene.cache("a").drop()
    assert scene.residency.held_bytes() == 3 * MIB
    assert "generation 1 of a/target 1.0 MiB (mapped by pid 11)" in scene.residency.no_room(
        scene.cache("b"), MIB
    )
    scene.leases.end(lease)
    assert scene.residency.held_bytes() == 2 * MIB
    old.retire()


def test_what_is_larger_than_the_budget_is_told_so(scene: Scene) -> None:
    assert scene.residency.no_room(scene.cache("a"), 4 * MIB) == (
        "no room for a/target: it needs 4.0 MiB, the budget of cpu0 is 3.0 MiB; raise budget: in the "
        "manifest"
    )


def test_a_parked_engine_is_asked_and_passed_over_if_it_wakes(scene: Scene) -> None:
    asked: list[str] = []

    async def main() -> bool:
        lease = scene.leases.begin(scene.generation("a"), 11)
        scene.leases.park(lease, True)
        scene.generation("a").used_s = 0.0

        def wake() -> None:
            asked.append("a")
            scene.leases.park(lease, False)

        lease.ask_to_unmap = wake
        new = scene.caches.ensure("new/target", "target")
        return await scene.residency.make_room(new, MIB, scene.evict)

    assert asyncio.run(main())
    assert (asked, scene.evicted) == (["a"], ["b"])


def test_one_that_is_asked_for_while_its_snapshot_is_written_stays(scene: Scene) -> None:
    async def settled(generation: Generation) -> None:
        if generation is scene.generation("a"):
            scene.leases.begin(generation, 11)

    scene.settled = settled  # type: ignore[method-assign]
    scene.residency = Residency("cpu0", scene.caches, scene.leases, scene)
    scene.residency.budget = 3 * MIB
    assert scene.make_room(MIB)
    assert scene.evicted == ["b"]
