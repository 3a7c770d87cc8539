"""Which ranks of a group are asked to load along, and which rank waits for them."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.stub_daemon import StubDaemon, cache, status
from weightcached.config.manifest import ModelSpec
from weightcached.config.wanted import Wanted
from weightcached.daemon.group import GroupPeers
from weightcached.wire.messages import Message, Reload, ReloadReply, Request

DEVICES = ["cpu0", "cpu1", "cpu2", "cpu3"]
WANTED = Wanted("m/target", "target", ModelSpec(name="m", devices=DEVICES, engine={}), "digest")


class Group:
    """Peers cpu1 to cpu3 as stubs, with cpu0 asking."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory, self._stack = directory, stack
        self.reloads: list[tuple[str, Reload]] = []
        self.peers = GroupPeers("cpu0", lambda device: directory / f"{device}.sock")

    def peer(self, device: str, **fields: Any) -> None:
        def answer(request: Request) -> list[Message]:
            if isinstance(request, Reload):
                self.reloads.append((device, request))
                return [ReloadReply()]
            return [status(device, cache("m/target", **fields))]

        self._stack.enter_context(StubDaemon(self._directory / f"{device}.sock", answer))

    def socket(self, device: str) -> Path:
        return self._directory / f"{device}.sock"

    def call(self, *but: str) -> set[str]:
        return asyncio.run(self.peers.call(WANTED, but=but))

    def loading(self, timeout_s: float = 30.0) -> str | None:
        return asyncio.run(self.peers.loading(WANTED, timeout_s=timeout_s))

    def lacks(self) -> bool:
        return asyncio.run(self.peers.lacks(WANTED))


@pytest.fixture
def group() -> Iterator[Group]:
    with tempfile.TemporaryDirectory(prefix="wc-") as base, ExitStack() as stack:
        yield Group(Path(base, "run"), stack)


def test_only_peers_that_serve_and_load_nothing_are_asked(group: Group) -> None:
    group.peer("cpu1")
    group.peer("cpu2", phase="meeting")
    # cpu3 has no daemon: when it has one, that one loads.
    assert group.call() == {"cpu1"}
    assert group.reloads == [("cpu1", Reload(caches=["m/target"], along=True))]
    assert group.call("cpu1") == set()


@pytest.mark.parametrize("phase", ["queued", "importing", "configuring", "waiting", "meeting"])
def test_rank_before_the_meeting_waits_for_the_others(group: Group, phase: str) -> None:
    group.peer("cpu1")
    group.peer("cpu2", state="loading", generation=0, phase=phase)
    assert group.lacks()


@pytest.mark.parametrize("phase", ["weights", "packing", "proving", "publishing", "tuning"])
def test_rank_that_has_met_needs_nobody(group: Group, phase: str) -> None:
    group.peer("cpu1", state="loading", generation=0, phase=phase)
    group.peer("cpu2", state="failed", generation=0)
    assert not group.lacks()


def due(**fields: Any) -> dict[str, Any]:
    """A rank that is about to load or restore."""
    return {"state": "loading", "generation": 0, "phase": "queued"} | fields


def test_all_restore_if_each_that_is_due_can(group: Group) -> None:
    group.peer("cpu1", **due(load_from="snapshot", phase="restoring"))
    # It serves: it needs nobody, and nobody needs it.
    group.peer("cpu2")
    group.peer("cpu3", state="failed", generation=0)
    assert group.loading() is None


@pytest.mark.parametrize(
    "fields",
    [
        due(load_from="checkpoint"),
        # Of an older daemon.
        due(phase="meeting"),
        # It serves its old generation meanwhile.
        {"phase": "weights", "load_from": "checkpoint"},
    ],
)
def test_all_load_if_one_has_to(group: Group, fields: dict[str, Any]) -> None:
    group.peer("cpu1", **due(load_from="snapshot"))
    group.peer("cpu2", **fields)
    assert group.loading() == "cpu2"


def test_a_rank_that_does_not_know_yet_is_waited_for(group: Group) -> None:
    said = iter(["", "", "checkpoint"])

    def answer(request: Request) -> list[Message]:
        return [status("cpu1", cache("m/target", **due(load_from=next(said))))]

    with StubDaemon(group.socket("cpu1"), answer):
        assert group.loading() == "cpu1"
    group.peer("cpu2", **due())
    assert group.loading(timeout_s=0.3) is None


def test_a_daemon_that_is_not_up_yet_is_waited_for_a_moment(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a machine that is busy the moment may be longer.
    monkeypatch.setattr("weightcached.daemon.group._UP_TIMEOUT_S", 60.0)
    group.peer("cpu1")
    group.peer("cpu2")
    late = threading.Timer(0.3, lambda: group.peer("cpu3", **due(load_from="checkpoint")))
    late.start()
    try:
        assert group.loading(timeout_s=60.0) == "cpu3"
    finally:
        late.join()


def test_a_daemon_that_does_not_come_is_no_reason_to_load(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightcached.daemon.group._UP_TIMEOUT_S", 0.3)
    group.peer("cpu1", **due(load_from="snapshot"))
    assert group.loading() is None


def test_a_rank_that_restores_waits_for_nobody(group: Group) -> None:
    group.peer("cpu1", **due(phase="restoring"))
    assert not group.lacks()
