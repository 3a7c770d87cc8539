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
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from weightcached.config.drafts import has_cached_draft
from weightcached.config.located_yaml import Value, read
from weightcached.config.ranks import SIZES, Placement, PlacementError, layout_of, needs
from weightcached.config.rendezvous import SOLO, Rendezvous
from weightcached.config.rendezvous import parse as parse_rendezvous
from weightcached.config.snapshots import SnapshotSpec, parse_snapshots
from weightcached.errors import DeviceError, ManifestError
from weightcached.system.paths import check_device, is_host_device

VERSION = 1
ALL = "all"
ROOT_KEYS = ("version", "models", "snapshots")
MODEL_KEYS = ("name", "devices", "engine", "python", "rendezvous", "identity")
IDENTITY = ("full", "sampled")
LAYOUT_KEYS = SIZES
# The loader would attach to the cache that it is about to fill.
OWN_LOAD_FORMATS = ("ipc_cache", "weightcached")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


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

        It leaves out the name, which belongs to the cache; `identity` and the address of a group,
        which change no loaded byte; and the peers' devices, because only this device's rank counts.
        """
        loaded_from = [
            self.engine,
            self.python,
            "group" if self.rendezvous else SOLO,
            self.rank_of(device),
        ]
        return hashlib.sha256(msgspec.json.encode(loaded_from, order="deterministic")).hexdigest()


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    path: Path
    models: list[ModelSpec]
    snapshots: SnapshotSpec | None = None

    def on(self, device: str) -> list[ModelSpec]:
        """The models placed on `device`, in manifest order."""
        return [model for model in self.models if model.is_on(device)]


def load_manifest(path: Path) -> Manifest:
    """Read and check a manifest. Raises ManifestError for the first fault."""
    root = read(path)
    keys = root.mapping(ROOT_KEYS)
    _check_version(root, keys.get("version"))
    if "models" not in keys:
        root.fail("the key models is missing: expected a list of models")
    entries = keys["models"].items()
    if not entries:
        keys["models"].fail("the list is empty: expected at least one model")
    return Manifest(
        path=path,
        models=_models(entries),
        snapshots=parse_snapshots(keys["snapshots"]) if "snapshots" in keys else None,
    )


def _check_version(root: Value, version: Value | None) -> None:
    if version is None:
        root.fail(f"the key version is missing: write 'version: {VERSION}'")
    if version.kind != "int" or version.plain() != VERSION:
        version.fail(
            f"expected {VERSION}, the only manifest version that this software reads, got {version.described()}"
        )


def _models(entries: list[Value]) -> list[ModelSpec]:
    models: list[ModelSpec] = []
    lines: dict[str, int] = {}
    for entry in entries:
        keys = entry.mapping(MODEL_KEYS)
        model = _model(entry, keys)
        if model.name in lines:
            keys["name"].fail(
                f"the name {model.name!r} is taken by the model on line {lines[model.name]}: choose another"
            )
        lines[model.name] = keys["name"].line
        _check_ports(model, models, keys)
        models.append(model)
    return models


def _check_ports(model: ModelSpec, others: list[ModelSpec], keys: dict[str, Value]) -> None:
    """Loaders of two models may meet at the same time."""
    for other in others:
        if shared := _ports(model) & _ports(other):
            keys["rendezvous"].fail(
                f"port {min(shared)} belongs to a group of {other.name} too: choose another"
            )


def _ports(model: ModelSpec) -> set[int]:
    if model.rendezvous is None:
        return set()
    roles = ("target", "draft") if has_cached_draft(model.engine) else ("target",)
    return {model.rendezvous.port_of(role) for role in roles}


def _model(entry: Value, keys: dict[str, Value]) -> ModelSpec:
    for required in ("name", "devices", "engine"):
        if required not in keys:
            entry.fail(f"the key {required} is missing")
    engine = _engine(keys["engine"])
    devices = _devices(keys["devices"], engine)
    rendezvous = parse_rendezvous(keys["rendezvous"], engine) if "rendezvous" in keys else None
    if rendezvous is not None and devices == [ALL]:
        keys["rendezvous"].fail(
            f"devices: {ALL} gives each device a copy of its own, which has no peers: write solo"
        )
    return ModelSpec(
        name=_name(keys["name"]),
        devices=devices,
        engine=engine,
        python=_python(keys["python"]) if "python" in keys else None,
        rendezvous=rendezvous,
        identity=cast(Literal["full", "sampled"], keys["identity"].one_of(IDENTITY))
        if "identity" in keys
        else "full",
    )


def _name(value: Value) -> str:
    name = value.string()
    if not _NAME.fullmatch(name):
        value.fail(f"expected 1 to 100 letters, digits, dots, dashes or underscores, got {name!r}")
    return name


def _devices(value: Value, engine: dict[str, Any]) -> list[str]:
    needed, layout = layout_of(engine).local_ranks, needs(engine)
    if value.kind == "str":
        return _all_devices(value, value, needed, layout)
    items = value.items()
    if len(items) == 1 and items[0].node.value == ALL:
        return _all_devices(value, items[0], needed, layout)
    devices = _device_list(items)
    if len(devices) != needed:
        value.fail(
            f"{len(devices)} devices are listed, {layout}; 'weightcachectl devices' prints their names"
        )
    return devices


def _all_devices(value: Value, word: Value, needed: int, layout: str) -> list[str]:
    if word.string() != ALL:
        value.fail(
            f"expected a list of devices or {ALL}, got {word.described()}: write [{word.string()}]"
        )
    if needed != 1:
        value.fail(f"{ALL} gives each device a copy of its own, {layout}: list them in rank order")
    return [ALL]


def _device_list(items: list[Value]) -> list[str]:
    devices: list[str] = []
    for item in items:
        device = item.string()
        if device == ALL:
            item.fail(f"{ALL} must stand alone")
        try:
            check_device(device)
        except DeviceError as e:
            item.fail(str(e))
        if device in devices:
            item.fail(
                f"{device} is used twice in this model, first as rank {devices.index(device)}"
            )
        if devices and is_host_device(device) != is_host_device(devices[0]):
            item.fail(
                f"{device} and {devices[0]} are of different kinds: a model is on GPUs or in host memory"
            )
        devices.append(device)
    return devices


def _engine(value: Value) -> dict[str, Any]:
    keys = value.mapping()
    for key, argument in keys.items():
        _check_argument_name(key, argument)
    if "model" not in keys:
        value.fail(
            "the key model is missing: expected a Hub id or the absolute path of a checkpoint"
        )
    _check_model(keys["model"], config_elsewhere="hf_config_path" in keys)
    for key in LAYOUT_KEYS:
        if key in keys:
            keys[key].integer(1)
    if "load_format" in keys and keys["load_format"].plain() in OWN_LOAD_FORMATS:
        keys["load_format"].fail(
            f"{keys['load_format'].described()} would attach to the cache that this entry fills: "
            "remove it here and give it to 'vllm serve' instead"
        )
    engine = cast(dict[str, Any], value.plain())
    try:
        layout_of(engine)
    except PlacementError as e:
        keys.get(e.key, value).fail(f"{e}; then 'weightcachectl plan' shows every rank")
    _check_draft(keys.get("speculative_config"))
    return engine


def _check_argument_name(key: str, argument: Value) -> None:
    name = key.lstrip("-").replace("-", "_")
    if key != name and name.isidentifier():
        argument.fail(f"engine arguments have their Python names: write {name}")
    if not key.isidentifier():
        argument.fail("no engine argument has such a name: expected one like tensor_parallel_size")


def _check_draft(speculative: Value | None) -> None:
    if speculative is None or speculative.kind != "map":
        return
    keys = speculative.mapping()
    load = keys["draft_load_config"].plain() if "draft_load_config" in keys else None
    if isinstance(load, dict) and load.get("load_format") in OWN_LOAD_FORMATS:
        keys["draft_load_config"].fail(
            f"load_format {load['load_format']!r} would attach to the cache that this entry fills: remove it"
        )
    draft = keys.get("model")
    if draft is not None and draft.kind == "str":
        _check_model(draft, config_elsewhere=False)


def _check_model(value: Value, *, config_elsewhere: bool) -> None:
    model = value.string()
    if model.startswith(("~", ".")):
        value.fail(
            f"expected a Hub id or an absolute path, got {model!r}: the daemon runs in another directory"
        )
    if not model.startswith("/"):
        return
    if not Path(model).is_dir():
        value.fail(
            f"{model} {'is not a directory' if os.path.lexists(model) else 'does not exist'}"
        )
    # params.json is how Mistral's own format spells it; vLLM reads both.
    if not config_elsewhere and not any(
        Path(model, name).is_file() for name in ("config.json", "params.json")
    ):
        value.fail(f"{model} has no config.json: expected the directory of a checkpoint")


def _python(value: Value) -> str:
    path = value.string()
    if not path.startswith("/"):
        value.fail(f"expected the absolute path of an interpreter, got {path!r}")
    if not Path(path).is_file() or not os.access(path, os.X_OK):
        value.fail(
            f"{path} is not an executable file: expected the interpreter that runs the engine"
        )
    return path


__all__ = ["Manifest", "ManifestError", "ModelSpec", "load_manifest"]
