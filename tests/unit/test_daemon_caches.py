"""States of a cache, and generations that are replaced while they are handed out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.checkpoints import write_checkpoint
from tests.unit.test_fdstore import EXPECTED, Set
from weightcached.daemon.caches import Cache, Caches, Generation, LoadProgress
from weightcached.daemon.fdstore import adopt
from weightcached.daemon.leases import Leases


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", nbytes=4096)


def generation(checkpoint: Path, number: int) -> Generation:
    (made,) = adopt(Set(checkpoint, generation=number).stored, EXPECTED, lambda names: None)
    return made


def test_cache_goes_from_loading_to_ready_to_released_and_back(checkpoint: Path) -> None:
    cache = Cache("tiny/target", "target")
    states = [cache.state]
    cache.begin_load()
    assert cache.publish(generation(checkpoint, 1)) is None
    states.append(cache.state)
    cache.release().retire()
    states.append(cache.state)
    cache.begin_load()
    states.append(cache.state)
    cache.fail_load("no")
    states.append(cache.state)
    assert states == ["loading", "ready", "released", "loading", "failed"]


def test_failed_load_leaves_the_served_generation(checkpoint: Path) -> None:
    cache, first = Cache("tiny/target", "target"), generation(checkpoint, 1)
    cache.publish(first)
    cache.begin_load()
    cache.fail_load("no")
    assert (cache.state, cache.generation, cache.error) == ("ready", first, "no")
    first.retire()


def test_release_during_a_reload_waits_for_the_new_generation(checkpoint: Path) -> None:
    cache = Cache("tiny/target", "target")
    cache.publish(generation(checkpoint, 1))
    cache.begin_load()
    cache.release().retire()
    assert cache.state == "loading"
    cache.publish(generation(checkpoint, 2))
    assert cache.state == "ready"
    cache.release().retire()


def test_numbers_go_on_after_a_release(checkpoint: Path) -> None:
    cache = Cache("tiny/target", "target")
    cache.publish(generation(checkpoint, 7))
    cache.release().retire()
    assert cache.next_number == 8


def test_forbidden_transition_is_a_fault() -> None:
    cache = Cache("tiny/target", "target")
    with pytest.raises(
        AssertionError, match="cache tiny/target cannot go from loading to released"
    ):
        cache.release()


def test_retired_generation_stays_open_while_it_is_handed_out(checkpoint: Path) -> None:
    served = generation(checkpoint, 1)
    with served.handout() as fds:
        served.retire()
        assert not any(fd.closed for fd in fds)
    assert all(fd.closed for fd in fds)


def test_repeated_report_is_no_progress() -> None:
    load = LoadProgress()
    assert load.advance("weights", 1, 4)
    assert not load.advance("weights", 1, 4)
    assert load.advance("weights", 2, 4)
    assert load.advance("proof", 2, 4)


def test_eta_is_the_rest_at_the_mean_rate_of_the_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("weightcached.daemon.caches.time.monotonic", lambda: now_s[0])
    load = LoadProgress()
    load.advance("weights", 0, 100)
    assert load.eta_s is None
    now_s[0] += 6
    load.advance("weights", 75, 100)
    assert load.eta_s == 2.0


def test_state_of_the_device_is_what_most_needs_a_look(checkpoint: Path) -> None:
    caches = Caches()
    assert caches.state == "ready"
    caches.adopt(generation(checkpoint, 1))
    assert caches.state == "ready"
    other = caches.ensure("other/target", "target")
    other.begin_load()
    assert caches.state == "loading"
    other.fail_load("no")
    assert caches.state == "failed"
    status = [cache.status(Leases()) for cache in caches]
    assert [(s.name, s.state, s.source, s.error) for s in status] == [
        ("tiny/target", "ready", "adopted", ""),
        ("other/target", "failed", "loaded", "no"),
    ]
    served = caches.remove("tiny/target")
    assert served is not None
    served.retire()


def test_an_evicted_cache_keeps_its_key_and_its_number(checkpoint: Path) -> None:
    cache = Cache("tiny/target", "target")
    served = generation(checkpoint, 4)
    cache.publish(served)
    served.full_digest = "ab" * 32
    cache.evict().retire()
    assert (cache.state, cache.next_number, cache.last_nbytes) == ("evicted", 5, served.nbytes)
    # What is known of its files by now, too.
    assert cache.last_key is not None
    assert cache.last_key.checkpoint.full == "ab" * 32
    cache.begin_load()
    cache.fail_load("no room", evicted=True)
    assert (cache.state, cache.error) == ("evicted", "no room")
    assert cache.last_key.checkpoint.full == "ab" * 32


def test_a_cache_evicted_for_its_own_successor_is_loading(checkpoint: Path) -> None:
    cache = Cache("tiny/target", "target")
    cache.publish(generation(checkpoint, 1))
    cache.begin_load()
    cache.evict().retire()
    assert cache.state == "loading"
    cache.fail_load("no")
    assert cache.state == "failed"
