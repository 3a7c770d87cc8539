"""Models that torchao quantizes, while they load and before. `make extras` has an environment with it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import ROOT, Engines, Service
from tests.engine.test_end_to_end import entry, serving

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None,
    reason="make extras runs it, in an environment with torchao",
)


@pytest.fixture(scope="module")
def checkpoint(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """A quantized checkpoint, and torchao's configuration as JSON."""
    target = tmp_path_factory.mktemp("torchao") / "int8"
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.torchao_checkpoint", str(models["untied"]), str(target)],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return target, done.stdout.splitlines()[-1]


def test_weights_that_torchao_quantizes_while_they_load_are_mapped(
    service: Service, engines: Engines, models: dict[str, Path], checkpoint: tuple[Path, str]
) -> None:
    """On the CPU the segments hold what was loaded, and each engine quantizes it."""
    model = models["untied"]
    how: dict[str, Any] = {
        "quantization": "torchao",
        "hf_overrides": {"quantization_config_dict_json": checkpoint[1]},
    }
    disk = engines.tokens(model, **how)
    assert disk != engines.tokens(model), "it quantizes"
    with serving(service, "cpu0", entry("online", model, "cpu0", **how)):
        assert engines.tokens(model, "ipc_cache", loader={"fallback": False}, **how) == disk
        assert engines.ask(call="mapped_bytes")["result"] > 0
        engines.ask(close=True)


def test_checkpoint_of_torchao_is_refused_by_the_tensor_that_cannot_be_shared(
    service: Service, engines: Engines, checkpoint: tuple[Path, str]
) -> None:
    model, _ = checkpoint
    disk = engines.tokens(model)
    service.manifest(entry("int8", model, "cpu0"))
    try:
        failed = service.ctl("start", "cpu0", check=False)
        assert "Int8Tensor" in failed.stdout + failed.stderr
        assert "is not a plain strided tensor" in failed.stdout + failed.stderr
        assert engines.tokens(model, "ipc_cache") == disk, "engines load it from disk"
        engines.ask(close=True)
    finally:
        service.ctl("stop", "cpu0", check=False)
        service.manager.systemctl("reset-failed", "weightcached@cpu0.service", check=False)
