"""Broken checkpoints in loader child and plug-in: a typed error, soon, in little memory."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.checkpoints import llama_config, write_checkpoint
from tests import limits
from tests.engine.conftest import ANSWER_TIMEOUT_S, ENVIRONMENT, ROOT
from tests.engine.test_fallbacks import Plugin
from weightcached.errors import EXIT_CONFIG
from weightcached.wire.framing import recv_packet
from weightcached.wire.loader_job import LoaderJob, encode_job
from weightcached.wire.messages import LoaderFailed, decode_loader

# Processor time, as the machine may be busy with other tests; the wait itself is bounded too.
CPU_LIMIT_S = 2.0
WALL_LIMIT_S = 20.0
# A header of 2 GiB that was believed could not be read in this address space.
LIMITED_LOADER = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
runpy.run_module("weightcached.loader", run_name="__main__")
"""
PLUGIN_GROWTH_LIMIT_KIB = 64_000


def header(size: int, content: bytes = b"") -> Callable[[Path], None]:
    return lambda file: _write(file, struct.pack("<Q", size) + content)


def tensors(**offsets: tuple[int, int]) -> Callable[[Path], None]:
    entries = {
        name: {"dtype": "U8", "shape": [max(end - begin, 0)], "data_offsets": [begin, end]}
        for name, (begin, end) in offsets.items()
    }
    text = json.dumps(entries).encode()
    return lambda file: _write(file, struct.pack("<Q", len(text)) + text + bytes(64))


def _write(file: Path, data: bytes) -> None:
    file.write_bytes(data)


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def _replace(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def apply(file: Path) -> None:
        file.unlink()
        make(file)

    return apply


def _missing_shard(file: Path) -> None:
    index = {"weight_map": {"a": file.name, "b": "model-00002-of-00002.safetensors"}}
    (file.parent / "model.safetensors.index.json").write_text(json.dumps(index))


FAULTS: dict[str, Callable[[Path], None]] = {
    "empty": lambda file: _write(file, b""),
    "three bytes": lambda file: _write(file, b"abc"),
    "cut off": _truncate,
    "header of 2^31 bytes": header(2**31, b"{}"),
    "header of 2^40 bytes": header(2**40, b"{}"),
    "header of 2^63-1 bytes": header(2**63 - 1, b"{}"),
    "invalid JSON": header(10, b"{nonsense}"),
    "offsets past the end": tensors(a=(0, 1 << 40)),
    "overlapping offsets": tensors(a=(0, 40), b=(20, 64)),
    "missing shard": _missing_shard,
    "FIFO": _replace(os.mkfifo),
    "directory": _replace(os.mkdir),
    "link to nowhere": _replace(lambda file: os.symlink("nowhere", file)),
    "link to itself": _replace(lambda file: os.symlink(file.name, file)),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good") / "model"
    config = llama_config(
        hidden=64,
        intermediate=128,
        layers=1,
        heads=4,
        kv_heads=2,
        vocab=256,
        dtype="bfloat16",
        tied=False,
    )
    write_checkpoint(path, config)
    return path


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for file in good.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


@pytest.fixture(scope="module")
def plugin(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugin]:
    plugin = Plugin(good, tmp_path_factory.mktemp("plugin") / "log")
    plugin.case("absent-daemon")
    yield plugin
    plugin.close()


@pytest.mark.timed
@pytest.mark.parametrize("fault", FAULTS)
def test_loader_child_names_the_fault_before_it_imports_vllm(model: Path, fault: str) -> None:
    FAULTS[fault](model / "model.safetensors")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        job = LoaderJob(
            device="cpu0", cache="m/target", role="target", generation=1, spec_digest="x", rank=0, boot_id="b",
            socket_fd=theirs.fileno(), engine={"model": str(model)},
        )  # fmt: skip
        child = subprocess.Popen(
            [sys.executable, "-c", LIMITED_LOADER], env=os.environ | ENVIRONMENT, cwd=ROOT,
            pass_fds=[theirs.fileno()], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert child.stdin is not None
        child.stdin.write(encode_job(job))
        child.stdin.close()
        ours.settimeout(ANSWER_TIMEOUT_S)
        message: Any = None
        while not isinstance(message, LoaderFailed):
            message = decode_loader(recv_packet(ours, max_fds=0).data)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert (message.code, message.permanent) == ("checkpoint", True)
    assert str(model) in message.message
    assert child.returncode == EXIT_CONFIG
    limits.hold("processor time of the loader", usage.ru_utime + usage.ru_stime, CPU_LIMIT_S)


@pytest.mark.timed
@pytest.mark.parametrize("fault", FAULTS)
def test_engine_with_a_broken_checkpoint_does_not_map_and_falls_back_or_fails(
    plugin: Plugin, model: Path, fault: str
) -> None:
    FAULTS[fault](model / "model.safetensors")
    began = time.monotonic()
    fallen = plugin.ask(
        checkpoint=str(model), rung="sample", options={"fallback_load_format": "user_disk"}
    )
    failed = plugin.ask(checkpoint=str(model), rung="sample", options={"fallback": False})
    limits.hold("two attempts of the plug-in", time.monotonic() - began, WALL_LIMIT_S)
    assert fallen.get("loaded") == ["user_disk", {}], fallen
    assert fallen["counted"] == failed["counted"] == {"checkpoint": 1}
    kind, text = failed["error"]
    assert kind == "CheckpointError"
    assert str(model) in text
    assert f"loading from disk (user_disk): {text}" in fallen["log"]
    assert max(fallen["grown"], failed["grown"]) < PLUGIN_GROWTH_LIMIT_KIB


@pytest.mark.parametrize("rung", ["sample", "full"])
def test_file_that_changes_while_it_is_compared_is_an_error(
    plugin: Plugin, model: Path, rung: str
) -> None:
    file = model / "model.safetensors"
    answer = plugin.ask(
        checkpoint=str(model), rung=rung, change=str(file), options={"fallback": False}
    )
    assert answer["error"][0] == "CheckpointError", answer
    assert str(file) in answer["error"][1]
    assert "changed" in answer["error"][1]
    assert answer["counted"] == {"checkpoint": 1}
