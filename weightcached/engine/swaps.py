"""New weights for the engines of a service while they run: the serving one first, then the others.

An engine that starts meanwhile may have the old weights: it is asked before it is used. One that
cannot take the newest makes room for another: the serving one by a rolling restart, a parked one at
once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from weightcached.engine.plan import StartPlan
from weightcached.engine.running import Running
from weightcached.engine.states import Phase, Service
from weightcached.errors import EngineError

# A swap of 50 ms, on a machine that does much else.
_SWAP_TIMEOUT_S = 60.0
# Ranks whose daemons have not all loaded the newest weights yet.
_RANKS_TIMEOUT_S = 120.0
_RANKS_PERIOD_S = 0.5
# After the death of the engine that was to swap.
_ATTEMPTS = 3
_SUCCESSOR_S = 1.0
# Its connection breaks, or its server answers for a dead core, before the kernel reports the end.
_END_TIMEOUT_S = 5.0
_END_PERIOD_S = 0.02
_PERHAPS_DEAD = frozenset({"no-answer", "swap-failed"})
_NOT_YET = frozenset({"another-rank", "still-loading"})
# A daemon that restarts listens again within a second or two.
_DAEMON_AWAY = frozenset({"no-daemon", "connection-lost"})
_DAEMON_TIMEOUT_S = 30.0
# Never, while it runs: other layers, kernels or settings, or weights from disk.
_NEVER = frozenset({"not-live", "key-mismatch", "shared-weights", "eplb", "weight-transfer"})
_TAKEN = frozenset({"swapped", "unchanged"})


class Swaps:
    """Swaps one service's engines, whose supervisor owns the arguments.

    end: ends an engine that nobody needs; restart: replaces all, given the reason.
    """

    def __init__(
        self,
        service: Service,
        running: Mapping[int, Running],
        *,
        end: Callable[[int], None],
        restart: Callable[[str], None],
    ) -> None:
        self._service = service
        self._running = running
        self._end = end
        self._restart = restart
        # Engines that began to start with what was the newest before.
        self._behind: set[int] = set()
        self._turn = asyncio.Lock()
        # Why engines are asked again and again at present, by number.
        self.waits: dict[int, str] = {}

    @property
    def under_way(self) -> bool:
        """Whether engines are being swapped."""
        return self._turn.locked()

    async def swap(
        self,
        name: str,
        present: StartPlan,
        newest: StartPlan,
        *,
        on_swap: str,
        drain_s: float,
        daemon_returns: bool = False,
    ) -> list[dict[str, Any]]:
        """What became of each engine, as SwapOutcome without `model`. `present` becomes `newest`
        unless the serving engine stays on the old weights.
        """
        swap_one = partial(
            self._swap_one, on_swap=on_swap, drain_s=drain_s, daemon_returns=daemon_returns
        )
        async with self._turn:
            for _ in range(_ATTEMPTS):
                outcomes = await self._swap_all(name, present, newest, swap_one)
                if outcomes is not None:
                    return outcomes
                # The engine that served has died meanwhile: its successor is to have them.
                await asyncio.sleep(_SUCCESSOR_S)
            return [{"engine": name, "outcome": "left", "reason": "its engines end one by one"}]

    async def _swap_all(
        self,
        name: str,
        present: StartPlan,
        newest: StartPlan,
        swap_one: Callable[[int], Awaitable[dict[str, Any]]],
    ) -> list[dict[str, Any]] | None:
        """The same; None if the first engine ended instead of an answer."""
        outcomes: list[dict[str, Any]] = []
        behind = {e.number for e in self._service.engines.values() if e.phase is Phase.STARTING}
        self._behind |= behind
        for number in self._numbers():
            said = await swap_one(number)
            code = said.pop("code", "")
            said["engine"] = f"{name}/{number}"
            if said["outcome"] in _TAKEN:
                outcomes.append(said)
                self._note(number, newest)
            elif outcomes:
                # The serving engine has them, and this one must not take over from it.
                self._end(number)
                outcomes.append({**said, "outcome": "restarting"})
            else:
                self._behind -= behind
                if code in _PERHAPS_DEAD and await self._ends(number):
                    return None
                if code in _NEVER:
                    said["outcome"] = "restarting"
                    self._restart(said["reason"])
                return [said]
        present.arguments, present.digest = newest.arguments, newest.digest
        return outcomes

    async def catch_up(self, number: int, plan: StartPlan, *, drain_s: float) -> bool:
        """Before a started engine is used: whether it has the newest weights."""
        if number not in self._behind:
            return True
        async with self._turn:
            self._behind.discard(number)
            said = await self._swap_one(number, on_swap="drain", drain_s=drain_s)
            if said["outcome"] not in _TAKEN:
                return False
            self._note(number, plan)
            return True

    async def _ends(self, number: int) -> bool:
        """Whether the engine is ending or gone, now or in a moment."""
        deadline_s = time.monotonic() + _END_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if not self._service.is_up(number):
                return True
            await asyncio.sleep(_END_PERIOD_S)
        return False

    def _numbers(self) -> list[int]:
        """Engines that are up, the one with the endpoint first."""
        up = [
            e
            for e in self._service.engines.values()
            if e.phase not in (Phase.STARTING, Phase.ENDING)
        ]
        return [e.number for e in sorted(up, key=lambda e: (not e.has_endpoint, e.number))]

    async def _swap_one(
        self, number: int, *, on_swap: str, drain_s: float, daemon_returns: bool = False
    ) -> dict[str, Any]:
        patience_s = dict.fromkeys(_NOT_YET, _RANKS_TIMEOUT_S)
        if daemon_returns:
            patience_s |= dict.fromkeys(_DAEMON_AWAY, _DAEMON_TIMEOUT_S)
        began_s = time.monotonic()
        try:
            while True:
                try:
                    said = await self._running[number].ask(
                        "swap",
                        timeout_s=drain_s + _SWAP_TIMEOUT_S,
                        on_swap=on_swap,
                        drain_s=drain_s,
                    )
                except (EngineError, KeyError) as e:
                    reason = str(e) if isinstance(e, EngineError) else "it has ended"
                    return {"outcome": "left", "reason": reason, "code": "no-answer"}
                if time.monotonic() - began_s > patience_s.get(said.get("code", ""), -1.0):
                    return said
                self.waits[number] = said.get("reason", "")
                await asyncio.sleep(_RANKS_PERIOD_S)
        finally:
            self.waits.pop(number, None)

    def _note(self, number: int, plan: StartPlan) -> None:
        """A new supervisor must know it as one of the present arguments."""
        engine = self._running.get(number)
        if engine is not None and engine.record.digest != plan.digest:
            engine.record.digest, engine.record.arguments = plan.digest, plan.arguments
            engine.keep_record()
