"""Weights that a draft's cache leaves out, because the engine takes the target's: vLLM's rules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.fakes.models import CPU, Packed
from weightcached.vllm_compat import draft_sharing

HIDDEN, VOCAB = 8, 16


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's embeddings stand for vLLM's."""
    monkeypatch.setattr(draft_sharing, "_is_plain", lambda layer: isinstance(layer, nn.Embedding))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(HIDDEN, HIDDEN)
        self.shared_head = nn.Module()
        self.shared_head.head = nn.Embedding(VOCAB, HIDDEN)


class Draft(nn.Module):
    def __init__(self, *, width: int = HIDDEN, tied: bool = False, **flags: bool) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCAB, width)
        self.model.layers = nn.ModuleDict({"4": Layer()})
        self.lm_head = nn.Embedding(VOCAB, HIDDEN)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        for name, value in flags.items():
            setattr(self, name, value)


def config(*, stages: int = 1, **own_rules: bool) -> Any:
    spec = SimpleNamespace(**{name: lambda value=value: value for name, value in own_rules.items()})
    return SimpleNamespace(
        speculative_config=spec, parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        model_config=SimpleNamespace(get_hidden_size=lambda: HIDDEN),
    )  # fmt: skip


EMBED, HEADS = "model.embed_tokens", ["lm_head", "model.layers.4.shared_head.head"]


@pytest.mark.parametrize(
    ("draft", "vllm_config", "expected"),
    [
        pytest.param({}, config(), [EMBED, *HEADS], id="mtp without flags"),
        pytest.param(
            {"has_own_embed_tokens": False, "has_own_lm_head": True},
            config(),
            [EMBED],
            id="own head",
        ),
        pytest.param(
            {"has_own_embed_tokens": True, "has_own_lm_head": False},
            config(),
            HEADS,
            id="own embeddings",
        ),
        pytest.param(
            {"has_own_embed_tokens": True, "has_own_lm_head": True}, config(), [], id="both its own"
        ),
        pytest.param({"width": HIDDEN // 2}, config(), HEADS, id="narrower embeddings"),
        pytest.param({}, config(stages=2), HEADS, id="target's embeddings on another stage"),
        pytest.param(
            {"tied": True}, config(stages=2), HEADS[1:], id="head tied to embeddings that stay"
        ),
        pytest.param(
            {"tied": True}, config(), [EMBED, *HEADS], id="head tied to embeddings that go too"
        ),
        pytest.param({}, config(use_gemma4_mtp=True), [], id="a proposer with rules of its own"),
        pytest.param(
            {},
            config(use_gemma4_mtp=False, use_step3p5_mtp=False),
            [EMBED, *HEADS],
            id="the usual proposer",
        ),
    ],
)
def test_left_out_is_what_the_engine_replaces(
    draft: dict[str, Any], vllm_config: Any, expected: list[str]
) -> None:
    model = Draft(**draft)
    before = {
        name: parameter.clone()
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    assert draft_sharing.leave_out(model, vllm_config) == expected
    for name, parameter in model.named_parameters(remove_duplicate=False):
        left_out = name.removesuffix(".weight") in expected
        assert parameter.shape == before[name].shape
        assert parameter.untyped_storage().nbytes() == (4 if left_out else before[name].nbytes), (
            name
        )
        assert left_out or torch.equal(parameter, before[name])


def test_what_is_left_out_is_attached_with_its_shape_and_costs_no_memory() -> None:
    def leave_out(model: Any) -> None:
        draft_sharing.leave_out(model, config())

    with Packed.of(Draft, leave_out) as packed:
        packed.prove()
        attached = packed.attach()
        weight = attached.model.embed_tokens.weight
        assert (tuple(weight.shape), weight.device, weight.untyped_storage().nbytes()) == (
            (VOCAB, HIDDEN),
            CPU,
            4,
        )
        assert not weight.any()
        assert sum(s.nbytes for s in packed.index.storages) < 2 * VOCAB * HIDDEN * 4
