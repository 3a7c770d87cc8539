"""`weightcachectl plan`: the rank of each model that each device serves, and its approximate size.

Sizes are estimated from the headers of the checkpoint, before anything is loaded. Quantization
while loading, padding and replicated layers make the loaded size differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from weightcached.checkpoint.files import open_recorded
from weightcached.checkpoint.identity import record_checkpoint
from weightcached.checkpoint.safetensors_header import read_header
from weightcached.cli.text import columns
from weightcached.config.drafts import checkpoint_arguments
from weightcached.config.manifest import ALL, Manifest, ModelSpec
from weightcached.config.ranks import Layout, Placement, layout_of, place
from weightcached.config.wanted import roles
from weightcached.errors import CheckpointError
from weightcached.system.text import bytes_text

_HEAD = ("MODEL", "ROLE", "DEVICE", "RANK", "DP", "PP", "TP", "EP", "SIZE")
_EXPERT = re.compile(r"\.experts\.")


class RankRow(NamedTuple):
    """One rank. device: "all" if each device has a copy; nbytes: None if there is no estimate."""

    model: str
    role: str
    device: str
    placement: Placement
    nbytes: int | None


def rows_of(manifest: Manifest, *, only: str = "") -> tuple[list[RankRow], list[str]]:
    """All ranks in manifest order, or those of one model, and the problems found."""
    problems: list[str] = []
    specs = [spec for spec in manifest.models if only in ("", spec.name)]
    return [row for spec in specs for row in _rows(spec, problems)], problems


def _rows(spec: ModelSpec, problems: list[str]) -> Iterator[RankRow]:
    layout = layout_of(spec.engine)
    nbytes = _estimate(spec, layout, problems)
    placed = [(ALL, layout.place(0))] if spec.devices == [ALL] else place(spec.engine, spec.devices)
    for device, placement in placed:
        yield RankRow(spec.name, "target", device, placement, nbytes)
        if "draft" in roles(spec, placement):
            # Its share of the target's checkpoint differs by method.
            yield RankRow(spec.name, "draft", device, placement, None)


def _estimate(spec: ModelSpec, layout: Layout, problems: list[str]) -> int | None:
    """Bytes of one rank: all ranks of a stage share its experts, tensor ranks share the rest."""
    try:
        rest, experts = _checkpoint_bytes(spec.engine)
    except CheckpointError as e:
        problems.append(f"{spec.name}: no size: {e}")
        return None
    return (rest // layout.tp_size + experts // (layout.tp_size * layout.dp_size)) // layout.pp_size


def _checkpoint_bytes(engine: dict[str, Any]) -> tuple[int, int]:
    """(bytes of all tensors but experts, bytes of experts). Raises CheckpointError."""
    identity = record_checkpoint(**checkpoint_arguments(engine, "target"))
    rest = experts = 0
    for file in identity.files:
        path = f"{identity.root}/{file.name}"
        if not file.name.endswith(".safetensors"):
            rest += file.size
            continue
        with open_recorded(path, file.stat) as fd:
            for tensor in read_header(fd, path, file.size).tensors:
                nbytes = tensor.end - tensor.begin
                if _EXPERT.search(tensor.name):
                    experts += nbytes
                else:
                    rest += nbytes
    return rest, experts


def as_json(rows: Sequence[RankRow]) -> dict[str, Any]:
    """The document that `plan --json` prints."""
    return {
        "ranks": [
            {
                "model": r.model,
                "role": r.role,
                "device": r.device,
                **r.placement._asdict(),
                "about_bytes": r.nbytes,
            }
            for r in rows
        ]
    }


def as_table(rows: Sequence[RankRow]) -> list[str]:
    """Lines of a table with one row per rank, and one for each device with several."""
    table: list[tuple[str, ...]] = [_HEAD]
    for row in rows:
        p = row.placement
        ranks = (p.global_rank, p.dp_rank, p.pp_rank, p.tp_rank, p.ep_rank)
        table.append((row.model, row.role, row.device, *map(str, ranks), _about(row.nbytes)))
    return columns(table) + list(_sums(rows))


def _sums(rows: Sequence[RankRow]) -> Iterator[str]:
    for device in dict.fromkeys(row.device for row in rows):
        sizes = [row.nbytes for row in rows if row.device == device]
        if len(sizes) > 1 and None not in sizes:
            yield f"{device}: {_about(sum(size for size in sizes if size is not None))} in {len(sizes)} models"


def _about(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else f"about {bytes_text(nbytes)}"
