"""Where the memory of an engine service is: after vLLM's own sleep, after an engine that dies on its
way to sleep, after `live` was taken out of the manifest.

PYTHONPATH=. python3 -m pytest tests/gpu/test_engine_service.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from bench.attach import Memory
from tests.engine.conftest import ANSWER_TIMEOUT_S, BIN, Service
from tests.engine.test_engine_service import Chat, completion
from tests.fakes.daemon import until
from tests.gpu.test_engines import make
from tests.systemd.manager import PrivateManager

# Nothing tells when a standby holds the memory that it is lent; on an H200 it takes 0.1 s.
LENT_S = 2.0


@pytest.fixture(scope="module")
def chat(
    manager: PrivateManager, device: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Chat]:
    """A service of a model that is not live."""
    service = Service(manager)
    # 2.5 GB.
    model = make(
        tmp_path_factory.mktemp("model") / "bf16",
        hidden=4096,
        intermediate=8192,
        layers=8,
        heads=32,
    )
    chat = Chat(service, model, device)
    chat.write(max_model_len=4096)
    with chat.served("VLLM_SERVER_DEV_MODE=1"):
        yield chat


def until_lent(chat: Chat) -> dict[str, Any]:
    """Wait until the standby holds the memory of the engine that serves now."""
    status = chat.until_standby()
    time.sleep(LENT_S)
    return status


def kv_bytes(chat: Chat) -> int:
    serving = next(e for e in chat.status()["engines"] if e["state"] == "serving")
    return int(serving["facts"]["kv_cache_bytes"])


def test_vllms_own_sleep_frees_the_kv_cache_that_the_standby_holds(
    chat: Chat, memory: Memory
) -> None:
    until_lent(chat)
    tokens, kv = chat.tokens(), kv_bytes(chat)
    awake = memory.used()
    assert chat.request("/sleep?level=1", {})[0] == 200
    began_s = time.monotonic()
    until(lambda: memory.used() < awake - 0.95 * kv, "the KV cache is free", bound_s=60)
    print(f"free after {time.monotonic() - began_s:.2f} s")
    assert chat.request("/wake_up", {})[0] == 200
    assert chat.tokens() == tokens
    status = until_lent(chat)
    os.kill(status["pid"], signal.SIGKILL)
    assert chat.tokens() == tokens
    assert chat.status()["generation"] > status["generation"]
    assert "lent to this engine is not used" not in chat.log.read_text(errors="replace")


def test_engine_killed_on_its_way_to_sleep_leaves_its_memory_to_nobody(
    chat: Chat, memory: Memory
) -> None:
    tokens = chat.tokens()
    status, kv, awake = until_lent(chat), kv_bytes(chat), memory.used()
    command = [str(BIN / "weightcachectl"), "engine", "sleep", "chat"]
    # A request keeps the engine awake until it ends, or drain_s is over.
    with chat.response("/v1/completions", completion(4000, stream=True)) as answer:
        answer.read(1)
        sleeps = subprocess.Popen(command, env=chat.service.env)
        try:
            until(lambda: chat.status()["state"] == "draining", "it drains", bound_s=60)
            os.kill(status["pid"], signal.SIGKILL)
            assert sleeps.wait(ANSWER_TIMEOUT_S) == 0
            left = memory.used()
        finally:
            sleeps.kill()
            sleeps.wait()
    assert left < awake - 0.95 * kv
    # Wakes it.
    assert chat.tokens() == tokens


def test_model_that_is_no_longer_live_has_all_memory_for_its_kv_cache(
    chat: Chat, device: str
) -> None:
    def restarted(*, live: bool) -> int:
        chat.model["live"] = live
        chat.write()
        chat.service.ctl("engine", "stop", "chat")
        chat.service.ctl("reload", device)
        chat.service.ctl("engine", "start", "chat")
        return kv_bytes(chat)

    def takes_known() -> int:
        return chat.log.read_text(errors="replace").count("as an equal engine measured it")

    weights = sum(c["bytes"] for c in chat.service.caches(device))
    alone = restarted(live=False)
    live = restarted(live=True)
    assert alone - live > 0.9 * weights, "a second generation has room"
    known = takes_known()
    again = restarted(live=False)
    assert abs(again - alone) < 0.5 * weights
    assert restarted(live=False) == again
    assert takes_known() > known
