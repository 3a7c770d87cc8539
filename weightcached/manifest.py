"""The model manifest: which models on which devices. YAML in, typed objects out; errors name file, line and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the manifest. `devices` are in local-rank order, or ["all"]; `engine` are vLLM engine arguments."""

    name: str
    devices: list[str]
    engine: dict[str, Any]
    python: str | None = None
    rendezvous: str = "solo"
    identity: Literal["full", "sampled"] = "full"

    def digest(self, device: str) -> str:
        """Names what a generation on `device` was loaded from; changes with anything that changes the load."""
        raise NotImplementedError


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    path: Path
    models: list[ModelSpec]

    def on(self, device: str) -> list[ModelSpec]:
        """The models placed on `device`, in manifest order."""
        raise NotImplementedError


def load_manifest(path: Path) -> Manifest:
    """Read and check a manifest. Raises ManifestError for the first fault."""
    raise NotImplementedError
