"""What is wrapped of vLLM's GPU worker, with a worker that has the same names."""

from __future__ import annotations

import contextlib
import fcntl
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

from weightcached.errors import SharedWeightsError
from weightcached.model import mapped
from weightcached.vllm_compat import live
from weightcached.vllm_compat import worker as vllm_worker


class Runner:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.reset: list[str] = []

    def get_model(self) -> nn.Module:
        return self.model

    def reset_lora_state(self) -> None:
        self.reset.append("lora")


def config(**changed: Any) -> Any:
    model = SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="weightcached")
    fields = {
        "model_config": model,
        "load_config": SimpleNamespace(load_format="ipc_cache", model_loader_extra_config={}),
        "kv_transfer_config": None,
        "attention_config": SimpleNamespace(hisparse_config=None),
        "compilation_config": SimpleNamespace(static_forward_context={}),
    }
    return SimpleNamespace(**(fields | changed))


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Worker:
        def __init__(self) -> None:
            self.model_runner = Runner(nn.Linear(1, 1))
            self.vllm_config = config()
            self.done: list[Any] = []
            self.error: Exception | None = None

        def sleep(self, level: int = 1) -> None:
            self.done.append(("sleep", level))
            if self.error:
                raise self.error

        def wake_up(self, tags: list[str] | None = None) -> None:
            self.done.append(("wake", tags))

        def compile_or_warm_up_model(self) -> str:
            return "times"

        def execute_model(self, output: Any) -> str:
            return "computed"

        def _maybe_get_memory_pool_context(self, tag: str) -> str:
            return f"vLLM's pool for {tag}"

        def reload_weights(self, *arguments: Any, **named: Any) -> None:
            self.done.append(("reload", arguments, named))

        def update_weights(self, info: Any) -> None:
            self.done.append("update")

        def shutdown(self) -> None:
            self.done.append("shutdown")

    module: Any = ModuleType("vllm.v1.worker.gpu_worker")
    module.Worker = Worker
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_worker", module)
    answers = SimpleNamespace(reload=False)
    for _ in range(2):
        vllm_worker.install(
            lambda worker: answers.reload,
            prepare_swap=lambda worker: {},
            swap=lambda worker: {},
        )
    made = Worker()
    made.answers = answers  # type: ignore[attr-defined]
    return made


@pytest.fixture
def maps(worker: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The worker's model is mapped."""
    model: Any = SimpleNamespace()
    monkeypatch.setattr(mapped, "of", lambda module: model)
    return model


def test_level_2_is_done_as_level_1_where_weights_are_mapped(worker: Any, maps: Any) -> None:
    worker.sleep(2)
    worker.sleep(level=1)
    assert worker.done == [("sleep", 1), ("sleep", 1)]


def test_level_2_is_vllms_own_otherwise(worker: Any) -> None:
    worker.sleep(2)
    assert worker.done == [("sleep", 2)]


def test_memory_that_another_process_took_is_no_failure(worker: Any) -> None:
    worker.error = AssertionError("Memory usage increased after sleeping.")
    worker.sleep()
    worker.error = AssertionError("something else")
    with pytest.raises(AssertionError, match="something else"):
        worker.sleep()


def test_writers_are_refused_by_name_where_weights_are_mapped(worker: Any, maps: Any) -> None:
    with pytest.raises(
        SharedWeightsError, match=r"^update_weights\(\) would write .* use mode 'copy' "
    ):
        worker.update_weights({})
    with pytest.raises(SharedWeightsError, match=r"^reload_weights\(\) with weights of its own "):
        worker.reload_weights(weights_path="/other")
    assert worker.done == []


def test_writers_are_vllms_own_otherwise(worker: Any) -> None:
    worker.update_weights({})
    worker.reload_weights(weights_path="/other")
    assert worker.done == ["update", ("reload", (), {"weights_path": "/other"})]


def test_load_weights_of_a_mapped_model_is_refused_except_for_vllms_own_reload(
    worker: Any, maps: Any
) -> None:
    class Model(nn.Linear):
        def load_weights(self, weights: Any) -> str:
            return "loaded"

    model = worker.model_runner.model = Model(1, 1)
    vllm_worker.refuse_writes(model)
    with pytest.raises(SharedWeightsError, match=r"^load_weights\(\) would write "):
        model.load_weights([])
    worker.done = Appending(lambda: model.load_weights([]))
    worker.reload_weights()
    assert worker.done.seen == ["loaded"]
    with pytest.raises(SharedWeightsError):
        model.load_weights([])


class Appending:
    """Calls a function when something is appended."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.seen: list[Any] = []

    def append(self, what: Any) -> None:
        self.seen.append(self._call())


@pytest.mark.parametrize("arguments", [(), (None, None), (None, None, True)])
def test_reload_takes_the_cache_or_else_the_disk(worker: Any, arguments: tuple[Any, ...]) -> None:
    worker.reload_weights(*arguments)
    assert worker.done == [("reload", arguments, {})]
    worker.answers.reload = True
    worker.reload_weights(*arguments)
    assert len(worker.done) == 1


def test_caches_of_old_weights_are_reset_as_far_as_the_runner_has_them(worker: Any) -> None:
    vllm_worker.reset_caches(worker)
    assert worker.model_runner.reset == ["lora"]


class StaticSinkAttention:
    pass


CONNECTOR = SimpleNamespace(kv_connector="NixlConnector")
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "connector": (
        {"kv_transfer_config": CONNECTOR},
        "the KV connector NixlConnector registers its memory",
    ),
    "hisparse": (
        {"attention_config": SimpleNamespace(hisparse_config=object())},
        "hisparse_config places more than the KV cache there",
    ),
    "sink": (
        {
            "compilation_config": SimpleNamespace(
                static_forward_context={"layers.0": StaticSinkAttention()}
            )
        },
        "layers.0 is StaticSinkAttention, which fills its part of the cache only once",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_cannot_be_parked_is_named_and_left_to_vllms_own_back_end(
    worker: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    changed, reason = OTHERS[name]
    worker.vllm_config = config(**changed)
    assert worker._maybe_get_memory_pool_context("kv_cache") == "vLLM's pool for kv_cache"
    assert f"the KV cache is left to vLLM's own sleep back end: {reason}" in caplog.text
    worker.vllm_config.load_config.model_loader_extra_config = {"start_parked": True}
    with pytest.raises(ValueError, match=f"^this engine cannot start parked: {reason}$"):
        worker._maybe_get_memory_pool_context("kv_cache")


def test_other_tags_and_other_back_ends_are_vllms_own(worker: Any) -> None:
    assert worker._maybe_get_memory_pool_context("weights") == "vLLM's pool for weights"
    worker.vllm_config.model_config.sleep_mode_backend = "cumem"
    assert worker._maybe_get_memory_pool_context("kv_cache") == "vLLM's pool for kv_cache"


def test_engine_that_started_parked_computes_nothing_before_its_first_wake(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = SimpleNamespace(parked=True)
    monkeypatch.setattr(vllm_worker, "_kv_pool", SimpleNamespace(scratch=scratch, close=print))
    assert worker.execute_model(None) == "computed", "the warm-up may use what is over scratch"
    assert worker.compile_or_warm_up_model() == "times"
    with pytest.raises(RuntimeError, match=r"^this engine is parked: wake_up\(\) comes before"):
        worker.execute_model(None)
    worker.wake_up(["weights"])
    with pytest.raises(RuntimeError):
        worker.execute_model(None)
    scratch.parked = False
    worker.wake_up(["kv_cache"])
    assert worker.execute_model(None) == "computed"


@pytest.mark.parametrize("parked", [True, False])
def test_engine_that_lost_its_weights_computes_nothing_after_a_sleep_either(
    worker: Any, monkeypatch: pytest.MonkeyPatch, parked: bool
) -> None:
    scratch = SimpleNamespace(parked=parked)
    monkeypatch.setattr(vllm_worker, "_kv_pool", SimpleNamespace(scratch=scratch))
    worker.compile_or_warm_up_model()
    vllm_worker.refuse_steps(worker, "this engine has lost its weights")
    scratch.parked = False
    worker.sleep()
    worker.wake_up()
    with pytest.raises(RuntimeError, match="lost its weights"):
        worker.execute_model(None)


def test_memory_of_another_engine_is_taken_only_by_the_one_that_has_the_fence(
    worker: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []
    scratch = SimpleNamespace(expect=lambda *arguments: asked.extend(arguments))
    monkeypatch.setattr(vllm_worker, "_kv_pool", SimpleNamespace(scratch=scratch))
    worker.rank = 1
    engine = tmp_path / "chat/2"
    engine.mkdir(parents=True)
    assert getattr(worker, live.EXPECT)(str(engine)) == ""
    path, obstacle = asked
    assert path == engine / "kv-1.sock"
    command = "'weightcachectl engine wake chat'"
    assert command in obstacle(), "no engine of a service, as far as anybody can see"
    with open(tmp_path / "chat/fence", "w") as fence:
        assert command in obstacle()
        fcntl.flock(fence, fcntl.LOCK_EX)
        assert obstacle() == ""


def test_memory_is_kept_while_an_engine_wakes_unless_it_may_have_to_wait_for_a_load(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[str] = []

    @contextlib.contextmanager
    def memory_kept() -> Iterator[None]:
        kept.append("kept")
        yield

    context = vllm_worker._skip_if_unmapped(memory_kept)
    models = [SimpleNamespace(state=mapped.State.PARKED)]
    monkeypatch.setattr(mapped, "of_process", lambda: iter(models))
    with context():
        pass
    assert kept == ["kept"]
    models.append(SimpleNamespace(state=mapped.State.UNMAPPED))
    with context():
        pass
    assert kept == ["kept"]


def test_device_is_kept_as_it_is_from_start_to_first_request_and_while_it_sleeps_or_wakes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    class Base:
        def sleep(self, level: int = 1) -> None:
            seen.append("sleeps")

        def wake_up(self, tags: list[str] | None = None) -> None:
            seen.append("wakes")

    class CPUWorker(Base):
        def compile_or_warm_up_model(self) -> None:
            raise RuntimeError("out of memory")

    @contextlib.contextmanager
    def kept() -> Iterator[None]:
        seen.append("kept")
        yield
        seen.append("free")

    for name, worker in (("gpu_worker", Base), ("cpu_worker", CPUWorker)):
        module: Any = ModuleType(f"vllm.v1.worker.{name}")
        setattr(module, {"gpu_worker": "Worker"}.get(name, "CPUWorker"), worker)
        monkeypatch.setitem(sys.modules, f"vllm.v1.worker.{name}", module)
    vllm_worker.install(
        lambda worker: False,
        on_started=lambda: seen.append("started"),
        memory_kept=kept,
        prepare_swap=lambda worker: {},
        swap=lambda worker: {"by": type(worker).__name__},
    )
    made = CPUWorker()
    # Whatever its end is: a start that fails must not keep the daemon from loading.
    with pytest.raises(RuntimeError, match="out of memory"):
        made.compile_or_warm_up_model()
    made.sleep()
    made.wake_up()
    assert seen == ["started", "kept", "sleeps", "free", "kept", "wakes", "free"]
    # As collective_rpc() calls it, on the CPU's worker too.
    assert made.weightcached_swap() == {"by": "CPUWorker"}  # type: ignore[attr-defined]


# ---- lent memory


def test_memory_goes_to_the_worker_of_the_same_rank_and_errors_are_answers(
    worker: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM's executor cannot take errors of several workers at once."""
    asked: list[Any] = []

    def lend(path: Path) -> None:
        asked.append(("lend", path))
        raise FileNotFoundError(2, "nobody listens", str(path))

    scratch = SimpleNamespace(
        expect=lambda path, obstacle: asked.append(("expect", path)),
        lend=lend,
        forget=lambda: asked.append("forget"),
    )
    monkeypatch.setattr(vllm_worker, "_kv_pool", SimpleNamespace(scratch=scratch))
    worker.rank = 3
    path = tmp_path / "kv-3.sock"
    assert getattr(worker, live.EXPECT)(str(tmp_path)) == ""
    assert getattr(worker, live.LEND)(str(tmp_path)).startswith("FileNotFoundError: ")
    assert getattr(worker, live.FORGET)() == ""
    assert asked == [("expect", path), ("lend", path), "forget"]


def test_kv_cache_that_is_left_to_vllm_is_not_lent(worker: Any, tmp_path: Path) -> None:
    worker.rank = 0
    said = [getattr(worker, name)(str(tmp_path)) for name in (live.EXPECT, live.LEND)]
    assert [*said, getattr(worker, live.FORGET)()] == ["", "", ""]
    assert list(tmp_path.iterdir()) == []
