"""`weightcachectl devices`: this machine's GPUs, and devices that the manifest or a socket names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from weightcached.cli.text import columns
from weightcached.config.manifest import ALL, Manifest, load_manifest
from weightcached.errors import ManifestError, RuntimePathError
from weightcached.system.gpus import list_gpus
from weightcached.system.paths import devices_with_socket, is_host_device, manifest_path
from weightcached.system.text import bytes_text

_HEAD = ("DEVICE", "NAME", "MEMORY", "SOCKET", "MODELS")


class DeviceRow(NamedTuple):
    """One device that can have a unit. total_bytes: 0 if unknown."""

    device: str
    name: str
    total_bytes: int
    socket: bool
    models: list[str]


def all_devices() -> tuple[list[DeviceRow], list[str]]:
    """Every device that exists or is named somewhere, and the problems found."""
    problems: list[str] = []
    gpus = {gpu.uuid: gpu for gpu in list_gpus()}
    sockets, manifest = _sockets(problems), _manifest(problems)
    placed = (
        {device for model in manifest.models for device in model.devices if device != ALL}
        if manifest
        else set()
    )
    names = list(gpus) + sorted(
        (placed | sockets) - set(gpus), key=lambda device: (not is_host_device(device), device)
    )
    devices = []
    for name in names:
        gpu = gpus.get(name)
        absent = "host memory" if is_host_device(name) else "not in this machine"
        models = [model.name for model in manifest.on(name)] if manifest else []
        devices.append(
            DeviceRow(
                name,
                gpu.name if gpu else absent,
                gpu.total_bytes if gpu else 0,
                name in sockets,
                models,
            )
        )
    return devices, problems


def _sockets(problems: list[str]) -> set[str]:
    try:
        return set(devices_with_socket())
    except RuntimePathError as e:
        problems.append(str(e))
        return set()


def _manifest(problems: list[str]) -> Manifest | None:
    try:
        return load_manifest(manifest_path())
    except ManifestError as e:
        problems.append(str(e))
        return None


def as_json(devices: Sequence[DeviceRow]) -> dict[str, Any]:
    """The document that `devices --json` prints."""
    return {"devices": [device._asdict() for device in devices]}


def as_table(devices: Sequence[DeviceRow]) -> list[str]:
    """Lines of a table with one row per device."""
    rows = [_HEAD]
    for device in devices:
        memory = bytes_text(device.total_bytes) if device.total_bytes else "-"
        models = ", ".join(device.models) or "-"
        rows.append((device.device, device.name, memory, "yes" if device.socket else "no", models))
    return columns(rows)
