"""Services that share a device take turns: which of them may be awake there.

Shares are utilizations; those of the services that are awake on a device add up to at most 1. Who
wants to wake takes the device's turn, a lock beside the daemons' sockets, and asks the services that
were used least recently to sleep until there is room. Supervisors ask each other, so it works
without a daemon; and the successor of an engine that died has its share already, and asks nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightcached.config.engines import EngineSpec
from weightcached.config.manifest import ALL, Manifest, ModelSpec
from weightcached.engine.control import Link
from weightcached.engine.records import read_record
from weightcached.engine.running import is_alive
from weightcached.errors import EngineError

log = logging.getLogger(__name__)

# In the service's directory while it sleeps, for the next supervisor.
ASLEEP_FILE = "asleep"
_RETRY_S = 0.005
# One that does not answer counts as asleep: a supervisor that is only slow must not.
_STATUS_TIMEOUT_S = 30.0
# From the end of a supervisor until its successor answers, on a machine that is busy.
_ABSENCE_S = 30.0
_ABSENCE_PERIOD_S = 0.05
# Two at 0.5 fit; a rounding error is no reason to take turns.
_ALL_OF_IT = 1.0 + 1e-6


class NotWantedError(EngineError):
    """Who waited for the turn does not want it any more."""


@dataclass(frozen=True)
class Neighbour:
    """Another service, as it says itself. `used_s` is when a request last came (since 1970)."""

    name: str
    socket: Path
    share: float
    used_s: float


class DeviceTurns:
    """The turn of one service's devices."""

    def __init__(
        self, spec: EngineSpec, model: ModelSpec, manifest: Manifest, sockets: Path
    ) -> None:
        # Who names no device shares each of them with everybody.
        everybody = fcntl.LOCK_EX if ALL in model.devices else fcntl.LOCK_SH
        self._locks = [(sockets / f"{ALL}.turn", everybody)] + [
            (sockets / f"{device}.turn", fcntl.LOCK_EX)
            for device in sorted(model.devices)
            if device != ALL
        ]
        self._peers = {
            other.name: sockets / "engines" / other.name / "service.sock"
            for other in manifest.engines
            if other.name != spec.name and _share_devices(model, manifest.service(other.name)[1])
        }

    @property
    def alone(self) -> bool:
        """Whether no other service of the manifest can be on its devices."""
        return not self._peers

    @contextlib.asynccontextmanager
    async def held(self, *, unless: Callable[[], bool] = lambda: False) -> AsyncIterator[None]:
        """The turn, during the block: no other service measures, wakes or sleeps on these devices.

        unless: whether it is not wanted any more. Raises NotWantedError then.
        """
        with contextlib.ExitStack() as stack:
            for path, how in [] if self.alone else self._locks:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, fd)
                while True:
                    try:
                        fcntl.flock(fd, how | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        if unless():
                            raise NotWantedError("the turn is not wanted any more") from None
                        await asyncio.sleep(_RETRY_S)
            yield

    async def make_room(self, share: float, *, timeout_s: float) -> list[str]:
        """Ask neighbours to sleep until this service can have that share; needs the turn.

        Returns the services that were asked. Raises EngineError if one cannot sleep.
        """
        awake = await self._awake()
        asked: list[str] = []
        while awake and share + sum(n.share for n in awake) > _ALL_OF_IT:
            oldest = min(awake, key=lambda n: n.used_s)
            awake.remove(oldest)
            log.info("asking service=%s to sleep", oldest.name)
            await _ask(oldest.socket, "sleep", timeout_s=timeout_s)
            asked.append(oldest.name)
        return asked

    async def anybody_awake(self) -> bool:
        return bool(await self._awake())

    async def _awake(self) -> list[Neighbour]:
        found = await asyncio.gather(*(_neighbour(n, path) for n, path in self._peers.items()))
        return [neighbour for neighbour in found if neighbour is not None]


def _share_devices(one: ModelSpec, other: ModelSpec) -> bool:
    return ALL in (*one.devices, *other.devices) or bool({*one.devices} & {*other.devices})


async def _neighbour(name: str, path: Path) -> Neighbour | None:
    """A service that is awake; None if it sleeps or does not run."""
    try:
        status = await _ask(path, "status", timeout_s=_STATUS_TIMEOUT_S)
    except EngineError as e:
        log.info("taken for asleep service=%s: %s", name, e)
        return None
    return Neighbour(name, path, status["share"], status["used"]) if status["awake"] else None


async def _ask(path: Path, command: str, *, timeout_s: float) -> dict[str, Any]:
    deadline_s = time.monotonic() + _ABSENCE_S
    while True:
        try:
            return await _ask_once(path, command, timeout_s=timeout_s)
        except EngineError:
            # Its supervisor is being replaced. To take it for asleep would give its memory to two.
            if time.monotonic() > deadline_s or not _is_to_come_back(path.parent):
                raise
        await asyncio.sleep(_ABSENCE_PERIOD_S)


async def _ask_once(path: Path, command: str, *, timeout_s: float) -> dict[str, Any]:
    link = Link(path)
    try:
        return await link.ask(command, timeout_s=timeout_s)
    except TimeoutError as e:
        raise EngineError(f"{path.parent.name} did not answer within {timeout_s:g} s") from e
    finally:
        link.close()


def _is_to_come_back(directory: Path) -> bool:
    """Whether a service has engines, and did not sleep: then its next supervisor takes them back.

    Not by the fence: a supervisor ends who has its fence open and is none of its engines.
    """
    try:
        records = [read_record(path) for path in directory.iterdir()]
        asleep = (directory / ASLEEP_FILE).exists()
    except OSError:
        return False
    return not asleep and any(record is not None and is_alive(record) for record in records)
