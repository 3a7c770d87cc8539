"""A service's next steps, from the states of its engines: data in, decisions out.

Knows no processes, sockets or clocks of its own, so that every order of events can be tried.

    starting ──► parked ──► promoting ──► serving ──► draining ──► parked
        └───────────┴───────────┴────────────┴────────────┴──► ending ──► gone

A *version* is one set of arguments. An engine that is promoting, serving or draining, or is ending
out of these, has the endpoint: no other may get it before that one is gone or parked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0


class Phase(Enum):
    """The phase of an engine. `status` prints these names."""

    STARTING = "starting"
    PARKED = "parked"
    PROMOTING = "promoting"
    SERVING = "serving"
    DRAINING = "draining"
    ENDING = "ending"


_HAS_ENDPOINT = (Phase.PROMOTING, Phase.SERVING, Phase.DRAINING)


@dataclass
class Engine:
    """One engine. `has_endpoint` stays true while one that had it is ending."""

    number: int
    version: int
    phase: Phase = Phase.STARTING
    has_endpoint: bool = False

    def to(self, phase: Phase) -> None:
        """Go to `phase`; only ending keeps the endpoint that the engine had."""
        if phase is not Phase.ENDING:
            self.has_endpoint = phase in _HAS_ENDPOINT
        self.phase = phase


class Action(NamedTuple):
    """One thing to begin. `number` is the engine's; for a start, that of the engine to come."""

    what: Literal["start", "promote", "drain", "end"]
    number: int


@dataclass
class Service:
    """The engines of one service, and their wanted state."""

    standby: int
    version: int = 1
    engines: dict[int, Engine] = field(default_factory=dict)
    # False: asleep, until somebody connects.
    awake: bool = True
    # Asleep in any case, and nothing is started: a daemon needs the engines' room (giving_way.py).
    gives_way: bool = False
    stopping: bool = False
    # Version to go back to if the newest one cannot start; 0: none.
    proven: int = 0
    error: str = ""
    failures: int = 0
    _not_before_s: float = 0.0
    _last_number: int = 0
    _last_version: int = 1

    # ---- events

    def started(self, version: int, *, number: int = 0) -> Engine:
        """A new engine exists. number: of one that was taken back."""
        number = number or self._last_number + 1
        self.skip_to(number)
        self._last_version = max(self._last_version, version)
        self.engines[number] = engine = Engine(number, version)
        return engine

    def skip_to(self, number: int) -> None:
        """Numbers up to this one have been used."""
        self._last_number = max(self._last_number, number)

    def ready(self, number: int) -> None:
        """The engine is up, and parked."""
        engine = self.engines[number]
        if engine.phase is Phase.STARTING:
            engine.to(Phase.PARKED)
            if engine.version == self.version:
                self.failures, self._not_before_s = 0, 0.0

    def serves(self, number: int) -> None:
        """The engine accepts clients: its version is known to work."""
        engine = self.engines[number]
        engine.to(Phase.SERVING)
        self.proven = engine.version
        if engine.version == self.version:
            self.error = ""

    def is_up(self, number: int) -> bool:
        """Whether an engine is there and not ending: its answer may come just before its end."""
        engine = self.engines.get(number)
        return engine is not None and engine.phase is not Phase.ENDING

    def parked(self, number: int) -> None:
        """The engine has been drained."""
        engine = self.engines[number]
        if engine.phase is Phase.DRAINING:
            engine.to(Phase.PARKED)

    def failed(self, number: int, reason: str, now_s: float) -> None:
        """The engine died, hangs, or failed to carry out a command: it ends. Never raises."""
        if not self.is_up(number):
            return
        engine = self.engines[number]
        unproven = engine.phase in (Phase.STARTING, Phase.PROMOTING)
        engine.to(Phase.ENDING)
        if not unproven:
            return
        self.failures += 1
        pause_s = min(FIRST_PAUSE_S * 2 ** (self.failures - 1), LONGEST_PAUSE_S)
        self._not_before_s = now_s + pause_s
        self.error = reason
        if engine.version == self.version and self.proven not in (0, self.version):
            # A restart with arguments that do not work: the old engine goes on serving.
            self.version = self.proven
            self._not_before_s = 0.0
            self.failures = 0

    def gone(self, number: int) -> None:
        """Nothing is left of the engine."""
        self.engines.pop(number, None)

    def restart(self) -> int:
        """Engines of a new version are wanted. Returns its number."""
        self._last_version = max(self._last_version, self.version) + 1
        self.version = self._last_version
        self.failures, self._not_before_s, self.error = 0, 0.0, ""
        return self.version

    # ---- state

    @property
    def may_serve(self) -> bool:
        """Whether an engine is to have the endpoint."""
        return self.awake and not self.gives_way

    @property
    def holder(self) -> Engine | None:
        """The engine that has the endpoint."""
        return next((e for e in self.engines.values() if e.has_endpoint), None)

    @property
    def serving(self) -> Engine | None:
        return next((e for e in self.engines.values() if e.phase is Phase.SERVING), None)

    def state(self) -> str:
        """One word for people: starting, serving, taking-over, draining, asleep, stopping."""
        if self.stopping:
            return "stopping"
        if self.serving is not None:
            return "serving"
        if not self.may_serve:
            return "asleep" if self.holder is None else "draining"
        return "taking-over" if self.proven else "starting"

    def summary(self) -> str:
        """One line for `systemctl status`."""
        serving = self.serving
        parts = [self.state()] + ([f"engine {serving.number}"] if serving is not None else [])
        others = (e for e in self.engines.values() if e is not serving)
        parts += [f"engine {e.number} {e.phase.value}" for e in others]
        if self.error:
            parts.append(f"the last start failed: {self.error}")
        return ", ".join(parts)

    def has_settled(self, version: int) -> bool:
        """Whether a restart has brought that version: it serves, or sleeps as the service does."""
        if self.serving is not None and self.serving.version == version:
            return True
        parked = (e for e in self.engines.values() if e.phase is Phase.PARKED)
        return not self.may_serve and any(e.version == version for e in parked)

    def wake_time_s(self, now_s: float) -> float | None:
        """The time at which a waiting start may be tried; None if none waits."""
        return self._not_before_s if self._not_before_s > now_s else None

    # ---- decisions

    def decide(self, now_s: float) -> list[Action]:
        """The steps to begin now. Ask again after every event."""
        if self.stopping:
            return self._wind_up()
        actions: list[Action] = []
        holder = self.holder
        successor = self.successor
        if holder is None and self.may_serve and successor is not None:
            actions.append(Action("promote", successor.number))
            holder = successor
        elif holder is not None and holder.phase is Phase.SERVING and self._must_yield(holder):
            actions.append(Action("drain", holder.number))
        actions += [Action("end", e.number) for e in self._superfluous(holder)]
        lacks_one = not self.gives_way and self._lacks_one(holder, actions)
        if lacks_one and now_s >= self._not_before_s:
            actions.append(Action("start", self._last_number + 1))
        return actions

    def _wind_up(self) -> list[Action]:
        actions: list[Action] = []
        for engine in self.engines.values():
            if engine.phase is Phase.SERVING:
                actions.append(Action("drain", engine.number))
            elif engine.phase in (Phase.STARTING, Phase.PARKED):
                actions.append(Action("end", engine.number))
        return actions

    @property
    def successor(self) -> Engine | None:
        """The parked engine to promote: of the wanted version first, then of the one that works."""
        parked = [e for e in self.engines.values() if e.phase is Phase.PARKED]
        rank = sorted(
            parked, key=lambda e: (e.version == self.version, e.version == self.proven, -e.number)
        )
        return rank[-1] if rank else None

    def _must_yield(self, serving: Engine) -> bool:
        if not self.may_serve:
            return True
        newer = (e for e in self.engines.values() if e.version == self.version)
        return serving.version != self.version and any(e.phase is Phase.PARKED for e in newer)

    def _superfluous(self, holder: Engine | None) -> list[Engine]:
        """Engines that nobody needs once one of the wanted version serves or sleeps.

        Those of other versions, and those above the wanted number.
        """
        idle = [e for e in self.engines.values() if e.phase in (Phase.PARKED, Phase.STARTING)]
        idle = [e for e in idle if e is not holder]
        settled = (
            holder.version == self.version and holder.phase is Phase.SERVING
            if holder is not None
            else not self.may_serve
            and any(e.version == self.version and e.phase is Phase.PARKED for e in idle)
        )
        if not settled:
            # A standby of an old version that is not up yet holds up the new version's start.
            return [e for e in idle if e.phase is Phase.STARTING and e.version != self.version]
        wanted = [e for e in idle if e.version == self.version]
        # Prefer engines that are up.
        wanted.sort(key=lambda e: (e.phase is Phase.PARKED, -e.number))
        room = self.standby + (holder is None)
        return [e for e in idle if e not in wanted] + wanted[: max(0, len(wanted) - room)]

    def _lacks_one(self, holder: Engine | None, actions: list[Action]) -> bool:
        """Whether an engine is to be started. One at a time: each measures the device's memory."""
        if any(e.phase is Phase.STARTING for e in self.engines.values()):
            return False
        of_version = [
            e
            for e in self.engines.values()
            if e.version == self.version and e.phase is not Phase.ENDING
        ]
        if holder is None or holder.version != self.version:
            return not of_version
        if holder.phase is Phase.ENDING:
            return not of_version
        # No standby before the first serves, and none while the device's memory changes hands.
        if holder.phase is not Phase.SERVING or any(
            a.what in ("promote", "drain") for a in actions
        ):
            return False
        return len(of_version) < 1 + self.standby
