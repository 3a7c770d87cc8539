"""Checkpoint identity: decide whether two checkpoints hold the same values, as cheaply as is safe.

The ladder of docs/identity.md: same files, Hub blobs, sample, full digest; the first decisive rung
counts. Torch-free; used by the daemon, the loader child and the engine. Which files count is
files.py's, reading them safetensors_header.py's and digests.py's business.

`python -m weightcached.checkpoint.identity full [--idle]` is the daemon's child: an identity as JSON
on standard input, the same one with its full digest on standard output; a failure is one line on
standard error and exit status 1. With `--idle` it leaves the machine to everybody else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from weightcached.checkpoint.digests import Source, combine, digest_files, sample_file
from weightcached.checkpoint.files import (
    StatTuple,
    WeightFile,
    choose_files,
    look_at,
    open_recorded,
    stat_tuple,
)
from weightcached.checkpoint.safetensors_header import read_header
from weightcached.errors import EXIT_FAILURE, EXIT_USAGE, CheckpointError

MAX_FILES = 4096
MAX_NAME_CHARS = 1_000
_MAX_ROOT_CHARS = 4_096
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]


class FileRecord(msgspec.Struct, frozen=True, array_like=True):
    """One file as it was recorded.

    name: relative to the root, or absolute outside of it; blob: its name in the Hub cache, a
    digest, or "".
    """

    name: Name
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    blob: Annotated[str, Meta(max_length=100)] = ""

    @property
    def stat(self) -> StatTuple:
        """(device, inode, size, mtime_ns, ctime_ns)."""
        return (self.device, self.inode, self.size, self.mtime_ns, self.ctime_ns)


class CheckpointIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one checkpoint and the digests made of them so far (hex, or empty).

    `files` are the weight files that an engine would choose now, in reading order; after a load,
    those of them that the load read. `extra` are other files that it read, by name: the index of
    the shards, weights in sub-folders. `absent` are names that it looked for and did not find,
    `unread` names of chosen files that it did not read. The digests cover `files` and `extra`, in
    this order.
    """

    root: Annotated[str, Meta(max_length=4_096)]
    files: Annotated[list[FileRecord], Meta(max_length=MAX_FILES)] = []
    sample: Annotated[str, Meta(max_length=128)] = ""
    full: Annotated[str, Meta(max_length=128)] = ""
    extra: Annotated[list[FileRecord], Meta(max_length=MAX_FILES)] = []
    absent: Annotated[list[Name], Meta(max_length=MAX_FILES)] = []
    unread: Annotated[list[Name], Meta(max_length=MAX_FILES)] = []

    @property
    def names(self) -> list[str]:
        """Of the files that digests are made of, in their order."""
        return [file.name for file in (*self.files, *self.extra)]


# ---- making and completing a record


def record_checkpoint(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    load_format: str = "auto",
) -> CheckpointIdentity:
    """Record the weight files that the engine would read for this model argument, without opening
    one.

    `model` is a directory, a .gguf file or a Hub repository whose snapshot is in the local cache
    (`download_dir`, or the one that HF_HUB_CACHE and HF_HOME name). Files come in reading order.
    Call it before the weights are read and changed_files() after: then the record describes the
    weights that were read. Raises CheckpointError.
    """
    chosen = choose_files(
        model, revision=revision, download_dir=download_dir, load_format=load_format
    )
    _check_text(chosen.root, _MAX_ROOT_CHARS)
    return CheckpointIdentity(
        root=chosen.root,
        files=records_of(chosen.root, chosen.files),
        extra=records_of(chosen.root, chosen.indexes),
        absent=chosen.absent,
    )


def records_of(root: str, found: Sequence[WeightFile]) -> list[FileRecord]:
    """The files as records. Raises CheckpointError for too many files or too long names."""
    if len(found) > MAX_FILES:
        raise CheckpointError(
            f"checkpoint {root} has {len(found)} weight files: at most {MAX_FILES} are compared"
        )
    for file in found:
        _check_text(file.name, MAX_NAME_CHARS)
    return [FileRecord(file.name, *file.stat, file.blob) for file in found]


def _check_text(path: str, limit: int) -> None:
    # A name that os.fsdecode() could not decode cannot travel in a message either.
    if len(path) > limit or any("\ud800" <= char <= "\udfff" for char in path):
        raise CheckpointError(
            f"path {path[:200]!r} is longer than {limit} characters or not UTF-8: rename it"
        )


def with_files(identity: CheckpointIdentity, names: Sequence[str]) -> CheckpointIdentity:
    """The record of exactly these names, in this order, for digests of them.

    Looks now for files that are not recorded yet. Raises CheckpointError for an unreadable file.
    """
    if list(names) == [*identity.names, *identity.absent]:
        return identity
    known = {file.name: file for file in (*identity.files, *identity.extra)}
    unknown = [name for name in names if name not in known]
    new = [name for name in unknown if os.path.lexists(os.path.join(identity.root, name))]
    if new:
        found = records_of(identity.root, look_at(identity.root, new))
        known |= {file.name: file for file in found}
    chosen = {file.name for file in identity.files}
    return CheckpointIdentity(
        root=identity.root,
        files=[known[name] for name in names if name in chosen],
        extra=[known[name] for name in names if name in known and name not in chosen],
        absent=[name for name in names if name not in known],
    )


def check_headers(identity: CheckpointIdentity) -> int:
    """Check the header of every safetensors file; returns the bytes of all tensors.

    Files of other kinds count with their size. Raises CheckpointError naming file, tensor and
    value.
    """
    total = 0
    for source in _sources(identity.root, identity.files):
        with open_recorded(source.path, source.stat) as fd:
            if source.path.endswith(".safetensors"):
                total += sum(
                    tensor.end - tensor.begin
                    for tensor in read_header(fd, source.path, source.nbytes).tensors
                )
            elif source.nbytes:
                total += source.nbytes
            else:
                raise CheckpointError(f"weight file {source.path} has 0 bytes: download it again")
    return total


def changed_files(identity: CheckpointIdentity) -> list[str]:
    """Names of files that are no longer as recorded; missing and new ones count. Opens none."""
    files = (*identity.files, *identity.extra)
    changed = [file.name for file in files if _stat_now(identity.root, file) != file.stat]
    new = [n for n in identity.absent if os.path.lexists(os.path.join(identity.root, n))]
    return changed + new


def sample_digest(identity: CheckpointIdentity) -> str:
    """Digest of the headers and of a few KiB of every tensor.

    Raises CheckpointError for a file that is not as recorded.
    """
    sources = _all_sources(identity)
    return combine("sample", [(source.nbytes, sample_file(source)) for source in sources])


def full_digest(
    identity: CheckpointIdentity,
    *,
    progress: Callable[[int, int], None] | None = None,
    workers: int | None = None,
) -> str:
    """Digest of every byte of every file, in reading order; names do not count.

    progress(done_bytes, total_bytes) is called in this thread. `workers` are threads, by default
    one per usable core. A file that was read before, as it is recorded, is not opened again, and
    may have changed since. Raises CheckpointError for another that is not, or does not stay, as
    recorded.
    """
    sources = _all_sources(identity)
    digests = digest_files(sources, progress=progress, workers=workers)
    return combine(
        "full", [(source.nbytes, digest) for source, digest in zip(sources, digests, strict=True)]
    )


def with_sample(identity: CheckpointIdentity) -> CheckpointIdentity:
    """A copy with the sample digest filled in; see sample_digest()."""
    return msgspec.structs.replace(identity, sample=sample_digest(identity))


def with_full(
    identity: CheckpointIdentity,
    *,
    progress: Callable[[int, int], None] | None = None,
    workers: int | None = None,
) -> CheckpointIdentity:
    """A copy with the full digest filled in; see full_digest()."""
    return msgspec.structs.replace(
        identity, full=full_digest(identity, progress=progress, workers=workers)
    )


def _all_sources(identity: CheckpointIdentity) -> list[Source]:
    return _sources(identity.root, [*identity.files, *identity.extra])


def _sources(root: str, files: Sequence[FileRecord]) -> list[Source]:
    return [Source(os.path.join(root, file.name), file.stat) for file in files]


def _stat_now(root: str, file: FileRecord) -> StatTuple | None:
    try:
        return stat_tuple(os.stat(os.path.join(root, file.name)))
    except OSError:
        return None


# ---- deciding

Rung = Literal["files", "blobs", "sample", "full"]
Side = Literal["cached", "asked"]
_Pair = tuple[FileRecord, FileRecord]


class Decision(msgspec.Struct, frozen=True):
    """The result of decide(): Equal, Different or Need."""


class Equal(Decision, frozen=True):
    """The checkpoints hold the same values, as `rung` shows."""

    rung: Rung


class Different(Decision, frozen=True):
    """The checkpoints differ, or must be taken to differ; `reason` is for a person."""

    reason: str


class Need(Decision, frozen=True):
    """Undecided until `sides` have the digest of `rung`; for `files`: the record of those names."""

    rung: Literal["files", "sample", "full"]
    sides: tuple[Side, ...]


def decide(
    cached: CheckpointIdentity,
    asked: CheckpointIdentity,
    *,
    mode: Literal["full", "sampled"] = "full",
) -> Decision:
    """Compare two records by the first decisive rung; reads nothing.

    Digests that are there and differ count before anything cheaper. In mode "sampled" equal samples
    are equal checkpoints. An empty list of files equals nothing, not even itself. A Need that is
    met never comes back.
    """
    ours, theirs = [*cached.files, *cached.extra], _counterparts(cached, asked)
    if isinstance(theirs, Decision):
        return theirs
    if [file.name for file in theirs] != asked.names:
        # Of other files: its digests say nothing here.
        asked = msgspec.structs.replace(asked, sample="", full="")
    pairs = list(zip(ours, theirs, strict=True))
    refuted = _find_difference(cached, asked, pairs)
    if refuted:
        return Different(refuted)
    if all(a.stat == b.stat for a, b in pairs):
        return Equal("files")
    if cached.full and asked.full:
        return Equal("full")
    if _same_blobs(cached, asked, pairs):
        return Equal("blobs")
    if not (cached.sample and asked.sample):
        return Need("sample", _without(cached.sample, asked.sample))
    if mode == "sampled":
        return Equal("sample")
    return Need("full", _without(cached.full, asked.full))


def names_to_compare(cached: CheckpointIdentity, asked: CheckpointIdentity) -> list[str]:
    """The names to compare in the requested record; its digests cover these files."""
    chosen = [file.name for file in _chosen(cached, asked)]
    return [*chosen, *(file.name for file in cached.extra), *cached.absent]


def _chosen(cached: CheckpointIdentity, asked: CheckpointIdentity) -> list[FileRecord]:
    unread = set(cached.unread)
    return [file for file in asked.files if file.name not in unread]


def _counterparts(
    cached: CheckpointIdentity, asked: CheckpointIdentity
) -> list[FileRecord] | Decision:
    """The requested record's counterpart of each cached file, or the decision."""
    chosen = _chosen(cached, asked)
    if not cached.files or not chosen:
        return Different("a checkpoint without weight files equals no other")
    if len(cached.files) != len(chosen):
        return Different(
            f"the cached checkpoint has {len(cached.files)} weight files, the requested one {len(chosen)}"
        )
    known = {file.name: file for file in (*asked.extra, *asked.files)}
    absent = set(asked.absent)
    for name in (file.name for file in cached.extra):
        if name in absent:
            return Different(f"{name}, which the load read, is missing in the requested one")
    for name in cached.absent:
        if name in known:
            return Different(f"{name}, which the load did not find, is in the requested one")
    if not absent.issuperset(cached.absent) or any(f.name not in known for f in cached.extra):
        return Need("files", ("asked",))
    return chosen + [known[file.name] for file in cached.extra]


def _without(cached: str, asked: str) -> tuple[Side, ...]:
    sides: list[tuple[Side, str]] = [("cached", cached), ("asked", asked)]
    return tuple(side for side, digest in sides if not digest)


def _find_difference(
    cached: CheckpointIdentity, asked: CheckpointIdentity, pairs: list[_Pair]
) -> str:
    """Why the two cannot be equal, or nothing."""
    for ours, theirs in pairs:
        if ours.size != theirs.size:
            return (
                f"{ours.name} has {ours.size} bytes in the cached checkpoint, "
                f"{theirs.name} has {theirs.size} in the requested one"
            )
        if ours.blob and theirs.blob and ours.blob != theirs.blob:
            return f"{ours.name} is Hub blob {ours.blob} in the cached checkpoint, {theirs.blob} in the requested one"
    if cached.full and asked.full and cached.full != asked.full:
        return f"full digest is {cached.full} in the cached checkpoint, {asked.full} in the requested one"
    if cached.sample and asked.sample and cached.sample != asked.sample:
        return f"sample digest is {cached.sample} in the cached checkpoint, {asked.sample} in the requested one"
    return ""


def _same_blobs(cached: CheckpointIdentity, asked: CheckpointIdentity, pairs: list[_Pair]) -> bool:
    """Whether both are, file by file, the same Hub blobs.

    A blob's name vouches for its bytes only while nobody writes to it. If both records mean the
    same blob file, by inode or by its place in one cache, and its status differs, somebody wrote to
    it.
    """
    one_cache = _hub_repository(cached.root) == _hub_repository(asked.root)
    for ours, theirs in pairs:
        if not ours.blob or ours.blob != theirs.blob:
            return False
        one_file = one_cache or ours.stat[:2] == theirs.stat[:2]
        if one_file and ours.stat != theirs.stat:
            return False
    return True


def _hub_repository(snapshot: str) -> str:
    return os.path.dirname(os.path.dirname(snapshot))


# ---- the daemon's child


def main(argv: Sequence[str]) -> int:
    """Read an identity from stdin, write it with its full digest. Returns the status."""
    # Here: every `status` imports this module, for the messages.
    from weightcached.system.process import die_with_parent

    # A killed daemon must not leave somebody who reads a whole checkpoint for nobody.
    die_with_parent()
    if not argv or argv[0] != "full" or list(argv[1:]) not in ([], ["--idle"]):
        sys.stderr.write(
            "usage: python -m weightcached.checkpoint.identity full [--idle] < identity.json\n"
        )
        return EXIT_USAGE
    if len(argv) > 1:
        _lower_priority()
    try:
        identity = msgspec.json.decode(sys.stdin.buffer.read(), type=CheckpointIdentity)
        # One thread: several gigabytes a second, and the other cores and most of the memory's
        # bandwidth are left to the engines.
        completed = with_full(identity, workers=1 if len(argv) > 1 else None)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        sys.stderr.write(f"the identity on standard input does not decode: {e}\n")
        return EXIT_FAILURE
    except CheckpointError as e:
        sys.stderr.write(f"{e}\n".replace("\n", " ").rstrip() + "\n")
        return EXIT_FAILURE
    sys.stdout.buffer.write(msgspec.json.encode(completed) + b"\n")
    return 0


def _lower_priority() -> None:
    """Leave processor and disk to the engines. The policy also lowers the disk's priority."""
    os.nice(19)
    with suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    if os.getsid(0) != os.getpid():
        return
    # The scheduler may weigh sessions against each other; the above then counts within ours alone.
    with suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as group:
        group.write("19")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
