"""The swap on the workers: all models and ranks have the newer weights afterwards, or none has.

Two ranks are two threads that agree as vLLM's groups do, with real mappings of host memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tests.fakes.models import an_index
from weightcache_loader import swap
from weightcached.checkpoint.identity import FileRecord
from weightcached.errors import (
    CacheConfigMismatchError,
    SegmentError,
    WeightcachedError,
    WeightCacheUnavailableError,
)
from weightcached.index.tensors import ModulePlan, TensorIndex
from weightcached.model.mapped import MappedModel
from weightcached.segments.host import HostBackend
from weightcached.vllm_compat import worker as vllm_worker
from weightcached.wire.messages import Ready

SIZE = 1 << 16


class Lease:
    def __init__(self) -> None:
        self.closed = False

    def park(self, parked: bool) -> None: ...

    def close(self) -> None:
        self.closed = True


class Attachment:
    def __init__(self, index: TensorIndex, content: int) -> None:
        segment = HostBackend().create(SIZE)
        segment.tensor().fill_(content)
        self.fds = [segment.publish()]
        self.tensor_index = index
        self.ready = Ready(
            cache=f"tiny/{index.role}", generation=index.generation, nbytes=SIZE, segment_nbytes=[SIZE],
            index_digest=f"{index.role} {content}",
        )  # fmt: skip
        self.closed = False

    def close(self) -> None:
        self.closed = True
        for fd in self.fds:
            fd.close()


class Rank:
    """A worker with mapped models, each of its generation number's bytes."""

    def __init__(self, *roles: str) -> None:
        self.vllm_config = SimpleNamespace(lora_config=None)
        self.newest: dict[str, Attachment | Exception] = {}
        self.leases: list[Lease] = []
        self.rebound: list[str] = []
        self.reset = 0
        self.execute_model: Callable[..., Any] = lambda: "computed"
        self.views: dict[str, Any] = {}
        self.models = [self._model(role) for role in roles]

    def _model(self, role: str) -> MappedModel:
        first = Attachment(index_of(role, 1), 1)
        mapping = HostBackend().map([fd.dup() for fd in first.fds], [SIZE])
        self.views[role] = mapping.view(0, 0, SIZE)
        return MappedModel(
            cast(Any, first),
            mapping,
            cast(Any, SimpleNamespace(refresh=lambda: None)),
            attach=lambda: self._newest(role),
            attach_newest=lambda wait: self._newest(role),
            lease=self._lease,
            rebind=lambda index: self._rebind(role),
        )

    def _rebind(self, role: str) -> None:
        self.rebound.append(role)

    def _lease(self, *_: Any) -> Lease:
        self.leases.append(Lease())
        return self.leases[-1]

    def _newest(self, role: str) -> Any:
        found = self.newest[role]
        if isinstance(found, Exception):
            raise found
        return found

    def content(self) -> dict[str, set[int]]:
        """All bytes that each model sees."""
        return {role: set(view.tolist()) for role, view in self.views.items()}


def index_of(role: str, number: int, *, sample: str = "", **changed: Any) -> TensorIndex:
    index = an_index()
    files = [FileRecord("model.safetensors", 1, 2, 1000, number, number)]
    checkpoint = msgspec.structs.replace(
        index.key.checkpoint, files=files, sample=sample or f"sample {number}"
    )
    key = msgspec.structs.replace(index.key, checkpoint=checkpoint)
    return msgspec.structs.replace(
        index, role=cast(Any, role), generation=number, key=key, label=f"step-{number}", **changed
    )


class Group:
    """The collectives of as many ranks as take part."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=120)
        self._said: list[Any] = [None] * ranks
        self._local = threading.local()

    def run(self, ranks: list[Rank], call: Callable[[Rank], Any]) -> list[Any]:
        """The result of each rank, or its error."""

        def one(number: int) -> Any:
            self._local.number = number
            try:
                return call(ranks[number])
            except Exception as e:
                return e

        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(one, range(len(ranks))))

    def gather(self, value: Any) -> list[Any]:
        self._said[self._local.number] = value
        self._barrier.wait()
        found = list(self._said)
        self._barrier.wait()
        return found


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    group = Group(2)
    monkeypatch.setattr(swap, "all_ranks", lambda ok, role: all(group.gather(ok)))
    monkeypatch.setattr(swap, "of_all_ranks", group.gather)
    _patch_worker(monkeypatch)
    return group


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "all_ranks", lambda ok, role: ok)
    monkeypatch.setattr(swap, "of_all_ranks", lambda value: [value])
    _patch_worker(monkeypatch)


def _patch_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_worker, "mapped_of", lambda worker: worker.models)
    monkeypatch.setattr(vllm_worker, "check_rebinds", lambda worker: None)

    def reset(worker: Any) -> None:
        worker.reset += 1

    monkeypatch.setattr(vllm_worker, "reset_caches", reset)
    # Threads of one process stand for processes.
    monkeypatch.setattr(swap, "_prepared", None)


@pytest.mark.usefixtures("alone")
def test_target_and_draft_are_swapped_together() -> None:
    rank = Rank("target", "draft")
    for role in rank.views:
        rank.newest[role] = Attachment(index_of(role, 2), 2)
    worker: Any = rank
    assert swap.prepare_swap(worker) == {"newer": True, "reason": "", "code": ""}
    assert rank.content() == {"target": {1}, "draft": {1}}
    said = swap.swap(worker)
    assert said.pop("seconds") > 0
    assert said == {
        "changed": True,
        "generations": {"tiny/target": 2, "tiny/draft": 2},
        "labels": {"tiny/target": "step-2", "tiny/draft": "step-2"},
    }
    assert rank.content() == {"target": {2}, "draft": {2}}
    # The target last: a draft may use its modules.
    assert (rank.rebound, rank.reset) == (["draft", "target"], 1)
    assert [lease.closed for lease in rank.leases] == [True, True, False, False]


@pytest.mark.usefixtures("alone")
def test_newest_weights_are_mapped_already() -> None:
    rank: Any = Rank("target")
    rank.newest["target"] = Attachment(index_of("target", 1), 1)
    assert swap.prepare_swap(rank) == {"newer": False, "reason": "", "code": ""}
    rank.newest["target"] = Attachment(index_of("target", 1), 1)
    assert not swap.swap(rank)["changed"]
    assert (rank.reset, rank.rebound) == (0, [])


@pytest.mark.usefixtures("alone")
def test_prepared_swap_that_does_not_come_gives_its_lease_back() -> None:
    rank: Any = Rank("target")
    rank.newest["target"] = newer = Attachment(index_of("target", 2), 2)
    swap.prepare_swap(rank)
    assert not newer.closed
    swap.prepare_swap(rank, cancel=True)
    assert newer.closed


@pytest.mark.usefixtures("alone")
def test_draft_that_does_not_fit_keeps_the_target_too() -> None:
    rank: Any = Rank("target", "draft")
    rank.newest["target"] = newer = Attachment(index_of("target", 2), 2)
    other = index_of("draft", 2, modules=[ModulePlan(module="m", plan="restore")])
    rank.newest["draft"] = Attachment(other, 2)
    said = swap.prepare_swap(rank)
    assert (said["newer"], said["code"]) == (False, "not-live")
    assert said["reason"] == (
        "generation 2 of tiny/draft cannot take the place of generation 1 in a running engine: post-processing left "
        "different values; restart the engine"
    )
    assert newer.closed
    assert rank.content() == {"target": {1}, "draft": {1}}


@pytest.mark.usefixtures("alone")
def test_engine_that_maps_nothing_says_so() -> None:
    worker: Any = SimpleNamespace(models=[])
    with pytest.raises(CacheConfigMismatchError, match="this engine maps no weights of a cache"):
        swap.swap(worker)


def test_all_ranks_take_the_newer_weights(group: Group) -> None:
    ranks = [Rank("target"), Rank("target")]
    for rank in ranks:
        rank.newest["target"] = Attachment(index_of("target", 2), 2)
    said = group.run(ranks, swap.swap)
    assert [each["changed"] for each in said] == [True, True]
    assert [rank.content() for rank in ranks] == [{"target": {2}}, {"target": {2}}]


def test_rank_that_cannot_attach_keeps_all_on_the_old_weights(group: Group) -> None:
    ranks = [Rank("target"), Rank("target")]
    ranks[0].newest["target"] = newer = Attachment(index_of("target", 2), 2)
    ranks[1].newest["target"] = WeightCacheUnavailableError("no daemon", code="no-daemon")
    said = group.run(ranks, swap.swap)
    assert [e.code for e in said] == ["another-rank", "no-daemon"]
    assert newer.closed
    assert [rank.content() for rank in ranks] == [{"target": {1}}, {"target": {1}}]
    assert [lease.closed for rank in ranks for lease in rank.leases] == [False, False]


def test_ranks_of_different_checkpoints_keep_the_old_weights(group: Group) -> None:
    """One device has the newest weights, the other still those before."""
    ranks = [Rank("target"), Rank("target")]
    ranks[0].newest["target"] = newer = Attachment(index_of("target", 3), 3)
    for other in (index_of("target", 1), index_of("target", 2)):
        ranks[1].newest["target"] = Attachment(other, other.generation)
        said = group.run(ranks, swap.swap)
        assert all("of different checkpoints" in str(e) for e in said), said
        assert newer.closed
        assert [rank.content() for rank in ranks] == [{"target": {1}}, {"target": {1}}]
        ranks[0].newest["target"] = newer = Attachment(index_of("target", 3), 3)


@pytest.mark.parametrize("fault", ["map", "rebind"])
def test_rank_that_cannot_map_brings_all_back_to_the_old_weights(
    group: Group, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    ranks = [Rank("target"), Rank("target")]
    for rank in ranks:
        rank.newest["target"] = Attachment(index_of("target", 2), 2)
    if fault == "map":
        cast(Any, ranks[1].newest["target"]).fds[0].close()
        ranks[1].newest["target"].fds = [HostBackend().create(2 * SIZE).publish()]  # type: ignore[union-attr]
    else:
        rebinds: list[TensorIndex] = []

        def rebind(index: TensorIndex) -> None:
            rebinds.append(index)
            if len(rebinds) == 1:
                raise SegmentError("no memory")

        monkeypatch.setattr(ranks[1].models[0], "_rebind", rebind)
    said = group.run(ranks, swap.swap)
    assert isinstance(said[1], SegmentError)
    assert isinstance(said[0], WeightcachedError)
    assert said[0].code == "another-rank"
    assert [rank.content() for rank in ranks] == [{"target": {1}}, {"target": {1}}]
    assert [rank.models[0].ready.generation for rank in ranks] == [1, 1]
    assert [rank.execute_model() for rank in ranks] == ["computed", "computed"]
    assert [[lease.closed for lease in rank.leases] for rank in ranks] == [[False, True]] * 2
    assert [rank.reset for rank in ranks] == [0, 0]


def test_rank_whose_old_weights_do_not_come_back_computes_nothing_any_more(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [Rank("target"), Rank("target")]
    for rank in ranks:
        rank.newest["target"] = Attachment(index_of("target", 2), 2)

    def rebind(index: TensorIndex) -> None:
        raise SegmentError("no memory")

    monkeypatch.setattr(ranks[1].models[0], "_rebind", rebind)
    group.run(ranks, swap.swap)
    assert ranks[0].execute_model() == "computed"
    with pytest.raises(RuntimeError, match="this engine has lost its weights: no memory"):
        ranks[1].execute_model()
