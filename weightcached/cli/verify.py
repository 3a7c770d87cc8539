"""`weightcachectl verify`: which caches to verify, and the report."""

from __future__ import annotations

from collections.abc import Sequence

from weightcached.cli.reload import holders
from weightcached.cli.verify_cache import verify_cache
from weightcached.errors import WeightcachedError
from weightcached.system.text import bytes_text
from weightcached.wire.messages import StatusReply

SHOWN_NAMES = 5


def ready_caches(replies: Sequence[StatusReply], wanted: str | None) -> list[tuple[str, str]]:
    """(device, cache) to verify: the `wanted` ones in any state, or all that are ready."""
    if wanted is not None:
        return holders(replies, wanted)
    return [
        (reply.device, cache.name)
        for reply in replies
        for cache in reply.caches
        if cache.state == "ready"
    ]


def verify(device: str, cache: str) -> tuple[bool, str]:
    """Whether all digests are the recorded ones, and a line for the report."""
    try:
        result = verify_cache(device, cache)
    except WeightcachedError as e:
        return False, f"{device} {cache}: cannot verify: {e}"
    what = f"{device} {cache}" + (f" '{result.label}'" if result.label else "")
    if not result.mismatched:
        return (
            True,
            f"{what}: {result.tensors} tensors, {bytes_text(result.nbytes)}, all digests equal",
        )
    names = ", ".join(result.mismatched[:SHOWN_NAMES])
    more = (
        f" and {len(result.mismatched) - SHOWN_NAMES} more"
        if len(result.mismatched) > SHOWN_NAMES
        else ""
    )
    return False, (
        f"{what}: {len(result.mismatched)} of {result.tensors} tensors differ: {names}{more}; "
        f"weightcachectl reload {device} --force --cache {cache}"
    )
