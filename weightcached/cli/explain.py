"""`weightcachectl explain`: plans and private tensors of a cache, from its index, or why it has
none.

Layers are alike, so modules that differ only in a number share a row; `--all` has each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from weightcached.cli.text import columns
from weightcached.errors import WeightcachedError
from weightcached.index.sharing import reasons
from weightcached.index.tensors import ModulePlan, TensorIndex
from weightcached.system.text import bytes_text, progress_text, seconds_text
from weightcached.wire.fetch import fetch_index
from weightcached.wire.messages import CacheStatus, StatusReply

SHOWN_NAMES = 3
# A number that is a step of a path, as in model.layers.3.mlp or scales[0].
_NUMBER = re.compile(r"(?<=[.\[])\d+(?=[.\]:)]|$)|^\d+(?=\.)")
_REFUSED = "this model cannot be attached, load it from disk"


@dataclass(frozen=True)
class Report:
    """One cache on one device. index: None if no generation is served; then `problem` says why."""

    device: str
    status: CacheStatus
    index: TensorIndex | None
    problem: str


def reports(replies: Sequence[StatusReply], found: Iterable[tuple[str, str]]) -> list[Report]:
    """Reports on these (device, cache), with the status of each from the replies."""
    known = {(reply.device, cache.name): cache for reply in replies for cache in reply.caches}
    return [_report(device, known[device, name]) for device, name in found]


def _report(device: str, status: CacheStatus) -> Report:
    if not status.generation:
        return Report(
            device,
            status,
            None,
            status.error or f"no generation is served, its state is {status.state}",
        )
    try:
        return Report(device, status, fetch_index(device, status.name, for_what="explained"), "")
    except WeightcachedError as e:
        return Report(device, status, None, str(e))


def path_of_refusal(text: str) -> str:
    """The path at which the proof refused the model; "" after other errors."""
    path, colon, _ = text.partition(": ")
    return path if colon and _REFUSED in text else ""


# ---- JSON


def as_json(found: Sequence[Report]) -> dict[str, Any]:
    """The document that `explain --json` prints; every module and every private tensor is in it."""
    return {"caches": [_as_json(report) for report in found]}


def _as_json(report: Report) -> dict[str, Any]:
    status, index = report.status, report.index
    error = report.problem or status.error
    document: dict[str, Any] = {
        "device": report.device,
        "cache": status.name,
        "state": status.state,
        "error": error,
        "refused_at": path_of_refusal(error),
        "snapshot": status.snapshot,
        "snapshot_use": status.snapshot_use,
    }
    if index is None:
        return document
    return document | {
        "generation": index.generation,
        "stage": index.stage,
        "bytes": index.nbytes,
        "private_bytes": _private_bytes(index),
        "load_seconds": index.load.seconds,
        "phases": index.load.phases,
        "plans": [
            {
                "module": plan.module,
                "plan": plan.plan,
                "method": plan.method,
                "reason": plan.reason,
                "values": list(plan.values),
            }
            for plan in index.modules
        ],
        "private": [
            {"names": names, "bytes": index.storages[number].nbytes, "reason": reason}
            for number, reason, names in _private(index)
        ],
    }


# ---- text


def as_lines(found: Sequence[Report], *, each: bool) -> list[str]:
    """The report on each cache, an empty line between two. `each`: every module and every name."""
    lines: list[str] = []
    for report in found:
        lines += ["", *_lines(report, each)] if lines else _lines(report, each)
    return lines


def _lines(report: Report, each: bool) -> list[str]:
    status, index, name = report.status, report.index, f"{report.device} {report.status.name}"
    if index is None:
        progress = progress_text(status)
        if status.state == "loading" and not status.error:
            return [f"{name}: is being loaded{', ' if progress else ''}{progress}"]
        what = "refused at" if path_of_refusal(report.problem) else f"{status.state}:"
        return [f"{name}: {what} {report.problem}", *_snapshot_lines(status)]
    lines = [
        f"{name}: generation {index.generation}, {index.stage} weights, {bytes_text(index.nbytes)}, "
        f"of which {bytes_text(_private_bytes(index))} are copied by each engine",
        _load_line(index),
        *_snapshot_lines(status),
    ]
    if status.error:
        lines.append(f"the next generation failed: {status.error}")
    lines += ["", *_plan_lines(index, each), "", *_private_lines(index, each)]
    return lines


def _snapshot_lines(status: CacheStatus) -> list[str]:
    """Whether a snapshot was used, and whether there is one for the next start."""
    load = "next" if status.state == "evicted" else "last"
    lines = [f"snapshot at the {load} load: {status.snapshot_use}"] if status.snapshot_use else []
    return lines + ([f"snapshot of this generation: {status.snapshot}"] if status.snapshot else [])


def _load_line(index: TensorIndex) -> str:
    phases = ", ".join(
        f"{phase} {seconds_text(seconds)}" for phase, seconds in index.load.phases.items()
    )
    return f"loaded in {seconds_text(index.load.seconds)}" + (f": {phases}" if phases else "")


def _plan_lines(index: TensorIndex, each: bool) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("PLAN", "MODULES", "MODULE", "HOOK OF", "VALUES", "WHY NO EARLIER PLAN")
    ]
    counts: dict[tuple[str, ...], int] = {}
    for plan in index.modules:
        row = _plan_row(plan, each)
        counts[row] = counts.get(row, 0) + 1
    rows += [(row[0], str(count), *row[1:]) for row, count in counts.items()]
    if len(rows) > 1:
        return columns(rows)
    what = "hooks run in each engine" if index.stage == "loaded" else "no hooks, no values"
    return [f"plans: none, {what}"]


def _plan_row(plan: ModulePlan, each: bool) -> tuple[str, ...]:
    module, reason = plan.module or "<root>", plan.reason
    if not each:
        module, reason = _pattern(module), _pattern(reason)
    below = (path.removeprefix(f"{plan.module}.") for path in plan.values)
    values = ", ".join(path if each else _pattern(path) for path in below)
    return plan.plan, module, plan.method.rpartition(".")[2] or "-", values or "-", reason or "-"


def _private_lines(index: TensorIndex, each: bool) -> list[str]:
    groups: dict[str, list[tuple[int, list[str]]]] = {}
    for number, reason, names in _private(index):
        groups.setdefault(reason, []).append((index.storages[number].nbytes, names))
    rows = [("PRIVATE BECAUSE", "STORAGES", "SIZE", "TENSORS")]
    for reason, members in groups.items():
        names = [name if each else _pattern(name) for _, all_names in members for name in all_names]
        size = bytes_text(sum(nbytes for nbytes, _ in members))
        rows.append(
            (reason, str(len(members)), size, _list_names(list(dict.fromkeys(names)), each))
        )
    return columns(rows) if len(rows) > 1 else ["private: nothing"]


def _list_names(names: list[str], each: bool) -> str:
    shown = names if each else names[:SHOWN_NAMES]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more


def _pattern(text: str) -> str:
    return _NUMBER.sub("*", text)


def _private(index: TensorIndex) -> Iterator[tuple[int, str, list[str]]]:
    """(number, reason, names of the tensors over it) of every storage that engines copy."""
    names: dict[int | None, list[str]] = {}
    for record in index.tensors:
        names.setdefault(record.storage, []).extend(record.names)
    why = reasons(index.tensors, index.storages)
    for number, storage in enumerate(index.storages):
        if index.segments[storage.segment].private:
            yield (
                number,
                why.get(number, "by rules of another version, which loaded it"),
                names.get(number, []),
            )


def _private_bytes(index: TensorIndex) -> int:
    return sum(segment.nbytes for segment in index.segments if segment.private)
