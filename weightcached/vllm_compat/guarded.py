"""Errors of several workers at once, which vLLM's executor cannot take.

MultiprocExecutor.collective_rpc() raises at the first worker that failed and leaves the answers of
the others in their queues (0.32, 0.33): the next call gets those. So calls that all ranks may refuse
return their errors, and are raised once all ranks have answered.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from weightcached.config.load_formats import OWN_LOAD_FORMATS
from weightcached.vllm_compat.patching import wrap_once

log = logging.getLogger("vllm.weightcached")

CALL = "weightcached_guarded"
# Methods of workers that end in writes to the model's tensors.
WRITERS = (
    "init_weight_transfer_engine",
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
    "reset_weights",
)
# Those that our code refuses or fails on all ranks.
METHODS = frozenset({"weightcached_swap", "reload_weights", "sleep", "wake_up", *WRITERS})


def install() -> None:
    """Patch the executor, if this process has imported it. May be called again."""
    module = sys.modules.get("vllm.v1.executor.multiproc_executor")
    wrap_once(getattr(module, "MultiprocExecutor", None), "collective_rpc", _collective_rpc)


def call(worker: Any, method: str, arguments: Any, named: dict[str, Any]) -> dict[str, Any]:
    """A method of a worker: its `result`, or its `error` as text. Put on workers as CALL."""
    try:
        return {"result": getattr(worker, method)(*arguments, **named)}
    except Exception as e:
        log.exception("%s failed", method)
        return {"error": f"{type(e).__name__}: {e}"}


def _collective_rpc(original: Any) -> Any:
    def collective_rpc(
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: Any = (),
        kwargs: Any = None,
        *more: Any,
        **named: Any,
    ) -> Any:
        ours = self.vllm_config.load_config.load_format in OWN_LOAD_FORMATS
        if not ours or not isinstance(method, str) or method not in METHODS or more or named:
            return original(self, method, timeout, args, kwargs, *more, **named)
        answers = original(self, CALL, timeout, (method, args, kwargs or {}))
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            # The reason itself, not that another rank has one.
            errors.sort(key=lambda error: "another rank" in error)
            raise RuntimeError(
                f"Worker failed with error '{errors[0]}', the log has the workers' stack traces"
            )
        return [answer["result"] for answer in answers]

    return collective_rpc
