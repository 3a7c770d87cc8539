"""`weightcachectl status`: ask the daemons and show their answers. Imports little."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from msgspec import to_builtins

from weightcached import __version__
from weightcached.cli.text import columns
from weightcached.errors import WeightcachedError, WeightCacheUnavailableError
from weightcached.system.paths import socket_path
from weightcached.system.text import bytes_text, progress_text, seconds_text
from weightcached.wire.connection import Connection
from weightcached.wire.messages import (
    CacheStatus,
    Counters,
    EngineStatus,
    OldGeneration,
    StatusReply,
)
from weightcached.wire.requests import ask_status

ANSWER_TIMEOUT_S = 5.0
SOFTWARE = f"weightcachectl {__version__}"
# The names that `status --json` prints of each cache, in this order; other tools read them.
_CACHE_FIELDS = (
    "name", "role", "state", "generation", "source", "bytes", "segments", "tensors",
    "load_seconds", "phase", "done_bytes", "total_bytes", "error", "retry_at", "warning",
    "snapshot", "snapshot_bytes", "resident", "label", "live", "rolled_back_at",
)  # fmt: skip
_HEAD = ("DEVICE", "CACHE", "STATE", "GEN", "SIZE", "ENGINES", "DETAIL")
_T = TypeVar("_T")


class Answers(NamedTuple):
    """The replies, one per daemon, and the errors of the others, by device."""

    replies: list[StatusReply]
    errors: dict[str, WeightcachedError]


def connect(device: str) -> Connection:
    """A connection to a device's daemon. Raises as Connection.connect() and socket_path() do."""
    return Connection.connect(
        socket_path(device), timeout_s=ANSWER_TIMEOUT_S, purpose="ctl", software=SOFTWARE
    )


def ask_device(device: str) -> StatusReply:
    """The state of one daemon. Raises WeightcachedError."""
    return ask_status(socket_path(device), timeout_s=ANSWER_TIMEOUT_S, software=SOFTWARE)


def ask_all(devices: Sequence[str]) -> Answers:
    """The states of several daemons, asked at the same time, so that one that hangs delays none."""
    answers: dict[str, StatusReply | WeightcachedError] = {}

    def ask(device: str) -> None:
        answers[device] = _call_or_error(lambda: ask_device(device))

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
    """The error if no device is named and none has a socket."""
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
                "budget": reply.budget,
                "caches": [_cache_as_json(cache, reply.counters) for cache in reply.caches],
                "old_generations": [to_builtins(old) for old in reply.old_generations],
            }
            for reply in replies
        ]
    }


def _cache_as_json(cache: CacheStatus, counters: Counters | None) -> dict[str, Any]:
    engines = [to_builtins(engine) for engine in cache.engines]
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
        rows += [_row(reply.device, cache, now) for cache in reply.caches]
        rows += [_old_row(reply.device, old) for old in reply.old_generations]
        if not reply.caches:
            detail = (
                f"no caches, daemon pid {reply.pid}, up {seconds_text(max(0.0, now - reply.since))}"
            )
            rows.append((reply.device, "-", reply.state, "-", "-", "-", detail))
    return [*columns(rows), *(line for reply in replies if (line := _sums(reply)))]


def _sums(reply: StatusReply) -> str:
    """Bytes on the device, in snapshots and evicted; "" for a daemon without budget or snapshots."""
    held = sum(cache.bytes for cache in reply.caches)
    held += sum(old.bytes for old in reply.old_generations)
    written = sum(cache.snapshot_bytes for cache in reply.caches)
    evicted = [cache for cache in reply.caches if cache.state == "evicted"]
    if not (reply.budget or written or evicted):
        return ""
    limit = f" of a budget of {bytes_text(reply.budget)}" if reply.budget else ""
    parts = [f"{bytes_text(held)}{limit} resident", f"{bytes_text(written)} in snapshots"]
    if evicted:
        parts.append(f"{len(evicted)} evicted")
    return f"{reply.device}: {', '.join(parts)}"


def _row(device: str, cache: CacheStatus, now: float) -> tuple[str, ...]:
    generation = str(cache.generation) if cache.generation else "-"
    size = bytes_text(cache.bytes) if cache.bytes else "-"
    return (
        device,
        cache.name,
        cache.state,
        generation,
        size,
        # Engines on an older generation have a row of their own.
        _engines([e for e in cache.engines if e.generation in (0, cache.generation)]),
        _detail(cache, now),
    )


def _old_row(device: str, old: OldGeneration) -> tuple[str, ...]:
    names = ", ".join(engine.name for engine in old.engines)
    return (
        device,
        old.cache,
        "old",
        str(old.generation),
        bytes_text(old.bytes),
        _engines(old.engines),
        f"{repr(old.label) + ', ' if old.label else ''}mapped by {names}: freed when that ends",
    )


def _engines(engines: Sequence[EngineStatus]) -> str:
    """How many engines map it; with those that sleep, e.g. `3, 2 parked`."""
    parked = sum(engine.parked for engine in engines)
    return f"{len(engines)}, {parked} parked" if parked else str(len(engines))


def _detail(cache: CacheStatus, now: float) -> str:
    progress = progress_text(cache)
    error = " ".join(cache.error.split())
    if cache.retry_at is not None:
        error += f"; tried again in {seconds_text(max(0.0, cache.retry_at - now))}"
    if cache.state == "loading":
        return progress
    if cache.state == "evicted":
        back = (
            f"comes back from a snapshot of {bytes_text(cache.snapshot_bytes)}"
            if cache.snapshot_bytes
            else "loaded when an engine asks for it"
        )
        return ", ".join(part for part in (back, error) if part)
    if cache.state != "ready":
        return error
    done = (
        f"{cache.source} in {seconds_text(cache.load_seconds)}"
        if cache.source in ("loaded", "restored")
        else cache.source
    )
    snapshot = f"snapshot: {cache.snapshot}" if cache.snapshot else ""
    back = ""
    if cache.rolled_back_at is not None:
        back = f"rolled back {seconds_text(max(0.0, now - cache.rolled_back_at))} ago"
    # A ready generation is served while its successor loads, and if that fails.
    label = f"'{cache.label}'" if cache.label else ""
    parts = (label, done, back, progress, error, cache.warning, snapshot)
    return ", ".join(part for part in parts if part)
