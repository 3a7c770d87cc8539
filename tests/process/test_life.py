"""The daemon's own life: start order, the lock, paths, stop, descriptors, memory, imports."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.checkpoints import key_of
from tests.fakes.daemon import ROOT, DaemonProcess, environment, model, until
from weightcached.wire.messages import CacheStatus, Counters, StatusReply

Launcher = Callable[..., DaemonProcess]
MAX_RSS_KIB = 64 * 1024


def test_status_of_a_fresh_daemon(daemon: DaemonProcess) -> None:
    status = daemon.status()
    (cache,) = status.caches
    assert status == StatusReply(
        device="cpu0",
        pid=daemon.pid,
        state="ready",
        since=status.since,
        caches=[cache],
        manifest=str(daemon.manifest),
        software="0.1.0",
        counters=Counters(phase_seconds={"tiny/target": {"weights": 1.5, "packing": 0.5}}),
    )
    assert cache == CacheStatus(
        name="tiny/target",
        role="target",
        state="ready",
        generation=1,
        source="loaded",
        bytes=3 << 20,
        segments=2,
        tensors=2,
        load_seconds=cache.load_seconds,
        phase="",
        done_bytes=0,
        total_bytes=0,
        error="",
        engines=[],
    )


def test_socket_answers_before_the_manifest_is_loaded(
    make_daemon: Launcher, checkpoint: Path, gate: Path
) -> None:
    daemon = make_daemon([model("tiny", checkpoint, x_gate=str(gate))]).launch()
    daemon.notified("weights")
    status = daemon.status()
    (cache,) = status.caches
    assert (status.state, cache.state, cache.phase, cache.done_bytes) == (
        "loading",
        "loading",
        "weights",
        3 << 20,
    )
    assert cache.eta_s == 0
    gate.write_bytes(b"")
    daemon.notified("READY=1")


def test_ready_is_said_once_and_the_watchdog_fed_afterwards(
    make_daemon: Launcher, checkpoint: Path
) -> None:
    daemon = make_daemon([model("tiny", checkpoint, x_steps=3)])
    daemon.env = {"WATCHDOG_USEC": "100000"}
    daemon.start()
    for _ in range(3):
        daemon.notified("WATCHDOG=1")
    assert daemon.stop() == 0
    daemon.notified("STOPPING=1")
    assert daemon.manager
    words = [line.split("=")[0] for state in daemon.manager.states for line in state.splitlines()]
    assert words.count("READY") == 1
    assert words.count("STOPPING") == 1
    assert "EXTEND_TIMEOUT_USEC" in words[: words.index("READY")]
    # The manager has all descriptors before it hears of readiness.
    assert words.index("BARRIER") < words.index("READY")


def test_watchdog_of_another_process_is_not_fed(make_daemon: Launcher, checkpoint: Path) -> None:
    daemon = make_daemon([model("tiny", checkpoint)])
    daemon.env = {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}
    daemon.start()
    daemon.stop()
    daemon.notified("STOPPING=1")
    assert daemon.manager
    assert not any("WATCHDOG" in state for state in daemon.manager.states)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_ends_connections_and_removes_the_socket(
    daemon: DaemonProcess, checkpoint: Path, number: int
) -> None:
    with daemon.client() as engine:
        handout = engine.attach(key_of({"model": str(checkpoint)}))
        daemon.signal(signal.Signals(number))
        assert daemon.wait() == 0
        assert engine.closed_by_daemon()
        # The engine's weights are still there.
        assert (
            os.pread(handout.segment_fds[0].fileno(), 16, 0)
            == (checkpoint / "model.safetensors").read_bytes()[:16]
        )
        handout.close()
    assert not daemon.socket.exists()
    assert daemon.socket.with_suffix(".lock").exists()


def test_device_without_a_model_is_served_and_can_be_given_one(
    make_daemon: Launcher, checkpoint: Path
) -> None:
    daemon = make_daemon([model("tiny", checkpoint, device="cpu5")]).start()
    assert daemon.status().caches == []
    assert f"manifest places no model here manifest={daemon.manifest} device=cpu0" in daemon.log


def test_draft_model_has_a_cache_of_its_own(make_daemon: Launcher, checkpoint: Path) -> None:
    draft = {"method": "eagle", "model": str(checkpoint), "num_speculative_tokens": 2}
    entry = model("tiny", checkpoint, speculative_config=draft)
    daemon = make_daemon([entry]).start()
    assert [(c.name, c.role) for c in daemon.status().caches] == [
        ("tiny/target", "target"),
        ("tiny/draft", "draft"),
    ]
    with daemon.client() as engine:
        handout = engine.attach(key_of(entry["engine"], role="draft"))
        handout.close()
    assert handout.ready.cache == "tiny/draft"


def test_manifest_error_at_start_names_the_file(make_daemon: Launcher, checkpoint: Path) -> None:
    daemon = make_daemon([model("tiny", checkpoint)])
    daemon.manifest.write_text("version: 1\nmodels: 7\n")
    assert daemon.launch().wait() == 78
    assert f"manifest refused error={daemon.manifest}" in daemon.log


def test_missing_manifest_says_what_to_run(make_daemon: Launcher) -> None:
    daemon = make_daemon()
    assert daemon.launch().wait() == 78
    assert (
        f"manifest refused error=no model manifest at {daemon.manifest}: "
        "'weightcachectl install' writes an example to edit\n" in daemon.log
    )


# ---- lock, socket, runtime directory


def refused(make_daemon: Launcher, checkpoint: Path, status: int) -> str:
    """Start a daemon that must refuse to; returns why. Another one may write to the same log."""
    daemon = make_daemon([model("tiny", checkpoint)]).launch()
    assert daemon.wait() == status
    (error,) = [line for line in daemon.log.splitlines() if "ERROR " in line]
    return error.partition("ERROR ")[2]


def test_second_daemon_of_a_device_is_told_who_serves_it(
    daemon: DaemonProcess, make_daemon: Launcher, checkpoint: Path
) -> None:
    lock = daemon.socket.with_suffix(".lock")
    assert refused(make_daemon, checkpoint, 75) == (
        f"device cpu0 is served by another weightcached (pid {daemon.pid}), which holds {lock}: "
        "systemctl --user stop weightcached@cpu0.service, or end that process"
    )
    assert daemon.status().pid == daemon.pid


def test_lock_without_a_pid_is_still_a_lock(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    (short_tmp / "run").mkdir(mode=0o700)
    lock = short_tmp / "run" / "cpu0.lock"
    with open(lock, "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        assert refused(make_daemon, checkpoint, 75) == (
            f"device cpu0 is served by another weightcached (a process that left no pid), which holds {lock}: "
            "systemctl --user stop weightcached@cpu0.service, or end that process"
        )


def test_stale_socket_of_a_killed_daemon_is_replaced(daemon: DaemonProcess) -> None:
    daemon.signal(signal.SIGKILL)
    daemon.wait()
    assert daemon.socket.exists()
    daemon.start()
    assert daemon.status().state == "ready"
    assert f"stale socket removed path={daemon.socket}" in daemon.log


def test_something_else_in_the_sockets_place_is_left_alone(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    path = short_tmp / "run" / "cpu0.sock"
    path.parent.mkdir(mode=0o700)
    target = short_tmp / "precious"
    target.write_text("content")
    path.symlink_to(target)
    assert refused(make_daemon, checkpoint, 78) == (
        f"{path} is not a socket (symbolic links are refused): remove it"
    )
    assert target.read_text() == "content"
    assert path.is_symlink()


def test_symbolic_link_as_lock_is_refused(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    lock = short_tmp / "run" / "cpu0.lock"
    lock.parent.mkdir(mode=0o700)
    lock.symlink_to(short_tmp / "elsewhere")
    assert refused(make_daemon, checkpoint, 78) == (
        f"cannot open the lock {lock}: Too many levels of symbolic links; if something else is there, remove it"
    )


def test_runtime_directory_open_to_others_is_refused(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    run = short_tmp / "run"
    run.mkdir()
    run.chmod(0o750)
    assert refused(make_daemon, checkpoint, 78) == (
        f"runtime directory {run} has mode 0750, expected 0700: chmod 700 {run}"
    )


def test_runtime_directory_of_another_user_is_refused(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    run = short_tmp / "run"
    run.mkdir(mode=0o700)
    os.chown(run, 65534, 65534)
    assert refused(make_daemon, checkpoint, 78) == (
        f"runtime directory {run} belongs to uid 65534, expected 0: run as that user, or remove it"
    )


def test_path_too_long_for_a_socket_is_refused(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    daemon = make_daemon([model("tiny", checkpoint)])
    daemon.runtime = short_tmp / ("x" * 100)
    assert daemon.launch().wait() == 78
    path = daemon.runtime / "cpu0.sock"
    assert daemon.log.partition("ERROR ")[2] == (
        f"socket path {path} has {len(str(path))} bytes, the kernel allows 107: "
        "set XDG_RUNTIME_DIR (or socket_dir) to a shorter directory\n"
    )
    assert not daemon.runtime.exists()


def test_malformed_device_is_refused(make_daemon: Launcher, checkpoint: Path) -> None:
    daemon = make_daemon([model("tiny", checkpoint)])
    daemon.device = "cuda:0"
    assert daemon.launch().wait() == 78
    assert "'cuda:0' is not a device name: expected GPU-<uuid>" in daemon.log


# ---- costs


def test_50_attach_cycles_leak_no_descriptor(daemon: DaemonProcess, checkpoint: Path) -> None:
    key = key_of({"model": str(checkpoint)})
    before = daemon.settled()
    for _ in range(50):
        with daemon.client() as engine:
            engine.attach(key).close()
    daemon.holds_no_more_than(before)


def test_memory_beside_the_segments_is_small(daemon: DaemonProcess, checkpoint: Path) -> None:
    with daemon.client() as engine:
        engine.attach(key_of({"model": str(checkpoint)})).close()
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    assert int(status.split("VmHWM:")[1].split()[0]) < MAX_RSS_KIB


def test_soft_limit_of_descriptors_is_raised_to_the_hard_one(
    make_daemon: Launcher, checkpoint: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        daemon = make_daemon([model("tiny", checkpoint, x_segments=200)]).start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE) == (hard, hard)


def test_daemon_imports_neither_torch_nor_vllm_nor_numpy() -> None:
    script = (
        "import sys, pkgutil, importlib, weightcached.cli.weightcached, weightcached.daemon as d\n"
        "for m in pkgutil.iter_modules(d.__path__): importlib.import_module(f'weightcached.daemon.{m.name}')\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'vllm', 'numpy', 'transformers'}))\n"
        "print('weightcached.daemon.main' in sys.modules)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment()
    )
    assert done.stdout == "[]\nTrue\n"


def test_lines_for_the_journal_begin_with_their_level(
    make_daemon: Launcher, checkpoint: Path
) -> None:
    daemon = make_daemon([model("tiny", checkpoint)])
    daemon.env = {"INVOCATION_ID": "0" * 32}
    daemon.start()
    daemon.stop()
    assert all(line.startswith(("<6>", "<7>")) for line in daemon.log.splitlines()), daemon.log
    assert "<6>stopped device=cpu0\n" in daemon.log


def test_dead_manager_socket_does_not_stop_the_daemon(
    make_daemon: Launcher, checkpoint: Path
) -> None:
    daemon = make_daemon([model("tiny", checkpoint)])
    daemon.env = {"NOTIFY_SOCKET": "@weightcached-test-nobody-listens"}
    daemon.launch()
    until(daemon.is_ready, "it serves")
    assert "not in the store, a restart will load it again cache=tiny/target error=" in daemon.log


def test_without_a_manager_everything_works(make_daemon: Launcher, checkpoint: Path) -> None:
    daemon = make_daemon([model("tiny", checkpoint)])
    daemon.env = {"NOTIFY_SOCKET": ""}
    daemon.launch()
    until(daemon.is_ready, "it serves")
    assert "store" not in daemon.log
    assert daemon.stop() == 0


def test_peers_waiting_in_the_backlog_are_served_after_the_start(
    make_daemon: Launcher, checkpoint: Path
) -> None:
    """A peer that connects between bind and the first accept is not refused."""
    daemon = make_daemon([model("tiny", checkpoint)]).launch()
    until(daemon.socket.exists, "the socket is bound")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as early:
        until(lambda: early.connect_ex(str(daemon.socket)) == 0, "it listens")
        daemon.notified("READY=1")
