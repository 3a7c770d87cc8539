"""A KV cache over scratch while parked and over memory of its own while awake, on a stateful fake
driver.

That a graph captured over the one computes over the other, and how long it takes, needs a GPU:
bench/sleep.py.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fakes.cuda_driver import MIB, CUresult, FakeDriver, FakeGpu, no_leaks
from weightcached.errors import OutOfDeviceMemoryError, SegmentError
from weightcached.model import kv_scratch
from weightcached.model.kv_scratch import (
    KvPool,
    KvScratch,
    ParkedAllocationError,
    _Allocate,
    _Free,
)
from weightcached.segments.cuda_driver import CudaError, Gpu

UNIT = 2 * MIB
SIZE = 8 * UNIT
DEVICES = DEVICE, OTHER_DEVICE = f"GPU-{FakeGpu().uuid}", f"GPU-{uuid.UUID(int=2)}"


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    gpus = [FakeGpu(uuid=each.partition("-")[2], total_bytes=64 * MIB) for each in DEVICES]
    driver = FakeDriver(*gpus)
    with no_leaks(driver):
        yield driver


def scratch_of(driver: FakeDriver, *, parked: bool, device: str = DEVICE) -> KvScratch:
    """SIZE comes in pieces of three, three and two units."""
    return KvScratch(Gpu(device, driver), parked=parked, scratch_bytes=UNIT, piece_bytes=3 * UNIT)


def free_bytes(driver: FakeDriver) -> int:
    gpu = Gpu(DEVICE, driver)
    try:
        return gpu.memory()[0]
    finally:
        gpu.context.close()


def test_parked_cache_can_be_used_and_costs_its_scratch_alone(driver: FakeDriver) -> None:
    before = free_bytes(driver)
    scratch = scratch_of(driver, parked=True)
    address = scratch.allocate(SIZE - 5)
    assert (before - free_bytes(driver), scratch.nbytes) == (UNIT, SIZE)
    for offset in (0, UNIT, SIZE - 4):
        driver.write(address + offset, b"abcd")
    # One piece of memory, wherever it is looked at.
    assert driver.read(address + 2 * UNIT, 4) == b"abcd"
    scratch.free(address)


def test_awake_cache_has_zeroed_memory_of_its_own_at_the_same_addresses(driver: FakeDriver) -> None:
    before = free_bytes(driver)
    scratch = scratch_of(driver, parked=True)
    address = scratch.allocate(SIZE)
    driver.write(address, b"left over")
    scratch.wake()
    assert before - free_bytes(driver) == SIZE
    assert driver.read(address, SIZE) == bytes(SIZE)
    driver.write(address, b"one")
    driver.write(address + UNIT, b"two")
    assert driver.read(address, 3) == b"one"
    scratch.free(address)
    assert free_bytes(driver) == before


def test_cycles_leave_nothing_behind_and_wake_to_zeros(driver: FakeDriver) -> None:
    scratch = scratch_of(driver, parked=False)
    address = scratch.allocate(SIZE)
    scratch.park()
    live, free = driver.live(), free_bytes(driver)
    for _ in range(5):
        scratch.wake()
        scratch.wake()
        assert driver.read(address, SIZE) == bytes(SIZE)
        driver.write(address, b"x" * SIZE)
        scratch.park()
        scratch.park()
        assert (driver.live(), free_bytes(driver)) == (live, free)
    scratch.free(address)


@pytest.mark.parametrize("started_parked", [True, False])
def test_asleep_nothing_lies_under_the_addresses(driver: FakeDriver, started_parked: bool) -> None:
    before = free_bytes(driver)
    scratch = scratch_of(driver, parked=started_parked)
    address = scratch.allocate(SIZE)
    scratch.wake()
    assert before - free_bytes(driver) == SIZE
    scratch.park()
    assert (before - free_bytes(driver), driver.live().mappings) == (0, 0)
    scratch.wake()
    assert driver.read(address, SIZE) == bytes(SIZE)
    scratch.free(address)


def test_without_room_it_sleeps_on_and_wakes_later(driver: FakeDriver) -> None:
    scratch, other = scratch_of(driver, parked=True), scratch_of(driver, parked=False)
    address = scratch.allocate(SIZE)
    taken = other.allocate(free_bytes(driver))
    with pytest.raises(
        OutOfDeviceMemoryError, match=r"^cannot wake a KV cache of 16777216 bytes: "
    ):
        scratch.wake(wait_s=0)
    assert scratch.parked
    driver.write(address, b"still usable")
    other.free(taken)
    scratch.wake(wait_s=0)
    assert driver.read(address, SIZE) == bytes(SIZE)
    scratch.free(address)


def test_memory_that_comes_a_little_later_is_waited_for(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch, other = scratch_of(driver, parked=True), scratch_of(driver, parked=False)
    address = scratch.allocate(SIZE)
    taken = other.allocate(free_bytes(driver))
    rests: list[float] = []

    def rest(seconds: float) -> None:
        rests.append(seconds)
        if len(rests) == 3:
            other.free(taken)

    monkeypatch.setattr(kv_scratch, "time", SimpleNamespace(monotonic=time.monotonic, sleep=rest))
    scratch.wake(wait_s=120)
    assert len(rests) == 3
    assert not scratch.parked
    scratch.free(address)


@pytest.mark.parametrize(
    "call", ["cuMemCreate", "cuMemUnmap", "cuMemMap", "cuMemSetAccess", "cuMemsetD8"]
)
def test_failed_wake_leaves_it_parked_and_can_be_repeated(driver: FakeDriver, call: str) -> None:
    scratch = scratch_of(driver, parked=True)
    address = scratch.allocate(SIZE)
    live = driver.live()
    driver.fail(call)
    with pytest.raises(CudaError):
        scratch.wake()
    assert (scratch.parked, driver.live()) == (True, live)
    driver.write(address, b"still usable")
    scratch.wake()
    assert driver.read(address, 1) == b"\0"
    scratch.free(address)


@pytest.mark.parametrize("parked", [True, False])
@pytest.mark.parametrize(
    ("call", "nth"),
    [("cuMemAddressReserve", 1), ("cuMemCreate", 1), ("cuMemMap", 1), ("cuMemSetAccess", 1)],
)
def test_failed_allocation_leaves_nothing(
    driver: FakeDriver, call: str, nth: int, parked: bool
) -> None:
    scratch = scratch_of(driver, parked=parked)
    driver.fail(call, nth=nth)
    with pytest.raises(CudaError):
        scratch.allocate(SIZE)
    assert scratch.nbytes == 0
    scratch.free(scratch.allocate(SIZE))


def test_scratch_mapped_in_part_is_unmapped_again(driver: FakeDriver) -> None:
    scratch = scratch_of(driver, parked=True)
    driver.fail("cuMemMap", nth=3)
    with pytest.raises(CudaError):
        scratch.allocate(SIZE)
    assert driver.live().mappings == 0
    scratch.free(scratch.allocate(SIZE))


def test_memory_is_taken_only_after_the_kernels_that_use_it(driver: FakeDriver) -> None:
    scratch = scratch_of(driver, parked=False)
    address = scratch.allocate(SIZE)
    driver.launch(address, SIZE)
    scratch.park()
    driver.launch(address, SIZE)
    scratch.wake()
    driver.launch(address, SIZE)
    scratch.free(address)


def test_second_allocation_is_refused_while_parked_and_told_of_otherwise(
    driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    scratch = scratch_of(driver, parked=True)
    first = scratch.allocate(SIZE)
    with pytest.raises(ParkedAllocationError, match="a second allocation of 4194304 bytes came"):
        scratch.allocate(2 * UNIT)
    scratch.wake()
    second = scratch.allocate(2 * UNIT)
    assert "a second allocation of 4194304 bytes" in caplog.text
    scratch.park()
    scratch.wake()
    assert driver.read(second, 4) == bytes(4)
    scratch.free(first)
    scratch.free(second)


def test_lack_of_memory_for_an_awake_cache_says_what_is_free(driver: FakeDriver) -> None:
    scratch = scratch_of(driver, parked=False)
    driver.fail("cuMemCreate", result=CUresult.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(SegmentError, match=r"67108864 of 67108864 bytes are free$"):
        scratch.allocate(SIZE)


# ---- as torch calls it


class Torch:
    """What torch does with an allocator: it calls two addresses as C functions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pools: weakref.WeakSet[Any] = weakref.WeakSet()
        self.wanted: list[int] = []
        self.got: list[int | None] = []

        class MemPool:
            def __init__(self, allocator: tuple[int, int]) -> None:
                self.allocator = allocator

        @contextlib.contextmanager
        def use_mem_pool(pool: Any) -> Iterator[None]:
            self.pools.add(pool)
            self.allocate = _Allocate(pool.allocator[0])
            self.free = _Free(pool.allocator[1])
            yield

        # For good, otherwise.
        monkeypatch.setattr(kv_scratch, "_callbacks", [])
        monkeypatch.setattr(
            torch._C, "_cuda_customAllocator", lambda *addresses: addresses, raising=False
        )
        monkeypatch.setattr(torch.cuda, "MemPool", MemPool)
        monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)

    def zeros(self, nbytes: int) -> int:
        address: int | None = self.allocate(nbytes, 0, None)
        if address is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return address


def test_torch_gets_its_memory_from_the_scratch(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Torch(monkeypatch)
    pool = KvPool(scratch_of(driver, parked=True))
    with pool.use():
        address = fake.zeros(SIZE)
    driver.write(address, b"abc")
    pool.scratch.wake()
    assert driver.read(address, 3) == bytes(3)
    fake.free(address, SIZE, 0, None)
    assert pool.scratch.nbytes == 0
    pool.close()
    assert not fake.pools, "the pool is gone, the functions that it was made with are not"
    with pytest.raises(SegmentError, match="is closed"), pool.use():
        pass


def test_reason_for_no_memory_is_raised_instead_of_torchs(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = Torch(monkeypatch)
    pool = KvPool(scratch_of(driver, parked=True))
    with pool.use():
        address = fake.zeros(SIZE)
    with pytest.raises(ParkedAllocationError), pool.use():
        fake.zeros(SIZE)
    with pytest.raises(torch.OutOfMemoryError), pool.use():
        raise torch.OutOfMemoryError("of another pool")
    fake.free(address + 1, SIZE, 0, None)
    assert "the KV cache's memory stays until this process ends" in caplog.text
    fake.free(address, SIZE, 0, None)


# ---- lent memory


def lend(driver: FakeDriver, path: Path, *, wanted: int = SIZE) -> tuple[KvScratch, KvScratch]:
    """A cache that is awake and has lent its SIZE bytes to the other, which wants `wanted`."""
    serving, standby = scratch_of(driver, parked=False), scratch_of(driver, parked=True)
    serving.allocate(SIZE)
    standby.allocate(wanted)
    standby.expect(path, lambda: "")
    serving.lend(path)
    return serving, standby


def memory_of(scratch: KvScratch) -> list[int]:
    """Which memory a cache that is awake lies over, piece by piece."""
    return [os.fstat(fd.fileno()).st_ino for each in scratch._ranges.values() for fd in each.memory]


def free_all(*scratches: KvScratch) -> None:
    for scratch in scratches:
        for address in list(scratch._ranges):
            scratch.free(address)


def test_successor_has_the_memory_of_a_cache_that_is_gone_and_lends_it_on(
    driver: FakeDriver, tmp_path: Path
) -> None:
    before = free_bytes(driver)
    serving, standby = lend(driver, tmp_path / "kv-0.sock")
    (old,), (new,) = serving._ranges, standby._ranges
    driver.write(old, b"of the old engine")
    memory = memory_of(serving)
    serving.free(old)
    standby.wake(wait_s=0)
    assert memory_of(standby) == memory
    assert driver.read(new, SIZE) == bytes(SIZE)
    driver.write(new, b"of the new one")

    third = scratch_of(driver, parked=True)
    third.allocate(SIZE)
    third.expect(tmp_path / "kv-0.sock", lambda: "")
    standby.lend(tmp_path / "kv-0.sock")
    standby.park()
    third.wake(wait_s=0)
    assert memory_of(third) == memory
    assert driver.read(next(iter(third._ranges)), SIZE) == bytes(SIZE)
    free_all(standby, third)
    assert free_bytes(driver) == before


def test_only_the_last_that_was_lent_is_held(driver: FakeDriver, tmp_path: Path) -> None:
    path = tmp_path / "kv-0.sock"
    before = free_bytes(driver)
    first, standby = lend(driver, path)
    free_all(first)
    second = scratch_of(driver, parked=False)
    second.allocate(SIZE)
    second.lend(path)
    memory = memory_of(second)
    free_all(second)
    standby.wake(wait_s=0)
    assert memory_of(standby) == memory
    assert before - free_bytes(driver) == SIZE
    free_all(standby)


@pytest.mark.parametrize("room", [True, False])
def test_memory_whose_lender_serves_is_left_to_it(
    driver: FakeDriver, tmp_path: Path, caplog: pytest.LogCaptureFixture, room: bool
) -> None:
    """As in a standby that is woken by vLLM's own call."""
    path = tmp_path / "kv-0.sock"
    serving, standby = lend(driver, path)
    standby.expect(path, lambda: "the lender serves")
    serving.lend(path)
    (old,), (new,) = serving._ranges, standby._ranges
    driver.write(old, b"of the lender")
    other = scratch_of(driver, parked=False)
    if room:
        standby.wake(wait_s=0)
        driver.write(new, b"of the standby")
    else:
        other.allocate(free_bytes(driver))
        with pytest.raises(
            OutOfDeviceMemoryError,
            match=r"lent to it, as the lender serves: 0 of \d+ bytes are free",
        ):
            standby.wake(wait_s=0)
        assert standby.parked
    assert "is not used: the lender serves" in caplog.text
    assert driver.read(old, 13) == b"of the lender"
    free_all(serving, other)
    standby.wake(wait_s=0)
    assert not path.exists(), "what is awake holds nothing that was lent"
    free_all(standby)


@pytest.mark.parametrize("units", [4, 7, 9])
def test_cache_of_another_size_has_the_pieces_that_fit_and_gives_back_the_rest(
    driver: FakeDriver, tmp_path: Path, units: int
) -> None:
    before = free_bytes(driver)
    serving, standby = lend(driver, tmp_path / "kv-0.sock", wanted=units * UNIT)
    memory = memory_of(serving)
    free_all(serving)
    other = scratch_of(driver, parked=False)
    other.allocate(before - (SIZE + 2 * UNIT))
    standby.wake(wait_s=0)
    equal = sum(size == 3 * UNIT for r in standby._ranges.values() for size in r.pieces)
    assert len(set(memory_of(standby)) & set(memory)) == min(2, equal)
    assert driver.read(next(iter(standby._ranges)), units * UNIT) == bytes(units * UNIT)
    free_all(other)
    assert before - free_bytes(driver) == units * UNIT
    free_all(standby)


@pytest.mark.parametrize("how", ["forget", "expect"])
def test_what_was_lent_can_be_given_back(driver: FakeDriver, tmp_path: Path, how: str) -> None:
    path = tmp_path / "kv-0.sock"
    before = free_bytes(driver)
    serving, standby = lend(driver, path)
    free_all(serving)
    if how == "forget":
        standby.forget()
    else:
        standby.expect(path, lambda: "")
    assert before - free_bytes(driver) == UNIT
    standby.forget()
    standby.wake(wait_s=0)
    free_all(standby)


@pytest.mark.parametrize(
    "call", ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess", "cuMemsetD8"]
)
def test_failed_wake_on_lent_memory_lets_it_go_and_can_be_repeated(
    driver: FakeDriver, tmp_path: Path, call: str
) -> None:
    before = free_bytes(driver)
    serving, standby = lend(driver, tmp_path / "kv-0.sock")
    free_all(serving)
    driver.fail(call)
    with pytest.raises(CudaError):
        standby.wake(wait_s=0)
    assert standby.parked
    assert before - free_bytes(driver) == UNIT
    standby.wake(wait_s=0)
    free_all(standby)
    assert free_bytes(driver) == before


def test_cache_asleep_has_nothing_to_lend(driver: FakeDriver, tmp_path: Path) -> None:
    path = tmp_path / "kv-0.sock"
    serving, standby = lend(driver, path)
    standby.expect(path, lambda: "")
    serving.park()
    serving.lend(path)
    before = free_bytes(driver)
    standby.wake(wait_s=0)
    assert before - free_bytes(driver) == SIZE - UNIT
    free_all(serving, standby)


def test_strangers_words_at_the_socket_are_nothing(driver: FakeDriver, tmp_path: Path) -> None:
    path = tmp_path / "kv-0.sock"
    serving, standby = lend(driver, path)
    memory = memory_of(serving)
    for words in (b"hello", b"[1]", b"{}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(str(path))
            sock.send(words)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(str(path))
        free_all(serving)
        standby.wake(wait_s=0)
    assert memory_of(standby) == memory, "what was lent before is still there"
    free_all(standby)


def test_awake_cache_takes_no_memory(driver: FakeDriver, tmp_path: Path) -> None:
    """It would hold it until its next sleep, or longer."""
    path = tmp_path / "kv-0.sock"
    serving, standby = lend(driver, path)
    free_all(serving)
    standby.wake(wait_s=0)
    third = scratch_of(driver, parked=False)
    third.allocate(SIZE)
    standby.expect(path, lambda: "")
    with pytest.raises(FileNotFoundError):
        third.lend(path)
    free_all(standby, third)


def test_memory_of_another_device_is_not_taken(driver: FakeDriver, tmp_path: Path) -> None:
    """After a restart with other devices."""
    before = free_bytes(driver)
    serving = scratch_of(driver, parked=False, device=OTHER_DEVICE)
    standby = scratch_of(driver, parked=True)
    serving.allocate(SIZE)
    standby.allocate(SIZE)
    standby.expect(tmp_path / "kv-0.sock", lambda: "")
    serving.lend(tmp_path / "kv-0.sock")
    memory = memory_of(serving)
    free_all(serving)
    standby.wake(wait_s=0)
    assert memory_of(standby) != memory
    assert before - free_bytes(driver) == SIZE, "the fake counts all devices together"
    free_all(standby)
