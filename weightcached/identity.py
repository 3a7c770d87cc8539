"""Checkpoint identity: decide whether two checkpoints hold the same values, as cheaply as is safe.

The ladder of docs/identity.md: same files, Hub blobs, sample, full digest; the first decisive rung counts.
Torch-free; used by the daemon, the loader child and the engine.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_FILES = 4096


class FileRecord(msgspec.Struct, frozen=True, array_like=True):
    """One weight file as it was when it was read. `blob` is its sha256 name where the Hub cache gives one."""

    name: Annotated[str, Meta(max_length=1_000)]
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    blob: Annotated[str, Meta(max_length=100)] = ""


class CheckpointIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The weight files of one checkpoint and the digests made of them so far (hex, or empty)."""

    root: Annotated[str, Meta(max_length=4_096)]
    files: Annotated[list[FileRecord], Meta(max_length=MAX_FILES)] = []
    sample: Annotated[str, Meta(max_length=128)] = ""
    full: Annotated[str, Meta(max_length=128)] = ""
