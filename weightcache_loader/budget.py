"""How much of a device's memory vLLM may use beside the daemon's caches, and texts about it.

Arithmetic alone: knows nothing of vLLM, torch or sockets. All numbers are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from weightcached.system.text import bytes_text
from weightcached.wire.resident import Held

# Left free for neighbours and the driver, if the engine's utilization leaves more.
_HEADROOM = 0.08


class DeviceBudget(NamedTuple):
    """A device's memory as vLLM measures it, and the requested utilization."""

    total: int
    free: int
    utilization: float


def external_bytes(device: DeviceBudget, *, own: int, others: int, reserve: int = 0) -> int:
    """The answer of get_external_weight_memory.

    vLLM gives the engine utilization × total minus this answer, and refuses to start if less is
    free. own: bytes that this engine maps, or copies and gives back; others: bytes of the daemon's
    other caches; reserve: bytes that are to stay free, see reserve_bytes(). `others` and `reserve`
    count only as far as the device has no room for them: two engines that fit side by side lose
    nothing.
    """
    lacking = _requested_bytes(device) - own - (device.free - reserve) + _headroom(device)
    return own + min(others + reserve, max(0, lacking))


def reserve_bytes(caches: Sequence[Held]) -> int:
    """Room for the next generation of a live model beside the present one, for the largest of them.

    One that is there already, because an engine still maps the one before, needs no more.
    """
    by_model: dict[str, int] = {}
    for cache in caches:
        model = cache.cache.rpartition("/")[0]
        if cache.live:
            by_model[model] = by_model.get(model, 0) + cache.nbytes
    served = {(cache.cache, cache.generation) for cache in caches if cache.live}
    for cache in caches:
        model = cache.cache.rpartition("/")[0]
        if model in by_model and (cache.cache, cache.generation) not in served:
            by_model[model] -= cache.nbytes
    return max([0, *by_model.values()])


def kept_free(reserve: int) -> str:
    """A log line for an engine on a device with live models."""
    return (
        f"{bytes_text(reserve)} stay free for the next generation of a live model; where the utilization leaves less, "
        "the KV cache is smaller"
    )


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


def best_utilization(device: DeviceBudget, *, own: int, others: int) -> float | None:
    """The highest utilization, in hundredths, with which the engine starts; None if none."""
    for hundredths in range(int(device.utilization * 100), 0, -1):
        lower = device._replace(utilization=hundredths / 100)
        if starts(lower, external_bytes(lower, own=own, others=others)):
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
    others = sum(cache.nbytes for cache in caches)
    lower = best_utilization(device, own=own, others=others)
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


def _engines(cache: Held) -> str:
    if not cache.engines:
        return "no engine"
    return ", ".join(engine.name for engine in cache.engines)


def remedies(caches: Sequence[Held]) -> str:
    """Two commands that make room."""
    # No engine loses a cache that none maps.
    first = min(caches, key=lambda cache: len(cache.engines))
    return (
        f"'weightcachectl drop {first.cache}' frees that cache, a lower --gpu-memory-utilization of this device's "
        "engines leaves room for more"
    )
