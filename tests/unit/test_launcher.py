"""`weightcached preload`: its devices. tests/process/test_preload.py has its processes."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from array import array
from pathlib import Path

import pytest

from weightcached.errors import DeviceError
from weightcached.preload import launcher
from weightcached.preload.notify_server import NotifyServer
from weightcached.system.gpus import GpuInfo
from weightcached.system.notify import connect, send, store_message

GPUS = [GpuInfo(f"GPU-0000000{n}-0000-4000-8000-000000000000", "H200", 1) for n in range(4)]
UUIDS = [gpu.uuid for gpu in GPUS]


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "list_gpus", lambda: GPUS)


@pytest.mark.usefixtures("four_gpus")
def test_gpus_are_taken_in_the_order_of_cuda_visible_devices() -> None:
    assert launcher.local_devices({"tensor_parallel_size": 2}, {}) == UUIDS[:2]
    assert launcher.local_devices(
        {"tensor_parallel_size": 2}, {"CUDA_VISIBLE_DEVICES": "3,1,0"}
    ) == [UUIDS[3], UUIDS[1]]


@pytest.mark.usefixtures("four_gpus")
def test_no_visible_gpu_means_host_memory() -> None:
    assert launcher.local_devices({"pipeline_parallel_size": 2}, {"CUDA_VISIBLE_DEVICES": ""}) == [
        "cpu0",
        "cpu1",
    ]


@pytest.mark.usefixtures("four_gpus")
def test_too_few_gpus_are_named() -> None:
    with pytest.raises(DeviceError) as e:
        launcher.local_devices({"tensor_parallel_size": 4}, {"CUDA_VISIBLE_DEVICES": "1,2"})
    assert (
        str(e.value)
        == f"tensor_parallel_size 4 needs 4, 2 GPUs are visible: {UUIDS[1]}, {UUIDS[2]}"
    )


@pytest.mark.usefixtures("four_gpus")
def test_a_node_of_several_takes_devices_for_its_own_ranks() -> None:
    assert (
        launcher.local_devices({"tensor_parallel_size": 8, "nnodes": 4, "node_rank": 3}, {})
        == UUIDS[:2]
    )


def test_machine_without_gpus_has_slots_of_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "list_gpus", list)
    assert launcher.local_devices({"data_parallel_size": 3}, {"CUDA_VISIBLE_DEVICES": "0"}) == [
        "cpu0",
        "cpu1",
        "cpu2",
    ]


def test_kept_descriptors_are_no_other_daemons() -> None:
    """One that is started again would inherit them, and keep memory that their owner has freed."""

    async def test() -> None:
        with tempfile.TemporaryDirectory(prefix="wc") as directory:
            manager = NotifyServer(Path(directory, "notify"))
            with connect(manager.address) as daemon:
                # More than one message may have, and nothing: what follows counts.
                for state, count in (("FDSTORE=1", 20), ("", 0), (store_message("wc1.a.0"), 1)):
                    rights = array("i", [0] * count)
                    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if count else []
                    daemon.sendmsg([state.encode()], ancillary)
                send(daemon, "READY=1")
                await manager.ready.wait()
            (kept,) = manager.kept.values()
            assert not os.get_inheritable(kept.fileno())
            manager.close()

    asyncio.run(asyncio.wait_for(test(), timeout=30))
