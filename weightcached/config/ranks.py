"""Which ranks of a model the devices of this node serve, as vLLM lays them out. Arithmetic only; no
torch, no vLLM.

Global ranks count data parallel, then pipeline, then tensor parallel ranks; a node has a contiguous
block of them. Expert parallel ranks count tensor parallel ranks within data parallel ranks,
separately in each pipeline stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from weightcached.errors import PlacementError

SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_COUNTS = (*SIZES, "data_parallel_size_local", "nnodes", "prefill_context_parallel_size")
_RANKS = ("node_rank", "data_parallel_rank", "data_parallel_start_rank")
_MOVING_EXPERTS = ("enable_eplb", "enable_elastic_ep")


class Layout(NamedTuple):
    """The sizes of the whole model, and the block of global ranks that this node serves."""

    tp_size: int
    pp_size: int
    dp_size: int
    ep_size: int
    first_rank: int
    local_ranks: int

    @property
    def replica_ranks(self) -> int:
        """Ranks of one data parallel replica."""
        return self.tp_size * self.pp_size

    def place(self, local: int) -> Placement:
        """The ranks of this node's device number `local`."""
        if not 0 <= local < self.local_ranks:
            raise PlacementError(
                f"local rank {local} is outside of this node's {self.local_ranks} ranks",
                key="devices",
            )
        global_rank = self.first_rank + local
        dp_rank, rank = divmod(global_rank, self.replica_ranks)
        pp_rank, tp_rank = divmod(rank, self.tp_size)
        ep_rank = dp_rank * self.tp_size + tp_rank if self.ep_size > 1 else 0
        return Placement(local, global_rank, dp_rank, pp_rank, tp_rank, ep_rank, rank)


class Placement(NamedTuple):
    """The ranks of one device. `rank` counts within its replica. Dense models ignore `ep_rank`."""

    local: int
    global_rank: int
    dp_rank: int
    pp_rank: int
    tp_rank: int
    ep_rank: int
    rank: int


def layout_of(engine: Mapping[str, Any]) -> Layout:
    """The layout that vLLM gives these engine arguments, by their Python names, on this node.

    Raises PlacementError for arguments that have no layout, before anything is loaded.
    """
    _check_values(engine)
    tp, pp, dp = (engine.get(key) or 1 for key in SIZES)
    first, local = _block(engine, tp * pp, dp)
    ep = dp * tp if engine.get("enable_expert_parallel") else 1
    return Layout(tp, pp, dp, ep, first, local)


def place(engine: Mapping[str, Any], devices: Sequence[str]) -> list[tuple[str, Placement]]:
    """Every device with its ranks, in local-rank order.

    Raises PlacementError, also for too few or too many devices.
    """
    layout = layout_of(engine)
    if len(devices) != layout.local_ranks:
        raise PlacementError(f"{len(devices)} devices are listed, {needs(engine)}", key="devices")
    return [(device, layout.place(local)) for local, device in enumerate(devices)]


def needs(engine: Mapping[str, Any]) -> str:
    """The number of devices and why, e.g. "tensor_parallel_size 2 × data_parallel_size 2 needs 4"."""
    sizes = [f"{key} {engine[key]}" for key in SIZES if engine.get(key) not in (None, 1)]
    text = " × ".join(sizes) or "one rank"
    layout = layout_of(engine)
    total = layout.replica_ranks * layout.dp_size
    if layout.local_ranks == total:
        return f"{text} needs {total}"
    return f"{text} has {total} ranks, of which this node serves {layout.local_ranks}"


def _check_values(engine: Mapping[str, Any]) -> None:
    for key in (*_COUNTS, *_RANKS):
        value, least = engine.get(key), 1 if key in _COUNTS else 0
        if value is not None and (type(value) is not int or value < least):
            raise PlacementError(
                f"{key} is {value!r}: expected a whole number, at least {least}", key=key
            )
    if (size := engine.get("prefill_context_parallel_size") or 1) > 1:
        raise PlacementError(
            f"prefill_context_parallel_size {size} cannot be cached: leave it out",
            key="prefill_context_parallel_size",
        )
    for key in _MOVING_EXPERTS:
        if engine.get(key):
            raise PlacementError(
                f"{key} moves experts while serving, cached weights cannot move: leave it out",
                key=key,
            )


def _block(engine: Mapping[str, Any], replica: int, dp: int) -> tuple[int, int]:
    """(first global rank, number of ranks) of this node."""
    if (nnodes := engine.get("nnodes") or 1) > 1:
        return _block_of_node(engine, replica, dp, nnodes)
    if engine.get("node_rank"):
        raise PlacementError(
            f"node_rank {engine['node_rank']} needs nnodes, the number of nodes", key="node_rank"
        )
    start, local = _replicas(engine, dp)
    if start + local > dp:
        name = _start_key(engine)
        raise PlacementError(
            f"{name} {start} + data_parallel_size_local {local} is {start + local}: data_parallel_size is {dp}",
            key=name,
        )
    return start * replica, local * replica


def _block_of_node(
    engine: Mapping[str, Any], replica: int, dp: int, nnodes: int
) -> tuple[int, int]:
    world, node = replica * dp, engine.get("node_rank") or 0
    if world % nnodes:
        raise PlacementError(
            f"nnodes {nnodes} does not divide the {world} ranks of this model: choose one that does",
            key="nnodes",
        )
    if node >= nnodes:
        raise PlacementError(
            f"node_rank is {node}: with nnodes {nnodes} expected 0 to {nnodes - 1}", key="node_rank"
        )
    local = world // nnodes
    first = node * local
    name = _start_key(engine)
    start = engine.get(name)
    if start is not None and start != first // replica:
        raise PlacementError(
            f"{name} {start} contradicts node_rank {node} of {nnodes}, which begins with {first // replica}",
            key=name,
        )
    here, given = max(local // replica, 1), engine.get("data_parallel_size_local")
    if given is not None and given != here:
        raise PlacementError(
            f"data_parallel_size_local {given} contradicts nnodes {nnodes}, which puts {here} on each node",
            key="data_parallel_size_local",
        )
    return first, local


def _replicas(engine: Mapping[str, Any], dp: int) -> tuple[int, int]:
    """(first data parallel rank, number of them) of a node that `nnodes` says nothing about."""
    rank, local = engine.get("data_parallel_rank"), engine.get("data_parallel_size_local")
    if rank is None and not engine.get("data_parallel_external_lb"):
        return engine.get("data_parallel_start_rank") or 0, local or dp
    if rank is None:
        raise PlacementError(
            "data_parallel_external_lb needs data_parallel_rank", key="data_parallel_rank"
        )
    if local not in (None, 1):
        raise PlacementError(
            f"data_parallel_size_local is {local}: with data_parallel_rank expected 1",
            key="data_parallel_size_local",
        )
    return rank, 1


def _start_key(engine: Mapping[str, Any]) -> str:
    return (
        "data_parallel_rank"
        if engine.get("data_parallel_rank") is not None
        else "data_parallel_start_rank"
    )
