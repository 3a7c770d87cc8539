"""The manifest's `engines:`: one entry a service, an HTTP endpoint that engines of one model serve
in turn.

The engine checks which arguments vLLM knows; arguments that contradict the service are refused
here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from weightcached.config.load_formats import OWN_LOAD_FORMATS
from weightcached.config.located_yaml import Name, Text, Value, listed
from weightcached.config.ranks import layout_of, needs
from weightcached.errors import PlacementError
from weightcached.system.paths import SOCKET_PATH_MAX_BYTES
from weightcached.system.text import near_miss

if TYPE_CHECKING:
    from weightcached.config.manifest import ModelSpec

_PORTS = range(1, 65536)
DEFAULT_DRAIN_S = 30.0
DEFAULT_HANG_S = 60.0
_REFUSED = {
    "model": "the entry's key model names the model",
    "model_tag": "the entry's key model names the model",
    "host": "use the entry's key listen",
    "port": "use the entry's key listen",
    "uds": "use the entry's key listen",
    "config": "write the arguments here",
    "grpc": "the service serves HTTP",
    "headless": "an engine of a service has its own API server",
}
# Above these values one engine would be several servers or several replicas.
_AT_MOST_ONE = {
    "api_server_count": "a service has one API server; start a second service instead",
    "data_parallel_size": "a service has one replica; start a service for each",
    "nnodes": "a service's engine runs on one machine",
}


class Listen(msgspec.Struct, frozen=True, kw_only=True):
    """The address for clients: host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One engine service. `arguments` are those of `vllm serve` by their Python names, over the
    model's own. Times are in seconds; `hang_s` is how long an engine may leave a question to its
    core unanswered, longer than its longest step.
    """

    name: str
    model: str
    listen: Listen
    arguments: dict[str, Any] = {}
    standby: int = 1
    idle_sleep_s: float = 0.0
    drain_s: float = DEFAULT_DRAIN_S
    hang_s: float = DEFAULT_HANG_S
    nursery: bool = True

    def merged(self, model: ModelSpec) -> dict[str, Any]:
        """The arguments of an engine: the model's, then this entry's."""
        return {**model.engine, "load_format": OWN_LOAD_FORMATS[0], **self.arguments}

    def digest(self, model: ModelSpec) -> str:
        """Identifies the start of an engine: equal digests are one version of the service."""
        started_with = [self.merged(model), model.python, model.devices]
        return hashlib.sha256(msgspec.json.encode(started_with, order="deterministic")).hexdigest()


Seconds = Annotated[float, Meta(ge=0)]


class EngineEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of `engines:`, as it is written."""

    name: Name
    model: Text
    listen: Text
    arguments: dict[str, Any] = {}
    standby: Annotated[int, Meta(ge=0)] = 1
    idle_sleep_s: Seconds = 0.0
    drain_s: Seconds = DEFAULT_DRAIN_S
    hang_s: Seconds = DEFAULT_HANG_S
    nursery: bool = True


def resolve_engines(
    entries: Sequence[EngineEntry], value: Value, models: Sequence[ModelSpec]
) -> list[EngineSpec]:
    """The services, checked. Raises ManifestError for the first fault."""
    by_name = {model.name: model for model in models}
    found: list[EngineSpec] = []
    lines: dict[str, int] = {}
    for entry, at in zip(entries, value.items(), strict=True):
        engine = _engine(entry, at, by_name)
        if engine.name in lines:
            at["name"].fail(
                f"the name {engine.name!r} is taken by the engine on line {lines[engine.name]}: choose another"
            )
        for other in found:
            if other.listen == engine.listen:
                at["listen"].fail(f"{other.name} listens there too: choose another address")
        lines[engine.name] = at["name"].line
        found.append(engine)
    return found


def _engine(entry: EngineEntry, at: Value, models: Mapping[str, ModelSpec]) -> EngineSpec:
    model = models.get(entry.model)
    if model is None:
        at["model"].fail(
            f"no model {entry.model!r} in this manifest{near_miss(entry.model, models)}; models: {listed(models)}"
        )
    if entry.standby > 1:
        at["standby"].fail(
            f"expected 0 or 1, got {entry.standby}: one parked engine takes over, the next follows"
        )
    if entry.hang_s < 1:
        at["hang_s"].fail(
            f"expected at least 1, got {entry.hang_s:g}: an engine must have time for a step"
        )
    _check_arguments(entry.arguments, at.get("arguments"), model)
    fields = msgspec.structs.asdict(entry) | {"listen": _listen(entry.listen, at["listen"])}
    spec = EngineSpec(**fields)
    _check_layout(spec, model, at["arguments" if entry.arguments else "model"])
    return spec


def _listen(text: str, at: Value) -> Listen:
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/"):
            at.fail(f"expected unix: with an absolute path, got {text!r}")
        nbytes = len(path.encode())
        if nbytes > SOCKET_PATH_MAX_BYTES:
            at.fail(f"the path has {nbytes} bytes, a socket's has at most {SOCKET_PATH_MAX_BYTES}")
        return Listen(path=path)
    host, colon, port = text.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    bracketed = f"[{bare}]" == host
    if not (colon and bare and port.isdecimal()) or (":" in bare) != bracketed:
        at.fail(f"expected HOST:PORT, [IPv6]:PORT or unix:/path, got {text!r}")
    if int(port) not in _PORTS:
        at.fail(f"expected a port of {_PORTS.start} to {_PORTS.stop - 1}, got {port}")
    return Listen(host=bare, port=int(port))


def _check_arguments(arguments: Mapping[str, Any], at: Value, model: ModelSpec) -> None:
    for key in arguments:
        name = key.lstrip("-").replace("-", "_")
        if not key.isidentifier():
            at[key].fail(f"arguments have their Python names: write {name}")
        if key in _REFUSED:
            at[key].fail(f"not an argument of a service: {_REFUSED[key]}")
    for key, reason in _AT_MOST_ONE.items():
        given = arguments.get(key, model.engine.get(key))
        if isinstance(given, int) and given > 1 and arguments:
            at.get(key).fail(f"{key} {given}: {reason}")


def _check_layout(spec: EngineSpec, model: ModelSpec, where: Value) -> None:
    merged = spec.merged(model)
    for key, reason in _AT_MOST_ONE.items():
        if isinstance(merged.get(key), int) and merged[key] > 1:
            where.fail(f"{key} {merged[key]} of model {model.name}: {reason}")
    try:
        ranks = layout_of(merged).local_ranks
    except PlacementError as e:
        where.fail(str(e))
    if model.devices != ["all"] and ranks != len(model.devices):
        where.fail(f"model {model.name} has {len(model.devices)} devices, {needs(merged)}")
