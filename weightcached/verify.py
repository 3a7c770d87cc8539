"""Digests of storages: made while packing, recomputed by the proof and by `weightcachectl verify`.

Needs no torch; on a GPU it needs the driver's bindings and one CUDA context for as long as it reads.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from typing import NamedTuple

import msgspec
import xxhash

from weightcached import index as index_format
from weightcached.errors import ProtocolError, WeightCacheUnavailableError
from weightcached.index import TensorIndex
from weightcached.paths import socket_path
from weightcached.segments.api import Mapping, open_backend
from weightcached.wire.client import Connection
from weightcached.wire.fds import OwnedFd, close_all, read_sealed
from weightcached.wire.messages import Ready, Refused, Verify

_TIMEOUT_S = 30.0
# Small enough that the allocator gives the same memory again: fresh pages cost more than the copy out of the device.
_READ_NBYTES = 8 << 20


class VerifyResult(NamedTuple):
    """`mismatched` names the tensors (the first over each storage) whose bytes have changed."""

    cache: str
    generation: int
    nbytes: int
    tensors: int
    seconds: float
    mismatched: list[str]


def wrong_storages(index: TensorIndex, mapping: Mapping) -> Iterator[str]:
    """Recompute every storage's digest through the mapping and yield the first tensor's name of each that differs."""
    names: dict[int | None, str] = {}
    for record in index.tensors:
        names.setdefault(record.storage, record.names[0])

    def digest(number: int) -> bytes:
        storage = index.storages[number]
        hasher = xxhash.xxh3_128()
        for begin in range(0, storage.nbytes, _READ_NBYTES):
            nbytes = min(_READ_NBYTES, storage.nbytes - begin)
            hasher.update(mapping.read(storage.segment, storage.offset_bytes + begin, nbytes))
        return hasher.digest()

    with ThreadPoolExecutor(min(8, cpu_count() or 1)) as pool:
        for number, found in enumerate(pool.map(digest, range(len(index.storages)))):
            if found != index.storages[number].digest:
                yield names.get(number, f"storage {number}")


def verify_cache(device: str, cache: str) -> VerifyResult:
    """Map one cache of the device's daemon and recompute its digests.

    Raises WeightCacheUnavailableError where no daemon or no such generation is, SegmentError where it does not map,
    ProtocolError and IndexFormatError for what a daemon must not hand out.
    """
    began = time.monotonic()
    with Connection.connect(socket_path(device), timeout_s=_TIMEOUT_S, purpose="ctl") as connection:
        ready = connection.request(Verify(cache=cache), _TIMEOUT_S)
        if not isinstance(ready, Ready):
            raise WeightCacheUnavailableError(f"{cache} on {device} cannot be verified: {_why(ready)}")
        fds = connection.receive_descriptors(ready.descriptors, _TIMEOUT_S)
        try:
            if not fds:
                raise ProtocolError(f"{cache}: the daemon handed out no index")
            index = _read_index(fds.pop(0), cache)
            if len(fds) != len(index.segments):
                raise ProtocolError(f"{cache}: {len(fds)} segments came, the index names {len(index.segments)}")
            mapping = open_backend(device).map(fds, [s.nbytes for s in index.segments])
        finally:
            close_all(fds)
        try:
            wrong = list(wrong_storages(index, mapping))
        finally:
            mapping.close()
    return VerifyResult(cache, ready.generation, index.nbytes, len(index.tensors), time.monotonic() - began, wrong)


def _read_index(fd: OwnedFd, cache: str) -> TensorIndex:
    with fd:
        try:
            data = read_sealed(fd.fileno(), max_nbytes=index_format.MAX_INDEX_BYTES)
        except ValueError as e:
            raise ProtocolError(f"the index of {cache}: {e}") from e
    return index_format.decode(data)


def _why(reply: msgspec.Struct) -> str:
    return reply.message if isinstance(reply, Refused) else f"its state is {type(reply).__name__.lower()}"
