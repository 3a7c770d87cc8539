"""The model manifest: which models on which devices. YAML in, typed objects out; errors name file, line and key."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from weightcached.errors import ManifestError


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the manifest. `devices` are in local-rank order, or ["all"]; `engine` are vLLM engine arguments."""

    name: str
    devices: list[str]
    engine: dict[str, Any]
    python: str | None = None
    rendezvous: str = "solo"
    identity: Literal["full", "sampled"] = "full"

    def rank_of(self, device: str) -> int:
        """The local rank on `device`; 0 on each where the model is on all."""
        return 0 if self.devices == ["all"] else self.devices.index(device)

    def digest(self, device: str) -> str:
        """Names what a generation on `device` was loaded from; changes with anything that changes the load."""
        loaded_from = [self.engine, self.python, self.rendezvous, self.rank_of(device)]
        return hashlib.sha256(msgspec.json.encode(loaded_from, order="deterministic")).hexdigest()


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    path: Path
    models: list[ModelSpec]

    def on(self, device: str) -> list[ModelSpec]:
        """The models placed on `device`, in manifest order."""
        return [m for m in self.models if m.devices == ["all"] or device in m.devices]


def load_manifest(path: Path) -> Manifest:
    """Read and check a manifest. Raises ManifestError for the first fault."""
    try:
        root = yaml.safe_load(path.read_text())
        return Manifest(path=path, models=msgspec.convert(root["models"], list[ModelSpec]))
    except (OSError, yaml.YAMLError, msgspec.ValidationError, KeyError, TypeError) as e:
        raise ManifestError(f"{path}: {e}") from e
