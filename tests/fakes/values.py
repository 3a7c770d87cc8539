"""Typed values as an index holds them."""

from __future__ import annotations

from typing import Any

import msgspec

from weightcached.model.values import to_wire


def encode_value(value: Any) -> msgspec.Raw:
    """The value for ModulePlan.values. Raises NotAValue."""
    return msgspec.Raw(msgspec.msgpack.encode(to_wire(value)))
