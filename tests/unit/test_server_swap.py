"""A service's engine swaps between pause and resume, and resumes whatever happens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.daemon import BOUND_S
from weightcached.errors import EngineError
from weightcached.vllm_compat import live
from weightcached.vllm_compat.server import VllmEngine
from weightcached.wire.engine_job import Activity

DONE = {
    "changed": True,
    "generations": {"m/target": 7},
    "labels": {},
    "seconds": 0.01,
    "ended_s": 5e9,
}
READY = {"newer": True, "reason": "", "code": ""}


class Client:
    """vLLM's client: what it was asked, and its workers' answers."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.prepared: list[dict[str, Any]] = [READY, READY]
        self.reasons = ["", ""]
        self.error: Exception | None = None
        self.drains = True
        self.sleeping = False
        # The core answers a swap once it has also resumed, as it does if this loop is busy.
        self.resumed = asyncio.Event()
        model = SimpleNamespace(enable_sleep_mode=True)
        self.vllm_config = SimpleNamespace(model_config=model)
        self.engine_core = self

    async def collective_rpc(self, method: str, *, args: Any = (), kwargs: Any = None) -> Any:
        self.asked.append(
            (method, *args, kwargs) if kwargs else (method, *args) if args else method
        )
        if method in (live.EXPECT, live.LEND, live.FORGET):
            return self.reasons
        if method == live.PREPARE:
            return self.prepared
        if self.error:
            raise self.error
        if ("pause", "wait", False) in self.asked:
            async with asyncio.timeout(BOUND_S):
                await self.resumed.wait()
        return [DONE, DONE]

    async def is_sleeping(self) -> bool:
        """Also of one that is only paused."""
        return self.sleeping

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        self.asked.append(("pause", mode, clear_cache))
        if not self.drains:
            await asyncio.sleep(60)

    async def resume_scheduler_async(self) -> None:
        self.asked.append("resume")
        self.resumed.set()


@pytest.fixture
def client() -> Client:
    return Client()


def swap(
    client: Client, *, asleep: bool = False, on_swap: str = "drain", drain_s: float = 30
) -> Any:
    nothing: Any = None
    engine = VllmEngine(nothing, client, nothing, nothing, asleep=asleep)
    return asyncio.run(engine.swap(on_swap=on_swap, drain_s=drain_s))


@pytest.mark.parametrize(("on_swap", "mode"), [("drain", "wait"), ("abort", "abort")])
def test_attaches_before_the_pause_and_swaps_in_it(client: Client, on_swap: str, mode: str) -> None:
    said = swap(client, on_swap=on_swap)
    # Caches are reset after the swap, by the core.
    assert client.asked == [live.PREPARE, ("pause", mode, False), live.SWAP, "resume"]
    assert said["pause_s"] >= 0
    assert said["drain_s"] >= 0
    assert (said["outcome"], said["generation"]) == ("swapped", 7)


def test_engine_that_has_the_newest_is_not_paused(client: Client) -> None:
    client.prepared = [{**READY, "newer": False}] * 2
    assert swap(client) == {"outcome": "unchanged"}
    assert client.asked == [live.PREPARE]


def test_reason_of_the_rank_that_has_one_is_told_without_a_pause(client: Client) -> None:
    other = {"newer": False, "reason": "another rank", "code": "another-rank"}
    own = {"newer": False, "reason": "its layers differ", "code": "not-live"}
    client.prepared = [other, own]
    assert swap(client) == {"outcome": "left", "reason": "its layers differ", "code": "not-live"}
    assert client.asked == [live.PREPARE]


def test_requests_that_do_not_end_keep_the_engine_on_its_weights(client: Client) -> None:
    client.drains = False
    said = swap(client, drain_s=0.01)
    assert said == {
        "outcome": "left", "reason": "its requests did not end within 0.01 s (drain_s)", "code": "timeout",
    }  # fmt: skip
    assert client.asked[-2:] == [(live.PREPARE, {"cancel": True}), "resume"]


def test_swap_that_fails_is_told_and_the_engine_serves_on(client: Client) -> None:
    client.error = RuntimeError("cuMemMap failed")
    said = swap(client)
    assert (said["outcome"], said["reason"]) == ("left", "cuMemMap failed")
    assert client.asked[-1] == "resume"


@pytest.mark.parametrize(
    ("backend", "unmaps"), [("weightcached", True), ("cumem", False), (None, False)]
)
def test_engine_says_whether_it_gives_its_weights_up_in_its_sleep(
    client: Client, tmp_path: Path, backend: str | None, unmaps: bool
) -> None:
    client.vllm_config.model_config.sleep_mode_backend = backend
    client.vllm_config.cache_config = SimpleNamespace(num_gpu_blocks=1)
    job: Any = SimpleNamespace(error_file=tmp_path / "error")
    nothing: Any = None
    engine = VllmEngine(job, client, nothing, nothing, asleep=False)
    assert engine.facts["unmaps"] is unmaps
    assert engine.facts["lends"] is unmaps, "vLLM's own back end has the KV cache then"


@pytest.mark.parametrize("by_us", [True, False])
def test_sleeping_engine_swaps_and_sleeps_on(client: Client, by_us: bool) -> None:
    """Resumed, it would compute over no memory."""
    client.sleeping = True
    assert swap(client, asleep=by_us) == {"outcome": "swapped", "generation": 7}
    assert client.asked == [live.PREPARE, live.SWAP]


def test_memory_that_one_rank_could_not_lend_is_told_with_its_reason(client: Client) -> None:
    nothing: Any = None

    async def lend() -> None:
        engine = VllmEngine(nothing, client, nothing, nothing, asleep=False)
        await engine.expect_memory("/run/chat/2")
        await engine.lend_memory("/run/chat/2")
        await engine.forget_memory()
        client.reasons = ["", "FileNotFoundError: nobody listens"]
        await engine.lend_memory("/run/chat/3")

    with pytest.raises(EngineError, match="nobody listens"):
        asyncio.run(lend())
    assert client.asked == [
        (live.EXPECT, "/run/chat/2"), (live.LEND, "/run/chat/2"), live.FORGET, (live.LEND, "/run/chat/3"),
    ]  # fmt: skip


def test_ping_says_stopped_only_of_an_engine_that_others_have_stopped(client: Client) -> None:
    nothing: Any = None
    server: Any = SimpleNamespace(server_state=SimpleNamespace(total_requests=3, tasks=["one"]))

    async def ask() -> None:
        engine = VllmEngine(nothing, client, server, nothing, asleep=False)
        serving = Activity(requests=3, active=1)
        assert await engine.ping() == serving
        pause, said = client.pause_scheduler_async, []

        async def pause_and_ask(mode: str, clear_cache: bool) -> None:
            await pause(mode, clear_cache)
            client.sleeping = True
            said.append(await engine.ping())
            client.sleeping = False

        client.pause_scheduler_async = pause_and_ask  # type: ignore[method-assign]
        await engine.swap(on_swap="drain", drain_s=30)
        assert said == [serving], "a swap is ours"
        client.sleeping = True
        assert (await engine.ping()).stopped
        parked = VllmEngine(nothing, client, server, nothing, asleep=True)
        assert await parked.ping() == serving

    asyncio.run(ask())
