"""An engine service as its users feel it: first start, takeover, rolling restart, turns, memory.

    python bench/engine.py --model /tmp/m8 --second /tmp/m1 --make 8b --budget 480 --json out.json --logs logs
    python bench/engine.py --model /tmp/tiny --make tiny --device cpu0 --kills 2 --sections kill

One daemon and one service, both of this interpreter, in a directory of their own; the first GPU, unless
--device names another. Sections run in the order given. Each is bounded, one that fails does not keep
the others from running, and none begins after --budget seconds.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.checkpoints import llama_config, write_checkpoint_apart
from weightcached.errors import EngineError
from weightcached.system.gpus import list_gpus, visible_gpus
from weightcached.wire.services import ask_service

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
# Of each engine, to tell one that differs from others from one that differs from itself.
ANSWERS = 3
# The name by which clients ask for the model.
MODEL = "bench"
SHAPES = {
    "8b": {"hidden": 4096, "intermediate": 14336, "layers": 32, "heads": 32, "kv_heads": 8, "vocab": 128256},
    "1b": {"hidden": 2048, "intermediate": 8192, "layers": 16, "heads": 32, "kv_heads": 8, "vocab": 128256},
    "tiny": {"hidden": 256, "intermediate": 512, "layers": 4, "heads": 8, "kv_heads": 4, "vocab": 1024},
}  # fmt: skip
# A restart comes last of those that share a service: it serves with other arguments after it.
SECTIONS = ("kill", "daemon", "supervisor", "memory", "restart", "switch", "start")
# Named only: they take long, or other machines.
MORE_SECTIONS = ("worker", "takeovers", "ledger")
# With empty caches of vLLM a start takes two minutes.
START_TIMEOUT_S = 240.0
# First starts of the ledger, in this order.
WAYS = ("disk", "preload", "ipc_cache", "service")
DAEMON_TIMEOUT_S = 240.0
REQUEST_TIMEOUT_S = 60.0
# figure: (limit, description)
LIMITS = {
    "kill_median_s": (0.7, "SIGKILL to next token, median"),
    "kill_worst_s": (1.5, "SIGKILL to next token, worst"),
    "kill_refused": (0, "connections refused"),
    "takeovers_median_s": (0.7, "takeovers one after the other, median"),
    "takeovers_worst_s": (1.5, "the same, worst"),
    "takeovers_refused": (0, "the same, connections refused"),
    "worker_worst_s": (1.5, "SIGKILL of one worker to next token, worst"),
    "daemon_worst_s": (1.5, "SIGKILL with the daemon's, worst"),
    "supervisor_worst_s": (3.0, "SIGKILL with the supervisor's, worst"),
    "restart_gap_s": (0.7, "rolling restart, gap from the last old answer"),
    "restart_failed": (0, "rolling restart, failed requests"),
    "parked_gib": (2.0, "a parked engine beside the weights, GiB"),
    "start_ratio": (0.6, "first start by the service, from the fork, of 'ipc_cache'"),
    "switch_worst_s": (1.0, "two models in turn, to first token, worst"),
}


def say(text: str) -> None:
    """One line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


class Process:
    """A command in a session of its own, with a log."""

    def __init__(self, command: Sequence[str], log: Path, **env: str) -> None:
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, cwd=ROOT,
                env=environment() | env, start_new_session=True,
            )  # fmt: skip
        self.log = log
        self.began = time.time()

    @property
    def pid(self) -> int:
        return self.process.pid

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])

    def end(self, *, timeout_s: float = 90.0) -> None:
        """SIGTERM, then SIGKILL for its whole session."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()


def environment() -> dict[str, str]:
    """For daemons and engines."""
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # A process that hangs is asked where, by SIGABRT.
        "PYTHONFAULTHANDLER": "1",
    }


def until(
    condition: Callable[[], Any], what: str, *, timeout_s: float, poll_s: float = 0.01
) -> Any:
    """The value of the condition once it is true."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(poll_s)
    return found


def free_ports(count: int) -> int:
    """The first of so many ports of 127.0.0.1 that nobody has now, below those that the kernel gives out."""
    # Each run begins elsewhere: two may share a machine.
    for first in range(18800 + os.getpid() % 3000 * count, 32000, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise RuntimeError("no free ports")


def complete(port: int, *, tokens: int = 1, timeout_s: float = REQUEST_TIMEOUT_S) -> list[int]:
    """The tokens of one completion, on a connection of its own. Raises OSError, HTTPException."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    with contextlib.closing(connection):
        return ask(connection, tokens)


def ask(connection: http.client.HTTPConnection, tokens: int) -> list[int]:
    """The tokens of one completion."""
    found: list[int] = choice_of(connection, [5, 6, 7, 8, 9, 10], tokens)["token_ids"]
    return found


def choice_of(
    connection: http.client.HTTPConnection, prompt: list[int], tokens: int
) -> dict[str, Any]:
    """The choice of one completion, as vLLM answers it. Raises OSError, HTTPException."""
    body = {
        "model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    data = response.read()
    if response.status != 200:
        raise http.client.HTTPException(f"{response.status} {data[:200]!r}")
    if response.will_close:
        connection.close()
    found: dict[str, Any] = json.loads(data)["choices"][0]
    return found


class ClientThreads:
    """Threads that ask from a block's first answer, for which it waits, until its end.

    answers: true once there is one.
    """

    answers: Any

    def __init__(self, runs: Sequence[Callable[[], None]]) -> None:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=run, daemon=True) for run in runs]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        until(lambda: self.answers, "a first answer", timeout_s=REQUEST_TIMEOUT_S)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(REQUEST_TIMEOUT_S)


class Clients(ClientThreads):
    """Clients that ask all the time. answers: when each answered request began, and when it ended.

    A connection that is closed after an answer is opened again.
    """

    def __init__(self, port: int, count: int = 1, *, tokens: int = 1, keep: bool = False) -> None:
        self.answers: list[tuple[float, float]] = []
        self.refused: list[str] = []
        self.failed: list[str] = []
        self._port, self._tokens, self._keep = port, tokens, keep
        self._count = count
        self._asking = threading.Semaphore(count)
        super().__init__([self._run] * count)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within the block no request is under way, and none begins."""
        for _ in range(self._count):
            self._asking.acquire()
        try:
            yield
        finally:
            self._asking.release(self._count)

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_TIMEOUT_S)
        while not self._stop.is_set():
            with self._asking:
                self._ask_once(connection)
            time.sleep(0.002)
        connection.close()

    def _ask_once(self, connection: http.client.HTTPConnection) -> None:
        began = time.time()
        try:
            ask(connection, self._tokens)
            self.answers.append((began, time.time()))
        except ConnectionRefusedError as e:
            self.refused.append(repr(e))
            time.sleep(0.005)
        except (OSError, http.client.HTTPException) as e:
            self.failed.append(repr(e)[:120])
            connection.close()
        if not self._keep:
            connection.close()

    def first_after(self, at: float, *, timeout_s: float = REQUEST_TIMEOUT_S) -> float:
        """Seconds from `at` to the first answer of a request that began after it.

        What was under way before may still be answered by an engine that was killed at `at`.
        """

        def ends() -> list[float]:
            return [ended for began, ended in list(self.answers)[-2000:] if began > at]

        found = until(ends, "an answer", timeout_s=timeout_s, poll_s=0.002)
        return float(min(found)) - at

    def longest_gap(self, since: float) -> float:
        """The longest time without an answer."""
        times = sorted(ended for _, ended in self.answers if ended >= since)
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


class Bench:
    """One model, its daemon, its service."""

    def __init__(
        self, work: Path, devices: list[str], models: list[Path], arguments: dict[str, Any]
    ) -> None:
        self.work = work
        self.devices = devices
        self.device = devices[0]
        self.models = models
        self.arguments = arguments
        self.sockets = work / "run"
        # Three in a row, below those that the kernel gives out.
        self.port = free_ports(3)
        self.results: dict[str, Any] = {}
        self.daemon: Process | None = None
        self.services: dict[str, Process] = {}
        self.nursery = True
        self.start_timeout_s = START_TIMEOUT_S
        # Nothing is begun after it.
        self.deadline = float("inf")
        self._told: set[str] = set()
        self._daemons = 0

    @property
    def on_gpu(self) -> bool:
        return not self.device.startswith("cpu")

    # ---- daemon and services

    def start_daemon(self, *, both: bool = False) -> None:
        """The daemon. One model: by `weightcached preload`; two: by `weightcached serve`.

        `preload` restarts a killed daemon with its descriptors.
        """
        began = time.time()
        if both:
            self.write_manifest()
            command = [sys.executable, "-m", "weightcached", "serve", self.device]
            command += [
                "--manifest",
                str(self.work / "manifest.yaml"),
                "--socket-dir",
                str(self.sockets),
            ]
        else:
            command = [
                sys.executable,
                "-m",
                "weightcached",
                "preload",
                "--model",
                str(self.models[0]),
            ]
            command += ["--weight-cache-socket-dir", str(self.sockets), "--skip-tokenizer-init"]
            command += ["--tensor-parallel-size", str(len(self.devices))]
        visible = {"CUDA_VISIBLE_DEVICES": self._visible()} if self.on_gpu else {}
        # A log of its own: READY must be its word, not the one before's.
        self._daemons += 1
        self.daemon = Process(command, self.work / f"daemon-{self._daemons}.log", **visible)
        until(self._served, "the daemon serves", timeout_s=DAEMON_TIMEOUT_S, poll_s=0.2)
        say(f"daemon serves after {time.time() - began:.1f} s")

    def _served(self) -> bool:
        assert self.daemon
        if self.daemon.process.poll() is not None:
            raise RuntimeError(f"the daemon ended:\n{self.daemon.tail()}")
        log = self.daemon.log.read_text(errors="replace")
        return "READY" in log or "serving device=" in log

    def stop_daemon(self) -> None:
        if self.daemon is not None:
            self.daemon.end()
            self.daemon = None

    def kill_daemons(self) -> None:
        """End the processes that hold the devices' locks."""
        for pid in self._daemon_pids():
            os.kill(pid, signal.SIGKILL)

    def _daemon_pids(self) -> list[int]:
        """As they write them when they start; those that are gone are left out."""
        texts = [(self.sockets / f"{device}.lock").read_text() for device in self.devices]
        return [int(text) for text in texts if text and _stat(int(text))]

    def until_daemons(self) -> None:
        """Wait until the daemons that were killed run again."""
        count = len(self.devices)
        until(lambda: len(self._daemon_pids()) == count, "the daemons", timeout_s=60)

    def write_manifest(self, *, standby: int = 1, **changed: Any) -> None:
        """Services a and b; `changed` are arguments of both."""
        models, engines = [], []
        for number, path in enumerate(self.models):
            name = "ab"[number]
            engine = {"model": str(path), "skip_tokenizer_init": True}
            engine |= {"tensor_parallel_size": len(self.devices)}
            models.append({"name": name, "devices": self.devices, "engine": engine})
            arguments = {**self.arguments, "served_model_name": [MODEL], **changed}
            engines.append(
                {
                    "name": name,
                    "model": name,
                    "listen": f"127.0.0.1:{self.port + number}",
                    "arguments": arguments,
                    "standby": standby,
                    "nursery": self.nursery,
                }
            )
        document = {"version": 1, "models": models, "engines": engines}
        (self.work / "manifest.yaml").write_text(json.dumps(document))

    def start_service(self, name: str = "a", **changed: Any) -> None:
        """Start the supervisor and return at once."""
        if changed or not (self.work / "manifest.yaml").exists():
            self.write_manifest(**changed)
        command = [sys.executable, "-m", "weightcached", "engine", name]
        command += [
            "--manifest",
            str(self.work / "manifest.yaml"),
            "--socket-dir",
            str(self.sockets),
        ]
        self.services[name] = Process(command, self.work / f"service-{name}.log")

    def ask(self, command: str, name: str = "a", *, timeout_s: float = 10.0) -> dict[str, Any]:
        return ask_service(
            self.sockets / "engines" / name / "service.sock", command, timeout_s=timeout_s
        )

    def status(self, name: str = "a") -> dict[str, Any]:
        with contextlib.suppress(EngineError):
            return self.ask("status", name)
        return {"state": "none", "engines": [], "pid": 0, "error": "", "generation": 0}

    def until_serving(self, name: str = "a", *, standby: bool = False) -> dict[str, Any]:
        """Wait until an engine serves, and one is parked. Raises RuntimeError, TimeoutError."""

        def ready() -> dict[str, Any] | None:
            process = self.services[name].process
            if process.poll() is not None:
                raise RuntimeError(f"the supervisor ended:\n{self.services[name].tail()}")
            status = self.status(name)
            if status["error"] and status["error"] not in self._told:
                self._told.add(status["error"])
                say(f"a start failed: {status['error'][:300]}")
            states = sorted(e["state"] for e in status["engines"])
            wanted = states == ["parked", "serving"] if standby else "serving" in states
            return status if wanted else None

        what = "a standby is parked" if standby else "an engine serves"
        try:
            found: dict[str, Any] = until(ready, what, timeout_s=self.start_timeout_s, poll_s=0.05)
        except TimeoutError as e:
            self._ask_where(name)
            raise TimeoutError(f"{e}: {self.status(name)}\n{self.services[name].tail()}") from e
        return found

    def _ask_where(self, name: str) -> None:
        """Have the processes of engines that still start write their stacks into the log."""
        starting = [e["pid"] for e in self.status(name)["engines"] if e["state"] == "starting"]
        for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdecimal()):
            with contextlib.suppress(OSError):
                if os.getsid(pid) in starting:
                    os.kill(pid, signal.SIGABRT)
                    time.sleep(0.5)

    def ready_service(self) -> dict[str, Any]:
        """The service of the first model, serving with a standby.

        Without the nursery if engines that it forks do not start.
        """
        try:
            return self._serving_with_standby()
        except (RuntimeError, TimeoutError) as e:
            self.stop_services()
            if not self.nursery:
                raise
            say(f"forked engines do not start, trying without the nursery: {e}")
            self.results["nursery_failed"] = str(e)[-3000:]
            self.nursery = False
            self.write_manifest()
            return self._serving_with_standby()

    def _serving_with_standby(self) -> dict[str, Any]:
        if "a" not in self.services:
            self.start_service()
            self.until_serving()
        return self.until_serving(standby=True)

    def stop_services(self) -> None:
        for process in self.services.values():
            process.end()
        self.services.clear()

    def used_bytes(self) -> int:
        if not self.on_gpu:
            return 0
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByUUID(device) for device in self.devices]
        return sum(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)

    def steady_bytes(self) -> int:
        """Used device memory, once it does not change."""
        last = -1
        deadline = time.monotonic() + 20
        while (now := self.used_bytes()) != last and time.monotonic() < deadline:
            last = now
            time.sleep(0.3)
        return now

    # ---- sections

    def section_start(self, count: int) -> None:
        """First starts by the service and by vLLM's own server, in turns."""
        seen: dict[str, list[float]] = {"direct": [], "service": [], "forked": [], "standby": []}
        self.stop_services()
        self.write_manifest()
        try:
            for n in range(count):
                if n and time.monotonic() > self.deadline:
                    break
                values = self._start_both(f"start {n + 1}")
                for name, value in zip(("direct", "service", "forked"), values, strict=True):
                    seen[name].append(value)
                if n + 1 < count:
                    self.stop_services()
            status = self.until_serving(standby=True)
            parked = next(e for e in status["engines"] if e["state"] == "parked")
            seen["standby"].append(self._parked_after(parked["number"]))
            say(f"standby: {seen['standby'][-1]:.1f} s from fork to parked")
        finally:
            self.results |= {f"start_{name}_s": values for name, values in seen.items()}
            if seen["forked"]:
                ratio = statistics.median(seen["forked"]) / statistics.median(seen["direct"])
                self.results["start_ratio"] = ratio
            logs = {"direct": "direct-ipc_cache.log", "service": "service-a.log"}
            self.results |= {f"phases_{n}": phases(self.work / log) for n, log in logs.items()}

    def _start_both(self, what: str) -> tuple[float, float, float]:
        """Seconds to the first answer by vLLM's own server and by the service, which stays, and the
        latter without its imports.
        """
        direct_s = self._start_directly(self.port + 2)
        say(f"{what}: vllm serve --load-format ipc_cache: {direct_s:.1f} s")
        began = time.time()
        self.start_service()
        self.until_serving()
        complete(self.port)
        service_s, forked_s = time.time() - began, self._first_from_fork()
        say(f"{what}: service, {service_s:.1f} s, {forked_s:.1f} s after its imports")
        return direct_s, service_s, forked_s

    def _first_from_fork(self, name: str = "a") -> float:
        """Seconds from the fork of the service's first engine until it could serve."""
        return self._parked_after(self.status(name)["generation"], name)

    def _parked_after(self, number: int, name: str = "a") -> float:
        log = self.services[name].log.read_text(errors="replace")
        found = re.findall(rf"engine={number} parked service=\w+ after=([0-9.]+)s", log)
        return float(found[-1]) if found else 0.0

    def section_ledger(self, count: int) -> None:
        """First starts from disk, with vLLM's own preload, with `ipc_cache`, and by the service.

        In turns. Before the first two nothing of ours is resident.
        """
        seen: dict[str, list[float]] = {way: [] for way in WAYS}
        forked: list[float] = []
        self.stop_services()
        self.write_manifest()
        if self.on_gpu:
            self._fill_caches()
        try:
            for n in range(count):
                if n and time.monotonic() > self.deadline:
                    break
                self._start_each_way(f"ledger {n + 1}", seen, forked)
                say(f"ledger {n + 1}: " + ", ".join(f"{way} {seen[way][-1]:.1f} s" for way in WAYS))
        finally:
            self.stop_services()
            self.results["ledger"] = {
                way: {
                    "start_s": [round(value, 1) for value in seen[way]],
                    "median_s": round(statistics.median(seen[way]), 1),
                    **phases(self.work / _log_of(way)),
                }
                for way in WAYS
                if seen[way]
            }
            if forked:
                self.results["ledger"]["service"]["after_imports_s"] = forked
                direct = statistics.median(seen["ipc_cache"])
                self.results["start_ratio"] = statistics.median(forked) / direct

    def _fill_caches(self) -> None:
        """Start an engine and the service once, so that no measured start compiles."""
        self._start_both("unmeasured")
        self.stop_services()
        self.steady_bytes()

    def _start_each_way(self, what: str, seen: dict[str, list[float]], forked: list[float]) -> None:
        self.stop_daemon()
        self.steady_bytes()
        seen["disk"].append(self._start_directly(self.port + 2, "disk"))
        say(f"disk: {seen['disk'][-1]:.1f} s")
        with self._peer() as options:
            seen["preload"].append(self._start_directly(self.port + 2, "preload", **options))
        self.start_daemon()
        direct_s, service_s, forked_s = self._start_both(what)
        seen["ipc_cache"].append(direct_s)
        seen["service"].append(service_s)
        forked.append(forked_s)
        self.stop_services()

    @contextlib.contextmanager
    def _peer(self) -> Iterator[dict[str, Any]]:
        """vLLM's own preload, which keeps the weights; options for its engine."""
        sockets = self.work / "peer"
        sockets.mkdir(mode=0o700, exist_ok=True)
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "preload"]
        command += ["--model", str(self.models[0]), "--skip-tokenizer-init"]
        command += ["--weight-cache-socket-dir", str(sockets)]
        # Our plug-in would take its load format.
        without_us = {"VLLM_PLUGINS": "", "CUDA_VISIBLE_DEVICES": self._visible()}
        log = self.work / "peer.log"
        log.unlink(missing_ok=True)
        peer = Process(command, log, **without_us)
        try:

            def serves() -> bool:
                if peer.process.poll() is not None:
                    raise RuntimeError(f"vllm preload ended:\n{peer.tail()}")
                return "Weight cache daemon READY" in peer.log.read_text(errors="replace")

            until(serves, "vllm preload serves", timeout_s=DAEMON_TIMEOUT_S, poll_s=0.1)
            yield {"sockets": sockets, "VLLM_PLUGINS": ""}
        finally:
            peer.end(timeout_s=20)
            self.steady_bytes()

    def _start_directly(
        self, port: int, way: str = "ipc_cache", *, sockets: Path | None = None, **env: str
    ) -> float:
        loader = json.dumps({"socket_dir": str(sockets or self.sockets)})
        log = self.work / _log_of(way)
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(self.models[0]),
        ]
        if way != "disk":
            command += ["--load-format", "ipc_cache", "--model-loader-extra-config", loader]
        command += ["--tensor-parallel-size", str(len(self.devices))]
        command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--skip-tokenizer-init"]
        for key, value in self.arguments.items():
            option = f"--{key.replace('_', '-')}"
            command += [option] if value is True else [option, str(value)]
        log.unlink(missing_ok=True)
        server = Process(command, log, CUDA_VISIBLE_DEVICES=self._visible(), **env)

        def answered() -> bool:
            if server.process.poll() is not None:
                raise RuntimeError(f"the server ended:\n{server.tail()}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                complete(port)
                return True
            return False

        try:
            until(answered, "an answer", timeout_s=self.start_timeout_s, poll_s=0.05)
            return time.time() - server.began
        finally:
            server.end(timeout_s=20)
            self.steady_bytes()

    def _visible(self) -> str:
        return ",".join(self.devices) if self.on_gpu else ""

    def section_kill(self, kills: int) -> None:
        """SIGKILL of the serving engine, each time with a standby that was started beside it."""
        self._kills("kill", kills, lambda: None)

    def section_daemon(self, kills: int) -> None:
        """The same, the weight daemon killed in the same second."""
        self._kills("daemon", kills, self.kill_daemons, before=self.until_daemons)

    def section_supervisor(self, kills: int) -> None:
        """The same, the supervisor killed in the same second, and started again as systemd does."""

        def kill() -> None:
            self.services["a"].process.kill()
            self.services["a"].process.wait()
            time.sleep(0.2)
            self.start_service()

        self._kills("supervisor", kills, kill)

    def section_worker(self, kills: int) -> None:
        """SIGKILL of one worker of an engine with several."""
        self._kills("worker", kills, lambda: None, victim=_worker_of)

    def _kills(
        self,
        name: str,
        kills: int,
        also: Callable[[], None],
        *,
        victim: Callable[[int], int] = int,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """victim: the process to kill, by the engine's first process."""
        tokens = self._reference()
        times: list[float] = []
        clients = Clients(self.port)
        try:
            with clients:
                for n in range(kills):
                    if n and time.monotonic() > self.deadline:
                        break
                    before()
                    status, took = self._kill_once(clients, also, victim)
                    times.append(took)
                    self._compare(name, tokens, clients)
                    parked = self._parked_after(status["generation"])
                    say(
                        f"{name} {n + 1}: next token after {took:.3f} s (standby took {parked:.1f} s)"
                    )
        finally:
            self._note_kills(name, times, clients)

    def _reference(self) -> list[int]:
        """What every engine must say, by one that serves with a standby.

        Not by one that has compiled: torch 2.11 tunes its reductions once more after it has saved
        the compiled code (github.com/pytorch/pytorch/issues/176191), so it may sum in another order
        than all that load that code.
        """
        status = self.ready_service()
        tokens = complete(self.port, tokens=16)
        if self.on_gpu and status["generation"] == 1:
            os.kill(status["pid"], signal.SIGKILL)
            until(lambda: self.status()["generation"] > 1, "the next engine serves", timeout_s=60)
            self.until_serving(standby=True)
            first, tokens = tokens, complete(self.port, tokens=16)
            self.results["first_engine_tokens_equal"] = first == tokens
        return tokens

    def _compare(self, name: str, tokens: list[int], clients: Clients) -> None:
        """Whether the engine that serves now says what the reference said.

        Asked alone, as that was: beside other requests a near tie may go the other way.
        """
        number = self.status()["generation"]
        with clients.paused():
            found = [complete(self.port, tokens=len(tokens)) for _ in range(ANSWERS)]
        self.results.setdefault(f"{name}_tokens_equal", True)
        if found != [tokens] * ANSWERS:
            self.results[f"{name}_tokens_equal"] = False
            self.results.setdefault(f"{name}_tokens", {0: [tokens]})[number] = found
            say(f"{name}: engine {number} says {found}, wanted {tokens}")

    def _note_kills(self, name: str, times: list[float], clients: Clients) -> None:
        """The figures, of those kills that came about."""
        self.results |= {
            f"{name}_s": times,
            f"{name}_refused": len(clients.refused),
            f"{name}_failed": len(clients.failed),
        }
        if times:
            self.results |= {
                f"{name}_median_s": statistics.median(times),
                f"{name}_worst_s": max(times),
            }
        facts: dict[str, Any] = next(
            (e["facts"] for e in self.status()["engines"] if e["facts"]), {}
        )
        if facts:
            self.results |= {
                "kv_gib": round(facts.get("kv_cache_bytes", 0) / GIB, 1),
                "kv_blocks": facts.get("kv_blocks"),
            }

    def _kill_once(
        self, clients: Clients, also: Callable[[], None], victim: Callable[[int], int] = int
    ) -> tuple[dict[str, Any], float]:
        """The status before, and seconds from SIGKILL to the next answer."""
        status = self.until_serving(standby=True)
        time.sleep(0.3)
        pid = victim(status["pid"])
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        also()
        return status, clients.first_after(at)

    def section_takeovers(self, seconds: float) -> None:
        """Takeovers one after the other: what one leaves behind would add up."""
        tokens = self._reference()
        until_s = time.monotonic() + seconds
        times: list[float] = []
        seen = [self._footprint()]
        clients = Clients(self.port)
        try:
            with clients:
                while not times or time.monotonic() < min(until_s, self.deadline):
                    times.append(self._kill_once(clients, lambda: None)[1])
                    self.until_serving(standby=True)
                    self._compare("takeovers", tokens, clients)
                    seen.append(self._footprint())
                    say(f"takeover {len(times)}: {times[-1]:.3f} s, {seen[-1]}")
        finally:
            self._note_kills("takeovers", times, clients)
            self.results |= {
                "footprint_first": seen[min(1, len(seen) - 1)],
                "footprint_last": seen[-1],
            }

    def _footprint(self) -> dict[str, int]:
        """What the service has of the machine, with one engine serving and one parked."""
        supervisor = self.services["a"].pid
        processes = _descendants(supervisor)
        return {
            "processes": len(processes),
            "supervisor_kib": _resident_kib(supervisor),
            "supervisor_fds": len(os.listdir(f"/proc/{supervisor}/fd")),
            "device_mib": self.steady_bytes() >> 20,
            "sockets_in_tmp": len(list(self.sockets.rglob("*.sock"))),
        }

    def section_restart(self, clients: int) -> None:
        """A rolling restart with another max_model_len, under load."""
        self.ready_service()
        length = 2048 if self.on_gpu else 128
        load = Clients(self.port, clients, tokens=4, keep=True)
        self.write_manifest(max_model_len=length)
        began = time.time()
        try:
            with load:
                began = time.time()
                self.ask("restart", timeout_s=self.start_timeout_s)
                took = time.time() - began
                time.sleep(1.0)
        finally:
            self.write_manifest()
            self.results |= {
                "restart_failed": len(load.failed) + len(load.refused),
                "restart_failures": load.failed[:5],
            }
        self.results |= {"restart_s": took, "restart_gap_s": load.longest_gap(began)}
        say(
            f"restart: {took:.1f} s, gap {load.longest_gap(began):.3f} s, failed {len(load.failed)}"
        )

    def section_memory(self) -> None:
        """The memory of a parked engine beside the weights."""
        status = self.ready_service()
        parked = next(e for e in status["engines"] if e["state"] == "parked")
        with_standby = self.steady_bytes()
        os.kill(parked["pid"], signal.SIGKILL)
        until(lambda: parked["number"] not in [e["number"] for e in self.status()["engines"]],
              "the parked engine is gone", timeout_s=30)  # fmt: skip
        without = self.steady_bytes()
        self.results |= {
            "parked_gib": (with_standby - without) / GIB,
            "used_gib": with_standby / GIB,
        }
        say(f"a parked engine takes {(with_standby - without) / GIB:.2f} GiB")

    def section_switch(self, switches: int) -> None:
        """Two models that do not fit together: each connection goes to the one that sleeps."""
        self.stop_services()
        self.stop_daemon()
        self.steady_bytes()
        self.start_daemon(both=True)
        utilization = {"gpu_memory_utilization": 0.85}
        self.write_manifest(standby=0, **utilization)
        for name in "ab":
            self.start_service(name)
            self.until_serving(name)
            say(f"{name} serves")
        times: list[float] = []
        for n in range(switches):
            # The first goes to a, which slept while b started.
            port = self.port + n % 2
            at = time.time()
            complete(port)
            times.append(time.time() - at)
            say(f"switch {n + 1}: first token after {times[-1]:.3f} s")
            self.results |= {"switch_s": times, "switch_worst_s": max(times)}
            time.sleep(0.5)

    def close(self) -> None:
        self.stop_services()
        self.stop_daemon()


_PHASES = {
    "weights": r"[Mm]odel loading took .*? ([0-9.]+) seconds",
    "dynamo": r"Dynamo bytecode transform time: ([0-9.]+) s",
    # From the cache, or made.
    "compiled code": r"(?:Directly load|Compiling) .*? (?:took|takes) ([0-9.]+) s",
    "torch.compile": r"torch\.compile (?:and initial profiling\S* run together )?took ([0-9.]+) s",
    "profiling run": r"[Ii]nitial profiling\S* run took ([0-9.]+) s",
    "graphs": r"Graph capturing finished in ([0-9.]+) secs",
    "init engine": r"init engine .*? took ([0-9.]+) s",
}


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat after the name: state, parent, group, session, …"""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return []


def _processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]


def _descendants(pid: int) -> list[int]:
    parents = {child: int(stat[1]) for child in _processes() if (stat := _stat(child))}
    found = [pid]
    for parent in found:
        found += [child for child, its in parents.items() if its == parent]
    return found[1:]


def _resident_kib(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0])


def _worker_of(pid: int) -> int:
    """The last worker of the engine whose first process this is. Raises RuntimeError."""
    names: dict[int, str] = {}
    for child in _descendants(pid):
        with contextlib.suppress(OSError):
            names[child] = Path(f"/proc/{child}/comm").read_text().strip()
    # As vLLM names them, by setproctitle.
    workers = [child for child, name in names.items() if "Worker" in name]
    if not workers:
        raise RuntimeError(f"no worker among the processes of engine {pid}: {names}")
    return max(workers)


def _log_of(way: str) -> str:
    """The log of a first start; the service's is that of all its engines."""
    return "service-a.log" if way == "service" else f"direct-{way}.log"


def phases(path: Path) -> dict[str, float]:
    """Seconds by phase, as vLLM's own lines in a log have them; the last of each counts."""
    log = path.read_text(errors="replace") if path.exists() else ""
    found = {name: re.findall(pattern, log) for name, pattern in _PHASES.items()}
    return {name: float(values[-1]) for name, values in found.items() if values}


def table(results: dict[str, Any]) -> list[str]:
    """Each figure beside its limit."""
    lines = [f"{'figure':52} {'limit':>8} {'seen':>9}"]
    for name, (limit, what) in LIMITS.items():
        if name in results:
            seen = results[name]
            mark = "" if seen <= limit else "  over"
            lines.append(f"{what:52} {limit:>8} {seen:>9.3f}{mark}")
    for name in ("kv_gib", "kv_blocks", "start_direct_s", "start_service_s", "start_forked_s",
                 "start_standby_s", "kill_s",
                 "daemon_s", "supervisor_s", "switch_s", "kill_failed", "kill_tokens_equal",
                 "takeovers_s", "takeovers_failed", "takeovers_tokens_equal", "first_engine_tokens_equal",
                 "footprint_first", "footprint_last", "worker_s", "ledger", "phases_direct", "phases_service",
                 "nursery_failed", "errors"):  # fmt: skip
        if name in results:
            lines.append(f"{name}: {results[name]}")
    return lines


@contextlib.contextmanager
def workplace(keep: bool) -> Iterator[Path]:
    """A directory with room for sockets' names."""
    work = Path(tempfile.mkdtemp(prefix="wce-", dir="/tmp"))
    work.chmod(0o700)
    try:
        yield work
    finally:
        if keep:
            say(f"logs are in {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)


def make_model(path: Path, shape: str, *, seed: int, on_gpu: bool) -> None:
    """Write a random checkpoint, unless one is there."""
    if (path / "config.json").exists():
        return
    began = time.time()
    config = llama_config(**SHAPES[shape], dtype="bfloat16", tied=False)
    shards = 4 if shape != "tiny" else 1
    write_checkpoint_apart(
        path, config, shards=shards, seed=seed, device="cuda" if on_gpu else "cpu"
    )
    say(f"{path} made in {time.time() - began:.1f} s")


def devices_of(device: str | None, count: int) -> list[str]:
    """cpu0, cpu1, …; or the GPU of that name; or the first ones of CUDA_VISIBLE_DEVICES.

    Raises click.ClickException if there are not so many.
    """
    if device == "cpu0":
        return [f"cpu{n}" for n in range(count)]
    visible = visible_gpus(list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    found = ([device] if device else visible)[:count]
    if len(found) < count:
        raise click.ClickException(f"{count} GPUs are needed, {len(found)} are here or named")
    return found


@click.command()
@click.option(
    "--model", type=click.Path(path_type=Path), required=True, help="Directory of the checkpoint."
)
@click.option("--second", type=click.Path(path_type=Path), help="Of the second model, for switch.")
@click.option(
    "--make", "shape", type=click.Choice(list(SHAPES)), help="Make them if they are missing."
)
@click.option("--device", default=None, help="GPU-<uuid> or cpu0.  [default: the first GPU]")
@click.option(
    "--sections", default=",".join(SECTIONS), show_default=True, help=f"Also {MORE_SECTIONS}."
)
@click.option(
    "--budget", default=3600.0, show_default=True, help="Seconds after which nothing is begun."
)
@click.option("--starts", default=2, show_default=True)
@click.option("--kills", default=10, show_default=True)
@click.option(
    "--few", default=3, show_default=True, help="Kills of daemon and supervisor, and switches."
)
@click.option("--seconds", default=540.0, show_default=True, help="Time for takeovers.")
@click.option(
    "--tensor-parallel", default=1, show_default=True, help="So many devices, from the first."
)
@click.option("--clients", default=8, show_default=True)
@click.option(
    "--start-timeout", default=START_TIMEOUT_S, show_default=True, help="Seconds for each engine."
)
@click.option("--arguments", default="{}", help="More arguments of vllm serve, as JSON.")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write all figures there.")
@click.option("--logs", type=click.Path(path_type=Path), help="Copy the logs there.")
@click.option("--keep", is_flag=True, help="Keep the logs.")
@click.option("--nursery/--no-nursery", default=True, help="Fork engines.")
def main(
    *, model: Path, second: Path | None, shape: str | None, device: str | None, sections: str, starts: int,
    kills: int, few: int, clients: int, arguments: str, out: Path | None, logs: Path | None, keep: bool, nursery: bool,
    budget: float, seconds: float, tensor_parallel: int, start_timeout: float,
) -> None:  # fmt: skip
    """Measure one engine service."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    # A time limit also ends the started processes.
    signal.signal(signal.SIGTERM, stop)
    devices = devices_of(device, tensor_parallel)
    wanted = sections.split(",")
    models = [model] + ([second] if second and "switch" in wanted else [])
    if shape:
        on_gpu = device != "cpu0"
        make_model(model, shape, seed=0, on_gpu=on_gpu)
        if len(models) > 1:
            make_model(models[1], "1b" if on_gpu else "tiny", seed=1, on_gpu=on_gpu)
    with workplace(keep) as work:
        bench = Bench(work, devices, models, json.loads(arguments))
        bench.nursery, bench.start_timeout_s = nursery, start_timeout
        bench.deadline = time.monotonic() + budget
        work_of: dict[str, Callable[[], None]] = {
            "start": lambda: bench.section_start(starts),
            "kill": lambda: bench.section_kill(kills),
            "daemon": lambda: bench.section_daemon(few),
            "supervisor": lambda: bench.section_supervisor(few),
            "restart": lambda: bench.section_restart(clients),
            "memory": bench.section_memory,
            "worker": lambda: bench.section_worker(few),
            "takeovers": lambda: bench.section_takeovers(seconds),
            "ledger": lambda: bench.section_ledger(starts),
            "switch": lambda: bench.section_switch(2 * few),
        }
        try:
            bench.start_daemon()
            for name in wanted:
                if time.monotonic() > bench.deadline:
                    say(f"-- no time left for {name}")
                    bench.results.setdefault("left_out", []).append(name)
                    continue
                if name == "switch" and len(models) < 2:
                    say("-- switch needs --second")
                    continue
                began = time.time()
                say(f"-- {name}")
                try:
                    work_of[name]()
                except Exception as e:
                    say(f"{name} failed: {e}")
                    bench.results.setdefault("errors", {})[name] = f"{type(e).__name__}: {e}"[:3000]
                say(f"-- {name} took {time.time() - began:.1f} s")
                if out:
                    out.write_text(json.dumps(bench.results, indent=1))
        except (Exception, KeyboardInterrupt) as e:
            # Also at a time limit: what was measured so far is written.
            say(f"ended: {e!r}")
            bench.results.setdefault("errors", {})["all"] = f"{type(e).__name__}: {e}"[:3000]
        finally:
            if out:
                out.write_text(json.dumps(bench.results, indent=1))
            bench.close()
            if logs:
                logs.mkdir(parents=True, exist_ok=True)
                for path in work.glob("*.log"):
                    shutil.copy(path, logs)
        print("\n".join(table(bench.results)))
    sys.exit("errors" in bench.results)


if __name__ == "__main__":
    main()
