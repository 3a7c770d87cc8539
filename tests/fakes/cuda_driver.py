"""A CUDA driver without a GPU: the functions of cuda.bindings.driver that weightcached calls, with
their state.

Physical memory is a memfd, so an exported descriptor is real: it travels over sockets, pins the
memory in any process, and another FakeDriver imports it. Calls that the real driver refuses, or
leaves undefined, are refused here: wrong orders, double releases, ranges that do not fit, calls
without a context. Values come back as cuda.bindings gives them: a tuple of CUresult and objects
that int() turns into numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import threading
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

MIB = 1 << 20
_MEMFD_NAME = "fake-cuda-allocation-"
_FIRST_ADDRESS = 0x7F00_0000_0000


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_DEINITIALIZED = 4
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_OPERATING_SYSTEM = 304
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_SYSTEM_NOT_READY = 802
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900


class CUmemAllocationType(IntEnum):
    CU_MEM_ALLOCATION_TYPE_INVALID = 0
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(IntEnum):
    CU_MEM_LOCATION_TYPE_INVALID = 0
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAllocationHandleType(IntEnum):
    CU_MEM_HANDLE_TYPE_NONE = 0
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1


class CUmemAccess_flags(IntEnum):  # the driver's name
    CU_MEM_ACCESS_FLAGS_PROT_NONE = 0
    CU_MEM_ACCESS_FLAGS_PROT_READ = 1
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUmemAllocationGranularity_flags(IntEnum):  # the driver's name
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0
    CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1


class CUdevice_attribute(IntEnum):  # the driver's name
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103


@dataclass
class CUmemLocation:
    type: CUmemLocationType = CUmemLocationType.CU_MEM_LOCATION_TYPE_INVALID
    id: int = 0


@dataclass
class CUmemAllocationProp:
    type: CUmemAllocationType = CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_INVALID
    location: CUmemLocation = field(default_factory=CUmemLocation)
    requestedHandleTypes: CUmemAllocationHandleType = (
        CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
    )


@dataclass
class CUmemAccessDesc:
    location: CUmemLocation = field(default_factory=CUmemLocation)
    flags: CUmemAccess_flags = CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE


@dataclass(frozen=True)
class CUuuid:
    bytes: bytes


_DRIVER_TYPES: tuple[type, ...] = (
    CUresult,
    CUmemAllocationType,
    CUmemLocationType,
    CUmemAllocationHandleType,
    CUmemAccess_flags,
    CUmemAllocationGranularity_flags,
    CUdevice_attribute,
    CUmemLocation,
    CUmemAllocationProp,
    CUmemAccessDesc,
)


class Opaque:
    """A number that only int() reads, as CUdeviceptr, CUdevice and handles are."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __int__(self) -> int:
        return self._value


@dataclass
class FakeGpu:
    """One visible device. A MIG device has `mig_uuid` beside its physical GPU's `uuid`."""

    uuid: str = "0e3f7e0a-7b6c-4f8e-9a51-3d2c1b0a9f8e"
    name: str = "NVIDIA H200"
    mig_uuid: str = ""
    total_bytes: int = 512 * MIB
    abilities: dict[int, int] = field(default_factory=lambda: dict.fromkeys(CUdevice_attribute, 1))


class Live(NamedTuple):
    """The objects that exist now. descriptors: this process's open exported ones; contexts:
    retained references.

    blocks are what torch's allocator holds, locked are page-locked blocks of host memory.
    """

    handles: int
    mappings: int
    reservations: int
    descriptors: int
    contexts: int
    blocks: int = 0
    locked: int = 0


class IllegalAddress(Exception):
    """A kernel touched memory that is not mapped, or not mapped for that."""


class _Error(Exception):
    """Ends a fake call with this result."""

    def __init__(self, result: CUresult) -> None:
        super().__init__(result.name)
        self.result = result


@dataclass
class _Handle:
    fd: int
    nbytes: int
    exportable: bool


@dataclass
class _Mapping:
    address: int
    nbytes: int
    fd: int
    offset: int
    access: CUmemAccess_flags = CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE

    @property
    def end(self) -> int:
        return self.address + self.nbytes


def _call(
    *, initialised: bool = True, context: bool = False, values: int = 1
) -> Callable[..., Any]:
    """Make a method a driver function: counted, with injected faults and results in a tuple."""

    def decorate(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        @wraps(function)
        def driver_function(self: FakeDriver, *arguments: Any) -> tuple[Any, ...]:
            try:
                self._enter(function.__name__, initialised=initialised, context=context)
                value = function(self, *arguments)
            except _Error as e:
                return (e.result, *[None] * values)
            return (CUresult.CUDA_SUCCESS, *(value if values > 1 else [value] * values))

        return driver_function

    return decorate


def _require(condition: bool, result: CUresult = CUresult.CUDA_ERROR_INVALID_VALUE) -> None:
    if not condition:
        raise _Error(result)


class FakeDriver:
    """One process's view of the driver. Pass it in place of cuda.bindings.driver.

    Several in one process are as several processes on one machine: they share the GPU's memory,
    nothing else.
    """

    instances: ClassVar[weakref.WeakSet[FakeDriver]] = weakref.WeakSet()

    def __init__(self, *gpus: FakeGpu, version: int = 13000, granularity: int = 2 * MIB) -> None:
        self.__dict__.update({kind.__name__: kind for kind in _DRIVER_TYPES})
        self.gpus = gpus or (FakeGpu(),)
        self.version = version
        self.granularity = granularity
        self.calls: list[str] = []
        self._faults: dict[tuple[str, int], CUresult] = {}
        self._initialised = False
        self._dead = False
        self._handles: dict[int, _Handle] = {}
        self._mappings: dict[int, _Mapping] = {}
        self._blocks: dict[int, _Mapping] = {}
        self._reservations: dict[int, int] = {}
        self._locked: dict[int, Any] = {}
        self._retained: Counter[int] = Counter()
        self._running: list[tuple[int, int]] = []
        self._next_handle = 1
        self._next_address = _FIRST_ADDRESS
        self._thread = threading.local()
        self.instances.add(self)

    def __del__(self) -> None:
        self.die()

    # ---- for tests

    def fail(
        self, name: str, *, nth: int = 1, result: CUresult = CUresult.CUDA_ERROR_INVALID_VALUE
    ) -> None:
        """Let the nth call of `name` from now on have this result and no effect."""
        self._faults[name, self.calls.count(name) + nth] = result

    def live(self) -> Live:
        return Live(
            handles=len(self._handles),
            mappings=len(self._mappings),
            reservations=len(self._reservations),
            descriptors=len(_allocation_fds() - self._all_internal_fds()),
            contexts=self._retained.total(),
            blocks=len(self._blocks),
            locked=len(self._locked),
        )

    def current_context(self) -> int:
        """The calling thread's context, 0 for none."""
        return self._stack()[-1] if self._stack() else 0

    def launch(self, address: int, nbytes: int) -> None:
        """Start a kernel that uses the range until the context is synchronised."""
        self._running.append((address, nbytes))

    def read(self, address: int, nbytes: int) -> bytes:
        """Read as a kernel does. Raises IllegalAddress."""
        return b"".join(
            os.pread(fd, n, offset) for fd, offset, n in self._touched(address, nbytes, 1)
        )

    def write(self, address: int, data: bytes) -> None:
        """Let a kernel write. Raises IllegalAddress."""
        view = memoryview(data)
        for fd, offset, nbytes in self._touched(address, len(data), 2):
            os.pwrite(fd, view[:nbytes], offset)
            view = view[nbytes:]

    def torch_allocate(self, nbytes: int, ordinal: int) -> int:
        """Let torch's allocator take memory, readable and writable; returns its address."""
        fd = os.memfd_create(f"{_MEMFD_NAME}{self.gpus[ordinal].uuid}", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        address = self._take_addresses(nbytes)
        read_write = CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._blocks[address] = _Mapping(address, nbytes, fd, offset=0, access=read_write)
        return address

    def torch_free(self, address: int) -> None:
        """Let torch's allocator give memory back; nothing happens after die()."""
        if (block := self._blocks.pop(address, None)) is not None:
            os.close(block.fd)

    def die(self) -> None:
        """End like a killed process: only exported descriptors stay, further calls fail."""
        self._dead = True
        for fd in self._internal_fds():
            os.close(fd)
        self._handles.clear()
        self._mappings.clear()
        self._blocks.clear()
        self._reservations.clear()
        self._retained.clear()

    # ---- devices and contexts

    @_call(initialised=False, values=0)
    def cuInit(self, flags: int) -> None:
        _require(flags == 0)
        _require(bool(self.gpus[0].uuid), CUresult.CUDA_ERROR_NO_DEVICE)
        self._initialised = True

    @_call(initialised=False)
    def cuDriverGetVersion(self) -> int:
        return self.version

    @_call()
    def cuDeviceGetCount(self) -> int:
        return len(self.gpus)

    @_call()
    def cuDeviceGet(self, ordinal: int) -> Opaque:
        _require(0 <= ordinal < len(self.gpus), CUresult.CUDA_ERROR_INVALID_DEVICE)
        return Opaque(ordinal)

    @_call()
    def cuDeviceGetUuid(self, device: Any) -> CUuuid:
        gpu = self._gpu(device)
        return CUuuid(uuid.UUID(gpu.mig_uuid or gpu.uuid).bytes)

    @_call()
    def cuDeviceGetName(self, length: int, device: Any) -> bytes:
        return self._gpu(device).name.encode().ljust(length, b"\0")[:length]

    @_call()
    def cuDeviceGetAttribute(self, attribute: CUdevice_attribute, device: Any) -> int:
        return self._gpu(device).abilities[attribute]

    @_call()
    def cuDevicePrimaryCtxRetain(self, device: Any) -> Opaque:
        self._gpu(device)
        self._retained[int(device)] += 1
        return Opaque(_context_of(int(device)))

    @_call(values=0)
    def cuDevicePrimaryCtxRelease(self, device: Any) -> None:
        self._gpu(device)
        _require(self._retained[int(device)] > 0, CUresult.CUDA_ERROR_INVALID_CONTEXT)
        # The real one would take the memory from under its mappings.
        last = self._retained[int(device)] == 1
        _require(not (last and self._mappings), CUresult.CUDA_ERROR_INVALID_CONTEXT)
        self._retained[int(device)] -= 1

    @_call(values=0)
    def cuCtxPushCurrent(self, context: Any) -> None:
        _require(self._alive(int(context)), CUresult.CUDA_ERROR_INVALID_CONTEXT)
        self._stack().append(int(context))

    @_call()
    def cuCtxPopCurrent(self) -> Opaque:
        _require(bool(self._stack()), CUresult.CUDA_ERROR_INVALID_CONTEXT)
        return Opaque(self._stack().pop())

    @_call(context=True, values=0)
    def cuCtxSynchronize(self) -> None:
        self._running.clear()

    @_call(context=True, values=2)
    def cuMemGetInfo(self) -> tuple[int, int]:
        total = self.gpus[self.current_context() - _context_of(0)].total_bytes
        return total - self._used_bytes(), total

    # ---- physical memory

    @_call(context=True)
    def cuMemGetAllocationGranularity(
        self, properties: CUmemAllocationProp, option: CUmemAllocationGranularity_flags
    ) -> int:
        self._check_properties(properties)
        recommended = (
            option is CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        )
        return self.granularity * (16 if recommended else 1)

    @_call(context=True)
    def cuMemCreate(self, nbytes: int, properties: CUmemAllocationProp, flags: int) -> Opaque:
        gpu = self._check_properties(properties)
        _require(flags == 0 and nbytes > 0 and nbytes % self.granularity == 0)
        _require(nbytes <= gpu.total_bytes - self._used_bytes(), CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        fd = os.memfd_create(f"{_MEMFD_NAME}{gpu.uuid}", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        posix_fd = CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return self._new_handle(fd, exportable=properties.requestedHandleTypes == posix_fd)

    @_call(context=True)
    def cuMemExportToShareableHandle(
        self, handle: Any, kind: CUmemAllocationHandleType, flags: int
    ) -> int:
        live = self._handle(handle)
        _require(
            flags == 0
            and kind is CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
        _require(live.exportable)
        # Inheritable, as nothing promises otherwise.
        fd = os.dup(live.fd)
        os.set_inheritable(fd, True)
        return fd

    @_call(context=True)
    def cuMemImportFromShareableHandle(self, fd: int, kind: CUmemAllocationHandleType) -> Opaque:
        _require(kind is CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        gpu_uuid = _gpu_uuid_of(fd)
        _require(gpu_uuid is not None)
        _require(gpu_uuid in [gpu.uuid for gpu in self.gpus], CUresult.CUDA_ERROR_INVALID_DEVICE)
        return self._new_handle(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3), exportable=True)

    @_call(context=True, values=0)
    def cuMemRelease(self, handle: Any) -> None:
        os.close(self._handle(handle).fd)
        del self._handles[int(handle)]

    # ---- addresses

    @_call(context=True)
    def cuMemAddressReserve(self, nbytes: int, alignment: int, hint: int, flags: int) -> Opaque:
        _require(flags == 0 and nbytes > 0 and nbytes % self.granularity == 0)
        _require(alignment == 0 or alignment.bit_count() == 1)
        address = self._take_addresses(nbytes)
        self._reservations[address] = nbytes
        return Opaque(address)

    @_call(context=True, values=0)
    def cuMemAddressFree(self, address: Any, nbytes: int) -> None:
        _require(self._reservations.get(int(address)) == nbytes)
        _require(not self._overlapping(int(address), nbytes))
        del self._reservations[int(address)]

    @_call(context=True, values=0)
    def cuMemMap(self, address: Any, nbytes: int, offset: int, handle: Any, flags: int) -> None:
        live, start = self._handle(handle), int(address)
        _require(flags == 0 and nbytes > 0)
        _require(not any(number % self.granularity for number in (start, nbytes, offset)))
        _require(offset + nbytes <= live.nbytes)
        _require(
            any(
                base <= start and start + nbytes <= base + size
                for base, size in self._reservations.items()
            )
        )
        _require(not self._overlapping(start, nbytes))
        self._mappings[start] = _Mapping(
            start, nbytes, fcntl.fcntl(live.fd, fcntl.F_DUPFD_CLOEXEC, 3), offset
        )

    @_call(context=True, values=0)
    def cuMemUnmap(self, address: Any, nbytes: int) -> None:
        start = int(address)
        inside = self._overlapping(start, nbytes)
        # Several at once, but none of them in part.
        _require(bool(inside) and inside[0].address == start)
        _require(sum(mapping.nbytes for mapping in inside) == nbytes)
        in_use = any(at < start + nbytes and start < at + n for at, n in self._running)
        # The real one takes the memory from under the kernel, which then faults.
        _require(not in_use, CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
        for mapping in inside:
            os.close(mapping.fd)
            del self._mappings[mapping.address]

    @_call(context=True, values=0)
    def cuMemSetAccess(
        self, address: Any, nbytes: int, descriptors: list[CUmemAccessDesc], count: int
    ) -> None:
        inside = self._overlapping(int(address), nbytes)
        _require(0 < count == len(descriptors))
        _require(
            bool(inside)
            and inside[0].address == int(address)
            and sum(m.nbytes for m in inside) == nbytes
        )
        for descriptor in descriptors:
            self._gpu(descriptor.location.id)
            _require(descriptor.location.type is CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
            for mapping in inside:
                mapping.access = descriptor.flags

    @_call(context=True, values=0)
    def cuMemcpyDtoH(self, target: int, source: Any, nbytes: int) -> None:
        _require(target != 0 or nbytes == 0)
        try:
            data = self.read(int(source), nbytes)
        except IllegalAddress as e:
            # The copy engine is told the range before it starts: no kernel faults, the context
            # stays whole.
            raise _Error(CUresult.CUDA_ERROR_INVALID_VALUE) from e
        ctypes.memmove(target, data, nbytes)

    @_call(context=True, values=0)
    def cuMemcpyHtoD(self, target: Any, source: int, nbytes: int) -> None:
        held = (ctypes.c_char * nbytes).from_address(int(source))
        try:
            self.write(int(target), bytes(held))
        except IllegalAddress as e:
            raise _Error(CUresult.CUDA_ERROR_INVALID_VALUE) from e

    @_call(context=True)
    def cuMemHostAlloc(self, nbytes: int, flags: int) -> Opaque:
        _require(nbytes > 0)
        buffer = ctypes.create_string_buffer(nbytes)
        self._locked[ctypes.addressof(buffer)] = buffer
        return Opaque(ctypes.addressof(buffer))

    @_call(context=True, values=0)
    def cuMemFreeHost(self, address: Any) -> None:
        _require(self._locked.pop(int(address), None) is not None)

    @_call(context=True, values=0)
    def cuMemsetD8(self, target: Any, value: int, nbytes: int) -> None:
        try:
            self.write(int(target), bytes([value]) * nbytes)
        except IllegalAddress as e:
            raise _Error(CUresult.CUDA_ERROR_INVALID_VALUE) from e

    # ---- inside

    def _take_addresses(self, nbytes: int) -> int:
        address = self._next_address
        # A gap, so that running over the end of one range is never running into the next.
        self._next_address += (-(-nbytes // self.granularity) + 1) * self.granularity
        return address

    def _enter(self, name: str, *, initialised: bool, context: bool) -> None:
        self.calls.append(name)
        if (fault := self._faults.pop((name, self.calls.count(name)), None)) is not None:
            raise _Error(fault)
        _require(not self._dead, CUresult.CUDA_ERROR_DEINITIALIZED)
        _require(self._initialised or not initialised, CUresult.CUDA_ERROR_NOT_INITIALIZED)
        _require(
            not context or self._alive(self.current_context()), CUresult.CUDA_ERROR_INVALID_CONTEXT
        )

    def _stack(self) -> list[int]:
        if not hasattr(self._thread, "contexts"):
            self._thread.contexts = []
        stack: list[int] = self._thread.contexts
        return stack

    def _alive(self, context: int) -> bool:
        return self._retained[context - _context_of(0)] > 0

    def _gpu(self, device: Any) -> FakeGpu:
        _require(0 <= int(device) < len(self.gpus), CUresult.CUDA_ERROR_INVALID_DEVICE)
        return self.gpus[int(device)]

    def _handle(self, handle: Any) -> _Handle:
        live = self._handles.get(int(handle))
        _require(live is not None)
        assert live is not None
        return live

    def _new_handle(self, fd: int, *, exportable: bool) -> Opaque:
        number = self._next_handle
        self._next_handle += 1
        self._handles[number] = _Handle(fd, os.fstat(fd).st_size, exportable)
        return Opaque(number)

    def _check_properties(self, properties: CUmemAllocationProp) -> FakeGpu:
        _require(properties.type is CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED)
        _require(properties.location.type is CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
        return self._gpu(properties.location.id)

    def _overlapping(self, address: int, nbytes: int) -> list[_Mapping]:
        found = [
            m for m in self._mappings.values() if m.address < address + nbytes and address < m.end
        ]
        return sorted(found, key=lambda mapping: mapping.address)

    def _touched(self, address: int, nbytes: int, access: int) -> Iterator[tuple[int, int, int]]:
        while nbytes:
            memory = [*self._mappings.values(), *self._blocks.values()]
            mapping = next((m for m in memory if m.address <= address < m.end), None)
            if mapping is None or not mapping.access & access:
                raise IllegalAddress(f"{address:#x}")
            part = min(nbytes, mapping.end - address)
            yield mapping.fd, mapping.offset + address - mapping.address, part
            address, nbytes = address + part, nbytes - part

    def _internal_fds(self) -> set[int]:
        memory: list[_Handle | _Mapping] = [
            *self._handles.values(),
            *self._mappings.values(),
            *self._blocks.values(),
        ]
        return {held.fd for held in memory}

    def _all_internal_fds(self) -> set[int]:
        return set().union(*(driver._internal_fds() for driver in self.instances))

    def _used_bytes(self) -> int:
        """Bytes of all allocations that a handle, mapping or descriptor keeps alive."""
        stats = [os.fstat(fd) for fd in _allocation_fds()]
        return sum({stat.st_ino: stat.st_size for stat in stats}.values())


class DeviceArrayLike(Protocol):
    @property
    def owner(self) -> object: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def ordinal(self) -> int: ...


class TorchMemory:
    """Memory of torch's allocator, freed with its last reference. Its own DeviceArrayLike."""

    def __init__(self, driver: FakeDriver, nbytes: int, ordinal: int) -> None:
        self._driver = driver
        self.nbytes = nbytes
        self.ordinal = ordinal
        self.address = driver.torch_allocate(nbytes, ordinal)

    @property
    def owner(self) -> object:
        return self

    def __del__(self) -> None:
        self._driver.torch_free(self.address)


class FakeTensor:
    """Stands for a torch tensor over device memory: it and its views refer to their source."""

    def __init__(self, driver: FakeDriver, array: DeviceArrayLike) -> None:
        self._driver = driver
        self._array = array
        self.address = array.address
        self.nbytes = array.nbytes

    def read(self, offset: int = 0, nbytes: int | None = None) -> bytes:
        return self._driver.read(
            self.address + offset, self.nbytes - offset if nbytes is None else nbytes
        )

    def write(self, data: bytes, offset: int = 0) -> None:
        self._driver.write(self.address + offset, data)

    @property
    def owner(self) -> object:
        """The object that keeps the memory mapped."""
        return self._array.owner

    def data_ptr(self) -> int:
        return self.address

    def view(self) -> FakeTensor:
        return FakeTensor(self._driver, self._array)

    def clone(self) -> FakeTensor:
        """The same bytes in memory of torch's allocator."""
        copy = FakeTensor(self._driver, TorchMemory(self._driver, self.nbytes, self._array.ordinal))
        copy.write(self.read())
        return copy


@contextlib.contextmanager
def no_leaks(driver: FakeDriver) -> Iterator[None]:
    """Require that the block leaves as many live objects of each kind as it found. Raises
    AssertionError.

    After an error inside, the error is raised, with the leak as a note.
    """
    before = driver.live()
    try:
        yield
    except BaseException as e:
        if leaked := _leaked(before, driver):
            e.add_note(leaked)
        raise
    leaked = _leaked(before, driver)
    assert not leaked, leaked


def _leaked(before: Live, driver: FakeDriver) -> str:
    gc.collect()
    changes = [
        (kind, now - was)
        for kind, was, now in zip(Live._fields, before, driver.live(), strict=True)
    ]
    return ", ".join(f"{kind}: {change:+d}" for kind, change in changes if change)


def _context_of(device: int) -> int:
    return 0xC0DE0000 + device


def _allocation_fds() -> set[int]:
    return {
        fd
        for fd in (int(entry.name) for entry in Path("/proc/self/fd").iterdir())
        if _gpu_uuid_of(fd)
    }


def _gpu_uuid_of(fd: int) -> str | None:
    """The GPU of the fake allocation that the descriptor is, None if it is something else."""
    try:
        target = str(Path(f"/proc/self/fd/{fd}").readlink())
    except OSError:
        return None
    prefix = f"/memfd:{_MEMFD_NAME}"
    return (
        target.removeprefix(prefix).removesuffix(" (deleted)")
        if target.startswith(prefix)
        else None
    )
