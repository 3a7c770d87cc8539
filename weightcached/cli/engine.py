"""`weightcachectl engine`: ask the supervisors of engine services, and show their answers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weightcached.cli.text import columns
from weightcached.errors import EngineError, RuntimePathError
from weightcached.system.paths import runtime_dir
from weightcached.system.text import seconds_text
from weightcached.wire.services import (
    ANSWER_TIMEOUT_S,
    ERROR_FILE,
    Services,
    ask_all_services,
    ask_service,
)

# A start may compile; the supervisor ends one that takes longer.
LONGEST_S = 3600.0
# The newer software is tried first, and imported from a cold disk.
_RENEWAL_TIMEOUT_S = 90.0
_HEAD = ("ENGINE", "STATE", "LISTEN", "SERVING", "STANDBY", "TAKEOVERS", "DETAIL")
# The names that `status --json` prints of each service; other tools read them.
_FIELDS = ("name", "state", "pid", "generation", "since", "takeovers", "last_takeover_s")


def socket_of(name: str) -> Path:
    """The socket of the service's supervisor. Raises RuntimePathError."""
    return runtime_dir() / "engines" / name / "service.sock"


def unit_of(name: str) -> str:
    """The unit that keeps the service."""
    return f"weightcached-engine@{name}.service"


def last_words(name: str) -> str:
    """Why the service's supervisor gave up since forget_words(), or ""."""
    try:
        text = socket_of(name).with_name(ERROR_FILE).read_text(encoding="utf-8", errors="replace")
    except (OSError, RuntimePathError):
        return ""
    return text.strip()


def forget_words(name: str) -> None:
    """What a supervisor says from now on is of the attempt to come."""
    with contextlib.suppress(OSError, RuntimePathError):
        socket_of(name).with_name(ERROR_FILE).unlink()


def ask(name: str, command: str, *, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
    """The supervisor's answer. Raises EngineError with the way out."""
    path = socket_of(name)
    if not path.exists():
        raise EngineError(
            f"engine service {name} is not running: weightcachectl engine start {name}"
        )
    return ask_service(path, command, timeout_s=timeout_s)


def renew(name: str) -> None:
    """Have the supervisor go on as the software that is installed now, if that has changed.

    Raises EngineError.
    """
    # Before it was so, a supervisor did not know the question either.
    since = ask(name, "status").get("supervisor_since")
    if since is None:
        return
    try:
        if not ask(name, "renew", timeout_s=_RENEWAL_TIMEOUT_S)["renews"]:
            return
    except EngineError:
        # Another restart may have renewed it, which ends all connections.
        if _supervisor_since(name) == since:
            raise
    _supervisor_since(name, but=since)


def _supervisor_since(name: str, *, but: float | None = None) -> float:
    """When the supervisor began that answers, which is not to be the one of `but`.

    Raises EngineError if none does.
    """
    deadline_s = time.monotonic() + _RENEWAL_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(EngineError):
            since = float(ask(name, "status")["supervisor_since"])
            if since != but:
                return since
        time.sleep(0.05)
    raise EngineError(
        f"the supervisor of {name} did not come back: journalctl --user -u {unit_of(name)}"
    )


def ask_all() -> Services:
    """The state of every service that has a supervisor."""
    try:
        return ask_all_services(runtime_dir())
    except RuntimePathError:
        return Services([], {})


def as_json(replies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The value of `engines` in `status --json`."""
    return [{field: reply[field] for field in _FIELDS} for reply in replies]


def as_table(replies: Sequence[dict[str, Any]], *, now: float | None = None) -> list[str]:
    """Lines of a table with one row per service."""
    return columns(
        [_HEAD, *(_row(reply, time.time() if now is None else now) for reply in replies)]
    )


def _row(reply: dict[str, Any], now: float) -> tuple[str, ...]:
    number = reply["generation"]
    serving = f"engine {number}, pid {reply['pid']}" if number else "-"
    others = [e for e in reply["engines"] if e["number"] != number]
    standby = ", ".join(f"engine {e['number']} {e['state']}" for e in others) or "-"
    last = f", last in {reply['last_takeover_s']:.2f} s" if reply["takeovers"] else ""
    since = seconds_text(max(0.0, now - reply["since"]))
    detail = f"last start failed: {reply['error']}" if reply["error"] else f"for {since}"
    return (
        reply["name"], reply["state"], reply["listen"], serving, standby,
        f"{reply['takeovers']}{last}", detail,
    )  # fmt: skip
