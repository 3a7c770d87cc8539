"""Which storages each engine copies instead of mapping them: the rule, and the table of exceptions
with their reasons.

The rule: a forward pass reads parameters, and may write to any other tensor. Models keep scratch
space, per-request embeddings, positions and states in buffers and plain attributes, under names
that nobody could list. The exceptions go both ways: parameters that are written, and other tensors
that are only read and too large to copy for each engine. Needs no torch: the loader asks while it
packs, `weightcachectl explain` when it is asked why.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from weightcached.index.tensors import Kind, StorageRecord, TensorRecord
from weightcached.segments.packing import SMALL_NBYTES

SMALL = f"below {SMALL_NBYTES // 1024} KiB"
NOT_A_PARAMETER = "no parameter: a forward pass may write to it"


class Exemption(NamedTuple):
    """One exception to the rule. `pattern` is searched for in the last step of a tensor's path."""

    pattern: re.Pattern[str]
    written: bool
    reason: str


def _row(pattern: str, reason: str, *, written: bool = False) -> Exemption:
    return Exemption(re.compile(pattern), written, reason)


EXCEPTIONS = (
    # Parameters too, if a kernel's method registers them as such.
    _row(r"workspace|scratch", "workspace of a kernel", written=True),
    _row(
        r"(^|_)locks?(_|$)",
        "locks by which the blocks of a kernel wait for each other",
        written=True,
    ),
    _row(r"^running_|num_batches_tracked", "statistics of a batch norm", written=True),
    _row(
        r"^_?(k|v|q|prob)_scale",
        "scale of the KV cache, calibrated on the first batch",
        written=True,
    ),
    _row(
        r"topk_(weights|ids|indices)", "choices of a router for the tokens of a batch", written=True
    ),
    _row(
        r"expert_load|logical_replica|(logical|physical)_to_",
        "counters and maps of expert balancing",
        written=True,
    ),
    # Others, which are only read.
    _row(
        r"(cos|sin)_?.*cache|^(cos|sin)(_cached)?$|freqs_c(ache|is)",
        "rotary table: another dtype makes a new one",
    ),
    _row(r"^W_(UV|UK|K|V|Q)(_|$)", "MLA's absorbed projection of kv_b_proj"),
    _row(r"weight", "weight, by its name"),
    _row(
        r"^w(1|2|3|13)(_|$)|q(zeros|scales)$|packed", "quantized weight or its scales, by its name"
    ),
    _row(r"^absmax$", "scales of a bitsandbytes weight"),
    _row(
        r"^(temporal_)?pos(ition)?s?_(enc|emb|embed|embedding|embeddings|ids|table)$|^pe$",
        "table of positions",
    ),
)

# Tensors inside an object of such a name are that weight, e.g. experts.w13_weight.storage.data.
_WEIGHT = re.compile(r"weights?(_scales?)?$|^w(1|2|3|13)(_|$)|precision_config$")
_DEPTH = 4


def explain_written(names: Iterable[str], kinds: Iterable[Kind]) -> str:
    """Why a forward pass may write to the storage of tensors with these names and kinds, or ""."""
    steps = [[step.partition("[")[0] for step in name.split(".")] for name in names]
    found = [row for path in steps for row in EXCEPTIONS if row.pattern.search(path[-1])]
    for row in found:
        if row.written:
            return row.reason
    inside = any(_WEIGHT.search(step) for path in steps for step in path[-_DEPTH:-1])
    return "" if found or inside or "parameter" in kinds else NOT_A_PARAMETER


def reasons(tensors: Sequence[TensorRecord], storages: Sequence[StorageRecord]) -> dict[int, str]:
    """The reason for each private storage, by number. Small ones are private even if only read."""
    names: dict[int, list[str]] = {}
    kinds: dict[int, list[Kind]] = {}
    for record in tensors:
        if record.storage is not None:
            names.setdefault(record.storage, []).extend(record.names)
            kinds.setdefault(record.storage, []).append(record.kind)
    found = {}
    for number, storage in enumerate(storages):
        reason = explain_written(names.get(number, ()), kinds.get(number, ()))
        if storage.nbytes < SMALL_NBYTES:
            reason = SMALL if reason in ("", NOT_A_PARAMETER) else reason
        if reason:
            found[number] = reason
    return found
