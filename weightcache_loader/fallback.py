"""When a cache is not used: counts, and whether a load from disk has room beside the cache.

A reason has the code of its error (errors.py, or the closer code that the error was raised with).
docs/fallback.md lists all codes.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from weightcache_loader.budget import listed, remedies
from weightcached.errors import OutOfDeviceMemoryError, WeightcachedError
from weightcached.segments.api import open_backend
from weightcached.system.text import bytes_text
from weightcached.wire import resident as resident_file
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Done, Fallback
from weightcached.wire.requests import ask, ask_status
from weightcached.wire.resident import Held

# How often this process did not use a cache, by reason code; also if fallback is off and the reason
# is raised.
counts: Counter[str] = Counter()

# After these answers, a Status would not be answered, or not in time.
NOBODY_TO_ASK = frozenset(
    {
        "no-daemon",
        "unreachable",
        "runtime-path",
        "wrong-device",
        "timeout",
        "protocol",
        "protocol-version",
    }
)
_STATUS_TIMEOUT_S = 2.0


def check_room(needed: int, device: str, caches: Sequence[Held], reason: WeightcachedError) -> None:
    """Refuse a load from disk that provably does not fit beside the daemon's caches.

    Raises OutOfDeviceMemoryError with needed and free memory, and a remedy.
    """
    caches = [cache for cache in caches if not cache.reserved]
    if not caches:
        # Another check explains this.
        return
    try:
        free, total = open_backend(device).free_bytes()
    except (WeightcachedError, OSError):
        # Unknown: the load itself will report an error.
        return
    if needed > free:
        raise OutOfDeviceMemoryError(
            f"the cache cannot be used ({reason}), and a load from disk has no room beside it: it needs at least "
            f"{bytes_text(needed)} on {device}, {bytes_text(free)} of {bytes_text(total)} are free, the daemon holds "
            f"{listed(caches)}; make the engine match the cache, or: {remedies(caches)}",
            code="no-room",
        )


def report(socket: Path, reason: WeightcachedError) -> None:
    """Tell the daemon on this socket that the engine loads from disk, for its metrics; nothing
    depends on it.

    Not if there is no daemon to tell: such a reason is only in the engine's log.
    """
    if reason.code in NOBODY_TO_ASK:
        return
    with (
        contextlib.suppress(WeightcachedError, OSError),
        Connection.connect(socket, timeout_s=_STATUS_TIMEOUT_S, purpose="ctl") as connection,
    ):
        ask(connection, Fallback(reason=reason.code), Done, _STATUS_TIMEOUT_S)


def resident(socket: Path, reasons: Iterable[WeightcachedError] = ()) -> list[Held]:
    """The memory that the daemon on this socket holds: its answer, or its last file if it does not
    answer.

    reasons: earlier errors of this engine; a daemon that was silent then is not asked again.
    """
    codes = {reason.code for reason in reasons}
    if "wrong-device" in codes:
        return []
    asked = None if codes & NOBODY_TO_ASK else _ask_daemon(socket)
    if asked is None:
        written = resident_file.read(socket)
        return written.generations if written is not None else []
    return asked


def may_come_back(socket: Path) -> bool:
    """Whether a daemon that held caches died and does not listen: its manager restarts it."""
    written = resident_file.read(socket)
    return (
        written is not None
        and not all(held.reserved for held in written.generations)
        and not written.stopped
    )


def _ask_daemon(socket: Path) -> list[Held] | None:
    try:
        return resident_file.held(ask_status(socket, timeout_s=_STATUS_TIMEOUT_S))
    except (WeightcachedError, OSError):
        return None
