"""Wrong input for a GPU: one clear error each, nothing half-mapped, and engines that fall back
decode.

PYTHONPATH=. python3 -m pytest tests/gpu/test_bad_input.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.harness import Engine
from tests.engine.conftest import Engines, Service
from tests.fakes.stub_daemon import Answer, Packet, Script, StubDaemon, status, welcome
from tests.gpu.conftest import visible
from tests.gpu.test_engines import ENGINE, make
from tests.systemd.manager import PrivateManager
from weightcached.index import tensors as index_format
from weightcached.system.fds import OwnedFd, close_all, sealed_memfd
from weightcached.system.paths import socket_path
from weightcached.wire.fetch import fetch_generation
from weightcached.wire.messages import Descriptors, Request, Status, encode

CACHE = "bf16/target"
GIB = 1 << 30
# The hog leaves this much: a context and little more.
LEFT_BYTES = 3 * GIB // 2
HOG = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
hold = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("holding", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    # 2.6 GB: more than the hog leaves.
    return {"bf16": make(base / "bf16"), "large": make(base / "large", vocab=640_000, layers=1)}


def entry(name: str, device: str, model: Path) -> dict[str, Any]:
    return {
        "name": name,
        "devices": [device],
        "engine": {"model": str(model), "max_model_len": 1024},
    }


@pytest.fixture(scope="module")
def service(manager: PrivateManager, models: dict[str, Path], device: str) -> Iterator[Service]:
    service = Service(manager)
    service.manifest(entry("bf16", device, models["bf16"]))
    service.ctl("start", device)
    yield service
    service.ctl("stop", device, check=False)


@pytest.fixture(scope="module")
def expected(engines: Engines, models: dict[str, Path]) -> Any:
    """The tokens of an engine that loads from disk."""
    return engines.tokens(models["bf16"], **ENGINE)


def socket_of(service: Service, device: str) -> Path:
    return socket_path(device, Path(service.env["XDG_RUNTIME_DIR"]) / "weightcached")


Tamper = Callable[
    [index_format.TensorIndex, list[OwnedFd]], tuple[index_format.TensorIndex, list[OwnedFd]]
]


def handing_out(socket: Path, tamper: Tamper) -> Script:
    """A tampered generation of the daemon on `socket`."""

    def script(request: Request) -> Iterator[Answer]:
        if isinstance(request, Status):
            yield status(socket.stem)
            return
        fetched = fetch_generation(
            socket.stem, CACHE, for_what="tampered with", socket_dir=socket.parent, timeout_s=10.0
        )
        index, fds = tamper(fetched.index, fetched.fds)
        data = index_format.encode(index)
        fds.insert(0, sealed_memfd("index", data))
        yield msgspec.structs.replace(
            fetched.ready,
            index_digest=index_format.digest_of(data),
            segment_nbytes=[s.nbytes for s in index.segments],
        )
        yield Packet(encode(Descriptors(first=0)), [fd.fileno() for fd in fds])
        close_all(fds)

    return script


def host_memory(
    index: index_format.TensorIndex, fds: list[OwnedFd]
) -> tuple[index_format.TensorIndex, list[OwnedFd]]:
    """The last segment is a memfd."""
    fds.pop().close()
    return index, [*fds, sealed_memfd("segment", bytes(4096))]


def larger_than_it_is(
    index: index_format.TensorIndex, fds: list[OwnedFd]
) -> tuple[index_format.TensorIndex, list[OwnedFd]]:
    """The index says twice the size of the last segment."""
    *others, last = index.segments
    return msgspec.structs.replace(
        index, segments=[*others, msgspec.structs.replace(last, nbytes=2 * last.nbytes)]
    ), fds


@pytest.mark.parametrize("tamper", [host_memory, larger_than_it_is])
def test_segment_that_does_not_map_leaves_nothing_behind(
    service: Service, engines: Engines, models: dict[str, Path], device: str, expected: Any, tmp_path: Path,
    tamper: Tamper,
) -> None:  # fmt: skip
    path = Path("/tmp") / f"wc-{os.getpid()}-{tamper.__name__}" / f"{device}.sock"
    engines.log()
    with StubDaemon(path, handing_out(socket_of(service, device), tamper), [welcome(device)]):
        fallen_back = engines.tokens(
            models["bf16"], "ipc_cache", loader={"socket_path": str(path)}, **ENGINE
        )
    path.parent.rmdir()
    lines = engines.plugin_log()
    assert fallen_back == expected
    assert any(line.startswith("loading from disk (") and "segment" in line for line in lines), (
        lines
    )
    # In the same process: no error sticks to its context.
    assert (
        engines.tokens(models["bf16"], "ipc_cache", loader={"fallback": False}, **ENGINE)
        == expected
    )


def test_cache_without_room_names_needed_free_and_holder(
    service: Service, engines: Engines, models: dict[str, Path], device: str
) -> None:
    engines.ask(close=True)
    service.manifest(entry("bf16", device, models["bf16"]), entry("large", device, models["large"]))
    with subprocess.Popen(
        [sys.executable, "-c", HOG, str(LEFT_BYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as hog:
        assert hog.stdout is not None
        assert hog.stdout.readline() == "holding\n"
        refused = service.ctl("reload", device, check=False)
        said = refused.stdout + refused.stderr
        assert refused.returncode != 0
        assert re.search(
            rf"large/target needs at least 2\.\d GiB on {device}, [01]\.\d GiB of \d+\.\d GiB are free; held by "
            rf".*pid {hog.pid} \(python3?[\d.]*\) \d+\.\d GiB",
            said,
        ), said
        states = {cache["name"]: cache["state"] for cache in service.caches(device)}
        # It may be tried again by now.
        assert states.pop("large/target") in ("failed", "loading")
        assert states == {CACHE: "ready"}
        hog.communicate("")
    service.ctl("reload", device)
    assert {cache["state"] for cache in service.caches(device)} == {"ready"}
    service.manifest(entry("bf16", device, models["bf16"]))
    service.ctl("reload", device)


def test_unknown_gpu_is_named_beside_those_that_are_there(
    service: Service, models: dict[str, Path], device: str
) -> None:
    unknown = "GPU-00000000-0000-0000-0000-000000000000"
    service.manifest(entry("bf16", device, models["bf16"]), entry("lost", unknown, models["bf16"]))
    started = service.ctl("start", unknown, check=False)
    said = started.stdout + started.stderr
    assert started.returncode != 0
    assert unknown in said
    assert device in said, said


def test_engine_on_another_gpu_than_the_cache_loads_from_disk(
    service: Service, models: dict[str, Path], device: str, expected: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    gpus = visible()
    if len(gpus) < 2:
        pytest.skip("this machine has one GPU")
    for name, value in service.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus[1])
    options = ENGINE | {
        "model_loader_extra_config": {"socket_path": str(socket_of(service, device))}
    }
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with Engine(
        str(models["bf16"]), "ipc_cache", options, tmp_path / "log", environment=environment
    ) as engine:
        assert engine.first["tokens"] == expected
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert f"serves {device}, this engine runs on {gpus[1]}" in log
