"""Which drafts are cached, by the words that vLLM reads too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weightcached.config.drafts import draft_method, has_cached_draft
from weightcached.config.manifest import ModelSpec
from weightcached.config.wanted import roles

METHODS: dict[str, tuple[dict[str, Any] | None, str | None]] = {
    "none": (None, None),
    "mtp_of_the_target": ({"method": "mtp", "num_speculative_tokens": 1}, "mtp"),
    "mtp_by_an_old_name": ({"method": "deepseek_mtp", "num_speculative_tokens": 1}, "mtp"),
    "eagle": ({"method": "eagle", "model": "org/d"}, "eagle"),
    "eagle3": ({"method": "eagle3", "model": "org/d"}, "eagle3"),
    "eagle_by_name": ({"model": "org/EAGLE-Llama3"}, "eagle"),
    "eagle3_by_name": ({"model": "org/Qwen3-8B_eagle3"}, "eagle3"),
    "eagle_although_called_a_draft_model": (
        {"method": "draft_model", "model": "org/EAGLE-Llama3"},
        "eagle",
    ),
    "another_head_by_name": ({"model": "org/Qwen3-dflash"}, "dflash"),
    "draft_model": ({"model": "org/small"}, "draft_model"),
    "medusa": ({"method": "medusa", "model": "org/m"}, "medusa"),
    "ngram": ({"method": "ngram", "num_speculative_tokens": 3}, "ngram"),
    "ngram_as_the_model": ({"model": "[ngram]", "num_speculative_tokens": 3}, "ngram"),
    "suffix": ({"method": "suffix"}, "suffix"),
}


@pytest.mark.parametrize("name", METHODS)
def test_method_is_the_one_that_vllm_resolves(name: str) -> None:
    speculative, method = METHODS[name]
    engine = {"model": "org/t", "speculative_config": speculative}
    assert draft_method(engine) == method
    assert has_cached_draft(engine) == (method in ("mtp", "eagle", "eagle3"))


@pytest.mark.parametrize(
    ("model_type", "method"), [("qwen3_next_mtp", "mtp"), ("llama", "draft_model")]
)
def test_method_that_nobody_names_is_read_from_the_drafts_configuration(
    tmp_path: Path, model_type: str, method: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert (
        draft_method({"model": "org/t", "speculative_config": {"model": str(tmp_path)}}) == method
    )


def test_draft_with_a_load_configuration_of_its_own_has_no_cache() -> None:
    speculative = {
        "method": "eagle",
        "model": "org/d",
        "draft_load_config": {"load_format": "dummy"},
    }
    assert not has_cached_draft({"model": "org/t", "speculative_config": speculative})


def test_only_ranks_of_the_last_pipeline_stage_have_the_draft() -> None:
    engine = {
        "model": "org/t", "pipeline_parallel_size": 2, "tensor_parallel_size": 2,
        "speculative_config": {"method": "eagle", "model": "org/d"},
    }  # fmt: skip
    spec = ModelSpec(name="m", devices=["cpu0", "cpu1", "cpu2", "cpu3"], engine=engine)
    found = [roles(spec, spec.placement_of(device)) for device in spec.devices]
    assert found == [("target",), ("target",), ("target", "draft"), ("target", "draft")]
