"""The service's state machine: its decisions after each event, and invariants."""

from __future__ import annotations

import random

import pytest

from weightcached.engine.states import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Action,
    Engine,
    Phase,
    Service,
)


def begin(service: Service, now_s: float = 0.0) -> list[Action]:
    """Begin decided steps, as the supervisor does."""
    actions = service.decide(now_s)
    for action in actions:
        if action.what == "start":
            assert service.started(service.version).number == action.number
        else:
            phase = {"promote": Phase.PROMOTING, "drain": Phase.DRAINING, "end": Phase.ENDING}
            service.engines[action.number].to(phase[action.what])
    return actions


def serving(*, standby: int = 1) -> Service:
    """Engine 1 serves, engine 2 is parked."""
    service = Service(standby=standby)
    begin(service)
    service.ready(1)
    begin(service)
    service.serves(1)
    if standby:
        begin(service)
        service.ready(2)
    assert begin(service) == []
    return service


def phases(service: Service) -> dict[int, str]:
    return {number: engine.phase.value for number, engine in service.engines.items()}


def test_first_start_then_promotion_then_a_standby() -> None:
    service = Service(standby=1)
    assert begin(service) == [Action("start", 1)]
    assert begin(service) == [], "one at a time"
    service.ready(1)
    assert begin(service) == [Action("promote", 1)], "no standby before the first serves"
    service.serves(1)
    assert begin(service) == [Action("start", 2)]
    service.ready(2)
    assert begin(service) == []
    assert service.state() == "serving"


def test_without_standby_nothing_is_parked() -> None:
    assert phases(serving(standby=0)) == {1: "serving"}


def test_death_waits_for_the_last_process_then_promotes_then_starts() -> None:
    service = serving()
    service.failed(1, "killed", 0.0)
    assert begin(service) == [], "the dead one's memory is not free yet"
    assert service.state() == "taking-over"
    service.gone(1)
    assert begin(service) == [Action("promote", 2)]
    service.serves(2)
    assert begin(service) == [Action("start", 3)]


def test_death_without_standby_starts_at_once() -> None:
    service = serving(standby=0)
    service.failed(1, "killed", 0.0)
    assert begin(service) == [Action("start", 2)]
    service.gone(1)
    service.ready(2)
    assert begin(service) == [Action("promote", 2)]


def test_death_while_the_standby_starts_promotes_it_once_it_is_ready() -> None:
    service = Service(standby=1)
    begin(service)
    service.ready(1)
    begin(service)
    service.serves(1)
    begin(service)
    service.failed(1, "killed", 0.0)
    service.gone(1)
    assert begin(service) == []
    service.ready(2)
    assert begin(service) == [Action("promote", 2)]


def test_standby_that_fails_is_tried_again_with_growing_pauses() -> None:
    service = serving()
    now_s, pauses = 100.0, []
    service.failed(2, "dies while parked", now_s)
    service.gone(2)
    assert begin(service, now_s) == [Action("start", 3)], "that is no failed start"
    for number in range(3, 15):
        service.failed(number, "no room", now_s)
        service.gone(number)
        assert begin(service, now_s) == []
        at_s = service.wake_time_s(now_s)
        assert at_s is not None
        pauses.append(at_s - now_s)
        now_s = at_s
        assert begin(service, now_s) == [Action("start", number + 1)]
    assert pauses[:4] == [FIRST_PAUSE_S * n for n in (1, 2, 4, 8)]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert (service.error, service.state()) == ("no room", "serving")
    service.ready(15)
    assert service.wake_time_s(now_s) is None


def test_rolling_restart_drains_the_old_when_the_new_is_parked() -> None:
    service = serving()
    assert service.restart() == 2
    assert begin(service) == [Action("start", 3)]
    assert service.engines[3].version == 2
    assert begin(service) == [], "the old one serves meanwhile, its standby stays"
    service.ready(3)
    assert begin(service) == [Action("drain", 1)]
    service.parked(1)
    assert begin(service) == [Action("promote", 3)], "the new one, not the old standby"
    service.serves(3)
    assert begin(service) == [Action("end", 1), Action("end", 2), Action("start", 4)]


def test_restart_ends_an_old_standby_that_still_starts() -> None:
    service = serving()
    service.failed(2, "killed", 0.0)
    service.gone(2)
    assert begin(service) == [Action("start", 3)]
    service.restart()
    assert begin(service) == [Action("end", 3)]
    assert begin(service) == [Action("start", 4)]


def test_new_version_that_cannot_start_leaves_the_old_one_serving() -> None:
    service = serving()
    service.restart()
    begin(service)
    service.failed(3, "bad arguments", 0.0)
    service.gone(3)
    assert begin(service) == []
    assert (service.version, service.error, service.state()) == (1, "bad arguments", "serving")
    assert phases(service) == {1: "serving", 2: "parked"}
    assert service.restart() == 3, "no number is used twice"


def test_new_version_that_cannot_wake_gives_the_endpoint_back() -> None:
    service = serving(standby=0)
    service.restart()
    begin(service)
    service.ready(2)
    begin(service)
    service.parked(1)
    assert begin(service) == [Action("promote", 2)]
    service.failed(2, "no memory", 0.0)
    assert begin(service) == []
    service.gone(2)
    assert begin(service) == [Action("promote", 1)]


def test_death_of_the_old_engine_during_a_restart_promotes_the_new_one() -> None:
    service = serving()
    service.restart()
    begin(service)
    service.ready(3)
    service.failed(1, "killed", 0.0)
    service.gone(1)
    assert begin(service) == [Action("promote", 3)]


def test_death_during_a_restart_before_the_new_one_is_up_promotes_the_old_standby() -> None:
    service = serving()
    service.restart()
    begin(service)
    service.failed(1, "killed", 0.0)
    service.gone(1)
    assert begin(service) == [Action("promote", 2)]
    service.serves(2)
    assert begin(service) == []
    service.ready(3)
    assert begin(service) == [Action("drain", 2)]


def test_sleep_drains_and_wake_promotes() -> None:
    service = serving()
    service.awake = False
    assert begin(service) == [Action("drain", 1)]
    assert service.state() == "draining"
    service.parked(1)
    assert begin(service) == []
    assert service.state() == "asleep"
    service.awake = True
    (action,) = begin(service)
    assert action.what == "promote"


def test_service_that_gives_way_sleeps_and_starts_nothing_until_that_is_over() -> None:
    service = serving()
    service.gives_way = True
    assert begin(service) == [Action("drain", 1)]
    service.parked(1)
    assert service.state() == "asleep"
    # Neither a client nor the death of all engines changes that.
    service.awake = True
    for number in (1, 2):
        service.failed(number, "killed", 0.0)
        service.gone(number)
        assert begin(service, 1e6) == []
    service.gives_way = False
    assert begin(service, 1e6) == [Action("start", 3)]


def test_service_that_slept_before_it_gave_way_sleeps_on() -> None:
    service = serving()
    service.awake = False
    begin(service)
    service.parked(1)
    service.gives_way = True
    assert begin(service) == []
    service.gives_way = False
    assert begin(service) == []
    assert service.state() == "asleep"


def test_restart_while_asleep_replaces_the_parked_engines() -> None:
    service = serving(standby=0)
    service.awake = False
    begin(service)
    service.parked(1)
    service.restart()
    assert begin(service) == [Action("start", 2)]
    service.ready(2)
    assert begin(service) == [Action("end", 1)]


def test_stop_drains_what_serves_and_ends_the_rest() -> None:
    service = serving()
    service.stopping = True
    assert begin(service) == [Action("drain", 1), Action("end", 2)]
    service.gone(2)
    service.parked(1)
    assert begin(service) == [Action("end", 1)]
    service.gone(1)
    assert service.engines == {}
    assert begin(service) == []


def test_failure_of_an_engine_that_is_gone_changes_nothing() -> None:
    service = serving()
    service.failed(7, "nobody", 0.0)
    service.failed(1, "killed", 0.0)
    service.failed(1, "killed again", 0.0)
    assert phases(service) == {1: "ending", 2: "parked"}


def _happen(chance: random.Random, service: Service, now_s: float) -> None:
    """One event that can come in the state that the service is in."""
    engine: Engine | None = None
    if service.engines:
        engine = service.engines[chance.choice(sorted(service.engines))]
    what = chance.random()
    if engine is None or what < 0.05:
        if what < 0.02:
            service.restart()
        elif what < 0.035:
            service.awake = not service.awake
        elif what < 0.05:
            service.gives_way = not service.gives_way
    elif engine.phase is Phase.ENDING:
        service.gone(engine.number)
    elif what < 0.35:
        service.failed(engine.number, "chance", now_s)
    elif engine.phase is Phase.STARTING:
        service.ready(engine.number)
    elif engine.phase is Phase.PROMOTING:
        service.serves(engine.number)
    elif engine.phase is Phase.DRAINING:
        service.parked(engine.number)


@pytest.mark.parametrize("seed", range(20))
def test_after_any_events_one_engine_at_most_has_the_endpoint_and_service_comes_back(
    seed: int,
) -> None:
    chance = random.Random(seed)
    service = Service(standby=seed % 2)
    now_s = 0.0
    for _ in range(500):
        _happen(chance, service, now_s)
        now_s += chance.uniform(0, 2)
        begin(service, now_s)
        engines = service.engines.values()
        assert sum(e.has_endpoint for e in engines) <= 1
        assert sum(e.phase is Phase.STARTING for e in engines) <= 1
        assert len([e for e in engines if e.phase is not Phase.ENDING]) <= 4
    service.awake, service.gives_way = True, False
    for _ in range(20):
        for engine in list(service.engines.values()):
            {
                Phase.STARTING: service.ready,
                Phase.PROMOTING: service.serves,
                Phase.DRAINING: service.parked,
                Phase.ENDING: service.gone,
            }.get(engine.phase, lambda _: None)(engine.number)
            begin(service, now_s)
        now_s += LONGEST_PAUSE_S
        begin(service, now_s)
    assert sorted(e.phase.value for e in service.engines.values()) == (
        ["parked", "serving"] if service.standby else ["serving"]
    )
    assert service.serving is not None
    assert service.serving.version == service.version
