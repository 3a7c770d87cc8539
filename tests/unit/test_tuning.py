"""When the loader tunes, with stand-ins for vLLM; tests/engine/test_tuning.py tunes."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from weightcached.vllm_compat.tuning import is_wanted


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU with FlashInfer."""
    machine = SimpleNamespace(capability=90, flashinfer=True)
    platforms, flashinfer = ModuleType("vllm.platforms"), ModuleType("vllm.utils.flashinfer")
    platforms.current_platform = SimpleNamespace(  # type: ignore[attr-defined]
        has_device_capability=lambda needed: machine.capability >= needed
    )
    flashinfer.has_flashinfer = lambda: machine.flashinfer  # type: ignore[attr-defined]
    for name, module in {
        "vllm": ModuleType("vllm"),
        "vllm.utils": ModuleType("vllm.utils"),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setitem(sys.modules, "vllm.utils.flashinfer", flashinfer)
    return machine


def config(*, autotune: Any = True, ranks: int = 1, speculative: Any = None) -> Any:
    return SimpleNamespace(
        kernel_config=SimpleNamespace(enable_flashinfer_autotune=autotune),
        speculative_config=speculative,
        parallel_config=SimpleNamespace(world_size_across_dp=ranks),
    )


@pytest.mark.parametrize("autotune", [True, None])
def test_rank_alone_tunes_unless_told_otherwise(machine: SimpleNamespace, autotune: Any) -> None:
    assert is_wanted(config(autotune=autotune), "target")
    assert not is_wanted(config(autotune=False), "target")


def test_of_several_ranks_none_tunes_for_itself(machine: SimpleNamespace) -> None:
    assert not is_wanted(config(ranks=2), "target")


def test_nothing_is_tuned_with_a_draft_nor_for_it(machine: SimpleNamespace) -> None:
    assert not is_wanted(config(speculative=object()), "target")
    assert not is_wanted(config(), "draft")


def test_nothing_is_tuned_where_the_engine_would_not(machine: SimpleNamespace) -> None:
    machine.capability = 80
    assert not is_wanted(config(), "target")
    machine.capability, machine.flashinfer = 100, False
    assert not is_wanted(config(), "target")


def test_older_vllm_without_the_option_tunes_nothing(machine: SimpleNamespace) -> None:
    older = config()
    del older.kernel_config.enable_flashinfer_autotune
    assert not is_wanted(older, "target")
