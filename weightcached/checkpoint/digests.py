"""Digests of weight files: a sample in milliseconds, the full one on all cores and kept in the
user's cache.

    $XDG_CACHE_HOME/weightcached/           0700, else ~/.cache/weightcached/
        digests/                            0700
            <device>-<inode>.json           0600, one per weight file, replaced by rename

xxh3-128 guards against accidents, not against a forger: docs/identity.md says why that is enough.
Every read stands between two looks at the file's status, so a digest never mixes two states of a
file.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from weightcached.checkpoint.files import StatTuple, check_unchanged, open_recorded, read_at
from weightcached.checkpoint.safetensors_header import read_header
from weightcached.errors import CheckpointError, HomeError
from weightcached.system.paths import cache_home, make_private

# Both are part of each digest. If one of them changes, DIGEST_FORMAT must change too.
CHUNK_BYTES = 64 << 20
SAMPLE_BYTES = 4096
DIGEST_FORMAT = 1
CACHE_FORMAT = 2
# A file keeps its inode through chmod and new links, so its former states are kept for comparison.
_KEPT_PER_FILE = 4
# Fits the second-level cache of one core together with its copy in the page cache's way.
_READ_BYTES = 1 << 20
_UNSTRUCTURED_SAMPLES = 256
_MAX_ENTRY_BYTES = 4096

Progress = Callable[[int, int], None]


class Source(NamedTuple):
    """A weight file to read, as it was recorded."""

    path: str
    stat: StatTuple

    @property
    def nbytes(self) -> int:
        return self.stat[2]


class CacheEntry(msgspec.Struct, frozen=True):
    """One file's digests (hex) by its status, the newest first.

    check: the xxh3-64 of the other fields, which shows a torn entry.
    """

    format: int
    digests: list[tuple[StatTuple, str]]
    check: str = ""


def combine(kind: str, parts: Sequence[tuple[int, bytes]]) -> str:
    """One hex digest of (size, digest) per file, in reading order. kind: `sample` or `full`."""
    hasher = xxhash.xxh3_128(f"weightcached {kind} {DIGEST_FORMAT}\0".encode())
    for nbytes, digest in parts:
        hasher.update(nbytes.to_bytes(8, "little") + digest)
    return hasher.hexdigest()


def check_current(source: Source) -> None:
    """Require, without opening it, that the file is as recorded. Raises CheckpointError."""
    try:
        info = os.stat(source.path)
    except OSError as e:
        raise CheckpointError(
            f"weight file {source.path} is gone since it was recorded: {e.strerror}"
        ) from e
    check_unchanged(source.path, source.stat, info)


# ---- sample


def sample_file(source: Source) -> bytes:
    """Digest of a file's header and of SAMPLE_BYTES from the start, middle and end of each of its
    tensors.

    Files of other kinds than safetensors are sampled at _UNSTRUCTURED_SAMPLES even distances.
    """
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_READ_BYTES))
    with open_recorded(source.path, source.stat) as fd:
        if source.path.endswith(".safetensors"):
            header = read_header(fd, source.path, source.nbytes)
            hasher.update(header.raw)
            ranges = sample_ranges([(tensor.begin, tensor.end) for tensor in header.tensors])
        else:
            ranges = sample_ranges(_even_spans(source.nbytes))
        # All reads are in flight at once: on a cold disk or a network they would otherwise wait one
        # after the other.
        for begin, end in ranges:
            os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_WILLNEED)
        for begin, end in ranges:
            for piece in _pieces(fd, source.path, begin, end, buffer):
                hasher.update(piece)
    return hasher.digest()


def sample_ranges(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Start, middle and end of every span, each SAMPLE_BYTES, as (begin, end); neighbours are read
    in one go.

    `spans` are sorted and do not overlap; neither do the ranges.
    """
    ranges: list[tuple[int, int]] = []
    for begin, end in spans:
        middle = (begin + end - SAMPLE_BYTES) // 2
        for start in (begin, max(begin, middle), max(begin, end - SAMPLE_BYTES)):
            stop = min(start + SAMPLE_BYTES, end)
            if ranges and start <= ranges[-1][1]:
                ranges[-1] = (ranges[-1][0], max(stop, ranges[-1][1]))
            elif start < stop:
                ranges.append((start, stop))
    return ranges


def _even_spans(nbytes: int) -> list[tuple[int, int]]:
    edges = [nbytes * i // _UNSTRUCTURED_SAMPLES for i in range(_UNSTRUCTURED_SAMPLES + 1)]
    return list(pairwise(edges))


def _pieces(fd: int, path: str, begin: int, end: int, buffer: memoryview) -> Iterator[memoryview]:
    """The bytes from `begin` to `end`, piece by piece in the one buffer."""
    while begin < end:
        piece = buffer[: min(len(buffer), end - begin)]
        read_at(fd, path, piece, begin)
        yield piece
        begin += len(piece)


# ---- full digest


def digest_files(
    sources: Sequence[Source], *, progress: Progress | None = None, workers: int | None = None
) -> list[bytes]:
    """Digest of every byte of every file, on `workers` threads (default: one per usable core).

    A file whose digest is cached under its recorded status is not opened, even if it has changed
    since. progress(done, total) counts bytes and is called in this thread. Raises CheckpointError
    for another that is not, or does not stay, as recorded.
    """
    cache = DigestCache.of_user()
    digests = {source: cache.get(source.stat) for source in sources}
    todo = [source for source, digest in digests.items() if digest is None]
    for source in todo:
        check_current(source)
    total = sum(source.nbytes for source in digests)
    done = total - sum(source.nbytes for source in todo)
    if progress is not None:
        progress(done, total)

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    if todo:
        for source, digest in _digest_uncached(todo, workers or usable_cores(), advance):
            digests[source] = digest
            cache.put(source.stat, digest)
    return [digest for digest in (digests[source] for source in sources) if digest is not None]


def usable_cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0))


def _digest_uncached(
    sources: Sequence[Source], workers: int, advance: Callable[[int], None]
) -> Iterator[tuple[Source, bytes]]:
    """Digests as files become complete.

    Threads share chunks, not files: a model of one large file uses all cores too.
    """
    # Imported here: an engine that decides on the first rung does not pay for it.
    from concurrent.futures import Future, ThreadPoolExecutor, as_completed

    stop = threading.Event()
    chunks: dict[Source, list[bytes]] = {
        source: [b""] * -(-source.nbytes // CHUNK_BYTES) for source in sources
    }
    missing = {source: len(parts) for source, parts in chunks.items()}
    pool = ThreadPoolExecutor(workers, thread_name_prefix="weight-digest")
    try:
        places: dict[Future[bytes], tuple[Source, int]] = {}
        for source, parts in chunks.items():
            if not parts:
                yield source, _digest_chunk(source, 0, stop)
            for number in range(len(parts)):
                places[pool.submit(_digest_chunk, source, number, stop)] = (source, number)
        for future in as_completed(places):
            source, number = places[future]
            chunks[source][number] = future.result()
            missing[source] -= 1
            advance(_chunk_end(source, number) - number * CHUNK_BYTES)
            if not missing[source]:
                yield source, xxhash.xxh3_128(b"".join(chunks.pop(source))).digest()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _chunk_end(source: Source, number: int) -> int:
    return min((number + 1) * CHUNK_BYTES, source.nbytes)


def _digest_chunk(source: Source, number: int, stop: threading.Event) -> bytes:
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_READ_BYTES))
    with open_recorded(source.path, source.stat) as fd:
        for piece in _pieces(
            fd, source.path, number * CHUNK_BYTES, _chunk_end(source, number), buffer
        ):
            # Somebody else failed: nobody asks for this chunk any more.
            if stop.is_set():
                break
            hasher.update(piece)
    return hasher.digest()


# ---- cache


class DigestCache:
    """Digests of files by their status. Losing it costs time only, so faults of the cache are
    misses, never errors.

    One entry per file, named by device and inode, with the digests of its last few states. Two
    processes that write the same one may lose the other's digest.
    """

    def __init__(self, directory: str | None) -> None:
        self._directory = directory

    @classmethod
    def of_user(cls) -> DigestCache:
        """The cache of this user; one that never hits if no directory can be named or made."""
        try:
            directory = cache_home() / "weightcached/digests"
        except HomeError:
            return cls(None)
        with suppress(OSError):
            make_private(directory)
        private = _only_ours(directory.parent) and _only_ours(directory)
        return cls(str(directory) if private else None)

    def get(self, key: StatTuple) -> bytes | None:
        """The digest of the file with exactly this status, or None."""
        digest = dict(self._entry(key)).get(key)
        return bytes.fromhex(digest) if digest else None

    def _entry(self, key: StatTuple) -> list[tuple[StatTuple, str]]:
        """All digests of the file that has, or had, this status."""
        if self._directory is None:
            return []
        try:
            entry = msgspec.json.decode(self._read(_path(self._directory, key)), type=CacheEntry)
        except (OSError, ValueError):  # msgspec.DecodeError is a ValueError
            return []
        return entry.digests if entry == _with_check(entry.digests) else []

    def put(self, key: StatTuple, digest: bytes) -> None:
        """Keep a digest; does nothing if the directory cannot be written to."""
        if self._directory is None:
            return
        others = [(stat, known) for stat, known in self._entry(key) if stat != key]
        entry = _with_check([(key, digest.hex()), *others][:_KEPT_PER_FILE])
        # Random: two containers that share a home may also share process ids.
        temporary = os.path.join(self._directory, f".{os.urandom(8).hex()}")
        with suppress(OSError):
            fd = os.open(
                temporary,
                os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o600,
            )
            try:
                os.write(fd, msgspec.json.encode(entry))
                os.rename(temporary, _path(self._directory, key))
            except OSError:
                os.unlink(temporary)
            finally:
                os.close(fd)

    @staticmethod
    def _read(path: str) -> bytes:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            info = os.fstat(fd)
            if (
                not stat.S_ISREG(info.st_mode)
                or info.st_uid != os.geteuid()
                or info.st_mode & 0o022
            ):
                return b""
            return os.read(fd, _MAX_ENTRY_BYTES)
        finally:
            os.close(fd)


def _path(directory: str, key: StatTuple) -> str:
    return os.path.join(directory, f"{key[0]:x}-{key[1]:x}.json")


def _only_ours(directory: Path) -> bool:
    # A directory that others may write to could be filled by them with digests of their choice.
    try:
        info = os.lstat(directory)
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o022


def _with_check(digests: list[tuple[StatTuple, str]]) -> CacheEntry:
    check = xxhash.xxh3_64(msgspec.json.encode(CacheEntry(CACHE_FORMAT, digests))).hexdigest()
    return CacheEntry(CACHE_FORMAT, digests, check)
