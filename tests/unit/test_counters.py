"""The daemon's counts. tests/process/test_exporter.py shows that they reach a scrape."""

from __future__ import annotations

import pytest

from weightcached.daemon.caches import Caches
from weightcached.daemon.counters import MAX_FIELDS, OTHER, Tally
from weightcached.errors import ProtocolError
from weightcached.wire.messages import (
    Absent,
    Fallback,
    FieldMismatch,
    Mismatch,
    StatusReply,
    decode_reply,
    decode_request,
    encode,
)


def mismatch(*fields: str) -> Mismatch:
    return Mismatch(cache="m/target", fields=[FieldMismatch(field, "a", "b") for field in fields])


def test_invented_field_names_are_counted_together() -> None:
    tally = Tally(adoptions=0)
    for number in range(MAX_FIELDS + 50):
        tally.refused(mismatch(f"environment.VLLM_{number}"))
    tally.refused(mismatch("environment.VLLM_0"))
    counters = tally.counters(Caches(), digest_failures=0)
    assert len(counters.mismatches) == MAX_FIELDS + 1
    assert counters.mismatches[OTHER] == 50
    assert counters.mismatches["environment.VLLM_0"] == 2


def test_answers_and_attaches_are_counted_by_kind_and_cache() -> None:
    tally = Tally(adoptions=3)
    tally.refused(Absent(reason="none"))
    tally.refused(mismatch("dtype", "tp_size"))
    tally.attached("m/target", 0.25)
    tally.attached("m/target", 0.5)
    counters = tally.counters(Caches(), digest_failures=2)
    assert counters.refusals == {"Absent": 1, "Mismatch": 1}
    assert counters.mismatches == {"dtype": 1, "tp_size": 1}
    assert (counters.attaches, counters.attach_seconds) == ({"m/target": 2}, {"m/target": 0.75})
    assert (counters.adoptions, counters.digest_failures) == (3, 2)


def test_fallbacks_are_counted_by_reason_and_invented_reasons_together() -> None:
    tally = Tally(adoptions=0)
    for number in range(MAX_FIELDS + 7):
        tally.fell_back(f"reason-{number}")
    tally.fell_back("reason-0")
    fallbacks = tally.counters(Caches(), digest_failures=0).fallbacks
    assert (len(fallbacks), fallbacks[OTHER], fallbacks["reason-0"]) == (MAX_FIELDS + 1, 7, 2)


@pytest.mark.parametrize("reason", ["", "Two Words", "-", "a" * 51])
def test_reason_that_is_no_code_is_refused(reason: str) -> None:
    with pytest.raises(ProtocolError, match=r"\$\.reason"):
        decode_request(encode(Fallback(reason=reason)))


def test_reply_of_an_older_daemon_has_no_counters() -> None:
    reply = StatusReply(device="cpu0", pid=1, state="ready", since=0.0, caches=[])
    decoded = decode_reply(encode(reply))
    assert isinstance(decoded, StatusReply)
    assert decoded.counters is None
