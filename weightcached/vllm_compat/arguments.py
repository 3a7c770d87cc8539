"""vLLM's command line to engine arguments: a child of `weightcached preload` and of `weightcachectl
add`, run by the engine's interpreter.

Prints the given arguments as one JSON object, by Python names, for EngineArgs(**…). At a fault it
prints vLLM's own message on standard error and ends with status 2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from weightcached.errors import EXIT_USAGE
from weightcached.system.text import near_miss


def parse(arguments: list[str]) -> dict[str, Any]:
    """The engine arguments of the command line, without defaults. Ends the process at a fault."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(
        prog="weightcached preload", usage="%(prog)s --model MODEL [engine arguments]"
    )
    EngineArgs.add_cli_args(parser)
    for action in parser._actions:
        # The loader child fills in vLLM's defaults. An argument that was not given must not look
        # like a given one.
        action.default = argparse.SUPPRESS
        if callable(action.type):
            action.type = _plain(action.type)
    refuse, known = parser.error, [o for a in parser._actions for o in a.option_strings]

    def error(message: str) -> None:
        unknown = message.partition("unrecognized arguments: ")[2].split()
        refuse(message + (near_miss(unknown[0].partition("=")[0], known) if unknown else ""))

    parser.error = error
    return dict(vars(parser.parse_args(arguments)))


def _plain(parsed: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parsed`, checked by vLLM, as JSON values; configuration objects stay as given."""

    def check(text: str) -> Any:
        value = parsed(text)
        return value if _is_plain(value) else json.loads(text)

    check.__name__ = getattr(parsed, "__name__", "value")
    return check


def _is_plain(value: Any) -> bool:
    if type(value) in (str, int, float, bool, type(None)):
        return True
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) is dict and all(type(k) is str and _is_plain(v) for k, v in value.items())


def main() -> None:
    """Parse this process's arguments and print them."""
    # vLLM prints to standard output too; only the answer goes there.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    given = parse(sys.argv[1:])
    try:
        text = json.dumps(given)
    except TypeError as e:
        sys.stderr.write(
            f"weightcached preload: error: an engine argument cannot be kept in a manifest: {e}\n"
        )
        raise SystemExit(EXIT_USAGE) from e
    answer.write(text)
    answer.close()


if __name__ == "__main__":
    main()
