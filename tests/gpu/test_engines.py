"""Real vLLM engines on a GPU, the product's unit under a real user manager, the processed stage.

Needs the wheels that carry vLLM and, if the machine has no systemd, a user manager's binaries.
    PYTHONPATH=. python3 -m pytest tests/gpu/test_engines.py
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.attach import Memory
from bench.checkpoints import llama_config, write_checkpoint
from bench.harness import Engine
from tests.engine.conftest import ROOT, Engines, Service
from tests.systemd.manager import PrivateManager

ENGINE: dict[str, Any] = {
    "gpu_memory_utilization": 0.2,
    "max_model_len": 1024,
    "enforce_eager": True,
}
SHAPE = {
    "hidden": 1024,
    "intermediate": 2816,
    "layers": 6,
    "heads": 16,
    "kv_heads": 8,
    "vocab": 16000,
}
# Each cached model, and the engine arguments with which it is loaded from disk as well. The other
# quantizations and architectures are test_quantization.py's.
MODELS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "tied": {"tied": True},
    "fp8-online": {"engine": {"quantization": "fp8"}},
    # An embedding of 1.2 GiB: larger than a segment.
    "large": {"vocab": 640_000, "layers": 2},
}


def make(path: Path, *, tied: bool = False, **shape: int) -> Path:
    config = llama_config(**(SHAPE | shape), dtype="bfloat16", tied=tied)
    write_checkpoint(path, config, shards=2, device="cuda")
    return path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}
    for name, what in MODELS.items():
        arguments = {key: value for key, value in what.items() if key != "engine"}
        made[name] = made["bf16"] if name == "fp8-online" else make(base / name, **arguments)
    return made


@pytest.fixture(scope="module")
def service(
    manager: PrivateManager, checkpoints: dict[str, Path], device: str
) -> Iterator[Service]:
    """All models served by one daemon."""
    service = Service(manager)
    service.manifest(
        *(
            {
                "name": name,
                "devices": [device],
                "engine": {
                    "model": str(path),
                    "max_model_len": 1024,
                    **MODELS[name].get("engine", {}),
                },
            }
            for name, path in checkpoints.items()
        )
    )
    started = service.ctl("start", device, check=False)
    assert started.returncode == 0, started.stdout + started.stderr
    yield service
    service.ctl("stop", device, check=False)


@pytest.mark.parametrize("name", MODELS)
def test_attached_engine_decodes_what_one_from_disk_decodes(
    service: Service, engines: Engines, checkpoints: dict[str, Path], device: str, name: str
) -> None:
    (cache,) = [cache for cache in service.caches(device) if cache["name"] == f"{name}/target"]
    assert cache["state"] == "ready", cache["error"]
    arguments = ENGINE | MODELS[name].get("engine", {})
    disk = engines.tokens(checkpoints[name], **arguments)
    assert len({tuple(tokens) for tokens in disk}) > 1
    attached = engines.tokens(
        checkpoints[name], "ipc_cache", loader={"fallback": False}, **arguments
    )
    assert attached == disk
    engines.ask(close=True)
    verified = service.ctl("verify", f"{name}/target")
    assert "all digests equal" in verified.stdout


def test_weights_are_copied_in_place_into_a_model_that_is_built(
    service: Service, engines: Engines, checkpoints: dict[str, Path]
) -> None:
    engines.tokens(checkpoints["bf16"], "ipc_cache", loader={"fallback": False}, **ENGINE)
    assert engines.ask(call="reload_in_place")["result"] == {
        "names_equal": True,
        "bytes_equal": True,
        "in_place": True,
    }
    engines.ask(close=True)


def test_engine_with_copies_of_its_own_gives_the_cache_back(
    service: Service, engines: Engines, checkpoints: dict[str, Path], device: str, memory: Memory
) -> None:
    disk = engines.tokens(checkpoints["tied"], **ENGINE)
    copied = engines.tokens(
        checkpoints["tied"], "ipc_cache", loader={"fallback": False, "mode": "copy"}, **ENGINE
    )
    assert copied == disk
    states = {cache["name"]: cache["state"] for cache in service.caches(device)}
    assert states["tied/target"] == "released"
    service.ctl("reload", device)
    engines.ask(close=True)
    assert {cache["state"] for cache in service.caches(device)} == {"ready"}
    assert (
        engines.tokens(checkpoints["tied"], "ipc_cache", loader={"fallback": False}, **ENGINE)
        == disk
    )
    engines.ask(close=True)


def test_kernel_that_writes_into_a_shared_parameter_fails_and_changes_nothing(
    service: Service, checkpoints: dict[str, Path], device: str
) -> None:
    command = f"from tests.gpu.write_into_weights import main; main({str(checkpoints['bf16'])!r})"
    done = subprocess.run(
        [sys.executable, "-c", command],
        env=service.env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert "illegal memory access" in done.stdout + done.stderr
    assert "WROTE" not in done.stdout
    assert "all digests equal" in service.ctl("verify", "bf16/target").stdout


def test_engine_in_its_own_namespaces_attaches(
    service: Service,
    engines: Engines,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in service.env.items():
        monkeypatch.setenv(name, value)
    disk = engines.tokens(checkpoints["bf16"], **ENGINE)
    engines.ask(close=True)
    apart = (
        "unshare",
        "--pid",
        "--ipc",
        "--mount",
        "--net",
        "--mount-proc",
        "--fork",
        "--kill-child",
    )
    # A new network namespace has its loopback down, and the engine's processes meet there.
    loopback = (
        "import fcntl, os, socket, struct, sys; "
        "fcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sh', b'lo', 0x41)); "
        "os.execvp(sys.argv[1], sys.argv[1:])"
    )
    options = ENGINE | {"model_loader_extra_config": {"fallback": False}}
    prefix = (*apart, sys.executable, "-c", loopback)
    with Engine(
        str(checkpoints["bf16"]), "ipc_cache", options, tmp_path / "log", prefix=prefix
    ) as engine:
        assert engine.first["tokens"] == disk
