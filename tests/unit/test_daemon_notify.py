"""The messages to the manager, word for word."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightcached.daemon.caches import Cache
from weightcached.daemon.notify import Notifier, describe
from weightcached.system.notify import watchdog_period_s

GIB = 2**30


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield sock


def test_progress_extends_the_timeout_and_shows_phase_size_and_time(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [50.0]
    monkeypatch.setattr("weightcached.daemon.caches.time.monotonic", lambda: now_s[0])
    notifier, cache = Notifier(extend_s=90), Cache("llama-8b/target", "target")
    load = cache.begin_load()
    load.advance("weights", 0, 16 * GIB)
    now_s[0] += 4
    load.advance("weights", 4 * GIB, 16 * GIB)
    notifier.progress(cache, load)
    assert manager.recv(4096).decode() == (
        "EXTEND_TIMEOUT_USEC=90000000\nSTATUS=loading llama-8b/target: weights, 4.0 of 16.0 GiB, 12 s left"
    )
    notifier.close()


def test_progress_within_a_second_is_one_line_but_for_a_new_phase(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightcached.daemon.notify.time.monotonic", lambda: 50.0)
    notifier, cache = Notifier(extend_s=1), Cache("m/target", "target")
    load = cache.begin_load()
    for phase, done in [("weights", 1), ("weights", 2), ("proof", 0)]:
        load.advance(phase, done, 10)
        notifier.progress(cache, load)
    notifier.status("end")
    said = [
        manager.recv(4096).decode().rpartition("STATUS=")[2].split(", 0.0")[0] for _ in range(3)
    ]
    assert said == ["loading m/target: weights", "loading m/target: proof", "end"]
    notifier.close()


def test_text_is_one_ascii_line(manager: socket.socket) -> None:
    notifier = Notifier(extend_s=1)
    asyncio.run(notifier.ready("läuft\nREADY=0"))
    assert manager.recv(4096) == b"READY=1\nSTATUS=l?uft READY=0"
    notifier.close()


def test_long_text_does_not_lose_what_stands_before_it(manager: socket.socket) -> None:
    notifier = Notifier(extend_s=1)
    asyncio.run(notifier.ready("x" * 10_000))
    assert manager.recv(4096) == b"READY=1\nSTATUS=" + b"x" * 3500
    notifier.close()


def test_phase_without_bytes_is_named_alone() -> None:
    cache = Cache("m/target", "target")
    load = cache.begin_load()
    load.advance("configuring", 0, 0)
    assert describe("m/target", load) == "m/target: configuring"


@pytest.mark.parametrize(
    ("environ", "period_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_watchdog_is_fed_twice_as_often_as_asked(
    environ: dict[str, str], period_s: float | None
) -> None:
    assert watchdog_period_s(environ) == period_s
