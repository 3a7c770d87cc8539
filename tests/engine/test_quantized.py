"""Quantized checkpoints that the CPU engine runs: what is attached decodes as what is loaded from disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.checkpoints import llama_config, write_checkpoint
from tests.engine.conftest import Engines, Service

# Per-channel int8 weights with dynamic int8 activations (compressed-tensors), and 4-bit weights in groups.
METHODS = ("int8", "awq", "gptq")
DEVICE = "cpu0"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("quantized")
    config = llama_config(
        hidden=256, intermediate=512, layers=4, heads=8, kv_heads=4, vocab=1024, dtype="bfloat16", tied=False
    )
    for method in METHODS:
        write_checkpoint(base / method, config, shards=2, seed=3, quantization=method)
    return {method: base / method for method in METHODS}


@pytest.fixture(scope="module")
def serving(service: Service, checkpoints: dict[str, Path]) -> Iterator[Service]:
    """All of them on one device: the key picks the cache."""
    service.manifest(
        *({"name": name, "devices": [DEVICE], "engine": {"model": str(path)}} for name, path in checkpoints.items())
    )
    service.ctl("start", DEVICE)
    yield service
    service.ctl("stop", DEVICE)


@pytest.mark.parametrize("method", METHODS)
def test_quantized_model_decodes_as_from_disk(
    serving: Service, engines: Engines, checkpoints: dict[str, Path], method: str
) -> None:
    disk = engines.tokens(checkpoints[method])
    assert len({tuple(tokens) for tokens in disk}) == len(disk), "prompts that decode alike would hide wrong weights"
    engines.log()
    assert engines.tokens(checkpoints[method], "ipc_cache", loader={"fallback": False}) == disk
    assert any(f"attached {method}/target generation 1" in line for line in engines.plugin_log())
    engines.ask(close=True)
    assert "all digests equal" in serving.ctl("verify", f"{method}/target").stdout
