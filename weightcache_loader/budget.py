"""How much of a device's memory vLLM may use beside the daemon's caches, and texts about it.

Arithmetic alone: knows nothing of vLLM, torch or sockets. All numbers are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from weightcached.system.text import bytes_text
from weightcached.wire.resident import NEXT, Held

# Left free for neighbours and the driver, if the engine's utilization leaves more.
_HEADROOM = 0.08


class DeviceBudget(NamedTuple):
    """A device's memory as vLLM measures it, and the requested utilization."""

    total: int
    free: int
    utilization: float


def external_bytes(device: DeviceBudget, *, own: int, others: int, reserved: int = 0) -> int:
    """The answer of get_external_weight_memory.

    vLLM gives the engine utilization × total minus this answer, and refuses to start if less is
    free. own: bytes that this engine maps, or copies and gives back; others: bytes of the daemon's
    other caches; reserved: bytes that are free, but kept for models on demand and for new weights.
    Both count only as far as the device has no room for them: two engines that fit side by side lose
    nothing.
    """
    lacking = _requested_bytes(device) - own - (device.free - reserved) + _headroom(device)
    return own + min(others + reserved, max(0, lacking))


def _requested_bytes(device: DeviceBudget) -> int:
    # As vLLM rounds it.
    return math.ceil(device.total * device.utilization)


def _headroom(device: DeviceBudget) -> int:
    return int(min(1 - device.utilization, _HEADROOM) * device.total)


def starts(device: DeviceBudget, external: int) -> bool:
    """Whether vLLM's check before the load passes with this answer."""
    return 0 < _requested_bytes(device) - external <= device.free


def engine_bytes(device: DeviceBudget, external: int) -> int:
    """Bytes for the engine's own use: weights that it does not map, activations, KV cache."""
    return _requested_bytes(device) - external


def best_utilization(
    device: DeviceBudget, *, own: int, others: int, reserved: int = 0
) -> float | None:
    """The highest utilization, in hundredths, with which the engine starts; None if none."""
    for hundredths in range(int(device.utilization * 100), 0, -1):
        lower = device._replace(utilization=hundredths / 100)
        external = external_bytes(lower, own=own, others=others, reserved=reserved)
        if starts(lower, external):
            return lower.utilization
    return None


def cost(device: DeviceBudget, caches: Sequence[Held], nbytes: int) -> str:
    """A log line for an engine that starts with less."""
    return (
        f"the KV cache is {bytes_text(nbytes)} smaller than on an empty device: of "
        f"{bytes_text(device.total)} the daemon holds {listed(caches)}, which this "
        f"engine does not map; {remedies(caches)}"
    )


def no_room(
    device: DeviceBudget, caches: Sequence[Held], *, own: int, left: int, needed: int
) -> str:
    """An error for an engine that cannot start beside the daemon's caches."""
    others = sum(cache.nbytes for cache in caches if not cache.reserved)
    lower = best_utilization(device, own=own, others=others, reserved=reserved_bytes(caches))
    what = f", its weights alone take {bytes_text(needed)}" if needed > left > 0 else ""
    remedy = f"--gpu-memory-utilization {lower} starts" if lower is not None and not what else ""
    return (
        f"no room on the device: --gpu-memory-utilization {device.utilization} of {bytes_text(device.total)} leaves "
        f"{bytes_text(max(left, 0))} for this engine{what}, {bytes_text(device.free)} are free, the daemon holds "
        f"{listed(caches)}; {remedy + ' beside them; ' if remedy else ''}{remedies(caches)}"
    )


def listed(caches: Sequence[Held]) -> str:
    """E.g. `a/target 14.9 GiB (pid 12, 14), b/target 1.7 GiB (no engine)`."""
    return ", ".join(f"{c.cache} {bytes_text(c.nbytes)} ({_engines(c)})" for c in caches)


def reserved_bytes(caches: Sequence[Held]) -> int:
    """Bytes that are kept for models on demand and for new weights."""
    return sum(cache.nbytes for cache in caches if cache.reserved)


def _engines(cache: Held) -> str:
    if cache.reserved:
        return f"kept free by {'live' if cache.cache == NEXT else 'budget'}: in the manifest"
    if not cache.engines:
        return "no engine"
    return ", ".join(engine.name for engine in cache.engines)


def remedies(caches: Sequence[Held]) -> str:
    """Two commands that make room."""
    # No engine loses a cache that none maps.
    first = min(caches, key=lambda cache: (cache.reserved, len(cache.engines)))
    frees = (
        (
            "without live: true in the manifest none is kept for new weights"
            if first.cache == NEXT
            else "a lower budget: in the manifest leaves less to models on demand"
        )
        if first.reserved
        else f"'weightcachectl drop {first.cache}' frees that cache"
    )
    return (
        f"{frees}, a lower --gpu-memory-utilization of this device's engines leaves room for more"
    )
