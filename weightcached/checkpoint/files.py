"""Which weight files a model argument names, and how to open them without trusting their paths.

Mirrors the choice of vLLM's default loader for local directories and for snapshots in the local Hub
cache; asks no network. Reads no weights: safetensors_header.py and digests.py do that, through
open_recorded().
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import msgspec

from weightcached.errors import CheckpointError

StatTuple = tuple[int, int, int, int, int]
STAT_FIELDS = ("device", "inode", "size", "mtime_ns", "ctime_ns")

_HF_INDEX = "model.safetensors.index.json"
_MISTRAL_INDEX = "consolidated.safetensors.index.json"
_BIN_INDEX = "pytorch_model.bin.index.json"
_MISTRAL_PATTERN = "consolidated*.safetensors"
# The first pattern with a match is the one that is read.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "hf": ("*.safetensors", "*.bin", "*.pt"),
    "safetensors": ("*.safetensors",),
    "fastsafetensors": ("*.safetensors",),
    "instanttensor": ("*.safetensors",),
    "runai_streamer": ("*.safetensors",),
    "sharded_state": ("*.safetensors",),
    "runai_streamer_sharded": ("*.safetensors",),
    "mistral": (_MISTRAL_PATTERN,),
    "pt": ("*.pt",),
    "npcache": ("*.bin", "*.pt"),
    "gguf": ("*.gguf",),
}
# Formats that read the shards which an index names, and no others.
_INDEXES = {
    "hf": _HF_INDEX,
    "safetensors": _HF_INDEX,
    "fastsafetensors": _HF_INDEX,
    "instanttensor": _HF_INDEX,
    "runai_streamer": _HF_INDEX,
    "mistral": _MISTRAL_INDEX,
}
_TRAINING_STATE = (
    "training_args.bin",
    "optimizer.bin",
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
)
_GGUF_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_REPO_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)
# Large files are called by the sha256 of their content, small ones by git's sha1 of it.
_BLOB_TARGET = re.compile(r"(?:.*/)?blobs/([0-9a-f]{64}|[0-9a-f]{40})")
_SNAPSHOT = re.compile(r"(.*/models--[^/]+)/snapshots/([^/]+)")
_TRUE = ("1", "ON", "YES", "TRUE")
_MAX_INDEX_FILE_BYTES = 100_000_000
# The kernel stamps ctime with its tick, at most 10 ms long: a file younger than this could change
# again unseen.
_SETTLE_S = 0.02
_SETTLE_POLL_S = 0.002
_SETTLE_LIMIT_S = 1.0


class WeightFile(NamedTuple):
    """One file. name: below the root, or absolute; blob: its name in a Hub cache, or ""."""

    name: str
    stat: StatTuple
    blob: str


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def stat_tuple(info: os.stat_result) -> StatTuple:
    """(device, inode, size, mtime_ns, ctime_ns): equal tuples mean the same unchanged file."""
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


class Chosen(NamedTuple):
    """The files that an engine would read now.

    The weight files in reading order, the index files that name them, and names of index files that
    it would look for and not find.
    """

    root: str
    files: list[WeightFile]
    indexes: list[WeightFile]
    absent: list[str]


def choose_files(
    model: str, *, revision: str | None, download_dir: str | None, load_format: str
) -> Chosen:
    """The files that an engine would read for this model argument.

    Opens no weight file. Waits up to a second for files that were written this very moment. Raises
    CheckpointError.
    """
    if os.path.isfile(model):
        root, names = os.path.dirname(os.path.abspath(model)), _single_file(model)
        formats = ["gguf"]
    else:
        is_directory = os.path.isdir(model)
        root = os.path.abspath(model) if is_directory else _snapshot(model, revision, download_dir)
        formats = _formats(root, load_format, hub=not is_directory and not hub_is_offline())
        names = _choose(root, formats)
    if not names:
        raise CheckpointError(_no_weights(root, load_format))
    ordered = sorted(names, key=reading_order)
    indexes = sorted({_INDEXES[name] for name in formats if name in _INDEXES})
    present = [name for name in indexes if os.path.lexists(os.path.join(root, name))]
    files = look_at(root, [*ordered, *present])
    absent = [name for name in indexes if name not in present]
    return Chosen(root, files[: len(ordered)], files[len(ordered) :], absent)


def reading_order(name: str) -> tuple[list[tuple[int, str]], str]:
    # Digits count as numbers: shard 10 is read after shard 9. A tensor that stands in two shards
    # keeps the last one's value, so the order is part of the identity.
    parts = re.split(r"([0-9]+)", os.path.basename(name))
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts], name


# ---- finding the checkpoint


def _single_file(model: str) -> set[str]:
    name = os.path.basename(model)
    if not name.endswith(".gguf"):
        raise CheckpointError(
            f"model {model} is a file: expected a directory, a .gguf file or a Hub repository"
        )
    shard = _GGUF_SHARD.fullmatch(name)
    if shard is None:
        return {name}
    stem, _, count = shard.groups()
    if int(count) > 10_000:
        raise CheckpointError(
            f"model {model} says that it is one of {int(count)} files: at most 10000 are read"
        )
    return {f"{stem}-{number:05d}-of-{count}.gguf" for number in range(1, int(count) + 1)}


def hub_cache_dir() -> str:
    """The Hub cache of huggingface_hub: HF_HUB_CACHE, HF_HOME/hub or ~/.cache/huggingface/hub."""
    env = os.environ
    cache_home = env.get("XDG_CACHE_HOME", "~/.cache")
    home = env.get("HF_HOME", os.path.join(cache_home, "huggingface"))
    path = env.get("HF_HUB_CACHE", env.get("HUGGINGFACE_HUB_CACHE", os.path.join(home, "hub")))
    return os.path.expandvars(os.path.expanduser(path))


def _hub_cache_from() -> str:
    """The variable that names the Hub cache. A service manager often lacks variables of a shell."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        if name in os.environ:
            return f"{name} is {os.environ[name]}"
    return "HF_HOME is not set in this environment"


def hub_is_offline() -> bool:
    """Whether huggingface_hub asks no network; vLLM then takes the snapshot for a directory."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.upper() in _TRUE for value in values)


def _no_weights(root: str, load_format: str) -> str:
    patterns = " or ".join(_PATTERNS.get(load_format, _PATTERNS["hf"]))
    text = f"checkpoint {root} has no weight files that load format {load_format!r} reads: "
    if not _SNAPSHOT.fullmatch(root):
        return f"{text}expected {patterns}; name another model or load format"
    if complete := _complete_snapshots(root, load_format):
        # A download of the configuration alone moves refs/main too.
        return (
            f"{text}only a part of this revision was downloaded; complete is revision "
            f"{' and '.join(complete)}: download this one, or pin that one with 'revision: {complete[-1]}' beside "
            "'model:'"
        )
    return f"{text}expected {patterns}; download the model, or name another"


def _complete_snapshots(root: str, load_format: str) -> list[str]:
    """The other revisions of the repository that have weight files, the newest last."""
    parent = os.path.dirname(root)
    complete: list[tuple[int, str]] = []
    for commit in os.listdir(parent):
        snapshot = os.path.join(parent, commit)
        with suppress(OSError, CheckpointError):
            if _choose(snapshot, _formats(snapshot, load_format, hub=False)):
                complete.append((os.stat(snapshot).st_mtime_ns, commit))
    return [commit for _, commit in sorted(complete)]


def _snapshot(model: str, revision: str | None, download_dir: str | None) -> str:
    if not _REPO_ID.fullmatch(model):
        raise CheckpointError(
            f"model {model!r} is neither a directory nor a .gguf file nor a Hub repository: "
            "name one of these that this machine can read"
        )
    repo = os.path.join(download_dir or hub_cache_dir(), "models--" + model.replace("/", "--"))
    wanted = revision or "main"
    if ".." in wanted.split("/") or wanted.startswith("/"):
        raise CheckpointError(
            f"revision {wanted!r} of model {model} is malformed: expected a branch, tag or commit"
        )
    reference = os.path.join(repo, "refs", wanted)
    commit = wanted
    if os.path.isfile(reference):
        commit = _read_small(reference).decode("ascii", "replace").strip()
    snapshot = os.path.join(repo, "snapshots", commit)
    if "/" in commit or commit in {"", ".", ".."} or not os.path.isdir(snapshot):
        raise CheckpointError(
            f"model {model} at revision {wanted} is neither a directory nor in the Hub cache {os.path.dirname(repo)} "
            f"({'download_dir' if download_dir else _hub_cache_from()}): "
            f"hf download {model}{f' --revision {revision}' if revision else ''}"
        )
    return os.path.abspath(snapshot)


# ---- which files of it are read


def _formats(root: str, load_format: str, *, hub: bool) -> list[str]:
    """The format in force; both, if a Hub model has both: vLLM's choice needs the Hub."""
    if load_format == "auto":
        if not _matching(root, _MISTRAL_PATTERN):
            return ["hf"]
        return ["mistral", "hf"] if hub else ["mistral"]
    if load_format not in _PATTERNS:
        raise CheckpointError(
            f"load format {load_format!r} reads no weight files that can be compared: "
            f"expected auto, {', '.join(_PATTERNS)}"
        )
    return [load_format]


def _choose(root: str, formats: list[str]) -> set[str]:
    names: set[str] = set()
    for load_format in formats:
        for pattern in _PATTERNS[load_format]:
            found = _matching(root, pattern)
            if pattern.endswith(".safetensors") and load_format in _INDEXES:
                found = _read_index_file(root, found, _INDEXES[load_format])
            elif pattern == "*.bin":
                _read_index_file(root, found, _BIN_INDEX)
            found = {name for name in found if not name.endswith(_TRAINING_STATE)}
            if found:
                names |= found
                break
    return names


def _matching(root: str, pattern: str) -> set[str]:
    try:
        entries = os.listdir(root)
    except OSError as e:
        raise CheckpointError(f"checkpoint directory {root} cannot be listed: {e.strerror}") from e
    return {
        name for name in entries if not name.startswith(".") and fnmatch.fnmatchcase(name, pattern)
    }


def _read_index_file(root: str, found: set[str], index_name: str) -> set[str]:
    """The files that the index names, which must exist; without an index, the files found."""
    path = os.path.join(root, index_name)
    if not os.path.lexists(path):
        return found
    try:
        shards = set(msgspec.json.decode(_read_small(path), type=_Index).weight_map.values())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise CheckpointError(
            f"checkpoint index {path} is malformed: {e}; download the checkpoint again"
        ) from e
    for shard in shards:
        if os.path.isabs(shard) or ".." in shard.split("/"):
            raise CheckpointError(
                f"checkpoint index {path} names {shard!r}, outside the checkpoint: edit the index"
            )
    missing = sorted(
        shard
        for shard in shards
        if shard not in found and not os.path.exists(os.path.join(root, shard))
    )
    if missing:
        listed = ", ".join(missing[:10]) + (
            f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        )
        raise CheckpointError(
            f"checkpoint index {path} names shards that are missing: {listed}; download them again"
        )
    return {os.path.normpath(shard) for shard in shards}


# ---- looking at files without being held up or fooled by them


def kind_of(mode: int) -> str:
    """The kind of a file in words, e.g. "a FIFO"."""
    for test, word in (
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
    ):
        if test(mode):
            return word
    return "a regular file"


def look_at(root: str, names: list[str]) -> list[WeightFile]:
    """The files' records. Waits until no file is so young that a change could keep its ctime.

    Raises CheckpointError.
    """
    deadline = time.monotonic() + _SETTLE_LIMIT_S
    while True:
        files = [_look(root, name) for name in names]
        youngest = max(files, key=lambda file: file.stat[4])
        if is_settled(youngest.stat[4]):
            return files
        if time.monotonic() > deadline:
            path = os.path.join(root, youngest.name)
            raise CheckpointError(
                f"weight file {path} is being written: start again when the checkpoint is complete"
            )
        time.sleep(_SETTLE_POLL_S)


def is_settled(ctime_ns: int) -> bool:
    """Whether a next change of the file would show in its ctime."""
    # A ctime in the future comes from a clock that was set back; waiting for it would be no use.
    return not 0 <= (time.time_ns() - ctime_ns) / 1e9 < _SETTLE_S


def _look(root: str, name: str) -> WeightFile:
    path = os.path.join(root, name)
    try:
        info = os.stat(path)
    except OSError as e:
        raise CheckpointError(
            f"weight file {path} cannot be read: {e.strerror}; download the checkpoint again"
        ) from e
    if not stat.S_ISREG(info.st_mode):
        raise CheckpointError(
            f"weight file {path} is {kind_of(info.st_mode)}: expected a regular file"
        )
    if not os.access(path, os.R_OK, effective_ids=True):
        raise CheckpointError(
            f"weight file {path} cannot be read: Permission denied; chmod u+r it or run as its owner"
        )
    return WeightFile(name, stat_tuple(info), blob_of(path))


def blob_of(path: str) -> str:
    """The content digest that a file of a Hub cache is called by, or nothing."""
    try:
        target = _BLOB_TARGET.fullmatch(os.readlink(path))
    except OSError:  # not a symbolic link
        return ""
    return target[1] if target else ""


def open_regular(path: str, what: str = "weight file") -> tuple[int, os.stat_result]:
    """A descriptor of a regular file, and its status. The caller closes it. Never blocks on a FIFO."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError as e:
        raise CheckpointError(
            f"{what} {path} cannot be opened: {e.strerror}; name a checkpoint that can be read"
        ) from e
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise CheckpointError(
                f"{what} {path} is {kind_of(info.st_mode)}: expected a regular file"
            )
    except BaseException:
        os.close(fd)
        raise
    return fd, info


@contextmanager
def open_recorded(path: str, recorded: StatTuple) -> Iterator[int]:
    """A descriptor of a file that is as recorded, before and after. Raises CheckpointError."""
    fd, info = open_regular(path)
    try:
        check_unchanged(path, recorded, info)
        yield fd
        check_unchanged(path, recorded, os.fstat(fd))
    finally:
        os.close(fd)


def check_unchanged(path: str, recorded: StatTuple, info: os.stat_result) -> None:
    """Require the recorded status. Raises CheckpointError naming the difference."""
    for field, was, now in zip(STAT_FIELDS, recorded, stat_tuple(info), strict=True):
        if was != now:
            raise CheckpointError(
                f"weight file {path} changed since it was recorded: {field} was {was}, is {now}; "
                "wait until nothing writes to the checkpoint, then: weightcachectl reload"
            )


def read_at(fd: int, path: str, buffer: memoryview, offset: int) -> None:
    """Fill `buffer` from `offset`. Raises CheckpointError if the file ends or fails before."""
    done = 0
    while done < len(buffer):
        try:
            n = os.preadv(fd, [buffer[done:]], offset + done)
        except OSError as e:
            raise CheckpointError(
                f"weight file {path} cannot be read at byte {offset + done}: {e.strerror}"
            ) from e
        if n == 0:
            raise CheckpointError(
                f"weight file {path} ends at byte {offset + done}, expected {offset + len(buffer)}: it was cut short"
            )
        done += n


def _read_small(path: str) -> bytes:
    fd, info = open_regular(path, "file")
    try:
        if info.st_size > _MAX_INDEX_FILE_BYTES:
            raise CheckpointError(
                f"file {path} has {info.st_size} bytes: expected at most {_MAX_INDEX_FILE_BYTES}"
            )
        data = bytearray(info.st_size)
        read_at(fd, path, memoryview(data), 0)
    finally:
        os.close(fd)
    return bytes(data)
