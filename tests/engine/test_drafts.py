"""Draft models on the CPU: cached beside their target, mapped, and accepted as often as from disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Engines, Service
from tests.engine.test_end_to_end import entry, generate
from tests.fakes.drafts import Maker, Shape, write_eagle, write_eagle3, write_llama, write_mtp

DEVICE = "cpu0"
# Rotary tables, and what alignment costs.
SLACK_BYTES = 384 << 10
DRAFTS = ("eagle3", "mtp")
# Tensors that a draft takes from its target: by its flags, or always for MTP, which has none.
OWNERSHIP: dict[str, dict[str, bool | None]] = {
    "eagle3": {"has_own_embed_tokens": False, "has_own_lm_head": True},
    "mtp": {"has_own_embed_tokens": None, "has_own_lm_head": None},
}


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Engine arguments by draft."""
    base, maker = tmp_path_factory.mktemp("drafts"), Maker(Shape())
    target = str(write_llama(base / "target", maker))
    heads = {
        "eagle": write_eagle(base / "eagle", maker),
        "eagle3": write_eagle3(base / "eagle3", maker),
    }
    made: dict[str, dict[str, Any]] = {
        name: {
            "model": target,
            "speculative_config": {"method": name, "model": str(path), "num_speculative_tokens": 3},
        }
        for name, path in heads.items()
    }
    mtp = write_mtp(base / "mtp", maker)
    return made | {
        "mtp": {
            "model": str(mtp),
            "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
        }
    }


@pytest.fixture(scope="module", autouse=True)
def _drafting(engines: Engines, arguments: dict[str, dict[str, Any]]) -> None:
    """Skip all if this vLLM's CPU build cannot draft: that of 0.30 cannot beside a triton without a
    back end.
    """
    # Of one token alone, nothing is drafted.
    said = engines.ask(engine=arguments["mtp"], prompts=1, tokens=8).get("error", "")
    if "Cannot inspect kernel parameters" in said:
        pytest.skip(f"this vLLM cannot draft on the CPU, from disk either: {said}")


@pytest.fixture(scope="module")
def serving(service: Service, arguments: dict[str, dict[str, Any]]) -> Iterator[Service]:
    service.manifest(
        *(
            entry(name, Path(arguments[name]["model"]), DEVICE, **without(arguments[name], "model"))
            for name in DRAFTS
        )
    )
    service.ctl("start", DEVICE)
    yield service
    service.ctl("stop", DEVICE)


def without(engine: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in engine.items() if key not in names}


def seen(
    engines: Engines, engine: dict[str, Any], load_format: str = "auto", **loader: Any
) -> tuple[Any, Any, Any]:
    """Tokens, how often the draft was right, and its own weights."""
    options = without(engine, "model") | {"disable_log_stats": False}
    if load_format != "auto":
        options["loader"] = {"fallback": False} | loader
    tokens = engines.tokens(Path(engine["model"]), load_format, **options)
    return tokens, engines.ask(call="speculation")["result"], engines.ask(call="draft")["result"]


@pytest.mark.parametrize("name", DRAFTS)
def test_tokens_and_acceptance_are_those_of_a_load_from_disk(
    serving: Service, engines: Engines, arguments: dict[str, dict[str, Any]], name: str
) -> None:
    caches = {cache["name"]: cache for cache in serving.caches(DEVICE)}
    for role in ("target", "draft"):
        cache = caches[f"{name}/{role}"]
        assert (cache["role"], cache["state"]) == (role, "ready"), cache["error"]
    disk = seen(engines, arguments[name])
    assert 0.05 < disk[1]["num_accepted_tokens"] / disk[1]["num_draft_tokens"] < 0.95, (
        "would hide a broken draft"
    )
    engines.log()
    assert seen(engines, arguments[name], "ipc_cache") == disk
    lines = engines.plugin_log()
    # The first of equal targets is anybody's.
    assert [line.split()[1].partition("/")[2] for line in lines if line.startswith("attached")] == [
        "target",
        "draft",
    ]
    assert any(f"attached {name}/draft generation 1" in line for line in lines), lines
    assert {flag: disk[2][flag] for flag in OWNERSHIP[name]} == OWNERSHIP[name]
    (leases,) = [
        cache["engines"] for cache in serving.caches(DEVICE) if cache["name"] == f"{name}/draft"
    ]
    assert [engine["pid"] for engine in leases] == [engines.process.pid]
    engines.ask(close=True)
    assert "all digests equal" in serving.ctl("verify", f"{name}/draft").stdout


def test_what_the_engine_takes_from_the_target_is_not_held_twice(
    serving: Service, arguments: dict[str, dict[str, Any]]
) -> None:
    bytes_of = {cache["name"]: cache["bytes"] for cache in serving.caches(DEVICE)}
    head = Path(arguments["eagle3"]["speculative_config"]["model"], "model.safetensors")
    assert bytes_of["eagle3/draft"] < head.stat().st_size + SLACK_BYTES, (
        "the head has no embeddings"
    )
    with_both = 2 * Shape().vocab * Shape().hidden * 2
    assert bytes_of["mtp/draft"] + with_both < bytes_of["mtp/target"]


def test_status_and_plan_show_both_roles(serving: Service) -> None:
    table = serving.ctl("status").stdout
    assert all(f"{name}/{role}" in table for name in DRAFTS for role in ("target", "draft"))
    planned = json.loads(serving.ctl("plan", "--json").stdout)["ranks"]
    assert [row["role"] for row in planned] == ["target", "draft"] * len(DRAFTS)


@pytest.mark.parametrize("load_format", ["ipc_cache", "weightcached"])
def test_draft_of_another_kind_loads_from_disk_and_one_line_says_so(
    serving: Service, engines: Engines, arguments: dict[str, dict[str, Any]], load_format: str
) -> None:
    engine = {
        "model": arguments["eagle"]["model"],
        "speculative_config": {
            "method": "draft_model", "model": arguments["eagle"]["model"], "num_speculative_tokens": 2,
        },
    }  # fmt: skip
    disk = engines.tokens(Path(engine["model"]), **without(engine, "model"))
    engines.log()
    assert (
        engines.tokens(
            Path(engine["model"]),
            load_format,
            loader={"fallback": False},
            **without(engine, "model"),
        )
        == disk
    )
    lines = engines.plugin_log()
    told = "the draft of method draft_model loads from disk: those of mtp, eagle, eagle3 are cached"
    assert [line for line in lines if line.startswith(("the draft", "loading"))] == [told]
    assert len([line for line in lines if line.startswith("attached")]) == 1


def test_draft_of_another_checkpoint_loads_from_disk_and_the_target_is_mapped(
    serving: Service, engines: Engines, arguments: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    other = write_eagle3(tmp_path / "eagle3", Maker(Shape(), seed=1))
    speculative = arguments["eagle3"]["speculative_config"] | {"model": str(other)}
    engine = arguments["eagle3"] | {"speculative_config": speculative}
    disk = seen(engines, engine)
    engines.log()
    assert seen(engines, engine, "ipc_cache", fallback=True) == disk
    lines = engines.plugin_log()
    assert any("/target generation 1" in line for line in lines)
    (reason,) = [line for line in lines if line.startswith("loading from disk")]
    assert "is cached with another key: checkpoint is " in reason
    engines.ask(close=True)


def test_two_tensor_parallel_ranks_map_target_and_draft(
    service: Service, arguments: dict[str, dict[str, Any]]
) -> None:
    layout = {"tensor_parallel_size": 2, "enforce_eager": True, "max_model_len": 256}
    engine = arguments["eagle"]
    model, options = Path(engine["model"]), layout | without(engine, "model")
    disk, _ = generate(service, model, "auto", options)
    service.ctl("stop", DEVICE, check=False)
    service.manifest(
        entry("two", model, "cpu0", "cpu1", **without(options, "enforce_eager", "max_model_len"))
    )
    try:
        service.ctl("start", "cpu0", "cpu1")
        attached, log = generate(
            service,
            model,
            "ipc_cache",
            options | {"model_loader_extra_config": {"fallback": False}},
        )
    finally:
        service.ctl("stop", "cpu0", "cpu1", check=False)
    assert attached == disk
    assert [log.count(f"attached two/{role} generation 1") for role in ("target", "draft")] == [
        2,
        2,
    ]
