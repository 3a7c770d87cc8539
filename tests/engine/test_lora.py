"""An engine that takes LoRA adapters maps the cache of its base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.conftest import Engines, Service
from tests.engine.test_end_to_end import entry, serving

FLOAT: dict[str, Any] = {"dtype": "float32"}


def test_engine_with_lora_maps_the_base_that_is_cached_without(
    service: Service, engines: Engines, models: dict[str, Path]
) -> None:
    model = models["tied"]
    disk = engines.tokens(model, **FLOAT, enable_lora=True)
    with serving(service, "cpu0", entry("tied", model, "cpu0", **FLOAT)):
        attached = engines.tokens(
            model, "ipc_cache", loader={"fallback": False}, **FLOAT, enable_lora=True
        )
        assert attached == disk
        assert engines.ask(call="mapped_bytes")["result"] > 0
        engines.ask(close=True)
