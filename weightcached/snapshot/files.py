"""A snapshot: the tensor index and the segments of one generation, as files.

    <snapshots>/                            0700, the user's; see config/snapshots.py
        <DEVICE>/
            <model>.<role>/
                <name_of() the index>/      renamed into place once it is complete and synced
                    header                  WCSN, see SnapshotHeader
                    index                   WCIX, the tensor index as it was served
                    data                    the segments, one behind the other
                .<random>/                  being written, flock()ed by its writer

    header: offset  bytes  content
            0       4      b"WCSN"
            4       2      FORMAT_VERSION, little-endian
            6       32     sha256 of the rest
            38      …      msgpack of SnapshotHeader

Every byte is under a digest: the header's own, the index's own, and one xxh3-128 for each chunk of
the data. They guard against torn writes and failing disks, not against a forger, who could replace
the weights themselves in this directory. So nothing is read from a directory or file that another
user owns or may write to.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import xxhash
from msgspec import Meta

from weightcached.errors import IndexFormatError, SnapshotError
from weightcached.index.tensors import (
    MAX_INDEX_BYTES,
    LoadReport,
    TensorIndex,
    decode,
    digest_of,
    encode,
)
from weightcached.system import paths
from weightcached.system.fds import OwnedFd

FORMAT_VERSION = 1
CHUNK_NBYTES = 64 << 20
DIGEST_NBYTES = 16
# A terabyte has 16,384 chunks of 16 bytes.
_MAX_HEADER_NBYTES = 16 << 20
_MAGIC = b"WCSN"
_PREFIX = struct.Struct("<4sH32s")
_NAMES = ("header", "index", "data")

Size = Annotated[int, Meta(ge=0)]
Digest = Annotated[bytes, Meta(min_length=DIGEST_NBYTES, max_length=DIGEST_NBYTES)]


class SnapshotHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of the data. segments: sizes in bytes; chunks: xxh3-128 digests, big-endian.

    A chunk has `chunk_nbytes` bytes, or the rest of its segment: none spans two segments.
    """

    software: str
    cache: str
    index_digest: str
    created_at: float
    chunk_nbytes: Annotated[int, Meta(ge=4096, le=1 << 30)]
    segments: list[Size]
    chunks: list[Digest]


class Chunk(NamedTuple):
    """`nbytes` bytes at `offset_bytes` of a segment, and at `position` of the data file."""

    segment: int
    offset_bytes: int
    nbytes: int
    position: int


class Snapshot:
    """An open snapshot whose header and index are checked; its data is not yet.

    Holds a descriptor on each file: a directory that is replaced meanwhile changes nothing.
    """

    def __init__(
        self,
        path: Path,
        header: SnapshotHeader,
        index: TensorIndex,
        index_data: bytes,
        data: OwnedFd,
    ) -> None:
        self.path = path
        self.header = header
        self.index = index
        self.index_data = index_data
        self.data = data

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(self.header.segments)

    def chunks(self) -> Iterator[tuple[Chunk, bytes]]:
        """Each chunk with its digest, in the order of the file."""
        return zip(
            chunks_of(self.header.segments, self.header.chunk_nbytes),
            self.header.chunks,
            strict=True,
        )

    def read(self, chunk: Chunk, digest: bytes, window: memoryview) -> None:
        """Fill the window, of the chunk's size, and check the digest. Raises SnapshotError."""
        data, got = self.path / "data", 0
        while got < chunk.nbytes:
            try:
                read = os.preadv(self.data.fileno(), [window[got:]], chunk.position + got)
            except OSError as e:
                raise SnapshotError(f"cannot read {data}: {e.strerror}") from e
            if not read:
                raise SnapshotError(f"{data} became shorter while it was read")
            got += read
        if xxhash.xxh3_128_digest(window) != digest:
            raise SnapshotError(
                f"{data}: the {chunk.nbytes} bytes at {chunk.position} do not have the digest in the "
                "header: the file was changed, or the disk fails; 'weightcachectl snapshot rm' removes it"
            )

    def verify(self) -> None:
        """Read every chunk. Raises SnapshotError for the first that is wrong."""
        window = memoryview(bytearray(self.header.chunk_nbytes))
        for chunk, digest in self.chunks():
            self.read(chunk, digest, window[: chunk.nbytes])

    def close(self) -> None:
        self.data.close()

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def cache_directory(root: Path, device: str, cache: str) -> Path:
    """The directory of one cache's snapshots. A model's name has no slash, so names do not collide."""
    return root / device / cache.replace("/", ".")


def name_of(index: TensorIndex) -> str:
    """The name of a generation's snapshot: 16 hex digits.

    A restored generation, with another number and of another boot, has the same name.
    """
    lasting = msgspec.structs.replace(
        index, driver="", boot_id="", generation=0, load=LoadReport(seconds=0.0, finished_at=0.0)
    )
    return digest_of(encode(lasting))[:16]


def chunks_of(segments: list[int], chunk_nbytes: int) -> Iterator[Chunk]:
    """The chunks of segments of these sizes, in bytes."""
    position = 0
    for segment, nbytes in enumerate(segments):
        for offset in range(0, nbytes, chunk_nbytes):
            length = min(chunk_nbytes, nbytes - offset)
            yield Chunk(segment, offset, length, position)
            position += length


def encode_header(header: SnapshotHeader) -> bytes:
    """The header as bytes."""
    payload = msgspec.msgpack.encode(header)
    return _PREFIX.pack(_MAGIC, FORMAT_VERSION, hashlib.sha256(payload).digest()) + payload


def decode_header(data: bytes) -> SnapshotHeader:
    """Check and decode a header. Raises SnapshotError with the reason."""
    if len(data) < _PREFIX.size:
        raise SnapshotError(f"its header has {len(data)} bytes, fewer than {_PREFIX.size}")
    magic, version, digest = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise SnapshotError(f"its header begins with {magic!r}, expected {_MAGIC!r}")
    if version != FORMAT_VERSION:
        raise SnapshotError(f"it has format {version}, this software reads {FORMAT_VERSION}")
    payload = data[_PREFIX.size :]
    if hashlib.sha256(payload).digest() != digest:
        raise SnapshotError("its header does not have the digest that it states")
    try:
        header = msgspec.msgpack.decode(payload, type=SnapshotHeader)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise SnapshotError(f"its header does not decode: {e}") from e
    expected = sum(-(-nbytes // header.chunk_nbytes) for nbytes in header.segments)
    if len(header.chunks) != expected:
        raise SnapshotError(
            f"its header has {len(header.chunks)} digests, its segments have {expected} chunks"
        )
    return header


def open_snapshot(path: Path) -> Snapshot:
    """Open and check header, index and sizes; reads no data. Raises SnapshotError."""
    with ExitStack() as undo:
        directory = undo.enter_context(_open_directory(path))
        files = {name: undo.enter_context(_open_file(directory, path, name)) for name in _NAMES}
        header = decode_header(_read(files["header"], _MAX_HEADER_NBYTES, "header"))
        index_data = _read(files["index"], MAX_INDEX_BYTES, "index")
        try:
            index, digest = decode(index_data), digest_of(index_data)
        except IndexFormatError as e:
            raise SnapshotError(str(e)) from e
        if digest != header.index_digest:
            raise SnapshotError(
                f"its index has digest {digest[:16]}, its header says {header.index_digest[:16]}"
            )
        if [segment.nbytes for segment in index.segments] != header.segments:
            raise SnapshotError("its index lists other segments than its header")
        held = os.fstat(files["data"].fileno()).st_size
        if held != sum(header.segments):
            raise SnapshotError(
                f"its data has {held} bytes, its segments have {sum(header.segments)}"
            )
        data = OwnedFd(files["data"].take())
    return Snapshot(path, header, index, index_data, data)


def list_snapshots(root: Path, device: str, cache: str) -> list[Path]:
    """The complete snapshots of a cache, newest first; empty if the directory cannot be read."""
    found: list[tuple[float, Path]] = []
    with suppress(OSError), os.scandir(cache_directory(root, device, cache)) as entries:
        for entry in entries:
            if not entry.name.startswith("."):
                with suppress(OSError):
                    found.append((entry.stat(follow_symlinks=False).st_mtime, Path(entry.path)))
    return [path for _, path in sorted(found, reverse=True)]


def all_snapshots(root: Path) -> list[tuple[str, str, Path]]:
    """(device, directory of the cache, path) of every complete snapshot."""
    return [
        (data.parts[-4], data.parts[-3], data.parent)
        for data in sorted(root.glob("*/*/[0-9a-f]*/data"))
    ]


def make_private(directory: Path) -> None:
    """Make a directory for this user alone, or check an existing one. Raises SnapshotError."""
    try:
        paths.make_private(directory)
    except OSError as e:
        raise SnapshotError(f"cannot make {directory}: {e.strerror}") from e
    _open_directory(directory).close()


def check_private(directory: Path) -> None:
    """Check that only this user may write to an existing directory. Raises SnapshotError."""
    _open_directory(directory).close()


def open_private(path: Path) -> OwnedFd:
    """Open a regular file that only this user may write to. Raises SnapshotError."""
    with _open_directory(path.parent) as directory:
        return _open_file(directory, path.parent, path.name)


def remove_snapshot(path: Path) -> None:
    """Remove a snapshot. Cut short, what is left is a leftover. Raises OSError."""
    hidden = path.with_name(f".{os.urandom(8).hex()}")
    path.rename(hidden)
    shutil.rmtree(hidden)


def remove_leftovers(directory: Path) -> int:
    """Remove the remains of dead writers in a cache's directory. Returns their number."""
    removed = 0
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and _is_leftover(entry):
                removed += _remove_unlocked(entry.path)
    return removed


def sweep(root: Path, device: str) -> int:
    """Remove the remains of dead writers of one device, also of caches that nobody writes any more.

    Returns their number.
    """
    removed = 0
    with suppress(OSError), os.scandir(root / device) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                removed += remove_leftovers(Path(entry.path))
    return removed


def _is_leftover(entry: os.DirEntry[str]) -> bool:
    # A snapshot has its name only once it is complete. Without a file it cannot be used any more.
    return entry.name.startswith(".") or not all(
        os.path.lexists(os.path.join(entry.path, name)) for name in _NAMES
    )


def _remove_unlocked(path: str) -> bool:
    with suppress(OSError), OwnedFd(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as fd:
        # A writer that lives holds the lock.
        fcntl.flock(fd.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
        return True
    return False


def _open_directory(path: Path) -> OwnedFd:
    try:
        fd = OwnedFd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
    except OSError as e:
        raise SnapshotError(f"cannot open the directory {path}: {e.strerror}") from e
    _check_owner(fd, str(path))
    return fd


def _open_file(directory: OwnedFd, path: Path, name: str) -> OwnedFd:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = OwnedFd(os.open(name, flags, dir_fd=directory.fileno()))
    except OSError as e:
        raise SnapshotError(f"cannot open {path / name}: {e.strerror}") from e
    _check_owner(fd, str(path / name))
    if not stat.S_ISREG(os.fstat(fd.fileno()).st_mode):
        raise SnapshotError(f"{path / name} is not a regular file")
    return fd


def _check_owner(fd: OwnedFd, path: str) -> None:
    info = os.fstat(fd.fileno())
    if info.st_uid != os.geteuid():
        raise SnapshotError(f"{path} belongs to uid {info.st_uid}, expected {os.geteuid()}")
    if info.st_mode & 0o022:
        raise SnapshotError(
            f"{path} has mode {stat.S_IMODE(info.st_mode):04o}: others may write to it; "
            f"chmod go-w {path}"
        )


def _read(fd: OwnedFd, most: int, name: str) -> bytes:
    nbytes = os.fstat(fd.fileno()).st_size
    if nbytes > most:
        raise SnapshotError(f"its {name} has {nbytes} bytes, at most {most} are read")
    data = b""
    while len(data) < nbytes:
        part = os.pread(fd.fileno(), nbytes - len(data), len(data))
        if not part:
            raise SnapshotError(f"its {name} became shorter while it was read")
        data += part
    return data
