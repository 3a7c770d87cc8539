"""The engine's side of the protocol, with a scripted daemon: every answer, fault and return."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests import limits
from tests.fakes.checkpoints import WEIGHTS, identity_of, write_checkpoint
from tests.fakes.daemon import BOUND_S, until
from tests.fakes.models import an_index
from tests.fakes.stub_daemon import Answer, Packet, Silence, StubDaemon, welcome
from weightcache_loader import client
from weightcache_loader.client import Attachment, LeaseKeeper, attach, mismatch_text, release
from weightcached.checkpoint.identity import full_digest, sample_digest
from weightcached.errors import (
    CacheConfigMismatchError,
    Cause,
    IndexFormatError,
    ProtocolError,
    WeightcachedError,
    WeightCacheUnavailableError,
)
from weightcached.index import tensors as index_format
from weightcached.index.key import WeightCacheKey
from weightcached.index.tensors import SegmentRecord, StorageRecord
from weightcached.system.fds import OwnedFd, sealed_memfd
from weightcached.system.process import label_of_this_process
from weightcached.wire.connection import Connection
from weightcached.wire.messages import (
    Absent,
    Attach,
    Descriptors,
    Done,
    Failed,
    FieldMismatch,
    Hello,
    HoldLoads,
    Loading,
    Mismatch,
    NeedDigest,
    Parked,
    Ready,
    Refused,
    Rejoin,
    Rejoined,
    Release,
    Released,
    Request,
    Unmap,
    Welcome,
    encode,
)

TIMEOUT_S = BOUND_S
# For deadlines of the client's own, measured.
LIMIT_S = 5.0
CACHE = "tiny/target"
SEGMENT = b"segment ".ljust(4096, b".")
INDEX = index_format.encode(an_index())
DIGEST = index_format.digest_of(INDEX)


class Lines(logging.Handler):
    """The plug-in's log lines, and a way to wait for one."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._news = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._news:
            self.lines.append(f"{record.levelname} {record.getMessage()}")
            self._news.notify_all()

    def wait_for(self, line: str) -> None:
        with self._news:
            assert self._news.wait_for(lambda: line in self.lines, BOUND_S), (
                f"{line!r} is not in {self.lines}"
            )


@pytest.fixture
def lines() -> Iterator[Lines]:
    # At the logger itself: once vLLM is imported, its loggers do not propagate.
    handler, level = Lines(), client.log.level
    client.log.addHandler(handler)
    client.log.setLevel(logging.INFO)
    yield handler
    client.log.removeHandler(handler)
    client.log.setLevel(level)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    directory = tmp_path / "weightcached"
    directory.mkdir(mode=0o700)
    return directory / "cpu0.sock"


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No descriptor and no thread may be left by any test."""
    # What earlier tests left for the collector is theirs.
    gc.collect()
    before = descriptors(), threading.active_count()
    yield
    gc.collect()
    assert (descriptors(), threading.active_count()) == before


def descriptors() -> list[str]:
    return sorted(entry.name for entry in Path("/proc/self/fd").iterdir())


@pytest.fixture
def key(tmp_path: Path) -> WeightCacheKey:
    """A key as an engine makes it, without any digest."""
    directory = write_checkpoint(tmp_path / "checkpoint", nbytes=4096)
    return WeightCacheKey(checkpoint=msgspec.structs.replace(identity_of(directory), sample=""))


def run(path: Path, key: WeightCacheKey, *, state_timeout_s: float = TIMEOUT_S) -> Attachment:
    return attach(path, key, connect_timeout_s=TIMEOUT_S, state_timeout_s=state_timeout_s)


def refused(kind: type[WeightcachedError], path: Path, key: WeightCacheKey, **options: Any) -> str:
    with pytest.raises(WeightcachedError) as e:
        run(path, key, **options)
    assert type(e.value) is kind
    return str(e.value).replace(str(path.parent), "DIR")


def ready(**changed: Any) -> Ready:
    fields: dict[str, Any] = {
        "cache": CACHE, "generation": 3, "nbytes": 4096, "segment_nbytes": [4096], "index_digest": DIGEST,
        "descriptors": 2,
    }  # fmt: skip
    return Ready(**(fields | changed))


def handing_out(
    *segments: bytes,
    index: bytes = INDEX,
    announced: Ready | None = None,
    after: Iterable[Answer] = (),
) -> Iterator[Answer]:
    """Ready, the descriptors in one packet, and further messages."""
    yield announced or ready()
    fds = [
        sealed_memfd("index", index),
        *(sealed_memfd("segment", segment) for segment in segments),
    ]
    yield Packet(encode(Descriptors(first=0)), [fd.fileno() for fd in fds])
    for fd in fds:
        fd.close()
    yield from after


def serving(*answers: Answer) -> Callable[[Request], Iterable[Answer]]:
    """A daemon that hands out one segment, or gives these answers."""
    return lambda request: answers or handing_out(SEGMENT)


# ---- answers


def test_ready_gives_index_segments_and_a_lease(path: Path, key: WeightCacheKey) -> None:
    with StubDaemon(path, serving()) as daemon:
        attachment = run(path, key)
        assert attachment.ready == ready()
        assert attachment.tensor_index == an_index()
        assert [os.pread(fd.fileno(), 4096, 0) for fd in attachment.fds] == [SEGMENT]
        attachment.close()
        assert attachment.connection.fileno() == -1
    assert [type(request) for request in daemon.requests] == [Hello, Attach]
    assert daemon.requests[0] == Hello(
        protocol=1, software=client.SOFTWARE, purpose="engine", label=label_of_this_process()
    )
    assert daemon.requests[1] == Attach(key=key, wait=True)


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        (
            Mismatch(
                cache=CACHE,
                fields=[
                    FieldMismatch("dtype", "torch.bfloat16", "torch.float16"),
                    FieldMismatch("versions.vllm", "0.32.0", "0.33.0"),
                ],
            ),
            CacheConfigMismatchError,
            "tiny/target is cached with another key: dtype is torch.bfloat16, asked torch.float16; versions.vllm is "
            "0.32.0, asked 0.33.0",
        ),
        (
            Absent(reason="no cache in role draft on cpu0: the manifest gives it tiny/target"),
            WeightCacheUnavailableError,
            "the daemon has no such cache: no cache in role draft on cpu0: the manifest gives it tiny/target",
        ),
        (
            Failed(cache=CACHE, error="loader ended with status 1: out of memory"),
            WeightCacheUnavailableError,
            "tiny/target failed to load: loader ended with status 1: out of memory",
        ),
        (
            Released(cache=CACHE),
            WeightCacheUnavailableError,
            "tiny/target was dropped, or released to an engine in copy mode; 'weightcachectl reload' brings it back",
        ),
        (
            Refused(code="busy", message="64 connections are open, no more are taken"),
            WeightCacheUnavailableError,
            "the daemon refused: 64 connections are open, no more are taken",
        ),
        (Done(), ProtocolError, "the daemon answered Attach with Done"),
        (Rejoined(), ProtocolError, "the daemon answered Attach with Rejoined"),
        (
            Packet(b"\xff\xff garbage"),
            ProtocolError,
            "message does not decode: Expected `object`, got `int`",
        ),
        (
            Packet(b"", then_close=True),
            WeightCacheUnavailableError,
            "the daemon on DIR/cpu0.sock closed the connection",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_final_answer_is_its_own_error(
    path: Path, key: WeightCacheKey, answer: Answer, kind: type[WeightcachedError], text: str
) -> None:
    with StubDaemon(path, serving(answer)):
        assert refused(kind, path, key) == text


def test_no_daemon_is_unavailable(path: Path, key: WeightCacheKey) -> None:
    assert refused(WeightCacheUnavailableError, path, key) == (
        "no weightcached daemon listens on DIR/cpu0.sock: systemctl --user start weightcached@cpu0.service"
    )


def test_silent_daemon_is_unavailable(
    path: Path, key: WeightCacheKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_SILENCE_S", 0.2)
    with StubDaemon(path, serving(Silence())):
        text = refused(WeightCacheUnavailableError, path, key)
    assert text == "the daemon on DIR/cpu0.sock did not answer within 0.2 s"


def test_mismatch_text_of_one_field() -> None:
    assert mismatch_text([FieldMismatch("dtype", "a", "b")]) == "dtype is a, asked b"


# ---- while it loads


def loading(phase: str = "weights", **changed: Any) -> Loading:
    return Loading(cache=CACHE, phase=phase, **changed)


def test_loading_waits_and_logs(path: Path, key: WeightCacheKey, lines: Lines) -> None:
    gib = 1 << 30

    def script(request: Request) -> Iterable[Answer]:
        yield loading(done_bytes=gib, total_bytes=4 * gib, eta_s=12.4)
        # Too soon for another line.
        yield loading(done_bytes=2 * gib, total_bytes=4 * gib, eta_s=6.0)
        yield loading("packing")
        yield from handing_out(SEGMENT)

    with StubDaemon(path, script):
        run(path, key).close()
    assert lines.lines == ["INFO waiting for tiny/target: weights, 1.0 of 4.0 GiB, 12 s left"]


def test_progress_without_an_estimate_is_logged_without_one(
    path: Path, key: WeightCacheKey, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_PROGRESS_LOG_INTERVAL_S", 0.0)

    def script(request: Request) -> Iterable[Answer]:
        yield loading("configuring")
        yield loading("weights", total_bytes=1 << 29)
        yield from handing_out(SEGMENT)

    with StubDaemon(path, script):
        run(path, key).close()
    assert lines.lines == [
        "INFO waiting for tiny/target: configuring",
        "INFO waiting for tiny/target: weights, 0.0 of 512.0 MiB",
    ]


@pytest.mark.timed
def test_loading_beyond_the_deadline_is_unavailable(path: Path, key: WeightCacheKey) -> None:
    def script(request: Request) -> Iterable[Answer]:
        while True:
            yield loading("weights")
            time.sleep(0.02)

    began = time.monotonic()
    with StubDaemon(path, script):
        text = refused(WeightCacheUnavailableError, path, key, state_timeout_s=0.3)
    assert text == (
        "tiny/target is still loading (weights); raise state_timeout_s to wait longer, 'weightcachectl status' shows "
        "its progress"
    )
    waited_s = time.monotonic() - began
    assert waited_s >= 0.3
    limits.hold("refused after a deadline of 0.3 s", waited_s, LIMIT_S)


def test_load_that_stops_is_not_waited_for(
    path: Path, key: WeightCacheKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The client's own clock goes on by 50 s with each answer.
    clock = SimpleNamespace(now_s=0.0)
    note = client._Waiting.note

    def noted(waiting: Any, answer: Loading) -> None:
        clock.now_s += 50
        note(waiting, answer)

    monkeypatch.setattr(client._Waiting, "note", noted)
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: clock.now_s))

    def script(request: Request) -> Iterable[Answer]:
        for done in range(1, 6):
            yield loading(done_bytes=done, total_bytes=9)
        while True:
            yield loading(done_bytes=5, total_bytes=9)

    with StubDaemon(path, script):
        text = refused(WeightCacheUnavailableError, path, key, state_timeout_s=1e9)
    # While bytes came it was waited for longer than that.
    assert text == (
        "tiny/target has stopped loading: weights stands at 5 of 9 bytes for 150 s; 'weightcachectl status' shows its "
        "state, 'journalctl --user' its loader's log"
    )


@pytest.mark.parametrize("phase", ["queued", "digest"])
def test_phase_without_bytes_is_waited_for(
    path: Path, key: WeightCacheKey, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    monkeypatch.setattr(client, "_STALL_S", 0.1)

    def script(request: Request) -> Iterable[Answer]:
        for _ in range(15):
            yield loading(phase)
            time.sleep(0.02)
        yield from handing_out(SEGMENT)

    with StubDaemon(path, script):
        run(path, key).close()


def test_daemon_of_another_device_is_not_asked(path: Path, key: WeightCacheKey) -> None:
    with (
        StubDaemon(path, serving(), greeting=[welcome("cpu7")]) as daemon,
        pytest.raises(CacheConfigMismatchError) as e,
    ):
        attach(path, key, connect_timeout_s=TIMEOUT_S, state_timeout_s=TIMEOUT_S, device="cpu0")
    assert str(e.value) == (
        f"the daemon on {path} serves cpu7, this engine runs on cpu0: name its socket in socket_path, or leave "
        "socket_path out"
    )
    assert [type(request) for request in daemon.requests] == [Hello]


def test_daemon_that_refuses_the_connection_is_unavailable(path: Path, key: WeightCacheKey) -> None:
    full = Refused(code="too-many", message="64 connections are open, no more are taken")
    with StubDaemon(path, serving(), greeting=[full]):
        text = refused(WeightCacheUnavailableError, path, key)
    assert text == "the daemon refused: 64 connections are open, no more are taken"


def test_engine_that_is_content_with_samples_says_so(path: Path, key: WeightCacheKey) -> None:
    with StubDaemon(path, serving()) as daemon:
        attach(
            path, key, connect_timeout_s=TIMEOUT_S, state_timeout_s=TIMEOUT_S, identity="sampled"
        ).close()
    assert daemon.requests[1:] == [Attach(key=key, wait=True, identity="sampled")]


def test_engine_that_does_not_wait_asks_so(path: Path, key: WeightCacheKey) -> None:
    with StubDaemon(path, serving(loading("configuring"))) as daemon:
        text = refused(WeightCacheUnavailableError, path, key, state_timeout_s=0)
    assert text.startswith("tiny/target is still loading (configuring); raise state_timeout_s")
    assert daemon.requests[1:] == [Attach(key=key, wait=False)]


@pytest.mark.parametrize(
    "end", [Failed(cache=CACHE, error="disk full"), Refused(code="busy", message="stopping")]
)
def test_loading_may_end_in_an_error(path: Path, key: WeightCacheKey, end: Answer) -> None:
    with StubDaemon(path, serving(loading(), end)):
        text = refused(WeightCacheUnavailableError, path, key)
    assert text in {"tiny/target failed to load: disk full", "the daemon refused: stopping"}


def test_daemon_that_dies_while_it_loads_is_unavailable(path: Path, key: WeightCacheKey) -> None:
    with StubDaemon(path, serving(loading(), Packet(b"", then_close=True))):
        text = refused(WeightCacheUnavailableError, path, key)
    assert text == "the daemon on DIR/cpu0.sock closed the connection"


# ---- digests


def test_each_digest_is_made_once_when_it_is_asked_for(
    path: Path, key: WeightCacheKey, lines: Lines
) -> None:
    rungs = iter(["sample", "full"])
    names = [WEIGHTS, "model.safetensors.index.json"]

    def script(request: Request) -> Iterable[Answer]:
        rung = next(rungs, None)
        return [NeedDigest(rung=rung, files=names)] if rung else handing_out(SEGMENT)  # type: ignore[arg-type]

    key = with_safetensors(key)
    with StubDaemon(path, script) as daemon:
        run(path, key).close()
    checkpoint = key.checkpoint
    sample = msgspec.structs.replace(checkpoint, sample=sample_digest(checkpoint))
    full = msgspec.structs.replace(sample, full=full_digest(checkpoint))
    asked = [request.key.checkpoint for request in daemon.requests if isinstance(request, Attach)]
    assert asked == [checkpoint, sample, full]
    assert lines.lines == [
        f"INFO comparing the checkpoint with the cached one by sample digest: {checkpoint.root}",
        f"INFO comparing the checkpoint with the cached one by full digest: {checkpoint.root}",
    ]


def with_safetensors(key: WeightCacheKey) -> WeightCacheKey:
    """The key with a weight file that has a real header."""
    root = Path(key.checkpoint.root)
    header = b'{"w":{"dtype":"U8","shape":[4096],"data_offsets":[0,4096]}}'.ljust(64)
    (root / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4096))
    return msgspec.structs.replace(
        key, checkpoint=msgspec.structs.replace(identity_of(root), sample="")
    )


@pytest.mark.parametrize("rung", ["sample", "full"])
def test_daemon_that_asks_again_for_what_it_was_given_breaks_the_protocol(
    path: Path, key: WeightCacheKey, rung: str
) -> None:
    key = with_safetensors(key)
    with StubDaemon(path, serving(NeedDigest(rung=rung))) as daemon:  # type: ignore[arg-type]
        text = refused(ProtocolError, path, key)
    assert (
        text
        == f"the daemon asks for the {rung} digest of {key.checkpoint.root}, which it was given"
    )
    assert len(daemon.requests) == 3


def test_checkpoint_that_changed_meanwhile_is_named(path: Path, key: WeightCacheKey) -> None:
    key = with_safetensors(key)
    weights = Path(key.checkpoint.root) / WEIGHTS
    os.utime(weights, ns=(1, 1))
    with StubDaemon(path, serving(NeedDigest(rung="full"))), pytest.raises(WeightcachedError) as e:
        run(path, key)
    assert e.value.code == "checkpoint"
    assert str(weights) in str(e.value)


# ---- a daemon that hands out something else


def test_index_other_than_the_announced_one_is_refused(path: Path, key: WeightCacheKey) -> None:
    other = index_format.encode(an_index(generation=4))
    with StubDaemon(path, lambda request: handing_out(SEGMENT, index=other)):
        text = refused(ProtocolError, path, key)
    assert text == "the index of tiny/target is not the one that the daemon announced"


@pytest.mark.parametrize(
    ("index", "kind", "text"),
    [
        (b"", IndexFormatError, "tensor index of 0 bytes is shorter than its header"),
        (b"x" * 100, IndexFormatError, "tensor index begins with b'xxxx', expected b'WCIX'"),
        (
            INDEX[:-1] + b"\xff",
            IndexFormatError,
            "tensor index: its digest does not match its content",
        ),
    ],
    ids=["empty", "foreign", "corrupt"],
)
def test_index_that_is_none_is_refused(
    path: Path, key: WeightCacheKey, index: bytes, kind: type[WeightcachedError], text: str
) -> None:
    with StubDaemon(path, lambda request: handing_out(SEGMENT, index=index)):
        assert refused(kind, path, key) == text


def test_index_that_could_change_is_refused(path: Path, key: WeightCacheKey) -> None:
    def script(request: Request) -> Iterable[Answer]:
        yield ready(descriptors=1)
        with OwnedFd(os.memfd_create("index")) as fd:
            os.write(fd.fileno(), INDEX)
            yield Packet(encode(Descriptors(first=0)), [fd.fileno()])

    with StubDaemon(path, script):
        text = refused(IndexFormatError, path, key)
    assert text == "tensor index: the descriptor is not a memfd sealed against change"


@pytest.mark.parametrize("segments", [0, 2, 3])
def test_other_number_of_segments_than_the_index_says_is_refused(
    path: Path, key: WeightCacheKey, segments: int
) -> None:
    announced = ready(descriptors=1 + segments)
    with StubDaemon(path, lambda request: handing_out(*[SEGMENT] * segments, announced=announced)):
        text = refused(ProtocolError, path, key)
    assert text == f"tiny/target has 1 segments, {segments} descriptors came"


def test_more_segments_than_fit_in_one_packet_arrive_in_order(
    path: Path, key: WeightCacheKey
) -> None:
    count = 600
    index = index_format.encode(
        an_index(
            segments=[SegmentRecord(512, private=False)] * count,
            storages=[StorageRecord(0, 0, 512, bytes(16))],
        )
    )

    def script(request: Request) -> Iterable[Answer]:
        fds = [
            sealed_memfd("x", index),
            *(sealed_memfd("x", b"%d" % number) for number in range(count)),
        ]
        yield ready(descriptors=len(fds), index_digest=index_format.digest_of(index))
        for first in range(0, len(fds), 250):
            yield Packet(
                encode(Descriptors(first=first)), [fd.fileno() for fd in fds[first : first + 250]]
            )
        for fd in fds:
            fd.close()

    with StubDaemon(path, script):
        attachment = run(path, key)
        assert [os.pread(fd.fileno(), 9, 0) for fd in attachment.fds] == [
            b"%d" % number for number in range(count)
        ]
        attachment.close()


def test_ready_without_descriptors_is_refused(path: Path, key: WeightCacheKey) -> None:
    with StubDaemon(path, serving(ready(descriptors=0))):
        text = refused(ProtocolError, path, key)
    assert text == "the daemon handed out no index of tiny/target"


@pytest.mark.parametrize(
    ("rest", "kind", "text"),
    [
        (
            [Packet(b"", then_close=True)],
            WeightCacheUnavailableError,
            "the daemon on DIR/cpu0.sock closed the connection",
        ),
        ([Done()], ProtocolError, "Done came after 2 of 3 descriptors, expected Descriptors"),
        (
            [Descriptors(first=2)],
            ProtocolError,
            "a packet of 0 descriptors says that it begins at number 2, expected 2 of 3",
        ),
    ],
    ids=["end", "other-message", "empty-packet"],
)
def test_descriptors_that_stay_away_are_an_error(
    path: Path, key: WeightCacheKey, rest: list[Answer], kind: type[WeightcachedError], text: str
) -> None:
    with StubDaemon(
        path, lambda request: handing_out(SEGMENT, announced=ready(descriptors=3), after=rest)
    ):
        assert refused(kind, path, key) == text


def test_descriptors_that_never_come_end_with_the_deadline(path: Path, key: WeightCacheKey) -> None:
    unanswered = pytest.raises(WeightCacheUnavailableError, match=r"did not answer within 0\.\d s$")
    with StubDaemon(path, serving(ready(), Silence())), unanswered:
        attach(path, key, connect_timeout_s=0.3, state_timeout_s=TIMEOUT_S)


# ---- copy mode


def test_release_gives_the_lease_back(path: Path, key: WeightCacheKey, lines: Lines) -> None:
    def script(request: Request) -> Iterable[Answer]:
        return [Done()] if isinstance(request, Release) else handing_out(SEGMENT)

    with StubDaemon(path, script) as daemon:
        attachment = run(path, key)
        release(attachment, timeout_s=TIMEOUT_S)
        assert attachment.connection.fileno() == -1
        assert all(fd.closed for fd in attachment.fds)
    assert daemon.requests[-1] == Release()
    assert lines.lines == []


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (
            Refused(code="busy", message="2 other engines map it"),
            "WARNING the daemon keeps tiny/target: 2 other engines map it",
        ),
        (
            Packet(b"", then_close=True),
            "WARNING cannot ask the daemon to free tiny/target: the daemon on DIR/cpu0.sock closed the connection",
        ),
    ],
    ids=["refused", "gone"],
)
def test_release_that_fails_is_a_log_line(
    path: Path, key: WeightCacheKey, lines: Lines, answer: Answer, line: str
) -> None:
    def script(request: Request) -> Iterable[Answer]:
        return [answer] if isinstance(request, Release) else handing_out(SEGMENT)

    with StubDaemon(path, script):
        attachment = run(path, key)
        release(attachment, timeout_s=TIMEOUT_S)
    assert [entry.replace(str(path.parent), "DIR") for entry in lines.lines] == [line]
    assert attachment.connection.fileno() == -1


# ---- the lease

GONE = (
    "WARNING the daemon of tiny/target is gone; the engine goes on with the weights it has mapped"
)
REJOINED = "INFO rejoined the daemon of tiny/target, generation 3"


def leased(path: Path, key: WeightCacheKey) -> LeaseKeeper:
    attachment = run(path, key)
    for fd in attachment.fds:
        fd.close()
    return LeaseKeeper(attachment.connection, path, attachment.ready)


def rejoining(*answers: Answer) -> Callable[[Request], Iterable[Answer]]:
    return lambda request: answers if isinstance(request, Rejoin) else handing_out(SEGMENT)


def test_closed_lease_is_given_back_and_its_thread_ends(
    path: Path, key: WeightCacheKey, lines: Lines
) -> None:
    left = threading.Event()

    def script(request: Request) -> Iterator[Answer]:
        yield from handing_out(SEGMENT)
        yield Silence()

    class Watched(StubDaemon):
        def _serve(self, peer: Any) -> None:
            super()._serve(peer)
            left.set()

    with Watched(path, script):
        lease = leased(path, key)
        assert lease.connected.is_set()
        lease.close()
        assert left.wait(BOUND_S)
        lease.close()
    assert not lease.connected.is_set()
    assert "weightcached-lease" not in [thread.name for thread in threading.enumerate()]
    assert lines.lines == []


def test_lease_is_renewed_when_the_daemon_returns(
    path: Path, key: WeightCacheKey, lines: Lines
) -> None:
    with StubDaemon(path, serving()):
        lease = leased(path, key)
    lines.wait_for(GONE)
    assert not lease.connected.is_set()
    with StubDaemon(path, rejoining(Rejoined())) as daemon:
        assert lease.connected.wait(BOUND_S)
        lines.wait_for(REJOINED)
        lease.close()
    assert daemon.requests == [
        Hello(
            protocol=1, software=client.SOFTWARE, purpose="engine", label=label_of_this_process()
        ),
        Rejoin(cache=CACHE, generation=3, index_digest=DIGEST),
    ]
    assert lines.lines == [GONE, REJOINED]


def test_lease_survives_one_restart_after_the_other(
    path: Path, key: WeightCacheKey, lines: Lines
) -> None:
    with StubDaemon(path, serving()):
        lease = leased(path, key)
    for _ in range(3):
        with StubDaemon(path, rejoining(Rejoined())):
            assert lease.connected.wait(BOUND_S)
            lines.wait_for(REJOINED)
            lines.lines.remove(REJOINED)
        lines.wait_for(GONE)
        lines.lines.remove(GONE)
    lease.close()


@pytest.mark.parametrize(
    "first",
    [
        [Packet(b"", then_close=True)],
        [Packet(b"\xff garbage")],
        [Silence()],
        [Done()],
    ],
    ids=["ends", "garbage", "silent", "other"],
)
def test_daemon_that_answers_wrongly_is_asked_again(
    path: Path,
    key: WeightCacheKey,
    lines: Lines,
    first: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_REJOIN_MAX_S", 0.2)
    with StubDaemon(path, serving()):
        lease = leased(path, key)
    lines.wait_for(GONE)
    # Again and again: on a busy machine an answer may be late, too.
    later: list[Answer] = [Rejoined()]
    scripts = itertools.chain([first], itertools.repeat(later))
    with StubDaemon(path, lambda request: next(scripts)):
        assert lease.connected.wait(BOUND_S)
        lease.close()
    assert lines.lines.count(GONE) == 1


def test_refused_rejoin_ends_with_a_log_line(path: Path, key: WeightCacheKey, lines: Lines) -> None:
    with StubDaemon(path, serving()):
        lease = leased(path, key)
    message = "tiny/target generation 3 is gone, generation 4 is served"
    with StubDaemon(path, rejoining(Refused(code="absent", message=message))) as daemon:
        lines.wait_for(
            f"WARNING the restarted daemon no longer serves the weights that this engine maps: {message}"
        )
        lease._thread.join(BOUND_S)
        assert not lease._thread.is_alive()
        assert not lease.connected.is_set()
        lease.close()
    assert [type(request) for request in daemon.requests] == [Hello, Rejoin]


def test_daemon_of_another_protocol_is_waited_out(
    path: Path, key: WeightCacheKey, lines: Lines
) -> None:
    with StubDaemon(path, serving()):
        lease = leased(path, key)
    lines.wait_for(GONE)
    with StubDaemon(path, greeting=[welcome(protocol=2)]) as daemon:
        until(lambda: bool(daemon.requests), "it is asked")
    with StubDaemon(path, rejoining(Rejoined())):
        assert lease.connected.wait(BOUND_S)
        lease.close()


def test_socket_that_vanishes_under_the_look_at_it_is_tried_again(
    path: Path, key: WeightCacheKey, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StubDaemon(path, serving()):
        lease = leased(path, key)
    real, raised = Connection.connect, threading.Event()

    def vanishing(*arguments: Any, **options: Any) -> Any:
        if not raised.is_set():
            raised.set()
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real(*arguments, **options)

    lines.wait_for(GONE)
    monkeypatch.setattr(Connection, "connect", vanishing)
    with StubDaemon(path, rejoining(Rejoined())):
        assert lease.connected.wait(BOUND_S)
        assert raised.is_set()
        lease.close()


def test_lease_closed_while_the_daemon_is_away_ends_its_thread(
    path: Path, key: WeightCacheKey, lines: Lines
) -> None:
    with StubDaemon(path, serving()):
        lease = leased(path, key)
    lines.wait_for(GONE)
    lease.close()
    assert not lease._thread.is_alive()


# ---- engines that sleep

PARKING = Welcome(protocol=1, device="cpu0", pid=1, parking=True)
ASLEEP, AWAKE = Parked(parked=True), Parked(parked=False)


def sleeping(*answers: Answer) -> Callable[[Request], Iterable[Answer]]:
    """A daemon that goes on with `answers` once it has heard that the engine sleeps."""

    def script(request: Request) -> Iterable[Answer]:
        if isinstance(request, Parked):
            return [Done(), *answers] if request.parked else [Done()]
        return [Rejoined()] if isinstance(request, Rejoin) else handing_out(SEGMENT)

    return script


def leased_for_sleep(path: Path, key: WeightCacheKey, unmap: Callable[[], bool]) -> LeaseKeeper:
    attachment = run(path, key)
    for fd in attachment.fds:
        fd.close()
    return LeaseKeeper(attachment.connection, path, attachment.ready, on_unmap=unmap)


def test_daemon_hears_that_the_engine_sleeps_and_wakes(
    path: Path, key: WeightCacheKey, lines: Lines
) -> None:
    with StubDaemon(path, sleeping(), greeting=[PARKING]) as daemon:
        lease = leased(path, key)
        lease.park(True)
        until(lambda: ASLEEP in daemon.requests, "it hears that the engine sleeps")
        lease.park(False)
        until(lambda: AWAKE in daemon.requests, "it hears that the engine wakes")
        assert lease.connected.is_set()
        lease.close()
    assert lines.lines == []


def test_older_daemon_is_not_told(path: Path, key: WeightCacheKey, lines: Lines) -> None:
    with StubDaemon(path, sleeping()) as daemon:
        lease = leased(path, key)
        lease.park(True)
        lease.close()
    assert ASLEEP not in daemon.requests


def test_sleeping_engine_unmaps_when_asked_and_its_lease_ends(
    path: Path, key: WeightCacheKey, lines: Lines
) -> None:
    asked = threading.Event()

    def unmap() -> bool:
        asked.set()
        return True

    with StubDaemon(path, sleeping(Unmap()), greeting=[PARKING]):
        lease = leased_for_sleep(path, key, unmap)
        lease.park(True)
        assert asked.wait(BOUND_S)
        lease._thread.join(BOUND_S)
        assert not lease.connected.is_set()
        lease.close()
    assert lines.lines == [
        "INFO unmapped tiny/target generation 3, because the daemon needs the room; the engine attaches again before "
        "it wakes"
    ]


def test_engine_that_does_not_unmap_keeps_its_lease(
    path: Path, key: WeightCacheKey, lines: Lines
) -> None:
    asked = threading.Event()

    def keep() -> bool:
        asked.set()
        return False

    with StubDaemon(path, sleeping(Unmap()), greeting=[PARKING]) as daemon:
        lease = leased_for_sleep(path, key, keep)
        lease.park(True)
        assert asked.wait(BOUND_S)
        lease.park(False)
        until(lambda: AWAKE in daemon.requests, "it hears that the engine wakes")
        lease.close()
    assert lines.lines == []


def test_restarted_daemon_is_told_again_that_the_engine_sleeps(
    path: Path, key: WeightCacheKey, lines: Lines
) -> None:
    with StubDaemon(path, sleeping(), greeting=[PARKING]) as daemon:
        lease = leased(path, key)
        lease.park(True)
        until(lambda: ASLEEP in daemon.requests, "it hears that the engine sleeps")
    with StubDaemon(path, sleeping(), greeting=[PARKING]) as daemon:
        until(lambda: ASLEEP in daemon.requests, "it hears that the engine sleeps")
        lease.close()


def test_daemon_that_is_away_is_waited_for_and_another_reason_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_REJOIN_FIRST_S", 0.0)
    reasons: Iterator[Cause] = iter(("no-daemon", "connection-lost", "absent"))

    def attach() -> Attachment:
        raise WeightCacheUnavailableError("no", code=next(reasons))

    with pytest.raises(WeightCacheUnavailableError) as caught:
        client.patiently(attach)
    assert caught.value.code == "absent"


# ---- while the engine measures memory, sleeps or wakes


def test_loads_are_held_off_once_the_load_that_has_the_device_is_over(path: Path) -> None:
    def script(request: Request) -> Iterable[Answer]:
        yield loading("weights", done_bytes=1, total_bytes=2)
        yield loading("publishing")
        yield Done()

    with StubDaemon(path, script) as daemon:
        held = client.hold_loads(path, connect_timeout_s=TIMEOUT_S, state_timeout_s=TIMEOUT_S)
        assert held is not None
        assert daemon.requests[1:] == [HoldLoads()]
        held.close()


@pytest.mark.parametrize(
    "answer", [Refused(code="protocol", message="older"), Packet(b"", then_close=True)]
)
def test_engine_goes_on_where_loads_cannot_be_held_off(path: Path, answer: Answer) -> None:
    assert client.hold_loads(path, connect_timeout_s=TIMEOUT_S, state_timeout_s=TIMEOUT_S) is None
    with StubDaemon(path, serving(answer)):
        assert (
            client.hold_loads(path, connect_timeout_s=TIMEOUT_S, state_timeout_s=TIMEOUT_S) is None
        )


def test_load_that_lasts_too_long_is_not_waited_for(path: Path, lines: Lines) -> None:
    def script(request: Request) -> Iterable[Answer]:
        while True:
            yield loading("weights")
            time.sleep(0.02)

    with StubDaemon(path, script):
        assert client.hold_loads(path, connect_timeout_s=TIMEOUT_S, state_timeout_s=0.2) is None
    assert lines.lines[-1].startswith(
        "WARNING the daemon goes on loading while this engine measures memory: tiny/target is still loading"
    )


def test_engine_that_sleeps_or_wakes_waits_for_nobody(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of the Welcome, on a busy machine.
    monkeypatch.setattr(client, "_MOMENT_S", BOUND_S)
    with client.loads_held(None):
        pass
    with StubDaemon(path, serving(Silence())) as daemon, client.loads_held(path):
        until(lambda: HoldLoads(wait=False) in daemon.requests, "it is asked")
    # Its thread ends with the block, or with the daemon.
    until(
        lambda: not [t for t in threading.enumerate() if t.name == "weightcached-hold"],
        "the thread has ended",
    )
