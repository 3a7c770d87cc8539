"""New weights under a running engine: real vLLM on the CPU, host segments mapped at the same addresses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import Engines, Service
from tests.engine.test_end_to_end import UNIT, entry
from tests.fakes.daemon import until

BF16: dict[str, Any] = {"dtype": "bfloat16"}
SWAPS = 20


@pytest.fixture(scope="module")
def answers(engines: Engines, models: dict[str, Path]) -> dict[str, Any]:
    """The tokens of both fine-tunes, from disk."""
    found = {name: engines.tokens(models[name], **BF16) for name in ("untied", "tuned")}
    assert found["untied"] != found["tuned"]
    return found


def write(service: Service, model: Path) -> None:
    snapshots = {"dir": str(service.manager.runtime_dir / "snapshots"), "keep": 2}
    service.manifest(entry("m", model, "cpu0", **BF16), snapshots=snapshots)


@pytest.fixture
def mapped(
    service: Service, engines: Engines, models: dict[str, Path], answers: Any
) -> Iterator[Engines]:
    """An engine that maps the first of the two."""
    write(service, models["untied"])
    service.ctl("start", "cpu0")
    try:
        tokens = engines.tokens(models["untied"], "ipc_cache", loader={"fallback": False}, **BF16)
        assert tokens == answers["untied"]
        yield engines
        engines.ask(close=True)
    finally:
        service.ctl("stop", "cpu0", check=False)
        service.manager.systemctl("reset-failed", UNIT.format("cpu0"), check=False)


def test_each_swap_brings_the_tokens_of_its_generation(
    service: Service, mapped: Engines, models: dict[str, Path], answers: dict[str, Any]
) -> None:
    nbytes = mapped.ask(call="mapped_bytes")["result"]
    for number in range(2, SWAPS + 2):
        name = ("untied", "tuned")[number % 2 == 0]
        if number <= 3:
            # From here on each is restored, which takes a tenth of the time of a load.
            until(lambda: service.caches("cpu0")[0]["snapshot"] == "written", "a snapshot")
        write(service, models[name])
        service.ctl("reload")
        said = mapped.ask(call="swap")["result"]
        assert said["generations"] == {"m/target": number}
        assert mapped.ask(again=True)["tokens"] == answers[name], f"generation {number}"
    assert mapped.ask(call="mapped_bytes")["result"] == nbytes
    # Nothing is left of the generations before.
    (device,) = json.loads(service.ctl("status", "--json").stdout)["devices"]
    assert device["old_generations"] == []
    assert [e["generation"] for e in device["caches"][0]["engines"]] == [SWAPS + 1]
    assert service.ctl("verify").returncode == 0
