"""What older releases of vLLM lack: what is done instead, or which reason is named."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from weightcached.vllm_compat import drafts
from weightcached.vllm_compat import worker as vllm_worker

EXPANDABLE = "max_split_size_mb:512,expandable_segments:True"


@pytest.fixture(autouse=True)
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of vLLM 0.30, as far as names are missing there."""
    for name in ("vllm.device_allocator", "vllm.model_executor.model_loader.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


def engine(**speculative: Any) -> Any:
    return SimpleNamespace(
        load_config="the target's", speculative_config=SimpleNamespace(**speculative),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )  # fmt: skip


@pytest.mark.parametrize(("own", "expected"), [(None, "the target's"), ("its own", "its own")])
def test_draft_loads_as_its_target_or_as_it_says_itself(own: str | None, expected: str) -> None:
    assert drafts.load_config_of(engine(draft_load_config=own)) == expected


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_that_cannot_be_set_aside_are_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert vllm_worker._find_obstacle(engine()) == ""
    monkeypatch.setenv(name, EXPANDABLE)
    assert vllm_worker._find_obstacle(engine()) == (
        f"this vLLM cannot set expandable_segments aside: leave it out of {name}"
    )
    allocator = ModuleType("vllm.device_allocator")
    allocator.alloc_conf = object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.device_allocator", allocator)
    assert vllm_worker._find_obstacle(engine()) == "", "a newer vLLM can"


def test_without_such_segments_the_pool_is_used_as_it_is() -> None:
    with vllm_worker._without_expandable_segments():
        pass
