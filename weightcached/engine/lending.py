"""Whether a standby holds the memory of the serving engine's KV cache, so that it can have it at once
when that engine is gone (model/kv_lending.py).

Memory that is lent is not free as long as the standby holds it. So it gives it back before another
engine or another service gets the device.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from weightcached.engine.running import Running
from weightcached.engine.states import Phase, Service
from weightcached.errors import EngineError

log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0


class Lending:
    """What the engines of one service have lent each other.

    keep: runs a task; failed: ends an engine, with the reason.
    """

    def __init__(
        self,
        service: Service,
        running: dict[int, Running],
        *,
        keep: Callable[[Coroutine[Any, Any, None]], object],
        failed: Callable[[int, str], None],
    ) -> None:
        self._service = service
        self._running = running
        self._keep = keep
        self._failed = failed
        # Who lent, by who holds it. 0: an earlier supervisor knew.
        self._lenders: dict[int, int] = {}

    def taken_back(self, number: int) -> None:
        """An engine of an earlier supervisor may hold anything."""
        self._lenders[number] = 0

    def gone(self, number: int) -> None:
        """What an engine held went with it."""
        self._lenders.pop(number, None)

    def offer(self) -> None:
        """Have the serving engine lend its memory to its successor, unless it has."""
        serving, successor = self._service.serving, self._service.successor
        if serving is None or successor is None or not self._service.may_serve:
            return
        if self._lenders.get(successor.number) == serving.number:
            return
        both = [self._running.get(number) for number in (serving.number, successor.number)]
        if all(each is not None and each.record.facts.get("lends") for each in both):
            self._lenders[successor.number] = serving.number
            self._keep(self._lend(serving.number, successor.number))

    async def _lend(self, lender: int, holder: int) -> None:
        try:
            await self._running[holder].ask("expect_memory", timeout_s=_TIMEOUT_S)
            if self._service.may_serve:
                directory = str(self._running[holder].directory)
                await self._running[lender].ask(
                    "lend_memory", timeout_s=_TIMEOUT_S, directory=directory
                )
        except (EngineError, KeyError) as e:
            # A takeover without it takes 0.4 s longer.
            log.warning("engine=%d does not hold engine=%d's memory: %s", holder, lender, e)

    async def give_back(self, *, but: int | None = None) -> None:
        """Have all parked engines but that one let go of what they hold."""
        holders = [number for number in self._lenders if number != but]
        await asyncio.gather(*(self._give_back(number) for number in holders))

    async def _give_back(self, holder: int) -> None:
        engine = self._service.engines.get(holder)
        if holder not in self._running or engine is None or engine.phase is not Phase.PARKED:
            return
        self._lenders.pop(holder, None)
        try:
            await self._running[holder].ask("forget_memory", timeout_s=_TIMEOUT_S)
        except EngineError as e:
            self._failed(holder, f"it does not give memory back: {e}")
