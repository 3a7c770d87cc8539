"""The model manifest: which models on which devices. YAML in, typed objects out; errors name file,
line and key.

Checked here is all that needs no vLLM. Whether vLLM knows an engine argument is checked by the
loader child, which runs the interpreter of the engine. docs/manifest.md describes every key for the
operator.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from weightcached.config import rendezvous
from weightcached.config.drafts import has_cached_draft
from weightcached.config.engines import EngineEntry, EngineSpec, resolve_engines
from weightcached.config.load_formats import OWN_LOAD_FORMATS
from weightcached.config.located_yaml import Name, Text, Value, read
from weightcached.config.published import counts, read_published, with_published
from weightcached.config.ranks import SIZES, Placement, layout_of, needs
from weightcached.config.rendezvous import SOLO, Rendezvous
from weightcached.config.sizes import SizeText, nbytes_of
from weightcached.config.snapshots import SnapshotsEntry, SnapshotSpec, resolve_snapshots
from weightcached.errors import CheckpointMissingError, DeviceError, ManifestError, PlacementError
from weightcached.system.notify import FOR_THIS_PROCESS
from weightcached.system.paths import check_device, is_host_device

VERSION = 1
ALL = "all"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
Size = Annotated[int, Meta(ge=1)]
Residence = Literal["always", "on-demand"]
OnSwap = Literal["drain", "abort"]
_BUDGET = "bytes or a size such as 40 GiB"
_Bytes: Any = Annotated[Size | SizeText, Meta(description=_BUDGET)]


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the manifest.

    devices: in local-rank order, or ["all"]; engine: vLLM engine arguments.
    """

    name: str
    devices: list[str]
    engine: dict[str, Any]
    python: str | None = None
    rendezvous: Rendezvous | None = None
    identity: Literal["full", "sampled"] = "full"
    # Variables of the loader's environment besides the daemon's.
    env: dict[str, str] = {}
    resident: Residence = "always"
    # Seconds without an engine after which an on-demand model is evicted; 0: never for that.
    idle_evict_s: float = 0.0
    # Whether running engines get its new generations, and what becomes of requests under way.
    live: bool = False
    on_swap: OnSwap = "drain"
    # Of a published checkpoint.
    label: str = ""

    @property
    def on_demand(self) -> bool:
        """Whether it is loaded when an engine asks for it, and may make room for others."""
        return self.resident == "on-demand"

    def is_on(self, device: str) -> bool:
        """Whether a rank of this model is placed on `device`."""
        return self.devices == [ALL] or device in self.devices

    def rank_of(self, device: str) -> int:
        """The local rank on `device`; always 0 if the model is on all devices.

        Raises DeviceError if the model is not on it.
        """
        if not self.is_on(device):
            raise DeviceError(
                f"model {self.name!r} is not on {device}: its devices are {', '.join(self.devices)}"
            )
        return 0 if self.devices == [ALL] else self.devices.index(device)

    def placement_of(self, device: str) -> Placement:
        """The ranks that `device` serves. Raises DeviceError if the model is not on it."""
        return layout_of(self.engine).place(self.rank_of(device))

    def digest(self, device: str) -> str:
        """Identifies the entry that a generation on `device` is loaded from, as hex sha256. Changes
        with everything that changes the load.

        It leaves out the name, which belongs to the cache; `identity`, residence and the address of
        a group, which change no loaded byte; and the peers' devices, because only this device's
        rank counts.
        """
        loaded_from = [
            self.engine,
            self.python,
            "group" if self.rendezvous else SOLO,
            self.rank_of(device),
        ]
        if self.env:
            loaded_from.append(self.env)
        return hashlib.sha256(msgspec.json.encode(loaded_from, order="deterministic")).hexdigest()


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    path: Path
    models: list[ModelSpec]
    engines: list[EngineSpec] = []
    snapshots: SnapshotSpec | None = None
    # Bytes by device; ALL stands for every device that is not named.
    budgets: dict[str, int] = {}

    def budget_of(self, device: str) -> int:
        """The most bytes of weights that the device's daemon holds; 0 for no limit."""
        return self.budgets.get(device, self.budgets.get(ALL, 0))

    def on(self, device: str) -> list[ModelSpec]:
        """The models placed on `device`, in manifest order."""
        return [model for model in self.models if model.is_on(device)]

    def service(self, name: str) -> tuple[EngineSpec, ModelSpec]:
        """The engine service called `name`, and its model. Raises ManifestError without one."""
        for engine in self.engines:
            if engine.name == name:
                return engine, next(m for m in self.models if m.name == engine.model)
        known = ", ".join(engine.name for engine in self.engines) or "none"
        raise ManifestError(f"{self.path}: no engine {name!r} under engines: (there: {known})")


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of `models:`, as it is written."""

    name: Name
    devices: Annotated[list[Text] | Text, Meta(description=f"a list of devices or {ALL}")]
    engine: dict[str, Any]
    python: Text | None = None
    rendezvous: rendezvous.Entry = "solo"
    identity: Literal["full", "sampled"] = "full"
    env: dict[str, Any] = {}
    resident: Residence = "always"
    idle_evict_s: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="a number of seconds above 0")
    ] = None
    live: bool = False
    on_swap: OnSwap = "drain"


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The manifest, as it is written."""

    version: Literal[1]
    models: Annotated[list[ModelEntry], Meta(min_length=1, description="a list of models")]
    engines: list[EngineEntry] = []
    snapshots: SnapshotsEntry | None = None
    budget: Annotated[
        Size | SizeText | dict[str, Any] | None,
        Meta(description=f"{_BUDGET}, or a mapping from devices to such sizes"),
    ] = None


def load_manifest(path: Path) -> Manifest:
    """Read and check a manifest. Raises ManifestError for the first fault."""
    root = read(path)
    keys = root.mapping()
    if "version" not in keys:
        root.fail(f"the key version is missing: write 'version: {VERSION}'")
    _check_version(keys["version"])
    document = root.convert(Document)
    models = _with_published(path, _models(document.models, keys["models"]))
    engines = resolve_engines(document.engines, keys["engines"], models) if document.engines else []
    entry = document.snapshots
    snapshots = None if entry is None else resolve_snapshots(entry, keys["snapshots"])
    budgets = {} if document.budget is None else _budgets(document.budget, keys["budget"])
    return Manifest(path=path, models=models, engines=engines, snapshots=snapshots, budgets=budgets)


def _with_published(path: Path, models: list[ModelSpec]) -> list[ModelSpec]:
    published = read_published(path)
    found: list[ModelSpec] = []
    for model in models:
        entry = published.get(model.name)
        engine = with_published(model.engine, entry)
        label = entry.label if entry is not None and counts(entry, model.engine) else ""
        found.append(msgspec.structs.replace(model, engine=engine, label=label))
    return found


def _check_version(version: Value) -> None:
    if version.kind != "int" or version.plain() != VERSION:
        version.fail(
            f"expected {VERSION}, the only manifest version that this software reads, got {version.described()}"
        )


def _budgets(budget: int | str | dict[str, Any], at: Value) -> dict[str, int]:
    if not isinstance(budget, dict):
        return {ALL: nbytes_of(budget)}
    for device, value in at.mapping().items():
        try:
            if device != ALL:
                check_device(device)
        except DeviceError as e:
            value.fail(str(e))
    return {device: nbytes_of(at[device].convert(_Bytes)) for device in budget}


def _models(entries: list[ModelEntry], value: Value) -> list[ModelSpec]:
    models: list[ModelSpec] = []
    lines: dict[str, int] = {}
    for entry, at in zip(entries, value.items(), strict=True):
        model = _model(entry, at)
        if model.name in lines:
            at["name"].fail(
                f"the name {model.name!r} is taken by the model on line {lines[model.name]}: choose another"
            )
        lines[model.name] = at["name"].line
        _check_ports(model, models, at)
        models.append(model)
    return models


def _check_ports(model: ModelSpec, others: list[ModelSpec], at: Value) -> None:
    """Loaders of two models may meet at the same time."""
    for other in others:
        if shared := _ports(model) & _ports(other):
            at["rendezvous"].fail(
                f"port {min(shared)} belongs to a group of {other.name} too: choose another"
            )


def _ports(model: ModelSpec) -> set[int]:
    if model.rendezvous is None:
        return set()
    roles = ("target", "draft") if has_cached_draft(model.engine) else ("target",)
    return {model.rendezvous.port_of(role) for role in roles}


def _model(entry: ModelEntry, at: Value) -> ModelSpec:
    _check_engine(entry.engine, at["engine"])
    devices = _devices(entry, at["devices"])
    meeting = rendezvous.resolve(entry.rendezvous, at.get("rendezvous"), entry.engine)
    if meeting is not None and devices == [ALL]:
        at["rendezvous"].fail(
            f"devices: {ALL} gives each device a copy of its own, which has no peers: write solo"
        )
    if entry.idle_evict_s is not None and entry.resident == "always":
        at["idle_evict_s"].fail(
            "a model that is always resident is not evicted: add 'resident: on-demand'"
        )
    if entry.python is not None:
        _check_python(entry.python, at["python"])
    return ModelSpec(
        name=entry.name,
        devices=devices,
        engine=entry.engine,
        python=entry.python,
        rendezvous=meeting,
        identity=entry.identity,
        env={name: _variable(name, at["env"][name]) for name in entry.env},
        resident=entry.resident,
        idle_evict_s=entry.idle_evict_s or 0.0,
        live=entry.live,
        on_swap=entry.on_swap,
    )


def _devices(entry: ModelEntry, at: Value) -> list[str]:
    needed, layout = layout_of(entry.engine).local_ranks, needs(entry.engine)
    if isinstance(entry.devices, str) and entry.devices != ALL:
        at.fail(
            f"expected a list of devices or {ALL}, got {at.described()}: write [{entry.devices}]"
        )
    if entry.devices in (ALL, [ALL]):
        if needed != 1:
            at.fail(f"{ALL} gives each device a copy of its own, {layout}: list them in rank order")
        return [ALL]
    devices = list(entry.devices)
    for rank, device in enumerate(devices):
        _check_device(devices, rank, device, at[rank])
    if len(devices) != needed:
        at.fail(
            f"{len(devices)} devices are listed, {layout}; 'weightcachectl devices' prints their names"
        )
    return devices


def _check_device(devices: list[str], rank: int, device: str, at: Value) -> None:
    if device == ALL:
        at.fail(f"{ALL} must stand alone")
    try:
        check_device(device)
    except DeviceError as e:
        at.fail(str(e))
    first = devices.index(device)
    if first < rank:
        at.fail(f"{device} is used twice in this model, first as rank {first}")
    if is_host_device(device) != is_host_device(devices[0]):
        at.fail(
            f"{device} and {devices[0]} are of different kinds: a model is on GPUs or in host memory"
        )


def _check_engine(engine: dict[str, Any], at: Value) -> None:
    for key in engine:
        _check_argument_name(key, at[key])
    if "model" not in engine:
        at.fail("the key model is missing: expected a Hub id or the absolute path of a checkpoint")
    _check_model(at["model"].convert(Text), at["model"])
    for key in SIZES:
        if key in engine:
            at[key].convert(Size)
    if engine.get("load_format") in OWN_LOAD_FORMATS:
        at["load_format"].fail(
            f"{at['load_format'].described()} would attach to the cache that this entry fills: "
            "remove it here and give it to 'vllm serve' instead"
        )
    try:
        layout_of(engine)
    except PlacementError as e:
        at.get(e.key).fail(f"{e}; then 'weightcachectl plan' shows every rank")
    _check_draft(engine.get("speculative_config"), at.get("speculative_config"))


def _check_argument_name(key: str, argument: Value) -> None:
    name = key.lstrip("-").replace("-", "_")
    if key != name and name.isidentifier():
        argument.fail(f"engine arguments have their Python names: write {name}")
    if not key.isidentifier():
        argument.fail("no engine argument has such a name: expected one like tensor_parallel_size")


def _check_draft(speculative: Any, at: Value) -> None:
    if not isinstance(speculative, dict):
        return
    load = speculative.get("draft_load_config")
    if isinstance(load, dict) and load.get("load_format") in OWN_LOAD_FORMATS:
        at["draft_load_config"].fail(
            f"load_format {load['load_format']!r} would attach to the cache that this entry fills: remove it"
        )
    draft = speculative.get("model")
    if isinstance(draft, str):
        _check_model(draft, at["model"])


def _check_model(model: str, at: Value) -> None:
    if model.startswith(("~", ".")):
        at.fail(
            f"expected a Hub id or an absolute path, got {model!r}: the daemon runs in another directory"
        )


def check_checkpoint(engine: Mapping[str, Any]) -> None:
    """Require that the directories that a model names are there.

    Not a part of load_manifest(): a mount that is late is this model's fault alone. Raises
    CheckpointMissingError.
    """
    _check_directory(engine["model"], config_elsewhere="hf_config_path" in engine)
    speculative = engine.get("speculative_config")
    if isinstance(speculative, dict) and isinstance(speculative.get("model"), str):
        _check_directory(speculative["model"], config_elsewhere=False)


def _check_directory(model: str, *, config_elsewhere: bool) -> None:
    if not model.startswith("/"):
        return
    if not Path(model).is_dir():
        raise CheckpointMissingError(
            f"model {model} {'is not a directory' if os.path.lexists(model) else 'does not exist'}: "
            "mount or download it, or name another"
        )
    # params.json is how Mistral's own format spells it; vLLM reads both.
    if not config_elsewhere and not any(
        Path(model, name).is_file() for name in ("config.json", "params.json")
    ):
        raise CheckpointMissingError(
            f"model {model} has no config.json: expected the directory of a checkpoint"
        )


def _check_python(path: str, at: Value) -> None:
    if not path.startswith("/"):
        at.fail(f"expected the absolute path of an interpreter, got {path!r}")


def _variable(name: str, at: Value) -> str:
    if not _VARIABLE.fullmatch(name):
        at.fail("no environment variable has such a name: expected one like VLLM_USE_DEEP_GEMM")
    if name in FOR_THIS_PROCESS:
        at.fail(f"{name} is between the service manager and the daemon: remove it")
    if name == "CUDA_VISIBLE_DEVICES":
        at.fail("a loader sees the device that it loads for, and no other: use devices")
    if at.kind != "str":
        at.fail(f"expected a string, got {at.described()}: quote it")
    return str(at.plain())


__all__ = [
    "EngineSpec",
    "Manifest",
    "ManifestError",
    "ModelSpec",
    "check_checkpoint",
    "load_manifest",
]
