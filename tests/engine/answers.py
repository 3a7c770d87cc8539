"""A test's child process answers with a line that begins with "ANSWER " on its first stdout."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def open_channel() -> Callable[..., None]:
    """Take standard output away from vLLM, which prints to it. Returns a function that prints one
    answer there.

    Its second argument is a directory that differs in each run, and is DIR in the answer.
    """
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(answer: Any, directory: Path | None = None) -> None:
        text = json.dumps(answer)
        out.write(f"ANSWER {text.replace(str(directory), 'DIR') if directory else text}\n")
        out.flush()

    return say
