"""Other weights under a running engine: the newest generation of each model that a worker maps.

All ranks attach first, then all map; the generation before is let go once every rank has the newer
one, and comes back on all of them if one has not. Called on the workers by collective_rpc(), between
steps: vllm_compat/live.py sees to it in the engine's core that no request is under way.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from weightcached.checkpoint.identity import CheckpointIdentity
from weightcached.errors import (
    CacheConfigMismatchError,
    WeightcachedError,
    WeightCacheUnavailableError,
)
from weightcached.index.tensors import TensorIndex
from weightcached.model import mapped
from weightcached.vllm_compat import worker as vllm_worker
from weightcached.vllm_compat.build import all_ranks, of_all_ranks

log = logging.getLogger("vllm.weightcached")

_ANOTHER_RANK = "another rank of this engine cannot take the newest weights"


class _Newer(NamedTuple):
    model: mapped.MappedModel
    attachment: mapped.MappedAttachment


# Of this process's engine, between prepare_swap() and swap().
_prepared: list[_Newer] | None = None


def prepare_swap(worker: Any, *, cancel: bool = False) -> dict[str, Any]:
    """Attach to the newest generations while the engine serves, for a swap() that follows soon.

    Never raises: returns `newer`, whether there is something to swap, and `reason` and `code` if it
    cannot be swapped; all ranks return the same `newer`. `cancel`: no swap follows.
    """
    _forget_prepared()
    if cancel:
        return {"newer": False, "reason": "", "code": ""}
    try:
        newer = _prepare(worker, wait=False)
    except Exception as e:
        code = e.code if isinstance(e, WeightcachedError) else type(e).__name__
        return {"newer": False, "reason": str(e), "code": code}
    global _prepared  # noqa: PLW0603  one engine a process, as vLLM has it
    _prepared = newer
    return {"newer": bool(newer), "reason": "", "code": ""}


def swap(worker: Any) -> dict[str, Any]:
    """Map the newest generations in place of the present ones; all ranks do, or none does.

    Returns `changed`, `generations` and `labels` by cache, and `seconds`. Raises the reason: then
    the engine has the weights that it had. It has none, and computes nothing any more, if those
    could not be mapped again.
    """
    global _prepared
    began_s = time.perf_counter()
    newer, _prepared = _prepared, None
    if newer is None:
        newer = _prepare(worker, wait=False)
    take(worker, newer)
    took_s = time.perf_counter() - began_s
    log.info("swap: this worker took %.1f ms", took_s * 1e3)
    models = vllm_worker.mapped_of(worker)
    return {
        "changed": bool(newer),
        "generations": {model.cache: model.ready.generation for model in models},
        "labels": vllm_worker.labels_of(worker),
        "seconds": took_s,
    }


def take_newest(worker: Any) -> bool:
    """The same for reload_weights(), which waits for a load. Whether anything has changed."""
    _forget_prepared()
    newer = _prepare(worker, wait=True)
    take(worker, newer)
    return bool(newer)


def _prepare(worker: Any, *, wait: bool) -> list[_Newer]:
    """Attachments to what is newer, for take(). Raises the reason of any rank."""
    newer: list[_Newer] = []
    error: Exception | None = None
    models = vllm_worker.mapped_of(worker)
    try:
        if not models:
            raise CacheConfigMismatchError(
                "this engine maps no weights of a cache: restart it to give it others",
                code="not-live",
            )
        vllm_worker.check_rebinds(worker)
        for model in models:
            if (attachment := model.prepare_newest(wait=wait)) is not None:
                newer.append(_Newer(model, attachment))
    except Exception as e:
        error = e
    try:
        if not all_ranks(error is None, "target"):
            raise error or WeightCacheUnavailableError(_ANOTHER_RANK, code="another-rank")
        if not ranks_agree(each.attachment.tensor_index for each in newer):
            raise mixed_checkpoints("would take")
    except BaseException:
        _close(newer)
        raise
    return newer


def take(worker: Any, newer: list[_Newer]) -> None:
    """Owns the attachments. Raises the reason of any rank, after all have their old weights again."""
    if not newer:
        return
    error: Exception | None = None
    try:
        for each in newer:
            each.model.take(each.attachment)
        _rebind(worker)
        _synchronize()
    except Exception as e:
        error = e
    if not all_ranks(error is None, "target"):
        _go_back(worker, newer)
        raise error or WeightCacheUnavailableError(_ANOTHER_RANK, code="another-rank")
    for each in newer:
        each.model.settle()
    vllm_worker.reset_caches(worker)


def _go_back(worker: Any, newer: list[_Newer]) -> None:
    try:
        for each in newer:
            each.model.go_back()
        _rebind(worker)
        _synchronize()
    except Exception as e:
        vllm_worker.refuse_steps(worker, f"this engine has lost its weights: {e}; restart it")
        raise
    finally:
        # Of models whose turn did not come.
        _close(newer)


def _rebind(worker: Any) -> None:
    # A draft may use modules of its target, which has the last word on them.
    for model in reversed(vllm_worker.mapped_of(worker)):
        model.rebind()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _forget_prepared() -> None:
    global _prepared
    prepared, _prepared = _prepared, None
    _close(prepared or [])


def _close(newer: list[_Newer]) -> None:
    for each in newer:
        if not each.model.owns(each.attachment):
            each.attachment.close()


def ranks_agree(indexes: Iterable[TensorIndex]) -> bool:
    """Whether all ranks have weights of one checkpoint, each model's. All must ask."""
    # Only the last pipeline stage has a draft.
    ours = {index.role: _described(index.key.checkpoint) for index in indexes}
    said = [json.loads(text) for text in of_all_ranks(json.dumps(ours))]
    targets = [each.get("target") for each in said]
    drafts = [each["draft"] for each in said if "draft" in each]
    return all(_alike(a, b) for group in (targets, drafts) for a, b in itertools.pairwise(group))


def mixed_checkpoints(verb: str) -> WeightCacheUnavailableError:
    """The error of ranks that do not agree. verb: what they do with their weights."""
    return WeightCacheUnavailableError(
        f"the ranks of this engine {verb} weights of different checkpoints: wait until the newest is ready "
        "on all its devices ('weightcachectl status')",
        code="another-rank",
    )


def _described(checkpoint: CheckpointIdentity) -> dict[str, Any]:
    files = (*checkpoint.files, *checkpoint.extra)
    return {"sample": checkpoint.sample, "files": {f.name: [f.size, f.mtime_ns] for f in files}}


def _alike(a: dict[str, Any] | None, b: dict[str, Any] | None) -> bool:
    if a is None or b is None:
        return a is b
    if a["files"].keys() == b["files"].keys() and a["sample"] and b["sample"]:
        return bool(a["sample"] == b["sample"])
    # Ranks of experts may read different files.
    return all(a["files"][name] == b["files"][name] for name in a["files"].keys() & b["files"])
