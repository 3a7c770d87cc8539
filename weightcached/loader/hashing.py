"""Digests of the storages in a segment, at the speed of the bus.

Device memory passes through one pinned buffer that is used again and again: fresh host memory for each segment would
cost more in page faults than the transfer does. Host memory is read where it is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash

Span = tuple[int, int]

_WINDOW_NBYTES = 1 << 30


class SegmentHasher:
    """Makes digests of segments of at most `largest_nbytes` on `device`."""

    def __init__(self, largest_nbytes: int, device: torch.device) -> None:
        self._window: torch.Tensor | None = None
        if device.type != "cpu":
            self._window = torch.empty(min(largest_nbytes, _WINDOW_NBYTES), dtype=torch.uint8, pin_memory=True)
        self._pool = ThreadPoolExecutor(min(16, os.cpu_count() or 1))

    def digests(self, segment: torch.Tensor, spans: Sequence[Span]) -> list[bytes]:
        """xxh3-128 of each (offset, nbytes) of the segment, a uint8 tensor of one dimension."""
        hashers = [xxhash.xxh3_128() for _ in spans]
        step = segment.numel() if self._window is None else self._window.numel()
        for begin in range(0, segment.numel(), step):
            end = min(begin + step, segment.numel())
            held = self._held(segment[begin:end]).numpy()

            def update(number: int, begin: int = begin, end: int = end, held: object = held) -> None:
                offset, nbytes = spans[number]
                first, last = max(offset, begin), min(offset + nbytes, end)
                if first < last:
                    hashers[number].update(held[first - begin : last - begin])  # type: ignore[index]

            list(self._pool.map(update, range(len(spans))))
        return [hasher.digest() for hasher in hashers]

    def _held(self, part: torch.Tensor) -> torch.Tensor:
        if self._window is None:
            return part
        return self._window[: part.numel()].copy_(part)

    def close(self) -> None:
        """Give the buffer and the threads back."""
        self._window = None
        self._pool.shutdown()

    def __enter__(self) -> SegmentHasher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
