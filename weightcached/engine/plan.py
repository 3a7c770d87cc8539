"""What engines of one version are started with: arguments, interpreter, environment."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weightcached.config.engines import EngineSpec, Listen
from weightcached.config.manifest import ALL, ModelSpec
from weightcached.engine.child import Job
from weightcached.system.paths import is_host_device
from weightcached.system.process import environment_for

log = logging.getLogger(__name__)


@dataclass
class Plan:
    """One version of a service. `kv_cache_bytes` is what an engine of it has measured, 0 before
    one has.
    """

    service: str
    digest: str
    python: str
    listen: Listen
    arguments: dict[str, Any]
    environment: dict[str, str]
    kv_cache_bytes: int = field(default=0)

    def job(self, directory: Path, number: int, *, parked: bool) -> Job:
        """What engine `number` is told."""
        return Job(
            service=self.service,
            number=number,
            directory=str(directory),
            host=self.listen.host,
            port=self.listen.port,
            path=self.listen.path,
            arguments=self.arguments,
            parked=parked,
            kv_cache_bytes=self.kv_cache_bytes,
        )

    def learn(self, facts: dict[str, Any]) -> None:
        """Keep what an engine of this version found out about itself."""
        self.kv_cache_bytes = int(facts.get("kv_cache_bytes", 0)) or self.kv_cache_bytes


def make_plan(spec: EngineSpec, model: ModelSpec, socket_dir: Path | None) -> Plan:
    """The plan for the manifest's entries as they are."""
    arguments = spec.merged(model)
    if socket_dir is not None and arguments["load_format"] in ("ipc_cache", "weightcached"):
        options = dict(arguments.get("model_loader_extra_config") or {})
        if "socket_path" not in options:
            options.setdefault("socket_dir", str(socket_dir))
        arguments["model_loader_extra_config"] = options
    python = model.python or sys.executable
    environment = environment_for(python)
    devices = [device for device in model.devices if device != ALL]
    if devices and not is_host_device(devices[0]):
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    return Plan(
        service=spec.name,
        digest=spec.digest(model),
        python=python,
        listen=spec.listen,
        arguments=arguments,
        environment=environment,
    )
