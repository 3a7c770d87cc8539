"""An engine beside the daemon's caches, up to vLLM's own check of the device's memory.

Real vLLM, a real daemon with real loaders. The device's numbers are the test's own;
bench/everyday.py takes a real one.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import (
    ANSWER_TIMEOUT_S,
    ENVIRONMENT,
    READY_TIMEOUT_S,
    ROOT,
    Engines,
    checkpoint,
)
from tests.fakes.daemon import DaemonProcess, model, until, write_manifest
from weightcached.vllm_compat import first_start

# They load with vLLM.
pytestmark = pytest.mark.slow

ENGINE: dict[str, Any] = {"enforce_eager": True, "max_model_len": 256}
UTILIZATION = 0.92
# The daemon's private segment of a mapped cache is in nobody's account: at most this, here.
PRIVATE_BYTES = 64 << 10


class BudgetEngine:
    """Engines of one model (budget_engine.py)."""

    def __init__(self, model_path: Path, log: Path, socket_dir: Path) -> None:
        self._log, self._socket_dir = log, socket_dir
        with open(log, "w", encoding="utf-8") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.everyday.budget_engine", str(model_path)], cwd=ROOT, text=True,
                env=os.environ | ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
            )  # fmt: skip

    def start(
        self,
        device: Device,
        *,
        utilization: float = UTILIZATION,
        service: dict[str, Any] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Start one on this device, with the plug-in's `options`. service: more of the question."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        options = {
            "socket_dir": str(self._socket_dir), "connect_timeout_s": READY_TIMEOUT_S, **options
        }  # fmt: skip
        question = {
            "total": device.total, "free": device.free, "utilization": utilization, "options": options,
            **(service or {}),
        }  # fmt: skip
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line.startswith("ANSWER "), self._log.read_text(encoding="utf-8")[-3000:]
        answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(ANSWER_TIMEOUT_S)
        self.process.stdout.close()


class Device:
    """A device on which the daemon holds `resident` bytes, and a context and others `more`."""

    def __init__(self, resident: int, *, more: int = 0) -> None:
        self.total = 10 * resident
        self.free = self.total - resident - self.total // 200 - more

    def used_at_the_end(self, requested: int) -> int:
        return self.total - self.free + requested


class Setup:
    """A daemon with two models, and engines of the first and of one that it does not have."""

    def __init__(self, base: Path) -> None:
        self.paths = {
            name: checkpoint(base / name, tied=False, dtype="bfloat16", seed=seed)
            for seed, name in enumerate(("small", "large", "other"))
        }
        self.entries = [model(name, self.paths[name], **ENGINE) for name in ("small", "large")]
        self.daemon = DaemonProcess(base, self.entries)
        self.daemon.loader_command = None
        self.daemon.env = ENVIRONMENT
        self.engines: dict[str, BudgetEngine] = {}
        try:
            self.daemon.launch()
            for name in ("small", "other"):
                log = base / f"{name}.log"
                self.engines[name] = BudgetEngine(self.paths[name], log, self.daemon.runtime)
            until(self.daemon.is_ready, "both models are resident", bound_s=ANSWER_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        self.resident = {cache.name: cache.bytes for cache in self.daemon.status().caches}

    @property
    def device(self) -> Device:
        return Device(sum(self.resident.values()))

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        self.daemon.close()


@pytest.fixture(scope="module")
def setup() -> Iterator[Setup]:
    base = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))
    setup = Setup(base)
    yield setup
    setup.close()
    shutil.rmtree(base)


@pytest.fixture
def serving(setup: Setup) -> Setup:
    """A running daemon, also after a test that killed it."""
    if setup.daemon.process is None or setup.daemon.process.poll() is not None:
        setup.daemon.launch(keep_store=True)
        until(setup.daemon.is_ready, "both models are resident", bound_s=ANSWER_TIMEOUT_S)
    return setup


def assert_started_within_the_utilization(answer: dict[str, Any], device: Device) -> None:
    assert "error" not in answer, answer
    context = device.total // 200
    allowed = UTILIZATION * device.total + context + PRIVATE_BYTES + 1
    assert device.used_at_the_end(answer["requested"]) <= allowed


def costs(answer: dict[str, Any]) -> list[str]:
    return [line for line in answer["log"] if line.startswith("the KV cache is ")]


@pytest.fixture(scope="module")
def engines(setup: Setup) -> Iterator[Engines]:
    """Whole engines, one after the other."""
    environment = os.environ | ENVIRONMENT
    made = Engines(environment, setup.daemon.directory / "engines.log")
    yield made
    made.close()


def test_engine_of_another_key_starts_with_a_smaller_kv_cache(serving: Setup) -> None:
    answer = serving.engines["other"].start(serving.device)
    assert_started_within_the_utilization(answer, serving.device)
    assert answer["external"] == sum(serving.resident.values())
    (line,) = costs(answer)
    assert (
        "the daemon holds small/target 5.8 MiB (no engine), large/target 5.8 MiB (no engine), which"
        in line
    )
    assert "'weightcachectl drop " in line


def test_engine_that_copies_its_weights_starts(serving: Setup) -> None:
    answer = serving.engines["small"].start(serving.device, mode="copy")
    assert_started_within_the_utilization(answer, serving.device)
    assert answer["external"] == sum(serving.resident.values())


def test_engine_that_maps_one_of_two_resident_models_starts(serving: Setup) -> None:
    answer = serving.engines["small"].start(serving.device)
    assert_started_within_the_utilization(answer, serving.device)
    assert 0 <= sum(serving.resident.values()) - answer["external"] <= PRIVATE_BYTES
    (line,) = costs(answer)
    assert "small/target" not in line


def test_engine_that_fits_beside_what_is_resident_loses_nothing(serving: Setup) -> None:
    answer = serving.engines["other"].start(serving.device, utilization=0.45)
    assert answer["external"] == 0
    assert costs(answer) == []
    assert answer["requested"] == math.ceil(0.45 * serving.device.total)


class Service:
    """Engines of a service, each with a directory of its own; what the first measured is remembered."""

    def __init__(self, engines: BudgetEngine, directory: Path, kv_cache_bytes: int) -> None:
        self._engines, self._directory, self._size = engines, directory, kv_cache_bytes
        self._number = 0
        self.remembered: dict[str, Any] = {}

    def start(self, device: Device, **options: Any) -> int | None:
        """Start one. Returns the size of the KV cache that it took; None if it measures."""
        self._number += 1
        own = self._directory / str(self._number)
        own.mkdir()
        question = {"directory": str(own), "remembered": self.remembered}
        answer = self._engines.start(device, service=question, **options)
        assert "error" not in answer, answer
        found: int | None = answer["kv_cache_bytes"]
        ranks = first_start.measured(own)
        assert bool(ranks) is (found is None)
        if ranks and not self.remembered:
            self.remembered = {"kv_cache_bytes": self._size, "ranks": ranks}
        return found


def test_engine_takes_the_remembered_size_only_where_it_would_measure_the_same(
    serving: Setup, tmp_path: Path
) -> None:
    device = serving.device
    service = Service(serving.engines["small"], tmp_path, 5 << 20)
    assert service.start(device) is None
    assert service.start(device) == 5 << 20
    # A neighbour came, or the one went that was there at the first start.
    assert service.start(Device(sum(serving.resident.values()), more=1 << 20)) is None
    assert service.start(Device(sum(serving.resident.values()), more=-1 << 20)) is None
    assert service.start(device, mode="copy") is None
    assert service.start(device) == 5 << 20


def test_size_measured_without_room_kept_for_new_weights_is_not_used_with_it_nor_the_other_way_round(
    serving: Setup, tmp_path: Path
) -> None:
    def set_live(live: bool) -> None:
        write_manifest(serving.daemon.manifest, [e | {"live": live} for e in serving.entries])
        serving.daemon.signal(signal.SIGHUP)
        serving.daemon.until(
            lambda s: all(c.live is live for c in s.caches), "the manifest is read"
        )

    services = [Service(serving.engines["small"], tmp_path / name, 5 << 20) for name in "ab"]
    for name in "ab":
        (tmp_path / name).mkdir()
    try:
        assert services[0].start(serving.device) is None
        set_live(True)
        assert [service.start(serving.device) for service in services] == [None, None]
        assert services[1].start(serving.device) == 5 << 20
    finally:
        set_live(False)
    assert [service.start(serving.device) for service in services] == [5 << 20, None]


def test_engine_without_room_is_told_who_holds_it_and_what_helps(serving: Setup) -> None:
    device = Device(sum(serving.resident.values()), more=60 << 20)
    answer = serving.engines["other"].start(device)
    kind, text = answer["error"]
    assert kind == "OutOfDeviceMemoryError"
    assert text.startswith("no room on the device: --gpu-memory-utilization 0.92 of ")
    assert "the daemon holds small/target 5.8 MiB (" in text
    assert "'weightcachectl drop " in text
    assert "a lower --gpu-memory-utilization" in text


def test_engine_that_asks_while_the_daemon_restarts_waits_for_it_and_maps(serving: Setup) -> None:
    serving.daemon.signal(signal.SIGKILL)
    serving.daemon.wait()
    serving.daemon.launch(keep_store=True)
    answer = serving.engines["small"].start(serving.device)
    assert_started_within_the_utilization(answer, serving.device)
    assert not [line for line in answer["log"] if line.startswith("loading from disk")]


def test_engine_beside_memory_of_a_daemon_that_is_away_starts(serving: Setup) -> None:
    serving.daemon.signal(signal.SIGKILL)
    serving.daemon.wait()
    answer = serving.engines["small"].start(serving.device, connect_timeout_s=1.0)
    assert_started_within_the_utilization(answer, serving.device)
    assert answer["external"] == sum(serving.resident.values())
    assert any("no weightcached daemon listens" in line for line in answer["log"])
    (line,) = costs(answer)
    assert "holds small/target 5.8 MiB (" in line


def test_engine_that_may_not_fall_back_waits_for_the_daemon(serving: Setup) -> None:
    assert serving.daemon.stop() == 0
    serving.daemon.launch(keep_store=True)
    answer = serving.engines["small"].start(serving.device, fallback=False)
    assert_started_within_the_utilization(answer, serving.device)


def test_load_beside_an_engine_that_starts_waits_for_the_end_of_its_start(
    serving: Setup, engines: Engines
) -> None:
    options = {"socket_dir": str(serving.daemon.runtime), "fallback": False}
    before = len(serving.daemon.log)

    def news() -> str:
        return serving.daemon.log[before:]

    engines.send(
        engine={"model": str(serving.paths["small"]), "load_format": "ipc_cache", "model_loader_extra_config": options}
    )  # fmt: skip
    until(
        lambda: f"loads are held off engine=pid {engines.process.pid}" in news(),
        "the engine has attached, and measures memory",
        bound_s=ANSWER_TIMEOUT_S,
    )
    # Its start goes on once the daemon has been asked to load.
    engines.process.send_signal(signal.SIGSTOP)
    names = ("small", "large", "other")
    write_manifest(
        serving.daemon.manifest, [model(name, serving.paths[name], **ENGINE) for name in names]
    )
    serving.daemon.signal(signal.SIGHUP)
    try:
        until(
            lambda: "load waits for engines that measure memory cache=other/target" in news(),
            "it waits",
            bound_s=READY_TIMEOUT_S,
        )
    finally:
        engines.process.send_signal(signal.SIGCONT)
    assert "tokens" in engines.answer()
    until(serving.daemon.is_ready, "the third model is resident", bound_s=ANSWER_TIMEOUT_S)
    # Not because the engine's process had ended: it serves.
    assert engines.process.pid in [e.pid for e in serving.daemon.status().caches[0].engines]
    assert "an engine held loads off" not in news()
    engines.ask(close=True)


def test_engine_is_told_at_once_where_the_daemon_was_stopped(serving: Setup) -> None:
    assert serving.daemon.stop() == 0
    answer = serving.engines["small"].start(serving.device, connect_timeout_s=600.0)
    assert_started_within_the_utilization(answer, serving.device)
    assert any("no weightcached daemon listens" in line for line in answer["log"])
