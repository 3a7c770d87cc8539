"""`weightcachectl reload`, `rollback`, `drop` and `evict`: ask all daemons at once, report by cache."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress

from weightcached.cli.progress import ProgressDisplay
from weightcached.cli.status import ANSWER_TIMEOUT_S, connect
from weightcached.errors import (
    ProtocolError,
    UnknownCacheError,
    WeightcachedError,
    WeightCacheUnavailableError,
)
from weightcached.system.paths import runtime_dir
from weightcached.system.text import seconds_text
from weightcached.wire.connection import Connection, error_of
from weightcached.wire.messages import (
    CacheOutcome,
    Done,
    Drop,
    Evict,
    Loading,
    Message,
    Progress,
    Refused,
    Reload,
    ReloadReply,
    Reply,
    Rollback,
    RollbackReply,
    StatusReply,
    SwapOutcome,
)
from weightcached.wire.requests import ask
from weightcached.wire.services import ask_all_services

# The daemon waits for the manager and for engines that sleep, before it says that all is freed.
_FREE_TIMEOUT_S = 120.0
# A daemon is silent for so long only while engines map the new weights.
_SILENCE_S = 2.0
_SERVICE_TIMEOUT_S = 1.0


def reload_all(
    devices: Sequence[str],
    *,
    caches: Sequence[str],
    force: bool,
    timeout_s: float,
    display: ProgressDisplay,
    live: bool = False,
) -> dict[str, WeightcachedError | ReloadReply]:
    """Reload on every device; wait at most `timeout_s`. The results by device; raises nothing."""
    request = Reload(caches=list(caches), force=force, live=live)
    return _do_all(dict.fromkeys(devices, request), timeout_s, display)


def _do_all(
    requests: Mapping[str, Message], timeout_s: float, display: ProgressDisplay
) -> dict[str, WeightcachedError | ReloadReply]:
    """Ask every device for its reload, or a rollback, at once."""
    ended: dict[str, WeightcachedError | ReloadReply] = {}
    with ExitStack() as stack, selectors.DefaultSelector() as waiting:
        for device, request in requests.items():
            try:
                connection = stack.enter_context(connect(device))
                connection.send(request, ANSWER_TIMEOUT_S)
                waiting.register(connection, selectors.EVENT_READ, device)
            except WeightcachedError as e:
                ended[device] = e
        deadline_s = time.monotonic() + timeout_s
        while waiting.get_map():
            left_s = max(0.0, deadline_s - time.monotonic())
            ready = waiting.select(min(left_s, _SILENCE_S))
            for key, _ in ready:
                assert isinstance(key.fileobj, Connection)
                outcome = _receive_reply(key.data, key.fileobj, display)
                if outcome is not None:
                    waiting.unregister(key.fd)
                    ended[key.data] = outcome
            if not ready:
                if left_s <= _SILENCE_S:
                    break
                _show_waits(display)
        for key in waiting.get_map().values():
            ended[key.data] = WeightCacheUnavailableError(
                f"the reload is not over after {seconds_text(timeout_s)} and goes on: weightcachectl status"
            )
    return {device: ended[device] for device in requests}


def _show_waits(display: ProgressDisplay) -> None:
    """Show for what engines wait that are to map new weights: they may do so for minutes."""
    with suppress(WeightcachedError):
        for service in ask_all_services(runtime_dir(), timeout_s=_SERVICE_TIMEOUT_S).replies:
            # Those of an older weightcached do not say it.
            for engine, reason in service.get("waits", {}).items():
                display.show_text(f"engine {engine} waits", reason)


def _receive_reply(
    device: str, connection: Connection, display: ProgressDisplay
) -> WeightcachedError | ReloadReply | None:
    try:
        return _handle_reply(device, connection.receive(ANSWER_TIMEOUT_S)[0], display)
    except WeightcachedError as e:
        return e


def _handle_reply(
    device: str, reply: Reply, display: ProgressDisplay
) -> WeightcachedError | ReloadReply | None:
    if isinstance(reply, Progress | Loading):
        display.show(f"{device} {reply.cache}", reply)
        return None
    if isinstance(reply, ReloadReply):
        return reply
    if isinstance(reply, Refused):
        return error_of(reply)
    return ProtocolError(
        f"the daemon of {device} answered Reload with {type(reply).__name__}, expected ReloadReply"
    )


def outcome_text(device: str, outcome: CacheOutcome) -> str:
    """One cache's line of the report."""
    what = f"{device} {outcome.cache}: {outcome.outcome}"
    if outcome.outcome == "failed":
        return f"{what}: {outcome.error}"
    if outcome.outcome == "dropped":
        return what
    if not outcome.generation:
        return f"{device} {outcome.cache}: on demand, loaded when an engine asks for it"
    took = f" in {seconds_text(outcome.seconds)}" if outcome.outcome == "loaded" else ""
    note = f"; {outcome.note}" if outcome.note else ""
    return f"{what}, generation {outcome.generation}{took}{note}"


def generations_before(
    devices: Sequence[str], cache: str
) -> dict[str, WeightcachedError | RollbackReply]:
    """The generation to which each device's cache would go back; by device; raises nothing."""
    found: dict[str, WeightcachedError | RollbackReply] = {}
    for device in devices:
        try:
            with connect(device) as connection:
                found[device] = ask(
                    connection, Rollback(cache=cache), RollbackReply, ANSWER_TIMEOUT_S
                )
        except WeightcachedError as e:
            found[device] = e
    return found


def rollback_all(
    snapshots: Mapping[str, str], cache: str, *, timeout_s: float, display: ProgressDisplay
) -> dict[str, WeightcachedError | ReloadReply]:
    """Go back on every device to its snapshot of this name, as reload_all()."""
    requests = {device: Rollback(cache=cache, snapshot=name) for device, name in snapshots.items()}
    return _do_all(requests, timeout_s, display)


def swap_text(device: str, swap: SwapOutcome) -> str:
    """One engine's line of the report."""
    what = f"{device} {swap.model}: {swap.engine}"
    if swap.outcome == "swapped":
        drained = f" after {seconds_text(swap.drain_s)} of requests" if swap.drain_s >= 1 else ""
        return f"{what} swapped to generation {swap.generation} in {swap.pause_s * 1e3:.0f} ms{drained}"
    if swap.outcome == "unchanged":
        return f"{what} has generation {swap.generation} already"
    if swap.outcome == "restarting":
        return (
            f"{what} cannot take it while it runs, its service starts another engine: {swap.reason}"
        )
    where = f" on generation {swap.generation}" if swap.generation else ""
    return f"{what} stays{where}: {swap.reason}"


def holders(replies: Iterable[StatusReply], wanted: str) -> list[tuple[str, str]]:
    """(device, cache) of every cache called `wanted`, a model's name or MODEL/ROLE.

    Raises UnknownCacheError if there is none.
    """
    known = [(reply.device, cache.name) for reply in replies for cache in reply.caches]
    found = [(device, name) for device, name in known if wanted in (name, name.rpartition("/")[0])]
    if not found:
        listed = ", ".join(f"{name} on {device}" for device, name in known) or "none"
        raise UnknownCacheError(f"no daemon has a cache {wanted!r}; caches: {listed}")
    return found


def free(device: str, request: Drop | Evict) -> None:
    """Free one cache. Raises WeightcachedError, also if the daemon refuses."""
    with connect(device) as connection:
        ask(connection, request, Done, _FREE_TIMEOUT_S)
