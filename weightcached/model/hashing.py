"""Digests of the storages in a segment, at the speed of the bus.

Device memory passes through two pinned buffers that are used again and again: while one is read,
the other fills. Fresh host memory for each segment would cost more in page faults than the
transfer. Host memory is read in place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash

Span = tuple[int, int]

# Pinning costs a third of a second per GiB; several storages fit into one, and each has a thread.
_WINDOW_NBYTES = 1 << 28


class SegmentHasher:
    """Makes digests of segments of at most `largest_nbytes` on `device`."""

    def __init__(self, largest_nbytes: int, device: torch.device) -> None:
        self._windows: list[torch.Tensor] = []
        if device.type != "cpu":
            nbytes = min(largest_nbytes, _WINDOW_NBYTES)
            self._windows = [
                torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)
            ]
        self._pool = ThreadPoolExecutor(min(16, os.cpu_count() or 1))

    def digests(self, segment: torch.Tensor, spans: Sequence[Span]) -> list[bytes]:
        """xxh3-128 of each (offset, nbytes) of the segment, a uint8 tensor of one dimension."""
        hashers = [xxhash.xxh3_128() for _ in spans]
        for begin, part in self._parts(segment):
            held = part.numpy()
            end = begin + part.numel()

            def update(
                number: int, begin: int = begin, end: int = end, held: object = held
            ) -> None:
                offset, nbytes = spans[number]
                first, last = max(offset, begin), min(offset + nbytes, end)
                if first < last:
                    hashers[number].update(held[first - begin : last - begin])  # type: ignore[index]

            list(self._pool.map(update, range(len(spans))))
        return [hasher.digest() for hasher in hashers]

    def _parts(self, segment: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The segment's parts in host memory, with offsets; each is valid until the next one."""
        if not self._windows:
            yield 0, segment
            return
        step = self._windows[0].numel()
        begins = range(0, segment.numel(), step)
        coming = self._copy_to_window(segment[:step], 0) if begins else None
        for number, begin in enumerate(begins):
            assert coming is not None
            part, event = coming
            if (after := begin + step) < segment.numel():
                # Into the other window, which nobody reads any more.
                coming = self._copy_to_window(segment[after : after + step], number + 1)
            if event is not None:
                event.synchronize()
            yield begin, part

    def _copy_to_window(
        self, part: torch.Tensor, number: int
    ) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """The window that a part is being copied to, and the event that it is there."""
        window = self._windows[number % 2][: part.numel()].copy_(part, non_blocking=True)
        if part.device.type == "cpu":
            return window, None
        event = torch.cuda.Event()
        event.record()
        return window, event

    def close(self) -> None:
        """Give the buffer and the threads back."""
        self._windows = []
        self._pool.shutdown()

    def __enter__(self) -> SegmentHasher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
