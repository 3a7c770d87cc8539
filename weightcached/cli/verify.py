"""`weightcachectl verify`: which caches to verify, and the report."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol, cast

from weightcached.cli.reload import holders
from weightcached.errors import WeightcachedError
from weightcached.system.text import bytes_text
from weightcached.wire.messages import StatusReply

SHOWN_NAMES = 5


class Verification(Protocol):
    """What weightcached.cli.verify_cache.verify_cache(device, cache) gives back."""

    tensors: int
    nbytes: int
    mismatched: Sequence[str]


def ready_caches(replies: Sequence[StatusReply], wanted: str | None) -> list[tuple[str, str]]:
    """(device, cache) of what there is to verify: what is `wanted`, in whatever state, or all that is ready."""
    if wanted is not None:
        return holders(replies, wanted)
    return [
        (reply.device, cache.name)
        for reply in replies
        for cache in reply.caches
        if cache.state == "ready"
    ]


def verify(device: str, cache: str) -> tuple[bool, str]:
    """Whether every digest is the recorded one, and a line that says so or names what differs."""
    try:
        # It maps segments, so it needs what the daemon and this program otherwise do without.
        module = importlib.import_module("weightcached.cli.verify_cache")
        result = cast(Verification, module.verify_cache(device, cache))
    except ImportError as e:
        return (
            False,
            f"{device} {cache}: cannot verify: {e}; run it in the environment of the engine",
        )
    except WeightcachedError as e:
        return False, f"{device} {cache}: cannot verify: {e}"
    if not result.mismatched:
        return (
            True,
            f"{device} {cache}: {result.tensors} tensors, {bytes_text(result.nbytes)}, all digests equal",
        )
    names = ", ".join(result.mismatched[:SHOWN_NAMES])
    more = (
        f" and {len(result.mismatched) - SHOWN_NAMES} more"
        if len(result.mismatched) > SHOWN_NAMES
        else ""
    )
    return False, (
        f"{device} {cache}: {len(result.mismatched)} of {result.tensors} tensors differ: {names}{more}; "
        f"weightcachectl reload {device} --force --cache {cache}"
    )
