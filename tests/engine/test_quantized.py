"""Quantizations and architectures of the CPU engine: attached ones decode as those from disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.checkpoint_models import CONFIGS
from bench.checkpoints import llama_config, write_checkpoint
from tests.engine.conftest import Engines, Service

# int8: one scale per channel, activations quantized on the way; the others: 4-bit weights in
# groups.
METHODS = ("int8", "awq", "gptq", "w4a16")
# vLLM's operator for 4-bit weights. Its library for processors without AVX-512 lacks it, so engines
# end at their first forward pass, from disk too.
OPERATOR = dict.fromkeys(("awq", "gptq", "w4a16"), "cpu_gemm_wna16")
# Experts, and multi-head latent attention with experts beside dense layers.
ARCHITECTURES = ("qwen3-moe", "deepseek")
# The models of one start of the unit.
GROUPS = {"first": METHODS[:3], "second": (*METHODS[3:], *ARCHITECTURES)}
DEVICE = "cpu0"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("quantized")
    config = llama_config(
        hidden=256,
        intermediate=512,
        layers=4,
        heads=8,
        kv_heads=4,
        vocab=1024,
        dtype="bfloat16",
        tied=False,
    )
    for method in METHODS:
        write_checkpoint(base / method, config, shards=2, seed=3, quantization=method)
    for architecture in ARCHITECTURES:
        write_checkpoint(base / architecture, CONFIGS[architecture](), shards=2, seed=3)
    return {name: base / name for names in GROUPS.values() for name in names}


@pytest.fixture(scope="module")
def serve(service: Service, checkpoints: dict[str, Path]) -> Iterator[Callable[[str], None]]:
    """Serve a group's models beside the others, all on one device: the key picks the cache."""
    served: list[str] = []

    def serve(group: str) -> None:
        if group in served:
            return
        served.append(group)
        names = [name for group in served for name in GROUPS[group]]
        service.manifest(
            *(
                {"name": name, "devices": [DEVICE], "engine": {"model": str(checkpoints[name])}}
                for name in names
            )
        )
        service.ctl("start" if len(served) == 1 else "reload", DEVICE)

    yield serve
    service.ctl("stop", DEVICE)


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group, names in GROUPS.items() for name in names]
)
def test_attached_model_decodes_as_from_disk(
    serve: Callable[[str], None], service: Service, engines: Engines, checkpoints: dict[str, Path], group: str,
    name: str,
) -> None:  # fmt: skip
    if name in OPERATOR:
        engines.need_operator(OPERATOR[name])
    serve(group)
    disk = engines.tokens(checkpoints[name])
    assert len({tuple(tokens) for tokens in disk}) == len(disk), (
        "prompts that decode alike would hide wrong weights"
    )
    engines.log()
    assert engines.tokens(checkpoints[name], "ipc_cache", loader={"fallback": False}) == disk
    assert any(f"attached {name}/target generation 1" in line for line in engines.plugin_log())
    engines.ask(close=True)
    assert "all digests equal" in service.ctl("verify", f"{name}/target").stdout
