"""Places of storages: in order, aligned, never across segments; small and mutable ones at the end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcached.errors import LayoutError
from weightcached.segments.packing import (
    ALIGN_BYTES,
    SEGMENT_NBYTES,
    SMALL_NBYTES,
    Packing,
    SegmentPlan,
    StoragePlacement,
    StorageSpec,
    align_up,
    plan_segments,
    segment_nbytes_for,
)

MIB = 1 << 20
PAGE = 4096


def plan(*nbytes: int, segment_nbytes: int = MIB, granularity: int = PAGE) -> Packing:
    return plan_segments(
        [StorageSpec(n) for n in nbytes], granularity=granularity, segment_nbytes=segment_nbytes
    )


SPECS = st.lists(
    st.builds(
        StorageSpec, st.integers(1, 3 * MIB) | st.integers(1, 2 * SMALL_NBYTES), st.booleans()
    ),
    max_size=40,
)
GRANULARITIES = st.sampled_from([512, PAGE, 64 * 1024, 512 * 1024])


@given(SPECS, GRANULARITIES)
def test_storages_are_apart_and_inside_their_segments(
    specs: list[StorageSpec], granularity: int
) -> None:
    layout = plan_segments(specs, granularity=granularity, segment_nbytes=MIB)
    ends = [0] * len(layout.segments)
    for spec, place in zip(specs, layout.placements, strict=True):
        # In the order given, so each begins behind the last one of its segment.
        assert place.offset_bytes >= ends[place.segment]
        assert place.offset_bytes % ALIGN_BYTES == 0
        ends[place.segment] = place.offset_bytes + spec.nbytes
        assert ends[place.segment] <= layout.segments[place.segment].nbytes


@given(SPECS, GRANULARITIES)
def test_shared_storages_keep_their_order_across_segments(
    specs: list[StorageSpec], granularity: int
) -> None:
    layout = plan_segments(specs, granularity=granularity, segment_nbytes=MIB)
    shared = [place for place in layout.placements if not layout.segments[place.segment].private]
    assert shared == sorted(shared)


@given(SPECS, GRANULARITIES)
def test_sizes_are_multiples_and_waste_less_than_one_granule_and_alignment(
    specs: list[StorageSpec], granularity: int
) -> None:
    layout = plan_segments(specs, granularity=granularity, segment_nbytes=MIB)
    assert all(segment.nbytes % granularity == 0 for segment in layout.segments)
    for number, segment in enumerate(layout.segments):
        held = [
            s.nbytes for s, p in zip(specs, layout.placements, strict=True) if p.segment == number
        ]
        assert held
        assert segment.nbytes < sum(align_up(n, ALIGN_BYTES) for n in held) + granularity
        # A segment above the usual size holds one storage alone.
        assert segment.private or segment.nbytes <= MIB or len(held) == 1


@given(SPECS)
def test_private_segment_is_last_and_holds_exactly_the_small_and_mutable(
    specs: list[StorageSpec],
) -> None:
    layout = plan_segments(specs, granularity=PAGE, segment_nbytes=MIB)
    assert [segment.private for segment in layout.segments] == sorted(
        segment.private for segment in layout.segments
    )
    assert sum(segment.private for segment in layout.segments) <= 1
    for spec, place in zip(specs, layout.placements, strict=True):
        assert layout.segments[place.segment].private == (
            spec.mutable or spec.nbytes < SMALL_NBYTES
        )


def test_nothing_is_no_segment() -> None:
    assert plan() == Packing([], [])


def test_storage_of_a_segments_size_fills_it() -> None:
    assert plan(MIB, MIB) == Packing(
        [SegmentPlan(MIB, False)] * 2, [StoragePlacement(0, 0), StoragePlacement(1, 0)]
    )


def test_larger_storage_has_a_segment_of_its_own() -> None:
    layout = plan(MIB // 2, 3 * MIB + 1, MIB // 2)
    assert layout.placements == [
        StoragePlacement(0, 0),
        StoragePlacement(1, 0),
        StoragePlacement(2, 0),
    ]
    assert [segment.nbytes for segment in layout.segments] == [MIB // 2, 3 * MIB + PAGE, MIB // 2]


@pytest.mark.parametrize(("nbytes", "private"), [(SMALL_NBYTES - 1, True), (SMALL_NBYTES, False)])
def test_border_between_small_and_shared(nbytes: int, private: bool) -> None:
    assert [segment.private for segment in plan(nbytes).segments] == [private]


def test_segments_are_a_gibibyte_by_default() -> None:
    layout = plan_segments([StorageSpec(1 << 29)] * 5, granularity=2 * MIB)
    assert [segment.nbytes for segment in layout.segments] == [
        SEGMENT_NBYTES,
        SEGMENT_NBYTES,
        1 << 29,
    ]


@pytest.mark.parametrize("tib", [1, 2, 6])
def test_large_host_fits_the_descriptor_store_twice(tib: int) -> None:
    memory = tib << 40
    storages = [StorageSpec(memory // 1000)] * 1000
    layout = plan_segments(storages, granularity=PAGE, segment_nbytes=segment_nbytes_for(memory))
    # The unit has FileDescriptorStoreMax=1024.
    assert 2 * len(layout.segments) < 1024


def test_no_gpu_of_today_has_other_segments_than_before() -> None:
    assert segment_nbytes_for(300 << 30) == segment_nbytes_for(384 << 30) == SEGMENT_NBYTES
    assert segment_nbytes_for((384 << 30) + 1) == 2 * SEGMENT_NBYTES


@pytest.mark.parametrize("nbytes", [0, -1])
def test_storage_without_content_is_refused(nbytes: int) -> None:
    with pytest.raises(LayoutError) as e:
        plan(MIB, nbytes)
    assert str(e.value) == f"storage 1 has {nbytes} bytes: only storages with content are placed"


@pytest.mark.parametrize(
    ("segment_nbytes", "granularity"), [(MIB + 1, PAGE), (MIB, 1000), (MIB, 256)]
)
def test_sizes_that_do_not_fit_are_refused(segment_nbytes: int, granularity: int) -> None:
    with pytest.raises(LayoutError) as e:
        plan(MIB, segment_nbytes=segment_nbytes, granularity=granularity)
    assert (
        str(e.value)
        == f"segments of {segment_nbytes} bytes do not fit granularity {granularity}, align 512"
    )


@given(st.integers(0, 1 << 62), st.sampled_from([1, 512, PAGE, 3]))
def test_align_up_is_the_next_multiple(nbytes: int, alignment: int) -> None:
    aligned = align_up(nbytes, alignment)
    assert aligned % alignment == 0
    assert 0 <= aligned - nbytes < alignment
