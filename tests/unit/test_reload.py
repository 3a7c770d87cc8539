"""reload_weights() of engines that map or copy: all models and ranks take the newest, or none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weightcache_loader import reload
from weightcached.errors import CacheConfigMismatchError, WeightCacheUnavailableError
from weightcached.vllm_compat import worker as vllm_worker


class Attachment:
    closed = False

    def close(self) -> None:
        self.closed = True


class Model:
    def __init__(self, newer: Attachment | Exception | None, *, can_change: bool = True) -> None:
        self.newer, self.can_change = newer, can_change
        self.taken: list[Attachment] = []

    def prepare_newest(self) -> Attachment | None:
        if isinstance(self.newer, Exception):
            raise self.newer
        return self.newer

    def take(self, attachment: Attachment) -> None:
        self.taken.append(attachment)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = SimpleNamespace(reset=0, models=[], others_agree=True)

    def reset(worker: Any) -> None:
        made.reset += 1

    monkeypatch.setattr(vllm_worker, "mapped_of", lambda worker: worker.models)
    monkeypatch.setattr(vllm_worker, "reset_caches", reset)
    monkeypatch.setattr(reload, "all_ranks", lambda ok, role: ok and made.others_agree)
    return made


def test_target_and_draft_take_their_newest_generations(worker: Any) -> None:
    target, draft = Attachment(), Attachment()
    worker.models = [Model(target), Model(draft)]
    assert reload.reload_weights(worker)
    assert [model.taken for model in worker.models] == [[target], [draft]]
    assert worker.reset == 1


def test_what_is_newest_already_is_left_alone(
    worker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    newer = Attachment()
    worker.models = [Model(None), Model(newer)]
    assert reload.reload_weights(worker)
    assert [model.taken for model in worker.models] == [[], [newer]]
    worker.models = [Model(None)]
    assert reload.reload_weights(worker)
    assert worker.reset == 1


def test_one_reason_against_keeps_all_as_they_are(worker: Any) -> None:
    newer = Attachment()
    worker.models = [Model(newer), Model(CacheConfigMismatchError("its layers differ"))]
    with pytest.raises(CacheConfigMismatchError, match="its layers differ"):
        reload.reload_weights(worker)
    assert (newer.closed, worker.models[0].taken, worker.reset) == (True, [], 0)


def test_another_ranks_reason_keeps_this_one_as_it_is(worker: Any) -> None:
    newer = Attachment()
    worker.models, worker.others_agree = [Model(newer)], False
    with pytest.raises(
        WeightCacheUnavailableError, match="another rank of this engine cannot take"
    ):
        reload.reload_weights(worker)
    assert (newer.closed, worker.models[0].taken) == (True, [])


def test_another_generation_in_host_memory_is_read_from_disk(worker: Any) -> None:
    newer = Attachment()
    worker.models = [Model(newer, can_change=False)]
    assert not reload.reload_weights(worker)
    assert (newer.closed, worker.models[0].taken) == (True, [])
