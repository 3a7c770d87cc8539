"""An engine service as a real process, with fake engines, a manager's socket, and a client."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from tests.fakes.daemon import (
    BOUND_S,
    PYTHONPATH,
    ROOT,
    ManagerSocket,
    end_processes,
    end_tree,
    environment,
    free_port,
    open_process,
    state_of,
    until,
    write_manifest,
)
from weightcached.errors import EngineError
from weightcached.wire.services import ask_service

MODULE = "tests.fakes.engine_service"


class ServiceProcess:
    """`weightcached engine NAME` with fake engines. entry, others: entries of the manifest."""

    def __init__(
        self,
        directory: Path,
        *,
        name: str = "chat",
        others: Sequence[ServiceProcess] = (),
        **entry: Any,
    ) -> None:
        self.name = name
        self.others = others
        self.directory = directory
        self.runtime = directory / "run"
        self.manifest = directory / "manifest.yaml"
        self.log_path = directory / f"{name}.log"
        self.home = self.runtime / "engines" / name
        self.port = free_port()
        self.entry = {"name": name, "model": "tiny", "listen": f"127.0.0.1:{self.port}", **entry}
        self.module = MODULE
        self.env: dict[str, str] = {}
        self.manager: ManagerSocket | None = None
        self.process: subprocess.Popen[bytes] | None = None
        checkpoint = directory / "checkpoint"
        checkpoint.mkdir(exist_ok=True)
        (checkpoint / "config.json").write_text("{}")
        self.model = {"name": "tiny", "devices": ["cpu0"], "engine": {"model": str(checkpoint)}}
        self.write_manifest()

    def write_manifest(self, **changed: Any) -> None:
        self.entry |= changed
        engines = [self.entry, *(other.entry for other in self.others)]
        write_manifest(self.manifest, [self.model], engines=engines)

    def launch(self, *, keep_store: bool = True) -> Self:
        """Start the supervisor, do not wait. It gets the manager's descriptors, as at a restart."""
        stored: dict[str, int] = {}
        if self.manager is not None:
            if keep_store:
                stored = self.manager.end()
            self.manager.close()
        address = f"@weightcached-test-{os.getpid()}-{time.monotonic_ns()}"
        self.manager = ManagerSocket(address, dict(stored))
        command = [sys.executable, "-m", "weightcached", "engine", self.name]
        if stored:
            passed = ",".join(f"{fd}={name}" for name, fd in stored.items())
            command = [sys.executable, "-m", "tests.fakes.with_store", passed, *command]
        command += ["--manifest", str(self.manifest), "--socket-dir", str(self.runtime)]
        command += ["--engine-module", self.module]
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=ROOT, pass_fds=list(stored.values()),
                env=environment(**{"NOTIFY_SOCKET": self.manager.address, **self.env}),
            )  # fmt: skip
        return self

    def start(self, **options: Any) -> Self:
        """Start the supervisor and wait for READY=1."""
        self.launch(**options)
        process, manager = self.process, self.manager
        assert process
        assert manager
        state = manager.wait_for("READY=1", ended=lambda: process.poll() is not None)
        assert state is not None, f"it ended without READY=1: {self.log[-3000:]}"
        return self

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def ask(self, command: str) -> dict[str, Any]:
        return ask_service(self.home / "service.sock", command, timeout_s=BOUND_S)

    def status(self) -> dict[str, Any]:
        return self.ask("status")

    def until(self, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Wait for a status that fulfils the condition; returns it."""
        seen: list[dict[str, Any]] = [{}]

        def holds() -> bool:
            try:
                seen[0] = self.status()
            except EngineError:
                return False
            return condition(seen[0])

        until(holds, what)
        return seen[0]

    def until_standby(self) -> dict[str, Any]:
        """Wait until one engine serves and one is parked."""
        return self.until(
            lambda s: sorted(e["state"] for e in s["engines"]) == ["parked", "serving"],
            "an engine that serves and one that is parked",
        )

    def get(self, path: str = "/", *, timeout_s: float = BOUND_S) -> dict[str, Any]:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            return answer

    def record(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.home / str(number) / "record.json").read_text())
        return found

    @contextlib.contextmanager
    def fence_held(self) -> Iterator[None]:
        """The fence in other hands, for the time of the block; waits until it is free.

        Nobody else may be about to take it.
        """
        with open(self.home / "fence", "rb") as fence:
            until(lambda: _locked(fence.fileno()), "the fence is free")
            yield

    def fence_is_free(self) -> bool:
        with open(self.home / "fence", "rb") as fence:
            return _locked(fence.fileno())

    def kill_supervisor(self) -> None:
        assert self.process
        self.process.kill()
        self.process.wait(BOUND_S)

    @contextlib.contextmanager
    def supervisor_stopped(self) -> Iterator[None]:
        """What happens in the block is seen by the supervisor after it, all at once."""
        assert self.process
        self.process.send_signal(signal.SIGSTOP)
        pid = self.process.pid
        until(lambda: state_of(pid) in "tTZX", "the supervisor is stopped")
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        """Have it end. A second time cuts requests off."""
        assert self.process
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(BOUND_S)

    def processes(self) -> list[int]:
        """Engines and their cores that are alive, of this service."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdecimal() and int(name) != os.getpid():
                with contextlib.suppress(OSError):
                    fds = os.listdir(f"/proc/{name}/fd")
                    links = {os.readlink(f"/proc/{name}/fd/{fd}") for fd in fds}
                    if str(self.home / "fence") in links:
                        found.append(int(name))
        return found

    def close(self) -> None:
        if self.process is not None:
            end_tree(self.process)
        end_processes([opened for pid in self.processes() if (opened := open_process(pid))])
        if self.manager is not None:
            self.manager.close()


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Packages:
    """The metadata of an installed package. path: a PYTHONPATH with it.

    Of none that others ask for: vLLM without a version takes itself for a build for no platform.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "packages"
        self._metadata = self.directory / "package-1.0.dist-info"
        self._metadata.mkdir(parents=True)
        # Before all others: what lies here would be imported.
        self.path = os.pathsep.join([str(self.directory), PYTHONPATH])

    def upgrade(self) -> None:
        self._metadata.rename(self.directory / "package-2.0.dist-info")


class ClientLoop:
    """Clients that ask all the time, each on one connection as long as it lasts. `answers` are
    (time of the answer, engine), as the engine gives them, `weights` theirs in the same order;
    `refused` counts connections that nobody took, `failed` requests cut off.
    """

    def __init__(
        self,
        service: ServiceProcess,
        count: int = 4,
        path: str = "/",
        *,
        timeout_s: float = BOUND_S,
    ) -> None:
        self._timeout_s = timeout_s
        self.answers: list[tuple[float, int]] = []
        self.weights: list[str] = []
        self.refused: list[str] = []
        self.failed: list[str] = []
        self._service = service
        self._path = path
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]

    def _run(self) -> None:
        connection: http.client.HTTPConnection | None = None
        while not self._stop.is_set():
            if connection is None:
                connection = http.client.HTTPConnection(
                    "127.0.0.1", self._service.port, timeout=self._timeout_s
                )
                try:
                    connection.connect()
                except OSError as e:
                    self.refused.append(repr(e))
                    connection = None
                    time.sleep(0.01)
                    continue
            try:
                connection.request("GET", self._path)
                response = connection.getresponse()
                answer = json.loads(response.read())
            except (OSError, http.client.HTTPException) as e:
                self.failed.append(repr(e))
                connection.close()
                connection = None
                continue
            self.answers.append((answer["at"], answer["engine"]))
            self.weights.append(answer["weights"])
            if response.will_close:
                connection.close()
                connection = None
            time.sleep(0.001)
        if connection is not None:
            connection.close()

    def until_answers(self, engine: int) -> None:
        """Wait for an answer of an engine."""
        until(
            lambda: any(e == engine for _, e in self.answers[-50:]), f"an answer of engine {engine}"
        )

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        until(lambda: bool(self.answers), "a first answer")
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
