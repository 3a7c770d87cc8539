"""`snapshots:` of the manifest: whether generations are kept as files, the directory, and limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from weightcached.config.located_yaml import Value
from weightcached.config.sizes import SizeText, nbytes_of
from weightcached.errors import HomeError, SnapshotError
from weightcached.system.paths import cache_home

Count = Annotated[int, Meta(ge=1)]


class SnapshotSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`max_bytes` bounds all snapshots of this directory, 0 for no bound; `keep` counts those of one
    cache.
    """

    directory: Path
    max_bytes: int = 0
    keep: int = 1


class SnapshotsEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The key, as it is written."""

    dir: Annotated[str, Meta(pattern="^/", description="an absolute path")] = ""
    max_bytes: Annotated[
        Annotated[int, Meta(ge=0)] | SizeText,
        Meta(description="bytes or a size such as 200 GiB"),
    ] = 0
    keep: Count = 1


def default_directory() -> Path:
    """$XDG_CACHE_HOME/weightcached/snapshots, else ~/.cache/weightcached/snapshots.

    Raises SnapshotError if the environment names neither.
    """
    try:
        return cache_home() / "weightcached/snapshots"
    except HomeError as e:
        raise SnapshotError(
            "no directory for snapshots: neither XDG_CACHE_HOME nor HOME names one; "
            "set snapshots: {dir: …} in the manifest"
        ) from e


def resolve_snapshots(entry: SnapshotsEntry, value: Value) -> SnapshotSpec:
    """The entry's settings; value: its place. Raises ManifestError."""
    try:
        directory = Path(entry.dir) if entry.dir else default_directory()
    except SnapshotError as e:
        value.fail(str(e))
    return SnapshotSpec(directory=directory, max_bytes=nbytes_of(entry.max_bytes), keep=entry.keep)
