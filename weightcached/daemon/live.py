"""Engines that get a new generation while they run: services are told, other engines are named.

A service swaps its engines and answers; their new leases are the acknowledgement, and the old
generation's memory goes with the last of them. An engine of one's own is told by its owner.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from weightcached.config.manifest import OnSwap
from weightcached.daemon import packets
from weightcached.daemon.leases import Leased, Leases
from weightcached.daemon.logs import printable
from weightcached.errors import ProtocolError
from weightcached.wire.messages import SwapOutcome
from weightcached.wire.services import Reply, Request

log = logging.getLogger(__name__)

CONNECT_S = 5.0
# TimeoutError is an OSError.
NO_ANSWER = (OSError, EOFError, ProtocolError, msgspec.MsgspecError)
# A service gives up earlier: after its drain_s, and a minute for the swap.
_LONGEST_S = 3600.0
_PROCESSES_TIMEOUT_S = 5.0
_OWN = "llm.collective_rpc('weightcached_swap') in its program brings the newest, or restart the engine"


class ServiceEngine(NamedTuple):
    """An engine of a service, as that says. unmaps: its weights, if it is asked to in its sleep."""

    name: str
    unmaps: bool
    processes: Collection[int]


async def swap_engines(
    model: str, on_swap: OnSwap, sockets: Path, leases: Leases, served: Sequence[Leased]
) -> list[SwapOutcome]:
    """Have all services of a model map its newest generation; what became of each engine.

    sockets: the runtime directory; served: the model's newest generations on this device.
    """
    paths = await find_services(sockets)
    told = await asyncio.gather(*(_tell(path, model, on_swap) for path in paths))
    outcomes = [outcome for answer in told for outcome in answer.outcomes]
    # Now, not before: engines start meanwhile, and get the newest before they are used.
    answered = [path for path, answer in zip(paths, told, strict=True) if answer.answered]
    said = await asyncio.gather(*(processes_of(path, model) for path in answered))
    asked = {pid for engines in said for engine in engines for pid in engine.processes}
    outcomes += _left(model, leases, served, asked)
    for outcome in outcomes:
        log.info(
            "swap model=%s engine=%s outcome=%s pause_s=%.3f%s",
            model,
            outcome.engine,
            outcome.outcome,
            outcome.pause_s,
            f" reason={printable(outcome.reason, 1000)}" if outcome.reason else "",
        )
    return outcomes


class _Answer(NamedTuple):
    """answered: the service itself says what became of its engines, of this model or not."""

    outcomes: list[SwapOutcome]
    answered: bool


async def _tell(path: Path, model: str, on_swap: OnSwap) -> _Answer:
    name = path.parent.name
    try:
        with await packets.connect(str(path), timeout_s=CONNECT_S) as sock:
            result = await ask_on(sock, "swap", {"model": model, "on_swap": on_swap})
        engines = [
            msgspec.convert({**engine, "model": model}, SwapOutcome)
            for engine in result.get("engines", [])
        ]
        return _Answer(engines, answered=True)
    except FileNotFoundError:
        return _Answer([], answered=False)
    except ConnectionRefusedError:
        # The socket of a service that has ended.
        return _Answer([], answered=False)
    except NO_ANSWER as e:
        reason = str(e) or f"it did not answer within {_LONGEST_S:.0f} s"
        left = SwapOutcome(model=model, engine=name, outcome="left", reason=reason)
        return _Answer([left], answered=False)


async def ask_on(
    sock: socket.socket, command: str, arguments: dict[str, Any], *, timeout_s: float = _LONGEST_S
) -> dict[str, Any]:
    """A service's answer to one question. Raises OSError, EOFError, ProtocolError, MsgspecError."""
    request = Request(number=1, command=command, arguments=arguments)
    await packets.send(sock, msgspec.json.encode(request), timeout_s=CONNECT_S)
    async with asyncio.timeout(timeout_s):
        packet = await packets.recv(sock, max_fds=0)
    reply = msgspec.json.decode(packet.data, type=Reply)
    if reply.error:
        raise ProtocolError(reply.error)
    return reply.result


async def find_services(sockets: Path) -> list[Path]:
    """The sockets of engine services; their parent directories have the services' names."""
    return await asyncio.to_thread(lambda: sorted(sockets.glob("engines/*/service.sock")))


async def processes_of(path: Path, model: str) -> list[ServiceEngine]:
    """The engines of a service; none if it does not answer, so that they count as strangers."""
    try:
        with await packets.connect(str(path), timeout_s=CONNECT_S) as sock:
            result = await ask_on(
                sock, "processes", {"model": model}, timeout_s=_PROCESSES_TIMEOUT_S
            )
        return [
            ServiceEngine(each["engine"], each["unmaps"], frozenset(each["processes"]))
            for each in result["engines"]
        ]
    except (*NO_ANSWER, KeyError, TypeError) as e:
        log.info("no answer service=%s error=%r", path.parent.name, e)
        return []


def _left(
    model: str, leases: Leases, served: Sequence[Leased], asked: Collection[int]
) -> list[SwapOutcome]:
    """Engines that map an older generation of the model, without the processes that were asked: what
    became of those is known, on all devices of theirs.
    """
    return [
        SwapOutcome(
            model=model,
            engine=engine.name,
            outcome="unasked",
            generation=old.generation,
            reason=_OWN,
        )
        for old in leases.old(served)
        if old.cache.rpartition("/")[0] == model
        for engine in old.engines
        if engine.pid not in asked
    ]
