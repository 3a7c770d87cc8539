"""The least need of a load from disk, and the memory that the daemon holds meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.daemon import BOUND_S, until
from tests.fakes.stub_daemon import Packet, Silence, StubDaemon, cache, status
from weightcache_loader import fallback
from weightcached.errors import (
    CacheConfigMismatchError,
    OutOfDeviceMemoryError,
    WeightCacheUnavailableError,
)
from weightcached.segments.host import HostBackend
from weightcached.wire import resident
from weightcached.wire.connection import Connection
from weightcached.wire.messages import PROTOCOL_VERSION, Done, Fallback, Hello, Refused
from weightcached.wire.resident import Resident, held

REASON = WeightCacheUnavailableError("the cache is gone", code="released")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    directory = tmp_path / "weightcached"
    directory.mkdir(mode=0o700)
    return directory / "cpu0.sock"


def test_resident_is_what_the_daemon_says(path: Path) -> None:
    reply = status(
        "cpu0", cache("a/target", bytes=5), cache("b/target", bytes=0), cache("c/draft", bytes=7)
    )
    with StubDaemon(path, lambda request: [reply]):
        assert [(h.cache, h.nbytes) for h in fallback.resident(path)] == [
            ("a/target", 5),
            ("c/draft", 7),
        ]
    assert fallback.resident(path) == []


def written(path: Path, *, stopped: bool = False) -> None:
    generations = held(status("cpu0", cache("a/target", bytes=5)))
    resident.write(
        path,
        Resident(
            device="cpu0", boot_id=resident.boot_id(), generations=generations, stopped=stopped
        ),
    )


def test_daemon_that_cannot_be_asked_holds_what_it_wrote_down(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fallback, "_STATUS_TIMEOUT_S", BOUND_S)
    written(path)
    assert [h.nbytes for h in fallback.resident(path)] == [5]
    with StubDaemon(path, lambda request: [Silence()]), monkeypatch.context() as silent_for:
        silent_for.setattr(fallback, "_STATUS_TIMEOUT_S", 0.2)
        assert [h.nbytes for h in fallback.resident(path)] == [5]
    with StubDaemon(path, lambda request: [status("cpu0")]) as daemon:
        assert fallback.resident(path) == []
        asked = len(daemon.requests)
        silent = WeightCacheUnavailableError("silence", code="timeout")
        assert [h.nbytes for h in fallback.resident(path, [silent])] == [5]
        assert len(daemon.requests) == asked, "a daemon that was silent is not asked again"
        elsewhere = CacheConfigMismatchError("another device's", code="wrong-device")
        assert fallback.resident(path, [elsewhere]) == []


def test_daemon_may_come_back_unless_it_ended_as_told(path: Path) -> None:
    assert not fallback.may_come_back(path)
    written(path)
    assert fallback.may_come_back(path)
    written(path, stopped=True)
    assert not fallback.may_come_back(path)


def test_load_from_disk_is_refused_only_beside_what_a_daemon_holds_and_where_it_cannot_fit(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostBackend, "free_bytes", lambda self: (1 << 10, 1 << 30))
    holding = held(status("cpu0", cache(bytes=1 << 20)))
    fallback.check_room(1 << 20, "cpu0", [], REASON)
    fallback.check_room(1 << 10, "cpu0", holding, REASON)
    with pytest.raises(
        OutOfDeviceMemoryError,
        match=r"at least 1\.0 MiB on cpu0, 1 KiB of 1\.0 GiB are free, the daemon holds tiny/target 1\.0 MiB \(pid",
    ) as refused:
        fallback.check_room(1 << 20, "cpu0", holding, REASON)
    assert refused.value.code == "no-room"


def test_daemon_is_told_of_a_fallback_where_there_is_one_to_be_told(path: Path) -> None:
    with StubDaemon(path, lambda request: [Done()]) as daemon:
        fallback.report(path, REASON)
        assert daemon.requests[1:] == [Fallback(reason="released")]
        assert daemon.requests[0] == Hello(protocol=PROTOCOL_VERSION, purpose="ctl"), "no lease"
        for code in ("no-daemon", "runtime-path", "wrong-device", "timeout", "protocol-version"):
            reason = WeightCacheUnavailableError("nobody to tell")
            reason.code = code
            fallback.report(path, reason)
        assert len(daemon.requests) == 2


def test_daemon_that_does_not_take_the_news_keeps_nobody_from_loading(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fallback, "_STATUS_TIMEOUT_S", BOUND_S)
    # It has long enough to say Welcome, and no time for the answer.
    request = Connection.request
    monkeypatch.setattr(Connection, "request", lambda self, news, _: request(self, news, 0.2))
    fallback.report(path, REASON)
    older = Refused(
        code="protocol", message="message does not decode: Invalid value 'Fallback' - at `$.type`"
    )
    for answer in (older, Silence(), Packet(b"", then_close=True)):
        with StubDaemon(path, lambda request, answer=answer: [answer]) as daemon:  # type: ignore[misc]
            fallback.report(path, REASON)
            until(lambda daemon=daemon: len(daemon.requests) == 2, "it has the news")  # type: ignore[misc]
