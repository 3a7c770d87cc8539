"""Every call of the CUDA driver API, and one owner for each resource that it hands out.

Owners give back in close(), which may be called twice and never raises. The calls of a segment's
life, in order:

    create   cuMemCreate, cuMemAddressReserve, cuMemMap, cuMemSetAccess (read-write)
    publish  cuCtxSynchronize, cuMemExportToShareableHandle, cuMemUnmap, cuMemAddressFree, cuMemRelease
    map      cuMemImportFromShareableHandle each, cuMemAddressReserve, cuMemMap each, cuMemSetAccess (read),
             cuMemRelease each
    unmap    cuCtxSynchronize, cuMemUnmap each; map again: as map, without a new range
    close    cuCtxSynchronize, cuMemUnmap each, cuMemAddressFree

If the driver refuses an argument, only that call fails; torch works on. Only faults of kernels stay
with the context. cuda.py defines segments and shows them to torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from weightcached.errors import DeviceError, SegmentError
from weightcached.system.fds import OwnedFd
from weightcached.system.paths import check_device, is_host_device

log = logging.getLogger(__name__)

# CUDA 11.4: from here on the driver tells MIG devices apart by UUID.
MIN_DRIVER_VERSION = 11040
_NAME_NBYTES = 256
_BROKEN_CONTEXT = (
    "an earlier kernel broke this process's CUDA context: end the process; 'dmesg' shows the Xid"
)
_ADVICE = {
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible: check 'nvidia-smi -L' and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_NOT_INITIALIZED": "CUDA does not survive fork(): start the process with spawn",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "libcuda and the kernel driver differ: reboot, or reload the kernel modules",
    "CUDA_ERROR_SYSTEM_NOT_READY": "systemctl start nvidia-fabricmanager.service",
    "CUDA_ERROR_ILLEGAL_ADDRESS": _BROKEN_CONTEXT,
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": _BROKEN_CONTEXT,
    "CUDA_ERROR_LAUNCH_FAILED": _BROKEN_CONTEXT,
    "CUDA_ERROR_MISALIGNED_ADDRESS": _BROKEN_CONTEXT,
    "CUDA_ERROR_ECC_UNCORRECTABLE": _BROKEN_CONTEXT,
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "finish the CUDA graph capture first",
}
_NEEDED_ABILITIES = (
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
)


class CudaError(SegmentError):
    """One driver call failed. `result` is the CUDA name of its error."""

    def __init__(self, text: str, result: str) -> None:
        super().__init__(text)
        self.result = result


class Driver:
    """The driver API, every result checked. Names and arguments as in cuda.bindings.driver."""

    def __init__(self, api: Any) -> None:
        self.api = api

    def call(self, name: str, *arguments: Any, failing: str, advice: str = "") -> Any:
        """The values that the call returns after its status. `failing` opens the error text, e.g.
        "cannot map segment 2".

        Raises CudaError, with `advice` unless the error's name has better advice; SegmentError
        without a driver.
        """
        try:
            result, *values = getattr(self.api, name)(*arguments)
        except (AttributeError, RuntimeError) as e:
            raise SegmentError(
                f"{failing}: {name}: {e}; install an NVIDIA driver that has it ('nvidia-smi' shows what is installed)"
            ) from e
        if result != 0:
            advice = (
                _ADVICE.get(result.name, advice)
                or "check 'nvidia-smi', and 'dmesg' for Xid messages"
            )
            raise CudaError(f"{failing}: {name}: {result.name}; {advice}", result.name)
        return values[0] if len(values) == 1 else tuple(values)

    def give_back(self, name: str, *arguments: Any) -> None:
        """Release a resource. A failure is only logged: the other resources must be released too."""
        with logged():
            self.call(name, *arguments, failing="a CUDA resource stays until this process ends")


@contextlib.contextmanager
def logged() -> Iterator[None]:
    """Log an error instead of raising it."""
    try:
        yield
    except SegmentError as e:
        # Late in the process's end the driver has already given everything back.
        if not (isinstance(e, CudaError) and e.result == "CUDA_ERROR_DEINITIALIZED"):
            log.error("%s", e)


class PrimaryContext:
    """A reference on the device's primary context, the one that torch uses.

    Given back by close(), or with the last range mapped in it: `ranges` has the addresses of those.
    Python's collector may finalize a context before the ranges that refer to it.
    """

    def __init__(self, driver: Driver, ordinal: int, device: str) -> None:
        self._driver = driver
        self._device = device
        self._closed = False
        self._retained: int | None = None
        self.ranges: set[int] = set()
        self._handle = driver.call(
            "cuDevicePrimaryCtxRetain", ordinal, failing=f"cannot use {device}"
        )
        self._retained = ordinal

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make this the thread's current context for the block; restore the former one afterwards."""
        self._driver.call("cuCtxPushCurrent", self._handle, failing=f"cannot use {self._device}")
        try:
            yield
        finally:
            # Should this fail, the thread keeps our context: not worth losing the result of the
            # block.
            self._driver.give_back("cuCtxPopCurrent")

    def synchronize(self, failing: str) -> None:
        """Wait for all work of the context, which is current. Raises CudaError."""
        self._driver.call("cuCtxSynchronize", failing=failing)

    def range_unmapped(self, address: int) -> None:
        """Take notice that a range is gone, and go as well if that was asked for."""
        self.ranges.discard(address)
        if self._closed:
            self.close()

    def close(self) -> None:
        self._closed = True
        if self.ranges:
            return
        ordinal, self._retained = self._retained, None
        if ordinal is not None:
            self._driver.give_back("cuDevicePrimaryCtxRelease", ordinal)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.close()


class _Owned:
    """One driver resource and the call that gives it back; close() may be called twice."""

    def __init__(self, driver: Driver, give_back: str, *arguments: Any) -> None:
        self._driver = driver
        self._give_back = give_back
        self._arguments: tuple[Any, ...] | None = arguments

    def close(self) -> None:
        arguments, self._arguments = self._arguments, None
        if arguments is not None:
            self._driver.give_back(self._give_back, *arguments)


class Allocation(_Owned):
    """A handle on physical memory, which lives as long as a mapping or an open descriptor."""

    def __init__(self, driver: Driver, handle: Any) -> None:
        super().__init__(driver, "cuMemRelease", handle)
        self.handle = handle

    def export(self, failing: str) -> OwnedFd:
        """A new descriptor on the memory, close-on-exec."""
        fd_type = (
            self._driver.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
        name = "cuMemExportToShareableHandle"
        fd = OwnedFd(self._driver.call(name, self.handle, fd_type, 0, failing=failing))
        # The driver does not say whether a child would inherit it, and a child that does pins the
        # memory.
        os.set_inheritable(fd.fileno(), False)
        return fd


class PageLocked(_Owned):
    """Host memory that the device reads at the speed of the bus."""

    def __init__(self, driver: Driver, nbytes: int, failing: str) -> None:
        advice = "see 'ulimit -l' and the unit's LimitMEMLOCK="
        address = driver.call("cuMemHostAlloc", nbytes, 0, failing=failing, advice=advice)
        self.address = int(address)
        self._nbytes = nbytes
        super().__init__(driver, "cuMemFreeHost", self.address)

    def view(self) -> memoryview:
        """The bytes, writable; not to be used after close()."""
        return memoryview((ctypes.c_char * self._nbytes).from_address(self.address)).cast("B")


class Reservation(_Owned):
    """A range of device addresses, `nbytes` from `address` on. Unmap everything in it first."""

    def __init__(self, driver: Driver, nbytes: int, failing: str) -> None:
        advice = "no free address range of this size"
        address = driver.call(
            "cuMemAddressReserve", nbytes, 0, 0, 0, failing=failing, advice=advice
        )
        self.address = int(address)
        super().__init__(driver, "cuMemAddressFree", self.address, nbytes)


class Placed(_Owned):
    """One allocation mapped at an address of a reservation."""

    def __init__(
        self, driver: Driver, address: int, nbytes: int, allocation: Allocation, failing: str
    ) -> None:
        advice = "its allocation has another size than the index says: 'weightcachectl reload' makes a new one"
        driver.call(
            "cuMemMap", address, nbytes, 0, allocation.handle, 0, failing=failing, advice=advice
        )
        super().__init__(driver, "cuMemUnmap", address, nbytes)


class MappedRange:
    """Allocations mapped one behind the other, `nbytes` from `address` on, until nothing refers to
    this object.

    Each array shown to torch refers to it, so the last tensor unmaps it, in any thread.
    """

    def __init__(
        self,
        context: PrimaryContext,
        address: int,
        nbytes: int,
        resources: ExitStack,
        placed: ExitStack,
    ) -> None:
        self._context = context
        self._resources: ExitStack | None = resources
        # The mappings, which `resources` releases too.
        self.placed = placed
        self.address = address
        self.nbytes = nbytes
        context.ranges.add(address)

    def unmap(self) -> None:
        """Wait for the kernels that may use the memory, then unmap it and keep the addresses.

        Until Gpu.map_again() a kernel that touches them breaks the context. Raises CudaError;
        nothing has changed then.
        """
        with self._context.current():
            self._context.synchronize(f"{self.nbytes} bytes at {self.address:#x} stay mapped")
            self.placed.close()

    def close(self) -> None:
        """Wait for the kernels that may use the memory, then unmap it. May be called twice; never
        raises.

        If waiting fails the memory stays mapped, for a later close() or the end of the process: it
        is never taken from under a kernel.
        """
        if self._resources is None:
            return
        with logged(), self._context.current():
            self._context.synchronize(f"{self.nbytes} bytes at {self.address:#x} stay mapped")
            self._resources.close()
            self._resources = None
        if self._resources is None:
            self._context.range_unmapped(self.address)

    def __del__(self) -> None:
        # At its end the process gives everything back at once, and parts of Python are gone by
        # then.
        if not sys.is_finalizing():
            self.close()


class Gpu:
    """One open GPU or MIG device: its abilities, and the calls that make the resources above.

    Holds the device's primary context until it and everything it made are gone. Raises SegmentError
    without a driver or a device that can share memory by descriptors, DeviceError for a device that
    is not visible.
    """

    def __init__(self, device: str, api: Any = None) -> None:
        if is_host_device(check_device(device)):
            raise DeviceError(
                f"device {device!r} is host memory, not a GPU: open_backend() picks the backend"
            )
        self.device = device
        self._driver = Driver(_bindings() if api is None else api)
        failing = f"cannot use {device}"
        self._driver.call("cuInit", 0, failing=failing)
        self._check_version(failing)
        # The ordinal is CUDA's and torch's in this process; the number of the driver's device
        # object is its own.
        self.ordinal, self._number = _find(self._driver, device)
        self._check_abilities(failing)
        self._properties = self._allocation_properties()
        self.context = PrimaryContext(self._driver, self._number, device)
        with self.context.current():
            # Not the recommended granularity: only the minimum is required, and segments of 1 GiB
            # are a multiple of any page size; a larger multiple would only pad the small private
            # segment.
            option = (
                self._driver.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            )
            name = "cuMemGetAllocationGranularity"
            self.granularity: int = self._driver.call(
                name, self._properties, option, failing=failing
            )

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes. Raises CudaError."""
        with self.context.current():
            failing = f"cannot read the free memory of {self.device}"
            free, total = self._driver.call("cuMemGetInfo", failing=failing)
        return free, total

    def reserve(self, nbytes: int, failing: str) -> Reservation:
        """A range of addresses with nothing mapped. The context is current."""
        return Reservation(self._driver, nbytes, failing)

    def place(self, address: int, nbytes: int, allocation: Allocation, failing: str) -> None:
        """Map an allocation, or its first `nbytes`, at an address. The context is current."""
        self._driver.call("cuMemMap", address, nbytes, 0, allocation.handle, 0, failing=failing)

    def open(self, address: int, nbytes: int, failing: str) -> None:
        """Let kernels read and write the mapped memory. The context is current."""
        self._open(address, nbytes, True, failing)

    def take_away(self, address: int, nbytes: int, failing: str) -> None:
        """Unmap all that is mapped in the range, none of it in part. The context is current."""
        self._driver.call("cuMemUnmap", address, nbytes, failing=failing)

    def zero(self, address: int, nbytes: int, failing: str) -> None:
        """Zero memory; later work of the default stream sees the zeros. The context is current."""
        self._driver.call("cuMemsetD8", address, 0, nbytes, failing=failing)

    def read(self, address: int, nbytes: int, failing: str) -> memoryview:
        """A copy of device memory in host memory. Raises CudaError."""
        held = bytearray(nbytes)
        target = ctypes.addressof((ctypes.c_char * nbytes).from_buffer(held))
        with self.context.current():
            self._driver.call("cuMemcpyDtoH", target, address, nbytes, failing=failing)
        return memoryview(held)

    def write(self, address: int, data: memoryview, failing: str) -> None:
        """Copy writable host memory to the device, and wait for it. Raises CudaError."""
        source = ctypes.addressof(ctypes.c_char.from_buffer(data))
        with self.context.current():
            self._driver.call("cuMemcpyHtoD", address, source, len(data), failing=failing)

    def page_locked(self, nbytes: int, failing: str) -> PageLocked:
        """Page-locked host memory. Raises CudaError."""
        with self.context.current():
            return PageLocked(self._driver, nbytes, failing)

    def allocate(self, nbytes: int, failing: str) -> Allocation:
        """New physical memory. The context is current."""
        return Allocation(
            self._driver,
            self._driver.call("cuMemCreate", nbytes, self._properties, 0, failing=failing),
        )

    def adopt(self, fd: OwnedFd, failing: str) -> Allocation:
        """Import a descriptor, which the caller keeps open. The context is current."""
        fd_type = (
            self._driver.api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
        advice = "the descriptor is no CUDA allocation of this device: 'weightcachectl reload' makes new ones"
        name = "cuMemImportFromShareableHandle"
        handle = self._driver.call(name, fd.fileno(), fd_type, failing=failing, advice=advice)
        return Allocation(self._driver, handle)

    def map_range(
        self,
        pieces: Sequence[tuple[Allocation, int]],
        *,
        writable: bool,
        resources: ExitStack,
        failing: str,
    ) -> MappedRange:
        """Map the pieces, one behind the other, into a new range and open it. The context is
        current.

        The range takes over the content of `resources`; after a CudaError the caller unwinds it.
        """
        total = sum(nbytes for _, nbytes in pieces)
        reservation = Reservation(self._driver, total, failing)
        resources.callback(reservation.close)
        placed = ExitStack()
        resources.callback(placed.close)
        self._place(pieces, reservation.address, placed, failing)
        self._open(reservation.address, total, writable, failing)
        return MappedRange(self.context, reservation.address, total, resources.pop_all(), placed)

    def map_again(
        self, mapped: MappedRange, pieces: Sequence[tuple[Allocation, int]], *, failing: str
    ) -> None:
        """Map the pieces, of the sizes that were there, into a range that was unmapped, read-only.
        The context is current.

        Raises CudaError; nothing is mapped then.
        """
        try:
            self._place(pieces, mapped.address, mapped.placed, failing)
            self._open(mapped.address, mapped.nbytes, False, failing)
        except CudaError:
            mapped.placed.close()
            raise

    def _place(
        self,
        pieces: Sequence[tuple[Allocation, int]],
        address: int,
        placed: ExitStack,
        failing: str,
    ) -> None:
        for segment, (allocation, nbytes) in enumerate(pieces):
            what = f"{failing}: segment {segment}, {nbytes} bytes"
            placed.callback(Placed(self._driver, address, nbytes, allocation, what).close)
            address += nbytes

    def _open(self, address: int, nbytes: int, writable: bool, failing: str) -> None:
        flags = self._driver.api.CUmemAccess_flags
        access = self._driver.api.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = (
            flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            if writable
            else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        )
        self._driver.call("cuMemSetAccess", address, nbytes, [access], 1, failing=failing)

    def _allocation_properties(self) -> Any:
        api = self._driver.api
        properties = api.CUmemAllocationProp()
        properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self._number
        # An allocation can only be exported as the handle type that it was created with.
        properties.requestedHandleTypes = (
            api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
        return properties

    def _check_version(self, failing: str) -> None:
        version: int = self._driver.call("cuDriverGetVersion", failing=failing)
        if version < MIN_DRIVER_VERSION:
            raise SegmentError(
                f"{failing}: its driver supports CUDA {_dotted(version)}, needed is {_dotted(MIN_DRIVER_VERSION)} or "
                "newer: install a newer NVIDIA driver"
            )

    def _check_abilities(self, failing: str) -> None:
        for ability in _NEEDED_ABILITIES:
            attribute = getattr(self._driver.api.CUdevice_attribute, ability)
            if not self._driver.call(
                "cuDeviceGetAttribute", attribute, self._number, failing=failing
            ):
                raise SegmentError(
                    f"{failing}: it lacks {ability}, so its memory cannot be shared: let engines there load from disk"
                )


def _bindings() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as e:
        raise SegmentError(
            f"the Python package cuda-bindings cannot be imported ({e}): pip install cuda-bindings"
        ) from e


def _find(driver: Driver, device: str) -> tuple[int, int]:
    """(ordinal, driver's number) of the device in this process, which CUDA_VISIBLE_DEVICES may
    renumber.

    Only the digits are compared, because CUDA gives UUIDs of MIG devices and GPUs in the same form.
    Raises DeviceError.
    """
    failing = f"cannot find {device}"
    # CUDA 13's bindings call version 2, which knows MIG devices, by the plain name.
    get_uuid = (
        "cuDeviceGetUuid_v2" if hasattr(driver.api, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    )
    visible: list[str] = []
    for ordinal in range(driver.call("cuDeviceGetCount", failing=failing)):
        number = int(driver.call("cuDeviceGet", ordinal, failing=failing))
        digits = str(uuid.UUID(bytes=bytes(driver.call(get_uuid, number, failing=failing).bytes)))
        if device.partition("-")[2] == digits:
            return ordinal, number
        name = (
            driver.call("cuDeviceGetName", _NAME_NBYTES, number, failing=failing)
            .split(b"\0")[0]
            .decode()
        )
        visible.append(f"{'MIG' if ' MIG ' in name else 'GPU'}-{digits} ({name})")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    raise DeviceError(
        f"{device} is not visible to CUDA in this process, which sees {', '.join(visible) or 'no device'} "
        f"(CUDA_VISIBLE_DEVICES is {'not set' if hidden is None else repr(hidden)}): 'weightcachectl devices' lists "
        "the devices of this machine"
    )


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
