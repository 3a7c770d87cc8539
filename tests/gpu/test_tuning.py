"""FlashInfer's real autotuner in the loader child stores results, and the first engine finds them.

    PYTHONPATH=. python3 -m pytest tests/gpu/test_tuning.py

The one operation that FlashInfer tunes on Hopper without a KV cache is CUTLASS's grouped product of
mixture-of-experts layers. Its kernels are compiled on first use, in the loader child, so nvcc and
ninja are needed; in FlashInfer's own cache they outlive these tests. `-k 'not experts'` needs
neither.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.checkpoint_models import CONFIGS
from bench.checkpoints import write_checkpoint
from tests.engine.conftest import ENVIRONMENT, Engines, Service
from tests.gpu.test_engines import make
from tests.systemd.manager import PrivateManager

if importlib.util.find_spec("flashinfer") is None:
    pytest.skip(
        "FlashInfer is not installed: pip install flashinfer-python", allow_module_level=True
    )

STORE = "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"
# As each tuned operation is called in the keys of the store.
OPERATIONS = {"trtllm::fused_moe::gemm1", "trtllm::fused_moe::gemm2"}
EXPERTS: dict[str, Any] = {"moe_backend": "flashinfer_cutlass"}
OFF = {"enable_flashinfer_autotune": False}
SIZES = {"max_model_len": 512, "max_num_batched_tokens": 512}
ENGINE: dict[str, Any] = {"gpu_memory_utilization": 0.2, "enforce_eager": True, **SIZES}
# With the compilation of the experts' kernels.
TIMEOUT_S = 900.0

pytestmark = pytest.mark.timeout(TIMEOUT_S)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which units and engines of this module keep tuning results."""
    return tmp_path_factory.mktemp("tuned")


@pytest.fixture(scope="module")
def manager(store: Path) -> Iterator[PrivateManager]:
    """Its units see FlashInfer, but do not sample with it, which would have to be compiled too."""
    with PrivateManager(
        ENVIRONMENT | {"VLLM_USE_FLASHINFER_SAMPLER": "0", STORE: str(store)}
    ) as manager:
        yield manager


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("off", "experts")):
        write_checkpoint(base / name, CONFIGS["qwen3-moe"](), shards=2, seed=seed)
    return {"dense": make(base / "dense"), "off": base / "off", "experts": base / "experts"}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of the daemon and its loaders."""
    log = tmp_path_factory.mktemp("log") / "daemon"
    log.touch()
    return log


@pytest.fixture(scope="module")
def service(
    manager: PrivateManager, checkpoints: dict[str, Path], device: str, log: Path
) -> Iterator[Service]:
    """A daemon of models without tuning: one has no such operation, in the other it is off."""
    service = Service(manager)
    (manager.unit_dir / "weightcached@.service.d").mkdir()
    # This manager has no journal.
    manager.write_unit(
        "weightcached@.service.d/log.conf", f"[Service]\nStandardError=append:{log}\n"
    )
    service.manifest(*untuned(checkpoints, device))
    started = service.ctl("start", device, check=False)
    assert started.returncode == 0, started.stdout + started.stderr + log.read_text()[-5000:]
    yield service
    service.ctl("stop", device, check=False)


def untuned(checkpoints: dict[str, Path], device: str) -> list[dict[str, Any]]:
    return [
        entry("dense", checkpoints["dense"], device),
        entry("off", checkpoints["off"], device, **EXPERTS, **OFF),
    ]


def entry(name: str, checkpoint: Path, device: str, **engine: Any) -> dict[str, Any]:
    return {
        "name": name, "devices": [device],
        "engine": {"model": str(checkpoint), "enforce_eager": True, **SIZES, **engine},
    }  # fmt: skip


@pytest.fixture(scope="module")
def steps(
    service: Service, checkpoints: dict[str, Path], device: str, store: Path
) -> list[tuple[str, str]]:
    """States and phases of the model with experts while it is loaded beside the others."""
    assert operations(store) == set(), "something was tuned before"
    service.manifest(
        *untuned(checkpoints, device), entry("experts", checkpoints["experts"], device, **EXPERTS)
    )
    seen: list[tuple[str, str]] = []

    def look() -> None:
        caches = service.caches(device)
        cache = next((c for c in caches if c["name"] == "experts/target"), None)
        if cache is not None and (step := (cache["state"], cache["phase"])) not in seen:
            seen.append(step)

    unit = f"weightcached@{device}.service"
    with ThreadPoolExecutor(1) as pool:
        reload = pool.submit(service.manager.systemctl, "reload", unit, timeout_s=TIMEOUT_S)
        while not reload.done():
            look()
        reload.result()
    look()
    return seen


def entries(store: Path) -> dict[str, str]:
    """The content of FlashInfer's managed store, with its keys, by file."""
    return {
        path.name: json.loads(path.read_text())["key"] for path in store.glob("v2/*/entries/*.json")
    }


def operations(store: Path) -> set[str]:
    """The tuned operations of which the store has an entry: the first field of their keys."""
    return {
        ast.literal_eval(key.removeprefix("(").split(",", 1)[0]) for key in entries(store).values()
    }


def test_dense_model_is_served_and_nothing_is_stored_where_nothing_can_be_tuned(
    service: Service, engines: Engines, checkpoints: dict[str, Path], device: str, store: Path
) -> None:
    assert {
        cache["name"]: (cache["state"], cache["error"]) for cache in service.caches(device)
    } == {
        "dense/target": ("ready", ""),
        "off/target": ("ready", ""),
    }
    attached = engines.tokens(
        checkpoints["dense"], "ipc_cache", loader={"fallback": False}, **ENGINE
    )
    assert engines.ask(call="tuning")["result"] == {"configurations": {}, "measured": {}}
    assert attached == engines.tokens(checkpoints["dense"], **ENGINE)
    engines.ask(close=True)
    assert operations(store) == set()


def test_cache_of_experts_is_ready_once_they_are_tuned(
    steps: list[tuple[str, str]], log: Path
) -> None:
    assert ("loading", "tuning") in steps, log.read_text()[-5000:]
    assert steps[-1] == ("ready", "")
    said = [
        line
        for line in log.read_text().splitlines()
        if "cache=experts/target" in line and "FlashInfer" in line
    ]
    assert said[-1].endswith("FlashInfer is tuned"), "\n".join(said)


def test_loader_stores_what_it_tuned_for_experts(steps: list[tuple[str, str]], store: Path) -> None:
    assert operations(store) == OPERATIONS


def test_first_engine_of_experts_finds_what_was_tuned_and_measures_nothing(
    steps: list[tuple[str, str]],
    service: Service,
    checkpoints: dict[str, Path],
    store: Path,
    tmp_path: Path,
) -> None:
    stored = entries(store)
    engines = Engines(service.env, tmp_path / "log")
    try:
        attached = engines.tokens(
            checkpoints["experts"], "ipc_cache", loader={"fallback": False}, **EXPERTS, **ENGINE
        )
        tuning = engines.ask(call="tuning")["result"]
        assert tuning["configurations"].keys() == OPERATIONS
        assert tuning["measured"] == {}
        assert len({tuple(tokens) for tokens in attached}) > 1
        assert attached == engines.tokens(checkpoints["experts"], **EXPERTS, **ENGINE)
    finally:
        engines.close()
    assert entries(store) == stored


def test_engine_of_experts_without_the_store_measures_each_configuration(
    steps: list[tuple[str, str]], service: Service, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    engines = Engines(service.env | {STORE: str(tmp_path / "another")}, tmp_path / "log")
    try:
        engines.tokens(
            checkpoints["experts"], "ipc_cache", loader={"fallback": False}, **EXPERTS, **ENGINE
        )
        tuning = engines.ask(call="tuning")["result"]
    finally:
        engines.close()
    assert tuning["configurations"].keys() == OPERATIONS
    assert tuning["measured"] == tuning["configurations"]
    assert operations(tmp_path / "another") == OPERATIONS
