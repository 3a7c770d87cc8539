"""The size of the KV cache that an engine of a service measured, for the next first start of its equal.

Before vLLM sizes the KV cache it estimates the memory of CUDA graphs, which takes seconds. The size
depends on what the daemon holds and keeps free, on the device's free memory, and on whether the
weights are mapped. A worker knows all of that only when it has asked its daemon, so the worker
compares it there. Either all ranks take the known size or all measure: the estimate is a collective
operation, in which a rank alone would wait for ever.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from weightcached.system.text import bytes_text

log = logging.getLogger("vllm.weightcached")

ENVIRONMENT = "WEIGHTCACHED_ENGINE_FIRST_START"
# Contexts of other processes differ by so much from one start to the next.
_SLACK_BYTES = 64 << 20


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's measurement depends on: its device's free memory, and the answer of
    get_external_weight_memory, which has what the daemon holds and reserves. sources: of target and
    draft, the mode in which they are mapped, or "disk".
    """

    free_bytes: int
    external_bytes: int
    sources: list[str]

    def is_as(self, other: Budget) -> bool:
        """Whether an engine would measure the same with both."""
        # Both ways: with more memory than then, the old size would be too small for ever.
        return (
            abs(self.free_bytes - other.free_bytes) <= _SLACK_BYTES
            and abs(self.external_bytes - other.external_bytes) <= _SLACK_BYTES
            and self.sources == other.sources
        )


class _FirstStart(msgspec.Struct, frozen=True, kw_only=True):
    """What all processes of an engine inherit. `directory` is the engine's own; kv_cache_bytes is
    the known size, 0 without one, and `ranks` the budgets that it was measured with.
    """

    directory: str
    kv_cache_bytes: int = 0
    ranks: dict[str, Budget] = {}


class _Settled(NamedTuple):
    cache_config: Any
    takes_known: bool
    record: Path


# Of this process's engine.
_settled: _Settled | None = None


def begin(directory: str, remembered: Mapping[str, Any]) -> None:
    """Before an engine starts its processes. `remembered` is what measured() and kv_cache_bytes said
    of an equal engine, or empty; something else counts as empty.
    """
    start = _FirstStart(directory=directory)
    known = {name: remembered.get(name) for name in ("kv_cache_bytes", "ranks")}
    with contextlib.suppress(msgspec.ValidationError):
        start = msgspec.convert({"directory": directory, **known}, _FirstStart)
    os.environ[ENVIRONMENT] = msgspec.json.encode(start).decode()


def settle(vllm_config: Any, budget: Budget) -> None:
    """In a worker, when its daemon has answered: take the known size of the KV cache, or leave word
    of this budget for measured().

    All ranks call it. Does nothing in an engine of no service, in one whose user gives the size, in
    one whose workers meet those of other engine cores, and in one whose workers are not our children.
    """
    global _settled  # noqa: PLW0603  one engine a process at a time, as vLLM has it
    # With torch: the API server imports this module before vLLM.
    from weightcached.vllm_compat.build import all_ranks

    _settled = None
    text = os.environ.get(ENVIRONMENT)
    cache_config, parallel = vllm_config.cache_config, vllm_config.parallel_config
    # Replicas estimate together too, and all_ranks() asks one of them. Workers that Ray or another
    # node starts do not all inherit what begin() says.
    inherited = parallel.distributed_executor_backend in ("mp", "uni")
    alone = parallel.data_parallel_size == 1 and getattr(parallel, "nnodes", 1) == 1
    if not text or not inherited or not alone or cache_config.kv_cache_memory_bytes is not None:
        return
    start = msgspec.json.decode(text, type=_FirstStart)
    rank = str(parallel.rank)
    known = start.ranks.get(rank)
    takes_known = start.kv_cache_bytes > 0 and all_ranks(
        known is not None and budget.is_as(known), "target"
    )
    record = Path(start.directory) / f"budget.{rank}"
    _settled = _Settled(cache_config, takes_known, record)
    if takes_known:
        cache_config.kv_cache_memory_bytes = start.kv_cache_bytes
        log.info(
            "the KV cache gets %s, as an equal engine measured it with the same memory",
            bytes_text(start.kv_cache_bytes),
        )
        return
    with contextlib.suppress(OSError):
        record.write_bytes(msgspec.json.encode(budget))


def changed() -> None:
    """On all ranks, after settle(): the weights come from elsewhere. Measure, and remember nothing."""
    if _settled is None:
        return
    if _settled.takes_known:
        _settled.cache_config.kv_cache_memory_bytes = None
    with contextlib.suppress(OSError):
        _settled.record.unlink(missing_ok=True)


def measured(directory: Path) -> dict[str, Any]:
    """The budgets of an engine that measured, by rank; empty if it took a known size."""
    try:
        return {
            path.suffix.removeprefix("."): json.loads(path.read_bytes())
            for path in directory.glob("budget.*")
        }
    except (OSError, ValueError):
        return {}
