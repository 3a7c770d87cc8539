"""How much of a device's memory vLLM may count on beside what the daemon holds, and how that is told.

Arithmetic alone: knows nothing of vLLM, torch or sockets. All numbers are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from weightcached.wire.resident import Held

# Left free beside an engine whose utilization would leave more: what its neighbours and the driver take on top.
_HEADROOM = 0.08


class Device(NamedTuple):
    """A device's memory as vLLM measures it, and the utilization that it is asked for."""

    total: int
    free: int
    utilization: float


def external_bytes(device: Device, *, own: int, others: int) -> int:
    """What get_external_weight_memory answers.

    vLLM gives the engine utilization × total less this answer, and refuses to start where less is free. `own`
    are bytes that this engine maps, or copies and gives back; `others` what else the daemon holds. So much of
    `others` is counted as the device lacks: two engines that fit side by side lose nothing.
    """
    lacking = _requested(device) - own - device.free + _headroom(device)
    return own + min(others, max(0, lacking))


def _requested(device: Device) -> int:
    # As vLLM rounds it.
    return math.ceil(device.total * device.utilization)


def _headroom(device: Device) -> int:
    return int(min(1 - device.utilization, _HEADROOM) * device.total)


def starts(device: Device, external: int) -> bool:
    """Whether vLLM's check before the load passes with this answer."""
    return 0 < _requested(device) - external <= device.free


def engine_bytes(device: Device, external: int) -> int:
    """What the engine may use itself: weights that it does not map, activations, KV cache."""
    return _requested(device) - external


def best_utilization(device: Device, *, own: int, others: int) -> float | None:
    """The highest utilization, in hundredths, with which the engine would start; None where none would."""
    for hundredths in range(int(device.utilization * 100), 0, -1):
        lower = device._replace(utilization=hundredths / 100)
        if starts(lower, external_bytes(lower, own=own, others=others)):
            return lower.utilization
    return None


def cost(device: Device, caches: Sequence[Held], nbytes: int) -> str:
    """What to tell of an engine that starts with less."""
    return (
        f"the KV cache is {size_text(nbytes)} smaller than on an empty device: of {size_text(device.total)} the daemon "
        f"holds {listed(caches)}, which this engine does not map; {remedies(caches)}"
    )


def no_room(device: Device, caches: Sequence[Held], *, own: int, left: int, needed: int) -> str:
    """What to tell of an engine that cannot start beside what the daemon holds."""
    others = sum(cache.nbytes for cache in caches)
    lower = best_utilization(device, own=own, others=others)
    what = f", its weights alone take {size_text(needed)}" if needed > left > 0 else ""
    mend = f"--gpu-memory-utilization {lower} starts" if lower is not None and not what else ""
    return (
        f"no room on the device: --gpu-memory-utilization {device.utilization} of {size_text(device.total)} leaves "
        f"{size_text(max(left, 0))} for this engine{what}, {size_text(device.free)} are free, the daemon holds "
        f"{listed(caches)}; {mend + ' beside them; ' if mend else ''}{remedies(caches)}"
    )


def listed(caches: Sequence[Held]) -> str:
    """E.g. `a/target 14.9 GiB (pid 12, 14), b/target 1.7 GiB (no engine)`."""
    return ", ".join(f"{c.cache} {size_text(c.nbytes)} ({_engines(c)})" for c in caches)


def _engines(cache: Held) -> str:
    if not cache.engines:
        return "no engine"
    return f"pid {', '.join(str(engine.pid) for engine in cache.engines)}"


def remedies(caches: Sequence[Held]) -> str:
    """The two commands that help."""
    # One that no engine maps is lost to nobody.
    first = min(caches, key=lambda cache: len(cache.engines))
    return (
        f"'weightcachectl drop {first.cache}' frees that cache, a lower --gpu-memory-utilization of this device's "
        "engines leaves room for more"
    )


def size_text(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.1f} MiB"
