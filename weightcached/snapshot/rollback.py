"""The note that a cache was rolled back: the file `.rollback` beside its snapshots.

It outlives restarts and reboots, so that neither brings back the weights that somebody went away
from.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from weightcached.errors import IndexFormatError, SnapshotError
from weightcached.index.tensors import TensorIndex, decode, encode
from weightcached.snapshot.files import check_private, open_private
from weightcached.system.fds import OwnedFd

_FILE = ".rollback"
_MAX_NBYTES = 64 << 20


class RolledBack(msgspec.Struct, frozen=True, kw_only=True):
    """One rollback.

    to: name of the snapshot gone back to; at: seconds since the epoch; spec_digest: the manifest's
    entry at that time; replaced: index of the generation gone away from, without its tensors, see
    inputs_of().
    """

    to: str
    at: float
    spec_digest: str
    replaced: bytes

    def index(self) -> TensorIndex:
        """The inputs of the generation gone away from. Raises IndexFormatError."""
        return decode(self.replaced)


def inputs_of(index: TensorIndex) -> bytes:
    """What a generation was loaded from, without what came of it."""
    return encode(
        msgspec.structs.replace(
            index, segments=[], storages=[], tensors=[], modules=[], leftovers=[]
        )
    )


def read_rollback(directory: Path) -> RolledBack | None:
    """The note in a cache's directory; None without one. Raises SnapshotError."""
    path = directory / _FILE
    if not os.path.lexists(path):
        return None
    check_private(directory)
    with open_private(path) as fd:
        data = os.pread(fd.fileno(), _MAX_NBYTES, 0)
    try:
        note = msgspec.msgpack.decode(data, type=RolledBack)
        note.index()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexFormatError) as e:
        raise SnapshotError(f"{path} does not decode: {e}; remove it") from e
    # It becomes part of a path.
    if not note.to.isalnum():
        raise SnapshotError(f"{path} names the snapshot {note.to!r}: remove it")
    return note


def write_rollback(directory: Path, note: RolledBack | None) -> None:
    """Write the note, or with None remove it; the next read sees one or the other. Raises SnapshotError."""
    path = directory / _FILE
    try:
        if note is None:
            path.unlink(missing_ok=True)
        else:
            _replace(path, msgspec.msgpack.encode(note))
        with OwnedFd(os.open(directory, os.O_RDONLY | os.O_CLOEXEC)) as fd:
            os.fsync(fd.fileno())
    except FileNotFoundError:
        if note is not None:
            raise SnapshotError(f"{directory} is gone") from None
    except OSError as e:
        raise SnapshotError(f"cannot write {path}: {e.strerror}") from e


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(f"{_FILE}.{os.urandom(4).hex()}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with OwnedFd(os.open(part, flags, 0o600)) as fd:
            while data:
                data = data[os.write(fd.fileno(), data) :]
            os.fsync(fd.fileno())
        part.rename(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
