"""Lines that peers cause are limited; omitted ones are counted, errors are never omitted."""

from __future__ import annotations

import logging

import pytest

from weightcached.daemon.logs import Sparing


def test_flood_of_lines_is_cut_and_counted_and_errors_pass(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    log = logging.getLogger("weightcached.test-sparing")
    log.addFilter(Sparing(at_once=3, per_second=1.0))
    caplog.set_level(logging.DEBUG)
    for n in range(10):
        log.warning("peer refused pid=%d", n)
    log.error("session failed pid=%d", 7)
    now_s[0] += 1.5
    log.info("peer died pid=%d", 8)
    log.info("peer died pid=%d", 9)
    assert [record.getMessage() for record in caplog.records] == [
        "peer refused pid=0",
        "peer refused pid=1",
        "peer refused pid=2",
        "session failed pid=7",
        "(7 lines about peers were left out) peer died pid=8",
    ]
