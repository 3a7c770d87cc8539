"""Which GPUs this machine has, and who uses their memory, asked without torch and without a CUDA
context.

NVML answers, through nvidia-ml-py (module pynvml). A machine without NVIDIA's driver has no GPUs.
Opening a device for segments is segments/cuda.py's duty.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weightcached.errors import DeviceError

log = logging.getLogger(__name__)

_PROC_VERSION = Path("/proc/driver/nvidia/version")
_PROC_VERSION_LINE = re.compile(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", re.MULTILINE)


class GpuInfo(NamedTuple):
    """One CUDA device. total_bytes: 0 if unknown; parent: the physical GPU of a MIG device.

    free_bytes: when it was asked.
    """

    uuid: str
    name: str
    total_bytes: int
    mig: bool = False
    parent: str = ""
    free_bytes: int = 0


class Holder(NamedTuple):
    """One process with memory on a device. nbytes: 0 if the driver does not tell."""

    pid: int
    name: str
    nbytes: int


def list_gpus() -> list[GpuInfo]:
    """All usable devices in PCI order: of a GPU in MIG mode its MIG devices, not the GPU itself."""
    found: list[GpuInfo] = []
    with _initialised_nvml() as nvml:
        for index in range(nvml.nvmlDeviceGetCount() if nvml else 0):
            try:
                found += _usable(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
            except nvml.NVMLError as e:
                # One GPU that fell off the bus must not hide the others.
                log.warning("GPU index=%d does not answer: %s", index, e)
    return found


def check_present(uuid: str) -> None:
    """Raises DeviceError if this machine has GPUs, but not `uuid`. Without an answer, does nothing."""
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
    """The name of the MIG device that a process uses; CUDA shows a process one MIG device.

    digits: of the UUID that CUDA gave, which may be the physical GPU's; visible:
    CUDA_VISIBLE_DEVICES.
    """
    slices = {gpu.uuid: gpu.parent for gpu in list_gpus() if gpu.mig}
    of_parent = [uuid for uuid, parent in slices.items() if parent == f"GPU-{digits}"]
    if f"MIG-{digits}" in slices or not of_parent:
        return f"MIG-{digits}"
    asked = [entry.strip() for entry in (visible or "").split(",") if entry.strip()]
    named = [uuid for entry in asked for uuid in of_parent if uuid.startswith(entry)]
    return (named or of_parent)[0]


def holders(uuid: str) -> list[Holder]:
    """Processes with memory on the device, largest first; empty also if nobody can tell.

    Memory that only descriptors hold, such as a daemon's segments, belongs to no process and is not
    in the list.
    """
    found: list[Holder] = []
    with _initialised_nvml() as nvml:
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
                found = [Holder(p.pid, _process_name(p.pid), p.usedGpuMemory or 0) for p in running]
    return sorted(found, key=lambda holder: -holder.nbytes)


def persistence_warning(uuid: str) -> str | None:
    """A warning for the operator if persistence mode is off; None if it is on or cannot be read."""
    enabled = True
    with _initialised_nvml() as nvml:
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                if uuid.startswith("MIG-"):
                    handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
                enabled = bool(nvml.nvmlDeviceGetPersistenceMode(handle))
    if enabled:
        return None
    return (
        f"persistence mode is off on {uuid}: the driver may shut the GPU down, and lose its memory, when no process "
        "uses it; run 'nvidia-smi -pm 1' as root, or enable nvidia-persistenced.service"
    )


def kernel_driver_version() -> str:
    """Version of the NVIDIA kernel driver, e.g. "580.159.03"; "unknown" if nobody tells."""
    with contextlib.suppress(OSError):
        if match := _PROC_VERSION_LINE.search(_PROC_VERSION.read_text()):
            return match[1]
    with _initialised_nvml() as nvml:
        return str(nvml.nvmlSystemGetDriverVersion()) if nvml else "unknown"


def driver_name(version: str) -> str:
    """The name, in an index, of the kernel driver. Segments do not survive a change of it."""
    return f"nvidia {version}"


def _visible(gpus: Sequence[GpuInfo] | None = None) -> str:
    uuids = ", ".join(gpu.uuid for gpu in (list_gpus() if gpus is None else gpus))
    return f"this machine has {uuids}" if uuids else "NVML reports no GPU"


@contextlib.contextmanager
def _initialised_nvml() -> Iterator[Any]:
    """pynvml, whose functions have the names of NVML's C interface; None without a driver."""
    # Not at the top: most of who imports this module asks for no GPU.
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as e:
        log.debug("NVML is not available: %s", e)
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _usable(nvml: Any, handle: Any) -> Iterator[GpuInfo]:
    gpu = _info(nvml, handle)
    if not _mig_enabled(nvml, handle):
        yield gpu
        return
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        # Indices without a MIG device are normal: they count places, not devices.
        with contextlib.suppress(nvml.NVMLError):
            mig = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            yield _info(nvml, mig, parent=gpu.uuid)


def _mig_enabled(nvml: Any, handle: Any) -> bool:
    with contextlib.suppress(nvml.NVMLError):
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    return False


def _info(nvml: Any, handle: Any, parent: str = "") -> GpuInfo:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return GpuInfo(
        uuid=nvml.nvmlDeviceGetUUID(handle),
        name=nvml.nvmlDeviceGetName(handle),
        total_bytes=int(memory.total),
        mig=bool(parent),
        parent=parent,
        free_bytes=int(memory.free),
    )


def _process_name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    # Another PID namespace, or gone since.
    return "?"
