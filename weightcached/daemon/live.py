"""Engines that get a new generation while they run: services are told, other engines are named.

A service swaps its engines and answers; their new leases are the acknowledgement, and the old
generation's memory goes with the last of them. An engine of one's own is told by its owner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from weightcached.config.manifest import OnSwap
from weightcached.daemon import packets
from weightcached.daemon.leases import Leased, Leases
from weightcached.daemon.logs import printable
from weightcached.errors import ProtocolError
from weightcached.wire.messages import SwapOutcome
from weightcached.wire.services import Reply, Request

log = logging.getLogger(__name__)

_CONNECT_S = 5.0
# A service gives up earlier: after its drain_s, and a minute for the swap.
_LONGEST_S = 3600.0
_OWN = "llm.collective_rpc('weightcached_swap') in its program brings the newest, or restart the engine"


async def swap_engines(
    model: str, on_swap: OnSwap, sockets: Path, leases: Leases, served: Sequence[Leased]
) -> list[SwapOutcome]:
    """Have all services of a model map its newest generation; what became of each engine.

    sockets: the runtime directory; served: the model's newest generations on this device.
    """
    paths = await asyncio.to_thread(lambda: sorted(sockets.glob("engines/*/service.sock")))
    told = await asyncio.gather(*(_tell(path, model, on_swap) for path in paths))
    outcomes = [outcome for each in told for outcome in each]
    outcomes += _left(model, leases, served)
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


async def _tell(path: Path, model: str, on_swap: OnSwap) -> list[SwapOutcome]:
    name = path.parent.name
    try:
        result = await _ask(path, {"model": model, "on_swap": on_swap})
        return [
            msgspec.convert({**engine, "model": model}, SwapOutcome)
            for engine in result.get("engines", [])
        ]
    except FileNotFoundError:
        return []
    except ConnectionRefusedError:
        # The socket of a service that has ended.
        return []
    except (OSError, EOFError, ProtocolError, msgspec.MsgspecError) as e:
        reason = str(e) or f"it did not answer within {_LONGEST_S:.0f} s"
        return [SwapOutcome(model=model, engine=name, outcome="left", reason=reason)]


async def _ask(path: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    request = Request(number=1, command="swap", arguments=arguments)
    with await packets.connect(str(path), timeout_s=_CONNECT_S) as sock:
        await packets.send(sock, msgspec.json.encode(request), timeout_s=_CONNECT_S)
        async with asyncio.timeout(_LONGEST_S):
            packet = await packets.recv(sock, max_fds=0)
    reply = msgspec.json.decode(packet.data, type=Reply)
    if reply.error:
        raise ProtocolError(reply.error)
    return reply.result


def _left(model: str, leases: Leases, served: Sequence[Leased]) -> list[SwapOutcome]:
    """Engines that map an older generation of the model."""
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
    ]
