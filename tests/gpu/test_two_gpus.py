"""Models of two ranks on two GPUs, loaded alone or in an NCCL group, each attached by an engine of
both.

PYTHONPATH=. python3 -m pytest tests/gpu/test_two_gpus.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.harness import Engine
from tests.engine.conftest import Service
from tests.gpu.conftest import visible
from tests.gpu.test_engines import ENGINE, make
from tests.systemd.manager import PrivateManager

TP, PP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
GROUP_PORT = 29711


@pytest.fixture(scope="module")
def gpus() -> list[str]:
    found = visible()[:2]
    if len(found) < 2:
        pytest.skip("this machine has one GPU")
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "bf16")


@pytest.fixture
def service(
    manager: PrivateManager, gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Service]:
    service = Service(manager)
    for name, value in service.env.items():
        monkeypatch.setenv(name, value)
    yield service
    service.ctl("stop", *gpus, check=False)


@pytest.fixture(scope="module")
def from_disk() -> dict[str, Any]:
    """The tokens of engines from disk, by layout."""
    return {}


@pytest.mark.parametrize(
    ("layout", "rendezvous"), [("tp", "solo"), ("tp", "group"), ("pp", "solo")]
)
def test_engine_on_two_gpus_decodes_what_one_from_disk_decodes(
    service: Service, gpus: list[str], model: Path, from_disk: dict[str, Any], tmp_path: Path, layout: str,
    rendezvous: str,
) -> None:  # fmt: skip
    parallel = {"tp": TP, "pp": PP}[layout]
    if layout not in from_disk:
        with Engine(str(model), "auto", ENGINE | parallel, tmp_path / "disk") as disk:
            from_disk[layout] = disk.first["tokens"]
    assert len({tuple(tokens) for tokens in from_disk[layout]}) > 1
    entry: dict[str, Any] = {
        "name": "two",
        "devices": gpus,
        "engine": {"model": str(model), "max_model_len": 1024},
    }
    entry["engine"] |= parallel
    if rendezvous == "group":
        entry["rendezvous"] = {"group": f"127.0.0.1:{GROUP_PORT}", "timeout_s": 120}
    service.manifest(entry)
    service.ctl("start", *gpus)
    options = ENGINE | parallel | {"model_loader_extra_config": {"fallback": False}}
    with Engine(str(model), "ipc_cache", options, tmp_path / "attached") as attached:
        assert attached.first["tokens"] == from_disk[layout]
        assert len(attached.first["loads"]) == 2
    assert "all digests equal" in service.ctl("verify", "two/target").stdout
