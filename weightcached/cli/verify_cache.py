"""What `weightcachectl verify` does: the digest of every storage recomputed from the mapped memory.

Needs no torch; on a GPU it needs the driver's bindings, and one CUDA context while it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from typing import NamedTuple

import xxhash

from weightcached.index.tensors import TensorIndex
from weightcached.segments.api import Mapping, open_backend
from weightcached.system.fds import close_all
from weightcached.wire.fetch import fetch_generation

# Small enough that the allocator reuses the same memory: fresh pages cost more than the copy out of
# the device.
_READ_NBYTES = 8 << 20


class VerifyResult(NamedTuple):
    """`mismatched` names the tensors (the first over each storage) whose bytes have changed."""

    nbytes: int
    tensors: int
    mismatched: list[str]
    label: str = ""


def wrong_storages(index: TensorIndex, mapping: Mapping) -> Iterator[str]:
    """Recompute every storage's digest; yield the name of the first tensor over each that differs."""
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

    Raises WeightCacheUnavailableError if there is no daemon or no such generation, SegmentError if
    it does not map, ProtocolError and IndexFormatError for a wrong answer.
    """
    fetched = fetch_generation(device, cache, for_what="verified")
    index = fetched.index
    try:
        mapping = open_backend(device).map(fetched.fds, [s.nbytes for s in index.segments])
    finally:
        close_all(fetched.fds)
    try:
        wrong = list(wrong_storages(index, mapping))
    finally:
        mapping.close()
    return VerifyResult(index.nbytes, len(index.tensors), wrong, index.label)
