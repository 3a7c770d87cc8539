"""The models of test_quantization.py, with their engine arguments.

Random weights, tens of megabytes each: only the code of vLLM that loads, repacks and runs them
matters.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from bench.checkpoint_models import CONFIGS
from bench.checkpoints import llama_config, write_checkpoint

LLAMA = {"hidden": 512, "intermediate": 1024, "layers": 2, "heads": 8, "kv_heads": 4, "vocab": 8192}


class Model(NamedTuple):
    """A checkpoint and how engines are started with it.

    engine: arguments that also stand in the manifest; start: arguments of engines alone; images:
    asked with images too.
    """

    architecture: str = "llama"
    quantization: str | None = None
    engine: dict[str, Any] = {}  # noqa: RUF012
    start: dict[str, Any] = {}  # noqa: RUF012
    images: bool = False


_MARLIN = {"linear_backend": "marlin"}
# Neighbours go to different daemons; those whose kernels take longest to compile come first.
MODELS: dict[str, Model] = {
    "mamba": Model("nemotron-h"),
    "mla": Model("deepseek"),
    "mla-fp8": Model("deepseek", "fp8-block"),
    "mxfp4": Model("gpt-oss", "mxfp4"),
    "mxfp4-marlin": Model("gpt-oss", "mxfp4", {"moe_backend": "marlin"}),
    "vision": Model("llava", start={"skip_tokenizer_init": False}, images=True),
    "bf16": Model(),
    "fp8": Model("llama", "fp8"),
    "w4a16": Model("llama", "w4a16"),
    "moe": Model("qwen3-moe"),
    "moe-fp8": Model("qwen3-moe", "fp8"),
    "moe-fp8-block": Model("qwen3-moe", "fp8-block"),
    "moe-fp8-channel": Model("qwen3-moe", "ct-fp8-channel"),
    "moe-int8": Model("qwen3-moe", "int8"),
    "moe-w4a16": Model("qwen3-moe", "w4a16"),
    "moe-nvfp4": Model("qwen3-moe", "nvfp4"),
    "fp8-block": Model("llama", "fp8-block"),
    "fp8-static": Model("llama", "ct-fp8-static"),
    "fp8-channel": Model("llama", "ct-fp8-channel"),
    "fp8-kv": Model("llama", "ct-fp8-static", {"kv_cache_dtype": "fp8"}),
    "fp8-online": Model("llama", None, {"quantization": "fp8"}),
    "fp8-online-block": Model("llama", None, {"quantization": "fp8_per_block"}),
    "moe-fp8-online": Model("qwen3-moe", None, {"quantization": "fp8_per_tensor"}),
    "int8": Model("llama", "int8"),
    "gptq-marlin": Model("llama", "gptq", _MARLIN),
    "awq-marlin": Model("llama", "awq", _MARLIN),
    "nvfp4": Model("llama", "nvfp4"),
}


def make_checkpoints(names: Iterable[str], base: Path) -> dict[str, Path]:
    """Write the checkpoint of each model; models of the same one share it."""
    paths = {name: base / "-".join(filter(None, MODELS[name][:2])) for name in names}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(_make, {paths[name]: name for name in paths}.items()))
    return paths


def _make(what: tuple[Path, str]) -> None:
    path, name = what
    model = MODELS[name]
    if model.architecture == "llama":
        config = llama_config(**LLAMA, dtype="bfloat16", tied=False)
    else:
        config = CONFIGS[model.architecture]()
    write_checkpoint(path, config, shards=2, seed=5, quantization=model.quantization)
