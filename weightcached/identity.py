"""Checkpoint identity: decide whether two checkpoints hold the same values, as cheaply as is safe.

The ladder of docs/identity.md: same files, Hub blobs, sample, full digest; the first decisive rung counts.
Torch-free; used by the daemon, the loader child and the engine.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

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


Side = Literal["cached", "asked"]


class Equal(msgspec.Struct, frozen=True):
    """Both checkpoints hold the same values."""


class Different(msgspec.Struct, frozen=True):
    """They do not, because of `reason`."""

    reason: str


class Need(msgspec.Struct, frozen=True):
    """Undecided: `sides` must fill in the digest of `rung`."""

    rung: Literal["sample", "full"]
    sides: tuple[Side, ...]


def changed_files(identity: CheckpointIdentity) -> list[str]:
    """Names of the files that are no longer as they were when they were read."""
    changed = []
    for file in identity.files:
        try:
            info = os.stat(Path(identity.root, file.name))
        except OSError:
            changed.append(file.name)
            continue
        now = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
        if now != (file.device, file.inode, file.size, file.mtime_ns, file.ctime_ns):
            changed.append(file.name)
    return changed


def decide(
    cached: CheckpointIdentity, asked: CheckpointIdentity, *, mode: Literal["full", "sampled"] = "full"
) -> Equal | Different | Need:
    """The first decisive rung's verdict, or what is needed for the next one."""
    if cached.files and cached.files == asked.files:
        return Equal()
    rungs: tuple[Literal["sample", "full"], ...] = ("sample", "full")
    for rung in rungs:
        ours, theirs = getattr(cached, rung), getattr(asked, rung)
        pairs: list[tuple[Side, str]] = [("cached", ours), ("asked", theirs)]
        sides = tuple(side for side, digest in pairs if not digest)
        if sides:
            return Need(rung, sides)
        if ours != theirs:
            return Different(f"their {rung} digests differ")
        if mode == "sampled":
            return Equal()
    return Equal()


def main() -> None:
    """`python -m weightcached.identity full`: identity as JSON on stdin, the same with its full digest on stdout."""
    identity = msgspec.json.decode(sys.stdin.buffer.read(), type=CheckpointIdentity)
    digest = hashlib.sha256()
    for file in sorted(identity.files, key=lambda f: f.name):
        digest.update(Path(identity.root, file.name).read_bytes())
    completed = msgspec.structs.replace(identity, full=digest.hexdigest())
    sys.stdout.buffer.write(msgspec.json.encode(completed) + b"\n")


if __name__ == "__main__":
    main()
