"""Calls that all ranks refuse leave vLLM's executor in step with its workers."""

from __future__ import annotations

import sys
from collections import deque
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from weightcached.vllm_compat import guarded


class Worker:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def wake_up(self, tags: list[str] | None = None) -> str:
        if self.rank == 0:
            raise ValueError("another rank of this engine cannot wake")
        raise MemoryError(f"no room for {tags}")

    def sleep(self, level: int = 1) -> str:
        return f"rank {self.rank} sleeps at {level}"

    def ping(self) -> str:
        return f"rank {self.rank}"

    def fail(self) -> None:
        raise RuntimeError("refused")


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's executor as far as its answers go: each worker's in a queue of its own."""

    class MultiprocExecutor:
        def __init__(self, load_format: str) -> None:
            self.vllm_config = SimpleNamespace(load_config=SimpleNamespace(load_format=load_format))
            self.workers = [Worker(0), Worker(1)]
            self.queues: list[deque[Any]] = [deque(), deque()]

        def collective_rpc(
            self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None
        ) -> list[Any]:
            for worker, queue in zip(self.workers, self.queues, strict=True):
                try:
                    queue.append((True, getattr(worker, method)(*args, **(kwargs or {}))))
                except Exception as e:
                    queue.append((False, str(e)))
            found = []
            for queue in self.queues:
                ok, answer = queue.popleft()
                if not ok:
                    raise RuntimeError(f"Worker failed with error '{answer}'")
                found.append(answer)
            return found

    module: Any = ModuleType("vllm.v1.executor.multiproc_executor")
    module.MultiprocExecutor = MultiprocExecutor
    monkeypatch.setitem(sys.modules, "vllm.v1.executor.multiproc_executor", module)
    monkeypatch.setattr(Worker, guarded.CALL, guarded.call, raising=False)
    guarded.install()
    guarded.install()
    return MultiprocExecutor


def test_refusal_of_all_ranks_leaves_the_executor_in_step(executor: Any) -> None:
    made = executor("ipc_cache")
    with pytest.raises(RuntimeError, match=r"'MemoryError: no room for \['kv_cache'\]'"):
        made.collective_rpc("wake_up", None, (), {"tags": ["kv_cache"]})
    assert made.collective_rpc("ping") == ["rank 0", "rank 1"]
    assert made.collective_rpc("sleep", args=(2,)) == ["rank 0 sleeps at 2", "rank 1 sleeps at 2"]


@pytest.mark.parametrize("method", ["wake_up", "fail"])
def test_other_calls_and_other_engines_are_vllms_own(executor: Any, method: str) -> None:
    """The reason for all this: the next call gets the answer that was left behind."""
    made = executor("auto" if method == "wake_up" else "ipc_cache")
    with pytest.raises(RuntimeError):
        made.collective_rpc(method)
    with pytest.raises(RuntimeError):
        made.collective_rpc("ping")
