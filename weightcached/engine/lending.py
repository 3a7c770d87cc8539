"""Whether a standby holds the memory of the serving engine's KV cache, so that it can have it at once
when that engine is gone (model/kv_lending.py).

Memory that is lent is not free as long as the standby holds it. So it gives it back, or is ended,
before another service or a daemon gets the device. A takeover waits for no such question: the engine
that takes over has what it was lent, or waits for free memory itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from weightcached.engine.running import Running
from weightcached.engine.states import Phase, Service
from weightcached.errors import EngineError

log = logging.getLogger(__name__)

# Shorter than the 11 s in which an engine that takes over looks for free memory (PROMOTE_ATTEMPTS,
# kv_scratch.py).
_TIMEOUT_S = 10.0


class Lending:
    """What the engines of one service have lent each other.

    keep: runs a task; failed: ends an engine, with the reason; wait: returns once its condition holds,
    or the service stops.
    """

    def __init__(
        self,
        service: Service,
        running: dict[int, Running],
        *,
        keep: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        failed: Callable[[int, str], None],
        wait: Callable[[Callable[[], bool]], Awaitable[None]],
    ) -> None:
        self._service = service
        self._running = running
        self._keep = keep
        self._failed = failed
        self._wait = wait
        # Who lent, by who holds it. 0: nobody whose memory it should hold.
        self._lenders: dict[int, int] = {}
        self._under_way: asyncio.Task[None] | None = None
        self._giving_back: asyncio.Task[None] | None = None

    def taken_back(self, number: int) -> None:
        """An engine of an earlier supervisor may hold anything."""
        self._lenders[number] = 0

    def gone(self, number: int) -> None:
        """What an engine held went with it."""
        self._lenders.pop(number, None)

    def offer(self) -> None:
        """Have the engine that serves lend its memory to its successor, unless it has.

        Somebody may have sent it to sleep by vLLM's own call: then that memory is given back.
        """
        lender, successor = self._service.holder, self._service.successor
        if lender is None or successor is None or not self._service.may_serve:
            return
        if lender.phase not in (Phase.SERVING, Phase.DRAINING):
            return
        both = [self._running.get(number) for number in (lender.number, successor.number)]
        if lender.phase is Phase.SERVING and both[0] is not None and both[0].activity.stopped:
            if self._lenders and (self._giving_back is None or self._giving_back.done()):
                self._giving_back = self._keep(self.give_back())
            return
        if self._lenders.get(successor.number) == lender.number:
            return
        if all(each is not None and each.record.facts.get("lends") for each in both):
            self._lenders[successor.number] = lender.number
            self._under_way = self._keep(self._lend(lender.number, successor.number))

    async def settled(self) -> None:
        """Return once the question that was asked last is answered."""
        if self._under_way is not None:
            await asyncio.wait([self._under_way])

    async def _lend(self, lender: int, holder: int) -> None:
        try:
            await self._running[holder].ask("expect_memory", timeout_s=_TIMEOUT_S)
            if self._service.may_serve and self._lenders.get(holder) == lender:
                directory = str(self._running[holder].directory)
                await self._running[lender].ask(
                    "lend_memory", timeout_s=_TIMEOUT_S, directory=directory
                )
        except (EngineError, KeyError) as e:
            # A takeover without it takes 0.4 s longer.
            log.warning("engine=%d does not hold engine=%d's memory: %s", holder, lender, e)

    async def give_back(self, *, but: int | None = None) -> None:
        """Have all parked engines but that one let go of what they hold. Returns once they have, or
        are gone.
        """
        await asyncio.gather(
            *(self._give_back(held) for held in list(self._lenders) if held != but)
        )

    async def _give_back(self, holder: int) -> None:
        engine, running = self._service.engines.get(holder), self._running.get(holder)
        if engine is None or running is None:
            return
        # An engine of an older version, which a new supervisor took back, knows no such question.
        if engine.phase is Phase.PARKED and running.record.facts.get("lends"):
            # Kept until it answers: who asks meanwhile has to wait too.
            self._lenders[holder] = 0
            try:
                await running.ask("forget_memory", timeout_s=_TIMEOUT_S)
                if self._is_to_forget(holder):
                    self.gone(holder)
            except EngineError as e:
                if self._is_to_forget(holder):
                    self._failed(holder, f"it does not give memory back: {e}")
        if engine.phase is Phase.ENDING:
            await self._wait(lambda: holder not in self._service.engines)

    def _is_to_forget(self, holder: int) -> bool:
        """Whether it still is: by now it may have been lent other memory, or serve."""
        return self._lenders.get(holder) == 0
