"""GPUs as NVML and nvidia-smi tell of them: the command is a real executable on PATH, NVML a module
in its place.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weightcached.errors import DeviceError
from weightcached.system import gpus
from weightcached.system.gpus import GpuInfo, Holder

MIB = 1 << 20
GPU0 = "GPU-0e3f7e0a-7b6c-4f8e-9a51-3d2c1b0a9f8e"
GPU1 = "GPU-11111111-2222-3333-4444-555555555555"
MIG0 = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"
MIG1 = "MIG-d7e5f2f0-53f5-6ef4-a2d8-56e82d98fc40"

LIST = f"GPU 0: NVIDIA H200 (UUID: {GPU0})\nGPU 1: NVIDIA A10 (UUID: {GPU1})\n"
MIG_LIST = f"""GPU 0: NVIDIA H200 (UUID: {GPU0})
  MIG 1g.18gb     Device  0: (UUID: {MIG0})
  MIG 1g.18gb     Device  1: (UUID: {MIG1})
GPU 1: NVIDIA A10 (UUID: {GPU1})
"""
ANSWERS = {
    "-L": LIST,
    "--query-gpu=uuid,memory.total": f"{GPU0}, 143771\n{GPU1}, 23028\n",
    "--query-gpu=uuid,memory.free,memory.total": f"{GPU0}, 143000, 143771\n{GPU1}, [N/A], [N/A]\n",
    "--query-gpu=uuid,persistence_mode": f"{GPU0}, Enabled\n{GPU1}, Disabled\n",
    "--query-gpu=driver_version": "580.159.03\n580.159.03\n",
    "--query-compute-apps=gpu_uuid,pid,used_memory,process_name": (
        f"{GPU0}, 4711, 512, /usr/bin/python3, really\n{GPU1}, 1, 7, other\n{GPU0}, 4712, [N/A], [Not Found]\n"
        f"{GPU0}, 4713, 1024, vllm\n"
    ),
}

Smi = Callable[..., None]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """Put an nvidia-smi on PATH, alone, that gives these answers; there is no NVML and no /proc of
    the driver.
    """
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(gpus, "_PROC_VERSION", tmp_path / "absent")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def install(answers: dict[str, str] | None = None, *, status: int = 0, body: str = "") -> None:
        answers = ANSWERS if answers is None else answers
        path = tmp_path / "bin" / "nvidia-smi"
        path.parent.mkdir(exist_ok=True)
        lines = [f"#!{sys.executable}", "import sys", f"answers = {answers!r}"]
        lines += [body or "sys.stdout.write(answers[sys.argv[1]])", f"sys.exit({status})"]
        path.write_text("\n".join(lines))
        path.chmod(0o755)

    return install


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
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpus, "_PROC_VERSION", tmp_path / "absent")
    return module


# ---- nvidia-smi


def test_smi_lists_gpus_with_name_and_memory(smi: Smi) -> None:
    smi()
    assert gpus.list_gpus() == [
        GpuInfo(GPU0, "NVIDIA H200", 143771 * MIB),
        GpuInfo(GPU1, "NVIDIA A10", 23028 * MIB),
    ]


def test_smi_lists_mig_devices_instead_of_their_gpu(smi: Smi) -> None:
    smi({**ANSWERS, "-L": MIG_LIST})
    assert gpus.list_gpus() == [
        GpuInfo(MIG0, "NVIDIA H200 MIG 1g.18gb", 0, mig=True, parent=GPU0),
        GpuInfo(MIG1, "NVIDIA H200 MIG 1g.18gb", 0, mig=True, parent=GPU0),
        GpuInfo(GPU1, "NVIDIA A10", 23028 * MIB),
    ]


def test_smi_tells_free_and_total_bytes(smi: Smi) -> None:
    smi()
    assert gpus.free_and_total_bytes(GPU0) == (143000 * MIB, 143771 * MIB)


def test_unknown_free_memory_names_the_devices_there_are(smi: Smi) -> None:
    smi()
    with pytest.raises(DeviceError) as e:
        gpus.free_and_total_bytes(GPU1)
    assert str(e.value) == f"cannot tell the free memory of {GPU1}: this machine has {GPU0}, {GPU1}"


def test_device_that_is_not_here_is_refused_with_those_that_are(smi: Smi) -> None:
    smi()
    gpus.check_present(GPU1)
    with pytest.raises(DeviceError) as e:
        gpus.check_present(MIG0)
    assert str(e.value) == (
        f"no device {MIG0} here: this machine has {GPU0}, {GPU1}; correct the manifest and the name of the unit"
    )


def test_where_nobody_lists_devices_none_is_refused(smi: Smi) -> None:
    smi(status=9)
    gpus.check_present(GPU0)


def test_smi_tells_holders_largest_first(smi: Smi) -> None:
    smi()
    assert gpus.holders(GPU0) == [
        Holder(4713, "vllm", 1024 * MIB),
        Holder(4711, "/usr/bin/python3, really", 512 * MIB),
        Holder(4712, "[Not Found]", 0),
    ]


def test_persistence_mode_off_is_warned_of(smi: Smi) -> None:
    smi()
    assert gpus.persistence_warning(GPU0) is None
    assert gpus.persistence_warning(GPU1) == (
        f"persistence mode is off on {GPU1}: the driver may shut the GPU down, and lose its memory, when no process "
        "uses it; run 'nvidia-smi -pm 1' as root, or enable nvidia-persistenced.service"
    )


def test_persistence_mode_of_a_mig_device_is_its_gpus(smi: Smi) -> None:
    smi(
        {
            **ANSWERS,
            "-L": MIG_LIST,
            "--query-gpu=uuid,persistence_mode": f"{GPU0}, Disabled\n{GPU1}, Enabled\n",
        }
    )
    warning = gpus.persistence_warning(MIG1)
    assert warning is not None
    assert warning.startswith(f"persistence mode is off on {MIG1}: ")


def test_unreadable_persistence_mode_is_not_warned_of(smi: Smi) -> None:
    smi({**ANSWERS, "--query-gpu=uuid,persistence_mode": f"{GPU0}, [N/A]\n"})
    assert gpus.persistence_warning(GPU0) is None


def test_smi_tells_the_driver_version(smi: Smi) -> None:
    smi()
    assert gpus.kernel_driver_version() == "580.159.03"


def test_failing_smi_is_a_machine_without_gpus_and_a_log_line(
    smi: Smi, caplog: pytest.LogCaptureFixture
) -> None:
    smi(body="print('NVIDIA-SMI has failed because\\nit could not talk to the driver')", status=9)
    assert gpus.list_gpus() == []
    assert (caplog.records[-1].levelno, caplog.records[-1].getMessage()) == (
        logging.WARNING,
        "nvidia-smi -L ended with status 9: NVIDIA-SMI has failed because it could not talk to the driver",
    )


def test_hanging_smi_is_given_up(
    smi: Smi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gpus, "SMI_TIMEOUT_S", 0.3)
    smi(body="import signal; signal.pause()")
    assert gpus.kernel_driver_version() == "unknown"
    assert (
        caplog.records[-1]
        .getMessage()
        .startswith("nvidia-smi --query-gpu=driver_version --format=csv,noheader,")
    )


def test_machine_without_smi_and_nvml_has_no_gpus(smi: Smi) -> None:
    assert gpus.list_gpus() == []
    assert gpus.holders(GPU0) == []
    assert gpus.persistence_warning(GPU0) is None
    assert gpus.kernel_driver_version() == "unknown"
    with pytest.raises(DeviceError) as e:
        gpus.free_and_total_bytes(GPU0)
    assert (
        str(e.value)
        == f"cannot tell the free memory of {GPU0}: neither nvidia-ml-py nor nvidia-smi reports a GPU"
    )


# ---- NVML


def test_nvml_lists_mig_devices_instead_of_their_gpu(nvml: FakeNvml) -> None:
    assert gpus.list_gpus() == [
        GpuInfo(MIG0, "NVIDIA H200 MIG 1g.18gb", 18 << 30, mig=True, parent=GPU0),
        GpuInfo(MIG1, "NVIDIA H200 MIG 1g.18gb", 18 << 30, mig=True, parent=GPU0),
        GpuInfo(GPU1, "NVIDIA A10", 23028 * MIB),
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


def test_nvml_tells_memory_of_mig_devices(nvml: FakeNvml) -> None:
    assert gpus.free_and_total_bytes(MIG0) == (9 << 30, 18 << 30)


def test_nvml_names_holders_of_this_pid_namespace(nvml: FakeNvml) -> None:
    name = Path(f"/proc/{os.getpid()}/comm").read_text().strip()
    assert gpus.holders(GPU1) == [Holder(os.getpid(), name, 5 * MIB), Holder(1 << 22, "?", 0)]


def test_nvml_tells_persistence_mode_of_a_mig_devices_gpu(nvml: FakeNvml) -> None:
    assert gpus.persistence_warning(MIG0) is not None
    assert gpus.persistence_warning(GPU1) is None


def test_device_that_nvml_does_not_know_is_refused(nvml: FakeNvml) -> None:
    unknown = "GPU-99999999-2222-3333-4444-555555555555"
    with pytest.raises(
        DeviceError, match=f"of {unknown}: this machine has {MIG0}, {MIG1}, {GPU1}$"
    ):
        gpus.free_and_total_bytes(unknown)
    assert gpus.holders(unknown) == []
    assert gpus.persistence_warning(unknown) is None
    assert nvml.open == 0


def test_nvml_without_a_library_falls_back_to_smi(
    smi: Smi, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi()
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(works=False))
    assert [gpu.uuid for gpu in gpus.list_gpus()] == [GPU0, GPU1]


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
    smi: Smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, version: str
) -> None:
    smi(status=1)
    proc = tmp_path / "version"
    proc.write_text(f"{line}\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n")
    monkeypatch.setattr(gpus, "_PROC_VERSION", proc)
    assert gpus.kernel_driver_version() == version


def test_importing_devices_imports_neither_torch_nor_cuda() -> None:
    code = "import sys, weightcached.system.gpus; print([m for m in ('torch', 'cuda', 'pynvml') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
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
    smi: Smi, visible: str, entry: str
) -> None:
    smi()
    with pytest.raises(DeviceError) as e:
        gpus.visible_gpus(GPUS, visible)
    assert str(e.value) == (
        f"CUDA_VISIBLE_DEVICES is {visible!r}: {entry!r} names no device of its own; this machine has {GPU0}, {GPU1}"
    )
