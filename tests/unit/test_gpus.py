"""GPUs as NVML tells of them: a module in the place of nvidia-ml-py's."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.daemon import BOUND_S
from weightcached.errors import DeviceError
from weightcached.system import gpus
from weightcached.system.gpus import GpuInfo, Holder

MIB = 1 << 20
GPU0 = "GPU-0e3f7e0a-7b6c-4f8e-9a51-3d2c1b0a9f8e"
GPU1 = "GPU-11111111-2222-3333-4444-555555555555"
MIG0 = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"
MIG1 = "MIG-d7e5f2f0-53f5-6ef4-a2d8-56e82d98fc40"


class NvmlError(Exception):
    pass


class FakeNvml(types.ModuleType):
    """NVML of two GPUs, the first in MIG mode with a gap between its two MIG devices. Handles are
    strings.
    """

    NVMLError = NvmlError

    def __init__(self, *, works: bool = True, mig: bool = True) -> None:
        super().__init__("pynvml")
        self.works = works
        self.open = 0
        self.lost: set[int] = set()
        self.migs = {GPU0: [MIG0, None, MIG1]} if mig else {}
        self.totals = {GPU0: 143771 * MIB, GPU1: 23028 * MIB, MIG0: 18 << 30, MIG1: 18 << 30}
        self.persistent = {GPU0: 0, GPU1: 1}

    def nvmlInit(self) -> None:
        if not self.works:
            raise NvmlError("NVML Shared Library Not Found")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index in self.lost:
            raise NvmlError("GPU is lost")
        return (GPU0, GPU1)[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.totals:
            raise NvmlError("Not Found")
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetName(self, handle: str) -> str:
        return {GPU0: "NVIDIA H200", GPU1: "NVIDIA A10"}.get(handle, "NVIDIA H200 MIG 1g.18gb")

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return types.SimpleNamespace(total=self.totals[handle], free=self.totals[handle] // 2)

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        if handle == GPU1:
            raise NvmlError("Not Supported")
        return [int(bool(self.migs)), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return len(self.migs[handle])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        found = self.migs[handle][index]
        if found is None:
            raise NvmlError("Not Found")
        return found

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        return GPU0

    def nvmlDeviceGetPersistenceMode(self, handle: str) -> int:
        return self.persistent[handle]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        mine = types.SimpleNamespace(pid=os.getpid(), usedGpuMemory=5 * MIB)
        # pid_max is below 2^22, so this one is no process here.
        return [types.SimpleNamespace(pid=1 << 22, usedGpuMemory=None), mine]

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.03"


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeNvml:
    module = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(gpus, "_PROC_VERSION", tmp_path / "absent")
    return module


def test_device_that_is_not_here_is_refused_with_those_that_are(nvml: FakeNvml) -> None:
    gpus.check_present(GPU1)
    with pytest.raises(DeviceError) as e:
        gpus.check_present(GPU0)
    assert str(e.value) == (
        f"no device {GPU0} here: this machine has {MIG0}, {MIG1}, {GPU1}; correct the manifest and the name of the unit"
    )


def test_persistence_mode_off_is_warned_of(nvml: FakeNvml) -> None:
    assert gpus.persistence_warning(GPU0) == (
        f"persistence mode is off on {GPU0}: the driver may shut the GPU down, and lose its memory, when no process "
        "uses it; run 'nvidia-smi -pm 1' as root, or enable nvidia-persistenced.service"
    )


def test_machine_without_a_driver_has_no_gpus(nvml: FakeNvml) -> None:
    nvml.works = False
    assert gpus.list_gpus() == []
    assert gpus.holders(GPU0) == []
    assert gpus.persistence_warning(GPU0) is None
    assert gpus.kernel_driver_version() == "unknown"
    # Nobody lists devices, so none is refused.
    gpus.check_present(GPU0)


def test_real_nvml_without_a_driver_is_a_machine_without_gpus() -> None:
    """As it is here, unless this machine has GPUs."""
    assert all(gpu.uuid.startswith(("GPU-", "MIG-")) for gpu in gpus.list_gpus())


def test_nvml_lists_mig_devices_instead_of_their_gpu(nvml: FakeNvml) -> None:
    assert gpus.list_gpus() == [
        GpuInfo(
            MIG0, "NVIDIA H200 MIG 1g.18gb", 18 << 30, mig=True, parent=GPU0, free_bytes=9 << 30
        ),
        GpuInfo(
            MIG1, "NVIDIA H200 MIG 1g.18gb", 18 << 30, mig=True, parent=GPU0, free_bytes=9 << 30
        ),
        GpuInfo(GPU1, "NVIDIA A10", 23028 * MIB, free_bytes=11514 * MIB),
    ]
    assert nvml.open == 0


def test_lost_gpu_does_not_hide_the_others(
    nvml: FakeNvml, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.lost.add(0)
    assert [gpu.uuid for gpu in gpus.list_gpus()] == [GPU1]
    assert [record.getMessage() for record in caplog.records] == [
        "GPU index=0 does not answer: GPU is lost"
    ]


def test_nvml_names_holders_of_this_pid_namespace(nvml: FakeNvml) -> None:
    name = Path(f"/proc/{os.getpid()}/comm").read_text().strip()
    assert gpus.holders(GPU1) == [Holder(os.getpid(), name, 5 * MIB), Holder(1 << 22, "?", 0)]


def test_nvml_tells_persistence_mode_of_a_mig_devices_gpu(nvml: FakeNvml) -> None:
    assert gpus.persistence_warning(MIG0) is not None
    assert gpus.persistence_warning(GPU1) is None


def test_device_that_nvml_does_not_know_has_no_holders(nvml: FakeNvml) -> None:
    unknown = "GPU-99999999-2222-3333-4444-555555555555"
    assert gpus.holders(unknown) == []
    assert gpus.persistence_warning(unknown) is None
    assert nvml.open == 0


def test_driver_version_comes_from_nvml_without_proc(nvml: FakeNvml) -> None:
    assert gpus.kernel_driver_version() == "580.159.03"


# ---- the kernel driver


@pytest.mark.parametrize(
    ("line", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build  (root@x)",
            "580.159.03",
        ),
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023",
            "535.104.05",
        ),
        (
            "NVRM version: NVIDIA UNIX aarch64 Kernel Module  610.43  Sat Aug 19 01:15:15 UTC 2026",
            "610.43",
        ),
    ],
)
def test_kernel_driver_version_comes_from_proc_first(
    nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, version: str
) -> None:
    nvml.works = False
    proc = tmp_path / "version"
    proc.write_text(f"{line}\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n")
    monkeypatch.setattr(gpus, "_PROC_VERSION", proc)
    assert gpus.kernel_driver_version() == version


def test_importing_devices_imports_neither_torch_nor_cuda() -> None:
    code = "import sys, weightcached.system.gpus; print([m for m in ('torch', 'cuda', 'pynvml') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=BOUND_S
    )
    assert done.stdout == "[]\n"


# ---- CUDA_VISIBLE_DEVICES

GPUS = [
    GpuInfo(GPU0, "NVIDIA H200", 1),
    GpuInfo(MIG0, "MIG 1g", 1, mig=True, parent=GPU1),
    GpuInfo(GPU1, "A10", 1),
]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [GPU0, MIG0, GPU1]),
        ("2,0", [GPU1, GPU0]),
        (f"{GPU1}, {GPU0}", [GPU1, GPU0]),
        ("GPU-1,MIG-c6", [GPU1, MIG0]),
    ],
)
def test_visible_devices_in_the_order_of_the_variable(
    visible: str | None, expected: list[str]
) -> None:
    assert gpus.visible_gpus(GPUS, visible) == expected


@pytest.mark.parametrize(
    ("visible", "entry"), [("0,3", "3"), ("0,0", "0"), ("GPU-", "GPU-"), ("0,-1", "-1"), ("0,", "")]
)
def test_visible_device_that_cuda_would_stop_at_is_named(
    nvml: FakeNvml, visible: str, entry: str
) -> None:
    with pytest.raises(DeviceError) as e:
        gpus.visible_gpus(GPUS, visible)
    assert str(e.value) == (
        f"CUDA_VISIBLE_DEVICES is {visible!r}: {entry!r} names no device of its own; "
        f"this machine has {MIG0}, {MIG1}, {GPU1}"
    )


# ---- the MIG device of a process


SLICES = [
    GpuInfo("MIG-11111111-0000-0000-0000-000000000001", "H200 MIG 1g.18gb", 0, True, "GPU-parent"),
    GpuInfo("MIG-11111111-0000-0000-0000-000000000002", "H200 MIG 1g.18gb", 0, True, "GPU-parent"),
]


@pytest.mark.parametrize(
    ("digits", "visible", "device"),
    [
        # CUDA tells the slice's own.
        ("11111111-0000-0000-0000-000000000002", None, SLICES[1].uuid),
        # It tells the GPU's, and the environment which slice.
        ("parent", SLICES[1].uuid, SLICES[1].uuid),
        ("parent", f"GPU-other,{SLICES[0].uuid}", SLICES[0].uuid),
        ("parent", None, SLICES[0].uuid),
    ],
)
def test_mig_device_of_a_process_is_the_slice(
    monkeypatch: pytest.MonkeyPatch, digits: str, visible: str | None, device: str
) -> None:
    monkeypatch.setattr(gpus, "list_gpus", lambda: SLICES)
    assert gpus.mig_device(digits, visible) == device


def test_mig_device_is_named_where_nobody_lists_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "list_gpus", list)
    assert gpus.mig_device("abc", None) == "MIG-abc"


def test_engine_on_a_slice_looks_for_the_slices_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub of torch, with a slice and a whole GPU."""
    import torch

    from weightcached.vllm_compat import build

    monkeypatch.setattr(gpus, "list_gpus", lambda: SLICES)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name, digits, device in (
        ("NVIDIA H200 MIG 1g.18gb", SLICES[0].uuid.removeprefix("MIG-"), SLICES[0].uuid),
        ("NVIDIA H200", "0e3f", "GPU-0e3f"),
    ):
        properties = types.SimpleNamespace(name=name, uuid=digits)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, p=properties: p)
        assert build.gpu_of_worker() == device
