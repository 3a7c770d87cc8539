"""The tensor index: it survives encoding; any bytes give an index or IndexFormatError."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.models import an_index
from tests.fakes.values import encode_value
from weightcached.errors import IndexFormatError
from weightcached.index.tensors import (
    FORMAT_VERSION,
    LoadReport,
    ModulePlan,
    SegmentRecord,
    StorageRecord,
    TensorIndex,
    TensorRecord,
    decode,
    digest_of,
    encode,
    layout_difference,
)

HEADER_NBYTES = 38


def tensor(*names: str, **changed: Any) -> TensorRecord:
    fields: dict[str, Any] = {
        "kind": "parameter",
        "dtype": "float32",
        "shape": [4, 2],
        "stride": [2, 1],
        "storage": 0,
    }
    return TensorRecord(names=list(names), **(fields | changed))


FULL = an_index(
    [
        tensor("a.weight", "b.weight", param_class="vllm.x.P"),
        tensor(
            "scalar",
            shape=[],
            stride=[],
            storage=1,
            storage_offset=3,
            kind="buffer",
            persistent=False,
        ),
        tensor("nothing", shape=[0], stride=[1], storage=None, kind="attribute", on_host=True),
        tensor("held['it\\'s']", shape=[3], stride=[0]),
    ],
    segments=[SegmentRecord(1 << 30, private=False), SegmentRecord(4096, private=True)],
    storages=[
        StorageRecord(0, 512, 1 << 20, b"0123456789abcdef"),
        StorageRecord(1, 0, 4096, bytes(16)),
    ],
    modules=[
        ModulePlan(
            module="a", plan="restore", method="Fp8", values={"a.x": encode_value((1, {"é": 2.5}))}
        )
    ],
    load=LoadReport(
        seconds=1.5, finished_at=2.5, phases={"weights": 1.0}, peak_bytes=5, checkpoint_bytes=7
    ),
)


def signed(payload: bytes, version: int = FORMAT_VERSION, magic: bytes = b"WCIX") -> bytes:
    return struct.pack("<4sH32s", magic, version, hashlib.sha256(payload).digest()) + payload


def error(data: bytes) -> str:
    with pytest.raises(IndexFormatError) as e:
        decode(data)
    return str(e.value)


def error_of(index: TensorIndex) -> str:
    """The one text with which the index is refused on both ways."""
    with pytest.raises(IndexFormatError) as e:
        encode(index)
    assert error(signed(msgspec.msgpack.encode(index))) == str(e.value)
    return str(e.value)


# ---- round trip


def test_index_comes_back_as_it_was() -> None:
    assert decode(encode(FULL)) == FULL
    assert FULL.nbytes == (1 << 30) + 4096


def test_typed_values_come_back_as_they_were() -> None:
    (plan,) = decode(encode(FULL)).modules
    assert bytes(plan.values["a.x"]) == bytes(encode_value((1, {"é": 2.5})))


def test_same_index_gives_the_same_bytes() -> None:
    assert encode(FULL) == encode(decode(encode(FULL)))


def test_digest_names_the_exact_index() -> None:
    data = encode(FULL)
    assert digest_of(data) == hashlib.sha256(data[HEADER_NBYTES:]).hexdigest()
    assert digest_of(data) != digest_of(encode(msgspec.structs.replace(FULL, generation=2)))


def test_fields_that_a_newer_version_adds_are_ignored() -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(FULL))
    fields["added"] = {"x": [1]}
    fields["tensors"][0]["added"] = 1
    assert decode(signed(msgspec.msgpack.encode(fields))) == FULL


# ---- header


@pytest.mark.parametrize("nbytes", [0, 1, HEADER_NBYTES - 1])
def test_index_shorter_than_its_header_is_refused(nbytes: int) -> None:
    data = encode(FULL)[:nbytes]
    text = f"tensor index of {nbytes} bytes is shorter than its header"
    assert error(data) == text
    with pytest.raises(IndexFormatError, match=text):
        digest_of(data)


def test_something_else_is_refused() -> None:
    assert (
        error(signed(b"", magic=b"\x7fELF"))
        == "tensor index begins with b'\\x7fELF', expected b'WCIX'"
    )


@pytest.mark.parametrize("version", [0, FORMAT_VERSION + 1, 65535])
def test_other_version_is_named_before_anything_is_decoded(version: int) -> None:
    text = f"tensor index has format version {version}, this software reads {FORMAT_VERSION}"
    assert error(signed(b"\xff garbage", version=version)) == text


@pytest.mark.parametrize("at", [HEADER_NBYTES, -1, 10])
def test_changed_byte_is_noticed(at: int) -> None:
    data = bytearray(encode(FULL))
    data[at] ^= 1
    assert error(bytes(data)) == "tensor index: its digest does not match its content"


def test_cut_index_is_noticed() -> None:
    assert error(encode(FULL)[:-1]) == "tensor index: its digest does not match its content"


# ---- content


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (b"", "tensor index does not decode: Input data was truncated"),
        (
            b"\xc1",
            "tensor index does not decode: MessagePack data is malformed: invalid opcode '\\xc1' (byte 0)",
        ),
        (b"\x01", "tensor index does not decode: Expected `object`, got `int`"),
        (b"\x80", "tensor index does not decode: Object missing required field `software`"),
        (
            msgspec.msgpack.encode(FULL) + b"\0",
            "tensor index does not decode: MessagePack data is malformed: trailing",
        ),
        (
            b"\x91" * 100_000 + b"\x01",
            "tensor index does not decode: Expected `object`, got `array`",
        ),
        (
            b"\x81\xa1x" + b"\x91" * 100_000 + b"\x01",
            "tensor index does not decode: maximum recursion depth exceeded",
        ),
    ],
    ids=["empty", "opcode", "int", "no-fields", "trailing", "deep", "deep-unknown-field"],
)
def test_payload_that_is_no_index_is_refused(payload: bytes, text: str) -> None:
    assert error(signed(payload)).startswith(text)


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (["backend"], "rocm", "Invalid enum value 'rocm' - at `$.backend`"),
        (["stage"], "half", "Invalid enum value 'half' - at `$.stage`"),
        (["role"], "both", "Invalid enum value 'both' - at `$.role`"),
        (["generation"], -1, "Expected `int` >= 0 - at `$.generation`"),
        (["segments", 0, 0], -1, "Expected `int` >= 0 - at `$.segments[0][0]`"),
        (["storages", 0, 3], "text", "Expected `bytes`, got `str` - at `$.storages[0][3]`"),
        (["tensors", 0, "names"], [], "Expected `array` of length >= 1 - at `$.tensors[0].names`"),
        (["tensors", 0, "kind"], "module", "Invalid enum value 'module' - at `$.tensors[0].kind`"),
        (["tensors", 0, "shape"], [-1, 1], "Expected `int` >= 0 - at `$.tensors[0].shape[0]`"),
        (
            ["tensors", 0, "storage"],
            "x",
            "Expected `int | null`, got `str` - at `$.tensors[0].storage`",
        ),
        (
            ["tensors", 1, "storage_offset"],
            -1,
            "Expected `int` >= 0 - at `$.tensors[1].storage_offset`",
        ),
        (["modules", 0, "plan"], "exec", "Invalid enum value 'exec' - at `$.modules[0].plan`"),
        (["key"], {}, "Object missing required field `checkpoint` - at `$.key`"),
        (["load", "seconds"], "x", "Expected `float`, got `str` - at `$.load.seconds`"),
    ],
    ids=str,
)
def test_wrong_field_is_named(path: list[Any], value: Any, text: str) -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(FULL))
    owner = fields
    for step in path[:-1]:
        owner = owner[step]
    owner[path[-1]] = value
    assert error(signed(msgspec.msgpack.encode(fields))) == f"tensor index does not decode: {text}"


@pytest.mark.parametrize(
    ("storage", "text"),
    [
        (StorageRecord(1, 0, 1, bytes(16)), "storage 1 is in segment 1 of 1"),
        (
            StorageRecord(0, 0, 4097, bytes(16)),
            "storage 1 ends at 4097, outside or unaligned in its segment",
        ),
        (
            StorageRecord(0, 4096, 1, bytes(16)),
            "storage 1 ends at 4097, outside or unaligned in its segment",
        ),
        (
            StorageRecord(0, 100, 1, bytes(16)),
            "storage 1 ends at 101, outside or unaligned in its segment",
        ),
        (
            StorageRecord(0, 511, 1, bytes(16)),
            "storage 1 ends at 512, outside or unaligned in its segment",
        ),
        (
            StorageRecord(0, (1 << 64) - 512, 512, bytes(16)),
            "storage 1 ends at 18446744073709551616, outside or unaligned in its segment",
        ),
    ],
    ids=str,
)
def test_storage_outside_its_segment_is_refused(storage: StorageRecord, text: str) -> None:
    good = StorageRecord(0, 0, 4096, bytes(16))
    assert error_of(an_index(storages=[good, storage])) == text


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (tensor("w", shape=[1]), "tensor w: shape [1] does not fit stride [2, 1]"),
        (tensor("w", stride=[2, -1]), "tensor w: shape [4, 2] does not fit stride [2, -1]"),
        (tensor("w", storage=1), "tensor w is in storage 1 of 1"),
        (tensor("w", "v", "w"), "tensor name 'w' stands in the index twice"),
        (tensor("v", "first"), "tensor name 'first' stands in the index twice"),
    ],
    ids=["rank", "negative-stride", "storage", "name-in-one", "name-in-two"],
)
def test_tensor_that_does_not_fit_is_refused(record: TensorRecord, text: str) -> None:
    assert error_of(an_index([tensor("first"), record])) == text


def test_storage_may_fill_its_segment() -> None:
    index = an_index([tensor("w", shape=[1024], stride=[1])])
    assert decode(encode(index)) == index


# ---- any bytes


def outcome(data: bytes) -> TensorIndex | None:
    """The index, or None if it was refused in the one way that is allowed."""
    try:
        return decode(data)
    except IndexFormatError:
        return None


PAYLOAD = encode(FULL)[HEADER_NBYTES:]


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    assert outcome(data) is None
    assert outcome(signed(data)) is None


@given(
    st.dictionaries(
        st.integers(0, HEADER_NBYTES + len(PAYLOAD) - 1),
        st.integers(1, 255),
        min_size=1,
        max_size=3,
    )
)
def test_bytes_changed_in_transit_are_noticed(changes: dict[int, int]) -> None:
    data = bytearray(encode(FULL))
    for at, mask in changes.items():
        data[at] ^= mask
    assert outcome(bytes(data)) is None


EDIT = st.tuples(st.integers(0, len(PAYLOAD)), st.integers(0, 4), st.binary(max_size=4))


@given(st.lists(EDIT, min_size=1, max_size=4))
@settings(max_examples=500)
def test_bytes_changed_by_who_signs_them_give_a_checked_index_or_the_one_error(
    edits: list[tuple[int, int, bytes]],
) -> None:
    payload = bytearray(PAYLOAD)
    for at, removed, added in edits:
        payload[at : at + removed] = added
    index = outcome(signed(bytes(payload)))
    if index is not None:
        # encode() checks all again.
        assert decode(encode(index)) == index


FIELD_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=3), st.binary(max_size=3),
    st.just([]), st.just({}), st.just([[]]),
)  # fmt: skip


@given(st.data())
def test_fields_changed_by_who_signs_them_give_a_checked_index_or_the_one_error(
    data: st.DataObject,
) -> None:
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(FULL))
    owner = fields
    while True:
        key = data.draw(
            st.sampled_from(sorted(owner) if isinstance(owner, dict) else range(len(owner)))
        )
        if not isinstance(owner[key], dict | list) or not owner[key] or data.draw(st.booleans()):
            break
        owner = owner[key]
    owner[key] = data.draw(FIELD_VALUES)
    index = outcome(signed(msgspec.msgpack.encode(fields)))
    if index is not None:
        assert encode(index)


def test_generations_that_differ_in_bytes_alone_have_the_same_layout() -> None:
    ours = an_index()
    (storage,) = ours.storages
    other = msgspec.structs.replace(
        ours,
        generation=2,
        software="newer",
        storages=[StorageRecord(storage.segment, storage.offset_bytes, storage.nbytes, b"x" * 16)],
    )
    assert layout_difference(ours, other) == ""
    moved = StorageRecord(storage.segment, storage.offset_bytes, storage.nbytes - 512, b"x" * 16)
    other = msgspec.structs.replace(other, storages=[moved])
    assert layout_difference(ours, other) == "its tensors are packed differently"
