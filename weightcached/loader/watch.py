"""Which files a load reads, and which it looks for in vain: seen, not guessed from their names.

Python's own opens pass an audit hook, which torch, numpy and all that reads through them use;
safetensors opens its files in native code and is wrapped. Formats whose readers are native code
throughout are not seen: there, all that was chosen counts as read.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from weightcached.checkpoint.files import (
    WeightFile,
    blob_of,
    hub_cache_dir,
    is_settled,
    reading_order,
    stat_tuple,
)
from weightcached.checkpoint.identity import CheckpointIdentity, records_of
from weightcached.errors import LoadError

# vLLM's load formats that read with Python, torch or safetensors alone.
SEEN_FORMATS = ("auto", "hf", "safetensors", "mistral", "pt", "npcache", "sharded_state")
# Below the checkpoint's root everything counts. Elsewhere a load also opens libraries, caches and
# settings: there only files with names of weights count.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npy", ".npz")
_SETTLE_POLL_S = 0.001
_SETTLE_POLLS = 100


class Watch:
    """The files opened for reading during the block, with their status at the first time.

    recorded: the files that an engine would choose. Python cannot remove an audit hook: one watch
    per process.
    """

    def __init__(self, recorded: CheckpointIdentity) -> None:
        self._recorded = recorded
        self._roots = [
            os.path.join(p, "") for p in (recorded.root, os.path.realpath(recorded.root))
        ]
        self._inodes = {file.stat[:2]: file.name for file in (*recorded.files, *recorded.extra)}
        self._active = False
        self._opened: dict[str, WeightFile] = {}
        self._missed: set[str] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        sys.addaudithook(self._note_open)
        self._active = True
        try:
            with _safe_open_heard(self._note), _misses_heard(self._miss):
                yield
        finally:
            self._active = False

    def _note_open(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._active or event != "open":
            return
        path, _, flags = arguments
        if not isinstance(flags, int) or flags & os.O_ACCMODE != os.O_WRONLY:
            self._note(path)

    def _note(self, path: Any) -> None:
        # A hook that raises would make the open fail.
        with suppress(TypeError, ValueError):  # a descriptor; a name that no file can have
            path = os.path.abspath(os.fsdecode(path))
            name = self._name(path)
            if name and name not in self._opened and (found := _look(path)):
                self._opened[name] = WeightFile(name, *found)

    def _miss(self, path: Any) -> None:
        if self._active:
            with suppress(TypeError, ValueError):
                self._missed.add(self._below_root(os.path.abspath(os.fsdecode(path))))

    def _below_root(self, path: str) -> str:
        return next((path[len(root) :] for root in self._roots if path.startswith(root)), "")

    def _name(self, path: str) -> str:
        """A file's name in the record; "" if it does not count."""
        if name := self._below_root(path):
            return name
        with suppress(OSError):
            info = os.stat(path)
            if chosen := self._inodes.get((info.st_dev, info.st_ino)):
                # By another way to the same file, as past the links of a Hub snapshot.
                return chosen
        return path if path.endswith(_WEIGHT_SUFFIXES) and not _is_a_librarys(path) else ""

    def read(self, load_format: str) -> CheckpointIdentity:
        """The record of the files read: chosen ones that were read, and others.

        Without digests, if the list differs. Raises LoadError if no chosen file was read,
        CheckpointError for too many files or too long names.
        """
        recorded, opened = self._recorded, set(self._opened)
        if load_format not in SEEN_FORMATS:
            opened |= {file.name for file in recorded.files}
        files = [file for file in recorded.files if file.name in opened]
        if not files:
            raise LoadError(
                f"the load read none of the weight files of {recorded.root} that were there before it: when nothing "
                "writes to the checkpoint any more, 'weightcachectl reload'"
            )
        known = {file.name for file in recorded.files}
        index = [file for file in recorded.extra if file.name in opened]
        beside = sorted(opened - known - {file.name for file in index}, key=reading_order)
        found = records_of(recorded.root, [self._opened[name] for name in beside])
        read = CheckpointIdentity(
            root=recorded.root,
            files=files,
            extra=index + found,
            absent=sorted(self._missed - opened - {""}),
            unread=[file.name for file in recorded.files if file.name not in opened],
        )
        if [*read.names, *read.absent] == [*recorded.names, *recorded.absent]:
            read = msgspec.structs.replace(read, sample=recorded.sample)
        return read


def _is_a_librarys(path: str) -> bool:
    """Whether a file belongs to an installed library, or to its cache of compiled kernels."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    ours = path.startswith(os.path.join(hub_cache_dir(), ""))
    return not ours and path.startswith((os.path.join(sys.prefix, ""), os.path.join(cache, "")))


def _look(path: str) -> tuple[Any, str] | None:
    """A regular file's status and blob; None for anything else."""
    for _ in range(_SETTLE_POLLS):
        try:
            info = os.stat(path)
        except OSError:
            return None
        if not stat.S_ISREG(info.st_mode):
            return None
        if is_settled(info.st_ctime_ns):
            break
        # Written this moment, by this load itself, as one of vLLM's formats does.
        time.sleep(_SETTLE_POLL_S)
    return stat_tuple(info), blob_of(path)


@contextmanager
def _safe_open_heard(note: Any) -> Iterator[None]:
    """safetensors' reader, wherever a module has it by name."""
    import safetensors

    original = safetensors.safe_open

    def safe_open(filename: Any, *args: Any, **kwargs: Any) -> Any:
        note(filename)
        return original(filename, *args, **kwargs)

    _replace(original, safe_open)
    try:
        yield
    finally:
        _replace(safe_open, original)


@contextmanager
def _misses_heard(note: Any) -> Iterator[None]:
    """Questions for files that are not there: os.path and pathlib ask them through os.stat."""
    original = os.stat

    def hear(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        try:
            return original(path, *args, **kwargs)
        except (FileNotFoundError, NotADirectoryError):
            note(path)
            raise

    os.stat = hear
    try:
        yield
    finally:
        os.stat = original


def _replace(old: Any, new: Any) -> None:
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("safe_open") is old:
            module.__dict__["safe_open"] = new
