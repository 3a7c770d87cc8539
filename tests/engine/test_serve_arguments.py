"""Arguments of the manifest through vLLM's own parser."""

from __future__ import annotations

import argparse
import contextlib
import warnings
from collections.abc import Iterator

import pytest

from weightcached.errors import ArgumentError
from weightcached.vllm_compat.serve_arguments import _words, parse


@pytest.fixture(autouse=True)
def foreign_warnings() -> Iterator[None]:
    """vLLM's imports warn."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


def test_values_of_every_kind_arrive_as_on_the_command_line() -> None:
    args = parse(
        {
            "model": "org/tiny",
            "max_model_len": 256,
            "gpu_memory_utilization": 0.5,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "served_model_name": ["a", "b"],
            "api_key": ["secret"],
            "allowed_origins": ["*"],
            "compilation_config": {"mode": 0},
            "model_loader_extra_config": {"socket_dir": "/run/x", "start_parked": True},
            "quantization": None,
            "ssl_keyfile": "/k",
        }
    )
    assert (args.model, args.max_model_len, args.gpu_memory_utilization) == ("org/tiny", 256, 0.5)
    assert (args.enforce_eager, args.skip_tokenizer_init) == (True, True)
    assert args.enable_prefix_caching is False
    assert (args.served_model_name, args.api_key) == (["a", "b"], ["secret"])
    assert args.allowed_origins == ["*"]
    assert int(args.compilation_config.mode) == 0
    assert args.model_loader_extra_config == {"socket_dir": "/run/x", "start_parked": True}
    assert (args.quantization, args.ssl_keyfile) == (None, "/k")


@pytest.mark.parametrize(
    ("own", "others", "negatives"),
    [
        ("--enforce-eager", ["--no-enforce-eager"], None),
        # vLLM 0.33, where the last is also the longest.
        (
            "--enable-sleep-mode",
            ["--disable-sleep-mode"],
            {"--no-enable-sleep-mode", "--disable-sleep-mode"},
        ),
    ],
)
def test_true_is_the_arguments_own_option_and_false_its_inverse(
    own: str, others: list[str], negatives: set[str] | None
) -> None:
    action = argparse.Action([own, *others], own.strip("-").replace("-", "_"), nargs=0)
    if negatives is not None:
        action.negative_option_strings = negatives  # type: ignore[attr-defined]
    assert _words(action, True) == [own]
    assert _words(action, False) == others


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_model_length": 1}, "vllm serve has no argument max_model_length (did you mean"),
        ({"gpu_memory_utilization": "much"}, "vLLM refuses the arguments: argument --gpu-memory"),
        (
            {"enable_auto_tool_choice": True},
            "--enable-auto-tool-choice requires --tool-call-parser",
        ),
    ],
)
def test_what_vllm_refuses_is_told_in_its_words(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse({"model": "org/tiny", **arguments})
    assert message in str(caught.value)
