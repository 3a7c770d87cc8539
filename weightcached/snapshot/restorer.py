"""The child that brings a snapshot back: `python -m weightcached.snapshot.restorer SNAPSHOT`.

It takes the loader's job and speaks the loader's protocol, and imports neither torch nor vLLM:
threads on all cores read chunks, check each digest, and only then put the chunk into its segment.
Started with the interpreter of the model's engine, which has the CUDA bindings. Whether the
snapshot is the right one is the daemon's decision, made from the index before this child starts.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import msgspec

from weightcached.errors import SegmentError
from weightcached.segments.api import Backend, Staging, WritableSegment, open_backend
from weightcached.snapshot.files import Chunk, Snapshot, open_snapshot
from weightcached.system.fds import OwnedFd, close_all
from weightcached.wire.delivery import DaemonChannel, run_job
from weightcached.wire.loader_job import LoaderJob
from weightcached.wire.messages import LoaderKey

log = logging.getLogger("weightcached.loader")

# Twelve readers reached the speed of page cache and bus (bench/README.md); on a GPU each holds a
# chunk of page-locked memory.
_MOST_READERS = 12


def restore(job: LoaderJob, daemon: DaemonChannel, path: Path) -> None:
    """Read the snapshot into new segments and hand them over. Raises SnapshotError, SegmentError."""
    daemon.phase("opening")
    backend = None if job.waits else open_backend(job.device)
    with open_snapshot(path) as snapshot, closing(Windows(snapshot)) as windows:
        daemon.send(LoaderKey(key=snapshot.index.key))
        if backend is None:
            if job.prepares:
                backend = _prepare(job.device, windows)
            daemon.wait_for_turn()
            backend = backend or open_backend(job.device)
        daemon.phase("segments")
        index = msgspec.structs.replace(
            snapshot.index,
            driver=backend.driver(),
            boot_id=job.boot_id,
            device=job.device,
            generation=job.generation,
            spec_digest=job.spec_digest,
            # Of the weights, unless they have another name by now.
            label=job.label or snapshot.index.label,
        )
        fds = read_segments(snapshot, backend, daemon, windows)
    try:
        daemon.hand_over(index, fds)
    finally:
        close_all(fds)
    # The time of last use, by which the oldest are removed: this one may be gone by now, or on a file
    # system that is read-only.
    with suppress(OSError):
        os.utime(path / "data")


class Windows:
    """Host memory for chunks: on a GPU page-locked, which takes longer than the copy of a chunk."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._nbytes = snapshot.header.chunk_nbytes
        self._free: queue.SimpleQueue[Staging] = queue.SimpleQueue()
        self._made: list[Staging] = []
        self.locking_s: list[float] = []

    def take(self, backend: Backend) -> Staging:
        """A free window, or a new one. Raises SegmentError."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            began_s = time.monotonic()
            window = backend.staging(self._nbytes)
            self._made.append(window)
            self.locking_s.append(time.monotonic() - began_s)
            return window

    def give_back(self, window: Staging) -> None:
        self._free.put(window)

    def close(self) -> None:
        """Free all; may be called twice."""
        while self._made:
            self._made.pop().close()


def _prepare(device: str, windows: Windows) -> Backend | None:
    """Open the device and lock the memory for all readers. Where there is no room, not yet."""
    try:
        backend = open_backend(device)
        with ThreadPoolExecutor(_readers()) as pool:
            taken = list(pool.map(lambda _: windows.take(backend), range(_readers())))
    except SegmentError as e:
        log.info("prepares nothing while it waits: %s", e)
        windows.close()
        return None
    for window in taken:
        windows.give_back(window)
    windows.locking_s.clear()
    return backend


def read_segments(
    snapshot: Snapshot, backend: Backend, daemon: DaemonChannel, windows: Windows
) -> list[OwnedFd]:
    """New segments with the snapshot's bytes, published, in order; the caller closes them."""
    with ExitStack() as undo:
        segments: list[WritableSegment] = []
        for nbytes in snapshot.header.segments:
            segments.append(backend.create(nbytes))
            undo.callback(segments[-1].close)
        daemon.phase("restoring", snapshot.nbytes)
        _fill(snapshot, segments, backend, daemon, windows)
        daemon.phase("publishing")
        fds: list[OwnedFd] = []
        undo.callback(lambda: close_all(fds))
        for segment in segments:
            fds.append(segment.publish())
        kept, fds = fds, []
    return kept


def _readers() -> int:
    return min(_MOST_READERS, 2 * (os.cpu_count() or 1))


def _fill(
    snapshot: Snapshot,
    segments: list[WritableSegment],
    backend: Backend,
    daemon: DaemonChannel,
    windows: Windows,
) -> None:
    def bring(chunk: Chunk, digest: bytes) -> int:
        staging = windows.take(backend)
        with staging.view()[: chunk.nbytes] as window:
            snapshot.read(chunk, digest, window)
            # Not in the background: from page-locked memory the copy takes a tenth of the time of
            # the read, and a second window would take longer to lock than it could save.
            segments[chunk.segment].write(chunk.offset_bytes, window)
        windows.give_back(staging)
        return chunk.nbytes

    done = 0
    pool = ThreadPoolExecutor(_readers(), thread_name_prefix="restore")
    try:
        runs = [pool.submit(bring, chunk, digest) for chunk, digest in snapshot.chunks()]
        for run in as_completed(runs):
            done += run.result()
            daemon.progress(done, snapshot.nbytes)
    finally:
        pool.shutdown(cancel_futures=True)
        began_s = time.monotonic()
        windows.close()
    # Each reader first locks its memory and copies for the rest of the time, so the copy itself took
    # the whole less the mean of that. While one locks, others copy: it is no time of its own.
    locking_s = sum(windows.locking_s) / max(1, len(windows.locking_s))
    daemon.set_apart("locking", locking_s + time.monotonic() - began_s)


if __name__ == "__main__":
    run_job(lambda job, daemon: restore(job, daemon, Path(sys.argv[1])))
