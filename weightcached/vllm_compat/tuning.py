"""FlashInfer's autotuning before the first engine starts, so that it finds the result in vLLM's own
cache.

Runs on the generation as an engine has it, after it has been handed over: the daemon serves the
generation even if tuning crashes. vLLM's functions do the work, and name and find their cache; the
loader only gives them a model runner, without KV cache and requests.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

log = logging.getLogger(__name__)


def run(
    vllm_config: Any,
    model_config: Any,
    device: torch.device,
    attach: Callable[[nn.Module], None],
    *,
    role: str,
    begin: Callable[[], None],
) -> None:
    """Tune if the engine would. Calls `begin` first, and `attach` as tune() does. Never raises."""
    if is_wanted(vllm_config, role):
        begin()
        tune(vllm_config, model_config, device, attach)


def is_wanted(vllm_config: Any, role: str) -> bool:
    """Whether the engine would tune when it starts, and this rank can do it alone.

    Ranks measure together, and an engine uses stored results for all its ranks or for none; so a
    model of several ranks is not tuned here. With a draft the engine's own dummy run includes the
    drafter.
    """
    from vllm.platforms import current_platform
    from vllm.utils.flashinfer import has_flashinfer

    return (
        role == "target"
        and getattr(vllm_config.kernel_config, "enable_flashinfer_autotune", False) is not False
        and vllm_config.speculative_config is None
        and vllm_config.parallel_config.world_size_across_dp == 1
        and has_flashinfer()
        and bool(current_platform.has_device_capability(90))
    )


def tune(
    vllm_config: Any, model_config: Any, device: torch.device, attach: Callable[[nn.Module], None]
) -> bool:
    """Tune, or log why not; whether it worked. attach: bind the generation to a model on meta."""
    from weightcached.vllm_compat import build

    try:
        with build.isolated_build(vllm_config, keep=False):
            model = build.build_on_meta(vllm_config, model_config)
            attach(model)
            _autotune(vllm_config, device, model.eval())
    except Exception as e:
        log.warning(
            "FlashInfer was not tuned, the first engine does it: %s: %s", type(e).__name__, e
        )
        return False
    log.info("FlashInfer is tuned")
    return True


def _autotune(vllm_config: Any, device: torch.device, model: nn.Module) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.warmup.kernel_warmup import flashinfer_autotune
    from vllm.platforms import current_platform

    # As the engine's executor does before its workers load: the cache's key has the block size.
    current_platform.update_block_size_for_backend(vllm_config)
    with set_current_vllm_config(vllm_config):
        runner = _runner_class(vllm_config)(vllm_config, device)
        runner.load_model(model=model)
        second = bool(getattr(vllm_config, "use_v2_model_runner", False))
        # The second runner cannot run attention without a KV cache; older vLLM has neither.
        options = (
            {"skip_attn": second}
            if "skip_attn" in inspect.signature(flashinfer_autotune).parameters
            else {}
        )
        flashinfer_autotune(runner, **options)


def _runner_class(vllm_config: Any) -> Any:
    if getattr(vllm_config, "use_v2_model_runner", False):
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    else:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    return GPUModelRunner
