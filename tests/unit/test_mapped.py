"""Mappings of a model that sleeps, on a fake driver.

They are taken away when asked, put back at the same addresses, and given to a newer generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import nn

from tests.fakes.cuda_driver import MIB, FakeDriver, FakeGpu, FakeTensor, IllegalAddress, no_leaks
from tests.fakes.models import an_index
from weightcached.errors import (
    CacheConfigMismatchError,
    SegmentError,
    WeightCacheUnavailableError,
)
from weightcached.index.tensors import ModulePlan, SegmentRecord, TensorIndex
from weightcached.model import bind, mapped
from weightcached.model.mapped import MappedModel, State
from weightcached.segments.cuda import CudaBackend
from weightcached.segments.host import HostBackend
from weightcached.system.fds import OwnedFd, close_all
from weightcached.wire.messages import Ready

SIZE = 2 * MIB


class Attachment:
    """A generation whose segments hold its number."""

    def __init__(self, backend: CudaBackend, index: TensorIndex) -> None:
        self.tensor_index = index
        self.ready = Ready(
            cache="tiny/target",
            generation=index.generation,
            nbytes=SIZE,
            segment_nbytes=[SIZE],
            index_digest=f"digest {index.generation}",
        )
        self.fds: list[OwnedFd] = []
        for _ in index.segments:
            segment = backend.create(SIZE)
            tensor: Any = segment.tensor()
            tensor.write(b"generation %d" % index.generation)
            del tensor
            self.fds.append(segment.publish())
        self.closed = False

    def close(self) -> None:
        close_all(self.fds)
        self.closed = True


class Lease:
    def __init__(self, attachment: mapped.MappedAttachment, on_unmap: Callable[[], bool]) -> None:
        self.generation, self.on_unmap = attachment.ready.generation, on_unmap
        self.said: list[bool] = []
        self.closed = False

    def park(self, parked: bool) -> None:
        self.said.append(parked)

    def close(self) -> None:
        self.closed = True


class Storages:
    refreshed = 0

    def refresh(self) -> None:
        self.refreshed += 1


class World:
    """One mapped model, the daemon's next generation, and all leases so far."""

    def __init__(self, driver: FakeDriver) -> None:
        self.backend = CudaBackend(
            f"GPU-{FakeGpu().uuid}", driver, as_tensor=lambda array: FakeTensor(driver, array)
        )
        self.index = msgspec.structs.replace(
            an_index(), skeleton="s", segments=[SegmentRecord(SIZE, False)], storages=[], tensors=[]
        )
        self.next: Attachment | Exception | None = None
        self.leases: list[Lease] = []
        self.storages = Storages()
        first = self.generation(1)
        mapping = self.backend.map([fd.dup() for fd in first.fds], [SIZE])
        self.tensor: Any = mapping.view(0, 0, SIZE)
        self.model = MappedModel(
            first,
            mapping,
            cast(Any, self.storages),
            attach=self._attach,
            attach_newest=self._attach_newest,
            lease=self._lease,
        )
        self.waited: list[bool] = []

    def generation(self, number: int, **changed: Any) -> Attachment:
        return Attachment(
            self.backend, msgspec.structs.replace(self.index, generation=number, **changed)
        )

    def bytes(self) -> bytes:
        return bytes(self.tensor.read(0, 12))

    def _attach(self) -> mapped.MappedAttachment:
        if isinstance(self.next, Exception):
            raise self.next
        assert self.next is not None
        return self.next

    def _attach_newest(self, wait: bool) -> mapped.MappedAttachment:
        self.waited.append(wait)
        return self._attach()

    def _lease(self, attachment: mapped.MappedAttachment, on_unmap: Callable[[], bool]) -> Lease:
        self.leases.append(Lease(attachment, on_unmap))
        return self.leases[-1]


@pytest.fixture
def world() -> Iterator[World]:
    driver = FakeDriver(FakeGpu())
    with no_leaks(driver):
        world = World(driver)
        yield world
        if isinstance(world.next, Attachment):
            world.next.close()
        world.model.close()
        del world.tensor
        world.backend._gpu.context.close()


def test_engine_that_sleeps_and_is_not_asked_wakes_without_asking(world: World) -> None:
    world.next = WeightCacheUnavailableError("nobody is to be asked")
    world.model.park()
    world.model.prepare_wake()
    world.model.wake()
    assert (world.bytes(), world.model.state) == (b"generation 1", State.AWAKE)
    assert (world.leases[0].said, world.storages.refreshed) == ([True, False], 0)


def test_awake_engine_keeps_its_mapping(world: World) -> None:
    assert not world.leases[0].on_unmap()
    assert world.bytes() == b"generation 1"


def test_parked_engine_unmaps_and_is_mapped_again_at_the_same_addresses(world: World) -> None:
    world.model.park()
    assert world.leases[0].on_unmap()
    assert not world.leases[0].on_unmap()
    with pytest.raises(IllegalAddress):
        world.bytes()
    world.next = world.generation(1)
    world.model.prepare_wake()
    assert world.bytes() == b"generation 1"
    world.model.wake()
    assert (world.model.state, world.storages.refreshed) == (State.AWAKE, 1)
    assert [lease.closed for lease in world.leases] == [True, False]


def test_newest_generation_is_taken_if_the_old_one_is_gone(world: World) -> None:
    world.model.park()
    world.leases[0].on_unmap()
    world.next = world.generation(7)
    world.model.prepare_wake()
    world.model.wake()
    assert (world.bytes(), world.model.ready.generation) == (b"generation 7", 7)
    assert world.leases[1].generation == 7


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "skeleton": (
        {"skeleton": "other"},
        "its layers differ in a name, shape, dtype or kernel class",
    ),
    "packing": ({"segments": [SegmentRecord(SIZE, True)]}, "its tensors are packed differently"),
    "values": (
        {"modules": [ModulePlan(module="m", plan="restore")]},
        "post-processing left different values",
    ),
    "leftovers": ({"leftovers": ["x"]}, "post-processing left different values"),
    "stage": ({"stage": "processed"}, "it is processed target, not loaded target"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_generation_that_does_not_fit_is_refused_and_the_engine_sleeps_on(
    world: World, name: str
) -> None:
    changed, text = OTHERS[name]
    world.model.park()
    world.leases[0].on_unmap()
    world.next = other = world.generation(2, **changed)
    with pytest.raises(CacheConfigMismatchError, match=f"{text}; restart the engine$"):
        world.model.prepare_wake()
    assert other.closed
    assert world.model.state is State.UNMAPPED
    world.next = world.generation(3)
    world.model.prepare_wake()
    world.model.wake()
    assert world.bytes() == b"generation 3"


def test_wake_without_a_daemon_can_be_tried_again(world: World) -> None:
    world.model.park()
    world.leases[0].on_unmap()
    world.next = WeightCacheUnavailableError("no daemon")
    with pytest.raises(WeightCacheUnavailableError):
        world.model.prepare_wake()
    world.model.give_up_wake()
    assert world.model.state is State.UNMAPPED
    world.next = world.generation(1)
    world.model.prepare_wake()
    world.model.wake()
    assert world.bytes() == b"generation 1"


def test_engine_that_wakes_just_now_does_not_unmap(world: World) -> None:
    world.model.park()
    world.model.prepare_wake()
    assert not world.leases[0].on_unmap()
    world.model.give_up_wake()
    assert world.leases[0].on_unmap()


def test_wake_given_up_after_attaching_again_is_parked_on_the_new_lease(world: World) -> None:
    world.model.park()
    world.leases[0].on_unmap()
    world.next = world.generation(1)
    world.model.prepare_wake()
    world.model.give_up_wake()
    assert (world.model.state, world.leases[1].said) == (State.PARKED, [True])
    assert world.leases[1].on_unmap()


def test_awake_engine_takes_the_newest_generation(world: World) -> None:
    world.next = world.generation(4)
    newer = world.model.prepare_newest(wait=False)
    assert (newer, world.waited) == (world.next, [False])
    assert world.bytes() == b"generation 1"
    world.model.take(world.next)
    assert (world.bytes(), world.storages.refreshed) == (b"generation 4", 1)
    # Until every rank has the newer one the daemon sees this engine on both.
    assert [lease.closed for lease in world.leases] == [False, False]
    world.model.settle()
    assert [lease.closed for lease in world.leases] == [True, False]
    assert world.model.ready.generation == 4


def test_generation_before_comes_back_if_another_rank_cannot_take_the_newer_one(
    world: World,
) -> None:
    world.next = taken = world.generation(4)
    world.model.take(world.next)
    world.model.go_back()
    assert (world.bytes(), world.model.ready.generation) == (b"generation 1", 1)
    assert [lease.closed for lease in world.leases] == [False, True]
    assert all(fd.closed for fd in taken.fds)
    assert world.storages.refreshed == 2
    world.model.go_back()
    world.next = world.generation(5)
    world.model.take(world.next)
    world.model.settle()
    assert world.bytes() == b"generation 5"


@pytest.mark.parametrize("call", ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"])
def test_generation_before_comes_back_after_a_mapping_that_failed(world: World, call: str) -> None:
    world.next = taken = world.generation(4)
    driver: Any = world.backend._gpu._driver.api
    driver.fail(call)
    with pytest.raises(SegmentError, match=call):
        world.model.take(world.next)
    world.model.go_back()
    assert (world.bytes(), world.model.ready.generation) == (b"generation 1", 1)
    assert all(fd.closed for fd in taken.fds)


def test_parked_engine_takes_the_newest_generation_and_wakes_with_it(world: World) -> None:
    world.model.park()
    world.next = world.generation(4)
    world.model.take(world.next)
    # Its private copies are not there before it wakes.
    assert (world.bytes(), world.storages.refreshed) == (b"generation 4", 0)
    # The daemon wants the room of the generation that is not mapped any more.
    assert not world.leases[0].on_unmap()
    world.model.settle()
    assert (world.model.state, world.leases[1].said) == (State.PARKED, [True])
    assert world.leases[1].on_unmap()
    world.next = world.generation(5)
    world.model.prepare_wake()
    world.model.wake()
    assert (world.bytes(), world.storages.refreshed) == (b"generation 5", 1)
    # Not by its own checkpoint, which is another one by now.
    assert world.waited == [True]


def test_unmapped_engine_takes_the_newest_generation_or_stays_unmapped(world: World) -> None:
    world.model.park()
    world.leases[0].on_unmap()
    world.next = world.generation(4)
    world.model.take(world.next)
    world.model.go_back()
    assert world.model.state is State.UNMAPPED
    world.next = world.generation(5)
    world.model.take(world.next)
    world.model.settle()
    assert (world.bytes(), world.model.state) == (b"generation 5", State.PARKED)


def test_failed_wake_leaves_the_engine_unmapped(world: World) -> None:
    world.model.park()
    world.leases[0].on_unmap()
    driver: Any = world.backend._gpu._driver.api
    world.next = world.generation(4)
    driver.fail("cuMemMap")
    with pytest.raises(SegmentError):
        world.model.prepare_wake()
    assert (world.model.state, world.leases[1].closed) == (State.UNMAPPED, True)
    world.next = world.generation(5)
    world.model.prepare_wake()
    world.model.wake()
    assert world.bytes() == b"generation 5"


def test_newest_generation_is_mapped_already(world: World) -> None:
    world.next = same = world.generation(1)
    assert world.model.prepare_newest() is None
    assert same.closed


def test_failed_unmapping_keeps_the_mapping(world: World) -> None:
    world.model.park()
    driver: Any = world.backend._gpu._driver.api
    driver.fail("cuCtxSynchronize")
    assert not world.leases[0].on_unmap()
    assert world.model.state is State.PARKED
    assert world.bytes() == b"generation 1"


def test_model_in_host_memory_does_not_park_and_takes_the_newest_generation() -> None:
    backend = HostBackend()
    leases: list[Lease] = []
    bound: list[int] = []

    def lease(held: mapped.MappedAttachment, on_unmap: Callable[[], bool]) -> Lease:
        leases.append(Lease(held, on_unmap))
        return leases[-1]

    def generation(number: int) -> Any:
        segment = backend.create(SIZE)
        segment.tensor()[0] = number
        index = msgspec.structs.replace(an_index(), generation=number)
        ready = Ready(
            cache="tiny/target",
            generation=number,
            nbytes=SIZE,
            segment_nbytes=[SIZE],
            index_digest=str(number),
        )
        return SimpleNamespace(ready=ready, tensor_index=index, fds=[segment.publish()])

    first, second = generation(1), generation(2)
    mapping = backend.map([first.fds[0].dup()], [SIZE])
    view = mapping.view(0, 0, 1)
    model = MappedModel(
        first,
        mapping,
        cast(Any, Storages()),
        attach=lambda: second,
        attach_newest=lambda wait: second,
        lease=lease,
        rebind=lambda index: bound.append(index.generation),
    )
    model.park()
    assert (model.state, leases[0].said, leases[0].on_unmap()) == (State.AWAKE, [], False)
    model.take(second)
    model.rebind()
    model.settle()
    assert (view.tolist(), bound, model.ready.generation) == ([2], [2], 2)
    model.close()
    assert all(fd.closed for fd in [*first.fds, *second.fds])
    assert all(held.closed for held in leases)


def test_lease_goes_with_the_model(world: World) -> None:
    module = nn.Linear(1, 1)
    mapped.keep(module, world.model)
    assert (mapped.of(module), list(mapped.of_process())) == (world.model, [world.model])
    assert mapped.of(nn.Linear(1, 1)) is None
    del module
    assert world.leases[0].closed
    assert list(mapped.of_process()) == []


class Bytes:
    """A mapping of one private segment, and a copy of it."""

    def __init__(self) -> None:
        self.memory = torch.zeros(4096, dtype=torch.uint8)

    def view(self, segment: int, offset_bytes: int, nbytes: int) -> torch.Tensor:
        return self.memory[offset_bytes : offset_bytes + nbytes]

    def private_copy(self, segment: int) -> Any:
        copy = self.memory.clone()
        return SimpleNamespace(view=lambda offset, nbytes: copy[offset : offset + nbytes])


def test_private_copies_are_made_anew_in_place() -> None:
    mapping: Any = Bytes()
    index = an_index(segments=[SegmentRecord(4096, private=True)])
    storages = bind.Storages(index, mapping, torch.device("cpu"), copy=False)
    storage = storages.get(0, on_host=False)
    address = storage.data_ptr()
    mapping.memory.fill_(7)
    assert storage[0] == 0
    storages.refresh()
    assert (storage[0], storage[4095], storage.data_ptr()) == (7, 7, address)
