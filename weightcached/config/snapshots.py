"""`snapshots:` of the manifest: whether generations are kept as files, where, and how many."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from weightcached.config.located_yaml import Value
from weightcached.errors import SnapshotError

KEYS = ("dir", "max_bytes", "keep")
_SIZE = re.compile(r"(\d{1,15}) ?(MiB|GiB|TiB)")
_UNITS = {"MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


class SnapshotSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`max_bytes` bounds all snapshots of this directory, 0 for no bound; `keep` counts those of one
    cache.
    """

    directory: Path
    max_bytes: int = 0
    keep: int = 1


def default_directory() -> Path:
    """$XDG_CACHE_HOME/weightcached/snapshots, else ~/.cache/weightcached/snapshots. Raises
    SnapshotError without either.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(base):
        raise SnapshotError(
            "no directory for snapshots: neither XDG_CACHE_HOME nor HOME names one; "
            "set snapshots: {dir: …} in the manifest"
        )
    return Path(base, "weightcached", "snapshots")


def parse_snapshots(value: Value) -> SnapshotSpec:
    """The key's value. Raises ManifestError."""
    keys = value.mapping(KEYS)
    if "dir" in keys:
        directory = Path(keys["dir"].string())
        if not directory.is_absolute():
            keys["dir"].fail(f"expected an absolute path, got {str(directory)!r}")
    else:
        try:
            directory = default_directory()
        except SnapshotError as e:
            value.fail(str(e))
    return SnapshotSpec(
        directory=directory,
        max_bytes=_nbytes(keys["max_bytes"]) if "max_bytes" in keys else 0,
        keep=keys["keep"].integer(1) if "keep" in keys else 1,
    )


def _nbytes(value: Value) -> int:
    if value.kind == "int":
        return value.integer(1)
    match = _SIZE.fullmatch(value.string())
    if match is None:
        value.fail(f"expected bytes or a size such as 200 GiB, got {value.described()}")
    return int(match[1]) * _UNITS[match[2]]
