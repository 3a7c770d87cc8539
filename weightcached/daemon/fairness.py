"""Fair queueing of all work for peers: the process that asked for least is next.

Fairness is between processes, not connections: a process that floods on hundreds of connections
waits behind itself alone (start-time fair queueing: each item starts at the end of the process's
last one, or at the queue's present position).
"""

from __future__ import annotations

import asyncio
import heapq
from weakref import WeakValueDictionary

# In units of work; one is about the cost of a status.
REQUEST_UNITS = 1
GREETING_UNITS = 2
CLOSE_UNITS = 1
_BYTES_PER_UNIT = 4096
# About 1 ms between two looks at the sockets.
_UNITS_AT_ONCE = 2
# A packet with descriptors keeps a thread busy for a fraction of that; many threads would keep the
# event loop waiting.
_DESCRIPTORS_PAUSE_S = 0.002
# Connections must end faster than they can come, or those that wait for their end would pile up.
_CLOSE_PAUSE_S = 0.001
# A message of the largest size takes up to 15 ms: no more than one falls into the 50 ms of a
# status.
_LARGE_PAUSE_S = 0.1


class Account:
    """One process's use, as the earliest position in the queue for its next item."""

    __slots__ = ("__weakref__", "start")

    def __init__(self) -> None:
        self.start = 0


class FairQueue:
    """A queue of which at most `units`, or one item, are let go on at a time, then again after
    `pause_s` seconds.

    Without a pause that is one turn of the event loop, in which it also looks at its sockets.
    """

    def __init__(self, *, units: int, pause_s: float = 0.0) -> None:
        self._units = units
        self._pause_s = pause_s
        # (start, number, units, turn); the number keeps equals in order.
        self._waiting: list[tuple[int, int, int, asyncio.Future[None]]] = []
        self._number = 0
        self._now = 0
        self._scheduled = False
        self._accounts: WeakValueDictionary[int, Account] = WeakValueDictionary()

    def account(self, pid: int) -> Account:
        """The account of a process, to be kept for as long as it has a connection.

        Those whose pid cannot be seen from here (0) share one.
        """
        account = self._accounts.get(pid)
        if account is None:
            account = self._accounts[pid] = Account()
        return account

    async def take(self, account: Account, units: int = REQUEST_UNITS) -> None:
        """Return when it is this account's turn to have so much done."""
        start = max(account.start, self._now)
        account.start = start + units
        if not self._scheduled:
            # Nobody is before it.
            self._now = start
            self._schedule(after_s=self._pause_s)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._number += 1
        heapq.heappush(self._waiting, (start, self._number, units, turn))
        await turn

    def charge(self, account: Account, units: int) -> None:
        """The last turn's work turned out to be more: the next turn comes later."""
        account.start += units

    def _wake_waiting(self) -> None:
        left = self._units
        while self._waiting and left > 0:
            start, _, units, turn = heapq.heappop(self._waiting)
            # The waiting task may have left.
            if not turn.done():
                self._now = max(self._now, start)
                left -= units
                turn.set_result(None)
        if self._waiting or left < self._units:
            self._schedule(after_s=self._pause_s if left < self._units else 0.0)
        else:
            self._scheduled = False

    def _schedule(self, *, after_s: float) -> None:
        self._scheduled = True
        loop = asyncio.get_running_loop()
        if after_s:
            loop.call_later(after_s, self._wake_waiting)
        else:
            loop.call_soon(self._wake_waiting)


class Queues:
    """One queue for everything, and more for work that costs more than its bytes or could block."""

    def __init__(self) -> None:
        self.requests = FairQueue(units=_UNITS_AT_ONCE)
        self.descriptors = FairQueue(units=1, pause_s=_DESCRIPTORS_PAUSE_S)
        self.closing = FairQueue(units=1, pause_s=_CLOSE_PAUSE_S)
        self.large = FairQueue(units=1, pause_s=_LARGE_PAUSE_S)


class Ticket:
    """A connection's access to the queues, in the name of its process."""

    def __init__(self, queues: Queues, pid: int) -> None:
        self._queues = queues
        self._requests = queues.requests.account(pid)
        self._descriptors = queues.descriptors.account(pid)
        self._closing = queues.closing.account(pid)
        self._large = queues.large.account(pid)

    async def turn(self, units: int = REQUEST_UNITS) -> None:
        """Return when the daemon may receive a packet of it, or greet or close the connection."""
        await self._queues.requests.take(self._requests, units)

    def charge(self, nbytes: int) -> None:
        """A packet of so many bytes came in the last turn."""
        self._queues.requests.charge(self._requests, nbytes // _BYTES_PER_UNIT)

    async def descriptors_turn(self) -> None:
        await self._queues.descriptors.take(self._descriptors)

    async def close_turn(self) -> None:
        """For a connection that ends with descriptors in it."""
        await self._queues.closing.take(self._closing)

    async def large_turn(self) -> None:
        await self._queues.large.take(self._large)
