"""Many models through daemon and engines at once: lanes beside each other, each with a daemon and
two engine processes.

A loader child takes as long as vLLM's imports, and one daemon loads one model at a time. So models
are dealt to several daemons of the same device, each with a runtime directory of its own. While a
daemon loads, its lane's two engine processes decode with every model from disk; then both attach
each model at the same time. Each process compares with its own tokens: kernels that are tuned by
time may differ between processes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.engine.conftest import ENVIRONMENT, ROOT, Engines
from tests.gpu.models import MODELS
from weightcached.errors import WeightcachedError
from weightcached.system.paths import socket_path
from weightcached.wire.connection import Connection
from weightcached.wire.fetch import fetch_index
from weightcached.wire.messages import Status, StatusReply

PROMPTS, TOKENS, BURST_TOKENS = 8, 32, 200 * 8
# The first answer of a process includes vLLM's imports, and kernels that are compiled on first use.
ANSWER_TIMEOUT_S = 200.0
LOAD_TIMEOUT_S = 300.0
_POLL_S = 0.2
_LOG_CHARS = 4000
_STDERR_LINES = 60
# A process whose device context is broken cannot run another model.
_BROKEN = ("CUDA error", "AcceleratorError", "illegal memory", "CUBLAS", "out of memory")


@dataclass
class Result:
    """The result of one model. error: the step at which it ended, with the reason.

    plans: hooks by class and plan, counted; reasons: why hooks did not get an earlier plan.
    repeatable: the engine from disk decoded the same once more, so that its kernels' results do not
    depend on chance.
    """

    model: str
    stage: str = ""
    plans: dict[str, int] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    repeatable: bool | None = None
    tokens_equal: bool | None = None
    twin_tokens_equal: bool | None = None
    burst_tokens: int = 0
    verify: str = ""
    digests_equal: bool | None = None
    distinct: int = 0
    load_seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    nbytes: int = 0
    private_nbytes: int = 0
    disk_start_seconds: float = 0.0
    attach_start_seconds: float = 0.0
    error: str = ""
    log: str = ""


class StepError(Exception):
    """A step of one model failed."""


class Seat:
    """A place for one engine process. If it died or broke its context, the next question replaces
    it.
    """

    def __init__(self, name: str, environment: dict[str, str], directory: Path) -> None:
        self._name = name
        self._environment = environment
        self._directory = directory
        self._count = 0
        self._ended = False
        self._engines: Engines | None = None
        # The process's output during its last answer.
        self.log = ""
        self.start()

    def start(self) -> Engines:
        if self._ended:
            raise StepError("the lane has ended")
        self._count += 1
        self._engines = Engines(
            self._environment, self._directory / f"{self._name}-{self._count}.log"
        )
        return self._engines

    def ask(self, **command: Any) -> dict[str, Any]:
        """The answer. Raises StepError with the process's last words."""
        engines = self._engines or self.start()
        engines.log()
        timer = threading.Timer(ANSWER_TIMEOUT_S, engines.process.kill)
        timer.start()
        try:
            answer = engines.ask(**command)
        except (AssertionError, OSError, ValueError) as e:
            self.close()
            raise StepError(f"the engine process ended: {e}") from e
        finally:
            timer.cancel()
        self.log = engines.log()
        if error := answer.get("error"):
            if any(sign in error or sign in self.log for sign in _BROKEN):
                self.close()
            raise StepError(f"{error}\n{self.log[-_LOG_CHARS:]}")
        return answer

    def end(self) -> None:
        """End the process for good."""
        self._ended = True
        self.close()

    def close(self) -> None:
        engines, self._engines = self._engines, None
        if engines is not None:
            engines.process.kill()
            engines.process.wait()
            for pipe in (engines.process.stdin, engines.process.stdout):
                with suppress(OSError):
                    if pipe is not None:
                        pipe.close()


class Lane:
    """One daemon, its models, and two engine processes."""

    def __init__(
        self, names: Sequence[str], paths: Mapping[str, Path], device: str, *, engine: dict[str, Any],
        environment: dict[str, str],
    ) -> None:  # fmt: skip
        self.names = names
        self._paths = paths
        self._device = device
        self._engine = engine
        # Short: a socket's path has to fit into 107 bytes.
        self._runtime = Path(tempfile.mkdtemp(prefix="wcq-", dir="/tmp"))
        self._environment = (
            dict(os.environ) | ENVIRONMENT | environment
            | {"XDG_RUNTIME_DIR": str(self._runtime), "VLLM_LOGGING_LEVEL": "INFO"}
        )  # fmt: skip
        self._log = self._runtime / "daemon.log"
        self._disk: dict[str, list[Any]] = {}
        self._daemon = self._start_daemon()
        self._seats = [Seat(name, self._environment, self._runtime) for name in ("one", "two")]

    def _start_daemon(self) -> subprocess.Popen[bytes]:
        models = [
            {
                "name": name,
                "devices": [self._device],
                "engine": {"model": str(self._paths[name]), **MODELS[name].engine},
            }
            for name in self.names
        ]
        manifest = self._runtime / "manifest.yaml"
        manifest.write_text(json.dumps({"version": 1, "models": models}), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "weightcached",
            "serve",
            self._device,
            "--manifest",
            str(manifest),
        ]
        with open(self._log, "wb") as log:
            return subprocess.Popen(
                command, env=self._environment, cwd=ROOT, stdout=log, stderr=log
            )

    def run(self, results: Mapping[str, Future[Result]]) -> None:
        """All models of the lane, each to its result, also if others fail."""
        made = {name: Result(name) for name in self.names}
        for name in self.names:
            self._step("disk", made[name], self._decode_from_disk)
        for name in self.names:
            for step, action in (
                ("load", self._await_load),
                ("attach", self._attach),
                ("verify", self._verify),
            ):
                self._step(step, made[name], action)
            results[name].set_result(made[name])

    def _step(self, step: str, result: Result, action: Any) -> None:
        if result.error:
            return
        try:
            action(result)
        except Exception as e:
            result.error = f"{step}: {type(e).__name__}: {e}"[: 2 * _LOG_CHARS]
            result.log = self._log_of(result.model)

    def _both(self, **command: Any) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(seat.ask, **command) for seat in self._seats]
        return [future.result() for future in asked]

    def _arguments(self, name: str, load_format: str) -> dict[str, Any]:
        return {
            **self._engine, **MODELS[name].engine, **MODELS[name].start, "model": str(self._paths[name]),
            "load_format": load_format,
        }  # fmt: skip

    def _decode_from_disk(self, result: Result) -> None:
        began = time.monotonic()
        answers = self._both(
            engine=self._arguments(result.model, "auto"), prompts=PROMPTS, tokens=TOKENS
        )
        result.disk_start_seconds = time.monotonic() - began
        self._disk[result.model] = self._said(result.model, answers)
        again = self._both(again=True)
        result.repeatable = all(
            a["tokens"] == b["tokens"] for a, b in zip(answers, again, strict=True)
        )
        # Prompts that decode alike, or one token for ever, would hide wrong weights.
        result.distinct = len({token for tokens in answers[0]["tokens"] for token in tokens})
        self._both(close=True)

    def _said(self, name: str, answers: list[dict[str, Any]]) -> list[Any]:
        """Each engine's tokens, and what it says to images if the model takes any."""
        said = [answer["tokens"] for answer in answers]
        if not MODELS[name].images:
            return said
        return [
            tokens + more["result"]
            for tokens, more in zip(said, self._both(call="images"), strict=True)
        ]

    def _await_load(self, result: Result) -> None:
        deadline_s = time.monotonic() + LOAD_TIMEOUT_S
        state = "unknown"
        while time.monotonic() < deadline_s:
            if self._daemon.poll() is not None:
                raise StepError(f"the daemon ended with status {self._daemon.returncode}")
            with suppress(WeightcachedError, OSError):
                state, error = self._state(f"{result.model}/target")
                if state == "ready":
                    return self._read_index(result)
                if error:
                    raise StepError(error)
            time.sleep(_POLL_S)
        raise StepError(f"still {state} after {LOAD_TIMEOUT_S:.0f} s")

    def _state(self, cache: str) -> tuple[str, str]:
        with self._connect() as connection:
            reply = connection.request(Status(), 5.0)
        if not isinstance(reply, StatusReply):
            return "unknown", ""
        return next(((c.state, c.error) for c in reply.caches if c.name == cache), ("unknown", ""))

    def _connect(self) -> Connection:
        path = socket_path(self._device, self._runtime / "weightcached")
        return Connection.connect(path, timeout_s=5.0, purpose="ctl")

    def _read_index(self, result: Result) -> None:
        index = fetch_index(
            self._device, f"{result.model}/target", for_what="looked at", timeout_s=10.0,
            socket_dir=self._runtime / "weightcached",
        )  # fmt: skip
        result.stage, result.nbytes = index.stage, index.nbytes
        result.private_nbytes = sum(segment.nbytes for segment in index.segments if segment.private)
        plans = [
            f"{plan.method.rpartition('.')[2] or 'values'} {plan.plan}" for plan in index.modules
        ]
        result.plans = dict(Counter(plans or ["every hook rerun"]))
        result.reasons = sorted(
            {reason[:300] for plan in index.modules if (reason := getattr(plan, "reason", ""))}
        )[:8]
        result.load_seconds, result.phases = index.load.seconds, index.load.phases

    def _attach(self, result: Result) -> None:
        arguments = self._arguments(result.model, "ipc_cache")
        arguments["model_loader_extra_config"] = {"fallback": False}
        began = time.monotonic()
        answers = self._both(engine=arguments, prompts=PROMPTS, tokens=TOKENS)
        result.attach_start_seconds = time.monotonic() - began
        if not all(
            f"attached {result.model}/target generation 1" in seat.log for seat in self._seats
        ):
            raise StepError(f"the engine mapped something else: {self._seats[0].log[-_LOG_CHARS:]}")
        said = self._said(result.model, answers)
        equal = [a == b for a, b in zip(said, self._disk[result.model], strict=True)]
        result.tokens_equal, result.twin_tokens_equal = equal
        result.burst_tokens = self._seats[0].ask(call="burst")["result"]
        self._both(close=True)

    def _verify(self, result: Result) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "weightcached.cli.weightcachectl", "verify", f"{result.model}/target"],
            env=self._environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        result.verify = (done.stdout + done.stderr).strip()[-_LOG_CHARS:]
        result.digests_equal = done.returncode == 0 and "all digests equal" in done.stdout

    def _log_of(self, name: str) -> str:
        """The last lines of the daemon's log that name the model's cache."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([line for line in lines if f"{name}/target" in line][-_STDERR_LINES:])[
            -_LOG_CHARS:
        ]

    def close(self) -> None:
        """End every process of the lane."""
        for seat in self._seats:
            seat.end()
        self._daemon.terminate()
        try:
            self._daemon.wait(20)
        except subprocess.TimeoutExpired:
            self._daemon.kill()
            self._daemon.wait()
        shutil.rmtree(self._runtime, ignore_errors=True)


class Lanes:
    """All lanes, with `timeout_s` for all models. Each result is also a line of `report`, if any."""

    def __init__(
        self, paths: Mapping[str, Path], device: str, *, count: int, engine: dict[str, Any],
        environment: dict[str, str], report: Path | None, timeout_s: float,
    ) -> None:  # fmt: skip
        self.results: dict[str, Future[Result]] = {name: Future() for name in paths}
        self._deadline_s = time.monotonic() + timeout_s
        self._report = report
        self._lock = threading.Lock()
        for future in self.results.values():
            future.add_done_callback(self._write)
        self._lanes = [
            Lane(names, paths, device, engine=engine, environment=environment)
            for names in deal(list(paths), count)
        ]
        self._pool = ThreadPoolExecutor(len(self._lanes))
        for lane in self._lanes:
            self._pool.submit(self._run, lane)

    def result(self, name: str) -> Result:
        """Wait for the model's result, at most as long as there is time for all."""
        try:
            return self.results[name].result(max(self._deadline_s - time.monotonic(), 0.1))
        except TimeoutError:
            return Result(name, error="no result within the time for all models")

    def _run(self, lane: Lane) -> None:
        try:
            lane.run(self.results)
        finally:
            for name in lane.names:
                if not self.results[name].done():
                    self.results[name].set_result(Result(name, error="its lane was given up"))

    def _write(self, future: Future[Result]) -> None:
        if self._report is not None:
            with self._lock, open(self._report, "a", encoding="utf-8") as report:
                report.write(json.dumps(asdict(future.result())) + "\n")

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
        self._pool.shutdown()


def deal(names: list[str], count: int) -> list[list[str]]:
    """Models in turn to at most `count` lanes."""
    return [names[first::count] for first in range(min(count, len(names)))]
