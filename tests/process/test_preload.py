"""`weightcached preload` with real daemons, and stand-ins for vLLM's parser and loader."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fakes.checkpoints import key_of
from tests.fakes.client import Client
from tests.fakes.daemon import (
    BOUND_S,
    LOADER,
    ROOT,
    ManagerSocket,
    end_tree,
    environment,
    makes_digests,
    state_of,
    until,
)
from weightcached.errors import WeightcachedError
from weightcached.wire.connection import Connection
from weightcached.wire.messages import CacheStatus, Drop, Reload, ReloadReply, Status, StatusReply

PARSER = f"{shlex.quote(sys.executable)} -m tests.fakes.parser_child"


class Preload:
    """One command in its own process; `ready` is its READY line."""

    def __init__(
        self, directory: Path, *arguments: str, cwd: Path = ROOT, env: dict[str, str] | None = None
    ) -> None:
        self.runtime = directory / "run"
        self.log_path = directory / "preload.log"
        self.ready = ""
        command = [sys.executable, "-m", "weightcached", "preload", *arguments]
        command += ["--weight-cache-socket-dir", str(self.runtime)]
        command += ["--loader-command", LOADER, "--parser-command", PARSER]
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=cwd,
                env=environment(CUDA_VISIBLE_DEVICES="", **(env or {})),
                text=True,
            )

    def start(self) -> Preload:
        """Wait for the READY line."""
        assert self.process.stdout
        self.ready = self.process.stdout.readline()
        assert self.ready, f"no READY line: {self.log[-3000:]}"
        return self

    def loads(self) -> None:
        """Wait until the first rank's loader is at its gate."""

        def at_gate() -> bool:
            status = self.status("cpu0")
            return status is not None and [cache.phase for cache in status.caches] == ["weights"]

        until(at_gate, "loading")

    def status(self, device: str) -> StatusReply | None:
        """The daemon's status, None if there is no daemon."""
        with contextlib.suppress(WeightcachedError):
            path = self.runtime / f"{device}.sock"
            with Connection.connect(path, timeout_s=BOUND_S, purpose="ctl") as connection:
                reply = connection.request(Status(), BOUND_S)
            assert isinstance(reply, StatusReply)
            return reply
        return None

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def cache(self, device: str) -> CacheStatus:
        status = self.status(device)
        assert status
        (cache,) = status.caches
        return cache

    def pid(self, device: str) -> int:
        status = self.status(device)
        assert status
        return status.pid

    def children(self) -> list[psutil.Process]:
        children: list[Any] = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if not makes_digests(child.pid)]

    def kept(self) -> int:
        """How many segments and indexes the command itself holds."""
        count = 0
        for fd in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                # The fake loader's names.
                count += os.readlink(fd).startswith(
                    ("/memfd:segment-", "/memfd:index", "/memfd:weightcached-index")
                )
        return count

    def wait(self) -> int:
        return self.process.wait(BOUND_S)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait()

    def close(self) -> None:
        end_tree(self.process)
        assert self.process.stdout
        self.process.stdout.close()


Launcher = Callable[..., Preload]


@pytest.fixture
def launch(short_tmp: Path) -> Iterator[Launcher]:
    """Starts commands that are ended with the test."""
    with contextlib.ExitStack() as stack:

        def make(*arguments: str, **options: Any) -> Preload:
            preload = Preload(short_tmp, *arguments, **options)
            stack.callback(preload.close)
            return preload

        yield make


def gone(processes: list[psutil.Process]) -> None:
    """Wait until none of the processes runs."""
    _, alive = psutil.wait_procs(processes, timeout=BOUND_S)
    assert not alive


def test_one_daemon_for_each_rank_and_one_ready_line_when_all_serve(
    launch: Launcher, checkpoint: Path
) -> None:
    preload = launch(
        "--model", str(checkpoint), "--tensor-parallel-size", "2", "--dtype", "float16"
    ).start()
    assert (
        preload.ready == f"READY checkpoint: 2 ranks on cpu0, cpu1, sockets in {preload.runtime}\n"
    )
    for rank in range(2):
        assert preload.cache(f"cpu{rank}").state == "ready"
        key = key_of(
            {"model": str(checkpoint), "tensor_parallel_size": 2, "dtype": "float16"}, rank=rank
        )
        with Client.welcome(preload.runtime / f"cpu{rank}.sock") as engine:
            engine.attach(key).close()
    until(lambda: len(preload.children()) == 2, "two daemons, and no loader")
    assert preload.stop() == 0
    assert preload.process.stdout
    assert preload.process.stdout.read() == ""


def test_ready_waits_for_the_load(launch: Launcher, checkpoint: Path, gate: Path) -> None:
    preload = launch("--model", str(checkpoint), "--x-gate", str(gate))
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.append(preload.start().ready))
    reader.start()
    preload.loads()
    assert lines == []
    gate.write_bytes(b"")
    reader.join(BOUND_S)
    assert lines == [f"READY checkpoint: 1 rank on cpu0, sockets in {preload.runtime}\n"]


def test_manager_above_is_told_once_that_all_serve(launch: Launcher, checkpoint: Path) -> None:
    manager = ManagerSocket(f"@weightcached-above-{os.getpid()}")
    try:
        preload = launch(
            "--model", str(checkpoint), "--tensor-parallel-size", "2", env={"NOTIFY_SOCKET": manager.address}
        )  # fmt: skip
        ended = lambda: preload.process.poll() is not None  # noqa: E731
        assert manager.wait_for("READY=1", ended=ended)
        preload.start()
        assert [preload.cache(f"cpu{rank}").state for rank in range(2)] == ["ready", "ready"]
        assert preload.stop() == 0
        # What the daemons tell their own manager, which is the command, goes no further.
        assert manager.states == ["READY=1"]
    finally:
        manager.close()


@pytest.mark.slow
def test_with_a_directory_for_snapshots_a_second_start_loads_nothing(
    launch: Launcher, checkpoint: Path
) -> None:
    spawns, kept = checkpoint.parent / "spawns", checkpoint.parent / "snapshots"
    arguments = ["--model", str(checkpoint), "--tensor-parallel-size", "2"]
    arguments += ["--x-spawns", str(spawns), "--weight-cache-snapshots", str(kept)]
    first = launch(*arguments).start()
    assert [first.cache(f"cpu{rank}").source for rank in range(2)] == ["loaded"] * 2
    for rank in range(2):
        until(partial(is_written, first, f"cpu{rank}"), "a snapshot of each rank")
    assert first.stop() == 0
    second = launch(*arguments).start()
    assert [second.cache(f"cpu{rank}").source for rank in range(2)] == ["restored"] * 2
    assert len(spawns.read_text().splitlines()) == 2
    # Each rank is on its own: one that lost its snapshot loads, the other does not.
    assert second.stop() == 0
    shutil.rmtree(kept / "cpu1")
    third = launch(*arguments).start()
    assert [third.cache(f"cpu{rank}").source for rank in range(2)] == ["restored", "loaded"]


def is_written(preload: Preload, device: str) -> bool:
    return preload.cache(device).snapshot == "written"


def test_relative_model_is_that_of_the_callers_directory(
    launch: Launcher, checkpoint: Path
) -> None:
    preload = launch("--model", "checkpoint", cwd=checkpoint.parent)
    assert preload.start().cache("cpu0").state == "ready"


def test_rank_that_cannot_start_ends_the_others_and_gives_its_status(
    launch: Launcher, checkpoint: Path
) -> None:
    runtime = checkpoint.parent / "run"
    runtime.mkdir(mode=0o700)
    with open(runtime / "cpu1.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        preload = launch(
            "--model", str(checkpoint), "--tensor-parallel-size", "2", "--x-steps", "100"
        )
        assert preload.wait() == 75
    assert not list(runtime.glob("*.sock"))
    assert not list(runtime.glob("preload-*"))
    assert "daemon of cpu1 ended" in preload.log
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if str(runtime) in (p.info["cmdline"] or ())
    ]


def test_rank_killed_in_start_up_gives_a_shells_status(
    launch: Launcher, checkpoint: Path, gate: Path
) -> None:
    preload = launch("--model", str(checkpoint), "--x-gate", str(gate))
    preload.loads()
    children = preload.children()
    os.kill(preload.pid("cpu0"), signal.SIGKILL)
    assert preload.wait() == 128 + signal.SIGKILL
    gone(children)
    assert not list(preload.runtime.glob("*.sock")), "the killed daemon's socket is removed too"


def test_failed_load_gives_the_daemons_status(launch: Launcher, checkpoint: Path) -> None:
    assert launch("--model", str(checkpoint), "--x-fault", "exit-3-silently-in-packing").wait() == 1


def test_rank_that_dies_later_is_restarted_and_adopts(
    launch: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    spawns = short_tmp / "spawns"
    preload = launch(
        "--model",
        str(checkpoint),
        "--tensor-parallel-size",
        "2",
        "--x-spawns",
        str(spawns),
        "--x-segments",
        "5",
    ).start()
    other = preload.pid("cpu1")
    for _ in range(3):
        old = preload.pid("cpu0")
        os.kill(old, signal.SIGKILL)
        until(partial(answers, preload, other_than=old), "the restarted daemon serves")
        cache = preload.cache("cpu0")
        assert (cache.state, cache.source, cache.generation, cache.segments) == (
            "ready",
            "adopted",
            1,
            5,
        )
        with Client.welcome(preload.runtime / "cpu0.sock") as engine:
            engine.attach(
                key_of({"model": str(checkpoint), "tensor_parallel_size": 2}, rank=0)
            ).close()
    assert preload.pid("cpu1") == other
    assert len(spawns.read_text().splitlines()) == 2, "each rank was loaded once"
    assert preload.stop() == 0


def answers(preload: Preload, *, other_than: int) -> bool:
    status = preload.status("cpu0")
    return status is not None and status.pid != other_than and status.state == "ready"


def test_descriptors_of_what_was_replaced_or_dropped_are_let_go(
    launch: Launcher, checkpoint: Path
) -> None:
    preload = launch("--model", str(checkpoint), "--x-segments", "5").start()
    assert preload.kept() == 6
    with Client.welcome(preload.runtime / "cpu0.sock", "ctl") as client:
        client.send(Reload(force=True))
        while not isinstance(client.receive(), ReloadReply):
            pass
        assert client.status().caches[0].generation == 2
        assert preload.kept() == 6
        client.ask(Drop(cache="checkpoint/target"))
    assert preload.kept() == 0


@pytest.mark.slow
def test_rank_that_cannot_come_back_ends_the_command_with_its_status(
    launch: Launcher, checkpoint: Path
) -> None:
    preload = launch("--model", str(checkpoint), "--tensor-parallel-size", "2").start()
    with open(preload.runtime / "cpu0.lock", "rb") as lock:
        # Stopped, so that it does not start the daemon again before we have the lock.
        preload.process.send_signal(signal.SIGSTOP)
        until(lambda: state_of(preload.process.pid) in "tT", "it is stopped")
        os.kill(preload.pid("cpu0"), signal.SIGKILL)
        fcntl.flock(lock, fcntl.LOCK_EX)
        children = preload.children()
        preload.process.send_signal(signal.SIGCONT)
        assert preload.wait() == 75
    gone(children)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_all_and_leaves_nothing(
    launch: Launcher, checkpoint: Path, number: signal.Signals
) -> None:
    preload = launch("--model", str(checkpoint), "--tensor-parallel-size", "2").start()
    children = preload.children()
    assert preload.stop(number) == 0
    gone(children)
    # The resident files now say that nothing will come back.
    left = sorted(path.name for path in preload.runtime.iterdir())
    assert left == ["cpu0.lock", "cpu0.resident", "cpu1.lock", "cpu1.resident"]


def test_signal_in_start_up_stops_all(launch: Launcher, checkpoint: Path, gate: Path) -> None:
    preload = launch("--model", str(checkpoint), "--x-gate", str(gate))
    preload.loads()
    children = preload.children()
    assert len(children) == 2, "the daemon and its loader: there is nothing to digest yet"
    assert preload.stop() == 0
    gone(children)


def test_killed_command_takes_its_children_along(
    launch: Launcher, checkpoint: Path, gate: Path
) -> None:
    preload = launch("--model", str(checkpoint), "--x-gate", str(gate))
    preload.loads()
    children = preload.children()
    assert preload.stop(signal.SIGKILL) == -signal.SIGKILL
    gone(children)
    assert list(preload.runtime.glob("preload-*"))
    again = launch("--model", str(checkpoint)).start()
    assert len(list(preload.runtime.glob("preload-*"))) == 1, (
        "what the killed command left is removed"
    )
    assert again.stop() == 0


def test_parsers_words_and_status_are_the_commands(launch: Launcher, checkpoint: Path) -> None:
    preload = launch("--model", str(checkpoint), "--dtype", "refused")
    assert preload.wait() == 2
    assert preload.log == "parser: error: argument --dtype: invalid value\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--load-format", "ipc_cache"],
            "--load-format ipc_cache would attach to the cache that this command fills: leave it out here and give it "
            "to 'vllm serve'",
        ),
        (
            ["--weight-cache-master-port", "7000", "--weight-cache-draft-master-port", "7000"],
            "--weight-cache-draft-master-port 7000 is the target's port too: choose another",
        ),
        (
            ["--weight_cache_master_port", "29501"],
            "--weight-cache-master-port 29501 is the engine's --master-port too: choose another",
        ),
        (
            ["--enable-eplb", "true"],
            "enable_eplb moves experts while serving, cached weights cannot move: leave it out",
        ),
        (
            ["--nnodes", "3"],
            "nnodes 3 does not divide the 1 ranks of this model: choose one that does",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_status_2(
    launch: Launcher, checkpoint: Path, arguments: list[str], said: str
) -> None:
    preload = launch("--model", str(checkpoint), *arguments)
    assert preload.wait() == 2
    (line,) = preload.log.splitlines()
    assert line.endswith(f" ERROR {said}")


def test_model_must_be_named(launch: Launcher) -> None:
    preload = launch()
    assert preload.wait() == 2
    assert "--model is missing: expected a Hub id or the directory of a checkpoint" in preload.log
