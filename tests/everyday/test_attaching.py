"""What an engine is told while a daemon loads, and how a loader gets its environment: real daemons, fake loaders."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from tests.fakes.checkpoints import key_of, with_checkpoint, write_checkpoint
from tests.fakes.daemon import DaemonProcess, model, until
from weightcached.checkpoint.identity import sample_digest
from weightcached.index.key import WeightCacheKey
from weightcached.wire.messages import Attach, Loading, Mismatch, NeedDigest

Launcher = Callable[..., DaemonProcess]


def key_for(checkpoint: Path) -> WeightCacheKey:
    """As an engine makes it: without any digest."""
    return with_checkpoint(key_of({"model": str(checkpoint)}), sample="")


def loading(make_daemon: Launcher, checkpoint: Path, gate: Path) -> DaemonProcess:
    """A daemon that loads its first model, whose key it does not know yet."""
    queued = write_checkpoint(checkpoint.parent / "queued", nbytes=1 << 20)
    daemon = make_daemon(
        [model("tiny", checkpoint, x_gate_before_key=str(gate)), model("queued", queued)]
    ).launch()
    until(lambda: daemon.answer() is not None, "it listens")
    daemon.until(lambda status: len(status.caches) == 2, "it has read its manifest")
    return daemon


def test_engine_of_a_model_in_no_manifest_is_told_while_another_loads(
    make_daemon: Launcher, checkpoint: Path, gate: Path
) -> None:
    daemon = loading(make_daemon, checkpoint, gate)
    other = write_checkpoint(checkpoint.parent / "other", nbytes=2 << 20)
    with daemon.client() as engine:
        answer = engine.ask(Attach(key=key_for(other)))
        while isinstance(answer, Loading):
            answer = engine.receive()
    assert isinstance(answer, Mismatch)
    (field,) = answer.fields
    assert field.field == "checkpoint"
    assert field.asked == str(other)
    assert str(checkpoint.parent) in field.cached
    with gate.open("w") as file:
        file.write("go")


def test_engine_of_other_weights_in_files_of_the_same_size_is_told_by_a_sample(
    make_daemon: Launcher, checkpoint: Path, gate: Path
) -> None:
    daemon = loading(make_daemon, checkpoint, gate)
    tuned = write_checkpoint(checkpoint.parent / "tuned", seed=2)
    with daemon.client() as engine:
        answer = engine.ask(Attach(key=key_for(tuned)))
        while isinstance(answer, Loading):
            answer = engine.receive()
        assert isinstance(answer, NeedDigest)
        assert answer.rung == "sample"
        key = key_for(tuned)
        sampled = with_checkpoint(key, sample=sample_digest(key.checkpoint))
        assert isinstance(engine.ask(Attach(key=sampled)), Mismatch)
    with gate.open("w") as file:
        file.write("go")


def test_engine_of_a_model_that_is_being_loaded_waits_for_it(
    make_daemon: Launcher, checkpoint: Path, gate: Path
) -> None:
    daemon = loading(make_daemon, checkpoint, gate)
    with daemon.client() as engine:
        seen = [engine.ask(Attach(key=key_for(checkpoint)))]
        # Long enough for the daemon to have looked at what it loads.
        seen += [engine.receive() for _ in range(3)]
        assert {type(answer) for answer in seen} == {Loading}
        with gate.open("w") as file:
            file.write("go")
        while isinstance(answer := engine.receive(), Loading):
            pass
        engine.take(answer).close()  # type: ignore[arg-type]


def test_environment_of_a_model_reaches_its_loader(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    seen = short_tmp / "environment"
    daemon = make_daemon([model("tiny", checkpoint) | {"env": {"VLLM_USE_DEEP_GEMM": "0"}}])
    daemon.loader_command = (
        f"sh -c {shlex.quote(f'env > {seen}.part && mv {seen}.part {seen}; exit 1')}"
    )
    daemon.env = {"VLLM_USE_DEEP_GEMM": "1", "VLLM_MLA_DISABLE": "1"}
    daemon.launch()
    until(seen.exists, "the loader runs")
    lines = seen.read_text().splitlines()
    assert "VLLM_USE_DEEP_GEMM=0" in lines
    assert "VLLM_MLA_DISABLE=1" in lines
