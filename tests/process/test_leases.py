"""Leases, and the requests that respect them: Release, Rejoin, Drop."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import limits
from tests.fakes.checkpoints import MIB, key_of
from tests.fakes.client import Client
from tests.fakes.daemon import (
    BOUND_S,
    ROOT,
    DaemonProcess,
    environment,
    has_ended,
    model,
    until,
    write_manifest,
)
from tests.process.conftest import Engine
from weightcached.index.key import WeightCacheKey
from weightcached.wire.messages import (
    Attach,
    Done,
    Drop,
    Parked,
    Refused,
    Rejoin,
    Rejoined,
    Release,
    Released,
    Reload,
    ReloadReply,
    StatusReply,
    Unmap,
)

AT_ONCE_S = 1.0

MakeEngine = Callable[..., Engine]
Launcher = Callable[..., DaemonProcess]


def engines(status: StatusReply) -> list[int]:
    (cache,) = status.caches
    return [engine.pid for engine in cache.engines]


def test_status_shows_who_holds_a_lease_since_when(
    daemon: DaemonProcess, checkpoint: Path, make_engine: MakeEngine
) -> None:
    began = time.time()
    engine = make_engine(daemon, checkpoint)
    assert engine.attached() == 3 * MIB
    (cache,) = daemon.status().caches
    assert [e.pid for e in cache.engines] == [engine.process.pid]
    assert began <= cache.engines[0].since <= time.time()


@pytest.mark.timed
def test_killed_engine_gives_its_lease_back_at_once(
    daemon: DaemonProcess, checkpoint: Path, make_engine: MakeEngine
) -> None:
    engine = make_engine(daemon, checkpoint)
    engine.attached()
    killed_s = time.monotonic()
    engine.kill()
    daemon.until(lambda status: engines(status) == [], "the lease has ended")
    limits.hold("the lease ends", time.monotonic() - killed_s, AT_ONCE_S)


def test_killed_engine_gives_its_lease_back_though_a_child_holds_its_socket(
    daemon: DaemonProcess, checkpoint: Path, make_engine: MakeEngine
) -> None:
    engine = make_engine(daemon, checkpoint, "--shared-socket")
    engine.attached()
    engine.kill()
    daemon.until(lambda status: engines(status) == [], "the lease has ended")
    assert f"peer died pid={engine.process.pid}" in daemon.log


def test_closed_connection_ends_its_lease(daemon: DaemonProcess, checkpoint: Path) -> None:
    with daemon.client() as engine:
        engine.attach(key_of({"model": str(checkpoint)})).close()
        assert engines(daemon.status()) == [os.getpid()]
    daemon.until(lambda status: engines(status) == [], "the lease has ended")


def test_attaching_twice_on_one_connection_is_one_lease(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    with daemon.client() as engine:
        for _ in range(2):
            engine.attach(key_of({"model": str(checkpoint)})).close()
        assert engines(daemon.status()) == [os.getpid()]


def test_32_engines_attach_at_once(make_daemon: Launcher, checkpoint: Path) -> None:
    daemon = make_daemon([model("tiny", checkpoint, x_segments=16)]).start()
    key, together, held = (
        key_of({"model": str(checkpoint)}),
        threading.Barrier(32),
        threading.Barrier(33),
    )
    segments: list[int] = []

    def engine() -> None:
        with daemon.client() as client:
            together.wait(BOUND_S)
            handout = client.attach(key)
            segments.append(len(handout.segment_fds))
            handout.close()
            held.wait(BOUND_S)
            held.wait(BOUND_S)

    threads = [threading.Thread(target=engine) for _ in range(32)]
    for thread in threads:
        thread.start()
    held.wait(BOUND_S)
    assert len(engines(daemon.status())) == 32
    held.wait(BOUND_S)
    for thread in threads:
        thread.join()
    assert segments == [16] * 32
    daemon.until(lambda status: engines(status) == [], "all leases have ended")


def test_process_with_the_pid_of_a_dead_engine_is_not_taken_for_it(
    daemon: DaemonProcess, checkpoint: Path, make_engine: MakeEngine
) -> None:
    """While the daemon is stopped the engine dies, a child keeps its socket, and its pid is reused."""
    engine = make_engine(daemon, checkpoint, "--shared-socket")
    engine.attached()
    pid = engine.process.pid
    daemon.signal(signal.SIGSTOP)
    with contextlib.ExitStack() as stack:
        try:
            engine.kill()
            stack.enter_context(process_with_pid(pid))
        finally:
            daemon.signal(signal.SIGCONT)
        daemon.until(lambda status: engines(status) == [], "the lease has ended")
        assert f"peer died pid={pid}" in daemon.log
        assert not has_ended(pid)


@contextlib.contextmanager
def process_with_pid(pid: int) -> Iterator[None]:
    """A sleeping process whose pid is `pid`, which must be free."""
    command = [sys.executable, "-m", "tests.fakes.with_pid", str(pid)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment()
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == b"%d\n" % pid
        yield


CYCLES = 1000


@pytest.mark.slow
def test_a_thousand_engines_killed_at_any_point_leave_nothing(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    key = key_of({"model": str(checkpoint)})
    chance = random.Random(1)
    kill_engines(daemon, key, chance, CYCLES // 10)
    before = footprint(daemon)
    kill_engines(daemon, key, chance, CYCLES - CYCLES // 10)
    daemon.holds_no_more_than(before.descriptors)
    now = footprint(daemon)
    assert now.threads <= before.threads
    assert now.rss_kib - before.rss_kib < 1024
    # Not a segment has a name in the file system.
    assert "/dev/shm/" not in Path(f"/proc/{daemon.pid}/maps").read_text() + " ".join(
        daemon.descriptors()
    )
    assert daemon.status().caches[0].state == "ready"


def kill_engines(
    daemon: DaemonProcess, key: WeightCacheKey, chance: random.Random, count: int
) -> None:
    for number in range(count):
        engine_killed_somewhere(daemon, key, chance)
        if number % 10 == 9:
            # What many at once would take is not what we look for, and a busy daemon falls behind.
            daemon.settled()
    daemon.until(lambda status: engines(status) == [], "all leases have ended")


def engine_killed_somewhere(
    daemon: DaemonProcess, key: WeightCacheKey, chance: random.Random
) -> None:
    """Anywhere between its connect() and some time after it has mapped everything."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            client = Client.welcome(daemon.socket)
            handout = client.attach(key)
            maps = [mmap.mmap(fd.fileno(), 0, prot=mmap.PROT_READ) for fd in handout.segment_fds]
            assert maps[0][:1]
            signal.pause()
        os._exit(1)
    select.select([], [], [], chance.random() * 0.006)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


class Footprint(NamedTuple):
    descriptors: Counter[str]
    threads: int
    rss_kib: int


def footprint(daemon: DaemonProcess) -> Footprint:
    """What the daemon takes once no peer and no child is left."""
    descriptors = daemon.settled()
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    values = [int(status.split(f"{name}:")[1].split()[0]) for name in ("Threads", "VmRSS")]
    return Footprint(descriptors, *values)


# ---- Release: the engine has a copy of its own


def test_release_frees_the_generation_and_its_stored_copy(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    key = key_of({"model": str(checkpoint)})
    assert daemon.manager
    with daemon.client() as engine:
        engine.attach(key).close()
        engine.expect(Release(), Done)
        # A note of what is to stay unloaded.
        assert list(daemon.manager.stored) == ["wc1.aside.1"]
        assert not any("memfd" in target for target in daemon.descriptors())
        assert engine.expect(Attach(key=key), Released).cache == "tiny/target"
    (cache,) = daemon.status().caches
    assert (cache.state, cache.bytes, cache.engines) == ("released", 0, [])


def test_release_waits_for_the_last_other_lease(daemon: DaemonProcess, checkpoint: Path) -> None:
    key = key_of({"model": str(checkpoint)})
    with daemon.client() as first, daemon.client() as second:
        first.attach(key).close()
        second.attach(key).close()
        first.expect(Release(), Done)
        assert len(daemon.status().caches[0].engines) == 1
        assert daemon.status().caches[0].state == "ready"
    daemon.until(lambda status: status.caches[0].state == "released", "the second has left")


def test_two_engines_that_release_are_both_answered(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    key = key_of({"model": str(checkpoint)})
    with daemon.client() as first, daemon.client() as second:
        first.attach(key).close()
        second.attach(key).close()
        first.send(Release())
        second.expect(Release(), Done)
        assert isinstance(first.receive(), Done)


def test_release_without_a_lease_is_refused(daemon: DaemonProcess) -> None:
    with daemon.client() as engine:
        refused = engine.expect(Release(), Refused)
    assert refused == Refused(
        code="no-lease", message="this connection holds no generation: attach first"
    )


def test_engine_that_dies_while_its_release_waits_has_released(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    key = key_of({"model": str(checkpoint)})
    with daemon.client() as holder:
        holder.attach(key).close()
        with daemon.client() as leaver:
            leaver.attach(key).close()
            leaver.send(Release())
            daemon.until(
                lambda status: len(status.caches[0].engines) == 1, "its own lease is given up"
            )
    daemon.until(lambda status: status.caches[0].state == "released", "all have left")


def test_reload_brings_back_what_was_released(daemon: DaemonProcess, checkpoint: Path) -> None:
    key = key_of({"model": str(checkpoint)})
    with daemon.client() as engine:
        engine.attach(key).close()
        engine.expect(Release(), Done)
    with daemon.client("ctl") as tool:
        reply = tool.ask(Reload())
        while not isinstance(reply, ReloadReply):
            reply = tool.receive()
    assert [(o.cache, o.outcome, o.generation) for o in reply.outcomes] == [
        ("tiny/target", "loaded", 2)
    ]
    with daemon.client() as engine:
        assert engine.attach(key).ready.generation == 2


# ---- Rejoin


def test_rejoin_takes_exactly_the_generation_that_is_mapped(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    with daemon.client() as engine:
        ready = engine.attach(key_of({"model": str(checkpoint)})).ready
    daemon.until(lambda status: engines(status) == [], "the first lease has ended")
    with daemon.client() as engine:
        engine.expect(
            Rejoin(cache=ready.cache, generation=ready.generation, index_digest=ready.index_digest),
            Rejoined,
        )
        assert engines(daemon.status()) == [os.getpid()]
        for cache, generation, digest in [
            ("tiny/target", 2, ready.index_digest),
            ("tiny/target", 1, "0" * 64),
            ("none/target", 1, ready.index_digest),
        ]:
            refused = engine.expect(
                Rejoin(cache=cache, generation=generation, index_digest=digest), Refused
            )
            assert refused.code == "generation-gone"
    assert refused.message == (
        "none/target: generation 1 is not served any more, the daemon has no generation of it; "
        "the weights that the engine has mapped stay valid"
    )


def test_engine_of_a_replaced_generation_stays_visible(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    key = key_of({"model": str(checkpoint)})
    with daemon.client() as engine:
        handout = engine.attach(key)
        write_manifest(daemon.manifest, [model("tiny", checkpoint, x_segments=3)])
        with daemon.client("ctl") as tool:
            reply = tool.ask(Reload())
            while not isinstance(reply, ReloadReply):
                reply = tool.receive()
        (cache,) = daemon.status().caches
        assert (cache.generation, cache.segments) == (2, 3)
        assert [e.pid for e in cache.engines] == [os.getpid()]
        # Only the engine holds the old segments now: three of the new generation and its index are
        # the daemon's.
        until(
            lambda: sum("memfd" in target for target in daemon.descriptors()) == 4,
            "four, but for the input of the child that makes a digest",
        )
        assert len(os.pread(handout.segment_fds[0].fileno(), 3 * MIB, 0)) == 3 * MIB // 2
        handout.close()


# ---- Drop


def test_drop_is_refused_while_an_engine_holds_a_lease_unless_forced(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    key = key_of({"model": str(checkpoint)})
    assert daemon.manager
    with daemon.client() as engine, daemon.client("ctl") as tool:
        engine.attach(key).close()
        refused = tool.expect(Drop(cache="tiny/target"), Refused)
        assert refused.code == "in-use"
        assert refused.message == (
            f"tiny/target is in use by pid {os.getpid()}: stop the engine, or drop it with --force; "
            "weights that an engine has mapped stay valid"
        )
        assert daemon.status().caches[0].state == "ready"
        tool.expect(Drop(cache="tiny/target", force=True), Done)
        # A note of what is to stay unloaded.
        assert list(daemon.manager.stored) == ["wc1.aside.1"]
        assert not any("memfd" in target for target in daemon.descriptors())
        assert engine.expect(Attach(key=key), Released).cache == "tiny/target"
    (cache,) = daemon.status().caches
    assert (cache.state, cache.error) == (
        "released",
        "dropped: 'weightcachectl reload' brings it back",
    )


def test_drop_of_an_unknown_cache_names_the_known_ones(daemon: DaemonProcess) -> None:
    with daemon.client("ctl") as tool:
        refused = tool.expect(Drop(cache="tiny/draft"), Refused)
    assert refused == Refused(
        code="unknown-cache", message="no cache 'tiny/draft' on cpu0: it has tiny/target"
    )


def test_drop_of_what_is_being_loaded_is_refused(
    make_daemon: Launcher, checkpoint: Path, gate: Path
) -> None:
    daemon = make_daemon([model("tiny", checkpoint, x_gate=str(gate))]).launch()
    daemon.notified("weights")
    with daemon.client("ctl") as tool:
        refused = tool.expect(Drop(cache="tiny/target", force=True), Refused)
    assert refused == Refused(
        code="loading", message="tiny/target is being loaded (weights): drop it when that is over"
    )
    gate.write_bytes(b"")
    daemon.notified("READY=1")


# ---- engines that sleep


def parked(status: StatusReply) -> list[bool]:
    return [engine.parked for cache in status.caches for engine in cache.engines]


def test_status_shows_which_engine_sleeps(daemon: DaemonProcess, checkpoint: Path) -> None:
    key = key_of({"model": str(checkpoint)})
    with daemon.client() as engine, daemon.client() as awake:
        engine.attach(key).close()
        awake.attach(key).close()
        engine.expect(Parked(parked=True), Done)
        assert parked(daemon.status()) == [True, False]
        engine.expect(Parked(parked=False), Done)
        assert parked(daemon.status()) == [False, False]


def test_parked_engine_is_asked_for_the_room_of_a_dropped_cache(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    with daemon.client() as engine, daemon.client("ctl") as tool:
        engine.attach(key_of({"model": str(checkpoint)})).close()
        engine.expect(Parked(parked=True), Done)
        tool.send(Drop(cache="tiny/target"))
        assert engine.receive() == Unmap()
        # The answer waits for the reply.
        assert not select.select([tool.sock], [], [], 0.2)[0]
        engine.close()
        assert tool.receive() == Done()


def test_drop_with_an_engine_awake_asks_nobody(daemon: DaemonProcess, checkpoint: Path) -> None:
    key = key_of({"model": str(checkpoint)})
    with daemon.client() as engine, daemon.client() as awake, daemon.client("ctl") as tool:
        engine.attach(key).close()
        awake.attach(key).close()
        engine.expect(Parked(parked=True), Done)
        assert tool.expect(Drop(cache="tiny/target"), Refused).code == "in-use"
        engine.expect(Parked(parked=False), Done)


def test_parked_engines_let_go_of_the_generation_that_a_reload_replaces(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    key = key_of({"model": str(checkpoint)})
    with daemon.client() as engine, daemon.client() as awake, daemon.client("ctl") as tool:
        engine.attach(key).close()
        awake.attach(key).close()
        engine.expect(Parked(parked=True), Done)
        tool.send(Reload(force=True))
        assert engine.receive() == Unmap()
        engine.close()
        while not isinstance(tool.receive(), ReloadReply):
            pass
        status = daemon.status()
        assert (status.caches[0].generation, engines(status)) == (2, [os.getpid()])
        # It attaches again before it wakes, to the newest generation.
        with daemon.client() as again:
            handout = again.attach(key)
            assert handout.ready.generation == 2
            handout.close()


def test_engine_that_wakes_instead_keeps_its_lease(daemon: DaemonProcess, checkpoint: Path) -> None:
    with daemon.client() as engine, daemon.client("ctl") as tool:
        engine.attach(key_of({"model": str(checkpoint)})).close()
        engine.expect(Parked(parked=True), Done)
        tool.send(Drop(cache="tiny/target"))
        assert engine.receive() == Unmap()
        engine.expect(Parked(parked=False), Done)
        assert tool.receive() == Done()
