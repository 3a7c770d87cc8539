"""New weights under a running engine: real vLLM on the CPU, host segments mapped at the same addresses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import READY_TIMEOUT_S, Engines, Service
from tests.engine.test_end_to_end import UNIT, entry
from tests.fakes.daemon import loaders_of, until

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


@pytest.fixture(scope="module")
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
            until(
                lambda: service.caches("cpu0")[0]["snapshot"] == "written",
                "a snapshot",
                bound_s=READY_TIMEOUT_S,
            )
        write(service, models[name])
        service.ctl("reload")
        said = mapped.ask(call="swap")["result"]
        assert said["generations"] == {"m/target": number}
        assert mapped.ask(again=True)["tokens"] == answers[name], f"generation {number}"
        assert mapped.ask(call="mapped_generations")["result"] == said["generations"]
    assert mapped.ask(call="mapped_bytes")["result"] == nbytes
    until(lambda: held(service) == ([], [SWAPS + 1]), "nothing is left of the generations before")
    assert service.ctl("verify").returncode == 0


def held(service: Service, device: str = "cpu0") -> tuple[list[Any], list[int]]:
    """Old generations, and those of the engines on the newest."""
    document = json.loads(service.ctl("status", device, "--json").stdout)
    (found,) = document["devices"]
    return found["old_generations"], [e["generation"] for e in found["caches"][0]["engines"]]


def test_killed_daemon_and_loader_leave_the_engine_on_one_generation(
    service: Service, mapped: Engines, models: dict[str, Path], answers: dict[str, Any]
) -> None:
    before = mapped.ask(call="mapped_generations")["result"]["m/target"]
    name, other = ("untied", "tuned") if before % 2 else ("tuned", "untied")
    assert mapped.ask(again=True)["tokens"] == answers[name]

    # The loader dies, of weights that no snapshot has.
    service.manifest(entry("m", models[other], "cpu0", **BF16, seed=1))
    reload = threading.Thread(target=lambda: service.ctl("reload", check=False))
    reload.start()
    daemon = service.pid("cpu0")
    until(lambda: any(map(loads, loaders_of(daemon))), "a loader", bound_s=READY_TIMEOUT_S)
    (loader,) = filter(loads, loaders_of(daemon))
    os.kill(loader, signal.SIGKILL)
    reload.join()
    assert not mapped.ask(call="swap")["result"]["changed"]
    assert mapped.ask(again=True)["tokens"] == answers[name]

    # The daemon dies between the two steps of a swap: the engine has attached already.
    write(service, models[other])
    service.ctl("reload")
    assert mapped.ask(call="prepare_swap")["result"]["newer"]
    assert mapped.ask(call="mapped_generations")["result"] == {"m/target": before}
    service.kill("cpu0")
    newer = mapped.ask(call="swap")["result"]["generations"]["m/target"]
    assert newer > before
    assert mapped.ask(call="mapped_generations")["result"] == {"m/target": newer}
    assert mapped.ask(again=True)["tokens"] == answers[other]
    # The next daemon has the generation, and the engine's lease on it.
    until(
        lambda: [e["generation"] for e in service.caches("cpu0")[0]["engines"]] == [newer],
        "the engine has rejoined",
        bound_s=READY_TIMEOUT_S,
    )

    # No daemon at all.
    service.ctl("stop", "cpu0")
    said = mapped.ask(call="swap")["result"]
    assert said.startswith("WeightCacheUnavailableError: "), said
    assert mapped.ask(call="mapped_generations")["result"] == {"m/target": newer}
    assert mapped.ask(again=True)["tokens"] == answers[other]


def loads(pid: int) -> bool:
    """Whether it is a loader: what the daemon has just forked still has the daemon's name."""
    with contextlib.suppress(OSError):
        return b"weightcached.loader" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def test_ranks_swap_together_or_not_at_all(
    service: Service, models: dict[str, Path], tmp_path: Path
) -> None:
    """Two tensor parallel ranks with a daemon each."""
    layout: dict[str, Any] = {"tensor_parallel_size": 2, **BF16}

    def place(name: str) -> None:
        service.manifest(entry("m", models[name], "cpu0", "cpu1", **layout))

    place("untied")
    # One core for each rank: left alone, vLLM wants a NUMA node for each.
    engines = Engines(service.env | {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}, tmp_path / "log")
    try:
        service.ctl("start", "cpu0", "cpu1")
        own = {"fallback": False}
        before = engines.tokens(
            models["untied"], "ipc_cache", loader=own, distributed_executor_backend="mp", **layout
        )
        place("tuned")
        service.ctl("reload", "cpu0")
        said = engines.ask(call="swap")["result"]
        assert "of different checkpoints: wait until the newest is ready" in said, said
        assert engines.ask(call="generations_of_ranks")["result"] == [{"m/target": 1}] * 2
        assert engines.ask(again=True)["tokens"] == before

        service.ctl("reload", "cpu1")
        assert engines.ask(call="swap")["result"]["changed"]
        assert engines.ask(call="generations_of_ranks")["result"] == [{"m/target": 2}] * 2
        assert engines.ask(again=True)["tokens"] != before
        until(
            lambda: [held(service, device)[1] for device in ("cpu0", "cpu1")] == [[2], [2]],
            "both daemons have seen it",
        )
        engines.ask(close=True)
    finally:
        engines.close()
        service.ctl("stop", "cpu0", "cpu1", check=False)
