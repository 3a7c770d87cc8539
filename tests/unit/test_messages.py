"""Messages: each survives the wire; wrong ones are ProtocolErrors and nothing else."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from tests.fakes.daemon import BOUND_S
from weightcached.checkpoint.identity import CheckpointIdentity, FileRecord
from weightcached.errors import ProtocolError
from weightcached.index.key import WeightCacheKey
from weightcached.wire import messages
from weightcached.wire.messages import (
    Absent,
    Attach,
    CacheOutcome,
    CacheStatus,
    Descriptors,
    Done,
    Drop,
    EngineStatus,
    Evict,
    Failed,
    Fallback,
    FieldMismatch,
    Hello,
    HoldLoads,
    LoaderFailed,
    LoaderIndex,
    LoaderKey,
    LoaderProgress,
    Loading,
    Memory,
    Message,
    Mismatch,
    NeedDigest,
    Parked,
    Progress,
    Ready,
    Refused,
    Rejoin,
    Rejoined,
    Release,
    Released,
    Reload,
    ReloadReply,
    Rollback,
    RollbackReply,
    Status,
    StatusReply,
    Unmap,
    Verify,
    Welcome,
    WriteSnapshot,
    decode_loader,
    decode_reply,
    decode_request,
    encode,
)

KEY = WeightCacheKey(
    checkpoint=CheckpointIdentity(root="/m", files=[FileRecord("a", 1, 2, 3, 4, 5)], full="ab"),
    versions={"torch": "2.11"},
)
CACHE = CacheStatus(
    name="a/target", role="target", state="ready", generation=1, source="adopted", bytes=1 << 40, segments=1, tensors=2,
    load_seconds=0.5, phase="", done_bytes=0, total_bytes=0, error="", engines=[EngineStatus(pid=1, since=2.5)],
)  # fmt: skip
REQUESTS: list[Message] = [
    Hello(protocol=1, software="s", purpose="engine"),
    Status(),
    Attach(key=KEY, wait=False),
    Memory(key=KEY),
    Release(),
    Rejoin(cache="a/target", generation=3, index_digest="ff"),
    HoldLoads(wait=False),
    Parked(parked=True),
    Reload(caches=["a/target"], force=True),
    Drop(cache="a/target", force=True),
    Evict(cache="a/target"),
    Verify(cache="a/target"),
    WriteSnapshot(cache="a/target"),
    Rollback(cache="a/target", snapshot="0123456789abcdef"),
    Fallback(reason="key-mismatch"),
]
REPLIES: list[Message] = [
    Welcome(protocol=1, device="cpu0", pid=1),
    Refused(code="protocol", message="no"),
    Ready(
        cache="a/target",
        generation=1,
        nbytes=2,
        segment_nbytes=[1, 1],
        index_digest="ff",
        descriptors=3,
    ),
    Descriptors(first=250),
    Loading(cache="a/target", phase="p", done_bytes=1, total_bytes=2, eta_s=1.5),
    Mismatch(cache="a/target", fields=[FieldMismatch("dtype", "a", "b")]),
    NeedDigest(rung="full"),
    Absent(reason="r"),
    Failed(cache="a/target", error="e"),
    Released(cache="a/target"),
    Done(),
    Rejoined(),
    Unmap(),
    Progress(cache="a/target", phase="p"),
    ReloadReply(outcomes=[CacheOutcome(cache="a/target", outcome="failed", error="e")]),
    RollbackReply(snapshot="0123456789abcdef", created_at=1.5),
    StatusReply(
        device="cpu0",
        pid=1,
        state="ready",
        since=1.5,
        caches=[CACHE],
        manifest="m",
        manifest_error="e",
    ),
]
LOADER: list[Message] = [
    LoaderProgress(phase="p", done_bytes=1, total_bytes=2),
    LoaderKey(key=KEY),
    LoaderIndex(segments=4),
    LoaderFailed(code="load-failed", message="m", permanent=True),
    Descriptors(first=0),
]
DECODERS = [decode_request, decode_reply, decode_loader]


def packed(kind: str, **fields: Any) -> bytes:
    return msgspec.msgpack.encode({"type": kind} | fields)


def refused(data: bytes) -> str:
    with pytest.raises(ProtocolError) as caught:
        decode_request(data)
    return str(caught.value)


def test_every_message_survives_the_wire() -> None:
    assert [decode_request(encode(m)) for m in REQUESTS] == REQUESTS
    assert [decode_reply(encode(m)) for m in REPLIES] == REPLIES
    assert [decode_loader(encode(m)) for m in LOADER] == LOADER


def test_the_samples_above_are_all_messages() -> None:
    assert {type(m) for m in REQUESTS} == set(get_args(messages.Request))
    assert {type(m) for m in REPLIES} == set(get_args(messages.Reply))
    assert {type(m) for m in LOADER} == set(get_args(messages.LoaderMessage))


def test_tag_is_the_class_name() -> None:
    for message in (*REQUESTS, *REPLIES, *LOADER):
        assert msgspec.msgpack.decode(encode(message))["type"] == type(message).__name__


def test_messages_cannot_be_changed() -> None:
    for message in (*REQUESTS, *REPLIES, *LOADER):
        with pytest.raises(AttributeError, match="immutable"):
            message.anything = 1  # type: ignore[attr-defined]


def test_unknown_field_is_ignored() -> None:
    assert decode_request(packed("Drop", cache="a", later=[1])) == Drop(cache="a")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "Input data was truncated"),
        (b"\xc1", "MessagePack data is malformed: invalid opcode '\\xc1' (byte 0)"),
        (encode(Status())[:-1], "Input data was truncated"),
        (
            encode(Status()) + b"\x00",
            "MessagePack data is malformed: trailing characters (byte 13)",
        ),
        (b"\x90", "Expected `object`, got `array`"),
        (b"\x80", "Object missing required field `type`"),
        (packed("Welcome", protocol=1, device="d", pid=1), "Invalid value 'Welcome' - at `$.type`"),
        (packed("status"), "Invalid value 'status' - at `$.type`"),
        (packed("Hello"), "Object missing required field `protocol`"),
        (packed("Hello", protocol="1"), "Expected `int`, got `str` - at `$.protocol`"),
        (packed("Hello", protocol=1, purpose="spy"), "Invalid enum value 'spy' - at `$.purpose`"),
        (
            packed("Hello", protocol=1, software="x" * 20_001),
            "Expected `str` of length <= 20000 - at `$.software`",
        ),
        (packed("Drop", cache=""), "Expected `str` of length >= 1 - at `$.cache`"),
        (packed("Drop", cache="x" * 301), "Expected `str` of length <= 300 - at `$.cache`"),
        (packed("Drop", cache="a", force=1), "Expected `bool`, got `int` - at `$.force`"),
        (
            packed("Rejoin", cache="a", generation=-1, index_digest="f"),
            "Expected `int` >= 0 - at `$.generation`",
        ),
        (packed("Reload", caches=["a", 1]), "Expected `str`, got `int` - at `$.caches[1]`"),
        (packed("Attach", key={}), "Object missing required field `checkpoint` - at `$.key`"),
        (packed("Drop", cache="a")[:-1] + b"\xff", "Invalid UTF-8 encoded string"),
        (b"\x82\xa4type\xa6Reload\xa6caches\xdc\x03\xe8", "Input data was truncated"),
        (
            b"\x82\xa4type\xa6Reload\xa6caches\xdd\xff\xff\xff\xff",
            "Expected `array` of length <= 1000 - at `$.caches`",
        ),
        (
            b"\x82\xa4type\xa6Reload\xa3new" + b"\x91" * 60_000,
            "maximum recursion depth exceeded while deserializing an object",
        ),
        (
            b"\x82\xa4type\xa6Reload\xa6caches" + b"\x91" * 60_000,
            "Expected `str`, got `array` - at `$.caches[0]`",
        ),
    ],
)
def test_wrong_message_is_named(data: bytes, text: str) -> None:
    assert refused(data) == f"message does not decode: {text}"


def test_long_list_of_files_is_refused() -> None:
    record = ["a", 1, 2, 3, 4, 5]
    text = refused(packed("Memory", key={"checkpoint": {"root": "/", "files": [record] * 4097}}))
    assert (
        text
        == "message does not decode: Expected `array` of length <= 4096 - at `$.key.checkpoint.files`"
    )


def test_announced_sizes_allocate_nothing() -> None:
    """Headers that promise 4 GiB, decoded by a process that may grow by 1 GiB."""
    code = (
        "import resource, sys\n"
        "from weightcached.wire import messages as m\n"
        "from weightcached.errors import ProtocolError\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({1 << 30}, {1 << 30}))\n"
        "for head in (b'\\xdd', b'\\xdf', b'\\xdb', b'\\xc6'):\n"
        "    for name in (b'\\xa6caches', b'\\xa3new'):\n"
        "        for decode in (m.decode_request, m.decode_reply, m.decode_loader):\n"
        "            for kind in (b'\\xa6Reload', b'\\xa8Released', b'\\xabLoaderIndex'):\n"
        "                try: decode(b'\\x82\\xa4type' + kind + name + head + b'\\xff' * 4)\n"
        "                except ProtocolError: continue\n"
        "                sys.exit(1)\n"
    )
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    subprocess.run([sys.executable, "-c", code], check=True, timeout=BOUND_S)


@seed(20260801)
@settings(max_examples=300, deadline=None, database=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_only_ever_a_protocol_error(data: bytes) -> None:
    for decode in DECODERS:
        with pytest.raises(ProtocolError):
            decode(data)


@seed(20260801)
@settings(max_examples=300, deadline=None, database=None)
@given(st.sampled_from([*REQUESTS, *REPLIES, *LOADER]), st.integers(0, 10_000), st.integers(0, 255))
def test_message_with_one_byte_changed_is_read_or_a_protocol_error(
    message: Message, at: int, byte: int
) -> None:
    data = bytearray(encode(message))
    data[at % len(data)] = byte
    for decode in DECODERS:
        try:
            again = decode(bytes(data))
        except ProtocolError:
            continue
        assert decode(encode(again)) == again or "nan" in repr(again)
