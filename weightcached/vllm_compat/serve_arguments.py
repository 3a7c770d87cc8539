"""The manifest's arguments of `vllm serve`, through vLLM's own parser: same checks, same words."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from weightcached.errors import ArgumentError
from weightcached.system.text import near_miss


def parse(arguments: Mapping[str, Any]) -> argparse.Namespace:
    """The arguments, by their Python names, as `vllm serve` has them. Raises ArgumentError."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    except ImportError:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))

    def fail(message: str) -> None:
        raise ArgumentError(f"vLLM refuses the arguments: {message}")

    parser.error = fail
    actions = {action.dest: action for action in parser._actions if action.option_strings}
    words: list[str] = []
    for name, value in arguments.items():
        if name not in actions:
            raise ArgumentError(f"vllm serve has no argument {name}{near_miss(name, actions)}")
        words += _words(actions[name], value)
    args: argparse.Namespace = parser.parse_args(words)
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as e:
        raise ArgumentError(f"vLLM refuses the arguments: {e}") from e
    return args


def _words(action: argparse.Action, value: Any) -> list[str]:
    """The words of the command line for `name: value`."""
    if value is None:
        return []
    # The first long one is the argument's own; --no-x and, in 0.33, --disable-x for --enable-x follow.
    options = [text for text in action.option_strings if text.startswith("--")]
    option = options[0]
    if isinstance(value, bool) and action.nargs == 0:
        negatives = getattr(action, "negative_option_strings", ())
        negative = [o for o in options[1:] if o.startswith("--no-") or o in negatives]
        return [option] if value else negative[:1]
    if isinstance(value, list) and action.nargs not in (None, 0):
        return [option, *map(_word, value)]
    return [f"{option}={_word(value)}"] if action.nargs is None else [option, _word(value)]


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
