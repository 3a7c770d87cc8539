"""`weightcached preload`: the daemons of one model without systemd, one child for each device of
this node.

The engine arguments go through vLLM's own parser, in a child; this process stays free of torch. It
stands in for the service manager (notify_server.py): a daemon that dies later is started again and
takes its descriptors back.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
import sdnotify

from weightcached.config.load_formats import OWN_LOAD_FORMATS
from weightcached.config.ranks import layout_of, needs
from weightcached.errors import (
    EXIT_CONFIG,
    EXIT_FAILURE,
    DeviceError,
    PreloadError,
)
from weightcached.preload.notify_server import NotifyServer
from weightcached.preload.spawn import Process, spawn
from weightcached.system.fds import OwnedFd
from weightcached.system.gpus import list_gpus, visible_gpus
from weightcached.system.paths import create_runtime_dir, runtime_dir, socket_path
from weightcached.system.process import environment_for, signal_name
from weightcached.system.waits import end_tasks, first_of

log = logging.getLogger(__name__)

# As in the unit: a daemon has 30 s to end, and ten deaths in half an hour are the end.
STOP_TIMEOUT_S = 30.0
MAX_DEATHS = 10
DEATHS_WINDOW_S = 1800.0
RESTART_S = 0.2
_DEFAULT_MASTER_PORT = 29501


@dataclass(frozen=True)
class PreloadOptions:
    """The command line; `arguments` are vLLM's. The two commands are for tests."""

    arguments: Sequence[str]
    socket_dir: Path | None = None
    master_port: int | None = None
    draft_master_port: int | None = None
    health_port: int | None = None
    health_host: str = "127.0.0.1"
    snapshots: Path | None = None
    loader_command: str | None = None
    parser_command: Sequence[str] | None = None


def run(options: PreloadOptions) -> int:
    """Serve until told to stop. Returns the exit status.

    Raises WeightcachedError before anything has started.
    """
    return asyncio.run(_run(options))


async def _run(options: PreloadOptions) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    parsed = await _engine_arguments(options, stop)
    if parsed.engine is None:
        return 0 if stop.is_set() else parsed.status
    engine = _check_arguments(parsed.engine, options)
    devices = local_devices(engine, os.environ)
    directory = options.socket_dir.absolute() if options.socket_dir else runtime_dir()
    create_runtime_dir(directory)
    with _private_dir(directory) as private:
        manifest = private / "manifest.yaml"
        # JSON is YAML.
        document: dict[str, Any] = {"version": 1, "models": [_manifest_entry(engine, devices)]}
        if options.snapshots is not None:
            document["snapshots"] = {"dir": str(options.snapshots.absolute())}
        manifest.write_bytes(msgspec.json.encode(document))
        return await Command(
            options, _manifest_entry(engine, devices)["name"], devices, directory, private
        ).run(stop)


# ---- the model and its devices


class _Parsed(NamedTuple):
    engine: dict[str, Any] | None
    status: int


async def _engine_arguments(options: PreloadOptions, stop: asyncio.Event) -> _Parsed:
    """Have vLLM parse its arguments. It prints its own errors, and its help."""
    command = [
        *(options.parser_command or (sys.executable, "-m", "weightcached.vllm_compat.arguments")),
        *options.arguments,
    ]
    # Its information lines would hide the one line that matters here.
    env = {"VLLM_LOGGING_LEVEL": "ERROR", **environment_for(command[0])}
    with OwnedFd(os.memfd_create("weightcached-arguments", os.MFD_CLOEXEC)) as answer:
        child = spawn(command, env=env, stdout=answer.fileno())
        status = await _wait_or_kill(child, stop)
        data = os.pread(answer.fileno(), os.fstat(answer.fileno()).st_size, 0)
    if stop.is_set() or status != 0:
        return _Parsed(None, _exit_status(status))
    try:
        return _Parsed(msgspec.json.decode(data, type=dict[str, Any]), 0)
    except msgspec.DecodeError:
        # --help, which vLLM answers itself.
        sys.stdout.buffer.write(data)
        return _Parsed(None, 0)


async def _wait_or_kill(child: Process, stop: asyncio.Event) -> int:
    """The exit status of `child`, which is killed when it is time to stop."""
    waiting = asyncio.create_task(child.wait())
    await first_of(waiting, stop.wait())
    if not waiting.done():
        child.signal(signal.SIGKILL)
    return await waiting


def _check_arguments(engine: dict[str, Any], options: PreloadOptions) -> dict[str, Any]:
    """The arguments as a manifest can hold them. Raises PreloadError, PlacementError."""
    if not engine.get("model"):
        raise PreloadError("--model is missing: expected a Hub id or the directory of a checkpoint")
    if engine.get("load_format") in OWN_LOAD_FORMATS:
        raise PreloadError(
            f"--load-format {engine['load_format']} would attach to the cache that this command fills: "
            "leave it out here and give it to 'vllm serve'"
        )
    _check_ports(engine, options)
    layout_of(engine)
    found = dict(engine)
    found["model"] = make_absolute(engine["model"])
    speculative = engine.get("speculative_config")
    if isinstance(speculative, dict) and isinstance(speculative.get("model"), str):
        found["speculative_config"] = {**speculative, "model": make_absolute(speculative["model"])}
    return found


def _check_ports(engine: dict[str, Any], options: PreloadOptions) -> None:
    """Refuse ports that could not work in a group, although ranks load alone."""
    master, draft = options.master_port, options.draft_master_port
    if master is not None and master == draft:
        raise PreloadError(
            f"--weight-cache-draft-master-port {draft} is the target's port too: choose another"
        )
    engine_port = engine.get("master_port", _DEFAULT_MASTER_PORT)
    for option, port in (
        ("--weight-cache-master-port", master),
        ("--weight-cache-draft-master-port", draft),
    ):
        if port is not None and port == engine_port:
            raise PreloadError(f"{option} {port} is the engine's --master-port too: choose another")


def make_absolute(model: str) -> str:
    """A path for a daemon, which runs in another directory; a Hub id as it is."""
    return os.path.abspath(model) if os.path.isdir(model) else model


def local_devices(engine: Mapping[str, Any], environ: Mapping[str, str]) -> list[str]:
    """The devices of this node's ranks, in local-rank order. Raises DeviceError if there are too
    few.

    On a machine with GPUs: those that CUDA_VISIBLE_DEVICES shows, in its order; else slots of host
    memory.
    """
    count = layout_of(engine).local_ranks
    gpus = list_gpus()
    if not gpus or environ.get("CUDA_VISIBLE_DEVICES") == "":
        return [f"cpu{number}" for number in range(count)]
    visible = visible_gpus(gpus, environ.get("CUDA_VISIBLE_DEVICES"))
    if len(visible) < count:
        raise DeviceError(f"{needs(engine)}, {len(visible)} GPUs are visible: {', '.join(visible)}")
    return visible[:count]


def _manifest_entry(engine: dict[str, Any], devices: list[str]) -> dict[str, Any]:
    return {"name": model_name(engine["model"]), "devices": devices, "engine": engine}


def model_name(model: str) -> str:
    """A name for the manifest: the last part of a path or Hub id."""
    last = model.rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._-]", "-", last)[:100] or "model"


@contextlib.contextmanager
def _private_dir(directory: Path) -> Iterator[Path]:
    """A directory of this command alone; removes those that killed commands left behind."""
    for old in directory.glob("preload-*"):
        with contextlib.suppress(OSError), _hold_lock(old):
            shutil.rmtree(old)
    path = Path(tempfile.mkdtemp(prefix="preload-", dir=directory))
    with _hold_lock(path):
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


# ---- the children


class Member:
    """One child that is kept running, and its stand-in manager."""

    def __init__(self, name: str, command: Sequence[str], notify_server: NotifyServer) -> None:
        self.name = name
        self.notify_server = notify_server
        self._command = command
        self._process: Process | None = None
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)

    async def keep(self, all_ready: asyncio.Event) -> int:
        """Keep it running. Returns the exit status of a death in start-up, or of one too many."""
        while True:
            self._process = spawn(
                self._command,
                env=environment_for(
                    self._command[0], {"NOTIFY_SOCKET": self.notify_server.address}
                ),
                listen=self.notify_server.kept,
            )
            status = await self._process.wait()
            # Read its last messages too: its successor adopts a descriptor that it stored in them.
            self.notify_server.drain()
            log.error(
                "%s ended pid=%d status=%s", self.name, self._process.pid, _describe_status(status)
            )
            if not all_ready.is_set() or status == EXIT_CONFIG or self._dies_too_often():
                return status
            await asyncio.sleep(RESTART_S)
            log.warning(
                "%s is started again, with %d descriptors", self.name, len(self.notify_server.kept)
            )

    def _dies_too_often(self) -> bool:
        self._deaths.append(time.monotonic())
        return (
            len(self._deaths) == MAX_DEATHS and self._deaths[-1] - self._deaths[0] < DEATHS_WINDOW_S
        )

    async def stop(self) -> None:
        """End it, and free its kept descriptors. keep() must have been cancelled."""
        if self._process is not None:
            self._process.signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                log.error("%s does not end, killing it pid=%d", self.name, self._process.pid)
                self._process.signal(signal.SIGKILL)
                await self._process.wait()
        self.notify_server.close()


class Command:
    """All children of one command, from the first start to the last end."""

    def __init__(
        self,
        options: PreloadOptions,
        model: str,
        devices: list[str],
        directory: Path,
        private: Path,
    ) -> None:
        self._model = model
        self._devices = devices
        self._directory = directory
        self._sockets = [socket_path(device, directory) for device in devices]
        common = ["--manifest", str(private / "manifest.yaml"), "--socket-dir", str(directory)]
        loader = ["--loader-command", options.loader_command] if options.loader_command else []
        self._members = [
            Member(
                f"daemon of {device}",
                # Somebody waits for this command, and has its exit status.
                [
                    sys.executable,
                    "-m",
                    "weightcached",
                    "serve",
                    device,
                    *common,
                    *loader,
                    "--no-retry",
                ],
                NotifyServer(private / str(number)),
            )
            for number, device in enumerate(devices)
        ]
        if options.health_port is not None:
            address = ["--host", options.health_host, "--port", str(options.health_port)]
            command = [sys.executable, "-m", "weightcached", "exporter", *common, *address]
            self._members.append(
                Member("health endpoint", command, NotifyServer(private / "health"))
            )

    async def run(self, stop: asyncio.Event) -> int:
        """Serve until `stop` or until a child is beyond help. Returns the exit status."""
        all_ready = asyncio.Event()
        keeping = [asyncio.create_task(member.keep(all_ready)) for member in self._members]
        try:
            await first_of(stop.wait(), self._until_ready(), *keeping)
            if not stop.is_set() and not any(task.done() for task in keeping):
                all_ready.set()
                self._say_ready()
                await first_of(stop.wait(), *keeping)
            ended = [task.result() for task in keeping if task.done()]
            return 0 if stop.is_set() else _exit_status(ended[0])
        finally:
            await end_tasks(*keeping)
            await asyncio.gather(*(member.stop() for member in self._members))
            self._remove_sockets()

    async def _until_ready(self) -> None:
        for member in self._members:
            await member.notify_server.ready.wait()

    def _say_ready(self) -> None:
        ranks = f"{len(self._devices)} rank{'s' if len(self._devices) > 1 else ''}"
        click.echo(
            f"READY {self._model}: {ranks} on {', '.join(self._devices)}, sockets in {self._directory}"
        )
        # To a manager above, such as that of a container; without one this does nothing.
        sdnotify.SystemdNotifier().notify("READY=1")

    def _remove_sockets(self) -> None:
        """Remove the socket of a killed daemon, unless another daemon holds the lock."""
        for path in self._sockets:
            with contextlib.suppress(OSError), open(path.with_suffix(".lock"), "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)


def _exit_status(status: int) -> int:
    """The exit status of a shell for this child's end; never success."""
    return 128 - status if status < 0 else status or EXIT_FAILURE


def _describe_status(status: int) -> str:
    return signal_name(-status) if status < 0 else str(status)
