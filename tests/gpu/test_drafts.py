"""MTP and EAGLE3 drafts on a GPU: cached beside their target, mapped by a real engine, right as
often as from disk.

PYTHONPATH=. python3 -m pytest tests/gpu/test_drafts.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.attach import Memory
from tests.engine.conftest import ENVIRONMENT, Engines, Service
from tests.fakes.drafts import Maker, Shape, write_eagle3, write_llama, write_mtp
from tests.gpu.conftest import settled
from tests.systemd.manager import PrivateManager

MIB = 1 << 20
DRAFTS = ("eagle3", "mtp")
# Drafts large enough that one counted twice, or not at all, shows in the number of KV blocks.
SHAPE = Shape(
    hidden=2048,
    intermediate=8192,
    layers=4,
    heads=16,
    kv_heads=8,
    vocab=64_000,
    draft_vocab=48_000,
    dtype="bfloat16",
)
ENGINE = {
    "gpu_memory_utilization": 0.2,
    "max_model_len": 1024,
    "enforce_eager": True,
    "disable_log_stats": False,
}
EMBEDDING_BYTES = SHAPE.vocab * SHAPE.hidden * 2


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Engine arguments by draft."""
    base, maker = tmp_path_factory.mktemp("drafts"), Maker(SHAPE, device="cuda")
    eagle3 = {
        "method": "eagle3",
        "model": str(write_eagle3(base / "eagle3", maker)),
        "num_speculative_tokens": 3,
    }
    return {
        "eagle3": {"model": str(write_llama(base / "target", maker)), "speculative_config": eagle3},
        "mtp": {
            "model": str(write_mtp(base / "mtp", maker)),
            "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
        },
    }


class Started(Service):
    """extra_bytes: memory that the device lost at the start beyond that in the status."""

    extra_bytes = 0


@pytest.fixture(scope="module")
def service(arguments: dict[str, dict[str, Any]], device: str, memory: Memory) -> Iterator[Started]:
    """Both models with their drafts."""
    with PrivateManager(ENVIRONMENT | {"VLLM_USE_FLASHINFER_SAMPLER": "0"}) as manager:
        service = Started(manager)
        service.manifest(
            *(
                {"name": name, "devices": [device], "engine": engine | {"max_model_len": 1024}}
                for name, engine in arguments.items()
            )
        )
        before = settled(memory)
        started = service.ctl("start", device, check=False)
        assert started.returncode == 0, started.stdout + started.stderr
        service.extra_bytes = (
            settled(memory) - before - sum(cache["bytes"] for cache in service.caches(device))
        )
        yield service
        service.ctl("stop", device, check=False)


def seen(engines: Engines, engine: dict[str, Any], load_format: str) -> tuple[dict[str, Any], int]:
    """Tokens, how often the draft was right, its own weights, and the KV blocks."""
    loader = None if load_format == "auto" else {"fallback": False}
    options = ENGINE | {"speculative_config": engine["speculative_config"]}
    tokens = engines.tokens(Path(engine["model"]), load_format, loader=loader, **options)
    asked = {call: engines.ask(call=call)["result"] for call in ("speculation", "draft")}
    return asked | {"tokens": tokens}, engines.ask(call="kv_blocks")["result"]


@pytest.mark.parametrize("name", DRAFTS)
def test_tokens_acceptance_and_kv_blocks_are_those_of_a_load_from_disk(
    service: Service, engines: Engines, arguments: dict[str, dict[str, Any]], device: str, name: str
) -> None:
    caches = {cache["name"]: cache for cache in service.caches(device)}
    for role in ("target", "draft"):
        cache = caches[f"{name}/{role}"]
        assert (cache["role"], cache["state"]) == (role, "ready"), cache["error"]
    disk, disk_blocks = seen(engines, arguments[name], "auto")
    rate = disk["speculation"]["num_accepted_tokens"] / disk["speculation"]["num_draft_tokens"]
    assert 0.02 < rate < 0.98, "a draft that is never right would hide a broken one"
    engines.log()
    attached, blocks = seen(engines, arguments[name], "ipc_cache")
    lines = [line for line in engines.plugin_log() if line.startswith("attached")]
    assert [line.split()[1] for line in lines] == [f"{name}/target", f"{name}/draft"]
    assert attached == disk
    assert abs(blocks - disk_blocks) <= 0.005 * disk_blocks, "the draft's memory counts once"
    engines.ask(close=True)
    assert "all digests equal" in service.ctl("verify", f"{name}/draft").stdout


def test_status_shows_what_the_device_holds_for_target_and_draft(
    service: Started, device: str
) -> None:
    assert abs(service.extra_bytes) <= 64 * MIB
    bytes_of = {cache["name"]: cache["bytes"] for cache in service.caches(device)}
    assert sorted(bytes_of) == [f"{name}/{role}" for name in DRAFTS for role in ("draft", "target")]
    # The MTP layer takes embeddings and head from its target, so its cache has neither.
    assert bytes_of["mtp/draft"] < EMBEDDING_BYTES
