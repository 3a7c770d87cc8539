"""Real vLLM engines on the CPU, the product's unit, a real user manager: the main job, end to end."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import limits
from tests.engine.conftest import READY_TIMEOUT_S, Engines, Service, run_tree
from tests.fakes.daemon import until

UNIT = "weightcached@{}.service"


@contextlib.contextmanager
def serving(service: Service, device: str, *models: dict[str, Any]) -> Iterator[None]:
    """The models served on one device for the time of the block."""
    service.manifest(*models)
    service.ctl("start", device)
    try:
        yield
    finally:
        service.ctl("stop", device, check=False)
        service.manager.systemctl("reset-failed", UNIT.format(device), check=False)


def entry(name: str, model: Path, *devices: str, **engine: Any) -> dict[str, Any]:
    return {"name": name, "devices": list(devices), "engine": {"model": str(model), **engine}}


def memfds(pid: int) -> int:
    """How many descriptors of a process are segments or indexes."""
    count = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += "memfd:weightcached" in os.readlink(fd)
    return count


@pytest.mark.parametrize(("name", "dtype"), [("untied", "bfloat16"), ("tied", "float32")])
def test_tokens_are_those_of_a_load_from_disk_before_and_after_crash_and_restart(
    service: Service, engines: Engines, models: dict[str, Path], name: str, dtype: str
) -> None:
    model = models[name]
    disk = engines.tokens(model, dtype=dtype)
    assert len(disk) == 4
    assert all(len(tokens) == 32 for tokens in disk)
    assert len({tuple(tokens) for tokens in disk}) == 4, (
        "prompts that decode alike would hide wrong weights"
    )
    tied = engines.ask(call="tied_objects")["result"]
    manager_before = memfds(service.manager.pid)
    no_fallback = {"fallback": False}
    with serving(service, "cpu0", entry(name, model, "cpu0", dtype=dtype)):
        engines.log()
        assert engines.tokens(model, "ipc_cache", loader=no_fallback, dtype=dtype) == disk
        assert engines.ask(call="tied_objects")["result"] == tied
        assert engines.ask(call="mapped_bytes")["result"] > 0
        (cache,) = service.caches("cpu0")
        assert (cache["source"], cache["generation"], cache["state"]) == ("loaded", 1, "ready")
        assert [e["pid"] for e in cache["engines"]] == [engines.process.pid]

        service.kill("cpu0")
        assert engines.ask(again=True)["tokens"] == disk, (
            "the engine goes on while its daemon is gone"
        )
        rejoined(service, engines)
        assert engines.tokens(model, "ipc_cache", loader=no_fallback, dtype=dtype) == disk
        (cache,) = service.caches("cpu0")
        assert (cache["source"], cache["generation"]) == ("adopted", 1)

        service.ctl("restart", "cpu0")
        assert engines.tokens(model, "ipc_cache", loader=no_fallback, dtype=dtype) == disk
        assert service.caches("cpu0")[0]["source"] == "adopted"
        assert service.ctl("verify").returncode == 0
        engines.ask(close=True)
        daemon, held = service.pid("cpu0"), cache["segments"] + 1
        until(lambda: memfds(daemon) == held, "nothing but what is served is open")
        until(
            lambda: memfds(service.manager.pid) == manager_before + held, "the manager has the same"
        )
    until(lambda: memfds(service.manager.pid) == manager_before, "stop frees the segments")
    assert not Path(f"/proc/{daemon}").exists()


def rejoined(service: Service, engines: Engines) -> None:
    """Wait until the running engine has its lease with the new daemon."""
    until(
        lambda: [e["pid"] for e in service.caches("cpu0")[0]["engines"]] == [engines.process.pid],
        "the engine has rejoined the restarted daemon",
        bound_s=READY_TIMEOUT_S,
    )


def test_engine_on_a_fine_tune_of_the_cached_model_loads_its_own_weights(
    service: Service, engines: Engines, models: dict[str, Path]
) -> None:
    tuned = engines.tokens(models["tuned"])
    with serving(service, "cpu0", entry("base", models["untied"], "cpu0")):
        engines.log()
        assert engines.tokens(models["tuned"], "ipc_cache") == tuned
        (line,) = [line for line in engines.plugin_log() if line.startswith("loading from disk")]
        assert line.startswith(
            "loading from disk (auto): base/target is cached with another key: checkpoint is "
        )
        refused = engines.ask(
            engine={
                "model": str(models["tuned"]),
                "load_format": "ipc_cache",
                "model_loader_extra_config": {"fallback": False},
            }
        )
        assert (
            "CacheConfigMismatchError" in refused["error"]
            or "another key: checkpoint" in refused["error"]
        )


def test_another_dtype_is_named_and_loads_from_disk(
    service: Service, engines: Engines, models: dict[str, Path]
) -> None:
    disk = engines.tokens(models["untied"], dtype="float32")
    with serving(service, "cpu0", entry("base", models["untied"], "cpu0")):
        engines.log()
        assert engines.tokens(models["untied"], "ipc_cache", dtype="float32") == disk
        (line,) = [line for line in engines.plugin_log() if line.startswith("loading from disk")]
        assert "dtype is torch.bfloat16, asked torch.float32" in line
        counters = service.counters("cpu0")
        assert (counters.fallbacks, counters.mismatches["dtype"]) == ({"key-mismatch": 1}, 1)


def test_without_a_daemon_one_line_says_so_and_the_model_loads_from_disk(
    service: Service, engines: Engines, models: dict[str, Path]
) -> None:
    disk = engines.tokens(models["untied"])
    engines.log()
    assert engines.tokens(models["untied"], "ipc_cache") == disk
    socket = service.manager.runtime_dir / "weightcached/cpu0.sock"
    assert engines.plugin_log() == [
        f"loading from disk (auto): no weightcached daemon listens on {socket}: "
        "systemctl --user start weightcached@cpu0.service"
    ]


def test_copy_mode_owns_its_weights_and_reload_brings_the_cache_back(
    service: Service, engines: Engines, models: dict[str, Path]
) -> None:
    disk = engines.tokens(models["untied"])
    with serving(service, "cpu0", entry("m", models["untied"], "cpu0")):
        assert (
            engines.tokens(
                models["untied"], "ipc_cache", loader={"mode": "copy", "fallback": False}
            )
            == disk
        )
        assert engines.ask(call="mapped_bytes")["result"] == 0
        (cache,) = service.caches("cpu0")
        assert (cache["state"], cache["bytes"], cache["engines"]) == ("released", 0, [])
        engines.log()
        assert engines.tokens(models["untied"], "ipc_cache") == disk
        assert engines.plugin_log() == [
            "loading from disk (auto): m/target was dropped, or released to an engine in copy mode; "
            "'weightcachectl reload' brings it back"
        ]
        service.ctl("reload", "cpu0")
        assert engines.tokens(models["untied"], "ipc_cache", loader={"fallback": False}) == disk


def test_load_weights_copies_in_place_into_a_built_model(
    service: Service, engines: Engines, models: dict[str, Path]
) -> None:
    with serving(service, "cpu0", entry("m", models["untied"], "cpu0")):
        engines.tokens(models["untied"], "ipc_cache", loader={"fallback": False})
        result = engines.ask(call="reload_in_place")["result"]
    assert result == {"names_equal": True, "bytes_equal": True, "in_place": True}


def test_reload_after_a_change_on_disk_serves_the_new_weights(
    service: Service, engines: Engines, models: dict[str, Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in models["untied"].iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    tuned = engines.tokens(models["tuned"])
    with serving(service, "cpu0", entry("m", model, "cpu0")):
        for file in models["tuned"].glob("*.safetensors"):
            times = os.stat(model / file.name)
            (model / file.name).write_bytes(file.read_bytes())
            os.utime(model / file.name, ns=(times.st_atime_ns, times.st_mtime_ns))
        engines.log()
        assert engines.tokens(model, "ipc_cache") == tuned, "never the replaced weights"
        assert "checkpoint" in engines.plugin_log()[0]
        assert "loaded, generation 2" in service.ctl("reload", "cpu0").stdout
        assert engines.tokens(model, "ipc_cache", loader={"fallback": False}) == tuned
        assert service.caches("cpu0")[0]["generation"] == 2


def test_manifest_faults_at_reload_leave_the_model_served(
    service: Service, engines: Engines, models: dict[str, Path], tmp_path: Path
) -> None:
    disk = engines.tokens(models["untied"])
    with serving(service, "cpu0", entry("m", models["untied"], "cpu0")):
        service.manifest(entry("m", tmp_path / "nowhere", "cpu0"))
        failed = service.ctl("reload", "cpu0", check=False)
        assert failed.returncode != 0
        assert str(tmp_path / "nowhere") in failed.stdout + failed.stderr
        service.manifest(entry("m", models["untied"], "cpu0", no_such_argument=1))
        failed = service.ctl("reload", "cpu0", check=False)
        assert failed.returncode == 1
        assert "engine argument 'no_such_argument'" in failed.stdout + failed.stderr
        service.manifest(entry("m", models["untied"], "cpu0", quantization="bitsandbytes"))
        failed = service.ctl("reload", "cpu0", check=False)
        assert failed.returncode == 1
        refused = "vLLM refuses the engine arguments: "
        assert refused in failed.stdout + failed.stderr
        assert "Unknown quantization method: bitsandbytes" in failed.stdout + failed.stderr
        assert engines.tokens(models["untied"], "ipc_cache", loader={"fallback": False}) == disk


@pytest.mark.timed
def test_truncated_checkpoint_is_refused_before_vllm_is_imported(
    service: Service, models: dict[str, Path], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in models["untied"].iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    shard = sorted(model.glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size - 100)
    service.manifest(entry("m", model, "cpu0"))
    began = time.monotonic()
    failed = service.ctl("start", "cpu0", check=False)
    took_s = time.monotonic() - began
    service.manager.systemctl("reset-failed", UNIT.format("cpu0"), check=False)
    assert failed.returncode != 0
    assert shard.name in failed.stdout + failed.stderr
    limits.hold("the start fails", took_s, 10)


def test_two_tensor_parallel_ranks_map_what_two_solo_loaders_made(
    service: Service, models: dict[str, Path]
) -> None:
    engine = {"tensor_parallel_size": 2, "enforce_eager": True, "max_model_len": 256}
    disk, _ = generate(service, models["untied"], "auto", engine)
    service.manifest(entry("m", models["untied"], "cpu0", "cpu1", tensor_parallel_size=2))
    try:
        service.ctl("start", "cpu0", "cpu1")
        extra = {"model_loader_extra_config": {"fallback": False}}
        attached, log = generate(service, models["untied"], "ipc_cache", engine | extra)
    finally:
        service.ctl("stop", "cpu0", "cpu1", check=False)
    assert attached == disk
    assert log.count("attached m/target generation 1") == 2


def generate(
    service: Service, model: Path, load_format: str, engine: dict[str, Any]
) -> tuple[Any, str]:
    """One engine with its own processes, as `vllm serve` would have them: (tokens, log)."""
    command = [sys.executable, "-m", "tests.engine.forking", "bench/generate.py", str(model)]
    done = run_tree(
        [*command, "--load-format", load_format, "--engine", json.dumps(engine)],
        # One core for each rank: left alone, vLLM wants a NUMA node for each.
        service.env | {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    # The cause stands above what follows from it.
    said = (done.stdout + done.stderr).splitlines()
    errors = [line for line in said if "Error: " in line]
    assert answers, "\n".join([*errors[:5], done.stderr[-3000:]])
    return json.loads(answers[0])["tokens"], done.stdout + done.stderr


def test_tokens_are_those_of_a_load_from_disk_after_a_start_from_a_snapshot_and_a_rollback(
    service: Service, engines: Engines, models: dict[str, Path], tmp_path: Path
) -> None:
    """A stop frees the weights, as a reboot does; vLLM has no part in bringing them back."""
    model, keys = models["untied"], {"dir": str(tmp_path / "snapshots"), "keep": 2}
    disk = engines.tokens(model, dtype="bfloat16")
    service.manifest(entry("untied", model, "cpu0", dtype="bfloat16"), snapshots=keys)
    try:
        service.ctl("start", "cpu0")
        until_written(service)
        service.ctl("stop", "cpu0")
        service.ctl("start", "cpu0")
        (cache,) = service.caches("cpu0")
        assert (cache["source"], cache["state"]) == ("restored", "ready")
        assert (
            engines.tokens(model, "ipc_cache", loader={"fallback": False}, dtype="bfloat16") == disk
        )
        assert engines.ask(call="mapped_bytes")["result"] > 0
        assert "all digests equal" in service.ctl("verify", "untied/target").stdout
        # Other weights, and back to these: across a stop and a start, too.
        tuned = entry("untied", models["tuned"], "cpu0", dtype="bfloat16")
        service.manifest(tuned, snapshots=keys)
        service.ctl("reload", "cpu0")
        until_written(service)
        service.ctl("rollback", "untied")
        assert "rolled back" in service.ctl("reload", "cpu0").stdout
        service.ctl("stop", "cpu0")
        service.ctl("start", "cpu0")
        (cache,) = service.caches("cpu0")
        assert (cache["source"], cache["state"]) == ("restored", "ready")
        assert cache["rolled_back_at"] is not None
        assert (
            engines.tokens(model, "ipc_cache", loader={"fallback": False}, dtype="bfloat16") == disk
        )
        assert engines.ask(call="mapped_bytes")["result"] > 0
    finally:
        service.ctl("stop", "cpu0", check=False)
        service.manager.systemctl("reset-failed", UNIT.format("cpu0"), check=False)


def until_written(service: Service) -> None:
    until(
        lambda: service.caches("cpu0")[0]["snapshot"] == "written",
        "the snapshot is written",
        bound_s=READY_TIMEOUT_S,
    )
