"""The manifest's `rendezvous`: where the loaders of one model's ranks meet, when they load as a
group.

A meeting place is an address of the node that has global rank 0, with one port for the target and
one for the draft.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import Meta

from weightcached.config.drafts import has_cached_draft
from weightcached.config.located_yaml import Value
from weightcached.config.ranks import Layout, layout_of

SOLO = "solo"
DEFAULT_TIMEOUT_S = 300
# The daemon ends a loader that says nothing for 600 s.
MAX_TIMEOUT_S = 540
# Arguments that name ports of the engine, with vLLM's defaults.
_ENGINE_PORTS = {"master_port": 29501, "data_parallel_rpc_port": 29550}
_PORTS = range(1024, 65536)


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Where a group meets, and for how long each rank waits. host: an address of rank 0's node."""

    host: str
    port: int
    draft_port: int
    timeout_s: int = DEFAULT_TIMEOUT_S

    def port_of(self, role: str) -> int:
        return self.draft_port if role == "draft" else self.port


class GroupEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`rendezvous: {group: HOST:PORT, …}` in the manifest."""

    group: Annotated[
        str, Meta(min_length=1, description="HOST:PORT, an address of the node with rank 0")
    ]
    draft_port: int | None = None
    timeout_s: Annotated[int, Meta(ge=1)] = DEFAULT_TIMEOUT_S


Entry = Literal["solo", "group"] | GroupEntry


def resolve(entry: Entry, value: Value, engine: Mapping[str, Any]) -> Rendezvous | None:
    """`solo` is None. Raises ManifestError for an address at which the ranks could not meet."""
    if entry == SOLO:
        return None
    if not isinstance(entry, GroupEntry):
        value.fail(
            "a group needs a place to meet: write {group: HOST:PORT}, an address of the node with rank 0"
        )
    host, port = _host_and_port(value["group"], entry.group)
    draft_port = port + 1
    if entry.draft_port is not None:
        draft_port = _check_port(value["draft_port"], entry.draft_port)
    if entry.timeout_s > MAX_TIMEOUT_S:
        value["timeout_s"].fail(
            f"expected at most {MAX_TIMEOUT_S}, got {entry.timeout_s}: a longer wait looks like a hang"
        )
    found = Rendezvous(host=host, port=port, draft_port=draft_port, timeout_s=entry.timeout_s)
    _check(found, engine, value)
    return found


def _host_and_port(value: Value, text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdecimal()):
        value.fail(f"expected HOST:PORT, got {value.described()}")
    return host.removeprefix("[").removesuffix("]"), _check_port(value, int(port))


def _check_port(value: Value, port: int) -> int:
    if port not in _PORTS:
        value.fail(f"expected a port of {_PORTS.start} to {_PORTS.stop - 1}, got {port}")
    return port


def _check(found: Rendezvous, engine: Mapping[str, Any], value: Value) -> None:
    layout = layout_of(engine)
    ports = {"group": found.port}
    if has_cached_draft(engine):
        ports["draft_port"] = found.draft_port
        if found.draft_port == found.port:
            value.get("draft_port").fail(
                f"{found.port} is the target's port too: both groups may meet at once"
            )
        if layout.pp_size > 1:
            value["group"].fail(
                "only the last pipeline stage has the draft, so it cannot form a group: write rendezvous: solo"
            )
    for key, port in ports.items():
        for argument in _engine_ports(engine, layout):
            if (engine.get(argument) or _ENGINE_PORTS[argument]) == port:
                _refuse_port(
                    value[key] if key in value.mapping() else value["group"], port, argument
                )
    if several_nodes(layout) and is_loopback(found.host):
        value["group"].fail(
            f"{found.host} is a loopback address, and the ranks are on several nodes: write an "
            "address of the node with rank 0"
        )


def _engine_ports(engine: Mapping[str, Any], layout: Layout) -> Sequence[str]:
    used = [argument for argument in _ENGINE_PORTS if engine.get(argument) is not None]
    if (engine.get("nnodes") or 1) > 1:
        used.append("master_port")
    if layout.dp_size > 1:
        used.append("data_parallel_rpc_port")
    return used


def _refuse_port(value: Value, port: int, argument: str) -> NoReturn:
    value.fail(
        f"{port} is the engine's {argument}: the engine starts while loaders may meet, choose another"
    )


def several_nodes(layout: Layout) -> bool:
    """Whether this node has a part of the ranks only."""
    return layout.local_ranks < layout.replica_ranks * layout.dp_size


def is_loopback(host: str) -> bool:
    """Whether each node takes the host for itself. Names are not resolved."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
