"""The loader child on a machine that passes for one with FlashInfer: vLLM's own tuning, its CPU
runner, a fake tuner.

Before it loads, it writes the place in which an engine with the job's arguments looks for tuning
results: to the file in TUNING_EXPECTED, a line for each model. TUNING_FAILS in a model's path makes
its tuning fail.
"""

from __future__ import annotations

import io
import os
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from weightcached.loader import main
from weightcached.vllm_compat import tuning
from weightcached.wire.loader_job import decode_job


class Runner(CPUModelRunner):
    """The CPU's runner, given a model as the GPU's are."""

    def load_model(self, *, model: Any) -> None:
        self.model = model

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        from flashinfer.autotuner import AutoTuner

        if "TUNING_FAILS" in self.model_config.model:
            raise RuntimeError("no tactic works")
        outputs = super()._dummy_run(*args, **kwargs)
        AutoTuner.get().table["bytes_mapped"] = mapped_bytes()
        return outputs


def mapped_bytes() -> int:
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:weightcached-segment" in line:
            begin, end = line.split()[0].split("-")
            total += int(end, 16) - int(begin, 16)
    return total


def where_an_engine_looks(engine: dict[str, Any]) -> Path:
    from vllm.model_executor.warmup.flashinfer_autotune_cache import (
        resolve_flashinfer_autotune_file,
    )

    arguments = {"skip_tokenizer_init": True, "load_format": "ipc_cache", **engine}
    config = EngineArgs(
        **{k: v for k, v in arguments.items() if k in known()}
    ).create_engine_config()
    current_platform.update_block_size_for_backend(config)
    file: Path = resolve_flashinfer_autotune_file(SimpleNamespace(vllm_config=config))
    return file.parent


def known() -> set[str]:
    return {field.name for field in fields(EngineArgs)}


if __name__ == "__main__":
    data = sys.stdin.buffer.read()
    sys.stdin = io.TextIOWrapper(io.BytesIO(data))
    load_general_plugins()
    with open(os.environ["TUNING_EXPECTED"], "a", encoding="utf-8") as expected:
        job = decode_job(data)
        expected.write(f"{job.cache} {where_an_engine_looks(job.engine)}\n")
    tuning._runner_class = lambda vllm_config: Runner
    type(current_platform).has_device_capability = classmethod(lambda cls, *args, **kwargs: True)
    main.main()
