"""A service's engines sleep for as long as a daemon needs their room: it frees the old generation
of their weights before the new one comes (daemon/in_place.py).

The daemon of each rank asks, on a connection that it keeps open. Once all have asked, the engines
go to sleep, and none wakes or starts before each daemon has said `resume` or is gone. If one goes
without a word, it has died: the engines then take what the next daemon serves, and wake.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from weightcached.config.manifest import OnSwap
from weightcached.engine.control import Peer
from weightcached.engine.states import Phase, Service
from weightcached.errors import EngineError

log = logging.getLogger(__name__)

# For the other ranks' daemons, which load as long as this one, and for engines that are starting:
# these would map the old generation, awake.
_BEGIN_TIMEOUT_S = 120.0


class GivingWay:
    """The ways that one service gives to daemons.

    step: begins the service's next steps; wait: returns once its condition holds, or the service
    stops; take_newest: has the engines map what is served now.
    """

    def __init__(
        self,
        service: Service,
        *,
        step: Callable[[], None],
        wait: Callable[[Callable[[], bool]], Awaitable[None]],
        keep: Callable[[Coroutine[Any, Any, None]], object],
        take_newest: Callable[[], Awaitable[None]],
    ) -> None:
        self._service = service
        self._step = step
        self._wait = wait
        self._keep = keep
        self._take_newest = take_newest
        # The devices whose daemons have asked, by connection.
        self._asked: dict[Peer, str] = {}
        # Requests are not waited for.
        self.aborts = False

    async def begin(
        self, peer: Peer, device: str, *, ranks: int, on_swap: OnSwap
    ) -> dict[str, Any]:
        """Have the engines sleep, until end() or the end of the peer's connection. ranks: so many
        devices have to ask.

        Returns `drain_s`, how long that took. Raises EngineError; then they serve on.
        """
        self._asked[peer] = device
        self._keep(self._until_gone(peer))
        try:
            async with asyncio.timeout(_BEGIN_TIMEOUT_S):
                await self._wait(lambda: peer.gone.is_set() or not self._obstacle(ranks))
        except TimeoutError:
            pass
        obstacle = "the daemon hung up" if peer.gone.is_set() else self._obstacle(ranks)
        if obstacle or self._service.stopping:
            self._forget(peer)
            raise EngineError(obstacle or "the service is stopping")
        began_s = time.monotonic()
        log.info("giving way to device=%s, until it has the next weights", device)
        self.aborts = on_swap == "abort"
        self._service.gives_way = True
        self._step()
        await self._wait(lambda: self._service.holder is None)
        if self._service.stopping:
            raise EngineError("the service is stopping")
        return {"drain_s": time.monotonic() - began_s}

    async def end(self, peer: Peer) -> dict[str, Any]:
        """The peer's daemon has what it wanted, or has given up. Returns `serving`, once an engine
        serves again, or it is clear that this takes longer.
        """
        self._forget(peer)
        service = self._service
        await self._wait(
            lambda: (
                service.serving is not None
                or not service.may_serve
                or not any(
                    e.phase in (Phase.PARKED, Phase.PROMOTING) for e in service.engines.values()
                )
            )
        )
        waits = not service.may_serve
        return {"serving": service.serving is not None, "waits": waits, "error": service.error}

    def _obstacle(self, ranks: int) -> str:
        """Why the engines cannot sleep yet, or ""."""
        asked = set(self._asked.values())
        if len(asked) < ranks:
            return (
                f"of its {ranks} devices only {', '.join(sorted(asked))} needed room within "
                f"{_BEGIN_TIMEOUT_S:.0f} s"
            )
        starting = [e for e in self._service.engines.values() if e.phase is Phase.STARTING]
        return f"its engine {starting[0].number} is starting" if starting else ""

    async def _until_gone(self, peer: Peer) -> None:
        await peer.gone.wait()
        if peer in self._asked and self._service.gives_way:
            log.warning(
                "the daemon of %s is gone, the engines wake with what is served next",
                self._asked[peer],
            )
            await self._take_newest()
        self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        self._asked.pop(peer, None)
        if not self._asked:
            self._service.gives_way = False
        self._step()
