"""Shared by demo and benchmarks: a unit under a user manager, engines in their own processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weightcached.errors import WeightcachedError
from weightcached.index.tensors import TensorIndex
from weightcached.system.paths import socket_path
from weightcached.system.units import source
from weightcached.wire.connection import Connection
from weightcached.wire.fetch import fetch_index
from weightcached.wire.messages import Status, StatusReply

ROOT = Path(__file__).resolve().parent.parent
UNIT_START_TIMEOUT_S = 600.0
ENGINE_EXIT_TIMEOUT_S = 120.0
READY_TIMEOUT_S = 120.0
_POLL_S = 0.01
_INSIDE = "WEIGHTCACHED_PRIVATE_MANAGER"
ENGINE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def manager_answers() -> bool:
    """Whether a user manager can be reached."""
    done = subprocess.run(["systemctl", "--user", "list-units"], capture_output=True, check=False)
    return done.returncode == 0


def again_in_private_manager() -> int:
    """Run this same command inside a private user manager; returns its exit status."""
    if _INSIDE in os.environ:
        raise WeightcachedError(
            "the private user manager does not answer: see tests/systemd/manager.py"
        )
    command = [
        sys.executable,
        str(ROOT / "tests/systemd/manager.py"),
        "run",
        "--",
        sys.executable,
        *sys.argv,
    ]
    return subprocess.run(command, env=os.environ | {_INSIDE: "1"}, check=False).returncode


def systemctl(*arguments: str, timeout_s: float = 60.0) -> str:
    """`systemctl --user …`. Raises CalledProcessError."""
    done = subprocess.run(
        ["systemctl", "--user", *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
    )
    return done.stdout.strip()


class Unit:
    """The product's unit under its own name, in the runtime directory, with manifest and sockets."""

    def __init__(self, device: str, work: Path) -> None:
        self.device = device
        self.name = f"weightcached-bench@{device}.service"
        runtime = Path(os.environ["XDG_RUNTIME_DIR"])
        self._file = runtime / "systemd/user/weightcached-bench@.service"
        self.socket_dir = runtime / "weightcached-bench"
        self._manifest = work / "manifest.yaml"
        self._log = work / "daemon.log"

    def install(self, model: str, engine: Mapping[str, Any]) -> None:
        """Write unit and manifest, with one model."""
        self.socket_dir.mkdir(mode=0o700, exist_ok=True)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        entry = {"name": "bench", "devices": [self.device], "engine": {"model": model, **engine}}
        self._manifest.write_text(json.dumps({"version": 1, "models": [entry]}), encoding="utf-8")
        self._file.write_text(self._text(), encoding="utf-8")
        systemctl("daemon-reload")

    def _text(self) -> str:
        command = (
            f"{sys.executable} -m weightcached serve %i --manifest {self._manifest} "
            f"--socket-dir {self.socket_dir}"
        )
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
        environment = " ".join(f"{k}={v}" for k, v in ENGINE_ENVIRONMENT.items())
        lines: list[str] = []
        for line in source("weightcached@.service").read_text(encoding="utf-8").splitlines():
            if line.startswith(("ExecReload=", "PartOf=")):
                continue
            lines.append(f"ExecStart={command}" if line.startswith("ExecStart=") else line)
            if line == "[Service]":
                lines += [
                    f"StandardError=append:{self._log}",
                    f"Environment=PYTHONPATH={path} {environment}",
                ]
        return "\n".join(lines) + "\n"

    def start(self) -> float:
        """Start, wait until the model is served, return the seconds that took."""
        began = time.monotonic()
        systemctl("start", self.name, timeout_s=UNIT_START_TIMEOUT_S)
        return time.monotonic() - began

    def stop(self) -> None:
        subprocess.run(["systemctl", "--user", "stop", self.name], check=False)

    def remove(self) -> None:
        """Stop it and leave no trace."""
        self.stop()
        self._file.unlink(missing_ok=True)
        subprocess.run(["systemctl", "--user", "daemon-reload"], check=False)

    @property
    def pid(self) -> int:
        return int(systemctl("show", "--value", "-p", "MainPID", self.name))

    def kill(self) -> tuple[float, float]:
        """SIGKILL the daemon; returns (epoch seconds of the kill, seconds until it is ready again)."""
        pid = self.pid
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(WeightcachedError):
                status = self.status()
                if status.pid != pid and all(cache.state == "ready" for cache in status.caches):
                    return killed_at, time.time() - killed_at
            time.sleep(_POLL_S)
        raise TimeoutError(f"{self.name} did not serve again within {READY_TIMEOUT_S:.0f} s")

    def status(self) -> StatusReply:
        with self.connect() as connection:
            reply = connection.request(Status(), 5.0)
        if not isinstance(reply, StatusReply):
            raise WeightcachedError(f"unexpected answer {reply}")
        return reply

    def connect(self) -> Connection:
        return Connection.connect(
            socket_path(self.device, self.socket_dir), timeout_s=5.0, purpose="ctl"
        )

    def index(self) -> TensorIndex:
        """The index of the generation that is served."""
        return fetch_index(
            self.device,
            "bench/target",
            for_what="measured",
            socket_dir=self.socket_dir,
            timeout_s=10.0,
        )

    def bytes_read_since(self, since: float) -> int:
        """Checkpoint bytes that loaders read for the served caches since `since` (epoch seconds)."""
        load = self.index().load
        return load.checkpoint_bytes if load.finished_at > since else 0


class Engine:
    """bench/generate.py --serve as a process. first: its first answer, with tokens and times."""

    def __init__(
        self, model: str, load_format: str, engine: Mapping[str, Any], log: Path, *, prompts: int = 4, tokens: int = 32,
        environment: Mapping[str, str] | None = None, prefix: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        command = [
            *prefix, sys.executable, str(ROOT / "bench/generate.py"), model, "--serve", "--load-format", load_format,
            "--prompts", str(prompts), "--tokens", str(tokens), "--engine", json.dumps(engine),
        ]  # fmt: skip
        env = ENGINE_ENVIRONMENT | dict(os.environ) | dict(environment or {})
        with open(log, "w", encoding="utf-8") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                env=env,
            )
        self._log = log
        try:
            self.first = self._answer()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def load_seconds(self) -> float:
        """Load phase of the slowest worker, including the memory query before it."""
        return max(float(load["load_seconds"]) for load in self.first["loads"])

    @property
    def build_seconds(self) -> float:
        return max(float(load["build_seconds"]) for load in self.first["loads"])

    @property
    def worker_seconds(self) -> float:
        """The worker's whole load_model(), as vLLM's line "Model loading took"; 0 if unknown."""
        return max(float(load.get("worker_seconds", 0.0)) for load in self.first["loads"])

    def again(self) -> Any:
        """Tokens of one more round of the same prompts."""
        self._ask("")
        return self._answer()["tokens"]

    def renew(self, load_format: str, engine: Mapping[str, Any]) -> None:
        """A new engine in the same process; its answer is `first` from then on."""
        self._ask(json.dumps({"load_format": load_format, "engine": engine}))
        self.first = self._answer()

    def _ask(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        with open(self._log, "a", encoding="utf-8") as log:
            for line in self._process.stdout:
                if line.startswith('{"tokens"'):
                    answer: dict[str, Any] = json.loads(line)
                    return answer
                # vLLM's own lines.
                log.write(line)
        raise WeightcachedError(
            f"the engine ended with status {self._process.wait()}; see {self._log}"
        )

    def close(self) -> None:
        """End the engine and wait for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(ENGINE_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextlib.contextmanager
def unit(device: str, work: Path, model: str, engine: Mapping[str, Any]) -> Iterator[Unit]:
    """A Unit that is installed for the time of the block."""
    made = Unit(device, work)
    made.install(model, engine)
    try:
        yield made
    finally:
        made.remove()
