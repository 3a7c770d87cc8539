"""The start of engines of one version: arguments, interpreter, environment."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weightcached.config.engines import EngineSpec, Listen
from weightcached.config.load_formats import OWN_LOAD_FORMATS
from weightcached.config.manifest import ALL, ModelSpec
from weightcached.errors import HomeError
from weightcached.system.paths import cache_home, is_host_device, make_private
from weightcached.system.process import environment_for
from weightcached.wire.engine_job import Job

log = logging.getLogger(__name__)

# vLLM's own default (0.33).
_UTILIZATION = 0.92
# Facts of a start that the next one can use: the size of the KV cache, and what it was measured with.
_REMEMBERED = ("kv_cache_bytes", "ranks", "vllm", "torch")


@dataclass
class StartPlan:
    """One version of a service.

    usual_share: of engines whose arguments do not say. kv_cache_bytes: measured by one of its
    engines; 0 before.
    """

    service: str
    digest: str
    python: str
    listen: Listen
    arguments: dict[str, Any]
    environment: dict[str, str]
    usual_share: float
    kv_cache_bytes: int = 0
    remembered: dict[str, Any] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """The share of its devices' memory that an awake engine has: its utilization."""
        given = self.arguments.get("gpu_memory_utilization")
        return float(given) if isinstance(given, int | float) else self.usual_share

    def job(self, directory: Path, number: int, *, parked: bool) -> Job:
        """The job of engine `number`."""
        return Job(
            service=self.service,
            number=number,
            digest=self.digest,
            directory=str(directory),
            host=self.listen.host,
            port=self.listen.port,
            path=self.listen.path,
            arguments=self.arguments,
            # Of an executed engine's every line; a forked one has it from its server.
            environment={"VLLM_LOGGING_PREFIX": f"{self.service}/{number} "},
            parked=parked,
            kv_cache_bytes=self.kv_cache_bytes,
            remembered={} if parked else self.remembered,
        )

    def learn(self, facts: dict[str, Any]) -> None:
        """Keep facts that an engine of this version measured.

        They outlive this supervisor if that engine measured the size of its KV cache. One that took a
        known size, or started parked, says nothing new.
        """
        self.kv_cache_bytes = int(facts.get("kv_cache_bytes", 0)) or self.kv_cache_bytes
        if not facts.get("ranks") or not facts.get("kv_cache_bytes"):
            return
        self.remembered = {name: facts.get(name) for name in _REMEMBERED}
        try:
            path = _memory_file(self.service)
            make_private(path.parent)
            part = path.with_name(f".{path.name}.{os.getpid()}")
            part.write_text(json.dumps({"digest": self.digest, "facts": self.remembered}))
            part.replace(path)
        except (OSError, HomeError) as e:
            log.info("service=%s the next start measures again: %s", self.service, e)


def _memory_file(service: str) -> Path:
    return cache_home() / "weightcached/engines" / f"{service}.json"


def _read_facts(service: str, digest: str) -> dict[str, Any]:
    """Facts of the last first start with the same arguments; empty without one."""
    try:
        kept = json.loads(_memory_file(service).read_text(encoding="utf-8"))
        return dict(kept["facts"]) if kept["digest"] == digest else {}
    except (OSError, HomeError, ValueError, KeyError, TypeError):
        return {}


# Arguments that say which weights an engine has, and what a published checkpoint brings along.
_OF_CHECKPOINT = ("model", "tokenizer", "served_model_name")


def with_checkpoint_of(plan: StartPlan, newest: StartPlan) -> StartPlan:
    """The plan with the checkpoint of a newer one, and all else as it is.

    Its digest is the newer one's if nothing else differs.
    """
    arguments = {k: v for k, v in plan.arguments.items() if k not in _OF_CHECKPOINT}
    arguments |= {k: v for k, v in newest.arguments.items() if k in _OF_CHECKPOINT}
    ours, theirs = (p.arguments.get("speculative_config") for p in (plan, newest))
    if isinstance(ours, dict) and isinstance(theirs, dict) and "model" in theirs:
        arguments["speculative_config"] = {**ours, "model": theirs["model"]}
    same = arguments == newest.arguments and plan.environment == newest.environment
    return replace(plan, arguments=arguments, digest=newest.digest if same else plan.digest)


def make_plan(spec: EngineSpec, model: ModelSpec, socket_dir: Path | None) -> StartPlan:
    """The plan for the manifest's entries as they are."""
    arguments = spec.merged(model)
    if socket_dir is not None and arguments["load_format"] in OWN_LOAD_FORMATS:
        options = dict(arguments.get("model_loader_extra_config") or {})
        if "socket_path" not in options:
            options.setdefault("socket_dir", str(socket_dir))
        arguments["model_loader_extra_config"] = options
    python = model.python or sys.executable
    environment = environment_for(python, model.env)
    devices = [device for device in model.devices if device != ALL]
    if devices and not is_host_device(devices[0]):
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    digest = spec.digest(model)
    return StartPlan(
        service=spec.name,
        digest=digest,
        python=python,
        listen=spec.listen,
        arguments=arguments,
        environment=environment,
        # Engines that sleep keep their memory in host memory.
        usual_share=0.0 if is_host_device(model.devices[0]) else _UTILIZATION,
        remembered=_read_facts(spec.name, digest),
    )
