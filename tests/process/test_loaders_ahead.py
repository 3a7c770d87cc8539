"""Children of the next models import ahead, and do not use the device before their turn."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.daemon import DaemonProcess, has_ended, loaders_of, model, until
from weightcached.wire.messages import CacheStatus

Launcher = Callable[..., DaemonProcess]


def start(make_daemon: Launcher, models: list[dict[str, Any]], *options: str) -> DaemonProcess:
    daemon = make_daemon(models)
    daemon.options = [*options]
    daemon.launch().notified("EXTEND_TIMEOUT_USEC")
    return daemon


def caches(daemon: DaemonProcess) -> dict[str, CacheStatus]:
    return {cache.name: cache for cache in daemon.status().caches}


def test_the_next_children_wait_while_the_first_loads(
    make_daemon: Launcher, checkpoint: Path, gate: Path
) -> None:
    models = [
        model("a", checkpoint, x_gate=str(gate)),
        *(model(name, checkpoint) for name in "bcd"),
    ]
    daemon = start(make_daemon, models, "--loaders-ahead", "2")
    until(lambda: caches(daemon)["b/target"].phase == "waiting", "b waits")
    until(lambda: caches(daemon)["c/target"].phase == "waiting", "c waits")
    assert caches(daemon)["d/target"].phase == "queued"
    until(lambda: len(loaders_of(daemon.pid)) == 3, "three children run")
    assert all(cache.state == "loading" for cache in caches(daemon).values())
    with open(gate, "wb"):
        pass
    until(lambda: all(cache.state == "ready" for cache in caches(daemon).values()), "all are ready")
    until(lambda: loaders_of(daemon.pid) == [], "no loader is left")


def test_without_looking_ahead_one_child_runs_at_a_time(
    make_daemon: Launcher, checkpoint: Path, gate: Path
) -> None:
    models = [model("a", checkpoint, x_gate=str(gate)), model("b", checkpoint)]
    daemon = start(make_daemon, models, "--loaders-ahead", "0")
    until(lambda: caches(daemon)["a/target"].phase == "weights", "a loads")
    assert caches(daemon)["b/target"].phase == "queued"
    until(lambda: len(loaders_of(daemon.pid)) == 1, "one child runs")
    with open(gate, "wb"):
        pass
    until(lambda: all(cache.state == "ready" for cache in caches(daemon).values()), "all are ready")


def test_child_that_dies_while_it_waits_fails_its_own_cache_alone(
    make_daemon: Launcher, checkpoint: Path, gate: Path
) -> None:
    models = [
        model("a", checkpoint, x_gate=str(gate)),
        model("b", checkpoint, x_fault="exit-3-silently-while-waiting"),
        model("c", checkpoint),
    ]
    # b would be tried again a second after its failure, and then it has its turn at once.
    daemon = start(make_daemon, models, "--loaders-ahead", "1", "--no-retry")
    until(lambda: caches(daemon)["b/target"].phase == "waiting", "b waits")
    with open(gate, "wb"):
        pass
    until(lambda: caches(daemon)["c/target"].state == "ready", "c is ready")
    assert caches(daemon)["a/target"].state == "ready"
    failed = caches(daemon)["b/target"]
    assert failed.state == "failed"
    assert failed.error == "loader of b/target ended with status 3: loading b/target generation 1"


@pytest.mark.slow
def test_waiting_for_a_turn_is_no_stall(make_daemon: Launcher, checkpoint: Path) -> None:
    # Longer than a child needs to start on a busy machine; and the first one reports for longer.
    models = [model("a", checkpoint, x_steps=200), model("b", checkpoint)]
    daemon = start(make_daemon, models, "--loaders-ahead", "1", "--stall-timeout", "15")
    until(
        lambda: all(cache.state == "ready" for cache in caches(daemon).values()), "both are ready"
    )


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_daemon_that_ends_leaves_no_waiting_child(
    make_daemon: Launcher, checkpoint: Path, gate: Path, how: str
) -> None:
    models = [model("a", checkpoint, x_gate=str(gate)), model("b", checkpoint)]
    daemon = start(make_daemon, models, "--loaders-ahead", "1")
    until(lambda: caches(daemon)["b/target"].phase == "waiting", "b waits")
    waiting = loaders_of(daemon.pid)
    assert len(waiting) == 2, "nothing is loaded yet, so no digest is made"
    if how == "stop":
        daemon.stop()
    else:
        daemon.signal(signal.SIGKILL)
    until(lambda: all(has_ended(pid) for pid in waiting), "the children are gone")
