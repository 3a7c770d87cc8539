"""Typed values that may cross the index: a closed list, each with its codec. Nothing here is ever
executed.

Plain Python scalars and containers travel as msgpack; everything else as a one-key map {"$tag": …}.
Classes and enum members are named by import path and are accepted on decoding only where the
caller's check allows the object.
"""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from weightcached.errors import IndexFormatError

_Scalar = (type(None), bool, int, float, str)
# Containers inside containers; deeper is an accident or an attack.
_MAX_DEPTH = 16


class NotAValue(Exception):
    """The object is of no type on the list."""


def to_wire(value: Any) -> Any:
    """The value as msgpack-able data. Raises NotAValue."""
    return _to_wire(value, 0)


def _to_wire(value: Any, depth: int) -> Any:
    if isinstance(value, enum.Enum):
        if value.name not in type(value).__members__:
            # A combination of flags has no member to look up.
            raise NotAValue(repr(value))
        return {"$enum": [type(value).__module__, type(value).__qualname__, value.name]}
    if type(value) in _Scalar:
        return value
    if isinstance(value, torch.dtype | torch.device | torch.memory_format | torch.layout):
        tag = {torch.dtype: "$dtype", torch.device: "$device"}.get(type(value))
        if tag is None:
            raise NotAValue(type(value).__name__)
        # The ordinal of a device is the process's own; the type is what the model depends on.
        return {
            tag: value.type
            if isinstance(value, torch.device)
            else str(value).removeprefix("torch.")
        }
    if depth > _MAX_DEPTH:
        raise NotAValue(f"nested deeper than {_MAX_DEPTH}")
    return _container_to_wire(value, depth + 1)


def _container_to_wire(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in (tuple, torch.Size):
        return {"$size" if kind is torch.Size else "$tuple": [_to_wire(v, depth) for v in value]}
    if kind is list:
        return {"$list": [_to_wire(v, depth) for v in value]}
    if kind in (set, frozenset):
        return {
            "$set" if kind is set else "$frozenset": sorted(
                (_to_wire(v, depth) for v in value), key=repr
            )
        }
    if kind is dict:
        return {"$dict": [[_to_wire(k, depth), _to_wire(v, depth)] for k, v in value.items()]}
    raise NotAValue(f"{kind.__module__}.{kind.__qualname__}")


def from_wire(data: Any) -> Any:
    """The value that to_wire() was given. Raises IndexFormatError for what is not on the list."""
    return _from_wire(data, 0)


def _from_wire(data: Any, depth: int) -> Any:
    if type(data) in _Scalar:
        return data
    if depth > _MAX_DEPTH:
        raise IndexFormatError(f"typed value is nested deeper than {_MAX_DEPTH}")
    if not isinstance(data, dict) or len(data) != 1:
        raise IndexFormatError(f"typed value {data!r}: expected a scalar or a map of one tag")
    ((tag, body),) = data.items()
    decode = _DECODERS.get(tag)
    if decode is None:
        raise IndexFormatError(
            f"typed value has the unknown tag {tag!r}: known are {', '.join(sorted(_DECODERS))}"
        )
    try:
        return decode(body, depth + 1)
    except (
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ImportError,
        ArithmeticError,
        RuntimeError,
    ) as e:
        raise IndexFormatError(f"typed value {tag} {body!r}: {e}") from e


def _enum(body: Any, depth: int) -> enum.Enum:
    module_name, qualname, member = body
    # Importing would run code that the index chose; whatever a model uses has been imported by
    # building it.
    module = sys.modules.get(module_name) or importlib.import_module(_vllm_module(module_name))
    cls: Any = module
    for part in qualname.split("."):
        cls = getattr(cls, part)
    if not (isinstance(cls, type) and issubclass(cls, enum.Enum)):
        raise ValueError(f"{module_name}.{qualname} is no enum")
    return cls[member]


def _vllm_module(name: str) -> str:
    if not name.startswith("vllm."):
        raise ValueError(f"module {name} is not imported")
    return name


def _dtype(body: Any, depth: int) -> torch.dtype:
    dtype = getattr(torch, body)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch.{body} is no dtype")
    return dtype


_DECODERS: dict[str, Callable[[Any, int], Any]] = {
    "$enum": _enum,
    "$dtype": _dtype,
    "$device": lambda body, depth: torch.device(body),
    "$tuple": lambda body, depth: tuple(_from_wire(v, depth) for v in body),
    "$size": lambda body, depth: torch.Size(_from_wire(v, depth) for v in body),
    "$list": lambda body, depth: [_from_wire(v, depth) for v in body],
    "$set": lambda body, depth: {_from_wire(v, depth) for v in body},
    "$frozenset": lambda body, depth: frozenset(_from_wire(v, depth) for v in body),
    "$dict": lambda body, depth: {_from_wire(k, depth): _from_wire(v, depth) for k, v in body},
}


def encode_value(value: Any) -> msgspec.Raw:
    """The value for ModulePlan.values. Raises NotAValue."""
    return msgspec.Raw(msgspec.msgpack.encode(to_wire(value)))


def decode_value(raw: msgspec.Raw) -> Any:
    """The value back. Raises IndexFormatError."""
    try:
        data = msgspec.msgpack.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as e:
        raise IndexFormatError(f"typed value does not decode: {e}") from e
    return from_wire(data)
