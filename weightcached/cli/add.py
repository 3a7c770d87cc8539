"""`weightcachectl add`: a command line of `vllm serve` to an entry of the manifest, and to the command
that attaches.

vLLM's own parser reads the arguments, in a child that the engine's interpreter runs: what is written
is what vLLM will take, and this process imports no vLLM.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weightcached.cli import edit
from weightcached.cli.status import ask_all
from weightcached.config.load_formats import OWN_LOAD_FORMATS
from weightcached.config.manifest import ALL, check_checkpoint
from weightcached.errors import (
    EXIT_USAGE,
    ArgumentError,
    CheckpointMissingError,
    DeviceError,
    ManifestError,
    RuntimePathError,
)
from weightcached.preload.launcher import local_devices, make_absolute, model_name
from weightcached.system.gpus import list_gpus, visible_gpus
from weightcached.system.paths import devices_with_socket, is_host_device, socket_path
from weightcached.system.process import environment_for
from weightcached.wire.messages import StatusReply

# vLLM is imported from a cold disk.
PARSE_TIMEOUT_S = 600.0
PARSER = ("-m", "weightcached.vllm_compat.arguments")


def entry_of(
    model: str, arguments: Sequence[str], *, name: str | None, devices: Sequence[str], python: str | None
) -> dict[str, Any]:  # fmt: skip
    """The entry of `models:`. Raises ArgumentError, DeviceError and PlacementError."""
    found = make_absolute(os.path.expanduser(model))
    engine = {"model": found, **_parsed(arguments, python or sys.executable)}
    if engine["model"] != found:
        raise ArgumentError(f"two models are named, {model} and {engine['model']}: name one")
    speculative = engine.get("speculative_config")
    if isinstance(speculative, dict) and isinstance(speculative.get("model"), str):
        engine["speculative_config"] = {**speculative, "model": make_absolute(speculative["model"])}
    if engine.get("load_format") in OWN_LOAD_FORMATS:
        raise ArgumentError(
            f"--load-format {engine['load_format']} belongs to the engine, not to its weights: leave it out; "
            "the command that this one prints has it"
        )
    try:
        check_checkpoint(engine)
    except CheckpointMissingError as e:
        raise ArgumentError(str(e)) from e
    placed: str | list[str] = list(devices) or local_devices(engine, os.environ)
    entry: dict[str, Any] = {
        "name": name or model_name(found),
        "devices": ALL if placed == [ALL] else placed,
        "engine": engine,
    }
    return entry | ({"python": os.path.abspath(python)} if python else {})


def _parsed(arguments: Sequence[str], python: str) -> dict[str, Any]:
    """vLLM's engine arguments by their Python names. Raises ArgumentError."""
    if not arguments:
        return {}
    try:
        done = subprocess.run(
            [python, *PARSER, *arguments], capture_output=True, text=True, timeout=PARSE_TIMEOUT_S, check=False,
            env={"VLLM_LOGGING_LEVEL": "ERROR", **environment_for(python)},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as e:
        raise ArgumentError(
            f"vLLM's parser cannot be asked: {e}: name the engine's interpreter with --python"
        ) from e
    if done.returncode == 0:
        parsed: dict[str, Any] = json.loads(done.stdout)
        return parsed
    said = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
    if done.returncode == EXIT_USAGE:
        raise ArgumentError(
            f"vLLM refuses the arguments: {said[0].rpartition('error: ')[2]}; "
            "arguments of the server, such as --port, belong to 'vllm serve' alone"
        )
    raise ArgumentError(
        f"{python} cannot run vLLM's parser: {said[0]}: name the engine's interpreter with --python"
    )


def check_new(path: Path, name: str) -> None:
    """Require that no model has this name. Raises ManifestError, also for a manifest that is wrong."""
    manifest = edit.current(path)
    if manifest and any(model.name == name for model in manifest.models):
        raise ManifestError(
            f"{path} has a model {name} already: 'weightcachectl remove {name}' first, or choose another --name"
        )


def name_of(model: str) -> str:
    """The name of an entry that got none: the last part of a path or Hub id."""
    return model_name(make_absolute(os.path.expanduser(model)))


def serve_command(entry: Mapping[str, Any], arguments: Sequence[str]) -> str:
    """The command of an engine that attaches, with the arguments as they were given."""
    devices, python = entry["devices"], entry.get("python")
    vllm = str(Path(python).with_name("vllm")) if python else "vllm"
    words = [vllm, "serve", entry["engine"]["model"], *arguments]
    words += ["--load-format", OWN_LOAD_FORMATS[0]]
    if devices == ALL:
        return shlex.join(words)
    if is_host_device(devices[0]):
        # Worker N of an engine on the CPU asks cpuN.
        slots = [f"cpu{number}" for number in range(len(devices))]
        if devices != slots:
            if len(devices) > 1:
                raise DeviceError(
                    f"the workers of an engine on the CPU ask {', '.join(slots)}: name these devices, in this order"
                )
            extra = {"socket_path": str(socket_path(devices[0]))}
            words += ["--model-loader-extra-config", json.dumps(extra)]
        return shlex.join(words)
    return _gpus_shown(devices, os.environ) + shlex.join(words)


def daemons(devices: str | Sequence[str], engine: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """A model's devices whose daemon answers, and those without one."""
    answering = [reply.device for reply in _replies()]
    if devices in (ALL, [ALL]):
        return answering, [] if answering else local_devices(engine, os.environ)
    return [d for d in devices if d in answering], [d for d in devices if d not in answering]


def holders(model: str) -> list[str]:
    """The devices whose daemon has caches of this model, in whatever state."""
    return [
        reply.device
        for reply in _replies()
        if any(cache.name.rpartition("/")[0] == model for cache in reply.caches)
    ]


def _replies() -> list[StatusReply]:
    try:
        sockets = devices_with_socket()
    except RuntimePathError:
        # 'weightcachectl start', which is next, tells it.
        return []
    return ask_all(sockets).replies


def _gpus_shown(devices: Sequence[str], environ: Mapping[str, str]) -> str:
    """`CUDA_VISIBLE_DEVICES=… ` if an engine started from here would take other GPUs."""
    visible = visible_gpus(list_gpus(), environ.get("CUDA_VISIBLE_DEVICES"))
    if visible[: len(devices)] == list(devices):
        return ""
    return f"CUDA_VISIBLE_DEVICES={','.join(devices)} "
