"""A device with room for one generation of a model: engine services give way while the next comes.

A service's engines sleep for as long as our connection to it lasts, so that a daemon that dies
takes nothing along, and unmap the old generation when they are asked to (leases.py). An engine of
one's own cannot be told: then the old one stays.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from weightcached.config.manifest import OnSwap
from weightcached.daemon import packets
from weightcached.daemon.leases import Leased, Leases
from weightcached.daemon.live import (
    CONNECT_S,
    NO_ANSWER,
    ServiceEngine,
    ask_on,
    find_services,
    processes_of,
    swap_engines,
)
from weightcached.daemon.logs import printable
from weightcached.wire.messages import EngineStatus, SwapOutcome

log = logging.getLogger(__name__)

# An engine's wake, tried several times, and the same of its standby.
_RESUME_TIMEOUT_S = 180.0


class _Way(NamedTuple):
    """A service whose engines sleep for us, since a time of time.monotonic()."""

    name: str
    sock: socket.socket
    drain_s: float
    since_s: float


class Ways:
    """The ways that services give this daemon, by model.

    sockets: the runtime directory; served: the generations that are served now.
    """

    def __init__(
        self, device: str, sockets: Path, leases: Leases, served: Callable[[], Sequence[Leased]]
    ) -> None:
        self._device = device
        self._sockets = sockets
        self._leases = leases
        self._served = served
        self._open: dict[str, list[_Way]] = {}
        self._on_swap: dict[str, OnSwap] = {}
        # Models whose services were asked, until drop().
        self.disturbed: set[str] = set()
        self._done: dict[str, tuple[list[Leased], list[SwapOutcome]]] = {}

    @property
    def open_models(self) -> list[str]:
        return list(self._open)

    async def open(self, model: str, on_swap: OnSwap, generation: Leased) -> str:
        """Have the services whose engines hold the generation give way; "", or why they do not.

        Until close(), which needs not follow after a refusal.
        """
        if model in self._open:
            # For its draft now.
            return ""
        paths = await find_services(self._sockets)
        said = await asyncio.gather(*(processes_of(path, model) for path in paths))
        engines = [engine for each in said for engine in each]
        held = [lease.status() for lease in self._leases.on(generation)]
        if reason := obstacle(held, engines):
            return reason
        pids = {engine.pid for engine in held}
        asked = [
            path
            for path, each in zip(paths, said, strict=True)
            if any(pids & {*engine.processes} for engine in each)
        ]
        self._open[model], self._on_swap[model] = [], on_swap
        if asked:
            self.disturbed.add(model)
        try:
            reasons = await asyncio.gather(*(self._ask(path, model, on_swap) for path in asked))
        except BaseException:
            self.drop()
            raise
        if reason := "; ".join(filter(None, reasons)):
            await self.close(model, swap=False)
        return reason

    async def _ask(self, path: Path, model: str, on_swap: OnSwap) -> str:
        name = path.parent.name
        log.info("asking a service to give way model=%s service=%s", model, name)
        try:
            sock = await packets.connect(str(path), timeout_s=CONNECT_S)
        except OSError as e:
            return f"its service {name} cannot be reached: {e}"
        try:
            result = await ask_on(sock, "give_way", {"device": self._device, "on_swap": on_swap})
            way = _Way(name, sock, float(result["drain_s"]), time.monotonic())
        except NO_ANSWER as e:
            sock.close()
            return f"the engines of its service {name} do not sleep: {printable(str(e), 1000)}"
        except BaseException:
            sock.close()
            raise
        self._open[model].append(way)
        return ""

    async def close(self, model: str, *, swap: bool) -> None:
        """Have the services' engines wake; swap: with what is served now."""
        ways = self._open.pop(model, [])
        outcomes: list[SwapOutcome] = []
        try:
            served = list(self._served())
            if swap:
                outcomes = await swap_engines(
                    model, self._on_swap[model], self._sockets, self._leases, served
                )
            back = await asyncio.gather(*(_resume(way) for way in ways))
        finally:
            for way in ways:
                way.sock.close()
        for way, (error, gap_s) in zip(ways, back, strict=True):
            log.info(
                "gave way model=%s service=%s drain_s=%.3f gap_s=%.3f%s",
                model,
                way.name,
                way.drain_s,
                gap_s,
                f" error={printable(error, 1000)}" if error else "",
            )
            outcomes = [_as_seen(outcome, way, gap_s) for outcome in outcomes]
            restarts = any(o.outcome == "restarting" and _is_of(o, way) for o in outcomes)
            if error and not restarts:
                outcomes.append(
                    SwapOutcome(model=model, engine=way.name, outcome="left", reason=error)
                )
        if swap:
            self._done[model] = (served, outcomes)

    def drop(self) -> None:
        """A round is over. Give up the ways that are open: services do as if this daemon had died."""
        self.disturbed.clear()
        for ways in self._open.values():
            for way in ways:
                way.sock.close()
        self._open.clear()

    def take_outcomes(self, model: str) -> list[SwapOutcome] | None:
        """What became of the model's engines, once; None if they were not told of what is served
        now.
        """
        served, outcomes = self._done.pop(model, ([], []))
        return outcomes if served and served == list(self._served()) else None


def obstacle(held: Sequence[EngineStatus], engines: Sequence[ServiceEngine]) -> str:
    """Why these holders of a generation would not all give it up, or "".

    One that sleeps already and belongs to nobody unmaps if it is asked to.
    """
    owners = {pid: engine for engine in engines for pid in engine.processes}
    strangers = [h.name for h in held if h.pid not in owners and not h.parked]
    if strangers:
        return (
            f"they are mapped by {', '.join(strangers)}, of no engine service that could let it sleep: end it, or "
            "let it sleep"
        )
    owned = [owners[h.pid] for h in held if h.pid in owners and not h.parked]
    if keep := sorted({engine.name for engine in owned if not engine.unmaps}):
        return (
            f"{', '.join(keep)} would keep them mapped while asleep: only the sleep back end 'weightcached' "
            "gives weights up (a GPU, vLLM 0.33 or newer)"
        )
    return ""


def _as_seen(outcome: SwapOutcome, way: _Way, gap_s: float) -> SwapOutcome:
    """The time without an answer, of which the engine, asleep, knew nothing."""
    if outcome.outcome != "swapped" or not _is_of(outcome, way):
        return outcome
    return msgspec.structs.replace(outcome, pause_s=gap_s, drain_s=way.drain_s)


def _is_of(outcome: SwapOutcome, way: _Way) -> bool:
    return outcome.engine.rpartition("/")[0] == way.name


async def _resume(way: _Way) -> tuple[str, float]:
    """Why the service does not serve again, or "", and for how many seconds it did not."""
    error = ""
    try:
        said: dict[str, Any] = await ask_on(way.sock, "resume", {}, timeout_s=_RESUME_TIMEOUT_S)
        if not (said.get("serving") or said.get("waits")):
            error = said.get("error") or "they could not wake, others are started"
    except NO_ANSWER as e:
        error = str(e) or "no answer"
    if error:
        error = f"it does not serve yet: {error}; 'weightcachectl engine status' shows its state"
    return error, time.monotonic() - way.since_s
