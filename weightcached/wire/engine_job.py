"""The supervisor's job for an engine that it starts, and the engine's facts."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The job of one engine. `directory` is its own, in the service's; `listen` is the public
    address as the manifest has it. `parked`: another engine serves, so start without the memory of
    a KV cache if possible. kv_cache_bytes: what an equal engine measured, 0 if unknown.
    `remembered` are facts of the last first start with the same arguments.
    """

    service: str
    number: int
    digest: str
    directory: str
    host: str
    port: int
    path: str
    arguments: dict[str, Any]
    environment: dict[str, str] = {}
    parked: bool = False
    kv_cache_bytes: int = 0
    remembered: dict[str, Any] = {}

    @property
    def fence(self) -> Path:
        return Path(self.directory).parent / "fence"

    @property
    def private_socket(self) -> Path:
        return Path(self.directory) / "http.sock"

    @property
    def control_socket(self) -> Path:
        return Path(self.directory) / "control.sock"

    @property
    def error_file(self) -> Path:
        return Path(self.directory) / "error"


class Activity(msgspec.Struct, frozen=True, kw_only=True):
    """Requests since the engine's start, and those under way now. stopped: it is asleep or
    paused, by a call of vLLM's own.
    """

    requests: int
    active: int
    stopped: bool = False


def say_error(path: Path, error: BaseException) -> None:
    """Keep the reason of the end for the supervisor. The first one said counts: it is the cause."""
    text = str(error) if str(error) else type(error).__name__
    with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:
        file.write(text)
