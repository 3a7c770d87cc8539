"""Who keeps a generation from making room: engines that nobody can send to sleep, or that sleep on it."""

from __future__ import annotations

import pytest

from weightcached.daemon.in_place import obstacle
from weightcached.daemon.live import ServiceEngine
from weightcached.wire.messages import EngineStatus

SERVICE = [
    ServiceEngine("chat/1", unmaps=True, processes=[10, 11]),
    ServiceEngine("chat/2", unmaps=False, processes=[20]),
]


def holder(pid: int, *, parked: bool = False, label: str = "") -> EngineStatus:
    return EngineStatus(pid=pid, since=0.0, parked=parked, label=label)


@pytest.mark.parametrize(
    "held",
    [
        [],
        [holder(11)],
        # Asleep already: it unmaps if it is asked to, whoever it is.
        [holder(11), holder(4711, parked=True), holder(20, parked=True)],
    ],
)
def test_services_engines_and_those_that_sleep_make_room(held: list[EngineStatus]) -> None:
    assert obstacle(held, SERVICE) == ""


def test_engines_of_nobody_are_named() -> None:
    # Of another pid namespace: its pid is not known here.
    held = [holder(10), holder(4711), holder(0, label="pod-7")]
    assert obstacle(held, SERVICE).startswith(
        "they are mapped by pid 4711, pod-7, of no engine service that could let it sleep"
    )


def test_engines_that_would_sleep_on_them_are_named() -> None:
    assert obstacle([holder(10), holder(20)], SERVICE).startswith(
        "chat/2 would keep them mapped while asleep: only the sleep back end 'weightcached'"
    )
