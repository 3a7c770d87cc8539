"""Place storages in segments: arithmetic only, no memory is touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weightcached.errors import LayoutError

# Every storage starts on a multiple of this: cuBLAS and vectorized kernels want at most 256.
ALIGN_BYTES = 512
SEGMENT_NBYTES = 1 << 30
# A device is filled by about so many segments, twice during a reload. The unit's descriptor store
# holds 1024; a host of some TiB would need more of 1 GiB each.
_SEGMENTS_OF_A_DEVICE = 384
# A storage below this goes to the private segment, which every engine copies.
SMALL_NBYTES = 64 * 1024


class StorageSpec(NamedTuple):
    """One storage to place. `mutable`: an engine may write to it."""

    nbytes: int
    mutable: bool = False


class SegmentPlan(NamedTuple):
    nbytes: int
    private: bool


class StoragePlacement(NamedTuple):
    segment: int
    offset_bytes: int


class Packing(NamedTuple):
    """Segments in mapping order, the private one last, and one placement per storage, in order."""

    segments: list[SegmentPlan]
    placements: list[StoragePlacement]


def align_up(nbytes: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is not below `nbytes`."""
    return -(-nbytes // alignment) * alignment


def segment_nbytes_for(device_nbytes: int) -> int:
    """How large segments are on a device with so much memory: 1 GiB, and more beyond 384 GiB."""
    return SEGMENT_NBYTES * max(1, -(-device_nbytes // (SEGMENT_NBYTES * _SEGMENTS_OF_A_DEVICE)))


def plan_segments(
    storages: Sequence[StorageSpec], *, granularity: int, segment_nbytes: int = SEGMENT_NBYTES
) -> Packing:
    """Place storages into segments, keeping their order.

    Shared segments hold at most about `segment_nbytes`; a larger storage gets a segment of its own.
    Small and mutable storages share the one private segment. Sizes are rounded up to `granularity`.
    Nothing straddles segments. Raises LayoutError for a storage of 0 bytes and for sizes that are
    no multiples.
    """
    if segment_nbytes % granularity or granularity % ALIGN_BYTES:
        raise LayoutError(
            f"segments of {segment_nbytes} bytes do not fit granularity {granularity}, align {ALIGN_BYTES}"
        )
    shared: list[int] = []
    private_used = 0
    placed: list[tuple[bool, int, int]] = []
    for number, storage in enumerate(storages):
        if storage.nbytes <= 0:
            raise LayoutError(
                f"storage {number} has {storage.nbytes} bytes: only storages with content are placed"
            )
        padded = align_up(storage.nbytes, ALIGN_BYTES)
        if storage.mutable or storage.nbytes < SMALL_NBYTES:
            placed.append((True, 0, private_used))
            private_used += padded
        else:
            if not shared or shared[-1] + padded > segment_nbytes:
                shared.append(0)
            placed.append((False, len(shared) - 1, shared[-1]))
            shared[-1] += padded
    segments = [SegmentPlan(align_up(used, granularity), private=False) for used in shared]
    if private_used:
        segments.append(SegmentPlan(align_up(private_used, granularity), private=True))
    placements = [
        StoragePlacement(len(shared) if private else segment, offset)
        for private, segment, offset in placed
    ]
    return Packing(segments, placements)
