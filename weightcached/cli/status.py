"""`weightcachectl status`: ask the daemons and show what they answer. Nothing here loads more than
a socket needs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from weightcached import __version__
from weightcached.errors import ProtocolError, WeightcachedError, WeightCacheUnavailableError
from weightcached.system.paths import runtime_dir, socket_path
from weightcached.wire.connection import Connection, error_of
from weightcached.wire.messages import CacheStatus, Counters, Refused, Status, StatusReply

ANSWER_TIMEOUT_S = 5.0
# The names that `status --json` prints of each cache, in this order; other tools read them.
_CACHE_FIELDS = (
    "name", "role", "state", "generation", "source", "bytes", "segments", "tensors",
    "load_seconds", "phase", "done_bytes", "total_bytes", "error",
)  # fmt: skip
_HEAD = ("DEVICE", "CACHE", "STATE", "GEN", "SIZE", "ENGINES", "DETAIL")
_T = TypeVar("_T")


class Answers(NamedTuple):
    """What was heard: one reply per daemon, and what went wrong with the others, by device."""

    replies: list[StatusReply]
    errors: dict[str, WeightcachedError]


def devices_with_socket() -> list[str]:
    """Devices whose socket is in the runtime directory, whether or not a daemon listens on it. May
    be empty.
    """
    return sorted(path.stem for path in runtime_dir().glob("*.sock"))


def connect(device: str) -> Connection:
    """A connection to the daemon of `device`. Raises what Connection.connect() and socket_path()
    do.
    """
    software = f"weightcachectl {__version__}"
    return Connection.connect(
        socket_path(device), timeout_s=ANSWER_TIMEOUT_S, purpose="ctl", software=software
    )


def ask_status(device: str) -> StatusReply:
    """The state of one daemon. Raises WeightcachedError."""
    with connect(device) as connection:
        reply = connection.request(Status(), ANSWER_TIMEOUT_S)
    if isinstance(reply, Refused):
        raise error_of(reply)
    if not isinstance(reply, StatusReply):
        raise ProtocolError(
            f"the daemon of {device} answered Status with {type(reply).__name__}, expected StatusReply"
        )
    return reply


def ask_all(devices: Sequence[str]) -> Answers:
    """The state of several daemons, asked at the same time: one that hangs delays the others'
    answers by no more.
    """
    answers: dict[str, StatusReply | WeightcachedError] = {}

    def ask(device: str) -> None:
        answers[device] = _call_or_error(lambda: ask_status(device))

    threads = [threading.Thread(target=ask, args=(device,)) for device in devices[1:]]
    for thread in threads:
        thread.start()
    if devices:
        ask(devices[0])
    for thread in threads:
        thread.join()
    replies = [a for a in (answers[d] for d in devices) if isinstance(a, StatusReply)]
    return Answers(
        replies, {d: a for d in devices if isinstance(a := answers[d], WeightcachedError)}
    )


def _call_or_error(call: Callable[[], _T]) -> _T | WeightcachedError:
    try:
        return call()
    except WeightcachedError as e:
        return e


def no_daemon(directory: Path) -> WeightCacheUnavailableError:
    """What to say where no device is named and none has a socket."""
    return WeightCacheUnavailableError(
        f"no weightcached daemon has a socket in {directory}: weightcachectl start DEVICE"
    )


def as_json(replies: Sequence[StatusReply]) -> dict[str, Any]:
    """The document that `status --json` prints."""
    return {
        "devices": [
            {
                "device": reply.device,
                "pid": reply.pid,
                "state": reply.state,
                "since": reply.since,
                "caches": [_cache_as_json(cache, reply.counters) for cache in reply.caches],
            }
            for reply in replies
        ]
    }


def _cache_as_json(cache: CacheStatus, counters: Counters | None) -> dict[str, Any]:
    engines = [
        {"pid": engine.pid, "since": engine.since, "parked": engine.parked}
        for engine in cache.engines
    ]
    phases = counters.phase_seconds.get(cache.name, {}) if counters else {}
    return {name: getattr(cache, name) for name in _CACHE_FIELDS} | {
        "engines": engines,
        "load_phases": phases,
    }


def as_table(replies: Sequence[StatusReply], *, now: float | None = None) -> list[str]:
    """Lines of a table with one row per cache, or one for a daemon without any."""
    now = time.time() if now is None else now
    rows: list[tuple[str, ...]] = [_HEAD]
    for reply in replies:
        rows += [_row(reply.device, cache) for cache in reply.caches]
        if not reply.caches:
            detail = (
                f"no caches, daemon pid {reply.pid}, up {seconds_text(max(0.0, now - reply.since))}"
            )
            rows.append((reply.device, "-", reply.state, "-", "-", "-", detail))
    return columns(rows)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns, two spaces apart."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _row(device: str, cache: CacheStatus) -> tuple[str, ...]:
    generation = str(cache.generation) if cache.generation else "-"
    size = bytes_text(cache.bytes) if cache.bytes else "-"
    return (
        device,
        cache.name,
        cache.state,
        generation,
        size,
        _engines(cache),
        _detail(cache),
    )


def _engines(cache: CacheStatus) -> str:
    """How many engines map it; with those that sleep, e.g. `3, 2 parked`."""
    parked = sum(engine.parked for engine in cache.engines)
    return f"{len(cache.engines)}, {parked} parked" if parked else str(len(cache.engines))


def _detail(cache: CacheStatus) -> str:
    progress = progress_text(cache.phase, cache.done_bytes, cache.total_bytes, cache.eta_s)
    error = " ".join(cache.error.split())
    if cache.state == "loading":
        return progress
    if cache.state != "ready":
        return error
    done = (
        f"{cache.source} in {seconds_text(cache.load_seconds)}"
        if cache.source == "loaded"
        else cache.source
    )
    # A ready generation stays in service while its successor loads, or after that failed.
    return ", ".join(part for part in (done, progress, error) if part)


def progress_text(phase: str, done_bytes: int, total_bytes: int, eta_s: float | None) -> str:
    """E.g. `read weights, 1.0 of 15.0 GiB, 12 s left`; in MiB where all is less than 1 GiB."""
    parts = [phase] if phase else []
    if total_bytes:
        unit, shift = ("GiB", 30) if total_bytes >= 1 << 30 else ("MiB", 20)
        parts.append(f"{done_bytes / (1 << shift):.1f} of {total_bytes / (1 << shift):.1f} {unit}")
    if eta_s is not None:
        parts.append(f"{seconds_text(eta_s)} left")
    return ", ".join(parts)


def bytes_text(nbytes: int) -> str:
    """E.g. `14.9 GiB` or `512 KiB`."""
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.1f} {unit}"
    return f"{-(-nbytes // 1024)} KiB"


def seconds_text(seconds: float) -> str:
    """E.g. `0.4 s`, `59 s`, `12 min`, `3 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    for limit, per, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / per:.0f} {unit}"
    return f"{seconds / 86400:.0f} d" if seconds < 1e9 else "?"
