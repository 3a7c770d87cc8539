"""`weightcachectl snapshot`: the snapshots on disk. Only to write one takes a daemon."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from weightcached.cli.progress import ProgressDisplay
from weightcached.cli.status import ANSWER_TIMEOUT_S, connect
from weightcached.config.manifest import load_manifest
from weightcached.config.snapshots import default_directory
from weightcached.errors import ManifestError, ProtocolError, SnapshotError
from weightcached.snapshot.files import all_snapshots, open_snapshot, remove_snapshot
from weightcached.system.paths import manifest_path
from weightcached.system.text import bytes_text
from weightcached.wire.connection import error_of
from weightcached.wire.messages import Done, Progress, Refused, WriteSnapshot


class SnapshotRow(NamedTuple):
    """One snapshot. `error` says why it cannot be used; the rest is 0 or empty then."""

    device: str
    cache: str
    bytes: int
    created_at: float
    path: str
    error: str


NO_KEY = "starts do not use it: the manifest has no key snapshots; 'snapshots: {}' is enough"


def is_used(manifest: str) -> bool:
    """Whether starts use snapshots: a daemon's manifest has the key, or cannot be read now."""
    try:
        return load_manifest(Path(manifest)).snapshots is not None
    except ManifestError:
        return True


def directory() -> Path:
    """The manifest's directory of snapshots, or the default. Raises ManifestError, SnapshotError."""
    spec = load_manifest(manifest_path(None)).snapshots
    return spec.directory if spec else default_directory()


def write(device: str, cache: str, display: ProgressDisplay) -> None:
    """Have a daemon write the snapshot of a cache, and wait. Raises WeightcachedError."""
    with connect(device) as connection:
        reply = connection.request(WriteSnapshot(cache=cache), ANSWER_TIMEOUT_S)
        while isinstance(reply, Progress):
            display.show(f"{device} {cache}", reply)
            reply, _ = connection.receive(ANSWER_TIMEOUT_S)
    if isinstance(reply, Refused):
        raise error_of(reply)
    if not isinstance(reply, Done):
        raise ProtocolError(
            f"the daemon of {device} answered WriteSnapshot with {type(reply).__name__}, expected Done"
        )


def rows(root: Path, cache: str | None = None) -> list[SnapshotRow]:
    """All snapshots, or those of one cache or model."""
    found = [_row(device, path) for device, _, path in all_snapshots(root)]
    return [row for row in found if cache is None or cache in (row.cache, _model(row.cache))]


def _row(device: str, path: Path) -> SnapshotRow:
    try:
        with open_snapshot(path) as snapshot:
            header = snapshot.header
            return SnapshotRow(
                device, header.cache, snapshot.nbytes, header.created_at, str(path), ""
            )
    except SnapshotError as e:
        cache = "/".join(path.parent.name.rsplit(".", 1))
        return SnapshotRow(device, cache, 0, 0.0, str(path), str(e))


def _model(cache: str) -> str:
    return cache.rpartition("/")[0]


def table(rows: list[SnapshotRow]) -> list[str]:
    """A line for each, and their sum."""
    lines = [
        f"{row.device} {row.cache}: "
        + (row.error or f"{bytes_text(row.bytes)}, written {when(row.created_at)}")
        for row in rows
    ]
    return [*lines, f"{len(rows)} snapshots, {bytes_text(sum(row.bytes for row in rows))}"]


def when(created_at: float) -> str:
    """A time for people."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created_at))


def verify(row: SnapshotRow) -> str:
    """Read the whole snapshot. Returns the fault, or ""."""
    try:
        with open_snapshot(Path(row.path)) as snapshot:
            snapshot.verify()
    except SnapshotError as e:
        return str(e)
    return ""


def remove(row: SnapshotRow) -> None:
    """Remove it. Raises SnapshotError if that fails."""
    try:
        remove_snapshot(Path(row.path))
    except OSError as e:
        raise SnapshotError(f"cannot remove {row.path}: {e.strerror}") from e
