"""CUDA segments on a stateful fake driver: content survives its creator, and every error gives
everything back.

tests/gpu has the tests that need a GPU: read-only pages, torch on the memory in place, times.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.fakes.cuda_driver import (
    MIB,
    CUresult,
    FakeDriver,
    FakeGpu,
    FakeTensor,
    IllegalAddress,
    Live,
    no_leaks,
)
from tests.fakes.daemon import BOUND_S
from weightcached.errors import DeviceError, OutOfDeviceMemoryError, SegmentError
from weightcached.segments.api import Backend, Mapping, WritableSegment
from weightcached.segments.cuda import CudaBackend, CudaMapping, CudaSegment, torch_tensor
from weightcached.segments.cuda_driver import (
    MIN_DRIVER_VERSION,
    Allocation,
    Driver,
    Gpu,
    MappedRange,
    Placed,
    PrimaryContext,
    Reservation,
)
from weightcached.system import gpus
from weightcached.system.fds import OwnedFd

UUID = FakeGpu().uuid
GPU = f"GPU-{UUID}"
OTHER = "11111111-2222-3333-4444-555555555555"
NOTHING = Live(0, 0, 0, 0, 0)
SIZE = 2 * MIB
CREATE_CALLS = (
    "cuCtxPushCurrent",
    "cuMemGetInfo",
    "cuMemCreate",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
)
PUBLISH_CALLS = ("cuCtxPushCurrent", "cuCtxSynchronize", "cuMemExportToShareableHandle")
MAP_CALLS = (
    ("cuCtxPushCurrent", 1),
    ("cuMemImportFromShareableHandle", 1),
    ("cuMemImportFromShareableHandle", 2),
    ("cuMemImportFromShareableHandle", 3),
    ("cuMemAddressReserve", 1),
    ("cuMemMap", 1),
    ("cuMemMap", 2),
    ("cuMemMap", 3),
    ("cuMemSetAccess", 1),
)


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with a driver version and unused GPUs, independent of this one; empty afterwards."""
    monkeypatch.setattr(gpus, "holders", lambda uuid: [])
    monkeypatch.setattr(gpus, "kernel_driver_version", lambda: "580.159.03")
    yield
    for fake in list(FakeDriver.instances):
        fake.die()


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    """A driver on which a test must leave nothing, not even a context."""
    fake = FakeDriver()
    with no_leaks(fake):
        yield fake


def open_gpu(driver: FakeDriver, device: str = GPU) -> CudaBackend:
    return CudaBackend(device, driver, as_tensor=lambda array: FakeTensor(driver, array))


def published(backend: CudaBackend, *contents: bytes, nbytes: int = SIZE) -> list[OwnedFd]:
    fds = []
    for content in contents:
        segment = backend.create(nbytes)
        as_fake(segment.tensor()).write(content)
        fds.append(segment.publish())
    return fds


def as_fake(tensor: Any) -> FakeTensor:
    assert isinstance(tensor, FakeTensor)
    return tensor


def view(
    mapping: CudaMapping, segment: int = 0, offset_bytes: int = 0, nbytes: int = SIZE
) -> FakeTensor:
    return as_fake(mapping.view(segment, offset_bytes, nbytes))


# ---- the way of a segment


def test_classes_are_what_the_interface_asks_for(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    segment = backend.create(SIZE)
    mapping = backend.map(published(backend, b"x"), [SIZE])
    checked: tuple[Backend, WritableSegment, Mapping] = (backend, segment, mapping)
    assert checked[0].name == "cuda"


def test_mapped_segments_have_the_content_of_the_published_ones(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    mapping = backend.map(published(backend, b"first", b"second"), [SIZE, SIZE])
    assert [view(mapping, i).read(0, 6) for i in (0, 1)] == [b"first\0", b"second"]


def test_mapping_is_one_range_in_segment_order(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    fds = [
        *published(backend, b"a"),
        *published(backend, b"b", nbytes=3 * SIZE),
        *published(backend, b"c"),
    ]
    mapping = backend.map(fds, [SIZE, 3 * SIZE, SIZE])
    views = [
        view(mapping, segment, nbytes=nbytes)
        for segment, nbytes in enumerate([SIZE, 3 * SIZE, SIZE])
    ]
    assert [shown.read(0, 1) for shown in views] == [b"a", b"b", b"c"]
    assert [shown.address - views[0].address for shown in views] == [0, SIZE, 4 * SIZE]
    assert [shown.nbytes for shown in views] == [SIZE, 3 * SIZE, SIZE]
    assert mapping.nbytes == 5 * SIZE


def test_mapped_memory_cannot_be_written(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    mapping = backend.map(published(backend, b"kept"), [SIZE])
    with pytest.raises(IllegalAddress):
        view(mapping).write(b"lost")
    assert view(mapping).read(0, 4) == b"kept"


def test_segment_survives_its_creator_in_its_descriptor_alone() -> None:
    creator, engine = FakeDriver(), FakeDriver()
    backend = open_gpu(creator)
    fds = published(backend, b"weights")
    left, right = socket.socketpair()
    with left, right:
        socket.send_fds(left, [b"."], [fd.fileno() for fd in fds])
        creator.die()
        for fd in fds:
            fd.close()
        received = [OwnedFd(fd) for fd in socket.recv_fds(right, 1, 1)[1]]
    mapping = open_gpu(engine).map(received, [SIZE])
    assert view(mapping).read(0, 7) == b"weights"
    mapping.close()


def test_published_descriptor_is_the_only_thing_left(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    free, _ = backend.free_bytes()
    (fd,) = published(backend, b"x")
    assert driver.live() == Live(handles=0, mappings=0, reservations=0, descriptors=1, contexts=1)
    assert backend.free_bytes()[0] == free - SIZE
    fd.close()
    assert backend.free_bytes()[0] == free


def test_published_descriptor_is_not_inherited_by_children(driver: FakeDriver) -> None:
    (fd,) = published(open_gpu(driver), b"x")
    assert not os.get_inheritable(fd.fileno())
    fd.close()


def test_mapping_needs_neither_descriptors_nor_handles(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    fds = published(backend, b"a", b"b")
    mapping = backend.map(fds, [SIZE, SIZE])
    assert all(fd.closed for fd in fds)
    assert driver.live() == Live(handles=0, mappings=2, reservations=1, descriptors=0, contexts=1)
    assert view(mapping, 1).read(0, 1) == b"b"


def test_views_cost_no_driver_calls(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    mapping = backend.map(published(backend, b"a", b"b"), [SIZE, SIZE])
    before = len(driver.calls)
    assert view(mapping, 1, 512, 1024).address == view(mapping).address + SIZE + 512
    assert len(driver.calls) == before


def test_mapping_of_n_segments_takes_three_calls_each_and_four_more(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    fds = published(backend, *[b"x"] * 16)
    before = len(driver.calls)
    mapping = backend.map(fds, [SIZE] * 16)
    # Push, reserve, set access, pop; import, map and release of each.
    assert len(driver.calls) - before == 16 * 3 + 4
    mapping.close()


# ---- views, reads and copies


@pytest.mark.parametrize("method", ["view", "read"])
@pytest.mark.parametrize(
    ("offset_bytes", "nbytes"),
    [(-1, 1), (0, -1), (0, SIZE + 1), (1, SIZE), (SIZE, 1), (SIZE + 1, 0), (1 << 63, 1)],
)
def test_range_outside_its_segment_is_refused(
    driver: FakeDriver, method: str, offset_bytes: int, nbytes: int
) -> None:
    backend = open_gpu(driver)
    mapping = backend.map(published(backend, b"a", b"b"), [SIZE, SIZE])
    with pytest.raises(SegmentError) as e:
        getattr(mapping, method)(0, offset_bytes, nbytes)
    assert (
        str(e.value) == f"{nbytes} bytes at {offset_bytes} reach outside segment 0 of 2097152 bytes"
    )


@pytest.mark.parametrize("method", ["view", "read"])
@pytest.mark.parametrize("segment", [-1, 2])
def test_segment_that_is_not_mapped_is_refused(
    driver: FakeDriver, method: str, segment: int
) -> None:
    backend = open_gpu(driver)
    mapping = backend.map(published(backend, b"a", b"b"), [SIZE, SIZE])
    with pytest.raises(SegmentError) as e:
        getattr(mapping, method)(segment, 0, 1)
    assert str(e.value) == f"segment {segment} is not one of the 2 that are mapped"


def test_read_gives_the_bytes_of_a_range(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    mapping = backend.map(published(backend, b"first", b"second"), [SIZE, SIZE])
    assert bytes(mapping.read(1, 2, 4)) == b"cond"
    assert bytes(mapping.read(1, 0, SIZE)) == b"second".ljust(SIZE, b"\0")
    assert driver.current_context() == 0


def test_read_is_a_copy(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    mapping = backend.map(published(backend, b"kept"), [SIZE])
    held = mapping.read(0, 0, 4)
    held[:] = b"lost"
    assert bytes(mapping.read(0, 0, 4)) == b"kept"
    mapping.close()
    assert bytes(held) == b"lost"
    assert driver.live().mappings == 0


def test_read_needs_no_torch(driver: FakeDriver) -> None:
    def no_torch(array: Any) -> Any:
        raise AssertionError(f"torch was asked for {array.nbytes} bytes")

    backend = CudaBackend(GPU, driver, as_tensor=no_torch)
    fds = published(open_gpu(driver), b"weights")
    assert bytes(backend.map(fds, [SIZE]).read(0, 0, 7)) == b"weights"


@pytest.mark.parametrize("call", ["cuCtxPushCurrent", "cuMemcpyDtoH"])
def test_failed_read_is_named_and_leaves_the_mapping_whole(driver: FakeDriver, call: str) -> None:
    backend = open_gpu(driver)
    mapping = backend.map(published(backend, b"a", b"kept"), [SIZE, SIZE])
    driver.fail(call)
    with pytest.raises(SegmentError) as e:
        mapping.read(1, 512, 4)
    failing = "cannot read 4 bytes of segment 1" if call == "cuMemcpyDtoH" else f"cannot use {GPU}"
    assert str(e.value) == (
        f"{failing}: {call}: CUDA_ERROR_INVALID_VALUE; check 'nvidia-smi', and 'dmesg' for Xid messages"
    )
    assert driver.current_context() == 0
    assert bytes(mapping.read(1, 0, 4)) == b"kept"


def test_read_in_a_broken_context_says_that_the_process_must_end(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    mapping = backend.map(published(backend, b"x"), [SIZE])
    driver.fail("cuMemcpyDtoH", result=CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
    with pytest.raises(SegmentError) as e:
        mapping.read(0, 0, 1)
    assert str(e.value) == (
        "cannot read 1 bytes of segment 0: cuMemcpyDtoH: CUDA_ERROR_ILLEGAL_ADDRESS; an earlier kernel broke this "
        "process's CUDA context: end the process; 'dmesg' shows the Xid"
    )


def test_private_copy_is_writable_and_leaves_the_segment_alone(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    mapping = backend.map(published(backend, b"a", b"kept"), [SIZE, SIZE])
    copy = mapping.private_copy(1)
    as_fake(copy.view(1, 2)).write(b"os")
    assert as_fake(copy.view(0, 4)).read() == b"kost"
    assert bytes(mapping.read(1, 0, 4)) == b"kept"


def test_private_copy_outlives_the_mapping(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    mapping = backend.map(published(backend, b"kept"), [SIZE])
    tensor = as_fake(mapping.private_copy(0).view(0, 4))
    mapping.close()
    assert driver.live() == Live(0, 0, 0, 0, contexts=1, blocks=1)
    tensor.write(b"K")
    assert tensor.read() == b"Kept"
    del tensor
    assert driver.live() == Live(0, 0, 0, 0, contexts=1)


def test_private_copies_are_independent(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    mapping = backend.map(published(backend, b"kept"), [SIZE])
    first, second = mapping.private_copy(0), mapping.private_copy(0)
    as_fake(first.view(0, 4)).write(b"lost")
    assert as_fake(second.view(0, 4)).read() == b"kept"


# ---- lifetime


def test_tensor_keeps_the_memory_after_the_mapping_is_closed(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    mapping = backend.map(published(backend, b"kept"), [SIZE])
    tensor = view(mapping)
    mapping.close()
    assert driver.live().mappings == 1
    assert tensor.read(0, 4) == b"kept"
    del tensor
    assert driver.live() == Live(0, 0, 0, 0, contexts=1)


def test_mapping_that_is_forgotten_is_unmapped(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    backend.map(published(backend, b"x"), [SIZE])
    assert driver.live() == Live(0, 0, 0, 0, contexts=1)


def test_closing_twice_is_closing_once(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    mapping = backend.map(published(backend, b"x"), [SIZE])
    segment = backend.create(SIZE)
    for _ in range(2):
        mapping.close()
        segment.close()
    assert driver.live() == Live(0, 0, 0, 0, contexts=1)
    assert driver.calls.count("cuMemUnmap") == driver.calls.count("cuMemAddressFree") == 3


@pytest.mark.parametrize("kind", ["allocation", "reservation", "placed", "context"])
def test_each_owner_gives_back_once(kind: str) -> None:
    fake = FakeDriver()
    _, handle = prepared(fake)
    driver = Driver(fake)
    owners: dict[str, Callable[[], Any]] = {
        "allocation": lambda: Allocation(driver, handle),
        "reservation": lambda: Reservation(driver, SIZE, ""),
        "placed": lambda: Placed(driver, reserved(fake), SIZE, Allocation(driver, handle), ""),
        "context": lambda: PrimaryContext(driver, 0, GPU),
    }
    owner = owners[kind]()
    before = len(fake.calls)
    owner.close()
    owner.close()
    assert len(fake.calls) == before + 1


@pytest.mark.parametrize("method", ["view", "read", "private_copy"])
def test_closed_mapping_gives_nothing(driver: FakeDriver, method: str) -> None:
    backend = open_gpu(driver)
    mapping = backend.map(published(backend, b"x"), [SIZE])
    mapping.close()
    arguments = (0,) if method == "private_copy" else (0, 0, SIZE)
    with pytest.raises(SegmentError) as e:
        getattr(mapping, method)(*arguments)
    assert str(e.value) == "a mapping of 2097152 bytes is closed: take its tensors before close()"


def test_memory_is_unmapped_only_after_the_kernels_that_use_it(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    mapping = backend.map(published(backend, b"x"), [SIZE])
    driver.launch(view(mapping).address, 16)
    mapping.close()
    assert driver.live().mappings == 0
    assert driver.calls[-5:-2] == ["cuCtxPushCurrent", "cuCtxSynchronize", "cuMemUnmap"]


def test_memory_stays_mapped_while_waiting_for_kernels_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = FakeDriver()
    backend = open_gpu(driver)
    mapping = backend.map(published(backend, b"x"), [SIZE])
    address = view(mapping).address
    driver.fail("cuCtxSynchronize", result=CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    mapping.close()
    assert driver.live() == Live(handles=0, mappings=1, reservations=1, descriptors=0, contexts=1)
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
        (
            logging.ERROR,
            f"2097152 bytes at {address:#x} stay mapped: cuCtxSynchronize: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED; "
            "finish the CUDA graph capture first",
        )
    ]


def test_last_tensor_may_go_in_a_thread_without_a_context(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    mapping = backend.map(published(backend, b"x"), [SIZE])
    tensors = [view(mapping)]
    mapping.close()
    thread = threading.Thread(target=tensors.clear)
    thread.start()
    thread.join()
    assert driver.live().mappings == 0


def test_context_of_the_caller_is_current_again_afterwards() -> None:
    driver = FakeDriver(FakeGpu(uuid=OTHER), FakeGpu())
    driver.cuInit(0)
    _, other = driver.cuDevicePrimaryCtxRetain(0)
    driver.cuCtxPushCurrent(other)
    backend = open_gpu(driver)
    mapping = backend.map(published(backend, b"x"), [SIZE])
    assert driver.current_context() == int(other)
    mapping.close()
    assert driver.current_context() == int(other)


def test_context_is_held_until_the_last_tensor_is_gone(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    mapping = backend.map(published(backend, b"x"), [SIZE])
    tensor = view(mapping)
    mapping.close()
    del backend, mapping
    assert driver.live().contexts == 1
    del tensor
    assert driver.live() == NOTHING


def test_context_finalized_before_its_ranges_goes_with_the_last_of_them(
    driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    """Python's collector finalizes a cycle's objects in any order; tracebacks make such cycles."""
    gpu = Gpu(GPU, driver)
    mappings = [open_range(gpu) for _ in range(2)]
    context = gpu.context
    del gpu
    context.close()
    for left, mapping in zip((1, 0), mappings, strict=True):
        mapping.close()
        assert driver.live() == Live(
            0, mappings=left, reservations=left, descriptors=0, contexts=left
        )
    assert caplog.records == []


def open_range(gpu: Gpu) -> MappedRange:
    with gpu.context.current(), ExitStack() as resources:
        allocation = gpu.allocate(SIZE, "")
        try:
            return gpu.map_range(
                [(allocation, SIZE)], writable=True, resources=resources, failing=""
            )
        finally:
            allocation.close()


def test_mapping_in_a_collected_cycle_is_unmapped(
    driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    backend = open_gpu(driver)
    cycle: list[Any] = [backend, backend.map(published(backend, b"x"), [SIZE])]
    cycle.append(cycle)
    del backend, cycle
    gc.collect()
    assert driver.live() == NOTHING
    assert caplog.records == []


def test_segment_with_a_live_tensor_is_not_published(driver: FakeDriver) -> None:
    segment = open_gpu(driver).create(SIZE)
    tensor = as_fake(segment.tensor()).view()
    with pytest.raises(SegmentError) as e:
        segment.publish()
    assert str(e.value) == (
        "cannot publish a segment of 2097152 bytes: a tensor over it is alive and could still write; "
        "delete every one of them"
    )
    tensor.write(b"still writable")
    del tensor
    segment.publish().close()


def test_segment_closed_with_a_live_tensor_is_freed_with_the_tensor(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    segment = backend.create(SIZE)
    tensor = as_fake(segment.tensor()).view()
    segment.close()
    tensor.write(b"still mapped")
    del tensor
    assert driver.live() == Live(0, 0, 0, 0, contexts=1)


@pytest.mark.parametrize("method", ["tensor", "publish"])
def test_published_segment_is_not_the_creators_any_more(driver: FakeDriver, method: str) -> None:
    segment = open_gpu(driver).create(SIZE)
    segment.publish().close()
    with pytest.raises(SegmentError) as e:
        getattr(segment, method)()
    assert str(e.value) == f"{method}() of a segment of 2097152 bytes that was published or closed"


def test_mapping_that_outlives_the_driver_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver()
    backend = open_gpu(driver)
    mapping = backend.map(published(backend, b"x"), [SIZE])
    driver.die()
    mapping.close()
    del backend, mapping
    assert caplog.records == []


# ---- errors give everything back


@pytest.mark.parametrize(("call", "nth"), MAP_CALLS)
def test_failed_map_leaves_nothing(driver: FakeDriver, call: str, nth: int) -> None:
    backend = open_gpu(driver)
    fds = published(backend, b"a", b"b", b"c")
    driver.fail(call, nth=nth)
    with pytest.raises(
        SegmentError, match=f"on {GPU}.*: {call}: CUDA_ERROR_INVALID_VALUE|cannot use {GPU}: {call}"
    ):
        backend.map(fds, [SIZE] * 3)
    assert driver.live() == Live(0, 0, 0, 0, contexts=1)
    assert all(fd.closed for fd in fds)
    assert driver.current_context() == 0


def test_failed_map_undoes_in_reverse_order(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    fds = published(backend, b"a", b"b")
    driver.fail("cuMemSetAccess")
    before = len(driver.calls)
    with pytest.raises(SegmentError):
        backend.map(fds, [SIZE] * 2)
    undone = driver.calls[driver.calls.index("cuMemSetAccess", before) + 1 :]
    assert undone == ["cuMemUnmap"] * 2 + ["cuMemAddressFree"] + ["cuMemRelease"] * 2 + [
        "cuCtxPopCurrent"
    ]


def test_map_works_again_after_each_failure(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    kept = published(backend, b"a", b"b", b"c")
    for call, nth in MAP_CALLS:
        driver.fail(call, nth=nth)
        with pytest.raises(SegmentError):
            backend.map([fd.dup() for fd in kept], [SIZE] * 3)
    mapping = backend.map(kept, [SIZE] * 3)
    assert view(mapping, 2).read(0, 1) == b"c"


@pytest.mark.parametrize("call", CREATE_CALLS)
def test_failed_create_leaves_nothing(driver: FakeDriver, call: str) -> None:
    backend = open_gpu(driver)
    driver.fail(call)
    with pytest.raises(SegmentError, match=f"{call}: CUDA_ERROR_INVALID_VALUE"):
        backend.create(SIZE)
    assert driver.live() == Live(0, 0, 0, 0, contexts=1)
    assert driver.current_context() == 0


@pytest.mark.parametrize("call", PUBLISH_CALLS)
def test_failed_publish_can_be_repeated(driver: FakeDriver, call: str) -> None:
    backend = open_gpu(driver)
    segment = backend.create(SIZE)
    as_fake(segment.tensor()).write(b"kept")
    driver.fail(call)
    with pytest.raises(SegmentError, match=f"{call}: CUDA_ERROR_INVALID_VALUE"):
        segment.publish()
    mapping = backend.map([segment.publish()], [SIZE])
    assert view(mapping).read(0, 4) == b"kept"


@pytest.mark.parametrize("call", PUBLISH_CALLS)
def test_failed_publish_leaves_nothing_after_close(driver: FakeDriver, call: str) -> None:
    segment = open_gpu(driver).create(SIZE)
    driver.fail(call)
    with pytest.raises(SegmentError):
        segment.publish()
    segment.close()
    assert driver.live() == Live(0, 0, 0, 0, contexts=1)


def test_undo_goes_on_after_a_failing_step(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver()
    backend = open_gpu(driver)
    fds = published(backend, b"a", b"b")
    driver.fail("cuMemSetAccess")
    driver.fail("cuMemUnmap", nth=1, result=CUresult.CUDA_ERROR_OPERATING_SYSTEM)
    with pytest.raises(SegmentError, match="cuMemSetAccess"):
        backend.map(fds, [SIZE] * 2)
    # The reservation under the stuck mapping cannot be freed; all else is.
    assert driver.live() == Live(handles=0, mappings=1, reservations=1, descriptors=0, contexts=1)
    assert [record.getMessage().split(": ", 1)[1].split(";")[0] for record in caplog.records] == [
        "cuMemUnmap: CUDA_ERROR_OPERATING_SYSTEM",
        "cuMemAddressFree: CUDA_ERROR_INVALID_VALUE",
    ]


def test_descriptor_of_something_else_is_named(driver: FakeDriver, tmp_path: Path) -> None:
    backend = open_gpu(driver)
    file = os.open(tmp_path / "weights", os.O_RDWR | os.O_CREAT)
    fds = [*published(backend, b"a"), OwnedFd(file)]
    with pytest.raises(SegmentError) as e:
        backend.map(fds, [SIZE] * 2)
    assert str(e.value) == (
        f"cannot map 2 segments on {GPU}: descriptor of segment 1: cuMemImportFromShareableHandle: "
        "CUDA_ERROR_INVALID_VALUE; the descriptor is no CUDA allocation of this device: 'weightcachectl reload' makes "
        "new ones"
    )
    assert all(fd.closed for fd in fds)


def test_segment_smaller_than_its_index_says_is_named(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    with pytest.raises(SegmentError) as e:
        backend.map(published(backend, b"a", b"b"), [SIZE, 2 * SIZE])
    assert str(e.value) == (
        f"cannot map 2 segments on {GPU}: segment 1, 4194304 bytes: cuMemMap: CUDA_ERROR_INVALID_VALUE; "
        "its allocation has another size than the index says: 'weightcachectl reload' makes a new one"
    )


@pytest.mark.parametrize("sizes", [[], [SIZE], [SIZE] * 3])
def test_descriptors_and_sizes_must_be_as_many(driver: FakeDriver, sizes: list[int]) -> None:
    backend = open_gpu(driver)
    fds = published(backend, b"a", b"b")
    with pytest.raises(SegmentError) as e:
        backend.map(fds, sizes)
    assert str(e.value) == (
        f"cannot map {len(sizes)} segments on {GPU}: 2 descriptors came with them; expected one each, at least one"
    )
    assert all(fd.closed for fd in fds)


@pytest.mark.parametrize("nbytes", [-SIZE, 0, 1, SIZE + 512])
def test_size_off_the_granularity_is_refused(driver: FakeDriver, nbytes: int) -> None:
    backend = open_gpu(driver)
    wrong = f"{nbytes} bytes, expected a positive multiple of the granularity, 2097152"
    with pytest.raises(SegmentError) as e:
        backend.create(nbytes)
    assert str(e.value) == f"cannot create a segment of {nbytes} bytes on {GPU}: {wrong}"
    fds = published(backend, b"a")
    with pytest.raises(SegmentError) as e:
        backend.map(fds, [nbytes])
    assert str(e.value) == f"cannot map 1 segments on {GPU}: segment 0: {wrong}"
    assert fds[0].closed


def test_lack_of_memory_says_needed_free_total_and_holders(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_gpu(driver)
    held = published(backend, b"x", nbytes=256 * MIB)
    monkeypatch.setattr(gpus, "holders", lambda uuid: [gpus.Holder(4711, "python3", 128 * MIB)])
    with pytest.raises(OutOfDeviceMemoryError) as e:
        backend.create(384 * MIB)
    assert str(e.value) == (
        f"cannot create a segment of 402653184 bytes on {GPU}: 256.0 MiB of 512.0 MiB are free; held by pid 4711 "
        "(python3) 128.0 MiB, 128.0 MiB by descriptors, contexts and other containers: stop a process ('nvidia-smi' "
        "lists them), or free a cache with 'weightcachectl drop'"
    )
    assert "cuMemCreate" not in driver.calls[driver.calls.index("cuMemExportToShareableHandle") :]
    held[0].close()


def test_memory_lost_to_another_process_meanwhile_is_the_same_error(driver: FakeDriver) -> None:
    backend = open_gpu(driver)
    driver.fail("cuMemCreate", result=CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(
        OutOfDeviceMemoryError,
        match=r"512\.0 MiB of 512\.0 MiB are free; held by no listed process",
    ):
        backend.create(SIZE)


# ---- opening a device


def test_device_is_found_by_uuid_whatever_its_ordinal() -> None:
    driver = FakeDriver(FakeGpu(uuid=OTHER, total_bytes=64 * MIB), FakeGpu(total_bytes=128 * MIB))
    assert open_gpu(driver).free_bytes() == (128 * MIB, 128 * MIB)
    assert open_gpu(driver, f"GPU-{OTHER}").free_bytes() == (64 * MIB, 64 * MIB)


def test_mig_device_is_found_by_its_own_uuid() -> None:
    driver = FakeDriver(FakeGpu(name="NVIDIA H200 MIG 1g.18gb", mig_uuid=OTHER))
    assert open_gpu(driver, f"MIG-{OTHER}").device == f"MIG-{OTHER}"


def test_mig_device_is_found_with_the_bindings_of_cuda_12() -> None:
    driver = FakeDriver(FakeGpu(name="NVIDIA H200 MIG 1g.18gb", mig_uuid=OTHER))
    current = driver.cuDeviceGetUuid
    # There the plain name tells the physical GPU.
    driver.__dict__["cuDeviceGetUuid_v2"] = current
    driver.__dict__["cuDeviceGetUuid"] = lambda device: (CUresult.CUDA_SUCCESS, None)
    assert open_gpu(driver, f"MIG-{OTHER}").device == f"MIG-{OTHER}"


def test_invisible_device_is_refused_with_the_visible_ones(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(DeviceError) as e:
        open_gpu(driver, f"GPU-{OTHER}")
    assert str(e.value) == (
        f"GPU-{OTHER} is not visible to CUDA in this process, which sees {GPU} (NVIDIA H200) (CUDA_VISIBLE_DEVICES is "
        "'1'): 'weightcachectl devices' lists the devices of this machine"
    )


def test_visible_mig_device_is_listed_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver = FakeDriver(FakeGpu(name="NVIDIA H200 MIG 1g.18gb", mig_uuid=OTHER))
    with pytest.raises(
        DeviceError, match=rf"sees MIG-{OTHER} .*\(CUDA_VISIBLE_DEVICES is not set\)"
    ):
        open_gpu(driver)


@pytest.mark.parametrize("device", ["cpu0", "cuda:0", "GPU-1"])
def test_other_names_are_refused_before_the_driver_is_asked(
    driver: FakeDriver, device: str
) -> None:
    with pytest.raises(
        DeviceError, match=f"'{device}' is (host memory, )?not a (GPU|device name): "
    ):
        open_gpu(driver, device)
    assert driver.calls == []


def test_missing_bindings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(
        SegmentError,
        match=r"^the Python package cuda-bindings cannot be imported \(.*\): pip install",
    ):
        CudaBackend(GPU)


def test_bindings_are_imported_only_when_a_device_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = FakeDriver()
    bindings = types.ModuleType("cuda.bindings.driver")
    bindings.__getattr__ = lambda name: getattr(driver, name)  # type: ignore[method-assign]
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", bindings)
    assert CudaBackend(GPU).granularity() == 2 * MIB
    assert driver.live() == NOTHING


def test_importing_the_backend_imports_neither_torch_nor_cuda() -> None:
    code = "import sys, weightcached.segments.cuda; print([m for m in ('torch', 'cuda', 'pynvml') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=BOUND_S
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (
            RuntimeError("Failed to dlopen libcuda.so.1"),
            f"cannot use {GPU}: cuInit: Failed to dlopen libcuda.so.1; install an NVIDIA driver that has it "
            "('nvidia-smi' shows what is installed)",
        ),
        (
            CUresult.CUDA_ERROR_NO_DEVICE,
            f"cannot use {GPU}: cuInit: CUDA_ERROR_NO_DEVICE; no GPU is visible: check 'nvidia-smi -L' and "
            "CUDA_VISIBLE_DEVICES",
        ),
        (
            CUresult.CUDA_ERROR_SYSTEM_NOT_READY,
            f"cannot use {GPU}: cuInit: CUDA_ERROR_SYSTEM_NOT_READY; systemctl start nvidia-fabricmanager.service",
        ),
        (
            CUresult.CUDA_ERROR_OPERATING_SYSTEM,
            f"cannot use {GPU}: cuInit: CUDA_ERROR_OPERATING_SYSTEM; check 'nvidia-smi', and 'dmesg' for Xid messages",
        ),
    ],
)
def test_driver_that_does_not_start_is_explained(
    driver: FakeDriver, problem: Any, text: str
) -> None:
    def cu_init(flags: int) -> tuple[CUresult]:
        if isinstance(problem, Exception):
            raise problem
        return (problem,)

    driver.__dict__["cuInit"] = cu_init
    with pytest.raises(SegmentError) as e:
        open_gpu(driver)
    assert str(e.value) == text


def test_driver_without_a_function_is_explained(driver: FakeDriver) -> None:
    class OldDriver:
        cuInit = driver.cuInit

    with pytest.raises(
        SegmentError, match=r"cuDriverGetVersion: .* has no attribute .*; install an NVIDIA driver"
    ):
        CudaBackend(GPU, OldDriver())


def test_old_driver_is_refused() -> None:
    with pytest.raises(SegmentError) as e:
        open_gpu(FakeDriver(version=MIN_DRIVER_VERSION - 10))
    assert str(e.value) == (
        f"cannot use {GPU}: its driver supports CUDA 11.3, needed is 11.4 or newer: install a newer NVIDIA driver"
    )
    assert open_gpu(FakeDriver(version=MIN_DRIVER_VERSION)).driver() == "nvidia 580.159.03"


@pytest.mark.parametrize("ability", sorted(FakeGpu().abilities))
def test_device_that_cannot_share_memory_is_refused(ability: Any) -> None:
    driver = FakeDriver(FakeGpu(abilities={**FakeGpu().abilities, ability: 0}))
    with pytest.raises(SegmentError) as e:
        open_gpu(driver)
    assert str(e.value) == (
        f"cannot use {GPU}: it lacks {ability.name}, so its memory cannot be shared: let engines there load from disk"
    )
    assert driver.live() == NOTHING


@pytest.mark.parametrize(
    "call",
    [
        "cuInit",
        "cuDriverGetVersion",
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetUuid",
        "cuDeviceGetAttribute",
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent",
        "cuMemGetAllocationGranularity",
    ],
)
def test_failed_opening_leaves_no_context(driver: FakeDriver, call: str) -> None:
    driver.fail(call)
    with pytest.raises(SegmentError, match=f"{call}: CUDA_ERROR_INVALID_VALUE"):
        open_gpu(driver)
    assert driver.current_context() == 0


def test_forked_process_is_told_to_spawn(driver: FakeDriver) -> None:
    driver.fail("cuDeviceGetCount", result=CUresult.CUDA_ERROR_NOT_INITIALIZED)
    with pytest.raises(
        SegmentError, match=r"CUDA does not survive fork\(\): start the process with spawn"
    ):
        open_gpu(driver)


def test_driver_text_has_both_versions(driver: FakeDriver) -> None:
    assert open_gpu(driver).driver() == "nvidia 580.159.03"


def test_granularity_is_the_minimum(driver: FakeDriver) -> None:
    assert open_gpu(driver).granularity() == driver.granularity


def test_persistence_warning_is_for_this_device(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "persistence_warning", lambda uuid: f"off on {uuid}")
    assert open_gpu(driver).persistence_warning() == f"off on {GPU}"


# ---- the seam to torch


def test_torch_that_copies_is_found_out(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    arrays: list[Any] = []

    def as_tensor(array: Any, **options: Any) -> Any:
        arrays.append(array)
        return types.SimpleNamespace(data_ptr=lambda: 0x1000, device=options["device"])

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    backend = CudaBackend(GPU, driver)
    segment = backend.create(SIZE)
    with pytest.raises(
        SegmentError, match=r"copied 2097152 bytes, mapped at 0x7f.* on cuda:0, to 0x1000 on cuda:0"
    ):
        segment.tensor()
    assert arrays[0].__cuda_array_interface__ == {
        "shape": (SIZE,),
        "typestr": "|u1",
        "data": (arrays[0].address, False),
        "version": 3,
    }
    monkeypatch.setattr(
        torch, "as_tensor", lambda array, **_: types.SimpleNamespace(data_ptr=lambda: array.address)
    )
    assert torch_tensor(arrays[0]).data_ptr() == arrays[0].address
    arrays.clear()
    gc.collect()


def test_torch_refuses_arrays_that_are_marked_read_only() -> None:
    """The reason why DeviceArray does not declare it. If this fails, it should."""
    torch = pytest.importorskip("torch")
    array = types.SimpleNamespace(
        __cuda_array_interface__={"shape": (1,), "typestr": "|u1", "data": (1, True), "version": 3}
    )
    with pytest.raises(TypeError, match="the read only flag is not supported"):
        torch.as_tensor(array, device="cpu")


# ---- the fake is worth its checks


def prepared(driver: FakeDriver) -> tuple[Any, Any]:
    """(properties, handle) of one allocation of SIZE, with the context current."""
    driver.cuInit(0)
    driver.cuCtxPushCurrent(driver.cuDevicePrimaryCtxRetain(0)[1])
    properties: Any = driver.__dict__["CUmemAllocationProp"]()
    properties.type = properties.type.__class__(1)
    properties.location.type = properties.location.type.__class__(1)
    properties.requestedHandleTypes = properties.requestedHandleTypes.__class__(1)
    return properties, driver.cuMemCreate(SIZE, properties, 0)[1]


def reserved(driver: FakeDriver, nbytes: int = SIZE) -> int:
    return int(driver.cuMemAddressReserve(nbytes, 0, 0, 0)[1])


def mapped(driver: FakeDriver) -> tuple[int, Any]:
    _, handle = prepared(driver)
    address = reserved(driver)
    assert driver.cuMemMap(address, SIZE, 0, handle, 0) == (CUresult.CUDA_SUCCESS,)
    return address, handle


def test_leak_check_sees_a_leaked_handle() -> None:
    driver = FakeDriver()
    properties, _ = prepared(driver)
    with pytest.raises(AssertionError, match=r"^handles: \+1$"), no_leaks(driver):
        driver.cuMemCreate(SIZE, properties, 0)


def test_leak_check_sees_a_leaked_mapping() -> None:
    driver = FakeDriver()
    _, handle = prepared(driver)
    address = reserved(driver)
    with pytest.raises(AssertionError, match=r"^mappings: \+1$"), no_leaks(driver):
        driver.cuMemMap(address, SIZE, 0, handle, 0)


def test_leak_check_sees_a_leaked_reservation() -> None:
    driver = FakeDriver()
    prepared(driver)
    with pytest.raises(AssertionError, match=r"^reservations: \+1$"), no_leaks(driver):
        reserved(driver)


def test_leak_check_sees_a_leaked_descriptor() -> None:
    driver = FakeDriver()
    properties, handle = prepared(driver)
    with pytest.raises(AssertionError, match=r"^descriptors: \+1$"), no_leaks(driver):
        _, fd = driver.cuMemExportToShareableHandle(handle, properties.requestedHandleTypes, 0)
    os.close(fd)


def test_leak_check_sees_a_leaked_context() -> None:
    driver = FakeDriver()
    driver.cuInit(0)
    with pytest.raises(AssertionError, match=r"^contexts: \+1$"), no_leaks(driver):
        driver.cuDevicePrimaryCtxRetain(0)


def test_leak_check_sees_a_leaked_copy() -> None:
    driver = FakeDriver()
    with pytest.raises(AssertionError, match=r"^blocks: \+1$"), no_leaks(driver):
        driver.torch_allocate(SIZE, 0)


def test_leak_check_notes_the_leak_on_an_error() -> None:
    driver = FakeDriver()
    prepared(driver)
    with pytest.raises(ZeroDivisionError) as e, no_leaks(driver):
        assert reserved(driver) / 0
    assert e.value.__notes__ == ["reservations: +1"]


WrongOrder = Callable[[FakeDriver], Any]


def _double_release(driver: FakeDriver) -> Any:
    _, handle = prepared(driver)
    driver.cuMemRelease(handle)
    return driver.cuMemRelease(handle)


def _map_after_release(driver: FakeDriver) -> Any:
    _, handle = prepared(driver)
    driver.cuMemRelease(handle)
    return driver.cuMemMap(reserved(driver), SIZE, 0, handle, 0)


def _export_after_release(driver: FakeDriver) -> Any:
    properties, handle = prepared(driver)
    driver.cuMemRelease(handle)
    return driver.cuMemExportToShareableHandle(handle, properties.requestedHandleTypes, 0)


def _export_of_what_was_not_made_for_it(driver: FakeDriver) -> Any:
    properties, _ = prepared(driver)
    kind = properties.requestedHandleTypes
    properties.requestedHandleTypes = kind.__class__(0)
    return driver.cuMemExportToShareableHandle(driver.cuMemCreate(SIZE, properties, 0)[1], kind, 0)


def _unmap_twice(driver: FakeDriver) -> Any:
    address, _ = mapped(driver)
    driver.cuMemUnmap(address, SIZE)
    return driver.cuMemUnmap(address, SIZE)


def _unmap_a_part(driver: FakeDriver) -> Any:
    properties, _ = prepared(driver)
    big = driver.cuMemCreate(2 * SIZE, properties, 0)[1]
    address = reserved(driver, 2 * SIZE)
    driver.cuMemMap(address, 2 * SIZE, 0, big, 0)
    return driver.cuMemUnmap(address, SIZE)


def _free_under_a_mapping(driver: FakeDriver) -> Any:
    address, _ = mapped(driver)
    return driver.cuMemAddressFree(address, SIZE)


def _free_another_size(driver: FakeDriver) -> Any:
    prepared(driver)
    return driver.cuMemAddressFree(reserved(driver, 2 * SIZE), SIZE)


def _map_outside_the_reservation(driver: FakeDriver) -> Any:
    _, handle = prepared(driver)
    return driver.cuMemMap(reserved(driver) + SIZE, SIZE, 0, handle, 0)


def _map_over_a_mapping(driver: FakeDriver) -> Any:
    address, handle = mapped(driver)
    return driver.cuMemMap(address, SIZE, 0, handle, 0)


def _map_more_than_there_is(driver: FakeDriver) -> Any:
    _, handle = prepared(driver)
    return driver.cuMemMap(reserved(driver, 2 * SIZE), 2 * SIZE, 0, handle, 0)


def _map_a_misaligned_size(driver: FakeDriver) -> Any:
    _, handle = prepared(driver)
    return driver.cuMemMap(reserved(driver), SIZE - 512, 0, handle, 0)


def _create_a_misaligned_size(driver: FakeDriver) -> Any:
    return driver.cuMemCreate(SIZE + 512, prepared(driver)[0], 0)


def _reserve_a_misaligned_size(driver: FakeDriver) -> Any:
    prepared(driver)
    return driver.cuMemAddressReserve(SIZE + 512, 0, 0, 0)


def _open_what_is_not_mapped(driver: FakeDriver) -> Any:
    prepared(driver)
    return driver.cuMemSetAccess(reserved(driver), SIZE, [driver.__dict__["CUmemAccessDesc"]()], 1)


def _open_more_than_is_mapped(driver: FakeDriver) -> Any:
    _, handle = prepared(driver)
    address = reserved(driver, 2 * SIZE)
    driver.cuMemMap(address, SIZE, 0, handle, 0)
    return driver.cuMemSetAccess(address, 2 * SIZE, [driver.__dict__["CUmemAccessDesc"]()], 1)


def _import_of_a_closed_descriptor(driver: FakeDriver) -> Any:
    properties, _ = prepared(driver)
    return driver.cuMemImportFromShareableHandle(1 << 20, properties.requestedHandleTypes)


def _import_of_a_foreign_memfd(driver: FakeDriver) -> Any:
    properties, _ = prepared(driver)
    with OwnedFd(os.memfd_create("other")) as fd:
        return driver.cuMemImportFromShareableHandle(fd.fileno(), properties.requestedHandleTypes)


def _import_on_another_gpu(driver: FakeDriver) -> Any:
    properties, handle = prepared(driver)
    kind = properties.requestedHandleTypes
    other = FakeDriver(FakeGpu(uuid=OTHER))
    prepared(other)
    with OwnedFd(driver.cuMemExportToShareableHandle(handle, kind, 0)[1]) as fd:
        return other.cuMemImportFromShareableHandle(fd.fileno(), kind)


def _call_before_init(driver: FakeDriver) -> Any:
    return driver.cuDeviceGetCount()


def _call_without_a_context(driver: FakeDriver) -> Any:
    properties, _ = prepared(driver)
    driver.cuCtxPopCurrent()
    return driver.cuMemCreate(SIZE, properties, 0)


def _call_in_a_released_context(driver: FakeDriver) -> Any:
    prepared(driver)
    driver.cuDevicePrimaryCtxRelease(0)
    return driver.cuMemGetInfo()


def _release_the_context_under_a_mapping(driver: FakeDriver) -> Any:
    mapped(driver)
    return driver.cuDevicePrimaryCtxRelease(0)


def _release_the_context_twice(driver: FakeDriver) -> Any:
    prepared(driver)
    driver.cuDevicePrimaryCtxRelease(0)
    return driver.cuDevicePrimaryCtxRelease(0)


def _unmap_under_a_kernel(driver: FakeDriver) -> Any:
    address, _ = mapped(driver)
    driver.launch(address + 4096, 8)
    return driver.cuMemUnmap(address, SIZE)


def _read_without_a_context(driver: FakeDriver) -> Any:
    address = _opened(driver, 3)
    driver.cuCtxPopCurrent()
    return _copied(driver, address, 4)


def _read_what_is_not_mapped(driver: FakeDriver) -> Any:
    prepared(driver)
    return _copied(driver, reserved(driver), 4)


def _read_what_is_not_open(driver: FakeDriver) -> Any:
    return _copied(driver, mapped(driver)[0], 4)


def _read_over_the_end(driver: FakeDriver) -> Any:
    return _copied(driver, _opened(driver, 1) + SIZE - 2, 4)


def _read_to_nowhere(driver: FakeDriver) -> Any:
    return driver.cuMemcpyDtoH(0, _opened(driver, 1), 4)


def _opened(driver: FakeDriver, flags: int) -> int:
    """The address of a mapping of SIZE bytes with these access flags."""
    address, _ = mapped(driver)
    access = driver.__dict__["CUmemAccessDesc"]()
    access.location.type = access.location.type.__class__(1)
    access.flags = access.flags.__class__(flags)
    assert driver.cuMemSetAccess(address, SIZE, [access], 1) == (CUresult.CUDA_SUCCESS,)
    return address


def _copied(driver: FakeDriver, address: int, nbytes: int) -> Any:
    target = ctypes.create_string_buffer(nbytes)
    result = driver.cuMemcpyDtoH(ctypes.addressof(target), address, nbytes)
    assert target.raw == bytes(nbytes)
    return result


def _create_more_than_is_free(driver: FakeDriver) -> Any:
    return driver.cuMemCreate(driver.gpus[0].total_bytes, prepared(driver)[0], 0)


@pytest.mark.parametrize(
    ("wrong", "result"),
    [
        (_double_release, CUresult.CUDA_ERROR_INVALID_VALUE),
        (_map_after_release, CUresult.CUDA_ERROR_INVALID_VALUE),
        (_export_after_release, CUresult.CUDA_ERROR_INVALID_VALUE),
        (_export_of_what_was_not_made_for_it, CUresult.CUDA_ERROR_INVALID_VALUE),
        (_unmap_twice, CUresult.CUDA_ERROR_INVALID_VALUE),
        (_unmap_a_part, CUresult.CUDA_ERROR_INVALID_VALUE),
        (_free_under_a_mapping, CUresult.CUDA_ERROR_INVALID_VALUE),
        (_free_another_size, CUresult.CUDA_ERROR_INVALID_VALUE),
        (_map_outside_the_reservation, CUresult.CUDA_ERROR_INVALID_VALUE),
        (_map_over_a_mapping, CUresult.CUDA_ERROR_INVALID_VALUE),
        (_map_more_than_there_is, CUresult.CUDA_ERROR_INVALID_VALUE),
        (_map_a_misaligned_size, CUresult.CUDA_ERROR_INVALID_VALUE),
        (_create_a_misaligned_size, CUresult.CUDA_ERROR_INVALID_VALUE),
        (_reserve_a_misaligned_size, CUresult.CUDA_ERROR_INVALID_VALUE),
        (_open_what_is_not_mapped, CUresult.CUDA_ERROR_INVALID_VALUE),
        (_open_more_than_is_mapped, CUresult.CUDA_ERROR_INVALID_VALUE),
        (_import_of_a_closed_descriptor, CUresult.CUDA_ERROR_INVALID_VALUE),
        (_import_of_a_foreign_memfd, CUresult.CUDA_ERROR_INVALID_VALUE),
        (_import_on_another_gpu, CUresult.CUDA_ERROR_INVALID_DEVICE),
        (_call_before_init, CUresult.CUDA_ERROR_NOT_INITIALIZED),
        (_call_without_a_context, CUresult.CUDA_ERROR_INVALID_CONTEXT),
        (_call_in_a_released_context, CUresult.CUDA_ERROR_INVALID_CONTEXT),
        (_release_the_context_under_a_mapping, CUresult.CUDA_ERROR_INVALID_CONTEXT),
        (_release_the_context_twice, CUresult.CUDA_ERROR_INVALID_CONTEXT),
        (_unmap_under_a_kernel, CUresult.CUDA_ERROR_ILLEGAL_ADDRESS),
        (_read_without_a_context, CUresult.CUDA_ERROR_INVALID_CONTEXT),
        (_read_what_is_not_mapped, CUresult.CUDA_ERROR_INVALID_VALUE),
        (_read_what_is_not_open, CUresult.CUDA_ERROR_INVALID_VALUE),
        (_read_over_the_end, CUresult.CUDA_ERROR_INVALID_VALUE),
        (_read_to_nowhere, CUresult.CUDA_ERROR_INVALID_VALUE),
        (_create_more_than_is_free, CUresult.CUDA_ERROR_OUT_OF_MEMORY),
    ],
)
def test_fake_refuses_what_is_wrong(wrong: WrongOrder, result: CUresult) -> None:
    driver = FakeDriver()
    assert wrong(driver)[0] == result
    driver.die()


def test_fake_releases_a_handle_under_its_mapping() -> None:
    driver = FakeDriver()
    address, handle = mapped(driver)
    assert driver.cuMemRelease(handle) == (CUresult.CUDA_SUCCESS,)
    assert driver.cuMemGetInfo()[1] == driver.gpus[0].total_bytes - SIZE
    assert driver.cuMemUnmap(address, SIZE) == (CUresult.CUDA_SUCCESS,)
    assert driver.cuMemGetInfo()[1] == driver.gpus[0].total_bytes


# ---- any order


WHICH = st.integers(0, 7)


def some(kind: str) -> Callable[[AnyOrder], bool]:
    return lambda machine: bool(getattr(machine, kind))


def pick(things: list[Any], which: int) -> Any:
    return things[which % len(things)]


class AnyOrder(RuleBasedStateMachine):
    """Segments, descriptors, mappings and tensors come and go, with faults; nothing leaks."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = FakeDriver()
        self.backend = open_gpu(self.driver)
        # Each thing with the first byte of its segments.
        self.segments: list[tuple[CudaSegment, int]] = []
        self.descriptors: list[tuple[OwnedFd, int]] = []
        self.mappings: list[tuple[CudaMapping, list[int]]] = []
        self.tensors: list[tuple[FakeTensor, int]] = []
        self.copies: list[tuple[FakeTensor, int]] = []

    @rule(number=st.integers(0, 255))
    def create(self, number: int) -> None:
        segment = self.backend.create(SIZE)
        as_fake(segment.tensor()).write(bytes([number]))
        self.segments.append((segment, number))

    @precondition(some("segments"))
    @rule()
    def publish(self) -> None:
        segment, number = self.segments.pop()
        self.descriptors.append((segment.publish(), number))

    @precondition(some("segments"))
    @rule()
    def abandon(self) -> None:
        self.segments.pop()[0].close()

    @precondition(some("descriptors"))
    @rule(which=WHICH)
    def drop(self, which: int) -> None:
        fd, _ = self.descriptors.pop(which % len(self.descriptors))
        fd.close()

    @precondition(some("descriptors"))
    @rule(which=st.lists(WHICH, min_size=1, max_size=4))
    def map(self, which: list[int]) -> None:
        picked = [pick(self.descriptors, one) for one in which]
        mapping = self.backend.map([fd.dup() for fd, _ in picked], [SIZE] * len(picked))
        self.mappings.append((mapping, [number for _, number in picked]))

    @precondition(some("descriptors"))
    @rule(which=st.lists(WHICH, min_size=3, max_size=4), fault=st.sampled_from(MAP_CALLS))
    def fail_to_map(self, which: list[int], fault: tuple[str, int]) -> None:
        call, nth = fault
        self.driver.fail(call, nth=nth)
        with pytest.raises(SegmentError, match=call):
            self.backend.map(
                [pick(self.descriptors, one)[0].dup() for one in which], [SIZE] * len(which)
            )

    @precondition(some("mappings"))
    @rule(which=WHICH, segment=WHICH)
    def take(self, which: int, segment: int) -> None:
        mapping, numbers = pick(self.mappings, which)
        segment %= len(numbers)
        self.tensors.append((view(mapping, segment), numbers[segment]))

    @precondition(some("mappings"))
    @rule(which=WHICH, segment=WHICH)
    def copy(self, which: int, segment: int) -> None:
        mapping, numbers = pick(self.mappings, which)
        segment %= len(numbers)
        self.copies.append((as_fake(mapping.private_copy(segment).view(0, 1)), numbers[segment]))

    @precondition(some("copies"))
    @rule(number=st.integers(0, 255))
    def write_to_copy(self, number: int) -> None:
        tensor, _ = self.copies.pop(0)
        tensor.write(bytes([number]))
        self.copies.append((tensor, number))

    @precondition(some("copies"))
    @rule(which=WHICH)
    def forget_copy(self, which: int) -> None:
        self.copies.pop(which % len(self.copies))

    @precondition(some("mappings"))
    @rule(which=WHICH)
    def close(self, which: int) -> None:
        mapping, _ = self.mappings.pop(which % len(self.mappings))
        mapping.close()

    @precondition(some("tensors"))
    @rule(which=WHICH)
    def run_kernel(self, which: int) -> None:
        self.driver.launch(pick(self.tensors, which)[0].address, 1)

    @precondition(some("tensors"))
    @rule(which=WHICH)
    def forget(self, which: int) -> None:
        self.tensors.pop(which % len(self.tensors))

    @invariant()
    def counts_and_contents_fit(self) -> None:
        live = self.driver.live()
        assert live.handles == len(self.segments)
        assert live.descriptors == len(self.descriptors)
        owners = {tensor.owner for tensor, _ in self.tensors}
        owners |= {view(mapping).owner for mapping, _ in self.mappings}
        assert live.reservations == len(self.segments) + len(owners)
        assert live.blocks == len(self.copies)
        shown = [*self.tensors, *self.copies]
        assert [tensor.read(0, 1) for tensor, _ in shown] == [
            bytes([number]) for _, number in shown
        ]
        for mapping, numbers in self.mappings:
            assert [bytes(mapping.read(segment, 0, 1)) for segment in range(len(numbers))] == [
                bytes([n]) for n in numbers
            ]
        assert self.driver.current_context() == 0

    def teardown(self) -> None:
        self.tensors.clear()
        self.copies.clear()
        things: list[tuple[Any, Any]] = [*self.segments, *self.descriptors, *self.mappings]
        for thing, _ in things:
            thing.close()
        assert self.driver.live() == Live(0, 0, 0, 0, contexts=1)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, derandomize=True
)
