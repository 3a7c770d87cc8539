"""Wrapping functions of vLLM's classes, once a process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap_once(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace a function of the class itself, not one that it inherits, by wrap(function).

    Nothing where the class has none, or where that was done before.
    """
    original = vars(owner).get(name) if owner is not None else None
    if original is None or hasattr(original, "_weightcached"):
        return
    wrapped: Any = functools.wraps(original)(wrap(original))
    wrapped._weightcached = original
    setattr(owner, name, wrapped)
