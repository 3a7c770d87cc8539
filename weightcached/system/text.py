"""Sizes, times, progress and hints as a person reads them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class LoadState(Protocol):
    """The progress of a load. Bytes count within the phase; eta_s: None until estimated."""

    @property
    def phase(self) -> str: ...
    @property
    def done_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def eta_s(self) -> float | None: ...


def bytes_text(nbytes: int) -> str:
    """E.g. `14.9 GiB` or `512 KiB`."""
    for unit, shift in (("GiB", 30), ("MiB", 20)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.1f} {unit}"
    return f"{-(-nbytes // 1024)} KiB"


def seconds_text(seconds: float) -> str:
    """E.g. `0.4 s`, `59 s`, `12 min`, `3 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    for limit, per, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / per:.0f} {unit}"
    return f"{seconds / 86400:.0f} d" if seconds < 1e9 else "?"


def progress_text(load: LoadState) -> str:
    """E.g. `read weights, 1.0 of 15.0 GiB, 12 s left`; in MiB if all is less than 1 GiB."""
    parts = [load.phase] if load.phase else []
    if load.total_bytes:
        unit, shift = ("GiB", 30) if load.total_bytes >= 1 << 30 else ("MiB", 20)
        done, total = load.done_bytes / (1 << shift), load.total_bytes / (1 << shift)
        parts.append(f"{done:.1f} of {total:.1f} {unit}")
    if load.eta_s is not None:
        parts.append(f"{seconds_text(load.eta_s)} left")
    return ", ".join(parts)


def near_miss(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or "" if no known word is close."""
    # Its import would delay every command.
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f" (did you mean {close[0]!r}?)" if close else ""
