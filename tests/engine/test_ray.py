"""Ranks that Ray places: each asks the daemon of its own node. `make extras` has an environment with Ray."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import BIN, ENVIRONMENT, ROOT, Engines, checkpoint
from weightcached.errors import WeightcachedError
from weightcached.wire.connection import Connection
from weightcached.wire.messages import CacheStatus, Status, StatusReply

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="make extras runs it, in an environment with Ray",
)
NODES = 2
READY_TIMEOUT_S = 180.0
# In float32: ranks add partial sums, and in bfloat16 these are rounded differently from one rank's.
LAYOUT: dict[str, Any] = {"tensor_parallel_size": NODES, "dtype": "float32"}
RAY: dict[str, Any] = {**LAYOUT, "distributed_executor_backend": "ray"}
PLUG_IN = ROOT / "tests/fakes/ray_platform"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model") / "m", tied=False, dtype="bfloat16")


class Daemon:
    """The daemon of one node, cpu0, in the node's own runtime directory."""

    def __init__(self, rank: int, home: Path, model: Path) -> None:
        self.socket = home / "weightcached/cpu0.sock"
        engine = {"model": str(model), **LAYOUT, "nnodes": NODES, "node_rank": rank}
        manifest = {
            "version": 1,
            "models": [{"name": "m", "devices": ["cpu0"], "engine": engine}],
        }
        path = home / "manifest.yaml"
        path.write_text(json.dumps(manifest), encoding="utf-8")
        self._log = home / "log"
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                [str(BIN / "weightcached"), "serve", "cpu0", "--manifest", str(path)], stdout=log, stderr=log,
                env=os.environ | ENVIRONMENT | {"XDG_RUNTIME_DIR": str(home)}, cwd=ROOT,
            )  # fmt: skip

    def caches(self) -> list[CacheStatus]:
        with Connection.connect(self.socket, timeout_s=5.0, purpose="ctl") as connection:
            status = connection.request(Status(), 5.0)
        assert isinstance(status, StatusReply)
        return status.caches

    def until_ready(self) -> None:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline_s and self.process.poll() is None:
            try:
                # None before it has read its manifest.
                if [cache.state for cache in self.caches()] == ["ready"]:
                    return
            except (WeightcachedError, OSError):
                pass
            time.sleep(0.2)
        raise AssertionError(self._log.read_text(encoding="utf-8")[-3000:])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(READY_TIMEOUT_S)


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [tmp_path_factory.mktemp("node") for _ in range(NODES)]


@pytest.fixture(scope="module")
def daemons(homes: list[Path], model: Path) -> Iterator[list[Daemon]]:
    found = [Daemon(rank, home, model) for rank, home in enumerate(homes)]
    try:
        for daemon in found:
            daemon.until_ready()
        yield found
    finally:
        for daemon in found:
            daemon.close()


def hosts(homes: list[Path], log: Path, *plug_ins: Path) -> Engines:
    path = os.pathsep.join([*map(str, plug_ins), ENVIRONMENT["PYTHONPATH"]])
    command = [sys.executable, "-m", "tests.engine.ray_host", *map(str, homes)]
    return Engines(os.environ | ENVIRONMENT | {"PYTHONPATH": path}, log, command)


@pytest.fixture(scope="module")
def on_ray(homes: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """vLLM's CPU platform has no Ray resource: a platform plug-in gives it one."""
    base = tmp_path_factory.mktemp("plug-in")
    info = base / "ray_platform-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ray-platform\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.platform_plugins]\ncpu_on_ray = ray_platform:register\n"
    )
    engines = hosts(homes, base / "log", PLUG_IN, base)
    yield engines
    engines.close()


@pytest.mark.timeout(900)
def test_ranks_on_two_nodes_of_ray_map_what_their_nodes_hold(
    daemons: list[Daemon], on_ray: Engines, model: Path
) -> None:
    disk = on_ray.tokens(model, **RAY)
    assert len({tuple(tokens) for tokens in disk}) == 4, "would hide wrong weights"
    attached = on_ray.tokens(model, "ipc_cache", loader={"fallback": False}, **RAY)
    assert attached == disk
    for daemon in daemons:
        ((engine,),) = (cache.engines for cache in daemon.caches())
        assert engine.pid != on_ray.process.pid, "the ranks are Ray's actors"
    on_ray.ask(close=True)


@pytest.mark.timeout(600)
def test_platform_without_a_resource_in_ray_is_refused_by_vllm_itself(
    homes: list[Path], model: Path, tmp_path: Path
) -> None:
    engines = hosts(homes, tmp_path / "log")
    try:
        answer = engines.ask(engine={"model": str(model), "load_format": "ipc_cache", **RAY})
    finally:
        engines.close()
    assert "current platform cpu does not support ray" in answer["error"]
