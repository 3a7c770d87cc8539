"""Requests to supervisors of engine services, and of a supervisor to its engines.

One request is one packet on a SOCK_SEQPACKET socket, JSON, and so is its reply, which carries the
request's number.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from weightcached.errors import EngineError, ProtocolError
from weightcached.wire.framing import recv_packet, send_packet

ANSWER_TIMEOUT_S = 5.0
# In the service's directory: why its supervisor gave up before any engine served.
ERROR_FILE = "error"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """`command` and its arguments; `number` comes back with the reply."""

    number: int
    command: str
    arguments: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """error: empty if the command succeeded."""

    number: int
    error: str = ""
    result: dict[str, Any] = {}


def ask_service(
    path: Path, command: str, *, timeout_s: float, arguments: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The result of one question, for a program without an event loop. Raises EngineError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(os.fspath(path))
            request = Request(number=1, command=command, arguments=arguments or {})
            send_packet(sock, msgspec.json.encode(request))
            reply = msgspec.json.decode(recv_packet(sock, max_fds=0).data, type=Reply)
        except TimeoutError as e:
            raise EngineError(f"no answer on {path} within {timeout_s:g} s") from e
        except (OSError, EOFError, ProtocolError, msgspec.MsgspecError) as e:
            raise EngineError(f"no answer on {path}: {e}") from e
    if reply.error:
        raise EngineError(reply.error)
    return reply.result


class Services(NamedTuple):
    """The replies of all services, and the errors of others, by name."""

    replies: list[dict[str, Any]]
    errors: dict[str, EngineError]


def ask_all_services(sockets: Path, *, timeout_s: float = ANSWER_TIMEOUT_S) -> Services:
    """The state of every service that has a supervisor; `sockets` is the runtime directory."""
    replies: list[dict[str, Any]] = []
    errors: dict[str, EngineError] = {}
    for path in sorted(sockets.glob("engines/*/service.sock")):
        try:
            replies.append(ask_service(path, "status", timeout_s=timeout_s))
        except EngineError as e:
            errors[path.parent.name] = e
    return Services(replies, errors)
