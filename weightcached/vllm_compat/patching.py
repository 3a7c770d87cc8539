"""Wrapping functions of vLLM's classes, once a process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap_once(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace a function of the class itself, not an inherited one, by wrap(function).

    Does nothing if the class has none, or if it is replaced already.
    """
    original = vars(owner).get(name) if owner is not None else None
    if original is None or hasattr(original, "_weightcached"):
        return
    wrapped: Any = functools.wraps(original)(wrap(original))
    wrapped._weightcached = original
    setattr(owner, name, wrapped)
