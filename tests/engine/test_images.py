"""A vision model: the tower in front of the language model is mapped too."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from bench.checkpoint_models import CONFIGS
from bench.checkpoints import write_checkpoint
from tests.engine.conftest import Engines, Service
from tests.engine.test_end_to_end import entry, serving

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None,
    reason="vLLM's vision models need torchvision: make extras has an environment with it",
)


def test_attached_vision_model_says_to_images_what_it_says_from_disk(
    service: Service, engines: Engines, tmp_path: Path
) -> None:
    model = tmp_path / "llava"
    write_checkpoint(model, CONFIGS["llava"](), seed=6)
    # Its processor needs the tokenizer.
    options = {"skip_tokenizer_init": False}
    engine = {"model": str(model), "load_format": "auto", **options}
    assert engines.ask(engine=engine, only="start") == {}
    disk = engines.ask(call="images")["result"]
    assert len({tuple(tokens) for tokens in disk}) == len(disk), "the images make the difference"
    with serving(service, "cpu0", entry("vision", model, "cpu0")):
        mapped = {"load_format": "ipc_cache", "model_loader_extra_config": {"fallback": False}}
        assert engines.ask(engine=engine | mapped, only="start") == {}
        assert engines.ask(call="mapped_bytes")["result"] > 0
        assert engines.ask(call="images")["result"] == disk
        engines.ask(close=True)
        assert "all digests equal" in service.ctl("verify", "vision/target").stdout
