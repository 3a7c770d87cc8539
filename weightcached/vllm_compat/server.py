"""vLLM's API server as an engine of a service: everything of vLLM that engine/child.py needs.

vLLM builds its HTTP application and serves it in one call that blocks, so the engine serves on a
private Unix socket from its start. The public socket is one more socket of the same server.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import logging
import os
import socket
import time
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator
from multiprocessing import util
from pathlib import Path
from typing import Any
from unittest import mock

from weightcached.config.load_formats import OWN_LOAD_FORMATS
from weightcached.errors import EngineError
from weightcached.system.process import holds_file
from weightcached.vllm_compat import first_start, live, parked_start, serve_arguments
from weightcached.wire.engine_job import Activity, Job, say_error

log = logging.getLogger("vllm.weightcached")

_CLOSE = (b"connection", b"close")
_POLL_S = 0.005
# vLLM's names. pause_generation() would answer new requests with an error.
_PAUSE_MODES = {"drain": "wait", "abort": "abort"}
# Modules that a GPU engine imports after its start; imported here, each fork has them.
_GPU_MODULES = (
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "torch._inductor.compile_fx",
)
_MODULES = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.model_executor.models.llama",
    "weightcache_loader.ipc_loader",
)


def prepare() -> str:
    """Import what engines need. Returns why they cannot be forked, or ""."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        del os.environ["VLLM_WORKER_MULTIPROC_METHOD"]
        return f"vLLM starts its processes by spawn on the platform {current_platform.device_name}"
    import importlib

    for name in (*_MODULES, *_GPU_MODULES):
        # Modules of other names in other versions, or that cannot load here, are left out.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    return ""


def try_in_fork() -> None:
    """A parallel operation: an engine's first would hang in it if this process had done one."""
    import torch

    torch.ones(1 << 22).sum()


def run(main: Coroutine[Any, Any, None]) -> None:
    """As vLLM runs its server."""
    import uvloop

    uvloop.run(main)


class _Records:
    """Makes log records: keeps the first exception that any process of the engine logs, which is the
    root cause that the API server's own error only points to, and numbers lines.

    Not a handler: vLLM configures its logger again, and handlers are gone then.
    """

    def __init__(self, path: Path, number: str) -> None:
        self._make = logging.getLogRecordFactory()
        self._path = path
        self._number = number

    def __call__(self, *arguments: Any, **named: Any) -> logging.LogRecord:
        record = self._make(*arguments, **named)
        if record.levelno >= logging.ERROR and record.exc_info:
            error = record.exc_info[1]
            if isinstance(error, Exception):
                say_error(self._path, error)
        # vLLM 0.33 begins each line with it.
        name = getattr(record, "vllm_process_name", None)
        if name is not None and not name.startswith(self._number):
            record.vllm_process_name = f"{self._number} {name}"
        return record


def _kv_file(error_file: Path) -> Path:
    return error_file.with_name("kv_cache_bytes")


def _read_kv_cache_bytes(job: Job) -> int:
    """The memory that the engine core found free for its KV cache, per rank; 0 if unknown."""
    try:
        return int(_kv_file(job.error_file).read_text())
    except (OSError, ValueError):
        return 0


def _tell_kv_cache_bytes(original: Any) -> Any:
    def determine_available_memory(self: Any) -> list[int]:
        found: list[int] = original(self)
        with contextlib.suppress(OSError):
            _kv_file(Path(os.environ[ERROR_FILE])).write_text(str(min(found)))
        return found

    return determine_available_memory


ERROR_FILE = "WEIGHTCACHED_ENGINE_ERROR_FILE"
FENCE_FD = "WEIGHTCACHED_ENGINE_FENCE_FD"


def join_engine() -> None:
    """In each process of a service's engine: report errors, and pass the fence on.

    Does nothing in other engines; may be called again.
    """
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    if not isinstance(logging.getLogRecordFactory(), _Records):
        number = os.environ.get("VLLM_LOGGING_PREFIX", "").strip()
        logging.setLogRecordFactory(_Records(Path(path), number))
    _hand_on(int(os.environ[FENCE_FD]), Path(path).parents[1] / "fence")
    from vllm.v1.executor.abstract import Executor

    if not hasattr(Executor.determine_available_memory, "original"):
        original = Executor.determine_available_memory
        Executor.determine_available_memory = _tell_kv_cache_bytes(original)
        Executor.determine_available_memory.original = original


def _hand_on(fd: int, fence: Path) -> None:
    """Have processes started by spawn inherit the fence too, as forked ones do."""
    # Programs that an engine runs have its environment, and not its descriptors.
    if not holds_file(os.getpid(), fence):
        return
    if getattr(util.spawnv_passfds, "hands_on", None) == fd:
        return
    original = util.spawnv_passfds

    def spawnv_passfds(path: bytes, args: Any, passfds: Any) -> int:
        return int(original(path, args, sorted({*passfds, fd})))

    spawnv_passfds.hands_on = fd  # type: ignore[attr-defined]
    util.spawnv_passfds = spawnv_passfds


@contextlib.asynccontextmanager
async def start(job: Job, fence_fd: int) -> AsyncIterator[VllmEngine]:
    """An engine that serves on its private socket. Raises vLLM's errors."""
    os.environ[ERROR_FILE], os.environ[FENCE_FD] = str(job.error_file), str(fence_fd)
    join_engine()
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.utils.system_utils import decorate_logs

    decorate_logs(f"{job.service}/{job.number}")
    if not job.parked:
        first_start.begin(job.directory, _remembered(job))
    args = serve_arguments.parse(_arguments(job))
    args.host, args.port = job.host or None, job.port
    private = copy.copy(args)
    private.uds = str(job.private_socket)
    address, sock = entry.setup_server(private, reuse_port=False)
    async with entry.build_async_engine_client(args) as client:
        serve_http, apps = entry.serve_http, []

        async def serve(app: Any, *arguments: Any, **options: Any) -> Any:
            apps.append(app)
            return await serve_http(app, *arguments, **options)

        with mock.patch.object(entry, "serve_http", serve):
            serving = asyncio.ensure_future(entry.build_and_serve(client, address, sock, args))
            server = await _await_server(serving, apps)
        yield VllmEngine(job, client, server, serving, asleep=await client.is_sleeping())


def _arguments(job: Job) -> dict[str, Any]:
    """The arguments of this engine. Raises EngineError if it could not start parked.

    On a GPU it sleeps with our back end, which lets it start beside another one. On the CPU vLLM
    cannot sleep: it parks awake and keeps its KV cache.
    """
    from vllm.platforms import current_platform

    arguments = dict(job.arguments)
    if not current_platform.is_cuda():
        return arguments
    maps = arguments.get("load_format") in OWN_LOAD_FORMATS
    sleeps = maps and _knows_sleep_backends()
    if sleeps:
        arguments.setdefault("enable_sleep_mode", True)
        arguments.setdefault("sleep_mode_backend", parked_start.BACKEND)
    if job.parked:
        if not maps:
            raise EngineError(
                f"load_format {arguments.get('load_format')} does not map its weights, so no standby can start beside "
                "it: write load_format: ipc_cache, or standby: 0"
            )
        if not sleeps:
            raise EngineError(
                "this vLLM has no choice of sleep back ends, so no standby can start on a GPU: "
                "use vLLM 0.33 or newer, or write standby: 0"
            )
        options = dict(arguments.get("model_loader_extra_config") or {})
        arguments["model_loader_extra_config"] = {**options, "start_parked": True}
        if job.kv_cache_bytes:
            arguments.setdefault("kv_cache_memory_bytes", job.kv_cache_bytes)
    return arguments


def _knows_sleep_backends() -> bool:
    from vllm.engine.arg_utils import EngineArgs

    return "sleep_mode_backend" in {field.name for field in dataclasses.fields(EngineArgs)}


def _versions() -> dict[str, str]:
    import torch
    import vllm

    # torch's is a str of a kind of its own.
    return {"vllm": str(vllm.__version__), "torch": str(torch.__version__)}


def _remembered(job: Job) -> dict[str, Any]:
    """What the last first start measured; empty if other software did."""
    same = _versions().items() <= job.remembered.items()
    return job.remembered if same else {}


async def _await_server(serving: asyncio.Future[Any], apps: list[Any]) -> Any:
    """The uvicorn server, once it accepts on the private socket."""
    while not serving.done():
        server = getattr(apps[0].state, "server", None) if apps else None
        if server is not None and server.started:
            return server
        await asyncio.sleep(_POLL_S)
    await serving
    raise EngineError("vLLM's API server ended while it started")


class VllmEngine:
    """One engine, asked by its supervisor."""

    def __init__(
        self,
        job: Job,
        client: Any,
        server: Any,
        serving: asyncio.Future[Any],
        *,
        asleep: bool,
    ) -> None:
        self._job = job
        self._client = client
        self._server = server
        self._serving = serving
        self._public: Any = None
        # Connections that came by the public socket.
        self._clients: weakref.WeakSet[Any] = weakref.WeakSet()
        model = client.vllm_config.model_config
        self._sleeps = bool(model.enable_sleep_mode)
        ours = getattr(model, "sleep_mode_backend", None) == parked_start.BACKEND
        self._uses_backend = self._sleeps and ours
        self._asleep = asleep
        # Its scheduler is being paused, by us.
        self._pauses = False

    @property
    def asleep(self) -> bool:
        return self._asleep

    @property
    def facts(self) -> dict[str, Any]:
        cache = self._client.vllm_config.cache_config
        return {
            "asleep": self._asleep,
            "sleeps": self._sleeps,
            "unmaps": self._uses_backend,
            "lends": self._uses_backend,
            "kv_blocks": cache.num_gpu_blocks,
            "kv_cache_bytes": _read_kv_cache_bytes(self._job),
            "ranks": first_start.measured(self._job.error_file.parent),
            **_versions(),
        }

    async def ping(self) -> Activity:
        # /health sees only a flag; this goes through the core's loop, which a hung step blocks.
        stopped = await self._client.is_sleeping()
        state = self._server.server_state
        return Activity(
            requests=state.total_requests,
            active=len(state.tasks),
            stopped=stopped and not self._asleep and not self._pauses,
        )

    async def wake(self) -> None:
        if self._asleep:
            await self._client.wake_up()
            self._asleep = False

    async def sleep(self) -> None:
        if self._sleeps and not self._asleep:
            with self._pausing():
                await self._client.sleep(level=1)
                self._asleep = True

    @contextlib.contextmanager
    def _pausing(self) -> Iterator[None]:
        self._pauses = True
        try:
            yield
        finally:
            self._pauses = False

    async def expect_memory(self, directory: str) -> None:
        await self._ask_workers(live.EXPECT, directory)

    async def lend_memory(self, directory: str) -> None:
        await self._ask_workers(live.LEND, directory)

    async def forget_memory(self) -> None:
        await self._ask_workers(live.FORGET)

    async def _ask_workers(self, method: str, *arguments: Any) -> None:
        reasons = await self._client.collective_rpc(method, args=arguments)
        if any(reasons):
            raise EngineError(next(filter(None, reasons)))

    async def swap(self, *, on_swap: str, drain_s: float) -> dict[str, Any]:
        said = await self._client.collective_rpc(live.PREPARE)
        refused = [each for each in said if each["reason"]]
        # Of the ranks' reasons, one that says more than that it is another rank's.
        refused.sort(key=lambda each: each["code"] == "another-rank")
        if refused:
            return {"outcome": "left", "reason": refused[0]["reason"], "code": refused[0]["code"]}
        if not any(each["newer"] for each in said):
            return {"outcome": "unchanged"}
        if await self._client.is_sleeping():
            # Its scheduler is paused already, and stays so: by us, or by vLLM's own /sleep or /pause.
            return (await self._swap_now())[0]
        with self._pausing():
            return await self._swap_in_pause(on_swap, drain_s)

    async def _swap_in_pause(self, on_swap: str, drain_s: float) -> dict[str, Any]:
        began_s = time.monotonic()
        core = self._client.engine_core
        resumed: asyncio.Future[None] | None = None
        try:
            async with asyncio.timeout(drain_s):
                await core.pause_scheduler_async(_PAUSE_MODES[on_swap], False)
            drained_s = time.monotonic()
            swapped = asyncio.ensure_future(self._swap_now())
            # The core does one after the other. Asked only once the first is answered, it would wait
            # for this loop, which is busy with the clients whose requests have just ended.
            resumed = asyncio.ensure_future(core.resume_scheduler_async())
            done, ended_s = await swapped
        except TimeoutError:
            await self._client.collective_rpc(live.PREPARE, kwargs={"cancel": True})
            reason = f"its requests did not end within {drain_s:g} s (drain_s)"
            return {"outcome": "left", "reason": reason, "code": "timeout"}
        finally:
            await (resumed or core.resume_scheduler_async())
        return {**done, "drain_s": drained_s - began_s, "pause_s": ended_s - drained_s}

    async def _swap_now(self) -> tuple[dict[str, Any], float]:
        """What came of it, and when (CLOCK_MONOTONIC, which is one for all processes of a host)."""
        try:
            (done, *_) = await self._client.collective_rpc(live.SWAP)
        except Exception as e:
            return {"outcome": "left", "reason": str(e), "code": "swap-failed"}, time.monotonic()
        generation = max(done["generations"].values(), default=0)
        return {"outcome": "swapped", "generation": generation}, done["ended_s"]

    async def accept_on(self, sock: socket.socket) -> None:
        config = self._server.config
        config.encoded_headers = [h for h in config.encoded_headers if h != _CLOSE]
        state = self._server.server_state
        state.default_headers = [h for h in state.default_headers if h != _CLOSE]
        loop = asyncio.get_running_loop()

        def protocol() -> Any:
            made = config.http_protocol_class(
                config=config,
                server_state=state,
                app_state=self._server.lifespan.state,
                _loop=loop,
            )
            self._clients.add(made)
            return made

        self._public = await loop.create_server(
            protocol, sock=sock, ssl=config.ssl, backlog=config.backlog
        )

    async def stop_accepting(self, drain_s: float) -> int:
        if self._public is None:
            return 0
        self._public.close()
        self._public = None
        # In place too: a request under way holds the list that it will answer with.
        self._server.config.encoded_headers.append(_CLOSE)
        self._server.server_state.default_headers.append(_CLOSE)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                # An idle connection is left for the keep-alive time, after which the server closes
                # it: closed now, it could cross a request on its way.
                while self._open_clients():
                    await asyncio.sleep(_POLL_S)
        left = self._open_clients()
        for client in left:
            client.transport.abort()
        return len(left)

    def _open_clients(self) -> list[Any]:
        return [c for c in self._server.server_state.connections if c in self._clients]

    async def ended(self) -> None:
        await asyncio.shield(self._serving)
