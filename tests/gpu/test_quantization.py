"""Every quantization and architecture on a GPU: attached engines decode as engines that load from
disk.

    PYTHONPATH=. python3 -m pytest tests/gpu/test_quantization.py [-k 'moe and not nvfp4']

Only the selected models are loaded. If OUT names a directory, OUT/quantization.jsonl gets a line
for each model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.conftest import visible
from tests.gpu.lanes import BURST_TOKENS, Lanes, Result
from tests.gpu.models import MODELS, make_checkpoints

# kv_cache_memory_bytes: vLLM then measures no memory, which changes all the time with so many
# processes on the device.
ENGINE = {
    "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30, "max_model_len": 512, "max_num_seqs": 256,
    "max_num_batched_tokens": 2048, "enforce_eager": True,
}  # fmt: skip
# DeepGEMM compiles its kernels with CUDA's headers, which not every machine has: set it to 1 there.
ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": os.environ.get("VLLM_USE_DEEP_GEMM", "0"),
}
# Three processes each, of which one is a loader child that is busy with vLLM's imports most of the
# time.
LANES = 6
CORES_PER_LANE = 2
TIMEOUT_S = 420.0

pytestmark = pytest.mark.timeout(TIMEOUT_S + 60)


@pytest.fixture(scope="module")
def lanes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lanes]:
    """All selected models, being loaded."""
    items = [item for item in request.session.items if item.path == request.path]
    chosen = {item.callspec.params["name"] for item in items if hasattr(item, "callspec")}
    paths = make_checkpoints(
        [name for name in MODELS if name in chosen], tmp_path_factory.mktemp("models")
    )
    report = Path(os.environ["OUT"]) / "quantization.jsonl" if "OUT" in os.environ else None
    lanes = Lanes(
        paths, visible()[0], count=min(LANES, max(1, (os.cpu_count() or 1) // CORES_PER_LANE)), engine=ENGINE,
        environment=ENVIRONMENT, report=report, timeout_s=TIMEOUT_S,
    )  # fmt: skip
    yield lanes
    lanes.close()


@pytest.fixture(scope="module")
def told() -> set[str]:
    """Models whose error has been shown in full."""
    return set()


@pytest.fixture
def result(lanes: Lanes, told: set[str], name: str) -> Result:
    """The model's result; the test fails with the error of the step that failed."""
    result = lanes.result(name)
    if result.error:
        text = f"{result.error}\n--- daemon\n{result.log}"
        shown = text if name not in told else f"{result.error.splitlines()[0][:200]} (see above)"
        told.add(name)
        pytest.fail(shown, pytrace=False)
    return result


@pytest.mark.parametrize("name", MODELS)
def test_attached_engine_decodes_what_one_from_disk_decodes(result: Result) -> None:
    assert result.stage == "processed"
    assert result.distinct >= 20, "so few tokens would hide wrong weights"
    assert result.repeatable, (
        "the engine from disk decodes otherwise each time: nothing can be compared with it"
    )
    assert result.tokens_equal


@pytest.mark.parametrize("name", MODELS)
def test_second_engine_at_the_same_time_decodes_the_same(result: Result) -> None:
    assert result.twin_tokens_equal


@pytest.mark.parametrize("name", MODELS)
def test_digests_are_equal_after_200_requests(result: Result) -> None:
    assert result.burst_tokens == BURST_TOKENS
    assert result.digests_equal, result.verify
