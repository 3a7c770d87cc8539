"""A loader fails in each way, at start and at reload: the error names it, served caches stay."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.checkpoints import key_of, write_checkpoint
from tests.fakes.daemon import (
    LOADER,
    DaemonProcess,
    has_ended,
    loaders_of,
    model,
    until,
    write_manifest,
)
from weightcached.daemon.main import MAX_RELOADS
from weightcached.wire.messages import CacheOutcome, Progress, Refused, Reload, ReloadReply

Launcher = Callable[..., DaemonProcess]

PROTOCOL = (
    "loader of {cache} broke the protocol: {what}; it was killed. "
    "Check that {python} has the daemon's version of weightcached"
)
# Longer than a loader needs to start on a busy machine.
STALL_TIMEOUT_S = 15
# Fault of the loader child, and the daemon's error.
FAULTS: dict[str, str] = {
    "sigkill-in-packing": "loader of {cache} died of SIGKILL; if the kernel ran out of memory, "
    "'journalctl --user -k' or dmesg says so",
    "sigsegv-before-key": "loader of {cache} died of SIGSEGV: loading {cache} generation {generation}",
    "exception-in-packing": "loader of {cache} ended with status 1: "
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "exit-3-silently-in-packing": "loader of {cache} ended with status 3: loading {cache} generation {generation}",
    "exit-0-in-packing": "loader of {cache} ended with status 0 and delivered no index",
    "no-index": "loader of {cache} ended with status 0 and delivered no index",
    "truncated-descriptors": "loader of {cache} ended with status 0 and delivered 1 of 2 segments",
    "hang-in-packing": "loader of {cache} made no progress for {stall} s, last: weights, 3145728 of 3145728 bytes: "
    "it was killed; its last lines are in the log",
    "hang-while-talking-in-packing": "loader of {cache} made no progress for {stall} s, last: stuck, 1 of 2 bytes: "
    "it was killed; its last lines are in the log",
    "refuse-before-key": "config.json names no architecture",
    "wrong-generation": PROTOCOL.replace(
        "{what}", "its index has generation {wrong}, expected {generation}"
    ),
    "wrong-device": PROTOCOL.replace("{what}", "its index has device 'cpu999', expected 'cpu0'"),
    "wrong-backend": PROTOCOL.replace("{what}", "its index has backend 'cuda' for device cpu0"),
    "corrupt-index": PROTOCOL.replace(
        "{what}", "tensor index: its digest does not match its content"
    ),
    "unsealed-segment": PROTOCOL.replace(
        "{what}", "segment 0 is not a memfd sealed against write, grow and shrink"
    ),
    "short-segment": PROTOCOL.replace(
        "{what}", "segment 0 holds 1572352 bytes, its index says 1572864"
    ),
    "garbage-in-packing": PROTOCOL.replace(
        "{what}", "message does not decode: Expected `object`, got `int`"
    ),
}


def text(fault: str, generation: int, cache: str = "tiny/target") -> str:
    return FAULTS[fault].format(
        cache=cache,
        generation=generation,
        wrong=generation + 7,
        python=shlex.split(LOADER)[0],
        stall=STALL_TIMEOUT_S,
    )


def launcher(
    make_daemon: Launcher, models: list[dict[str, Any]], *, fault: str = ""
) -> DaemonProcess:
    """A daemon that tries each load once; tests/everyday/ tests retries."""
    daemon = make_daemon(models)
    daemon.options = ["--no-retry"]
    # Some of the faults are found by waiting. The others wait for a loader that a busy machine may
    # start slowly.
    if fault.startswith("hang"):
        daemon.options += ["--stall-timeout", str(STALL_TIMEOUT_S)]
    return daemon


def reload(daemon: DaemonProcess, **options: Any) -> ReloadReply | Refused:
    with daemon.client("ctl") as tool:
        reply = tool.ask(Reload(**options))
        while not isinstance(reply, ReloadReply | Refused):
            reply = tool.receive()
    return reply


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_at_start_ends_the_daemon_with_its_reason(
    make_daemon: Launcher, checkpoint: Path, fault: str
) -> None:
    daemon = launcher(make_daemon, [model("tiny", checkpoint, x_fault=fault)], fault=fault).launch()
    assert daemon.wait() == (78 if fault.startswith("refuse") else 1)
    assert (
        f"load failed cache=tiny/target served_generation=0 permanent={_permanent(fault)} "
        in daemon.log
    )
    assert f"error={text(fault, 1)}\n" in daemon.log
    assert daemon.manager
    assert not any("READY=1" in state for state in daemon.manager.states)
    assert not daemon.socket.exists()


def _permanent(fault: str) -> str:
    return "yes" if fault.startswith("refuse") else "no"


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_at_reload_keeps_what_is_served(
    make_daemon: Launcher, checkpoint: Path, fault: str
) -> None:
    daemon = launcher(make_daemon, [model("tiny", checkpoint)], fault=fault).start()
    write_manifest(daemon.manifest, [model("tiny", checkpoint, x_fault=fault)])
    reply = reload(daemon)
    assert isinstance(reply, ReloadReply)
    (outcome,) = reply.outcomes
    assert (outcome.cache, outcome.outcome, outcome.generation) == ("tiny/target", "failed", 1)
    assert outcome.error == text(fault, 2)
    (cache,) = daemon.status().caches
    assert (cache.state, cache.generation, cache.error) == ("ready", 1, text(fault, 2))
    with daemon.client() as engine:
        engine.attach(key_of({"model": str(checkpoint)})).close()
    # Neither a descriptor nor a process of the failed load is left.
    until(lambda: memfds(daemon.descriptors()) == 3, "only the served index and segments are open")
    until(lambda: loaders_of(daemon.pid) == [], "no loader is left")
    write_manifest(daemon.manifest, [model("tiny", checkpoint, x_segments=3)])
    reload(daemon)
    (cache,) = daemon.status().caches
    assert (cache.generation, cache.segments, cache.error) == (2, 3, "")


def memfds(targets: list[str]) -> int:
    return sum("memfd" in target for target in targets)


def test_loader_that_dies_after_its_delivery_has_delivered(
    make_daemon: Launcher, checkpoint: Path
) -> None:
    daemon = launcher(
        make_daemon, [model("tiny", checkpoint, x_fault="sigsegv-after-delivery")]
    ).start()
    with daemon.client() as engine:
        engine.attach(key_of({"model": str(checkpoint)})).close()
    assert "loader delivered everything and ended badly cache=tiny/target status=-11" in daemon.log


@pytest.mark.parametrize(
    "fault", ["sigkill", "sigsegv", "exception", "hang", "hang-while-talking", "garbage", "refuse"]
)
def test_generation_is_served_whatever_becomes_of_tuning(
    make_daemon: Launcher, checkpoint: Path, fault: str
) -> None:
    faulty = model("tiny", checkpoint, x_tuning="", x_fault=f"{fault}-while-tuning")
    daemon = launcher(make_daemon, [faulty], fault=fault).start()
    with daemon.client() as engine:
        engine.attach(key_of({"model": str(checkpoint)})).close()
    (cache,) = daemon.status().caches
    assert (cache.state, cache.error) == ("ready", "")
    until(lambda: loaders_of(daemon.pid) == [], "no loader is left")


def test_cache_is_ready_once_tuning_is_over(
    make_daemon: Launcher, checkpoint: Path, gate: Path
) -> None:
    daemon = make_daemon([model("tiny", checkpoint, x_tuning=str(gate))]).launch()
    until(lambda: daemon.answer() is not None, "it serves peers")
    daemon.until(lambda status: [cache.phase for cache in status.caches] == ["tuning"], "tuning")
    assert daemon.status().caches[0].state == "loading"
    gate.write_bytes(b"")
    daemon.notified("READY=1")
    assert daemon.status().caches[0].state == "ready"


def test_interpreter_that_cannot_be_run_is_named(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    # Executable, so that the manifest accepts it, but its interpreter is gone, as after an upgrade.
    python = short_tmp / "python"
    python.write_text("#!/opt/none/bin/python3.11\n")
    python.chmod(0o755)
    daemon = make_daemon([{**model("tiny", checkpoint), "python": str(python)}])
    # Through the default command, which takes the interpreter from the manifest.
    daemon.loader_command = None
    daemon.launch()
    assert daemon.wait() == 78
    assert (
        f"error=loader of tiny/target cannot be started with {python}: No such file or directory; "
        "python: in the manifest names the interpreter that runs the engine\n" in daemon.log
    )


def test_one_failure_beside_a_healthy_model_is_ready_and_says_so(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    other = write_checkpoint(short_tmp / "other", seed=2)
    faulty = model("faulty", other, x_fault="sigkill-in-packing")
    daemon = launcher(make_daemon, [faulty, model("tiny", checkpoint)]).launch()
    ready = daemon.notified("READY=1")
    assert (
        "serving 1 of 2 caches, 3.0 MiB; faulty/target: loader of faulty/target died of SIGKILL"
        in ready
    )
    status = daemon.status()
    assert [(c.name, c.state) for c in status.caches] == [
        ("faulty/target", "failed"),
        ("tiny/target", "ready"),
    ]
    assert status.state == "failed"


def test_all_permanent_failures_are_needed_for_the_status_that_forbids_a_restart(
    make_daemon: Launcher, checkpoint: Path
) -> None:
    permanent = model("a", checkpoint, x_fault="refuse-before-key")
    passing = model("b", checkpoint, x_fault="sigkill-in-packing")
    daemon = launcher(make_daemon, [permanent, passing]).launch()
    assert daemon.wait() == 1


def test_last_error_line_may_be_long_and_hostile(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    script = short_tmp / "loader.py"
    script.write_text(
        "import sys\nsys.stdin.read()\n"
        "sys.stderr.buffer.write(b'x' * 100_000 + b'\\n50%\\r100%\\n' + b'\\x1b[31mbad \\xff end\\n\\n')\n"
        "sys.exit(5)"
    )
    daemon = launcher(make_daemon, [model("tiny", checkpoint)])
    daemon.loader_command = f"python3 {script}"
    daemon.launch()
    assert daemon.wait() == 1
    assert "error=loader of tiny/target ended with status 5: ?[31mbad \ufffd end\n" in daemon.log
    assert "loader cache=tiny/target 100%\n" in daemon.log


def test_loader_is_gone_when_the_daemon_stops_during_a_load(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path, gate: Path
) -> None:
    spawns = short_tmp / "spawns"
    daemon = make_daemon(
        [model("tiny", checkpoint, x_gate=str(gate), x_spawns=str(spawns))]
    ).launch()
    daemon.notified("weights")
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    loader = spawns.read_text().split()[-1]
    assert not Path(f"/proc/{loader}").exists()


@pytest.mark.parametrize("start", ["sleep 1000", "setsid sleep 1000"])
def test_grandchild_that_holds_all_pipes_does_not_keep_the_daemon_waiting(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path, start: str
) -> None:
    pid = short_tmp / "pid"
    script = short_tmp / "loader.sh"
    script.write_text(f"{start} & echo $! > {pid}; echo gone >&2; exit 4")
    daemon = launcher(make_daemon, [model("tiny", checkpoint)])
    daemon.loader_command = f"sh {script}"
    daemon.launch()
    try:
        assert daemon.wait() == 1
        assert "error=loader of tiny/target ended with status 4: gone\n" in daemon.log
    finally:
        stray = int(pid.read_text())
        if start.startswith("setsid"):
            os.kill(stray, signal.SIGKILL)
    until(lambda: has_ended(stray), "the grandchild is gone")


def test_compilers_that_a_loader_started_end_with_it(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    pid, compiler, script = short_tmp / "pid", short_tmp / "compiler.py", short_tmp / "loader.sh"
    # ninja gives each a process group of its own.
    compiler.write_text(
        f"import os, pathlib, time; os.setpgid(0, 0); pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); "
        "time.sleep(1000)"
    )
    script.write_text(
        f"{sys.executable} {compiler} & until [ -s {pid} ]; do sleep 0.05; done; echo gone >&2; exit 4"
    )
    daemon = launcher(make_daemon, [model("tiny", checkpoint)])
    daemon.loader_command = f"sh {script}"
    daemon.launch()
    assert daemon.wait() == 1
    assert "error=loader of tiny/target ended with status 4: gone\n" in daemon.log
    stray = int(pid.read_text())
    until(lambda: has_ended(stray), "the compiler is gone")


# ---- reload


def test_reload_loads_what_changed_and_keeps_what_did_not(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    spawns = short_tmp / "spawns"
    other = write_checkpoint(short_tmp / "other", seed=2)
    common = {"x_spawns": str(spawns)}
    daemon = make_daemon([model("a", checkpoint, **common), model("b", other, **common)]).start()
    write_manifest(daemon.manifest, [model("a", checkpoint, **common), model("c", other, **common)])
    reply = reload(daemon)
    assert isinstance(reply, ReloadReply)
    assert [(o.cache, o.outcome, o.generation) for o in reply.outcomes] == [
        ("b/target", "dropped", 0),
        ("a/target", "unchanged", 1),
        ("c/target", "loaded", 1),
    ]
    assert [line.split()[0] for line in spawns.read_text().splitlines()] == [
        "a/target",
        "b/target",
        "c/target",
    ]
    # Index and two segments of a and c each; b's are freed. The input of a child that makes a digest
    # is there for a moment, too.
    until(lambda: memfds(daemon.descriptors()) == 6, "a's and c's are open")
    assert daemon.manager
    assert len(daemon.manager.stored) == 6


def test_changed_checkpoint_is_loaded_anew_at_reload(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    write_checkpoint(checkpoint, seed=9)
    reply = reload(daemon)
    assert isinstance(reply, ReloadReply)
    assert [(o.outcome, o.generation) for o in reply.outcomes] == [("loaded", 2)]
    with daemon.client() as engine:
        handout = engine.attach(key_of({"model": str(checkpoint)}))
        data = os.pread(handout.segment_fds[0].fileno(), 4096, 0)
        handout.close()
    assert data == (checkpoint / "model.safetensors").read_bytes()[:4096]


def test_forced_reload_of_named_caches_leaves_the_others(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    other = write_checkpoint(short_tmp / "other", seed=2)
    daemon = make_daemon([model("a", checkpoint), model("b", other)]).start()
    reply = reload(daemon, force=True, caches=["b/target"])
    assert isinstance(reply, ReloadReply)
    assert [(o.cache, o.outcome, o.generation) for o in reply.outcomes] == [
        ("b/target", "loaded", 2)
    ]
    assert [(c.name, c.generation) for c in daemon.status().caches] == [
        ("a/target", 1),
        ("b/target", 2),
    ]


def test_reload_of_an_unknown_cache_names_the_known_ones(daemon: DaemonProcess) -> None:
    assert reload(daemon, caches=["nope/target"]) == Refused(
        code="unknown-cache", message="no cache 'nope/target' on cpu0: it has tiny/target"
    )


def test_refused_manifest_at_reload_changes_nothing(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    daemon.manifest.write_text("version: 1\nmodels: {\n")
    reply = reload(daemon)
    assert isinstance(reply, ReloadReply)
    assert str(daemon.manifest) in reply.error
    status = daemon.status()
    assert (status.caches[0].state, status.manifest_error) == ("ready", reply.error)
    with daemon.client() as engine:
        engine.attach(key_of({"model": str(checkpoint)})).close()
    write_manifest(daemon.manifest, [model("tiny", checkpoint)])
    assert reload(daemon) == ReloadReply(
        outcomes=[CacheOutcome(cache="tiny/target", outcome="unchanged", generation=1)]
    )
    assert daemon.status().manifest_error == ""


def test_sighup_reloads_and_tells_the_manager(daemon: DaemonProcess, checkpoint: Path) -> None:
    write_manifest(daemon.manifest, [model("tiny", checkpoint, x_segments=3)])
    daemon.signal(signal.SIGHUP)
    reloading = daemon.notified("RELOADING=1")
    assert int(reloading.split("MONOTONIC_USEC=")[1].split("\n")[0]) > 0
    daemon.notified("READY=1")
    assert daemon.status().caches[0].generation == 2


def test_reload_goes_on_when_its_tool_leaves(
    daemon: DaemonProcess, checkpoint: Path, gate: Path
) -> None:
    write_manifest(daemon.manifest, [model("tiny", checkpoint, x_gate=str(gate))])
    with daemon.client("ctl") as tool:
        tool.send(Reload())
        daemon.notified("weights")
    gate.write_bytes(b"")
    daemon.until(lambda status: status.caches[0].generation == 2, "the new generation is served")


def test_reloads_that_wait_are_limited_in_number(
    daemon: DaemonProcess, checkpoint: Path, gate: Path
) -> None:
    write_manifest(daemon.manifest, [model("tiny", checkpoint, x_gate=str(gate))])
    for _ in range(MAX_RELOADS):
        # The client has left: the reload goes on.
        with daemon.client("ctl") as tool:
            tool.send(Reload())
            while not isinstance(tool.receive(), Progress):
                pass
    with daemon.client("ctl") as tool:
        assert tool.ask(Reload()) == Refused(
            code="busy",
            message="16 reloads are waiting already: try again later",
        )
    gate.write_bytes(b"")
    daemon.until(lambda s: s.caches[0].generation == 2 and not s.caches[0].phase, "it is loaded")
    with daemon.client("ctl") as tool:
        until(lambda: not isinstance(tool.ask(Reload()), Refused), "the others have had their turn")


def test_two_reloads_run_one_after_the_other(
    daemon: DaemonProcess, checkpoint: Path, short_tmp: Path, gate: Path
) -> None:
    spawns = short_tmp / "spawns"
    write_manifest(
        daemon.manifest, [model("tiny", checkpoint, x_gate=str(gate), x_spawns=str(spawns))]
    )
    with daemon.client("ctl") as first, daemon.client("ctl") as second:
        first.send(Reload())
        daemon.notified("weights")
        second.send(Reload())
        gate.write_bytes(b"")
        replies = []
        for tool in (first, second):
            while not isinstance(reply := tool.receive(), ReloadReply):
                pass
            replies.append([(o.outcome, o.generation) for o in reply.outcomes])
    assert replies == [[("loaded", 2)], [("unchanged", 2)]]
    assert len(spawns.read_text().splitlines()) == 1


NVML_OF_ONE_GPU = """
from types import SimpleNamespace
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return "handle"
def nvmlDeviceGetMigMode(handle): raise NVMLError("Not Supported")
def nvmlDeviceGetUUID(handle): return "{uuid}"
def nvmlDeviceGetName(handle): return "NVIDIA H200"
def nvmlDeviceGetMemoryInfo(handle): return SimpleNamespace(total=1, free=1)
def nvmlSystemGetDriverVersion(): return "580.159.03"
"""


def test_gpu_that_this_machine_lacks_is_named_beside_those_that_it_has(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    lacking, present = (f"GPU-{digit * 8}-0000-0000-0000-000000000000" for digit in "01")
    # In the place of nvidia-ml-py: NVML of a machine with one other GPU.
    (short_tmp / "fake").mkdir()
    (short_tmp / "fake/pynvml.py").write_text(NVML_OF_ONE_GPU.format(uuid=present))
    daemon = make_daemon([model("tiny", checkpoint, lacking)], device=lacking)
    daemon.env = {"PYTHONPATH": str(short_tmp / "fake")}
    # The product's loader: it opens the device before it imports an engine's libraries.
    daemon.loader_command = None
    assert daemon.launch().wait() == 78
    assert (
        f"no device {lacking} here: this machine has {present}; correct the manifest and the name of the unit"
        in daemon.log
    )
