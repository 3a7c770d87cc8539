"""vLLM's startup plan, with vLLM's own functions: a plan is used only by an engine of the same budget."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weightcached.vllm_compat import startup_plan as ours

# What vLLM's imports warn of is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")
GIB = 1 << 30


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    from vllm.v1.worker import startup_plan

    monkeypatch.setenv("VLLM_ENABLE_STARTUP_PLAN", "1")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    platform = SimpleNamespace(
        get_device_capability=lambda: "9.0", get_device_name=lambda: "H200", get_device_total_memory=lambda: 140 * GIB
    )  # fmt: skip
    monkeypatch.setattr(startup_plan, "current_platform", platform)
    monkeypatch.setattr(
        startup_plan, "compute_plan_fingerprint", startup_plan.compute_plan_fingerprint
    )
    monkeypatch.setattr(ours, "_factors", [])
    return startup_plan


def worker(load_format: str = "ipc_cache") -> Any:
    """An engine's worker of one configuration, on a device that is as free as it ever was."""
    return SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None), rank=0,
        vllm_config=SimpleNamespace(
            compute_hash=lambda: "same", load_config=SimpleNamespace(load_format=load_format)
        ),
        parallel_config=SimpleNamespace(world_size=1), init_snapshot=SimpleNamespace(free_memory=124 * GIB),
    )  # fmt: skip


def applied(plans: Any, load_format: str = "ipc_cache") -> int | None:
    engine = worker(load_format)
    plans.maybe_apply_startup_plan(engine)
    found: int | None = engine.cache_config.kv_cache_memory_bytes
    return found


def test_plan_saved_attached_is_not_used_from_disk_and_the_other_way_round(plans: Any) -> None:
    ours.note(0.92, 15 * GIB, ["zero_copy"])
    plans.maybe_save_startup_plan(worker(), 110 * GIB)
    assert applied(plans) == 110 * GIB
    ours.note(0.92, 15 * GIB, ["disk"])
    assert applied(plans) is None
    plans.maybe_save_startup_plan(worker(), 95 * GIB)
    ours.note(0.92, 15 * GIB, ["zero_copy"])
    assert applied(plans) == 110 * GIB
    # The attach failed after all.
    ours.changed("disk")
    assert applied(plans) is None


@pytest.mark.parametrize("changed", [(0.5, 15 * GIB), (0.92, 30 * GIB)])
def test_plan_of_another_budget_is_not_used(plans: Any, changed: tuple[float, int]) -> None:
    ours.note(0.92, 15 * GIB, ["zero_copy"])
    plans.maybe_save_startup_plan(worker(), 110 * GIB)
    ours.note(*changed, ["zero_copy"])
    assert applied(plans) is None


def test_engines_of_other_load_formats_keep_their_plans_to_themselves(plans: Any) -> None:
    plans.maybe_save_startup_plan(worker("auto"), 95 * GIB)
    ours.note(0.92, 15 * GIB, ["zero_copy"])
    assert applied(plans) is None
    plans.maybe_save_startup_plan(worker(), 110 * GIB)
    # In the process of the one that mapped.
    assert applied(plans, "auto") == 95 * GIB
