"""plan(): caches to load, keep and drop, decided from data alone."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest

from tests.fakes.checkpoints import write_checkpoint
from tests.unit.test_fdstore import EXPECTED, Set
from weightcached.config.manifest import ModelSpec
from weightcached.config.wanted import Wanted
from weightcached.daemon.caches import Caches
from weightcached.daemon.fdstore import adopt
from weightcached.daemon.planning import plan

SPEC = ModelSpec(name="tiny", devices=["cpu0"], engine={"model": "m"})


def want(name: str, digest: str = "spec") -> Wanted:
    return Wanted(name, "target", SPEC, digest)


@pytest.fixture
def caches(tmp_path: Path) -> Caches:
    """served/target has a generation that was loaded from "spec", failed/target has none."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", nbytes=4096)
    found = Caches()
    stored = Set(checkpoint, cache="served/target", spec_digest="spec").stored
    (generation,) = adopt(stored, EXPECTED, lambda names: None)
    found.adopt(generation)
    found.ensure("failed/target", "target").fail_load("no")
    return found


def decided(
    caches: Caches,
    wanted: list[Wanted],
    *,
    stale: Collection[str] = (),
    force: bool = False,
    only: Collection[str] = (),
) -> tuple[list[str], list[str], list[str]]:
    made = plan(wanted, caches, stale=stale, force=force, only=only)
    return [w.name for w in made.load], [w.name for w in made.unchanged], made.drop


SERVED, FAILED, NEW = want("served/target"), want("failed/target"), want("new/target")


def test_what_is_served_as_the_manifest_has_it_stays(caches: Caches) -> None:
    assert decided(caches, [SERVED, FAILED]) == (["failed/target"], ["served/target"], [])


def test_what_is_new_or_failed_is_loaded_in_the_order_of_the_manifest(caches: Caches) -> None:
    assert decided(caches, [NEW, SERVED, FAILED])[0] == ["new/target", "failed/target"]


@pytest.mark.parametrize("reason", ["entry", "stale", "force"])
def test_what_is_served_is_loaded_anew_for_a_reason(caches: Caches, reason: str) -> None:
    entry = want("served/target", "other") if reason == "entry" else SERVED
    stale = {"served/target"} if reason == "stale" else ()
    found = decided(caches, [entry, FAILED], stale=stale, force=reason == "force")
    assert found == (["served/target", "failed/target"], [], [])


def test_what_the_manifest_no_longer_has_is_dropped(caches: Caches) -> None:
    assert decided(caches, [NEW]) == (["new/target"], [], ["served/target", "failed/target"])


def test_only_limits_what_is_loaded_kept_and_dropped(caches: Caches) -> None:
    assert decided(caches, [SERVED, NEW], only={"served/target"}) == ([], ["served/target"], [])
    assert decided(caches, [SERVED, NEW], only={"failed/target"}) == ([], [], ["failed/target"])
    assert decided(caches, [NEW], only={"new/target"}, force=True) == (["new/target"], [], [])


def test_empty_manifest_drops_everything(caches: Caches) -> None:
    assert decided(caches, []) == ([], [], ["served/target", "failed/target"])


ON_DEMAND = ModelSpec(name="rare", devices=["cpu0"], engine={"model": "m"}, resident="on-demand")


def test_on_demand_models_are_offered_until_they_are_named(caches: Caches) -> None:
    rare = Wanted("rare/target", "target", ON_DEMAND, "spec")
    made = plan([SERVED, rare], caches, stale=(), force=True, only=())
    assert ([w.name for w in made.load], [w.name for w in made.offer]) == (
        ["served/target"],
        ["rare/target"],
    )
    made = plan([SERVED, rare], caches, stale=(), force=False, only={"rare/target"})
    assert ([w.name for w in made.load], made.offer) == (["rare/target"], [])
    # One that an engine waits for is neither.
    caches.ensure("rare/target", "target").begin_load()
    made = plan([SERVED, rare], caches, stale=(), force=False, only=())
    assert (made.load, made.offer) == ([], [])


def test_on_demand_models_that_are_served_are_reloaded_as_others(caches: Caches) -> None:
    served = Wanted("served/target", "target", ON_DEMAND, "other")
    made = plan([served], caches, stale=(), force=False, only=())
    assert ([w.name for w in made.load], made.offer) == (["served/target"], [])
