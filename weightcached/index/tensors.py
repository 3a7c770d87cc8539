"""The tensor index: the place of each tensor in the segments, and how an engine attaches it.

    offset  bytes  content
    0       4      b"WCIX"
    4       2      FORMAT_VERSION, little-endian
    6       32     sha256 of the rest
    38      …      msgpack of TensorIndex

The header is read before anything is decoded, so an index of another version, e.g. one left in
systemd's descriptor store by an older package, is recognised as such. decode() checks every
reference and bound: an engine never forms a tensor outside a segment, not even from a forged index.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from weightcached.errors import IndexFormatError
from weightcached.index.key import WeightCacheKey
from weightcached.segments.backend_name import BackendName
from weightcached.segments.packing import ALIGN_BYTES
from weightcached.system.fds import OwnedFd, read_sealed

FORMAT_VERSION = 2
MAX_INDEX_BYTES = 512 * 1024 * 1024
_MAGIC = b"WCIX"
_HEADER = struct.Struct("<4sH32s")

Stage = Literal["loaded", "processed"]
Kind = Literal["parameter", "buffer", "attribute"]
PlanName = Literal["rerun", "replay", "restore"]
Size = Annotated[int, Meta(ge=0)]


class SegmentRecord(msgspec.Struct, frozen=True, array_like=True):
    """One segment; a private one is copied by each engine, the others are mapped read-only."""

    nbytes: Size
    private: bool


class StorageRecord(msgspec.Struct, frozen=True, array_like=True):
    """One storage inside a segment. `digest` is the xxh3-128 of its bytes, big-endian."""

    segment: Size
    offset_bytes: Size
    nbytes: Size
    digest: bytes


class TensorRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tensor object. shape, stride and storage_offset count elements; storage is None for one
    of 0 bytes.

    `names` are all paths of this same object, the first one canonical: dotted module paths plus the
    name. `param_class` is the import path of a Parameter subclass, empty for torch.nn.Parameter and
    for buffers. `on_host` marks a tensor that a model on a GPU keeps in host memory; its bytes are
    in the segments like all others.
    """

    names: Annotated[list[str], Meta(min_length=1)]
    kind: Kind
    dtype: str
    shape: list[Size]
    stride: list[int]
    storage: int | None = None
    storage_offset: Size = 0
    persistent: bool = True
    on_host: bool = False
    param_class: str = ""


class ModulePlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one module's post-processing is brought to the engine.

    `method` is the import path of the class whose hook it is: the module's quantization method, or
    the module itself. It is empty if there is no hook and only values are restored. `values` are
    typed values (weightcached/model/values.py) by full path, set after the hooks ran. `reason` says
    why the plans before this one were not taken.
    """

    module: str
    plan: PlanName
    method: str = ""
    values: dict[str, msgspec.Raw] = {}
    reason: str = ""


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of the load. `phases`: seconds by phase; `peak_bytes`: device memory, 0 if not measured."""

    seconds: float
    finished_at: float
    phases: dict[str, float] = {}
    peak_bytes: Size = 0
    checkpoint_bytes: Size = 0


class TensorIndex(msgspec.Struct, frozen=True, kw_only=True):
    """One generation of one cache.

    `spec_digest` is the manifest entry it was made from; `skeleton` digests the structure of the
    model as built on the meta device, so that an engine whose layers differ in any name, shape,
    type or kernel class is refused. `leftovers` are the tensors that such a model has and the
    loaded one has not, found once by the proof; with None an engine looks for them itself.
    `label` is the operator's name for the weights, or empty.
    `versions` of the interpreter's distributions, and `environment`, the set variables of the key's
    environment, are inputs of the key that need no vLLM.
    """

    software: str
    backend: BackendName
    driver: str
    boot_id: str
    device: str
    cache: str
    role: Literal["target", "draft"]
    generation: Size
    spec_digest: str
    stage: Stage
    skeleton: str
    key: WeightCacheKey
    segments: list[SegmentRecord]
    storages: list[StorageRecord]
    tensors: list[TensorRecord]
    modules: list[ModulePlan] = []
    leftovers: list[str] | None = None
    versions: dict[str, str] = {}
    environment: dict[str, str] = {}
    label: str = ""
    load: LoadReport

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return sum(segment.nbytes for segment in self.segments)


def layout_difference(ours: TensorIndex, other: TensorIndex) -> str:
    """Why another generation cannot replace this one at the same addresses, or "".

    All but the bytes of the weights must be equal: an engine has addresses, shapes and values baked
    into its compiled code and its CUDA graphs.
    """
    if ours.skeleton != other.skeleton:
        return "its layers differ in a name, shape, dtype or kernel class"
    if ours.stage != other.stage or ours.role != other.role:
        return f"it is {other.stage} {other.role}, not {ours.stage} {ours.role}"
    if _packing(ours) != _packing(other):
        return "its tensors are packed differently"
    if _plans(ours) != _plans(other) or ours.leftovers != other.leftovers:
        return "post-processing left different values"
    return ""


def _packing(index: TensorIndex) -> bytes:
    storages = [(s.segment, s.offset_bytes, s.nbytes) for s in index.storages]
    return _encoder.encode([index.segments, storages, index.tensors])


def _plans(index: TensorIndex) -> bytes:
    return _encoder.encode([(m.module, m.plan, m.method, m.values) for m in index.modules])


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(TensorIndex)


def encode(index: TensorIndex) -> bytes:
    """The index as bytes, checked first as decode() does. Raises IndexFormatError."""
    _check(index)
    payload = _encoder.encode(index)
    return _HEADER.pack(_MAGIC, FORMAT_VERSION, hashlib.sha256(payload).digest()) + payload


def digest_of(data: bytes) -> str:
    """The digest in the header, hex: names a generation's exact index. Raises IndexFormatError."""
    return _header(data)[1].hex()


def decode(data: bytes) -> TensorIndex:
    """Check and decode an index. Raises IndexFormatError with the reason."""
    version, digest = _header(data)
    if version != FORMAT_VERSION:
        raise IndexFormatError(
            f"tensor index has format version {version}, this software reads {FORMAT_VERSION}"
        )
    payload = data[_HEADER.size :]
    if hashlib.sha256(payload).digest() != digest:
        raise IndexFormatError("tensor index: its digest does not match its content")
    try:
        index = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise IndexFormatError(f"tensor index does not decode: {e}") from e
    _check(index)
    return index


def read_index(fd: OwnedFd) -> tuple[TensorIndex, str]:
    """The index in a sealed memfd, and its digest. The caller keeps the descriptor.

    Raises IndexFormatError, also for another kind of descriptor.
    """
    try:
        data = read_sealed(fd.fileno(), max_nbytes=MAX_INDEX_BYTES)
    except (ValueError, OSError) as e:
        raise IndexFormatError(f"tensor index: {e}") from e
    return decode(data), digest_of(data)


def _header(data: bytes) -> tuple[int, bytes]:
    if len(data) < _HEADER.size:
        raise IndexFormatError(f"tensor index of {len(data)} bytes is shorter than its header")
    magic, version, digest = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise IndexFormatError(f"tensor index begins with {magic!r}, expected {_MAGIC!r}")
    return version, digest


def _check(index: TensorIndex) -> None:
    for number, storage in enumerate(index.storages):
        if storage.segment >= len(index.segments):
            raise IndexFormatError(
                f"storage {number} is in segment {storage.segment} of {len(index.segments)}"
            )
        end = storage.offset_bytes + storage.nbytes
        if end > index.segments[storage.segment].nbytes or storage.offset_bytes % ALIGN_BYTES:
            raise IndexFormatError(
                f"storage {number} ends at {end}, outside or unaligned in its segment"
            )
    names: set[str] = set()
    for tensor in index.tensors:
        if len(tensor.shape) != len(tensor.stride) or any(step < 0 for step in tensor.stride):
            raise IndexFormatError(
                f"tensor {tensor.names[0]}: shape {tensor.shape} does not fit stride {tensor.stride}"
            )
        if tensor.storage is not None and not 0 <= tensor.storage < len(index.storages):
            raise IndexFormatError(
                f"tensor {tensor.names[0]} is in storage {tensor.storage} of {len(index.storages)}"
            )
        for name in tensor.names:
            if name in names:
                raise IndexFormatError(f"tensor name {name!r} stands in the index twice")
            names.add(name)
