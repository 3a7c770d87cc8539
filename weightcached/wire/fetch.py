"""Fetch one generation from a daemon, for a tool: index and segment descriptors, without a lease."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from weightcached.errors import ProtocolError, WeightCacheUnavailableError
from weightcached.index.tensors import TensorIndex, read_index
from weightcached.system.fds import OwnedFd, close_all
from weightcached.system.paths import socket_path
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Ready, Refused, Verify

TIMEOUT_S = 30.0


@dataclass(frozen=True)
class FetchedGeneration:
    """One generation. The caller closes `fds`, one per segment, in order."""

    ready: Ready
    index: TensorIndex
    fds: list[OwnedFd]


def fetch_generation(
    device: str,
    cache: str,
    *,
    for_what: str,
    socket_dir: Path | None = None,
    timeout_s: float = TIMEOUT_S,
) -> FetchedGeneration:
    """Ask the device's daemon.

    for_what: a past participle for messages, e.g. "verified"; timeout_s: for each answer. Raises
    WeightCacheUnavailableError if there is no daemon or no such generation, ProtocolError and
    IndexFormatError for a wrong answer.
    """
    with Connection.connect(
        socket_path(device, socket_dir), timeout_s=timeout_s, purpose="ctl"
    ) as connection:
        ready = connection.request(Verify(cache=cache), timeout_s)
        if not isinstance(ready, Ready):
            raise WeightCacheUnavailableError(
                f"{cache} on {device} cannot be {for_what}: {_describe_refusal(ready)}"
            )
        return receive_generation(connection, ready, timeout_s)


def receive_generation(connection: Connection, ready: Ready, timeout_s: float) -> FetchedGeneration:
    """Receive the descriptors that `ready` announces; check the index by its digest, the segments
    by their number.

    Raises ProtocolError, IndexFormatError and WeightCacheUnavailableError; every descriptor is
    closed then.
    """
    fds = connection.receive_descriptors(ready.descriptors, timeout_s)
    try:
        if not fds:
            raise ProtocolError(f"the daemon handed out no index of {ready.cache}")
        with fds.pop(0) as fd:
            index, digest = read_index(fd)
        if digest != ready.index_digest:
            raise ProtocolError(
                f"the index of {ready.cache} is not the one that the daemon announced"
            )
        if len(index.segments) != len(fds):
            raise ProtocolError(
                f"{ready.cache} has {len(index.segments)} segments, {len(fds)} descriptors came"
            )
    except BaseException:
        close_all(fds)
        raise
    return FetchedGeneration(ready, index, fds)


def fetch_index(
    device: str,
    cache: str,
    *,
    for_what: str,
    socket_dir: Path | None = None,
    timeout_s: float = TIMEOUT_S,
) -> TensorIndex:
    """The index alone; raises as fetch_generation() does."""
    fetched = fetch_generation(
        device, cache, for_what=for_what, socket_dir=socket_dir, timeout_s=timeout_s
    )
    close_all(fetched.fds)
    return fetched.index


def _describe_refusal(reply: msgspec.Struct) -> str:
    return (
        reply.message
        if isinstance(reply, Refused)
        else f"its state is {type(reply).__name__.lower()}"
    )
