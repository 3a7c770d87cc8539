"""Sizes in the manifest: a number of bytes, or text such as `200 GiB`."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

_SIZE = re.compile(r"(\d{1,15}) ?(MiB|GiB|TiB)")
_UNITS = {"MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

SizeText = Annotated[str, Meta(pattern=rf"^{_SIZE.pattern}\Z")]


def nbytes_of(size: int | str) -> int:
    """Bytes of a size that the manifest's types have accepted."""
    if isinstance(size, int):
        return size
    match = _SIZE.fullmatch(size)
    assert match is not None
    return int(match[1]) * _UNITS[match[2]]
