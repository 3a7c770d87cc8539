"""A load in its stages, with real vLLM on a tiny model: what the daemon is told and given, in which
order, and that nothing is delivered by halves.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from bench.checkpoints import llama_config, write_checkpoint
from weightcached.errors import LoadError, OutOfDeviceMemoryError
from weightcached.index.tensors import read_index
from weightcached.segments.host import HostBackend
from weightcached.system.fds import close_all
from weightcached.wire.delivery import DaemonChannel
from weightcached.wire.framing import recv_packet
from weightcached.wire.loader_job import LoaderJob
from weightcached.wire.messages import (
    Descriptors,
    LoaderIndex,
    LoaderKey,
    LoaderProgress,
    decode_loader,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    config = llama_config(
        hidden=256, intermediate=512, layers=2, heads=8, kv_heads=4, vocab=512, dtype="bfloat16",
        tied=False,
    )  # fmt: skip
    write_checkpoint(tmp_path / "model", config, shards=2, seed=3)
    return tmp_path / "model"


class Run:
    """One load in this process, with the daemon's end of its socket."""

    def __init__(self, checkpoint: Path) -> None:
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.job = LoaderJob(
            device="cpu0", cache="t/target", role="target", generation=7, spec_digest="s", rank=0,
            boot_id="b", socket_fd=theirs.fileno(),
            engine={"model": str(checkpoint), "max_model_len": 256},
        )  # fmt: skip
        self.channel = DaemonChannel(theirs)
        self._theirs = theirs
        self.backend: Any = HostBackend()

    def load(self) -> None:
        from weightcached.loader.stages import Load
        from weightcached.vllm_compat import solo_rank

        config = solo_rank.create_vllm_config(self.job)
        configs = solo_rank.configs_of(config, "target")
        with solo_rank.solo_rank(configs[0], 0):
            Load(
                self.job, self.channel, self.backend, *configs, environment=os.environ, peers=None
            ).run()

    def received(self) -> Iterator[Any]:
        """Messages with their descriptors, which the caller closes."""
        self._theirs.close()
        while True:
            try:
                packet = recv_packet(self.ours, max_fds=250)
            except EOFError:
                return
            yield decode_loader(packet.data), packet.fds


@pytest.fixture(autouse=True)
def vllm() -> Iterator[None]:
    """Ignore vLLM's warnings, and take back the variables that it sets."""
    with (
        warnings.catch_warnings(),
        mock.patch.dict(os.environ, {"VLLM_NO_USAGE_STATS": "1"}),
        pytest.MonkeyPatch.context() as patch,
    ):
        warnings.simplefilter("ignore")
        # As in vLLM's CPU worker: there is no accelerator.
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        yield


@pytest.fixture
def run(vllm: None, checkpoint: Path) -> Iterator[Run]:
    made = Run(checkpoint)
    yield made
    made.ours.close()


def test_daemon_gets_the_key_first_and_then_a_whole_generation(run: Run) -> None:
    run.load()
    phases: list[str] = []
    key, index, segments = None, None, []
    for message, fds in run.received():
        if isinstance(message, LoaderProgress):
            if message.phase not in phases:
                phases.append(message.phase)
        elif isinstance(message, LoaderKey):
            assert phases == []
            key = message.key
        elif isinstance(message, LoaderIndex):
            (fd,) = fds
            with fd:
                index, _ = read_index(fd)
            expected = message.segments
        else:
            assert isinstance(message, Descriptors)
            segments += fds
    assert phases == ["weights", "packing", "proving", "publishing"]
    assert index is not None
    assert key is not None
    assert index.key.mismatched_fields(key) == []
    assert (index.cache, index.generation, index.stage) == ("t/target", 7, "loaded")
    assert len(segments) == expected == len(index.segments)
    assert index.load.checkpoint_bytes > 0
    mapping = HostBackend().map(segments, [segment.nbytes for segment in index.segments])
    mapping.close()


def test_load_without_room_is_refused_before_a_weight_is_read(run: Run) -> None:
    class Full(HostBackend):
        def free_bytes(self) -> tuple[int, int]:
            return 1, 2

    run.backend = Full()
    with pytest.raises(OutOfDeviceMemoryError, match=r"^t/target needs at least .* on cpu0, 1 KiB"):
        run.load()
    assert [type(message) for message, _ in run.received()] == [LoaderKey]


def test_checkpoint_that_changes_while_it_is_read_is_refused(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightcached.vllm_compat import solo_rank

    original = solo_rank.load_for_stage

    def changing(*args: Any) -> Any:
        model = original(*args)
        shard = min(checkpoint.glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes() + b"x")
        return model

    monkeypatch.setattr(solo_rank, "load_for_stage", changing)
    with pytest.raises(LoadError, match="changed while it was loaded"):
        run.load()
    for message, fds in run.received():
        assert not isinstance(message, LoaderIndex)
        close_all(fds)
