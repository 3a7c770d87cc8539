"""Attaching a model of 1 GiB takes milliseconds, 32 engines at once get it, and the daemon stays
small meanwhile. bench/ measures vLLM's part (building the model).
"""

from __future__ import annotations

import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests import limits
from tests.fakes.checkpoints import key_of, write_checkpoint
from tests.fakes.daemon import BOUND_S, DaemonProcess, model
from tests.fakes.large_loader import SMALL_NBYTES
from weightcache_loader import client
from weightcached.cli.verify_cache import wrong_storages
from weightcached.model.bind import Storages, tensor_of
from weightcached.segments.api import open_backend

MIB = 1 << 20
TENSORS = 450
ATTACH_LIMIT_S = 0.050
DAEMON_LIMIT_BYTES = 64 * MIB
ENGINES = 32
LOADER = f"{shlex.quote(sys.executable)} -m tests.fakes.large_loader"


class Engine(NamedTuple):
    attachment: client.Attachment
    tensors: list[torch.Tensor]

    def close(self) -> None:
        self.attachment.close()


@pytest.fixture
def checkpoint(short_tmp: Path) -> Path:
    return write_checkpoint(short_tmp / "checkpoint", nbytes=MIB)


@pytest.fixture
def daemon(make_daemon: Callable[..., DaemonProcess], checkpoint: Path) -> Iterator[DaemonProcess]:
    """A daemon that serves 1 GiB in 450 tensors, of which 150 are small, in 5 segments."""
    # Two of three tensors are large.
    size: dict[str, Any] = {
        "x_nbytes": 1536 * MIB,
        "x_tensors": TENSORS,
        "x_segment_nbytes": 256 * MIB,
    }
    daemon = make_daemon([model("large", checkpoint, **size)])
    daemon.loader_command = LOADER
    yield daemon.start()
    # 1 GiB is more than should wait for the end of the test.
    assert daemon.stop() == 0


def attach(daemon: DaemonProcess, checkpoint: Path) -> Engine:
    """An engine's steps from connecting to bound tensors, without building the model."""
    key = key_of({"model": str(checkpoint)})
    attachment = client.attach(
        daemon.socket, key, connect_timeout_s=BOUND_S, state_timeout_s=BOUND_S
    )
    index = attachment.tensor_index
    mapping = open_backend(daemon.device).map(
        attachment.fds, [segment.nbytes for segment in index.segments]
    )
    storages = Storages(index, mapping, torch.device("cpu"), copy=False)
    tensors = [tensor_of(record, storages) for record in index.tensors]
    mapping.close()
    return Engine(attachment, tensors)


def check(engine: Engine) -> None:
    """Every tensor begins and ends with its number."""
    for number, tensor in enumerate(engine.tensors):
        assert tensor[0, 0].item() == tensor[-1, -1].item() == number


def memory(pid: int) -> dict[str, int]:
    """Bytes by the names of /proc/PID/status."""
    found = re.findall(
        r"^(\w+):\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
    )
    return {name: int(kilobytes) * 1024 for name, kilobytes in found}


@pytest.mark.timed
def test_attaching_a_gibibyte_takes_milliseconds(daemon: DaemonProcess, checkpoint: Path) -> None:
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        engine = attach(daemon, checkpoint)
        seconds.append(time.perf_counter() - began)
        check(engine)
        index = engine.attachment.tensor_index
        engine.close()
    assert 1023 * MIB < sum(tensor.nbytes for tensor in engine.tensors) < 1025 * MIB
    assert (len(engine.tensors), len(index.segments)) == (TENSORS, 5)
    assert sum(tensor.nbytes == SMALL_NBYTES for tensor in engine.tensors) == TENSORS // 3
    limits.hold("attach, best of five", min(seconds), ATTACH_LIMIT_S, seconds)


def test_many_engines_at_once_all_attach_and_the_daemon_stays_small(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    start = threading.Barrier(ENGINES)
    engines: list[Engine] = []
    seconds: list[float] = []

    def run() -> None:
        start.wait(BOUND_S)
        began = time.perf_counter()
        engine = attach(daemon, checkpoint)
        seconds.append(time.perf_counter() - began)
        engines.append(engine)

    threads = [threading.Thread(target=run) for _ in range(ENGINES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert len(engines) == ENGINES
    for engine in engines:
        check(engine)
    status = daemon.status()
    assert len(status.caches[0].engines) == ENGINES
    held = memory(daemon.pid)
    own = held["VmRSS"] - held["RssShmem"]
    print(
        f"\n{ENGINES} engines in {max(seconds):.2f} s; daemon {own / MIB:.1f} MiB beside {status.caches[0].bytes / MIB}"
    )
    assert own <= DAEMON_LIMIT_BYTES
    # It hands segments out without mapping them.
    assert held["RssShmem"] < MIB
    for engine in engines:
        engine.close()
    daemon.until(lambda status: not status.caches[0].engines, "all leases given back")


def test_daemon_that_serves_has_loaded_neither_torch_nor_numpy(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    attach(daemon, checkpoint).close()
    libraries = set(re.findall(r"/\S+", Path(f"/proc/{daemon.pid}/maps").read_text()))
    assert any("msgspec" in library for library in libraries)
    assert [lib for lib in libraries if re.search(r"torch|vllm|numpy|libcuda|libnvidia", lib)] == []


def test_attached_bytes_have_the_digests_of_the_index(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    key = key_of({"model": str(checkpoint)})
    attachment = client.attach(
        daemon.socket, key, connect_timeout_s=BOUND_S, state_timeout_s=BOUND_S
    )
    index = attachment.tensor_index
    mapping = open_backend(daemon.device).map(
        attachment.fds, [segment.nbytes for segment in index.segments]
    )
    assert list(wrong_storages(index, mapping)) == []
    attachment.close()
    mapping.close()
