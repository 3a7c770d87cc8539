"""docs/protocol.md is complete: every message, field, bound, default and code, and bytes that decode.

The page is written by hand, but its tables are compared with the code row by row. A failure prints
the rows as they should begin, so that they can be pasted and given a meaning.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from weightcached import errors
from weightcached.checkpoint import digests, identity
from weightcached.daemon import loading, server, session
from weightcached.index import key, tensors
from weightcached.segments import packing
from weightcached.wire import framing, loader_job, messages
from weightcached.wire.messages import (
    Descriptors,
    Fallback,
    Hello,
    Message,
    Ready,
    Welcome,
    decode_reply,
    decode_request,
    encode,
)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
MODULES = (messages, key, identity, tensors, loader_job)
# The results of decide() never leave their process.
LOCAL = {"Message", "LoadMessage", "Decision", "Equal", "Different", "Need"}


def structs() -> list[type[msgspec.Struct]]:
    """Every struct that travels, in the order of the modules."""
    return [
        value
        for module in MODULES
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, msgspec.Struct)
        and value.__module__ == module.__name__
        and value.__name__ not in LOCAL
    ]


SCALARS: dict[type, str] = {
    msgspec.inspect.FloatType: "number",
    msgspec.inspect.BoolType: "boolean",
    msgspec.inspect.BytesType: "bytes",
    msgspec.inspect.NoneType: "null",
    msgspec.inspect.AnyType: "any",
    msgspec.inspect.RawType: "any",
}


def described(info: msgspec.inspect.Type) -> str:
    """A type with its bounds, in the words of the page."""
    match info:
        case msgspec.inspect.StrType(min_length=low, max_length=high, pattern=pattern):
            span = f", {low} to {high} characters" if low else f", at most {high} characters"
            return "text" + (f", `{pattern}`" if pattern else span if high else "")
        case msgspec.inspect.IntType(ge=low):
            return "integer" if low is None else f"integer, {low} or more"
        case msgspec.inspect.LiteralType(values=values):
            return " or ".join(f'`"{value}"`' for value in values)
        case msgspec.inspect.UnionType(types=types):
            return " or ".join(described(each) for each in types)
        case msgspec.inspect.StructType(cls=cls):
            return f"[{cls.__name__}](#{cls.__name__.lower()})"
        case msgspec.inspect.ListType(item_type=item, min_length=low, max_length=high):
            bound = f", at most {high}" if high else f", at least {low}" if low else ""
            return f"array{bound}: {described(item)}"
        case msgspec.inspect.DictType(key_type=k, value_type=value, max_length=high):
            bound = f", at most {high} entries" if high else ""
            return f"map{bound}: {described(k)} → {described(value)}"
    return SCALARS[type(info)]


def default_of(field: msgspec.inspect.Field) -> str:
    if field.required:
        return "required"
    made = field.default_factory is not msgspec.NODEFAULT
    value: Any = field.default_factory() if made else field.default
    return f"`{json.dumps(value)}`"


def rows(struct: type[msgspec.Struct]) -> list[str]:
    """The first three columns of each field's row."""
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType)
    return [
        f"| `{field.encode_name}` | {described(field.type)} | {default_of(field)} |"
        for field in info.fields
    ]


def section(name: str) -> str:
    """The text under the heading `### name`, up to the next heading."""
    found = re.search(rf"^### {name}$(.*?)(?=^#|\Z)", PAGE, re.M | re.S)
    return found[1] if found else ""


@pytest.mark.parametrize("struct", structs(), ids=lambda struct: struct.__name__)
def test_page_has_every_field_with_type_bound_and_default(struct: type[msgspec.Struct]) -> None:
    text = section(struct.__name__)
    assert text, f"no heading '### {struct.__name__}'"
    assert text.startswith("\n\n*(array)* ") == struct.__struct_config__.array_like
    written = [line for line in section(struct.__name__).splitlines() if re.match(r"\| `", line)]
    expected = rows(struct)
    begun = [" | ".join(row.split(" | ")[:3]) + " |" for row in written]
    assert begun == expected, "\n" + "\n".join(expected)
    assert all(row.split(" | ")[3].strip(" |") for row in written), "a field has no meaning"


def test_page_has_no_section_of_a_struct_that_is_gone() -> None:
    """Headings with a capital and no space are names of structs."""
    headings = set(re.findall(r"^### ([A-Z]\w+)$", PAGE, re.M))
    assert headings == {struct.__name__ for struct in structs()}


def test_every_message_is_in_the_list_of_its_direction() -> None:
    for heading, union in (
        ("Client to daemon", messages.Request),
        ("Daemon to client", messages.Reply),
        ("Loader child to daemon", messages.LoaderMessage),
    ):
        listed = re.search(rf"^\| {heading} \|(.*)\|$", PAGE, re.M)
        assert listed is not None, heading
        assert set(re.findall(r"`(\w+)`", listed[1])) == {c.__name__ for c in get_args(union)}


def codes() -> Iterator[str]:
    """Every code of an error class, and every one that code names more closely."""
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, errors.WeightcachedError):
            yield value.code
    yield from get_args(errors.Refusal)
    yield from get_args(errors.Cause)
    for package in ("weightcached", "weightcache_loader"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.keyword) and node.arg == "code":
                    yield from _texts(node.value)


def _texts(node: ast.expr) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value:
            yield each.value


def test_page_has_every_error_code() -> None:
    listed = set(re.findall(r"^\| `([a-z][a-z-]*)` \|", PAGE, re.M))
    missing = sorted(set(codes()) - listed)
    assert not missing, f"no row for the codes {missing}"


LIMITS = {
    "protocol version": messages.PROTOCOL_VERSION,
    "bytes in a packet": framing.MAX_PACKET_BYTES,
    "descriptors in a packet": framing.MAX_PACKET_FDS,
    "bytes in a message to the daemon": framing.MAX_REQUEST_BYTES,
    "bytes in a message from the daemon": framing.MAX_LARGE_BYTES,
    "connections": server.MAX_CONNECTIONS,
    "seconds for the first message": session.HELLO_TIMEOUT_S,
    "seconds for taking an answer": session.SEND_TIMEOUT_S,
    "seconds between two requests of a tool": session.IDLE_TIMEOUT_S,
    "seconds between two `Loading`": session.REPEAT_S,
    "seconds between two `Progress`": session.PROGRESS_S,
    "files in a checkpoint": identity.MAX_FILES,
    "bytes in a tensor index": tensors.MAX_INDEX_BYTES,
    "format version of a tensor index": tensors.FORMAT_VERSION,
    "segments in a generation": loading._MAX_SEGMENTS,
    "alignment of a storage": packing.ALIGN_BYTES,
    "bytes in a chunk of the full digest": digests.CHUNK_BYTES,
    "bytes in a sample": digests.SAMPLE_BYTES,
    "seconds without progress of a loader": loading.DEFAULT_STALL_TIMEOUT_S,
}


@pytest.mark.parametrize("name", LIMITS)
def test_page_has_every_limit(name: str) -> None:
    value = LIMITS[name]
    assert f"| {name} | {int(value) if value == int(value) else value:,} |" in PAGE


def example(title: str) -> bytes:
    """The bytes of an example: the part of each line before two spaces."""
    found = re.search(rf"^{re.escape(title)}\n\n```\n(.*?)```", PAGE, re.M | re.S)
    assert found is not None, title
    lines = [line.split("  ")[0] for line in found[1].splitlines()]
    return bytes.fromhex("".join(lines))


HELLO = Hello(protocol=1, software="example 1", purpose="ctl")
WELCOME = Welcome(protocol=1, device="cpu0", pid=4711, software="0.1.0", parking=True)
FALLBACK = Fallback(reason="key-mismatch")
READY = Ready(
    cache="tiny/target", generation=1, nbytes=1 << 21, segment_nbytes=[1 << 21],
    index_digest="9f" * 32, descriptors=2,
)  # fmt: skip


@pytest.mark.parametrize(
    ("title", "message"),
    [
        ("`Hello`, 60 bytes:", HELLO),
        ("`Welcome`, 67 bytes:", WELCOME),
        ("`Fallback`, 35 bytes:", FALLBACK),
        ("`Ready`, 167 bytes:", READY),
        ("`Descriptors`, 25 bytes:", Descriptors(first=0)),
    ],
)
def test_example_packet_decodes(title: str, message: Message) -> None:
    data = example(title)
    assert f" {len(data)} bytes:" in title
    decode = decode_request if isinstance(message, get_args(messages.Request)) else decode_reply
    assert decode(data) == message
    assert encode(message) == data


def test_example_of_a_packet_for_a_large_message_is_recognised() -> None:
    packet = framing.Packet(example("The packet of a message in a memfd, 6 bytes:"), [object()])  # type: ignore[list-item]
    assert framing.is_large(packet)


def test_example_header_of_an_index_is_read() -> None:
    rest = b"the msgpack of TensorIndex"
    header = example("The header of an index, with the sha256 of 26 bytes that follow:")
    assert len(header) == 38
    assert header[-32:] == hashlib.sha256(rest).digest()
    assert tensors.digest_of(header + rest) == hashlib.sha256(rest).hexdigest()
    with pytest.raises(errors.IndexFormatError, match=r"^tensor index does not decode: "):
        tensors.decode(header + rest)


def test_example_of_the_full_digest_is_right() -> None:
    """The page computes the digest of a checkpoint with one file of 3 bytes."""
    found = re.search(r"one file that holds `abc` has the full digest `([0-9a-f]{32})`", PAGE)
    assert found is not None
    import xxhash

    chunk = xxhash.xxh3_128(b"abc").digest()
    assert digests.combine("full", [(3, xxhash.xxh3_128(chunk).digest())]) == found[1]
