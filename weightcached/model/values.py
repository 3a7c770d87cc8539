"""Typed values that may cross the index: a closed list, each with its codec. Nothing here is ever
executed.

Plain Python scalars and containers travel as msgpack; everything else as a one-key map {"$tag": …}.
Enum members are named by import path; decoding accepts them only if the caller's `module_of` finds
the module.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import torch

from weightcached.errors import IndexFormatError

_Scalar = (type(None), bool, int, float, str)
# Containers inside containers; deeper is an accident or an attack.
_MAX_DEPTH = 16


# Finds the module that a recorded name is in. Raises ValueError, ImportError.
ModuleOf = Callable[[str], ModuleType]


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
        # The ordinal of a device differs between processes; the model depends on the type alone.
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


def loaded_module(name: str) -> ModuleType:
    """The module, if it is imported. Raises ValueError otherwise.

    Importing would run code that the index chose. Building a model has imported every module that
    it uses.
    """
    found = sys.modules.get(name)
    if found is None:
        raise ValueError(f"module {name} is not imported")
    return found


class _Place(NamedTuple):
    """The decoder's depth in a value, and how it finds modules."""

    depth: int
    module_of: ModuleOf


def from_wire(data: Any, module_of: ModuleOf = loaded_module) -> Any:
    """The value that to_wire() was given. Raises IndexFormatError for a type that is not on the
    list.

    module_of: finds the modules of enums; the engine's own hooks may import vLLM's.
    """
    return _from_wire(data, _Place(0, module_of))


def _from_wire(data: Any, at: _Place) -> Any:
    if type(data) in _Scalar:
        return data
    if at.depth > _MAX_DEPTH:
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
        return decode(body, at._replace(depth=at.depth + 1))
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


def _enum(body: Any, at: _Place) -> enum.Enum:
    module_name, qualname, member = body
    cls: Any = at.module_of(module_name)
    for part in qualname.split("."):
        cls = getattr(cls, part)
    if not (isinstance(cls, type) and issubclass(cls, enum.Enum)):
        raise ValueError(f"{module_name}.{qualname} is not an enum")
    return cls[member]


def _dtype(body: Any, at: _Place) -> torch.dtype:
    dtype = getattr(torch, body)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch.{body} is not a dtype")
    return dtype


_DECODERS: dict[str, Callable[[Any, _Place], Any]] = {
    "$enum": _enum,
    "$dtype": _dtype,
    "$device": lambda body, at: torch.device(body),
    "$tuple": lambda body, at: tuple(_from_wire(v, at) for v in body),
    "$size": lambda body, at: torch.Size(_from_wire(v, at) for v in body),
    "$list": lambda body, at: [_from_wire(v, at) for v in body],
    "$set": lambda body, at: {_from_wire(v, at) for v in body},
    "$frozenset": lambda body, at: frozenset(_from_wire(v, at) for v in body),
    "$dict": lambda body, at: {_from_wire(k, at): _from_wire(v, at) for k, v in body},
}


def decode_value(raw: msgspec.Raw, module_of: ModuleOf = loaded_module) -> Any:
    """The value back, as from_wire() has it. Raises IndexFormatError."""
    try:
        data = msgspec.msgpack.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as e:
        raise IndexFormatError(f"typed value does not decode: {e}") from e
    return from_wire(data, module_of)
