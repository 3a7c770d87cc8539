"""Fetch one generation from a daemon, for a tool: index and segment descriptors, without a lease."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from weightcached.errors import ProtocolError, WeightCacheUnavailableError
from weightcached.index import tensors as index_format
from weightcached.index.tensors import TensorIndex
from weightcached.system.fds import OwnedFd, close_all, read_sealed
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
        fds = connection.receive_descriptors(ready.descriptors, timeout_s)
    try:
        if not fds:
            raise ProtocolError(f"{cache}: the daemon handed out no index")
        index = _read_index(fds.pop(0), cache)
        if len(fds) != len(index.segments):
            raise ProtocolError(
                f"{cache}: {len(fds)} segments came, the index names {len(index.segments)}"
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


def _read_index(fd: OwnedFd, cache: str) -> TensorIndex:
    with fd:
        try:
            data = read_sealed(fd.fileno(), max_nbytes=index_format.MAX_INDEX_BYTES)
        except ValueError as e:
            raise ProtocolError(f"the index of {cache}: {e}") from e
    return index_format.decode(data)


def _describe_refusal(reply: msgspec.Struct) -> str:
    return (
        reply.message
        if isinstance(reply, Refused)
        else f"its state is {type(reply).__name__.lower()}"
    )
