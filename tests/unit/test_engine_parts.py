"""Parts of a supervisor, each alone: questions, the nursery, the public socket, turns, engines that end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.daemon import BOUND_S, free_port, until
from weightcached.checkpoint.digests import DigestCache
from weightcached.config.engines import Listen
from weightcached.config.manifest import load_manifest
from weightcached.engine import control, endpoint, starting, supervisor
from weightcached.engine.plan import make_plan
from weightcached.engine.records import record_of
from weightcached.engine.running import Running, end_remains
from weightcached.engine.states import Phase
from weightcached.engine.supervisor import Options, Supervisor
from weightcached.engine.tree import Tree, has_ended, stat_of
from weightcached.engine.turns import DeviceTurns
from weightcached.errors import EngineError
from weightcached.system.fds import OwnedFd
from weightcached.system.waits import readable
from weightcached.wire.framing import listen

MANIFEST = """
version: 1
models:
  - {name: one, devices: [cpu0], engine: {model: org/one}}
  - {name: other, devices: DEVICES, engine: {model: org/other}}
engines:
  - {name: chat, model: one, listen: "127.0.0.1:8000"}
  - {name: code, model: other, listen: "127.0.0.1:8001"}
"""


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """For sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="wc") as directory:
        yield Path(directory)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, timeout=BOUND_S))


def written(directory: Path, devices: str = "[cpu0]") -> Path:
    path = directory / "manifest.yaml"
    path.write_text(MANIFEST.replace("DEVICES", devices))
    return path


# ---- questions


def test_question_ends_with_its_link(short_tmp: Path) -> None:
    """A swap would else wait for the answer of an engine that is ended meanwhile, until its deadline."""

    async def never(
        command: str, arguments: dict[str, Any], peer: control.Peer
    ) -> tuple[dict[str, Any], int | None]:
        await asyncio.Event().wait()
        raise AssertionError("not reached")

    async def test() -> None:
        server = control.ControlServer(listen(short_tmp / "sock"), never)
        link = control.Link(short_tmp / "sock")
        asked = asyncio.create_task(link.ask("swap", timeout_s=3600))
        await asyncio.sleep(0)
        link.close()
        with pytest.raises(EngineError, match="no answer: the connection was closed"):
            await asked
        server.close()

    run(test())


def test_link_that_is_closed_at_once_leaves_no_socket(short_tmp: Path) -> None:
    async def test() -> None:
        with listen(short_tmp / "sock"):
            link = control.Link(short_tmp / "sock")
            link.close()
            with pytest.raises(EngineError):
                await link.ask("status", timeout_s=BOUND_S)
            assert link._sock.fileno() < 0

    run(test())


# ---- the nursery


@pytest.fixture
def importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A module whose import does not end; the pids of the nurseries that import it."""
    (tmp_path / "takes_for_ever.py").write_text("import time\ntime.sleep(3600)\n")
    pids: list[int] = []
    start = starting.start_process

    def noted(*arguments: Any) -> int:
        pids.append(start(*arguments))
        return pids[-1]

    monkeypatch.setattr(starting, "start_process", noted)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return pids


def nursery() -> starting.Nursery:
    return starting.Nursery(sys.executable, "takes_for_ever", dict(os.environ))


def test_nursery_that_is_given_up_while_it_imports_keeps_nobody_waiting(
    importing: list[int],
) -> None:
    async def test() -> None:
        given_up = nursery()
        asked = asyncio.create_task(given_up.refusal())
        await asyncio.sleep(0)
        given_up.close()
        assert "the nursery ended" in await asked
        # The number of its socket is another's now, which must be waited on as any.
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.send(b"x")
            await readable(ours.fileno())

    run(test())
    _, status = os.waitpid(importing[0], 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def test_nursery_that_is_too_slow_forks_no_engine_later(
    importing: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "_IMPORT_TIMEOUT_S", 0.01)

    async def test() -> None:
        slow = nursery()
        assert "the nursery ended" in await slow.refusal()
        _, status = await asyncio.to_thread(os.waitpid, importing[0], 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        slow.close()

    run(test())


# ---- the public socket


def test_socket_is_kept_only_for_its_own_address() -> None:
    port = free_port()
    with endpoint.bind(Listen(host="127.0.0.1", port=port)) as sock:
        fd = OwnedFd(os.dup(sock.fileno()))
        with fd:
            assert endpoint.is_at(fd, Listen(host="127.0.0.1", port=port))
            assert endpoint.is_at(fd, Listen(host="localhost", port=port))
            wider = Listen(host="0.0.0.0", port=port)
            assert not endpoint.is_at(fd, wider)
            assert endpoint.is_at(fd, wider, any_host=True)
            assert not endpoint.is_at(fd, Listen(host="127.0.0.1", port=port + 1), any_host=True)
            assert not endpoint.is_at(fd, Listen(host="no.such.host.invalid", port=port))
            assert not endpoint.is_at(fd, Listen(path="/nonexistent"))


# ---- turns


def turns(manifest: Path, name: str) -> DeviceTurns:
    read = load_manifest(manifest)
    return DeviceTurns(*read.service(name), read, manifest.parent)


def test_service_on_all_devices_has_its_turn_alone(tmp_path: Path) -> None:
    manifest, seen = written(tmp_path, "all"), list[str]()

    async def take(name: str, began: asyncio.Event) -> None:
        async with turns(manifest, name).held():
            began.set()
            seen.append(f"{name} begins")
            await asyncio.sleep(0.1)
            seen.append(f"{name} ends")

    async def test() -> None:
        for first, second in (("chat", "code"), ("code", "chat")):
            began = asyncio.Event()
            task = asyncio.create_task(take(first, began))
            await began.wait()
            await take(second, asyncio.Event())
            await task
            assert seen == [f"{x} {y}" for x in (first, second) for y in ("begins", "ends")]
            seen.clear()

    run(test())


def test_neighbour_that_is_slow_is_not_taken_for_asleep(short_tmp: Path) -> None:
    manifest, home = written(short_tmp), short_tmp / "engines/code"
    home.mkdir(parents=True)

    async def slowly(
        command: str, arguments: dict[str, Any], peer: control.Peer
    ) -> tuple[dict[str, Any], int | None]:
        await asyncio.sleep(3)
        return {"awake": True, "share": 0.5, "used": 0.0}, None

    async def test() -> None:
        server = control.ControlServer(listen(home / "service.sock"), slowly)
        assert await turns(manifest, "chat").anybody_awake()
        server.close()

    run(test())


# ---- engines that end


class Ending:
    """An engine that dies right after each answer."""

    def __init__(self, owner: Supervisor) -> None:
        self.owner = owner
        self.ended = 0
        self.asked: list[str] = []

    async def ask(self, command: str, *, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        self.asked.append(command)
        self.owner._end_failed(1, "its first process ended")
        return {"serving": True, "sleeps": True, "asleep": False}

    async def end(self) -> float:
        self.ended += 1
        # As long as it takes.
        await asyncio.sleep(0)
        return 0.0

    async def bury(self) -> None:
        pass


def supervised(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    def fail(status: int) -> None:
        pytest.fail(f"internal fault, it would end with status {status}")

    monkeypatch.setattr(os, "_exit", fail)
    manifest = written(directory)
    home = directory / "engines/chat"
    home.mkdir(parents=True)
    spec, model = load_manifest(manifest).service("chat")
    made = Supervisor(Options("chat", manifest), spec, model, home)
    # Nothing starts another one meanwhile.
    made.service.stopping = True
    made._begun = True
    return made


@pytest.mark.parametrize("taken_back", [False, True])
def test_engine_that_dies_after_its_answer_is_ended_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken_back: bool
) -> None:
    async def test() -> None:
        made = supervised(tmp_path, monkeypatch)
        made.service.started(1, number=1)
        made.service.awake = False
        engine: Any = Ending(made)
        made._running[1] = engine
        if taken_back:
            engine.record = type("Record", (), {"number": 1, "facts": {"asleep": False}})
            await made._examine(engine.record)
        else:
            await made._until_ready(1)
        assert made.service.engines[1].phase is Phase.ENDING
        while made._tasks:
            await asyncio.gather(*made._tasks)
        assert (engine.asked, engine.ended, made._running) == (["ready"], 1, {})

    run(test())


def test_nothing_is_started_once_all_is_being_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the third failure, when the next start falls due while the engines are ended."""

    async def test() -> None:
        made = supervised(tmp_path, monkeypatch)
        made.service.stopping = False
        made._ended.set()
        with contextlib.suppress(AttributeError):
            made._step()
        assert (made.service.engines, made._tasks) == ({}, set())

    run(test())


# ---- processes


def test_engine_that_starts_says_which_processes_it_has_by_now(tmp_path: Path) -> None:
    """A worker of it may map weights already, and would count as nobody's."""

    async def test() -> None:
        script = "read _; sleep 1000 & echo; wait"
        head = subprocess.Popen(
            ["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )  # fmt: skip
        try:
            record = record_of(1, "", head.pid, {})
            engine = Running(record, tmp_path, tmp_path / "fence", lambda reason: None)
            assert engine.processes() == [head.pid]
            assert head.stdin
            assert head.stdout
            head.stdin.write(b"\n")
            head.stdin.flush()
            head.stdout.readline()
            assert len(engine.processes()) == 2
            engine.unwatch()
        finally:
            os.killpg(head.pid, signal.SIGKILL)
            head.communicate()

    run(test())


# An engine whose first process has ended, and left a child in its session; it prints its number. A
# thread of the child, or the child's parent, ends with standard input.
DYING_CHILD = """
import ctypes, os, sys, threading
if not os.fork():
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()
    print(os.getpid(), flush=True)
    ctypes.CDLL(None).pthread_exit(None)
"""
DEAD_CHILD = """
import os, sys
if not os.fork():
    child = os.fork()
    if not child:
        os._exit(0)
    os.setsid()
    print(child, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("reason", [errno.ESRCH, errno.EINVAL])
def test_number_that_is_only_a_sessions_by_now_is_no_process(
    monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    """As older kernels say it of an engine's first process, while others of the engine are left."""
    open_process = os.pidfd_open
    head = subprocess.Popen(
        ["sh", "-c", "exec 3<&0; cat <&3 & echo $!"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert head.stdout
    child = int(head.stdout.readline())
    head.wait()

    def of_older_kernel(pid: int) -> int:
        if pid == head.pid:
            raise OSError(reason, os.strerror(reason))
        return open_process(pid)

    monkeypatch.setattr(os, "pidfd_open", of_older_kernel)
    found = Tree(head.pid)
    assert list(found.members) == [child]
    found.close()
    head.communicate()


@pytest.mark.parametrize("script", [DYING_CHILD, DEAD_CHILD])
def test_remains_of_an_engine_are_ended_to_the_last_thread_and_zombies_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, script: str
) -> None:
    """/proc calls both dead: one whose other threads may use the device, and one that only its parent
    can remove.
    """
    head = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    record = record_of(1, "", head.pid, {})
    assert head.stdout
    child = int(head.stdout.readline())
    head.wait()
    with OwnedFd(os.pidfd_open(child)) as pidfd:
        until(lambda: getattr(stat_of(child, dead_too=True), "state", "") == "Z", "it looks dead")
        dying = script is DYING_CHILD
        assert has_ended(pidfd) is not dying
        run(end_remains(record))
        assert has_ended(pidfd)
    assert (f"ending its remaining processes: [{child}]" in caplog.text) is dying
    head.communicate()


def test_start_that_falls_due_between_two_looks_at_the_clock_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        made = supervised(tmp_path, monkeypatch)
        made.service.stopping = False
        made.service.started(1)
        made.service.failed(1, "no room", now_s := time.monotonic())
        made.service.gone(1)
        due_s = made.service.wake_time_s(now_s)
        assert due_s is not None
        looks = itertools.chain([due_s - 0.001], itertools.repeat(due_s + 0.001))
        monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: next(looks)))
        made._step()
        assert not made.service.engines
        assert made._timer
        made._timer.cancel()

    run(test())


# ---- what a start remembers

RANKS = {"0": {"free_bytes": 2, "external_bytes": 3, "sources": ["zero_copy"]}}


def test_what_is_remembered_leaves_the_cache_of_digests_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who measures first makes the directory of both: its group may not write to it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home/cache"))
    spec, model = load_manifest(written(tmp_path)).service("chat")
    before = os.umask(0o002)
    try:
        make_plan(spec, model, None).learn({"kv_cache_bytes": 1, "ranks": RANKS})
    finally:
        os.umask(before)
    assert make_plan(spec, model, None).remembered["ranks"] == RANKS
    key = (1, 2, 3, 4, 5)
    DigestCache.of_user().put(key, bytes(16))
    assert DigestCache.of_user().get(key) == bytes(16)


def test_without_a_home_nothing_is_remembered_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, model = load_manifest(written(tmp_path)).service("chat")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    make_plan(spec, model, None).learn({"kv_cache_bytes": 1, "ranks": RANKS})
    assert os.listdir(here) == []


def test_engine_that_did_not_measure_leaves_what_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size is the remembered one, or one that was measured while it started parked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spec, model = load_manifest(written(tmp_path)).service("chat")
    make_plan(spec, model, None).learn({"kv_cache_bytes": 10, "ranks": RANKS})
    plan = make_plan(spec, model, None)
    plan.learn({"kv_cache_bytes": 9, "ranks": {}})
    # A standby is to have what this one has.
    assert plan.kv_cache_bytes == 9
    for remembered in (plan.remembered, make_plan(spec, model, None).remembered):
        assert (remembered["kv_cache_bytes"], remembered["ranks"]) == (10, RANKS)
