"""Typed values: types on the list survive, others are refused, nothing is executed."""

from __future__ import annotations

import enum
import re
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.values import encode_value
from weightcached.errors import IndexFormatError
from weightcached.model.values import NotAValue, decode_value, from_wire, to_wire
from weightcached.vllm_compat.hooks import PostProcessing

TAGS = "$device, $dict, $dtype, $enum, $frozenset, $list, $set, $size, $tuple"


class Colour(enum.Enum):
    RED = 1
    ALIAS = 1
    GREEN = "g"


class Flags(enum.Flag):
    A = 1
    B = 2


class Outer:
    class Inner(enum.IntEnum):
        ONE = 1


HASHABLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(
        [*Colour, *Flags, Outer.Inner.ONE, torch.float16, torch.device("cpu"), torch.device("cuda")]
    ),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
VALUES = st.recursive(
    HASHABLE | st.lists(st.integers(0, 1 << 40), max_size=4).map(torch.Size),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(HASHABLE, inner, max_size=4)
        | st.sets(HASHABLE, max_size=4)
    ),
    max_leaves=12,
)


def types_of(value: Any) -> Any:
    """The types of all that is in a value, since True equals 1 and a Size a tuple."""
    if isinstance(value, dict):
        return [dict, *[(types_of(k), types_of(v)) for k, v in value.items()]]
    if isinstance(value, list | tuple):
        return [type(value), *map(types_of, value)]
    return type(value)


@given(VALUES)
def test_values_come_back_with_their_types(value: Any) -> None:
    back = decode_value(encode_value(value))
    assert back == value
    assert types_of(back) == types_of(value)


def test_enum_alias_comes_back_as_its_member() -> None:
    assert decode_value(encode_value(Colour.ALIAS)) is Colour.RED


def test_device_comes_back_without_its_ordinal() -> None:
    assert decode_value(encode_value(torch.device("cuda", 3))) == torch.device("cuda")


class Text(str):
    """A subclass may hang more on itself than its text."""


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Colour,
        len,
        b"bytes",
        1j,
        Text("x"),
        torch.strided,
        torch.channels_last,
        torch.ones(1),
        torch.nn.Identity(),
        range(3),
        Flags.A | Flags.B,
        [1, [object()]],
        {"a": object()},
        {(1, object()): 2},
        (len,),
    ],
    # Without addresses, which differ from process to process.
    ids=lambda value: re.sub(r" at 0x[0-9a-f]+", "", repr(value)),
)
def test_everything_else_is_no_value(value: Any) -> None:
    with pytest.raises(NotAValue):
        to_wire(value)


# ---- hostile data


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([], "typed value []: expected a scalar or a map of one tag"),
        ({}, "typed value {}: expected a scalar or a map of one tag"),
        (
            {"$list": [], "$set": []},
            "typed value {'$list': [], '$set': []}: expected a scalar or a map of one tag",
        ),
        (b"x", "typed value b'x': expected a scalar or a map of one tag"),
        ({"$pickle": "x"}, f"typed value has the unknown tag '$pickle': known are {TAGS}"),
        ({"$call": ["os", "system"]}, f"typed value has the unknown tag '$call': known are {TAGS}"),
        ({1: 2}, f"typed value has the unknown tag 1: known are {TAGS}"),
        ({"$type": "vllm.X"}, f"typed value has the unknown tag '$type': known are {TAGS}"),
        ({"$dtype": "nn"}, "typed value $dtype 'nn': torch.nn is not a dtype"),
        ({"$dtype": "load"}, "typed value $dtype 'load': torch.load is not a dtype"),
        (
            {"$dtype": "float33"},
            "typed value $dtype 'float33': module 'torch' has no attribute 'float33'",
        ),
        ({"$tuple": 5}, "typed value $tuple 5: 'int' object is not iterable"),
        ({"$list": [{"$x": 1}]}, f"typed value has the unknown tag '$x': known are {TAGS}"),
        (
            {"$dict": [[1]]},
            "typed value $dict [[1]]: not enough values to unpack (expected 2, got 1)",
        ),
        ({"$set": [{"$list": []}]}, "typed value $set [{'$list': []}]: unhashable type: 'list'"),
        (
            {"$enum": ["os", "system", "x"]},
            "typed value $enum ['os', 'system', 'x']: os.system is not an enum",
        ),
        (
            {"$enum": ["os", "path.join", "x"]},
            "typed value $enum ['os', 'path.join', 'x']: os.path.join is not an enum",
        ),
        (
            {"$enum": ["signal", "Signals", "NO"]},
            "typed value $enum ['signal', 'Signals', 'NO']: 'NO'",
        ),
        ({"$enum": ["signal", "Signals", 9]}, "typed value $enum ['signal', 'Signals', 9]: 9"),
        (
            {"$enum": ["signal", "Signals", "__class__"]},
            "typed value $enum ['signal', 'Signals', '__class__']: '__class__'",
        ),
        (
            {"$enum": ["antigravity", "X", "Y"]},
            "typed value $enum ['antigravity', 'X', 'Y']: module antigravity is not imported",
        ),
        (
            {"$enum": ["vllmx.y", "X", "Y"]},
            "typed value $enum ['vllmx.y', 'X', 'Y']: module vllmx.y is not imported",
        ),
        (
            {"$enum": ["signal", "Signals"]},
            "typed value $enum ['signal', 'Signals']: not enough values to unpack (expected 3, got 2)",
        ),
        (
            {"$enum": [{}, "Signals", "X"]},
            "typed value $enum [{}, 'Signals', 'X']: unhashable type: 'dict'",
        ),
    ],
    ids=str,
)
def test_hostile_data_is_refused(data: Any, text: str) -> None:
    with pytest.raises(IndexFormatError) as e:
        from_wire(data)
    assert str(e.value) == text


@pytest.mark.parametrize(
    "data",
    [
        {"$device": "cpu:0:0"},
        {"$device": "nonsense"},
        {"$device": []},
        {"$size": ["x"]},
        {"$size": [{"$list": []}]},
        {"$dtype": 3},
    ],
    ids=str,
)
def test_data_that_torch_refuses_is_refused(data: Any) -> None:
    ((tag, body),) = data.items()
    with pytest.raises(IndexFormatError) as e:
        from_wire(data)
    assert str(e.value).startswith(f"typed value {tag} {body!r}: ")


def test_module_that_is_not_imported_stays_so() -> None:
    assert "antigravity" not in sys.modules
    with pytest.raises(IndexFormatError):
        from_wire({"$enum": ["antigravity", "X", "Y"]})
    assert "antigravity" not in sys.modules


def test_module_of_vllm_is_imported_where_it_exists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = types.ModuleType("vllm")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "vllm", package)
    (tmp_path / "kinds.py").write_text("import enum\nclass Kind(enum.Enum):\n    ONE = 1\n")
    module_of = PostProcessing(None, torch.device("cpu"), stage="processed").module_of
    kind = {"$enum": ["vllm.kinds", "Kind", "ONE"]}
    with pytest.raises(IndexFormatError, match=r"module vllm\.kinds is not imported"):
        from_wire(kind)
    assert repr(from_wire(kind, module_of)) == "<Kind.ONE: 1>"
    monkeypatch.delitem(sys.modules, "vllm.kinds")
    with pytest.raises(IndexFormatError) as e:
        from_wire({"$enum": ["vllm.gone", "X", "Y"]}, module_of)
    assert str(e.value) == "typed value $enum ['vllm.gone', 'X', 'Y']: No module named 'vllm.gone'"


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def test_value_may_be_nested_as_deep_as_it_may_come_back() -> None:
    assert decode_value(encode_value(nested(17))) == nested(17)
    with pytest.raises(NotAValue, match=r"^nested deeper than 16$"):
        encode_value(nested(18))


def test_list_that_holds_itself_is_no_value() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(NotAValue):
        to_wire(endless)


@pytest.mark.parametrize("levels", [18, 100, 400, 100_000])
def test_nesting_beyond_all_bounds_is_refused(levels: int) -> None:
    raw = b"\x81\xa5$list\x91" * levels + b"\x01"
    with pytest.raises(IndexFormatError) as e:
        decode_value(msgspec.Raw(raw))
    assert str(e.value) in {
        "typed value is nested deeper than 16",
        "typed value does not decode: maximum recursion depth exceeded while deserializing an object",
    }


SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
)
TAGGED = st.sampled_from(TAGS.split(", ")) | st.text(max_size=3)
JSON = st.recursive(
    SCALARS | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TAGGED, inner, min_size=1, max_size=1)
    ),
    max_leaves=10,
)


@given(JSON | st.binary(max_size=40))
def test_any_data_gives_a_value_or_the_one_error(data: Any) -> None:
    raw = data if isinstance(data, bytes) else msgspec.msgpack.encode(data)
    try:
        value = decode_value(msgspec.Raw(raw))
    except IndexFormatError:
        return
    # What is accepted is on the list itself.
    to_wire(value)
