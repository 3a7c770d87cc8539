"""CUDA segments on a real GPU: they outlive their creator, cannot be written by engines, and torch
uses them in place.

Run: python -m pytest tests/gpu/test_cuda_segments.py -s     (24 GiB of free device memory; -s shows the timings)
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.segment_process import END_NBYTES, pattern
from weightcached.errors import DeviceError, OutOfDeviceMemoryError, SegmentError
from weightcached.segments.cuda import CudaBackend, CudaMapping
from weightcached.segments.packing import SEGMENT_NBYTES
from weightcached.system import gpus
from weightcached.system.fds import OwnedFd

MIB = 1 << 20
GIB = 1 << 30
CHILD_TIMEOUT_S = 60
FREED_TIMEOUT_S = 10
# Memory that torch, cuBLAS and the driver may take between two readings of the free memory.
NOISE_NBYTES = 256 * MIB
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def backend(gpu_uuid: str) -> CudaBackend:
    return CudaBackend(gpu_uuid)


@pytest.fixture(autouse=True)
def _gives_memory_back(backend: CudaBackend) -> Iterator[None]:
    """Require of each test that it frees its memory."""
    before = settled_free_bytes(backend)
    yield
    wait_until_free(backend, before)


def settled_free_bytes(backend: CudaBackend) -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return backend.free_bytes()[0]


def wait_until_free(backend: CudaBackend, nbytes: int) -> None:
    """Wait until about `nbytes` are free: a process's memory is freed a little after its end."""
    deadline_s = time.monotonic() + FREED_TIMEOUT_S
    while (free := settled_free_bytes(backend)) < nbytes - NOISE_NBYTES:
        assert time.monotonic() < deadline_s, (
            f"{free} bytes free after {FREED_TIMEOUT_S} s, expected {nbytes}"
        )
        time.sleep(0.05)


def published(backend: CudaBackend, *sizes: int, fill: bool = True) -> list[OwnedFd]:
    fds = []
    for number, nbytes in enumerate(sizes):
        segment = backend.create(nbytes)
        if fill:
            tensor = segment.tensor()
            tensor.copy_(pattern(number, nbytes, tensor.device))
            del tensor
        fds.append(segment.publish())
    return fds


def pattern_bytes(segment: int, nbytes: int, start: int, end: int) -> bytes:
    return bytes(pattern(segment, nbytes, torch.device("cpu"))[start:end].tolist())


def has_pattern(tensor: torch.Tensor, segment: int) -> bool:
    return bool(torch.equal(tensor, pattern(segment, tensor.numel(), tensor.device)))


@contextlib.contextmanager
def other_process(
    mode: str, gpu_uuid: str, sizes: list[int]
) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """segment_process.py in `mode`, and our end of its socket; killed at the end if it still runs."""
    ours, theirs = socket.socketpair()
    arguments = [sys.executable, str(ROOT / "tests/gpu/segment_process.py")]
    arguments += [mode, str(theirs.fileno()), gpu_uuid, json.dumps(sizes)]
    with ours, theirs:
        ours.settimeout(CHILD_TIMEOUT_S)
        process = subprocess.Popen(
            arguments,
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        theirs.close()
        try:
            yield process, ours
        finally:
            process.kill()
            process.communicate()


def answer(process: subprocess.Popen[str], sock: socket.socket) -> Any:
    """The process's JSON answer, or a failure with its standard error."""
    data = sock.recv(1 << 16)
    if not data:
        pytest.fail(f"the other process ended: {process.communicate(timeout=CHILD_TIMEOUT_S)[1]}")
    return json.loads(data)


# ---- from process to process


def test_second_process_maps_equal_content(backend: CudaBackend) -> None:
    sizes = [64 * MIB, 2 * MIB, 256 * MIB]
    fds = published(backend, *sizes)
    with other_process("check", backend.device, sizes) as (process, sock):
        socket.send_fds(sock, [b"."], [fd.fileno() for fd in fds])
        assert answer(process, sock)["equal"] == [True, True, True]
        assert process.wait(CHILD_TIMEOUT_S) == 0
    for fd in fds:
        fd.close()


def test_memory_survives_kill_9_of_its_creator(backend: CudaBackend) -> None:
    sizes = [GIB, 512 * MIB]
    before = settled_free_bytes(backend)
    with other_process("create", backend.device, sizes) as (process, sock):
        data, fds, _, _ = socket.recv_fds(sock, 16, len(sizes))
        assert data == b"created", process.communicate(timeout=CHILD_TIMEOUT_S)[1]
        process.send_signal(signal.SIGKILL)
        assert process.wait(CHILD_TIMEOUT_S) == -signal.SIGKILL
    owned = [OwnedFd(fd) for fd in fds]
    # The creator's context goes, the segments stay.
    wait_until_free(backend, before - sum(sizes))
    assert settled_free_bytes(backend) <= before - sum(sizes) + NOISE_NBYTES
    mapping = backend.map(owned, sizes)
    assert [
        has_pattern(mapping.view(number, 0, nbytes), number) for number, nbytes in enumerate(sizes)
    ] == [True, True]
    mapping.close()


def test_writing_to_mapped_memory_fails_loudly_and_changes_nothing(backend: CudaBackend) -> None:
    sizes = [64 * MIB]
    (fd,) = published(backend, *sizes)
    mapping = backend.map([fd.dup()], sizes)
    with other_process("write", backend.device, sizes) as (process, sock):
        socket.send_fds(sock, [b"."], [fd.fileno()])
        writable, read_only = answer(process, sock)["memset"]
        assert writable == "CUDA_SUCCESS"
        assert read_only != "CUDA_SUCCESS"
        stderr = process.communicate(timeout=CHILD_TIMEOUT_S)[1]
    assert process.returncode != 0
    assert "illegal memory access" in stderr
    assert has_pattern(mapping.view(0, 0, 64 * MIB), 0)
    fd.close()


def test_process_without_torch_reads_the_bytes(backend: CudaBackend) -> None:
    sizes = [64 * MIB, 2 * MIB]
    fds = published(backend, *sizes)
    with other_process("read", backend.device, sizes) as (process, sock):
        socket.send_fds(sock, [b"."], [fd.fileno() for fd in fds])
        found = answer(process, sock)
        assert process.wait(CHILD_TIMEOUT_S) == 0
    for fd in fds:
        fd.close()
    assert found["ends"] == [
        [
            pattern_bytes(n, size, start, start + END_NBYTES).hex()
            for start in (0, size - END_NBYTES)
        ]
        for n, size in enumerate(sizes)
    ]
    assert found["torch"] is False


# ---- torch over mapped memory


@pytest.fixture
def mapping(backend: CudaBackend) -> Iterator[CudaMapping]:
    """Two segments, of 64 and 32 MiB, with their patterns."""
    sizes = [64 * MIB, 32 * MIB]
    mapping = backend.map(published(backend, *sizes), sizes)
    yield mapping
    mapping.close()


def test_views_are_the_mapped_memory_itself(mapping: CudaMapping) -> None:
    first, second = mapping.view(0, 0, 64 * MIB), mapping.view(1, 0, 32 * MIB)
    assert (first.dtype, first.device, first.shape) == (
        torch.uint8,
        torch.device("cuda", 0),
        (64 * MIB,),
    )
    assert second.data_ptr() == first.data_ptr() + 64 * MIB
    assert has_pattern(first, 0)
    assert has_pattern(second, 1)


def test_each_view_has_a_storage_of_its_own(mapping: CudaMapping) -> None:
    views = [mapping.view(0, offset, 512) for offset in (0, 512, 512)]
    storages = [view.untyped_storage() for view in views]
    assert [storage.data_ptr() - storages[0].data_ptr() for storage in storages] == [0, 512, 512]
    assert [storage.nbytes() for storage in storages] == [512] * 3
    assert [view.storage_offset() for view in views] == [0] * 3
    assert len({storage._cdata for storage in storages}) == 3


def test_views_allocate_nothing(mapping: CudaMapping) -> None:
    allocated = torch.cuda.memory_allocated()
    views = [mapping.view(0, start, 512).view(torch.bfloat16) for start in range(0, MIB, 512)]
    assert torch.cuda.memory_allocated() == allocated
    assert len(views) == 2048


def test_strided_views_are_bound_by_set_(mapping: CudaMapping) -> None:
    shown = mapping.view(1, 16384, 4 * 512 * 256)
    # The transpose of a 256 x 512 matrix that begins 4096 elements into the segment.
    view = torch.empty(0, dtype=torch.int32, device=shown.device)
    view.set_(shown.untyped_storage(), 0, (512, 256), (1, 512))
    expected = (
        pattern(1, 32 * MIB, shown.device)
        .view(torch.int32)[4096 : 4096 + 512 * 256]
        .view(256, 512)
        .t()
    )
    assert torch.equal(view, expected)
    assert not view.is_contiguous()


def test_read_gives_the_bytes_of_a_range(mapping: CudaMapping) -> None:
    assert has_pattern(torch.frombuffer(mapping.read(1, 0, 32 * MIB), dtype=torch.uint8), 1)
    assert bytes(mapping.read(1, 4098, 511)) == pattern_bytes(1, 8192, 4098, 4098 + 511)


def test_read_from_a_thread_without_a_context_works(mapping: CudaMapping) -> None:
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(bytes(mapping.read(0, 0, 4096))))
    thread.start()
    thread.join()
    assert found == [pattern_bytes(0, 4096, 0, 4096)]


@pytest.mark.parametrize("method", ["view", "read"])
def test_range_outside_its_segment_is_refused_without_a_trace(
    mapping: CudaMapping, method: str
) -> None:
    with pytest.raises(
        SegmentError, match=r"^16 bytes at 67108856 reach outside segment 0 of 67108864 bytes$"
    ):
        getattr(mapping, method)(0, 64 * MIB - 8, 16)
    assert torch_works()


# ---- private copies


def test_private_copy_is_writable_and_leaves_the_segment_alone(mapping: CudaMapping) -> None:
    copy = mapping.private_copy(1)
    tensor = copy.view(0, 32 * MIB)
    assert has_pattern(tensor, 1)
    copy.view(4096, 4096).fill_(7)
    torch.cuda.synchronize()
    assert tensor[4096:8192].unique().tolist() == [7]
    assert has_pattern(mapping.view(1, 0, 32 * MIB), 1)


def test_private_copy_costs_its_segment_once(mapping: CudaMapping) -> None:
    allocated = torch.cuda.memory_allocated()
    copy = mapping.private_copy(1)
    views = [copy.view(start, 512) for start in range(0, MIB, 512)]
    assert torch.cuda.memory_allocated() - allocated == 32 * MIB
    assert (
        len({view.untyped_storage()._cdata for view in views})
        == len({view.data_ptr() for view in views})
        == 2048
    )
    del copy
    assert torch.cuda.memory_allocated() - allocated == 32 * MIB
    del views
    assert torch.cuda.memory_allocated() == allocated


def test_private_copy_outlives_the_mapping(backend: CudaBackend) -> None:
    before = settled_free_bytes(backend)
    mapping = backend.map(published(backend, GIB, 2 * MIB), [GIB, 2 * MIB])
    # Else torch would carve the copy out of the cached block that held the pattern, and keep all of
    # that.
    torch.cuda.empty_cache()
    tensor = mapping.private_copy(1).view(0, 2 * MIB)
    mapping.close()
    wait_until_free(backend, before)
    assert has_pattern(tensor, 1)


# ---- work on mapped memory


def test_matmul_reads_mapped_weights(backend: CudaBackend) -> None:
    segment = backend.create(8 * MIB)
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(2048, 2048, dtype=torch.bfloat16, device="cuda", generator=generator)
    segment.tensor().copy_(weight.view(torch.uint8).view(-1))
    other = backend.map([segment.publish()], [8 * MIB])
    mapped = other.view(0, 0, 8 * MIB).view(torch.bfloat16).view(2048, 2048)
    x = torch.randn(16, 2048, dtype=torch.bfloat16, device="cuda", generator=generator)
    assert torch.equal(x @ mapped.t(), x @ weight.t())


def test_tensor_larger_than_a_usual_segment_has_its_own(backend: CudaBackend) -> None:
    nbytes = 3 * SEGMENT_NBYTES
    mapping = backend.map(published(backend, 2 * MIB, nbytes), [2 * MIB, nbytes])
    tensor = mapping.view(1, 0, nbytes).view(torch.int32)
    assert tensor.numel() == nbytes // 4
    assert tensor[-1].item() == nbytes // 4 - 1 + 7919
    assert has_pattern(tensor.view(torch.uint8), 1)


def test_captured_graph_reads_mapped_weights(mapping: CudaMapping) -> None:
    weight = mapping.view(0, 0, 4096).view(torch.int32)
    out = torch.zeros(1024, dtype=torch.int32, device="cuda")
    torch.add(weight, 1, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.add(weight, 1, out=out)
    out.zero_()
    graph.replay()
    assert torch.equal(out, torch.arange(1, 1025, dtype=torch.int32, device="cuda"))


def test_captured_graph_reads_what_is_mapped_over_it_and_what_comes_back(
    backend: CudaBackend,
) -> None:
    """As a swap does it: the descriptors of the first generation stay open until all ranks have
    the second one."""
    before = settled_free_bytes(backend)
    first, second = published(backend, GIB, 2 * MIB), published(backend, GIB, 2 * MIB, fill=False)
    mapping = backend.map([fd.dup() for fd in first], [GIB, 2 * MIB])
    weight = mapping.view(0, 0, 4096).view(torch.int32)
    address, out = weight.data_ptr(), torch.zeros(1024, dtype=torch.int32, device="cuda")
    torch.add(weight, 1, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.add(weight, 1, out=out)

    def replayed() -> torch.Tensor:
        out.fill_(-1)
        graph.replay()
        return out.clone()

    own = torch.arange(1, 1025, dtype=torch.int32, device="cuda")
    other = backend.map([fd.dup() for fd in second], [GIB, 2 * MIB])
    theirs = other.view(0, 0, 4096).view(torch.int32) + 1
    del other
    times: list[float] = []
    for fds, expected in ((second, theirs), (first, own), (second, theirs)):
        began_s = time.perf_counter()
        mapping.map_again([fd.dup() for fd in fds])
        times.append(time.perf_counter() - began_s)
        assert torch.equal(replayed(), expected)
    assert weight.data_ptr() == address
    print(f"1 GiB and 2 MiB mapped over others: {', '.join(f'{1e3 * t:.2f}' for t in times)} ms")
    for fd in first:
        fd.close()
    assert settled_free_bytes(backend) >= before - GIB - 2 * MIB - NOISE_NBYTES, (
        "the first is freed"
    )
    for fd in second:
        fd.close()
    del weight, theirs
    mapping.close()


# ---- lifetime


def test_tensor_keeps_the_memory_after_close_and_collection(backend: CudaBackend) -> None:
    before = settled_free_bytes(backend)
    mapping = backend.map(published(backend, GIB), [GIB])
    view = mapping.view(0, 0, GIB).view(torch.int32)[-1024:]
    mapping.close()
    del mapping
    assert settled_free_bytes(backend) <= before - GIB + NOISE_NBYTES
    assert view[-1].item() == GIB // 4 - 1
    del view
    wait_until_free(backend, before)


def test_last_tensor_may_go_in_another_thread_while_a_kernel_reads(backend: CudaBackend) -> None:
    before = settled_free_bytes(backend)
    mapping = backend.map(published(backend, GIB), [GIB])
    tensors = [mapping.view(0, 0, GIB)]
    mapping.close()
    total = sum(tensors[0].view(torch.int32).sum() for _ in range(50))
    thread = threading.Thread(target=tensors.clear)
    thread.start()
    thread.join()
    expected = (GIB // 4) * (GIB // 4 - 1) // 2
    assert torch.as_tensor(total).item() == 50 * expected
    wait_until_free(backend, before)


def test_abandoned_segment_is_freed(backend: CudaBackend) -> None:
    before = settled_free_bytes(backend)
    segment = backend.create(2 * GIB)
    assert settled_free_bytes(backend) <= before - 2 * GIB + NOISE_NBYTES
    segment.close()
    segment.close()
    wait_until_free(backend, before)


def test_closed_descriptors_free_the_memory(backend: CudaBackend) -> None:
    before = settled_free_bytes(backend)
    fds = published(backend, GIB, GIB, fill=False)
    assert settled_free_bytes(backend) <= before - 2 * GIB + NOISE_NBYTES
    for fd in fds:
        fd.close()
    wait_until_free(backend, before)


# ---- errors


def torch_works() -> bool:
    total = torch.ones(1 << 20, device="cuda").sum().item()
    torch.cuda.synchronize()
    return bool(total == 1 << 20)


@pytest.mark.parametrize("kind", ["memfd", "null", "pipe"])
def test_descriptor_of_something_else_is_refused_without_a_trace(
    backend: CudaBackend, kind: str
) -> None:
    (good,) = published(backend, 2 * MIB)
    if kind == "pipe":
        read_end, write_end = os.pipe()
        os.close(write_end)
    else:
        read_end = os.memfd_create("other") if kind == "memfd" else os.open("/dev/null", os.O_RDWR)
    bad = OwnedFd(read_end)
    with pytest.raises(
        SegmentError, match="descriptor of segment 1: cuMemImportFromShareableHandle: CUDA_ERROR_"
    ):
        backend.map([good, bad], [2 * MIB] * 2)
    assert good.closed
    assert bad.closed
    assert torch_works()


def test_segment_smaller_than_its_index_says_is_refused_without_a_trace(
    backend: CudaBackend,
) -> None:
    fds = published(backend, 4 * MIB, 2 * MIB)
    with pytest.raises(
        SegmentError, match=r"segment 1, 4194304 bytes: cuMemMap: CUDA_ERROR_.*another size"
    ):
        backend.map(fds, [4 * MIB, 4 * MIB])
    assert all(fd.closed for fd in fds)
    assert torch_works()


def test_more_than_the_free_memory_is_refused_without_a_trace(backend: CudaBackend) -> None:
    _, total = backend.free_bytes()
    with pytest.raises(OutOfDeviceMemoryError, match=r"GiB of \d+\.\d GiB are free; held by"):
        backend.create(total // GIB * GIB + GIB)
    assert torch_works()


def test_unknown_gpu_is_refused_with_the_visible_ones(backend: CudaBackend) -> None:
    with pytest.raises(DeviceError, match=f"which sees .*{re.escape(backend.device)} "):
        CudaBackend("GPU-00000000-0000-0000-0000-000000000000")
    assert torch_works()


def test_torch_works_on_after_a_backend_is_gone(gpu_uuid: str) -> None:
    kept = torch.arange(1024, device="cuda")
    other = CudaBackend(gpu_uuid)
    other.create(2 * MIB).close()
    del other
    gc.collect()
    assert torch_works()
    assert kept[-1].item() == 1023


# ---- the machine


def test_machine_describes_its_gpus(backend: CudaBackend) -> None:
    (gpu,) = [gpu for gpu in gpus.list_gpus() if gpu.uuid == backend.device]
    free, total = backend.free_bytes()
    print(
        f"\n{gpu}\n{backend.driver()}\n{backend.persistence_warning()}\n{gpus.holders(backend.device)}"
    )
    assert gpu.name == torch.cuda.get_device_name(0)
    assert 0 < free < total
    # The runtime holds back a part of the memory that NVML counts.
    assert abs(gpu.total_bytes - total) < 2 * GIB
    assert re.fullmatch(r"nvidia \d+\.\d+(\.\d+)?", backend.driver())
    assert backend.granularity() == 2 * MIB


@pytest.mark.parametrize("count", [8, 16])
def test_gibibyte_segments_map_within_milliseconds(backend: CudaBackend, count: int) -> None:
    sizes = [GIB] * count
    fds = published(backend, *sizes, fill=False)
    map_s, tensors_s, unmap_s = [], [], []
    for _ in range(7):
        copies = [fd.dup() for fd in fds]
        started = time.perf_counter()
        mapping = backend.map(copies, sizes)
        map_s.append(time.perf_counter() - started)
        tensors = [mapping.view(n // 64, n % 64 * MIB, MIB) for n in range(count * 64)]
        tensors_s.append(time.perf_counter() - started - map_s[-1])
        started = time.perf_counter()
        del tensors
        mapping.close()
        unmap_s.append(time.perf_counter() - started)
    for fd in fds:
        fd.close()
    for what, times in (
        ("import + map", map_s),
        (f"{64 * count} views", tensors_s),
        ("unmap", unmap_s),
    ):
        low, middle, high = min(times), statistics.median(times), max(times)
        print(
            f"\n{count} x 1 GiB {what}: {low * 1e3:.2f} / {middle * 1e3:.2f} / {high * 1e3:.2f} ms (min/median/max)"
        )
    # Far above all measurements, far below the time for a copy of the bytes.
    assert statistics.median(map_s) < 0.1
