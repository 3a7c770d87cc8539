"""Fixtures of the tests with real processes and sockets."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.daemon import DaemonProcess


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
    """Makes daemons that are ended with the test, whatever happened to them."""
    with contextlib.ExitStack() as stack:

        def make(models: list[dict[str, Any]] | None = None, **options: Any) -> DaemonProcess:
            daemon = DaemonProcess(short_tmp, models, **options)
            stack.callback(daemon.close)
            return daemon

        yield make
