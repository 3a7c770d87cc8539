"""Hooks of quantization methods that cannot run on processed weights are left out, and put back."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from weightcache_loader.engine import _hooks_left_out
from weightcached.errors import UnsupportedQuantForIPCError


class Method:
    supports_pre_processed_weights = False

    def __init__(self) -> None:
        self.ran = 0

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.ran += 1


class Supporting(Method):
    supports_pre_processed_weights = True


class SaysByInstance(Method):
    def __init__(self) -> None:
        super().__init__()
        self.supports_pre_processed_weights = False


class SaysByProperty(Method):
    @property
    def supports_pre_processed_weights(self) -> bool:  # type: ignore[override]
        return False


def model_of(*methods: Any) -> nn.Module:
    model = nn.Module()
    for number, method in enumerate(methods):
        layer = nn.Module()
        layer.quant_method = method
        model.add_module(f"layer{number}", layer)
    return model


def run(model: nn.Module) -> None:
    # As vLLM does: refuse what does not support it, then call the hook.
    for layer in model.children():
        assert layer.quant_method.supports_pre_processed_weights
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("kind", [Method, SaysByInstance])
def test_hook_that_cannot_run_is_left_out_and_put_back(kind: type[Method]) -> None:
    method, supporting = kind(), Supporting()
    before = dict(vars(method))
    with _hooks_left_out(model_of(method, supporting, method)):
        run(model_of(method, supporting, method))
    assert (method.ran, supporting.ran) == (0, 1)
    assert vars(method) == before
    assert not method.supports_pre_processed_weights
    method.process_weights_after_loading(nn.Module())
    assert method.ran == 1


def test_hooks_are_put_back_after_an_error() -> None:
    method = Method()
    with pytest.raises(KeyError), _hooks_left_out(model_of(method)):
        raise KeyError
    assert vars(method) == {"ran": 0}


def test_method_that_answers_by_a_property_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedQuantForIPCError) as e, _hooks_left_out(model_of(Supporting(), SaysByProperty())):
        pass
    assert str(e.value) == (
        "layer1: SaysByProperty does not run on processed weights, and says so in a way that cannot be answered; "
        "load this model from disk"
    )
