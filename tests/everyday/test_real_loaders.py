"""docs/faults.md, with vLLM itself: the real parser and the real loader, on the CPU."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import ANSWER_TIMEOUT_S, BIN, ENVIRONMENT
from tests.fakes.daemon import DaemonProcess, model, until, write_manifest
from tests.fakes.drafts import Maker, Shape, write_llama
from tests.process.test_host_faults import memory_cgroup
from tests.process.test_snapshots import reload
from weightcached.config.rendezvous import MAX_TIMEOUT_S
from weightcached.wire.fetch import fetch_index

# They load with vLLM.
pytestmark = pytest.mark.slow
Launcher = Callable[..., DaemonProcess]
ENGINE: dict[str, Any] = {"max_model_len": 64, "enforce_eager": True}
# Imports take 10 s alone, and minutes beside others.
LOAD_S = ANSWER_TIMEOUT_S
# How long a loader waits for peers that do not come; who has met sooner has not waited.
MEETING_S = MAX_TIMEOUT_S
LIMIT_BYTES = 1536 << 20


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama") / "m", Maker(Shape()))


@pytest.fixture
def make_real(make_daemon: Launcher) -> Launcher:
    """Daemons with the product's own loader."""

    def make(*arguments: object, **options: object) -> DaemonProcess:
        daemon = make_daemon(*arguments, **options)
        daemon.loader_command = None
        daemon.env = dict(ENVIRONMENT)
        return daemon

    return make


def ready(daemon: DaemonProcess) -> bool:
    status = daemon.answer()
    return status is not None and bool(status.caches) and status.state == "ready"


def test_rank_that_lost_its_generation_meets_peers_that_have_theirs(
    make_real: Launcher, llama: Path
) -> None:
    entry = model("m", llama, tensor_parallel_size=2, **ENGINE)
    entry |= {
        "devices": ["cpu0", "cpu1"],
        "rendezvous": {"group": "127.0.0.1:29637", "timeout_s": MEETING_S},
    }
    ranks = [make_real([entry], device=device).launch() for device in entry["devices"]]
    until(lambda: all(map(ready, ranks)), "both have met", bound_s=LOAD_S)
    ranks[1].signal(signal.SIGKILL)
    ranks[1].wait()
    ranks[1].launch()
    until(lambda: ready(ranks[1]), "it has met its peer", bound_s=MEETING_S - 60)
    until(lambda: ready(ranks[0]), "so has the peer", bound_s=LOAD_S)
    (kept,) = ranks[0].status().caches
    (new,) = ranks[1].status().caches
    assert (kept.generation, kept.state, kept.error) == (1, "ready", "")
    assert (new.source, new.state) == ("loaded", "ready")
    assert "loaded along cache=m/target" in ranks[0].log
    # With snapshots both come back without each other, and without vLLM.
    write_manifest(ranks[0].manifest, [entry], snapshots={"dir": str(ranks[0].directory / "kept")})
    before = [digests(rank) for rank in ranks]
    for rank in ranks:
        with rank.client("ctl") as client:
            reload(client)
        rank.until(lambda status: status.caches[0].snapshot == "written", "its snapshot")
    for rank in ranks:
        rank.stop()
    for rank in ranks:
        rank.launch()
    for rank in ranks:
        rank.notified("READY=1")
    assert [rank.status().caches[0].source for rank in ranks] == ["restored", "restored"]
    assert [digests(rank) for rank in ranks] == before
    assert before[0] != before[1]


def digests(daemon: DaemonProcess) -> list[bytes]:
    """Those of all storages that the daemon serves; they are in its index."""
    index = fetch_index(
        daemon.device, "m/target", for_what="compared", socket_dir=daemon.socket.parent
    )
    return [storage.digest for storage in index.storages]


def write_large(directory: Path) -> Path:
    """A Llama of 2.1 GB whose weights are a hole in a file: nobody gets as far as to read them."""
    directory.mkdir()
    config = Shape().config(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=128,
    )
    (directory / "config.json").write_text(json.dumps(config))
    nbytes = 2 << 30
    tensor = {"dtype": "BF16", "shape": [nbytes // 2], "data_offsets": [0, nbytes]}
    header = json.dumps({"model.embed_tokens.weight": tensor}).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + nbytes)
    return directory


def test_limit_of_the_control_group_is_looked_at_before_loading(
    make_real: Launcher, short_tmp: Path
) -> None:
    large = write_large(short_tmp / "large")
    with memory_cgroup(LIMIT_BYTES) as procs:
        script = short_tmp / "limited-loader"
        script.write_text(
            f"#!/bin/sh\necho $$ > {procs}\nexec {BIN}/python -m weightcached.loader\n"
        )
        daemon = make_real([model("large", large, **ENGINE)])
        daemon.loader_command = f"sh {script}"
        daemon.launch()
        try:
            until(
                lambda: (s := daemon.answer()) is not None and s.state == "failed",
                "it is refused",
                bound_s=LOAD_S,
            )
            (cache,) = daemon.status().caches
        finally:
            daemon.stop()
    limit = procs.with_name("memory.limit_in_bytes")
    assert cache.error.startswith("large/target needs at least ")
    assert "of 1.5 GiB are free; the limit is " in cache.error
    assert str(limit if "limit_in_bytes" in cache.error else procs.with_name("memory.max")) in (
        cache.error
    )
    assert "raise MemoryMax= of the unit" in cache.error
    assert cache.retry_at is not None
    assert "SIGKILL" not in daemon.log


def test_preload_in_a_directory_that_holds_a_vllm_uses_the_installed_one(
    llama: Path, short_tmp: Path
) -> None:
    here = short_tmp / "here"
    for package in ("vllm", "torch", "weightcached"):
        (here / package).mkdir(parents=True)
        (here / package / "__init__.py").write_text('raise SystemExit("not the installed one")\n')
    words = [str(BIN / "weightcached"), "preload", "--model", str(llama), "--enforce-eager"]
    words += ["--max-model-len", "64", "--weight-cache-socket-dir", str(short_tmp / "run")]
    with open(short_tmp / "log", "wb") as log:
        process = subprocess.Popen(
            words, cwd=here, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, stderr=log
        )
    try:
        assert process.stdout
        assert select.select([process.stdout], [], [], LOAD_S)[0], "it says nothing"
        line = process.stdout.readline().decode()
        assert line.startswith("READY m: 1 rank on cpu0"), (short_tmp / "log").read_text()
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LOAD_S)
    assert process.returncode == 0
    assert "not the installed one" not in (short_tmp / "log").read_text()


def test_checkpoint_of_a_late_mount_is_served_once_it_is_there(
    make_real: Launcher, llama: Path, short_tmp: Path
) -> None:
    late = short_tmp / "mnt/m"
    daemon = make_real([model("late", late, **ENGINE)]).launch()
    daemon.notified("READY=1")
    (cache,) = daemon.status().caches
    assert (cache.state, cache.retry_at is not None) == ("failed", True)
    assert f"{late} does not exist" in cache.error
    late.parent.mkdir()
    shutil.copytree(llama, late)
    until(lambda: ready(daemon), "it is served", bound_s=LOAD_S)
