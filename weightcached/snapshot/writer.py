"""The child that writes a snapshot: `python -m weightcached.snapshot.writer`, a job on its input.

Started by the daemon once a generation is served, with the interpreter of the model's engine, whose
CUDA bindings read device memory. It asks the daemon for the generation's descriptors as `verify`
does, and maps them read-only. It runs at the lowest priority; if it is killed, it leaves a
directory that does not count as a snapshot and that the next writer removes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import xxhash

from weightcached import __version__
from weightcached.errors import EXIT_FAILURE, SnapshotError, WeightcachedError
from weightcached.index import tensors as index_format
from weightcached.segments.api import Mapping, open_backend
from weightcached.snapshot.files import (
    CHUNK_NBYTES,
    SnapshotHeader,
    all_snapshots,
    cache_directory,
    chunks_of,
    encode_header,
    list_snapshots,
    make_private,
    name_of,
    open_snapshot,
    remove_leftovers,
    remove_snapshot,
)
from weightcached.snapshot.rollback import read_rollback
from weightcached.system.fds import OwnedFd, close_all
from weightcached.system.process import die_with_parent
from weightcached.wire.fetch import fetch_generation

# Small enough that the allocator gives the same memory again.
_PIECE_NBYTES = 8 << 20
# Left free on the file system, because others write there too.
_SPARE_NBYTES = 256 << 20


class WriterJob(msgspec.Struct, frozen=True, kw_only=True):
    """One generation to write.

    keep: number of snapshots of this cache that stay, this one included; max_bytes: limit of all
    snapshots under `root`, 0 for none; replace: write it again if it exists.
    """

    root: str
    device: str
    cache: str
    generation: int
    socket_dir: str
    keep: int = 1
    max_bytes: int = 0
    replace: bool = False


def main() -> int:
    """Do the job on stdin. Returns the exit status; the last line on stderr is the reason."""
    die_with_parent()
    os.nice(19)
    try:
        job = msgspec.json.decode(sys.stdin.buffer.read(), type=WriterJob)
        path = run(job)
    except (WeightcachedError, msgspec.DecodeError, OSError) as e:
        sys.stderr.write(f"{e}\n")
        return EXIT_FAILURE
    sys.stdout.write(f"{path}\n")
    return 0


def run(job: WriterJob) -> Path:
    """Write the generation and remove older snapshots of its cache. Returns its path.

    Raises SnapshotError, and as fetch_generation().
    """
    root, directory = Path(job.root), cache_directory(Path(job.root), job.device, job.cache)
    for each in (root, directory.parent, directory):
        make_private(each)
    remove_leftovers(directory)
    fetched = fetch_generation(
        job.device, job.cache, for_what="written to a snapshot", socket_dir=Path(job.socket_dir)
    )
    with ExitStack() as undo:
        undo.callback(close_all, fetched.fds)
        index = fetched.index
        if index.generation != job.generation:
            raise SnapshotError(
                f"{job.cache} serves generation {index.generation} by now, not {job.generation}"
            )
        path = directory / name_of(index)
        if job.replace or not _is_whole(path):
            with suppress(OSError):
                remove_snapshot(path)
            # Before anything is written: older ones make room for it.
            _make_room(root, directory, index.nbytes, job)
            sizes = [segment.nbytes for segment in index.segments]
            mapping = open_backend(job.device).map(fetched.fds, sizes)
            undo.callback(mapping.close)
            _write(path, index_format.encode(index), index, mapping)
    for old in list_snapshots(root, job.device, job.cache)[max(1, job.keep) :]:
        with suppress(OSError):
            remove_snapshot(old)
    return path


def _is_whole(path: Path) -> bool:
    """Whether there is a snapshot, as far as can be told without reading its data."""
    try:
        open_snapshot(path).close()
    except SnapshotError:
        return False
    return True


def _make_room(root: Path, directory: Path, nbytes: int, job: WriterJob) -> None:
    """Remove the least recently used snapshots until `nbytes` fit. Raises SnapshotError.

    Those that a rollback went back to stay: their checkpoints may be gone.
    """
    found = sorted(_all_snapshots(root), key=lambda each: each[0])
    held = sum(size for _, size, _ in found)
    others = [each for each in found if not _is_gone_back_to(each[2])]
    while True:
        over = held + nbytes - job.max_bytes if job.max_bytes else 0
        short = nbytes + _SPARE_NBYTES - _free_bytes(directory)
        if over <= 0 and short <= 0:
            return
        if not others:
            raise SnapshotError(
                f"no room for a snapshot of {nbytes} bytes in {root}: {_free_bytes(directory)} bytes "
                f"are free, {_SPARE_NBYTES} of them stay free, snapshots: max_bytes is "
                f"{job.max_bytes or 'not set'}"
            )
        _, size, oldest = others.pop(0)
        with suppress(OSError):
            remove_snapshot(oldest)
        held -= size


def _all_snapshots(root: Path) -> Iterator[tuple[float, int, Path]]:
    """(time of last use, bytes, path) of every snapshot."""
    for _, _, path in all_snapshots(root):
        with suppress(OSError):
            info = (path / "data").stat()
            yield info.st_mtime, info.st_size, path


def _is_gone_back_to(path: Path) -> bool:
    with suppress(SnapshotError, OSError):
        note = read_rollback(path.parent)
        return note is not None and note.to == path.name
    return False


def _free_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def _write(
    path: Path, index_data: bytes, index: index_format.TensorIndex, mapping: Mapping
) -> None:
    temporary = path.parent / f".{os.urandom(8).hex()}"
    temporary.mkdir(mode=0o700)
    with OwnedFd(os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as lock:
        # Held while we live: an unlocked directory belongs to a dead writer.
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
        try:
            segments = [segment.nbytes for segment in index.segments]
            with _create(temporary / "data") as data:
                chunks = list(_write_chunks(data, segments, mapping))
                os.fsync(data.fileno())
            header = SnapshotHeader(
                software=f"weightcached {__version__}",
                cache=index.cache,
                index_digest=index_format.digest_of(index_data),
                created_at=time.time(),
                chunk_nbytes=CHUNK_NBYTES,
                segments=segments,
                chunks=chunks,
            )
            for name, content in (("index", index_data), ("header", encode_header(header))):
                with _create(temporary / name) as file:
                    _write_all(file, memoryview(content))
                    os.fsync(file.fileno())
            os.fsync(lock.fileno())
            temporary.rename(path)
            with OwnedFd(os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)) as parent:
                os.fsync(parent.fileno())
        except OSError as e:
            shutil.rmtree(temporary, ignore_errors=True)
            raise SnapshotError(f"cannot write {path}: {e.strerror or e}") from e
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _write_chunks(data: OwnedFd, segments: list[int], mapping: Mapping) -> Iterator[bytes]:
    for chunk in chunks_of(segments, CHUNK_NBYTES):
        hasher = xxhash.xxh3_128()
        for begin in range(0, chunk.nbytes, _PIECE_NBYTES):
            nbytes = min(_PIECE_NBYTES, chunk.nbytes - begin)
            piece = mapping.read(chunk.segment, chunk.offset_bytes + begin, nbytes)
            hasher.update(piece)
            _write_all(data, piece)
        # Chunk by chunk, so that the sync at the end does not hold up everybody's writes at once.
        # The pages stay in the cache, for a restart.
        os.fdatasync(data.fileno())
        yield hasher.digest()


def _create(path: Path) -> OwnedFd:
    return OwnedFd(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _write_all(file: OwnedFd, content: memoryview) -> None:
    while content:
        content = content[os.write(file.fileno(), content) :]


if __name__ == "__main__":
    sys.exit(main())
