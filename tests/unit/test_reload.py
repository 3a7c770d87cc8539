"""reload_weights(): from the cache if the engine maps it, from disk otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weightcache_loader import reload, swap
from weightcached.vllm_compat import worker as vllm_worker


def test_mapped_weights_are_taken_from_the_cache(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker: Any = SimpleNamespace()
    monkeypatch.setattr(vllm_worker, "mapped_of", lambda worker: ["a model"])
    for newer in (True, False):
        monkeypatch.setattr(swap, "take_newest", lambda worker, newer=newer: newer)
        with caplog.at_level("INFO", "vllm.weightcached"):
            assert reload.reload_weights(worker)
    assert caplog.messages == ["reload_weights: the newest weights are mapped already"]
