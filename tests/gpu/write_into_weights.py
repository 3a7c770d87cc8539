"""An engine that maps a cache and then writes into a shared parameter with a kernel."""

from __future__ import annotations

import os

from tests.engine.host import Host, _model


def main(model: str) -> None:
    """Attach `model`, write, and print WROTE if that went through."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch

    host = Host()
    engine = {
        "model": model,
        "load_format": "ipc_cache",
        "gpu_memory_utilization": 0.2,
        "max_model_len": 1024,
        "model_loader_extra_config": {"fallback": False},
    }
    answer = host.answer({"engine": engine})
    assert "tokens" in answer, answer
    weight = max((p for _, p in _model(host.llm).named_parameters()), key=lambda p: p.numel())
    try:
        weight.data.zero_()
        torch.cuda.synchronize()
        print("WROTE", flush=True)
    except Exception as e:
        print(f"{type(e).__name__}: {e}", flush=True)
    os._exit(0)
