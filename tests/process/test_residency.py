"""Models on demand within a budget: real daemon, real loads, snapshots and engines that map."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.checkpoints import MIB, WEIGHTS, key_of, write_checkpoint
from tests.fakes.client import Client, Handout
from tests.fakes.daemon import DaemonProcess, has_ended, loaders_of, until, write_manifest
from weightcached.index.key import WeightCacheKey
from weightcached.wire.messages import (
    Attach,
    CacheOutcome,
    CacheStatus,
    Done,
    Drop,
    Evict,
    Failed,
    HoldLoads,
    Loading,
    Mismatch,
    Parked,
    Progress,
    Ready,
    Refused,
    Release,
    Reload,
    ReloadReply,
    Unmap,
    Verify,
)

Launcher = Callable[..., DaemonProcess]
SIZE = 3 * MIB


class Machine:
    """A daemon of several on-demand models of 3 MiB each, whose loads are counted."""

    def __init__(self, daemon: DaemonProcess, directory: Path, names: str) -> None:
        self.daemon = daemon
        self.directory = directory
        self.snapshots = directory / "snapshots"
        self.checkpoints = {
            name: write_checkpoint(directory / name, seed=seed)
            for seed, name in enumerate(names, start=1)
        }
        self.entries: dict[str, dict[str, Any]] = {}
        self.manifest()

    def manifest(
        self,
        *,
        budget: int = 2 * SIZE,
        snapshots: bool = True,
        changes: dict[str, dict[str, Any]] | None = None,
        **engine: Any,
    ) -> None:
        """changes: of a model's entry, by its name; engine: arguments of every model."""
        models = []
        for name, checkpoint in self.checkpoints.items():
            arguments = {"model": str(checkpoint), "x_spawns": str(self.spawns(name)), **engine}
            entry = {
                "name": name,
                "devices": ["cpu0"],
                "engine": arguments,
                "resident": "on-demand",
                **(changes or {}).get(name, {}),
            }
            if extra := entry.pop("x", None):
                entry["engine"] = arguments | extra
            models.append({k: v for k, v in entry.items() if v is not None})
        keys: dict[str, Any] = {"snapshots": {"dir": str(self.snapshots)}} if snapshots else {}
        if budget:
            keys["budget"] = budget
        write_manifest(self.daemon.manifest, models, **keys)

    def spawns(self, name: str) -> Path:
        return self.directory / f"{name}.spawns"

    def loads(self, name: str) -> int:
        """How often the loader ran, not the restorer."""
        path = self.spawns(name)
        return len(path.read_text().splitlines()) if path.exists() else 0

    def key(self, name: str, **engine: Any) -> WeightCacheKey:
        return key_of({"model": str(self.checkpoints[name]), **engine})

    def cache(self, name: str) -> CacheStatus:
        return next(c for c in self.daemon.status().caches if c.name == f"{name}/target")

    def states(self) -> dict[str, str]:
        return {c.name.partition("/")[0]: c.state for c in self.daemon.status().caches}

    def attach(self, name: str) -> Engine:
        return Engine(self, name)

    def use(self, name: str) -> None:
        """An engine comes, compares the bytes with its checkpoint's, and leaves."""
        with self.attach(name) as engine:
            assert engine.weights() == (self.checkpoints[name] / WEIGHTS).read_bytes()
        until(lambda: not self.cache(name).engines, "the end of the lease")

    def written(self, name: str) -> None:
        until(lambda: self.cache(name).snapshot == "written", f"a snapshot of {name}")

    def reload(self, *caches: str, force: bool = False) -> dict[str, CacheOutcome]:
        with self.daemon.client("ctl") as client:
            reply = client.ask(Reload(caches=list(caches), force=force))
            while isinstance(reply, Progress):
                reply = client.receive()
        assert isinstance(reply, ReloadReply), reply
        return {outcome.cache.partition("/")[0]: outcome for outcome in reply.outcomes}

    def evict(self, name: str) -> Done | Refused:
        with self.daemon.client("ctl") as client:
            reply = client.ask(Evict(cache=f"{name}/target"))
        assert isinstance(reply, Done | Refused), reply
        return reply


class Engine:
    """A connection that has attached: its lease lives as long."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.client: Client = machine.daemon.client()
        try:
            self.handout: Handout = self.client.attach(machine.key(name))
        except BaseException:
            self.client.close()
            raise

    def weights(self) -> bytes:
        segments = self.handout.segment_fds
        return b"".join(os.pread(fd.fileno(), 1 << 30, 0) for fd in segments)[:SIZE]

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.handout.close()
        self.client.close()


@pytest.fixture
def machine(make_daemon: Launcher, short_tmp: Path) -> Machine:
    """Three models, a budget for two."""
    return Machine(make_daemon([]), short_tmp, "abc")


def test_on_demand_models_are_loaded_when_an_engine_asks(machine: Machine) -> None:
    machine.daemon.start()
    assert machine.states() == {"a": "evicted", "b": "evicted", "c": "evicted"}
    assert machine.daemon.status().state == "evicted"
    machine.use("b")
    assert machine.states() == {"a": "evicted", "b": "ready", "c": "evicted"}
    assert [machine.loads(name) for name in "abc"] == [0, 1, 0]


def test_an_engine_that_does_not_wait_starts_the_load(machine: Machine) -> None:
    machine.daemon.start()
    with machine.daemon.client() as client:
        client.expect(Attach(key=machine.key("a"), wait=False), Loading)
        until(lambda: machine.cache("a").state == "ready", "the load")
        client.take(client.expect(Attach(key=machine.key("a"), wait=False), Ready)).close()


def test_the_least_recently_used_goes_and_comes_back_from_its_snapshot(machine: Machine) -> None:
    machine.daemon.start()
    for name in "aba":
        machine.use(name)
    machine.written("a")
    machine.written("b")
    machine.use("c")
    assert machine.states() == {"a": "ready", "b": "evicted", "c": "ready"}
    assert machine.cache("b").snapshot_bytes == SIZE
    machine.use("b")
    assert machine.states() == {"a": "evicted", "b": "ready", "c": "ready"}
    assert machine.cache("b").source == "restored"
    assert [machine.loads(name) for name in "abc"] == [1, 1, 1]
    counters = machine.daemon.status().counters
    assert counters is not None
    assert counters.evictions == {"b/target": 1, "a/target": 1}
    assert counters.restores == {"b/target": 1}
    assert counters.restore_seconds["b/target"] > 0
    assert counters.hits == {"a/target": 1}


def test_without_snapshots_an_evicted_model_is_loaded_again(machine: Machine) -> None:
    machine.manifest(snapshots=False)
    machine.daemon.start()
    for name in "abca":
        machine.use(name)
    assert machine.states() == {"a": "ready", "b": "evicted", "c": "ready"}
    assert [machine.loads(name) for name in "abc"] == [2, 1, 1]


def test_memory_of_an_evicted_generation_is_given_back(machine: Machine) -> None:
    machine.daemon.start()
    machine.use("a")
    machine.written("a")
    assert machine.daemon.manager
    stored = set(machine.daemon.manager.stored)
    assert machine.evict("a") == Done()
    until(
        lambda: not any("memfd:weightcached-segment" in x for x in machine.daemon.descriptors()),
        "its descriptors",
    )
    assert stored
    assert not stored & set(machine.daemon.manager.stored)


def test_what_engines_map_stays_and_is_named_to_those_who_find_no_room(machine: Machine) -> None:
    machine.daemon.start()
    # Their sizes are known: nothing is loaded in vain.
    machine.use("c")
    with machine.attach("a"), machine.attach("b"), machine.daemon.client() as late:
        answer = late.ask(Attach(key=machine.key("c")))
        while isinstance(answer, Loading):
            answer = late.receive()
        assert isinstance(answer, Failed), answer
        assert answer.error == (
            "no room for c/target: it needs 3.0 MiB, the budget of cpu0 is 6.0 MiB, and held are "
            f"a/target 3.0 MiB (mapped by pid {os.getpid()}), "
            f"b/target 3.0 MiB (mapped by pid {os.getpid()}); stop an engine, evict a cache with "
            "'weightcachectl evict', or raise budget: in the manifest"
        )
        assert machine.states() == {"a": "ready", "b": "ready", "c": "evicted"}
        assert machine.cache("c").error == answer.error
        assert machine.cache("c").retry_at is None
    # The next one that asks finds room.
    machine.use("c")
    assert machine.cache("c").error == ""


def test_a_load_that_turns_out_too_large_leaves_what_is_served(machine: Machine) -> None:
    machine.manifest(budget=2 * SIZE - 1)
    machine.daemon.start()
    with machine.attach("a"), machine.daemon.client() as late:
        for loads in (1, 1):
            answer = late.ask(Attach(key=machine.key("b")))
            while isinstance(answer, Loading):
                answer = late.receive()
            assert isinstance(answer, Failed)
            assert "no room for b/target: it needs 3.0 MiB" in answer.error
            # By now its size is known.
            assert machine.loads("b") == loads
        assert machine.states() == {"a": "ready", "b": "evicted", "c": "evicted"}
    machine.use("b")


def test_always_resident_models_that_do_not_fit_are_tried_again(machine: Machine) -> None:
    machine.manifest(budget=SIZE, changes={name: {"resident": None} for name in "ab"})
    machine.daemon.start()
    # It is looked at again and again, each time for a moment.
    until(lambda: machine.states() == {"a": "ready", "b": "failed", "c": "evicted"}, "b fails")
    assert "a/target 3.0 MiB (always resident)" in machine.cache("b").error
    until(lambda: machine.cache("b").retry_at is not None, "b is to be tried again")
    # Its load showed how large it is: it is not loaded in vain again.
    machine.daemon.until(lambda s: "no room" in s.caches[1].error and machine.loads("b") == 1, "b")
    with machine.daemon.client("ctl") as tool:
        tool.expect(Drop(cache="a/target"), Done)
    until(lambda: machine.cache("b").state == "ready", "the next attempt")


def test_a_reload_tries_again_what_had_no_room_before(machine: Machine) -> None:
    """It may be smaller by now."""
    always = {name: {"resident": None} for name in "ab"}
    machine.manifest(budget=2 * SIZE - 1, changes=always)
    machine.daemon.start()
    until(lambda: machine.cache("b").state == "failed", "b fails")
    write_checkpoint(machine.checkpoints["b"], seed=2, nbytes=SIZE - MIB)
    assert machine.reload()["b"].outcome == "loaded"
    assert machine.states() == {"a": "ready", "b": "ready", "c": "evicted"}


def test_a_lower_budget_evicts_at_once(machine: Machine) -> None:
    machine.daemon.start()
    for name in "ab":
        machine.use(name)
        machine.written(name)
    machine.manifest(budget=SIZE)
    machine.reload()
    assert machine.states() == {"a": "evicted", "b": "ready", "c": "evicted"}


def test_a_model_on_demand_comes_back_after_an_engine_has_copied_it(machine: Machine) -> None:
    machine.daemon.start()
    with machine.attach("a") as engine:
        engine.client.expect(Release(), Done)
        assert machine.cache("a").state == "evicted"
    machine.use("a")


def test_an_evicted_model_says_how_it_is_brought_back(machine: Machine) -> None:
    machine.daemon.start()
    with machine.daemon.client("ctl") as tool:
        refused = tool.expect(Verify(cache="a/target"), Refused)
    assert refused == Refused(
        code="evicted",
        message="a/target is evicted: 'weightcachectl reload --cache a/target' brings it back",
    )


def test_a_model_gone_from_the_manifest_is_dropped_by_its_name(machine: Machine) -> None:
    """As `weightcachectl remove` asks for it."""
    machine.daemon.start()
    machine.use("a")
    del machine.checkpoints["a"]
    machine.manifest()
    assert machine.reload("a")["a"].outcome == "dropped"
    assert machine.states() == {"b": "evicted", "c": "evicted"}


def test_nobody_waits_for_a_model_gone_from_the_manifest(machine: Machine) -> None:
    """A reload of another one leaves it as it was: evicted, and no engine can have it back."""
    machine.daemon.start()
    key = machine.key("a")
    del machine.checkpoints["a"]
    machine.manifest()
    machine.reload("b")
    with machine.daemon.client() as engine:
        answers = [engine.ask(Attach(key=key))]

        def answered() -> bool:
            if isinstance(answers[0], Loading):
                answers[0] = engine.receive()
            return not isinstance(answers[0], Loading)

        until(answered, "a final answer")
    # That of another model is the nearest.
    assert isinstance(answers[0], Mismatch)
    assert machine.cache("a").error == "a/target is in the manifest no longer"


def test_what_is_always_resident_is_never_evicted_for_others(machine: Machine) -> None:
    machine.manifest(changes={"a": {"resident": None}, "b": {"resident": None}})
    machine.daemon.start()
    assert machine.states() == {"a": "ready", "b": "ready", "c": "evicted"}
    with machine.daemon.client() as late:
        answer = late.ask(Attach(key=machine.key("c")))
        while isinstance(answer, Loading):
            answer = late.receive()
    assert isinstance(answer, Failed)
    assert "a/target 3.0 MiB (always resident)" in answer.error
    assert machine.states() == {"a": "ready", "b": "ready", "c": "evicted"}


def test_a_restart_keeps_what_is_resident_and_knows_the_snapshots_of_the_rest(
    machine: Machine,
) -> None:
    machine.daemon.start()
    for name in "ab":
        machine.use(name)
        machine.written(name)
    assert machine.evict("a") == Done()
    machine.daemon.signal(signal.SIGKILL)
    machine.daemon.wait()
    machine.daemon.launch(keep_store=True).notified("READY=1")
    assert machine.states() == {"a": "evicted", "b": "ready", "c": "evicted"}
    assert machine.cache("a").snapshot_bytes == SIZE
    assert machine.cache("a").snapshot_use.startswith(f"to be used: {machine.snapshots}/")
    # Told at once that nothing here is its own, by the key in the snapshot.
    with machine.daemon.client() as client:
        answer = client.ask(Attach(key=machine.key("a", dtype="float16")))
        while isinstance(answer, Loading):
            # c has never been loaded: its key is not known.
            answer = client.receive()
        assert isinstance(answer, Mismatch), answer
    machine.use("a")
    assert [machine.loads(name) for name in "ab"] == [1, 1]
    assert machine.cache("a").snapshot_use.startswith("used: ")


def test_reload_leaves_on_demand_models_alone_unless_they_are_named(machine: Machine) -> None:
    machine.daemon.start()
    outcomes = machine.reload()
    assert {o.outcome for o in outcomes.values()} == {"unchanged"}
    assert machine.states() == {"a": "evicted", "b": "evicted", "c": "evicted"}
    assert machine.reload("a")["a"].outcome == "loaded"
    assert machine.states() == {"a": "ready", "b": "evicted", "c": "evicted"}


def test_idle_models_are_evicted_and_used_ones_stay(machine: Machine) -> None:
    machine.manifest(changes={name: {"idle_evict_s": 0.2} for name in "ab"})
    machine.daemon.start()
    with machine.attach("b"):
        machine.use("a")
        machine.use("c")
        until(lambda: machine.cache("a").state == "evicted", "its idle time")
        assert machine.states() == {"a": "evicted", "b": "ready", "c": "ready"}
    until(lambda: machine.cache("b").state == "evicted", "its idle time")
    machine.use("a")
    assert machine.loads("a") == 1


def test_evict_is_refused_while_an_engine_maps_it(machine: Machine) -> None:
    machine.daemon.start()
    with machine.attach("a"):
        machine.written("a")
        refused = machine.evict("a")
        assert isinstance(refused, Refused)
        assert (refused.code, "in use by pid" in refused.message) == ("in-use", True)
    until(lambda: not machine.cache("a").engines, "the end of the lease")
    assert machine.evict("a") == Done()
    # Again, or one that was never loaded: as good.
    assert machine.evict("a") == Done()
    assert machine.evict("b") == Done()


@pytest.fixture
def slow_writer(short_tmp: Path, gate: Path) -> Path:
    """An interpreter that waits for `gate` before it runs the writer of snapshots."""
    script = short_tmp / "python"
    waits = f'case "$*" in *snapshot.writer*) cat {gate} >/dev/null;; esac'
    script.write_text(f'#!/bin/sh\n{waits}\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return script


def test_what_is_being_written_is_evicted_when_it_is_written(
    machine: Machine, slow_writer: Path, gate: Path
) -> None:
    machine.manifest(budget=SIZE, changes={"a": {"python": str(slow_writer)}})
    machine.daemon.start()
    machine.use("a")
    refused = machine.evict("a")
    assert isinstance(refused, Refused)
    assert refused.code == "busy"
    with machine.daemon.client() as waiting:
        waiting.expect(Attach(key=machine.key("b")), Loading)
        # It waits for the write, which would be in vain otherwise.
        for _ in range(3):
            assert isinstance(waiting.receive(), Loading)
        assert machine.states() == {"a": "ready", "b": "loading", "c": "evicted"}
        gate.write_bytes(b"")
        answer = waiting.receive()
        while isinstance(answer, Loading):
            answer = waiting.receive()
        assert isinstance(answer, Ready)
        waiting.take(answer).close()
    machine.use("a")
    assert (machine.cache("a").source, machine.loads("a")) == ("restored", 1)


def test_an_always_resident_model_can_be_evicted_by_hand_and_comes_back(machine: Machine) -> None:
    machine.manifest(changes={"a": {"resident": None}})
    machine.daemon.start()
    machine.written("a")
    assert machine.evict("a") == Done()
    assert machine.cache("a").state == "evicted"
    machine.use("a")
    assert (machine.cache("a").source, machine.loads("a")) == ("restored", 1)


def test_a_dropped_model_stays_away_until_it_is_reloaded(machine: Machine) -> None:
    machine.daemon.start()
    machine.use("a")
    with machine.daemon.client("ctl") as client:
        client.expect(Drop(cache="a/target"), Done)
    assert machine.cache("a").state == "released"
    machine.reload()
    assert machine.cache("a").state == "evicted"
    machine.use("a")


def test_a_broken_snapshot_is_loaded_instead(machine: Machine) -> None:
    machine.daemon.start()
    machine.use("a")
    machine.written("a")
    assert machine.evict("a") == Done()
    (data,) = machine.snapshots.glob("cpu0/a.target/*/data")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    machine.use("a")
    assert (machine.cache("a").source, machine.loads("a")) == ("loaded", 2)


def test_an_engine_that_holds_loads_off_gets_the_one_that_it_asks_for(machine: Machine) -> None:
    """A draft's, say: the engine's own hold would keep it waiting for ever."""
    machine.daemon.start()
    with machine.daemon.client() as holder, machine.daemon.client() as engine:
        holder.expect(HoldLoads(), Done)
        engine.attach(machine.key("a")).close()
    assert machine.cache("a").state == "ready"


def test_a_reload_that_does_not_fit_beside_the_old_one_replaces_it(machine: Machine) -> None:
    machine.manifest(budget=SIZE)
    machine.daemon.start()
    machine.use("a")
    machine.written("a")
    write_checkpoint(machine.checkpoints["a"], seed=9)
    assert machine.reload()["a"].outcome == "loaded"
    machine.use("a")
    assert machine.cache("a").generation == 2


def test_a_reload_that_fails_brings_the_old_one_back(machine: Machine) -> None:
    machine.manifest(budget=SIZE)
    machine.daemon.start()
    machine.use("a")
    machine.written("a")
    machine.manifest(budget=SIZE, changes={"a": {"x": {"x_fault": "refuse-in-packing"}}})
    outcome = machine.reload()["a"]
    assert (outcome.outcome, outcome.error) == ("failed", "config.json names no architecture")
    cache = machine.cache("a")
    assert (cache.state, cache.source, cache.error) == ("ready", "restored", outcome.error)
    machine.use("a")
    # It is the old one in every respect: the next reload tries again.
    machine.manifest(budget=SIZE, changes={"a": {"x": {"x_segments": 2}}})
    assert machine.reload()["a"].outcome == "loaded"


def test_a_daemon_killed_while_it_loads_one_loses_nothing_that_is_served(
    machine: Machine, short_tmp: Path
) -> None:
    machine.daemon.start()
    machine.use("a")
    machine.written("a")
    gate = short_tmp / "gate"
    os.mkfifo(gate)
    machine.manifest(changes={"b": {"x": {"x_gate": str(gate)}}})
    machine.reload()
    with machine.attach("a") as engine, machine.daemon.client() as waiting:
        waiting.expect(Attach(key=machine.key("b")), Loading)
        until(lambda: machine.loads("b") == 1, "the loader")
        machine.daemon.signal(signal.SIGKILL)
        machine.daemon.wait()
        machine.manifest()
        machine.daemon.launch(keep_store=True).notified("READY=1")
        assert engine.weights() == (machine.checkpoints["a"] / WEIGHTS).read_bytes()
        assert machine.states() == {"a": "ready", "b": "evicted", "c": "evicted"}
    machine.use("b")


def test_a_parked_engine_is_asked_to_unmap_if_the_room_is_needed(machine: Machine) -> None:
    machine.daemon.start()
    machine.use("a")
    machine.written("a")
    with machine.attach("a") as sleeper, machine.attach("b"), machine.daemon.client() as late:
        sleeper.client.expect(Parked(parked=True), Done)
        late.send(Attach(key=machine.key("c")))
        assert sleeper.client.receive() == Unmap()
        # It unmaps and hangs up.
        sleeper.handout.close()
        sleeper.client.close()
        answer = late.receive()
        while isinstance(answer, Loading):
            answer = late.receive()
        assert isinstance(answer, Ready), answer
        late.take(answer).close()
        assert machine.states() == {"a": "evicted", "b": "ready", "c": "ready"}
    # It wakes.
    machine.use("a")
    assert machine.cache("a").source == "restored"


def test_a_parked_engine_that_wakes_just_then_keeps_its_model(machine: Machine) -> None:
    machine.daemon.start()
    machine.use("c")
    with machine.attach("a") as sleeper, machine.attach("b"), machine.daemon.client() as late:
        sleeper.client.expect(Parked(parked=True), Done)
        late.send(Attach(key=machine.key("c")))
        assert sleeper.client.receive() == Unmap()
        sleeper.client.expect(Parked(parked=False), Done)
        answer = late.receive()
        while isinstance(answer, Loading):
            answer = late.receive()
        assert isinstance(answer, Failed), answer
        assert f"a/target 3.0 MiB (mapped by pid {os.getpid()})" in answer.error
        assert machine.states() == {"a": "ready", "b": "ready", "c": "evicted"}


def restorer_of(daemon: DaemonProcess) -> int | None:
    """The pid of the daemon's restorer, if one runs."""
    for pid in loaders_of(daemon.pid):
        with contextlib.suppress(OSError):
            if b"weightcached.snapshot.restorer" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return None


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("whom", ["restorer", "daemon"])
def test_kill_while_one_is_restored_costs_nothing_that_is_served(
    machine: Machine, whom: str, delay_s: float
) -> None:
    """At whatever phase it hits the restorer, which lives for half a second."""
    machine.daemon.start()
    for name in "ab":
        machine.use(name)
        machine.written(name)
    assert machine.evict("b") == Done()
    files = sorted(machine.snapshots.rglob("*"))
    with machine.attach("a") as engine, machine.daemon.client() as waiting:
        waiting.send(Attach(key=machine.key("b")))
        found: list[int | None] = [None]

        def restores() -> bool:
            found[0] = restorer_of(machine.daemon)
            # It may have come and gone between two looks.
            return found[0] is not None or machine.cache("b").state == "ready"

        until(restores, "the restorer")
        restorer = found[0]
        time.sleep(delay_s)
        if whom == "restorer":
            with contextlib.suppress(ProcessLookupError):
                if restorer:
                    os.kill(restorer, signal.SIGKILL)
            answer = waiting.receive()
            while isinstance(answer, Loading):
                answer = waiting.receive()
            # Restored before the signal came, or loaded.
            assert isinstance(answer, Ready), answer
            waiting.take(answer).close()
        else:
            machine.daemon.signal(signal.SIGKILL)
            machine.daemon.wait()
            until(lambda: not restorer or has_ended(restorer), "the restorer's end")
            machine.daemon.launch(keep_store=True).notified("READY=1")
        assert engine.weights() == (machine.checkpoints["a"] / WEIGHTS).read_bytes()
        assert machine.cache("a").state == "ready"
    machine.use("b")
    if whom == "daemon":
        assert machine.loads("b") == 1
        assert sorted(machine.snapshots.rglob("*")) == files


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_random_use_never_exceeds_the_budget_nor_hands_out_other_bytes(
    make_daemon: Launcher, short_tmp: Path, seed: int
) -> None:
    machine = Machine(make_daemon([]), short_tmp, "abcde")
    chance = random.Random(seed)
    budget = 2 * SIZE + SIZE // 2
    machine.manifest(budget=budget, changes={"e": {"idle_evict_s": 0.1}})
    machine.daemon.start()
    attached: dict[str, Engine] = {}

    def attach() -> None:
        name = chance.choice("abcde")
        # A third one finds no room.
        if len(attached) < 2 and name not in attached:
            attached[name] = machine.attach(name)

    def leave() -> None:
        if attached:
            name = chance.choice(sorted(attached))
            attached.pop(name).__exit__()
            until(lambda: not machine.cache(name).engines, "the end of the lease")

    def evict() -> None:
        name = chance.choice("abcde")
        reply = machine.evict(name)
        # It may be mapped, loading, or being written.
        assert reply == Done() or reply.code in ("in-use", "loading", "busy")  # type: ignore[union-attr]

    def reload() -> None:
        assert not any(o.error for o in machine.reload().values())

    def kill() -> None:
        machine.daemon.signal(signal.SIGKILL)
        machine.daemon.wait()
        for name in list(attached):
            attached.pop(name).__exit__()
        machine.daemon.launch(keep_store=True).notified("READY=1")

    operations = {attach: 10, leave: 6, evict: 4, reload: 2, kill: 1}
    for _ in range(50):
        (operation,) = chance.choices(list(operations), list(operations.values()))
        operation()
        status = machine.daemon.status()
        assert sum(cache.bytes for cache in status.caches) <= budget
        for name, engine in attached.items():
            assert engine.weights() == (machine.checkpoints[name] / WEIGHTS).read_bytes()
            assert machine.cache(name).state == "ready"
    while attached:
        leave()
    assert "Traceback" not in machine.daemon.log
    for name in "abcde":
        machine.use(name)
        assert machine.loads(name) <= 2
