"""What a load from disk needs at least, and what the daemon holds meanwhile."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.stub_daemon import Packet, Silence, StubDaemon, cache, status
from weightcache_loader import fallback
from weightcached.errors import CheckpointError, OutOfDeviceMemoryError, WeightCacheUnavailableError
from weightcached.segments.host import HostBackend
from weightcached.wire.messages import PROTOCOL_VERSION, Done, Fallback, Hello, Refused

REASON = WeightCacheUnavailableError("the cache is gone", code="released")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    directory = tmp_path / "weightcached"
    directory.mkdir(mode=0o700)
    return directory / "cpu0.sock"


def engine(world_size: int = 1) -> Any:
    return SimpleNamespace(
        load_config=SimpleNamespace(download_dir=None), parallel_config=SimpleNamespace(world_size=world_size),
        model_config=SimpleNamespace(model="/the/target"),
    )  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Any:
    directory = write_checkpoint(tmp_path / "checkpoint", nbytes=1 << 20)
    return SimpleNamespace(model=str(directory), revision=None, quantization=None)


def test_a_rank_needs_its_share_of_the_files(model: Any) -> None:
    whole = sum(file.stat().st_size for file in Path(model.model).glob("*.safetensors"))
    assert whole == 1 << 20
    assert fallback.needed_bytes(engine(), model, "auto") == whole
    assert fallback.needed_bytes(engine(world_size=4), model, "auto") == whole // 4
    model.quantization = "fp8"
    assert fallback.needed_bytes(engine(world_size=4), model, "auto") == whole // 4 // 4
    model.model = "/nowhere/at/all"
    with pytest.raises(CheckpointError):
        fallback.needed_bytes(engine(), model, "auto")


def test_draft_inside_of_its_targets_checkpoint_may_need_nothing(model: Any) -> None:
    vllm_config = engine()
    vllm_config.model_config = SimpleNamespace(model=model.model)
    assert fallback.needed_bytes(vllm_config, model, "auto") == 0
    vllm_config.model_config = model
    assert fallback.needed_bytes(vllm_config, model, "auto") == 1 << 20


def test_held_bytes_are_those_of_caches_that_hold_any(path: Path) -> None:
    reply = status(
        "cpu0", cache("a/target", bytes=5), cache("b/target", bytes=0), cache("c/draft", bytes=7)
    )
    with StubDaemon(path, lambda request: [reply]):
        assert fallback.held_bytes(path) == {"a/target": 5, "c/draft": 7}


def test_daemon_that_cannot_be_asked_holds_nothing_known(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fallback, "_STATUS_TIMEOUT_S", 0.2)
    assert fallback.held_bytes(path) == {}
    with StubDaemon(path, lambda request: [Silence()]):
        assert fallback.held_bytes(path) == {}


def test_room_is_asked_for_only_where_a_daemon_holds_something(
    path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostBackend, "free_bytes", lambda self: (1 << 10, 1 << 30))

    def ask(reason: WeightCacheUnavailableError = REASON) -> None:
        fallback.check_room(engine(), model, "cpu0", path, "auto", reason)

    with StubDaemon(path, lambda request: [status("cpu0")]):
        ask()
    with StubDaemon(path, lambda request: [status("cpu0", cache(bytes=1))]) as daemon:
        with pytest.raises(
            OutOfDeviceMemoryError,
            match=r"at least 1\.0 MiB on cpu0, 0\.0 MiB of 1\.0 GiB are free",
        ):
            ask()
        asked = len(daemon.requests)
        ask(WeightCacheUnavailableError("silence", code="timeout"))
        assert len(daemon.requests) == asked, "a daemon that was silent is not asked again"
        monkeypatch.setattr(HostBackend, "free_bytes", lambda self: (1 << 29, 1 << 30))
        ask()


def test_daemon_is_told_of_a_fallback_where_there_is_one_to_be_told(path: Path) -> None:
    with StubDaemon(path, lambda request: [Done()]) as daemon:
        fallback.report(path, REASON)
        assert daemon.requests[1:] == [Fallback(reason="released")]
        assert daemon.requests[0] == Hello(protocol=PROTOCOL_VERSION, purpose="ctl"), "no lease"
        for code in ("no-daemon", "runtime-path", "wrong-device", "timeout", "protocol-version"):
            fallback.report(path, WeightCacheUnavailableError("nobody to tell", code=code))
        assert len(daemon.requests) == 2


def test_daemon_that_does_not_take_the_news_keeps_nobody_from_loading(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fallback, "_STATUS_TIMEOUT_S", 0.2)
    fallback.report(path, REASON)
    older = Refused(
        code="protocol", message="message does not decode: Invalid value 'Fallback' - at `$.type`"
    )
    for answer in (older, Silence(), Packet(b"", then_close=True)):
        with StubDaemon(path, lambda request, answer=answer: [answer]) as daemon:  # type: ignore[misc]
            fallback.report(path, REASON)
            assert len(daemon.requests) == 2
