"""safetensors headers: read and checked with bounded memory, before anything slow or large starts.

offset  bytes  content
0       8      N, length of the header, little-endian
8       N      JSON: {"name": {"dtype": …, "shape": […], "data_offsets": [begin, end]}, …, "__metadata__": {…}}
8 + N   …      the tensors' bytes; offsets count from here, without gap, overlap or rest
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from weightcached.checkpoint.files import read_at
from weightcached.errors import CheckpointError

# The limits of the format's own library; MAX_TENSORS is ours and bounds the memory that a hostile
# header can take.
MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 500_000
MAX_DIMENSIONS = 64
MAX_LENGTH = 1 << 63
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_LFS_POINTER = b"version "
_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(
        ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8
    ),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


class TensorSpan(NamedTuple):
    """The range of one tensor's bytes, counted from the start of the file."""

    name: str
    begin: int
    end: int


class Header(NamedTuple):
    """A checked header. raw: the JSON as in the file; tensors: in the order of their bytes."""

    raw: bytes
    tensors: list[TensorSpan]


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_entries = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry = msgspec.json.Decoder(_Entry)
_metadata = msgspec.json.Decoder(dict[str, str])


def read_header(fd: int, path: str, file_nbytes: int) -> Header:
    """Read and check a safetensors header. Raises CheckpointError naming file, tensor and value."""
    raw = _read_raw(fd, path, file_nbytes)
    if raw.count(b":") > 4 * MAX_TENSORS:
        raise CheckpointError(
            f"weight file {path}: its header describes more than {MAX_TENSORS} tensors"
        )
    try:
        entries = _entries.decode(raw)
        _metadata.decode(entries.pop(_METADATA, msgspec.Raw(b"{}")))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise CheckpointError(
            f"weight file {path}: its header is not a safetensors header: {e}"
        ) from e
    data_begin = _LENGTH_BYTES + len(raw)
    tensors = [_span(path, name, entry, data_begin) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    _check_coverage(path, tensors, data_begin, file_nbytes)
    return Header(raw, tensors)


def _read_raw(fd: int, path: str, file_nbytes: int) -> bytes:
    if file_nbytes < _LENGTH_BYTES:
        raise CheckpointError(
            f"weight file {path} has {file_nbytes} bytes: a safetensors file has at least {_LENGTH_BYTES}; "
            "download it again"
        )
    prefix = bytearray(_LENGTH_BYTES)
    read_at(fd, path, memoryview(prefix), 0)
    if prefix == _LFS_POINTER:
        raise CheckpointError(
            f"weight file {path} is a Git LFS pointer, not the weights: git lfs pull"
        )
    nbytes = int.from_bytes(prefix, "little")
    if nbytes > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"weight file {path}: its header says it has {nbytes} bytes, at most {MAX_HEADER_BYTES} are allowed; "
            "download it again"
        )
    if _LENGTH_BYTES + nbytes > file_nbytes:
        raise CheckpointError(
            f"weight file {path}: its header says it has {nbytes} bytes, but the file ends at {file_nbytes}; "
            "download it again"
        )
    raw = bytearray(nbytes)
    read_at(fd, path, memoryview(raw), _LENGTH_BYTES)
    return bytes(raw)


def _span(path: str, name: str, raw: msgspec.Raw, data_begin: int) -> TensorSpan:
    try:
        entry = _entry.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise CheckpointError(f"weight file {path}: tensor {name!r} is malformed: {e}") from e
    begin, end = entry.data_offsets
    if not 0 <= begin <= end < MAX_LENGTH:
        raise CheckpointError(
            f"weight file {path}: tensor {name!r} has data_offsets [{begin}, {end}]: expected 0 <= begin <= end < 2^63"
        )
    bits = _BITS.get(entry.dtype)
    if bits is None:
        raise CheckpointError(
            f"weight file {path}: tensor {name!r} has dtype {entry.dtype!r}: expected {', '.join(_BITS)}"
        )
    shape = entry.shape
    if len(shape) > MAX_DIMENSIONS:
        raise CheckpointError(
            f"weight file {path}: tensor {name!r} has {len(shape)} dimensions: expected at most {MAX_DIMENSIONS}"
        )
    if not all(0 <= length < MAX_LENGTH for length in shape):
        raise CheckpointError(
            f"weight file {path}: tensor {name!r} has shape {shape}: expected lengths from 0 to 2^63 - 1"
        )
    # Sub-byte types: a tensor takes whole bytes, so bits compare, not bytes.
    if math.prod(shape) * bits != (end - begin) * 8:
        raise CheckpointError(
            f"weight file {path}: tensor {name!r} of dtype {entry.dtype} and shape {shape} does not fit its "
            f"data_offsets [{begin}, {end}], which give it {end - begin} bytes"
        )
    return TensorSpan(name, data_begin + begin, data_begin + end)


def _check_coverage(
    path: str, tensors: list[TensorSpan], data_begin: int, file_nbytes: int
) -> None:
    expected = data_begin
    for tensor in tensors:
        if tensor.end > file_nbytes:
            raise CheckpointError(
                f"weight file {path}: tensor {tensor.name!r} ends at byte {tensor.end}, the file at {file_nbytes}: "
                "it was cut short; download it again"
            )
        if tensor.begin != expected:
            fault = (
                "overlaps the tensor before it"
                if tensor.begin < expected
                else "leaves a gap before it"
            )
            raise CheckpointError(
                f"weight file {path}: tensor {tensor.name!r} {fault}: it begins at byte {tensor.begin}, "
                f"expected {expected}"
            )
        expected = tensor.end
    if expected != file_nbytes:
        raise CheckpointError(
            f"weight file {path}: its tensors end at byte {expected}, but the file at {file_nbytes}: "
            f"{file_nbytes - expected} bytes belong to none; download it again"
        )
