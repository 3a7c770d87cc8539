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
from weightcached.daemon.reconcile import plan

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
