"""When a cache is not used: what is counted, and whether a load from disk has room beside the
cache.

The reason's code is that of its error (errors.py, or the closer one that the error was raised
with); docs/fallback.md lists them all.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

from weightcached.checkpoint.identity import record_checkpoint
from weightcached.errors import OutOfDeviceMemoryError, WeightcachedError
from weightcached.segments.api import open_backend
from weightcached.vllm_compat.room import least_bytes
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Fallback, Status, StatusReply

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


def check_room(
    vllm_config: Any,
    model_config: Any,
    device: str,
    socket: Path,
    load_format: str,
    reason: WeightcachedError,
) -> None:
    """Refuse a load from disk that cannot fit beside what the daemon holds.

    Asks only where a daemon holds something. Raises OutOfDeviceMemoryError with needed, free, and
    how to go on.
    """
    held = {} if reason.code in _WITHOUT_STATUS else held_bytes(socket)
    if not held:
        return
    try:
        needed = needed_bytes(vllm_config, model_config, load_format)
        free, total = open_backend(device).free_bytes()
    except (WeightcachedError, OSError):
        # Not to be told: the load itself will say what is wrong.
        return
    if needed > free:
        caches = ", ".join(f"{name} {_size(nbytes)}" for name, nbytes in held.items())
        raise OutOfDeviceMemoryError(
            f"the cache cannot be used ({reason}), and a load from disk has no room beside it: it needs at least "
            f"{_size(needed)} on {device}, {_size(free)} of {_size(total)} are free, the daemon holds {caches}; make "
            f"the engine match the cache, or 'weightcachectl drop {next(iter(held))}'",
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


def held_bytes(socket: Path) -> dict[str, int]:
    """Device bytes by cache of the daemon on this socket; empty where it cannot be asked or holds
    none.
    """
    try:
        with Connection.connect(socket, timeout_s=_STATUS_TIMEOUT_S, purpose="ctl") as connection:
            reply = connection.request(Status(), _STATUS_TIMEOUT_S)
    except (WeightcachedError, OSError):
        return {}
    caches = reply.caches if isinstance(reply, StatusReply) else []
    return {cache.name: cache.bytes for cache in caches if cache.bytes}


def needed_bytes(vllm_config: Any, model_config: Any, load_format: str) -> int:
    """least_bytes() of the checkpoint that a load from disk would read.

    Raises CheckpointError where the checkpoint cannot be found.
    """
    recorded = record_checkpoint(
        model_config.model,
        revision=model_config.revision,
        download_dir=vllm_config.load_config.download_dir,
        load_format=load_format,
    )
    return least_bytes(sum(file.size for file in recorded.files), vllm_config, model_config)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.1f} MiB"
