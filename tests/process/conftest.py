"""Fixtures of the tests with real processes and sockets."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.daemon import ROOT, DaemonProcess, environment, model, print_log


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name."""
    directory = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def checkpoint(short_tmp: Path) -> Path:
    return write_checkpoint(short_tmp / "checkpoint")


Launcher = Callable[..., DaemonProcess]


@pytest.fixture
def make_daemon(short_tmp: Path) -> Iterator[Launcher]:
    """Makes daemons that end with the test in every case."""
    with contextlib.ExitStack() as stack:
        # The log of all of them, once they have ended.
        stack.callback(print_log, short_tmp / "daemon.log")

        def make(models: list[dict[str, Any]] | None = None, **options: Any) -> DaemonProcess:
            daemon = DaemonProcess(short_tmp, models, **options)
            stack.callback(daemon.close)
            return daemon

        yield make


@pytest.fixture
def daemon(make_daemon: Launcher, checkpoint: Path) -> DaemonProcess:
    """A daemon of cpu0 that serves the model "tiny"."""
    return make_daemon([model("tiny", checkpoint)]).start()


@pytest.fixture
def gate(short_tmp: Path) -> Path:
    """A FIFO for which a loader waits, as its x_gate: write to it and the loader goes on."""
    path = short_tmp / "gate"
    os.mkfifo(path)
    return path


class Engine:
    """An engine process that has mapped the model of `checkpoint`."""

    def __init__(self, daemon: DaemonProcess, checkpoint: Path, *flags: str) -> None:
        self.daemon_pid = daemon.pid
        command = [
            sys.executable,
            "-m",
            "tests.fakes.engine",
            str(daemon.socket),
            str(checkpoint),
            *flags,
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment()
        )

    def attached(self) -> int:
        """Wait until it has mapped everything. Returns the bytes mapped."""
        assert self.process.stdout
        word, nbytes = self.process.stdout.readline().split()
        assert word == b"attached"
        return int(nbytes)

    def digest(self) -> bytes:
        """The sha256 of its mapped bytes, as it reads them now."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    with contextlib.ExitStack() as stack:

        def make(daemon: DaemonProcess, checkpoint: Path, *flags: str) -> Engine:
            engine = Engine(daemon, checkpoint, *flags)
            stack.callback(engine.close)
            return engine

        yield make
