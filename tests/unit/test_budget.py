"""The part of a device's memory for vLLM, compared with vLLM's own check."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcache_loader import budget
from weightcache_loader.budget import DeviceBudget, external_bytes
from weightcached.wire.messages import EngineStatus
from weightcached.wire.resident import NEXT, Held

# Warnings of vLLM's imports are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")
GIB = 1 << 30
# An H200, as vLLM sees it.
TOTAL = int(139.8 * GIB)
CONTEXT = int(0.7 * GIB)
MODEL = int(14.96 * GIB)
SMALL = int(1.7 * GIB)


def empty_but_for(*resident: int, utilization: float = 0.92) -> DeviceBudget:
    return DeviceBudget(TOTAL, TOTAL - CONTEXT - sum(resident), utilization)


def requested(device: DeviceBudget, external: int) -> int:
    """The bytes that vLLM gives an engine with this answer; raises ValueError if it refuses to
    start.
    """
    from vllm.v1.worker.utils import request_memory

    snapshot = SimpleNamespace(
        total_memory=device.total, free_memory=device.free, device_=SimpleNamespace(index=0)
    )
    config: Any = SimpleNamespace(gpu_memory_utilization=device.utilization)
    return int(request_memory(snapshot, config, external))


def test_without_anything_resident_nothing_changes() -> None:
    assert external_bytes(empty_but_for(), own=0, others=0) == 0
    assert external_bytes(empty_but_for(MODEL), own=MODEL, others=0) == MODEL


@pytest.mark.parametrize("own", [0, SMALL])
def test_engine_beside_other_caches_starts_and_the_device_ends_at_the_utilization(own: int) -> None:
    device = empty_but_for(MODEL, own)
    with pytest.raises(ValueError, match="Free memory on device"):
        requested(device, own)
    external = external_bytes(device, own=own, others=MODEL)
    engine = requested(device, external)
    at_the_end = TOTAL - device.free + engine
    assert at_the_end <= 0.92 * TOTAL + CONTEXT + 1
    assert engine >= 0.92 * TOTAL - own - MODEL - 1


def test_two_engines_at_45_percent_with_a_model_each_lose_nothing() -> None:
    first = empty_but_for(MODEL, MODEL, utilization=0.45)
    assert external_bytes(first, own=MODEL, others=MODEL) == MODEL
    taken = requested(first, MODEL)
    second = first._replace(free=first.free - taken - CONTEXT)
    assert external_bytes(second, own=MODEL, others=MODEL) == MODEL
    assert requested(second, MODEL) == taken


def test_another_programs_memory_is_not_excused_by_ours() -> None:
    device = empty_but_for(MODEL, 60 * GIB)
    external = external_bytes(device, own=0, others=MODEL)
    assert external == MODEL
    assert not budget.starts(device, external)
    with pytest.raises(ValueError, match="Free memory on device"):
        requested(device, external)


sizes = st.integers(min_value=0, max_value=200 * GIB)


@given(
    total=st.integers(min_value=GIB, max_value=200 * GIB),
    free=sizes,
    utilization=st.floats(min_value=0.05, max_value=1.0),
    own=sizes,
    others=sizes,
)
def test_answer_is_what_is_mapped_and_never_more_than_what_is_held(
    total: int, free: int, utilization: float, own: int, others: int
) -> None:
    device = DeviceBudget(total, min(free, total), utilization)
    external = external_bytes(device, own=own, others=others)
    assert own <= external <= own + others
    if budget.starts(device, external) and external > 0:
        engine = requested(device, external)
        assert engine == budget.engine_bytes(device, external)
        if own < external < own + others:
            # Not all that is held had to be excused: the device ends with the headroom left.
            assert device.free - engine == int(min(1 - utilization, 0.08) * total)


def test_texts_name_caches_bytes_engines_and_what_helps() -> None:
    held = [
        Held(cache="a/target", generation=1, nbytes=MODEL, engines=[EngineStatus(pid=7, since=0.0)]),
        Held(cache="b/target", generation=2, nbytes=SMALL, engines=[]),
    ]  # fmt: skip
    device = empty_but_for(MODEL, SMALL)
    assert budget.cost(device, held, MODEL + SMALL) == (
        "the KV cache is 16.7 GiB smaller than on an empty device: of 139.8 GiB the daemon holds a/target 15.0 GiB "
        "(pid 7), b/target 1.7 GiB (no engine), which this engine does not map; 'weightcachectl drop b/target' frees "
        "that cache, a lower --gpu-memory-utilization of this device's engines leaves room for more"
    )
    crowded = empty_but_for(MODEL, SMALL, 60 * GIB)
    assert budget.no_room(crowded, held, own=0, left=112 * GIB, needed=0) == (
        "no room on the device: --gpu-memory-utilization 0.92 of 139.8 GiB leaves 112.0 GiB for this engine, 62.4 GiB "
        "are free, the daemon holds a/target 15.0 GiB (pid 7), b/target 1.7 GiB (no engine); "
        "--gpu-memory-utilization 0.56 starts beside them; 'weightcachectl drop b/target' frees that cache, a lower "
        "--gpu-memory-utilization of this device's engines leaves room for more"
    )
    lower = crowded._replace(utilization=0.56)
    assert requested(lower, external_bytes(lower, own=0, others=MODEL + SMALL)) > 0
    assert "its weights alone take 15.0 GiB" in budget.no_room(
        device, held, own=0, left=GIB, needed=MODEL
    )


def test_room_that_is_kept_for_models_on_demand_stays_free() -> None:
    """They come back beside the engine, which has its KV cache by then."""
    device, reserved = empty_but_for(MODEL, SMALL), 2 * MODEL
    external = external_bytes(device, own=SMALL, others=MODEL, reserved=reserved)
    engine = requested(device, external)
    assert TOTAL - device.free + engine + reserved <= 0.92 * TOTAL + CONTEXT + 1
    # Two engines that fit beside it lose nothing.
    low = empty_but_for(MODEL, SMALL, utilization=0.3)
    assert external_bytes(low, own=SMALL, others=MODEL, reserved=reserved) == SMALL


def test_a_parked_room_is_named_with_what_gives_it_back() -> None:
    kept = Held(cache="models on demand", generation=0, nbytes=MODEL, engines=[], reserved=True)
    held = Held(
        cache="b/target", generation=2, nbytes=SMALL, engines=[EngineStatus(pid=7, since=0.0)]
    )
    text = budget.cost(empty_but_for(SMALL), [held, kept], MODEL)
    assert (
        "b/target 1.7 GiB (pid 7), models on demand 15.0 GiB (kept free by budget: in the manifest)"
        in text
    )
    assert "'weightcachectl drop b/target' frees that cache" in text
    assert "a lower budget: in the manifest leaves less to models on demand" in budget.remedies(
        [kept]
    )


def test_room_for_new_weights_is_named_with_its_key() -> None:
    kept = Held(cache=NEXT, generation=0, nbytes=MODEL, engines=[], reserved=True)
    text = budget.cost(empty_but_for(MODEL), [kept], SMALL)
    assert "next weights of live models 15.0 GiB (kept free by live: in the manifest)" in text
    assert "without live: true in the manifest none is kept for new weights" in text
