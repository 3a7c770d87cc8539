"""Which GPUs this machine has, and who uses their memory, asked without torch and without a CUDA
context.

NVML answers through nvidia-ml-py (module pynvml) where that is installed, the nvidia-smi command
where not. A machine with neither has no GPUs. Opening a device for segments is segments/cuda.py's
duty.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weightcached.errors import DeviceError

log = logging.getLogger(__name__)

# A healthy nvidia-smi without persistence mode needs up to some seconds; a sick GPU can block it
# for ever.
SMI_TIMEOUT_S = 30
MIB = 1 << 20
_PROC_VERSION = Path("/proc/driver/nvidia/version")
_PROC_VERSION_LINE = re.compile(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", re.MULTILINE)
_SMI_GPU_LINE = re.compile(r"GPU \d+: (?P<name>.+) \(UUID: (?P<uuid>GPU-[0-9a-f-]+)\)")
_SMI_MIG_LINE = re.compile(
    r"\s+(?P<name>MIG \S+)\s+Device\s+\d+: \(UUID: (?P<uuid>MIG-[0-9a-f-]+)\)"
)


class GpuInfo(NamedTuple):
    """One device that CUDA can use. total_bytes is 0 where unknown; `parent` is a MIG device's
    physical GPU.
    """

    uuid: str
    name: str
    total_bytes: int
    mig: bool = False
    parent: str = ""


class Holder(NamedTuple):
    """One process with memory on a device; nbytes is 0 where the driver does not say."""

    pid: int
    name: str
    nbytes: int


def list_gpus() -> list[GpuInfo]:
    """All usable devices in PCI order: of a GPU in MIG mode its MIG devices, not the GPU itself."""
    with _source() as source:
        return source.gpus() if source else []


def check_present(uuid: str) -> None:
    """Raises DeviceError where this machine has GPUs and `uuid` is none of them; silent where
    nobody can tell.
    """
    gpus = list_gpus()
    if gpus and uuid not in [gpu.uuid for gpu in gpus]:
        raise DeviceError(
            f"no device {uuid} here: {_visible(gpus)}; correct the manifest and the name of the unit"
        )


def visible_gpus(gpus: Sequence[GpuInfo], visible: str | None) -> list[str]:
    """UUIDs of the devices that CUDA shows to a process with this CUDA_VISIBLE_DEVICES, in its
    order; None is unset.

    Numbers count `gpus`, in PCI order. Raises DeviceError for an entry that CUDA would stop at.
    """
    uuids = [gpu.uuid for gpu in gpus]
    if visible is None:
        return uuids
    found: list[str] = []
    for entry in (text.strip() for text in visible.split(",")):
        # CUDA takes any beginning of a UUID that only one device has.
        matching = (
            uuids[int(entry) : int(entry) + 1]
            if entry.isdecimal()
            else [u for u in uuids if u.startswith(entry)]
        )
        if not entry or len(matching) != 1 or matching[0] in found:
            raise DeviceError(
                f"CUDA_VISIBLE_DEVICES is {visible!r}: {entry!r} names no device of its own; {_visible()}"
            )
        found += matching
    return found


def mig_device(digits: str, visible: str | None) -> str:
    """The name of the MIG device that a process uses: `digits` are those of the UUID that CUDA gave it, which may be
    the physical GPU's, `visible` its CUDA_VISIBLE_DEVICES. CUDA shows a process one MIG device.
    """
    slices = {gpu.uuid: gpu.parent for gpu in list_gpus() if gpu.mig}
    of_parent = [uuid for uuid, parent in slices.items() if parent == f"GPU-{digits}"]
    if f"MIG-{digits}" in slices or not of_parent:
        return f"MIG-{digits}"
    asked = [entry.strip() for entry in (visible or "").split(",") if entry.strip()]
    named = [uuid for entry in asked for uuid in of_parent if uuid.startswith(entry)]
    return (named or of_parent)[0]


def free_and_total_bytes(uuid: str) -> tuple[int, int]:
    """(free, total) bytes of one device. Raises DeviceError where there is no such device or nobody can tell."""
    with _source() as source:
        memory = source.memory(uuid) if source else None
    if memory is None:
        raise DeviceError(f"cannot tell the free memory of {uuid}: {_visible()}")
    return memory


def holders(uuid: str) -> list[Holder]:
    """Processes with memory on the device, largest first; empty also where nobody can tell.

    Memory that only descriptors hold, such as a daemon's segments, belongs to no process and is not
    in the list.
    """
    with _source() as source:
        found = source.processes(uuid) if source else []
    return sorted(found, key=lambda holder: -holder.nbytes)


def persistence_warning(uuid: str) -> str | None:
    """What to tell the operator if persistence mode is off; None if it is on or cannot be read."""
    with _source() as source:
        enabled = source.persistence(uuid) if source else None
    if enabled is not False:
        return None
    return (
        f"persistence mode is off on {uuid}: the driver may shut the GPU down, and lose its memory, when no process "
        "uses it; run 'nvidia-smi -pm 1' as root, or enable nvidia-persistenced.service"
    )


def kernel_driver_version() -> str:
    """Version of the NVIDIA kernel driver, e.g. "580.159.03"; "unknown" where nobody tells."""
    with contextlib.suppress(OSError):
        if match := _PROC_VERSION_LINE.search(_PROC_VERSION.read_text()):
            return match[1]
    with _source() as source:
        return (source.driver_version() if source else "") or "unknown"


def driver_name(version: str) -> str:
    """How an index names the kernel driver that keeps its segments alive: they do not outlive a
    change of it.
    """
    return f"nvidia {version}"


def _visible(gpus: Sequence[GpuInfo] | None = None) -> str:
    uuids = ", ".join(gpu.uuid for gpu in (list_gpus() if gpus is None else gpus))
    return (
        f"this machine has {uuids}"
        if uuids
        else "neither nvidia-ml-py nor nvidia-smi reports a GPU"
    )


class _Nvml:
    """NVML, initialised. Names of NVML functions are those of its C interface."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def gpus(self) -> list[GpuInfo]:
        found: list[GpuInfo] = []
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                found += self._usable(self._nvml.nvmlDeviceGetHandleByIndex(index))
            except self._nvml.NVMLError as e:
                # One GPU that fell off the bus must not hide the others.
                log.warning("GPU index=%d does not answer: %s", index, e)
        return found

    def memory(self, uuid: str) -> tuple[int, int] | None:
        with contextlib.suppress(self._nvml.NVMLError):
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._nvml.nvmlDeviceGetHandleByUUID(uuid))
            return int(memory.free), int(memory.total)
        return None

    def processes(self, uuid: str) -> list[Holder]:
        with contextlib.suppress(self._nvml.NVMLError):
            handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            return [Holder(p.pid, _process_name(p.pid), p.usedGpuMemory or 0) for p in running]
        return []

    def persistence(self, uuid: str) -> bool | None:
        with contextlib.suppress(self._nvml.NVMLError):
            handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            if uuid.startswith("MIG-"):
                handle = self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            return bool(self._nvml.nvmlDeviceGetPersistenceMode(handle))
        return None

    def driver_version(self) -> str:
        return str(self._nvml.nvmlSystemGetDriverVersion())

    def _usable(self, handle: Any) -> Iterator[GpuInfo]:
        gpu = self._info(handle)
        if not self._mig_enabled(handle):
            yield gpu
            return
        for index in range(self._nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            # Indices without a MIG device are normal: they count places, not devices.
            with contextlib.suppress(self._nvml.NVMLError):
                yield self._info(
                    self._nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index), parent=gpu.uuid
                )

    def _mig_enabled(self, handle: Any) -> bool:
        with contextlib.suppress(self._nvml.NVMLError):
            return bool(self._nvml.nvmlDeviceGetMigMode(handle)[0])
        return False

    def _info(self, handle: Any, parent: str = "") -> GpuInfo:
        return GpuInfo(
            uuid=self._nvml.nvmlDeviceGetUUID(handle),
            name=self._nvml.nvmlDeviceGetName(handle),
            total_bytes=int(self._nvml.nvmlDeviceGetMemoryInfo(handle).total),
            mig=bool(parent),
            parent=parent,
        )


class _Smi:
    """The nvidia-smi command. It tells the memory of whole GPUs only."""

    def gpus(self) -> list[GpuInfo]:
        totals = {
            uuid: int(total) * MIB
            for uuid, total in self._query("gpu", "uuid,memory.total")
            if total.isdigit()
        }
        found: list[GpuInfo] = []
        gpu: GpuInfo | None = None
        for line in self._run("-L").splitlines():
            if match := _SMI_GPU_LINE.match(line):
                gpu = GpuInfo(match["uuid"], match["name"], totals.get(match["uuid"], 0))
                found.append(gpu)
            elif gpu and (match := _SMI_MIG_LINE.match(line)):
                found.append(
                    GpuInfo(
                        match["uuid"], f"{gpu.name} {match['name']}", 0, mig=True, parent=gpu.uuid
                    )
                )
        parents = {info.parent for info in found}
        return [info for info in found if info.uuid not in parents]

    def memory(self, uuid: str) -> tuple[int, int] | None:
        for row_uuid, free, total in self._query("gpu", "uuid,memory.free,memory.total"):
            if row_uuid == uuid and free.isdigit() and total.isdigit():
                return int(free) * MIB, int(total) * MIB
        return None

    def processes(self, uuid: str) -> list[Holder]:
        # The name comes last: it may contain the separator.
        rows = self._query("compute-apps", "gpu_uuid,pid,used_memory,process_name")
        return [
            Holder(int(pid), name, int(used) * MIB if used.isdigit() else 0)
            for row_uuid, pid, used, name in rows
            if row_uuid == uuid and pid.isdigit()
        ]

    def persistence(self, uuid: str) -> bool | None:
        parent = next((gpu.parent for gpu in self.gpus() if gpu.uuid == uuid and gpu.mig), uuid)
        modes = dict(self._query("gpu", "uuid,persistence_mode"))
        return {"Enabled": True, "Disabled": False}.get(modes.get(parent, ""))

    def driver_version(self) -> str:
        return next((row[0] for row in self._query("gpu", "driver_version")), "")

    def _query(self, what: str, fields: str) -> list[list[str]]:
        """One list per output row, with as many values as `fields` names; rows of any other form
        are left out.
        """
        width = fields.count(",") + 1
        text = self._run(f"--query-{what}={fields}", "--format=csv,noheader,nounits")
        rows = [line.split(", ", width - 1) for line in text.splitlines()]
        return [row for row in rows if len(row) == width]

    @staticmethod
    def _run(*arguments: str) -> str:
        try:
            done = subprocess.run(
                ["nvidia-smi", *arguments],
                capture_output=True,
                text=True,
                timeout=SMI_TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            log.warning("nvidia-smi %s gave no answer: %s", " ".join(arguments), e)
            return ""
        if done.returncode:
            # It reports its faults, e.g. a kernel module that does not fit, on standard output.
            text = " ".join((done.stderr or done.stdout).split())
            log.warning(
                "nvidia-smi %s ended with status %d: %s", " ".join(arguments), done.returncode, text
            )
            return ""
        return done.stdout


@contextlib.contextmanager
def _source() -> Iterator[_Nvml | _Smi | None]:
    nvml = _initialised_nvml()
    if nvml is None:
        yield _Smi() if shutil.which("nvidia-smi") else None
        return
    try:
        yield _Nvml(nvml)
    finally:
        nvml.nvmlShutdown()


def _initialised_nvml() -> Any | None:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as e:
        log.debug("NVML is not available, asking nvidia-smi: %s", e)
        return None
    return nvml


def _process_name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    # Another PID namespace, or gone since.
    return "?"
