"""Keys of real vLLM configurations: changes of the bytes show in key or skeleton, harmless ones
not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.checkpoints import llama_config, with_experts, write_checkpoint
from tests.engine.conftest import ANSWER_TIMEOUT_S, ENVIRONMENT, ROOT

SKELETON = "skeleton"


class Keys:
    """The child that configures vLLM (keys.py)."""

    def __init__(self, log: Path) -> None:
        with open(log, "w", encoding="utf-8") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.engine.keys"], env=os.environ | ENVIRONMENT, cwd=ROOT, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
            )  # fmt: skip
        self._log = log

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line.startswith("ANSWER "), self._log.read_text(encoding="utf-8")[-3000:]
        answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
        assert "error" not in answer, answer["error"]
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(ANSWER_TIMEOUT_S)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keys]:
    keys = Keys(tmp_path_factory.mktemp("keys") / "log")
    yield keys
    keys.close()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense model, the same with experts, and one that brings Python files."""
    base = tmp_path_factory.mktemp("checkpoints")
    config = llama_config(
        hidden=64,
        intermediate=128,
        layers=4,
        heads=4,
        kv_heads=2,
        vocab=256,
        dtype="bfloat16",
        tied=False,
    )
    write_checkpoint(base / "dense", config)
    write_checkpoint(base / "experts", with_experts(config, 4))
    write_checkpoint(
        base / "code", config | {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}
    )
    (base / "code/modeling_own.py").write_text("A = 1\n")
    return {path.name: path for path in base.iterdir()}


@pytest.fixture(scope="module")
def plain(keys: Keys, checkpoints: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """The answers for the models as they are."""
    return {
        name: keys.ask(engine={"model": str(path), "trust_remote_code": name == "code"}, bytes=True)
        for name, path in checkpoints.items()
    }


def differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Names of the key's fields that differ, entries of mappings one by one, and "skeleton"."""
    names = set()
    for field, value in one["key"].items():
        there = other["key"][field]
        if isinstance(value, dict) and field != "checkpoint":
            names |= {
                f"{field}.{name}"
                for name in value.keys() | there.keys()
                if value.get(name) != there.get(name)
            }
        elif value != there:
            names.add(field)
    return names | ({SKELETON} if one["skeleton"] != other["skeleton"] else set())


# The changes: engine arguments, environment, and the fields that must differ.
ALTERING: dict[str, tuple[dict[str, Any], dict[str, str], set[str]]] = {
    "dtype": ({"dtype": "float32"}, {}, {"dtype", SKELETON}),
    "rope theta": (
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}}, {}, {"config_digest"},
    ),
    "norm epsilon": ({"hf_overrides": {"rms_norm_eps": 1e-6}}, {}, {"config_digest"}),
    "length of the rotary table": (
        {"hf_overrides": {"max_position_embeddings": 512}}, {}, {"config_digest", SKELETON},
    ),
    "pooling": ({"runner": "pooling"}, {}, {"model_impl", SKELETON}),
    "transformers' own layers": ({"model_impl": "transformers"}, {}, {"model_impl", SKELETON}),
    "KV-cache dtype": ({"kv_cache_dtype": "fp8"}, {}, {"kv_cache_dtype"}),
    "KV-cache skip list": ({"kv_cache_dtype_skip_layers": ["0"]}, {}, {"kv_cache_skip_layers"}),
    "tensor parallelism": ({"tensor_parallel_size": 2}, {}, {"tp_size", SKELETON}),
    "pipeline parallelism": ({"pipeline_parallel_size": 2}, {}, {"pp_size", SKELETON}),
    "linear backend": ({"linear_backend": "torch"}, {}, {"kernel_backends.linear_backend"}),
    "attention backend": ({"attention_backend": "CPU_ATTN"}, {}, {"kernel_backends.attention"}),
    "LoRA in the towers": (
        {"enable_lora": True, "enable_tower_connector_lora": True}, {}, {"lora_layout"},
    ),
    "additional configuration": ({"additional_config": {"a": 1}}, {}, {"additional_config"}),
    "a kernel left out by environment": (
        {}, {"VLLM_DISABLED_KERNELS": "MarlinLinearKernel"}, {"environment.VLLM_DISABLED_KERNELS"},
    ),
    "a kernel chosen by environment": ({}, {"VLLM_USE_DEEP_GEMM": "0"}, {"environment.VLLM_USE_DEEP_GEMM"}),
    "precision of load-time matmuls": (
        {}, {"VLLM_FLOAT32_MATMUL_PRECISION": "medium"}, {"environment.VLLM_FLOAT32_MATMUL_PRECISION"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", ALTERING)
def test_change_that_can_alter_the_bytes_alters_the_key(
    keys: Keys, checkpoints: dict[str, Path], plain: dict[str, dict[str, Any]], change: str
) -> None:
    engine, environment, fields = ALTERING[change]
    changed = keys.ask(
        engine={"model": str(checkpoints["dense"])} | engine,
        environment=environment,
        bytes=not environment,
    )
    assert differing(plain["dense"], changed) == fields
    assert changed["digest"] != plain["dense"]["digest"]


HARMLESS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "served name": ({"served_model_name": "another"}, {}),
    "variables that this vLLM does not list": (
        {},
        {"VLLM_QUANTIZATION": "fp8", "VLLM_WEIGHTS_DIR": "/srv", "VLLM_NEW_FP8_LAYOUT": "1"},
    ),
    "longest context": ({"max_model_len": 512}, {}),
    "sequences": ({"max_num_seqs": 7}, {}),
    "batched tokens": ({"max_num_batched_tokens": 1024}, {}),
    "GPU utilization": ({"gpu_memory_utilization": 0.5}, {}),
    "compilation": ({"enforce_eager": False}, {}),
    "optimization level": ({"optimization_level": 0}, {}),
    "seed": ({"seed": 5}, {}),
    "block size": ({"block_size": 64}, {}),
    "prefix caching": ({"enable_prefix_caching": False}, {}),
    "statistics": ({"disable_log_stats": True}, {}),
    "generation defaults": ({"generation_config": "vllm"}, {}),
    "end-of-sequence token": ({"hf_overrides": {"eos_token_id": 5}}, {}),
    "format that reads the same files": ({"load_format": "safetensors"}, {}),
    "log level": ({}, {"VLLM_LOGGING_LEVEL": "DEBUG"}),
    "port": ({}, {"VLLM_PORT": "18765"}),
    "a default, set explicitly": ({}, {"VLLM_USE_DEEP_GEMM": "1", "VLLM_MLA_DISABLE": "0"}),
    "a variable of another platform": ({}, {"VLLM_ROCM_MOE_PADDING": "0"}),
    "layer partition without a pipeline": ({}, {"VLLM_PP_LAYER_PARTITION": "4"}),
}


@pytest.mark.parametrize("change", HARMLESS)
def test_harmless_change_alters_neither_the_key_nor_the_bytes(
    keys: Keys, checkpoints: dict[str, Path], plain: dict[str, dict[str, Any]], change: str
) -> None:
    engine, environment = HARMLESS[change]
    for model in ("dense", "experts"):
        changed = keys.ask(
            engine={"model": str(checkpoints[model])} | engine, environment=environment, bytes=True
        )
        assert differing(plain[model], changed) == set()
        assert changed["digest"] == plain[model]["digest"]
        assert changed["bytes"] == plain[model]["bytes"]


def test_our_load_format_asks_for_what_a_load_from_disk_loads(
    keys: Keys, checkpoints: dict[str, Path], plain: dict[str, dict[str, Any]]
) -> None:
    ours = keys.ask(engine={"model": str(checkpoints["dense"]), "load_format": "ipc_cache"})
    assert ours["digest"] == plain["dense"]["digest"]
    assert ours["skeleton"] == plain["dense"]["skeleton"]


def test_batches_are_as_large_by_default_as_those_of_vllm_serve(
    keys: Keys, checkpoints: dict[str, Path]
) -> None:
    # With two ranks: with one, vLLM's defaults on the CPU are the same for all callers.
    sizes = keys.ask(batches={"model": str(checkpoints["dense"]), "tensor_parallel_size": 2})
    assert sizes["ours"] == sizes["served"]


def test_lora_on_a_dense_model_is_harmless(keys: Keys, checkpoints: dict[str, Path]) -> None:
    """Adapters wrap what is loaded: the cache of the base is right for them, whatever their size."""
    base = {"model": str(checkpoints["dense"])}
    lora = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 64, "fully_sharded_loras": True}
    one, other = keys.ask(engine=base, bytes=True), keys.ask(engine=base | lora, bytes=True)
    assert differing(one, other) == set()
    assert (one["digest"], one["bytes"]) == (other["digest"], other["bytes"])


def test_every_rank_of_a_layout_has_a_key_of_its_own(
    keys: Keys, checkpoints: dict[str, Path]
) -> None:
    answers = [
        keys.ask(engine={"model": str(checkpoints["dense"])} | layout, rank=rank, bytes=True)
        for layout in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2})
        for rank in (0, 1)
    ]
    assert (
        len({answer["digest"] for answer in answers})
        == len({answer["bytes"] for answer in answers})
        == 4
    )
    assert differing(answers[0], answers[1]) == {"tp_rank"}
    assert differing(answers[2], answers[3]) == {"pp_rank", SKELETON}


def test_layer_partition_of_a_pipeline_counts(keys: Keys, checkpoints: dict[str, Path]) -> None:
    pipeline = {"model": str(checkpoints["dense"]), "pipeline_parallel_size": 2}
    even = keys.ask(engine=pipeline)
    uneven = keys.ask(engine=pipeline, environment={"VLLM_PP_LAYER_PARTITION": "1,3"})
    assert differing(even, uneven) == {"pp_layer_partition", SKELETON}


def test_placement_of_experts_counts_where_experts_are_spread(
    keys: Keys, checkpoints: dict[str, Path], plain: dict[str, dict[str, Any]]
) -> None:
    model = {"model": str(checkpoints["experts"])}
    assert (
        differing(
            plain["experts"], keys.ask(engine=model | {"expert_placement_strategy": "round_robin"})
        )
        == set()
    )
    spread = model | {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    together = keys.ask(engine=model | {"tensor_parallel_size": 2})
    linear = keys.ask(engine=spread)
    assert differing(together, linear) == {"ep_size", "expert_placement", SKELETON}
    in_turn = keys.ask(engine=spread | {"expert_placement_strategy": "round_robin"})
    assert differing(linear, in_turn) == {"expert_placement"}
    assert differing(linear, keys.ask(engine=spread, rank=1)) >= {"tp_rank", "ep_rank"}


def test_kernels_chosen_for_lora_show_in_the_skeleton(
    keys: Keys, checkpoints: dict[str, Path], plain: dict[str, dict[str, Any]]
) -> None:
    lora = keys.ask(engine={"model": str(checkpoints["experts"]), "enable_lora": True})
    assert differing(plain["experts"], lora) == {"lora_layout", SKELETON}


def test_code_beside_the_checkpoint_counts_where_it_may_run(
    keys: Keys, checkpoints: dict[str, Path], plain: dict[str, dict[str, Any]]
) -> None:
    trusting = {"model": str(checkpoints["code"]), "trust_remote_code": True}
    distrusting = {"model": str(checkpoints["code"])}
    before = keys.ask(engine=distrusting)
    (checkpoints["code"] / "modeling_own.py").write_text("A = 2\n")
    assert differing(plain["code"], keys.ask(engine=trusting)) == {"code_revision"}
    assert differing(before, keys.ask(engine=distrusting)) == set()


def test_limit_of_a_modality_counts_only_as_zero_or_not(keys: Keys) -> None:
    def text(**options: Any) -> str:
        return str(keys.ask(multimodal=options)["text"])

    assert (
        text(limit_per_prompt={"image": 2})
        == text(limit_per_prompt={"image": 3, "video": 1})
        == text()
    )
    assert text(limit_per_prompt={"image": 0}) != text()
    assert text(language_model_only=True) != text()
    assert text(mm_encoder_tp_mode="data") != text()
    assert text(mm_processor_cache_gb=1.0) == text()


# A new vLLM brings new variables: each is to be looked at before it is added here or to the
# harmless ones.
COUNTING = [
    "VLLM_B12X_MOE_FP4_FORCE_A16", "VLLM_BATCH_INVARIANT", "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER",
    "VLLM_CPU_INT4_W4A8", "VLLM_DCP_Q_REPLICATE", "VLLM_DEEPEPLL_NVFP4_DISPATCH", "VLLM_DISABLED_KERNELS",
    "VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION", "VLLM_ENABLE_HPC_OPS", "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HAS_FLASHINFER_CUBIN", "VLLM_HUMMING_INPUT_QUANT_CONFIG", "VLLM_HUMMING_MOE_GEMM_TYPE",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG", "VLLM_HUMMING_USE_F16_ACCUM", "VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT",
    "VLLM_MARLIN_INPUT_DTYPE", "VLLM_MLA_DISABLE", "VLLM_MOE_USE_DEEP_GEMM", "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD",
    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD", "VLLM_REPLICATE_EMBED", "VLLM_USE_DEEP_GEMM", "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES", "VLLM_USE_FLASHINFER_MOE_INT4", "VLLM_USE_HW_AGNOSTIC",
    "VLLM_USE_TRITON_AWQ", "VLLM_ZENTORCH_WEIGHT_PREPACK",
]  # fmt: skip


def test_variables_of_this_vllm_that_count_are_the_ones_looked_at(keys: Keys) -> None:
    answer = keys.ask(counting=True)
    # An older vLLM lacks some.
    assert answer["names"] == sorted(set(COUNTING) & set(answer["listed"]))
