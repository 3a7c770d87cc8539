"""What an engine of a service adds to the manifest's arguments, on a GPU that is not there."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import vllm
from vllm.platforms import current_platform

from weightcached.errors import EngineError
from weightcached.vllm_compat import server
from weightcached.wire.engine_job import Job

GIB = 1 << 30
REMEMBERED = {
    "kv_cache_bytes": 90 * GIB,
    "ranks": {"0": {"free_bytes": 130 * GIB, "external_bytes": 15 * GIB, "sources": ["zero_copy"]}},
    "vllm": str(vllm.__version__),
    "torch": str(torch.__version__),
}


def job(*, parked: bool = False, load_format: str = "ipc_cache", **more: Any) -> Job:
    return Job(
        service="chat", number=2, digest="", directory="/run/x/chat/2", host="", port=0, path="",
        arguments={"model": "m", "load_format": load_format, "model_loader_extra_config": {"mode": "zero_copy"}},
        parked=parked, **more,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 on CUDA."""
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(server, "_knows_sleep_backends", lambda: True)


def test_engine_that_maps_may_sleep() -> None:
    arguments = server._arguments(job())
    assert (arguments["enable_sleep_mode"], arguments["sleep_mode_backend"]) == (
        True,
        "weightcached",
    )
    assert arguments["model_loader_extra_config"] == {"mode": "zero_copy"}
    assert "kv_cache_memory_bytes" not in arguments


def test_standby_starts_parked_with_the_cache_size_of_its_equal() -> None:
    arguments = server._arguments(job(parked=True, kv_cache_bytes=90 * GIB))
    assert arguments["model_loader_extra_config"] == {"mode": "zero_copy", "start_parked": True}
    assert arguments["kv_cache_memory_bytes"] == 90 * GIB
    assert "kv_cache_memory_bytes" not in server._arguments(job(parked=True))


def test_standby_that_does_not_map_is_refused() -> None:
    with pytest.raises(EngineError, match="load_format auto does not map its weights"):
        server._arguments(job(parked=True, load_format="auto"))
    assert "enable_sleep_mode" not in server._arguments(job(load_format="auto"))


def test_standby_with_a_vllm_that_cannot_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_knows_sleep_backends", lambda: False)
    with pytest.raises(EngineError, match="this vLLM has no choice of sleep back ends"):
        server._arguments(job(parked=True))


def test_what_other_software_measured_is_not_remembered() -> None:
    assert server._remembered(job(remembered=REMEMBERED)) == REMEMBERED
    assert server._remembered(job(remembered=REMEMBERED | {"vllm": "0.1"})) == {}
    assert server._remembered(job()) == {}


def test_first_start_leaves_the_size_to_the_workers() -> None:
    assert "kv_cache_memory_bytes" not in server._arguments(job(remembered=REMEMBERED))


def test_versions_are_what_a_reply_can_hold() -> None:
    assert msgspec.json.decode(msgspec.json.encode(server._versions())) == server._versions()


def test_first_logged_exception_is_kept_as_the_reason_and_lines_are_numbered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory = logging.getLogRecordFactory()
    monkeypatch.setattr(logging, "_logRecordFactory", factory)
    monkeypatch.setenv(server.ERROR_FILE, str(tmp_path / "2/error"))
    monkeypatch.setenv(server.FENCE_FD, "99")
    monkeypatch.setenv("VLLM_LOGGING_PREFIX", "chat/2 ")
    (tmp_path / "2").mkdir()
    server.join_engine()
    server.join_engine()
    records = logging.getLogRecordFactory()
    for error in (ValueError("the cause"), RuntimeError("see above")):
        made = records("vllm", logging.ERROR, "f", 1, "failed", (), (type(error), error, None))
    assert (tmp_path / "2/error").read_text() == "the cause"
    assert getattr(made, "vllm_process_name", "chat/2 x").startswith("chat/2 ")
    assert records._make is factory  # type: ignore[attr-defined]
