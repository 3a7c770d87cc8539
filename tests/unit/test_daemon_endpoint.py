"""The daemon's socket, if it was removed and cannot be made again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from weightcached.daemon.main import Daemon
from weightcached.errors import RuntimePathError


class Lost:
    """An endpoint whose socket is gone; making it again raises one error after the other."""

    socket = Path("/run/user/0/weightcached/cpu0.sock")

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def is_lost(self) -> bool:
        return True

    def restore(self) -> NoReturn:
        raise self.errors.pop(0)


class Told:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def status(self, text: str) -> None:
        self.texts.append(text)


def test_any_reason_against_the_socket_is_told_and_it_is_tried_again() -> None:
    """Whatever ended the trying would leave engines without a daemon for good."""
    daemon: Any = Daemon.__new__(Daemon)
    daemon._endpoint = Lost(
        OSError(24, "Too many open files"), RuntimePathError("the directory is full")
    )
    daemon._endpoint_turn, daemon._unreachable = asyncio.Lock(), ""
    daemon._notifier = told = Told()
    daemon._server = SimpleNamespace(accept_on=None)

    async def test() -> None:
        await daemon._restore_endpoint()
        await daemon._restore_endpoint()

    asyncio.run(test())
    assert told.texts == [
        "unreachable: [Errno 24] Too many open files",
        "unreachable: the directory is full",
    ]
    assert daemon._unreachable == "the directory is full"
