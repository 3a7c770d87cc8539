"""The last errors of this node, for as long as the exporter runs. Nothing is written to disk."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

KEPT = 20


class Fault(NamedTuple):
    """where: a device, a device and a cache, or an engine service."""

    where: str
    text: str


class Seen(NamedTuple):
    """A fault, when it was first seen, and when last: seconds since 1970."""

    fault: Fault
    first: float
    last: float


class History:
    """Keeps KEPT different faults; that seen least recently goes first. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # In the order in which they were last seen.
        self._seen: dict[Fault, Seen] = {}

    def note(self, faults: Iterable[Fault], at: float) -> None:
        """These are there at `at`. White space in their texts becomes single spaces."""
        with self._lock:
            for where, text in faults:
                fault = Fault(where, " ".join(text.split()))
                known = self._seen.pop(fault, None)
                self._seen[fault] = Seen(fault, known.first if known else at, at)
            while len(self._seen) > KEPT:
                del self._seen[next(iter(self._seen))]

    def newest_first(self) -> list[Seen]:
        """What is kept."""
        with self._lock:
            return list(reversed(self._seen.values()))
