"""When a cache is not used: what is counted, and whether a load from disk has room beside the
cache.

The reason's code is that of its error (errors.py, or the closer one that the error was raised
with); docs/fallback.md lists them all.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from weightcache_loader.budget import listed, remedies, size_text
from weightcached.errors import OutOfDeviceMemoryError, WeightcachedError
from weightcached.segments.api import open_backend
from weightcached.wire import resident as resident_file
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Fallback, Status, StatusReply
from weightcached.wire.resident import Held

# How often this process did not use a cache, by reason code; with fallback off as well, when the
# reason is raised.
counts: Counter[str] = Counter()

# Whoever gave these answers would not say what it holds on this device, or not in time.
_WITHOUT_STATUS = frozenset(
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
    """Refuse a load from disk that is proven not to fit beside what the daemon holds.

    Raises OutOfDeviceMemoryError with needed, free, and how to go on.
    """
    if not caches:
        # Not ours to explain.
        return
    try:
        free, total = open_backend(device).free_bytes()
    except (WeightcachedError, OSError):
        # Not to be told: the load itself will say what is wrong.
        return
    if needed > free:
        raise OutOfDeviceMemoryError(
            f"the cache cannot be used ({reason}), and a load from disk has no room beside it: it needs at least "
            f"{size_text(needed)} on {device}, {size_text(free)} of {size_text(total)} are free, the daemon holds "
            f"{listed(caches)}; make the engine match the cache, or: {remedies(caches)}",
            code="no-room",
        )


def report(socket: Path, reason: WeightcachedError) -> None:
    """Tell the daemon on this socket that the engine loads from disk, for its metrics; nothing
    depends on it.

    Not where there is none that would take it: such a reason is in the engine's log alone.
    """
    if reason.code in _WITHOUT_STATUS:
        return
    with (
        contextlib.suppress(WeightcachedError, OSError),
        Connection.connect(socket, timeout_s=_STATUS_TIMEOUT_S, purpose="ctl") as connection,
    ):
        connection.request(Fallback(reason=reason.code), _STATUS_TIMEOUT_S)


def resident(socket: Path, reasons: Iterable[WeightcachedError] = ()) -> list[Held]:
    """What the daemon on this socket holds: as it says, or, where it cannot be asked, as it last wrote down.

    `reasons`: what an engine was told before; a daemon that was silent then is not asked again.
    """
    codes = {reason.code for reason in reasons}
    if "wrong-device" in codes:
        return []
    asked = None if codes & _WITHOUT_STATUS else _asked(socket)
    if asked is None:
        written = resident_file.read(socket)
        return written.generations if written is not None else []
    return asked


def may_come_back(socket: Path) -> bool:
    """Whether a daemon that does not listen held something and did not end as it was told to: its manager
    restarts it.
    """
    written = resident_file.read(socket)
    return written is not None and bool(written.generations) and not written.stopped


def _asked(socket: Path) -> list[Held] | None:
    try:
        with Connection.connect(socket, timeout_s=_STATUS_TIMEOUT_S, purpose="ctl") as connection:
            reply = connection.request(Status(), _STATUS_TIMEOUT_S)
    except (WeightcachedError, OSError):
        return None
    return resident_file.held(reply) if isinstance(reply, StatusReply) else None
