"""The questions that tools and engines ask a daemon, each asked in one place."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from weightcached.errors import ProtocolError
from weightcached.wire.connection import Connection, error_of
from weightcached.wire.messages import Message, Refused, Status, StatusReply

_R = TypeVar("_R", bound=Message)


def ask(connection: Connection, request: Message, expected: type[_R], timeout_s: float) -> _R:
    """Send a request whose answer is one message of type `expected`.

    Raises the error of a refusal, ProtocolError for any other answer, and as Connection.request().
    """
    reply = connection.request(request, timeout_s)
    if isinstance(reply, Refused):
        raise error_of(reply)
    if not isinstance(reply, expected):
        raise ProtocolError(
            f"the daemon of {connection.welcome.device} answered {type(request).__name__} with "
            f"{type(reply).__name__}, expected {expected.__name__}"
        )
    return reply


def ask_status(path: Path, *, timeout_s: float, software: str = "") -> StatusReply:
    """The state of the daemon on the socket at `path`. Raises WeightcachedError.

    timeout_s: for the connection, and again for the answer.
    """
    with Connection.connect(
        path, timeout_s=timeout_s, purpose="ctl", software=software
    ) as connection:
        return ask(connection, Status(), StatusReply, timeout_s)
