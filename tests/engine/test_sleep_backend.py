"""The sleep back end over vLLM's own: the order of steps, and the state after a failed wake. No
engine: vLLM's part, the mapped models and the KV cache only take notes.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from weightcached.errors import OutOfDeviceMemoryError, WeightCacheUnavailableError

pytestmark = pytest.mark.filterwarnings("ignore")


class World:
    """Notes of all, in order. `failing` has the error of each step that shall fail."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.failing: dict[str, Exception] = {}
        self.others_agree = True
        self.one_checkpoint = True

    def step(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> None:
            self.notes.append(name)
            if name in self.failing:
                raise self.failing[name]

        return call

    def model(self) -> Any:
        names = ("park", "prepare_wake", "give_up_wake", "wake")
        steps = {name: self.step(f"model {name}") for name in names}
        return SimpleNamespace(index="its index", **steps)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend

    from weightcache_loader import sleep
    from weightcached.model import mapped
    from weightcached.vllm_compat import worker as vllm_worker

    world = World()
    # vLLM 0.30 has no discard.
    for name in [n for n in ("suspend", "resume", "discard") if hasattr(CuMemBackend, n)]:
        monkeypatch.setattr(CuMemBackend, name, world.step(f"vLLM {name}"))
    model = world.model()
    monkeypatch.setattr(mapped, "of_process", lambda: iter([model]))
    scratch = SimpleNamespace(park=world.step("KV park"), wake=world.step("KV wake"))
    monkeypatch.setattr(vllm_worker, "kv_pool", lambda: SimpleNamespace(scratch=scratch))
    monkeypatch.setattr(sleep, "all_ranks", lambda ok, role: ok and world.others_agree)

    def ranks_agree(indexes: Iterable[Any]) -> bool:
        assert list(indexes) == ["its index"]
        return world.one_checkpoint

    monkeypatch.setattr(sleep, "ranks_agree", ranks_agree)
    return world


@pytest.fixture
def backend(world: World) -> Any:
    from weightcache_loader.sleep import WeightcachedBackend

    return WeightcachedBackend()


def test_weights_are_parked_last_and_awake_last(world: World, backend: Any) -> None:
    backend.suspend(1)
    assert world.notes == ["KV park", "vLLM suspend", "model park"]
    world.notes.clear()
    backend.resume()
    assert world.notes == ["model prepare_wake", "KV wake", "vLLM resume", "model wake"]


@pytest.mark.parametrize(
    ("tags", "notes"),
    [
        (["weights"], ["model prepare_wake", "vLLM resume", "model wake"]),
        (["kv_cache"], ["KV wake", "vLLM resume"]),
        ([], ["vLLM resume"]),
    ],
)
def test_tags_wake_what_they_name(
    world: World, backend: Any, tags: list[str], notes: list[str]
) -> None:
    backend.resume(tags)
    assert world.notes == notes


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("model prepare_wake", WeightCacheUnavailableError("no daemon")),
        ("KV wake", OutOfDeviceMemoryError("no room")),
        ("vLLM resume", RuntimeError("CUDA error: out of memory")),
    ],
)
def test_failed_wake_raises_its_reason_and_leaves_all_asleep(
    world: World, backend: Any, step: str, error: Exception
) -> None:
    world.failing[step] = error
    with pytest.raises(type(error), match=str(error)):
        backend.resume()
    assert world.notes[-2:] == ["KV park", "model give_up_wake"]
    assert backend.state() == "SUSPENDED"
    world.failing.clear()
    world.notes.clear()
    backend.resume()
    assert world.notes == ["model prepare_wake", "KV wake", "vLLM resume", "model wake"]


def test_no_rank_wakes_alone(world: World, backend: Any) -> None:
    world.others_agree = False
    with pytest.raises(
        WeightCacheUnavailableError, match="another rank of this engine cannot wake"
    ):
        backend.resume()
    assert world.notes == ["model prepare_wake", "KV wake", "KV park", "model give_up_wake"]


def test_ranks_with_weights_of_different_checkpoints_do_not_wake(
    world: World, backend: Any
) -> None:
    world.one_checkpoint = False
    with pytest.raises(WeightCacheUnavailableError, match="weights of different checkpoints"):
        backend.resume()
    assert world.notes == ["model prepare_wake", "KV wake", "KV park", "model give_up_wake"]


def test_discard_gives_the_kv_cache_back_and_refuses_mapped_weights(
    world: World, backend: Any
) -> None:
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend

    if not hasattr(CuMemBackend, "discard"):
        pytest.skip("this vLLM's sleep back ends discard nothing")
    backend.discard(("kv_cache",))
    assert world.notes == ["KV park", "vLLM discard"]
    with pytest.raises(RuntimeError, match="mapped weights cannot be discarded"):
        backend.discard(("weights",))
