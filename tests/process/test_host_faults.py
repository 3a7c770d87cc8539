"""The machine misbehaves: disk, memory, limits, clock, directories. Served caches stay served."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import limits
from tests.fakes.checkpoints import identity_of, key_of, with_checkpoint, write_checkpoint
from tests.fakes.client import Client
from tests.fakes.daemon import LOADER, DaemonProcess, model, until, write_manifest
from weightcached.checkpoint.identity import with_full
from weightcached.index.key import WeightCacheKey
from weightcached.wire.messages import (
    PROTOCOL_VERSION,
    Hello,
    Refused,
    Reload,
    ReloadReply,
    Reply,
    Welcome,
)

Launcher = Callable[..., DaemonProcess]
FEW_DESCRIPTORS = 64


def reload(daemon: DaemonProcess) -> ReloadReply:
    with daemon.client("ctl") as tool:
        reply = tool.ask(Reload())
        while not isinstance(reply, ReloadReply):
            reply = tool.receive()
    return reply


def attaches(daemon: DaemonProcess, key: WeightCacheKey) -> None:
    with daemon.client() as engine:
        engine.attach(key).close()


# ---- disks and directories


@contextlib.contextmanager
def mounted(directory: Path, options: str) -> Iterator[Path]:
    """A tmpfs at `directory`."""
    directory.mkdir(mode=0o700)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "weightcached-test", str(directory)], check=True
    )
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill(directory: Path) -> None:
    with open(directory / "filler", "wb", buffering=0) as f, contextlib.suppress(OSError):
        while True:
            f.write(b"\0" * 4096)


def full_key_of(copy: Path) -> WeightCacheKey:
    """The key of an engine that has digested its own copy: the daemon must digest its files too."""
    return with_checkpoint(key_of({"model": str(copy)}), full=with_full(identity_of(copy)).full)


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_cache_directory_that_takes_no_file_costs_no_more_than_the_digest_again(
    make_daemon: Launcher,
    checkpoint: Path,
    short_tmp: Path,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with mounted(short_tmp / "cache", "size=64k,mode=0700") as cache:
        if fault == "full":
            fill(cache)
        else:
            subprocess.run(["mount", "-o", "remount,ro", str(cache)], check=True)
        daemon = make_daemon([model("tiny", checkpoint)])
        daemon.env = {"XDG_CACHE_HOME": str(cache)}
        daemon.start()
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        attaches(daemon, full_key_of(write_checkpoint(short_tmp / "copy")))
        assert "digest made cache=tiny/target generation=1" in daemon.log
        assert daemon.stop() == 0


def test_runtime_directory_without_room_for_a_byte_is_enough_for_lock_and_socket(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    with mounted(short_tmp / "run", "size=64k,mode=0700") as run:
        fill(run)
        daemon = make_daemon([model("tiny", checkpoint)]).start()
        attaches(daemon, key_of({"model": str(checkpoint)}))
        # The lock holds although the pid did not fit into it.
        second = make_daemon()
        second.launch()
        assert second.wait() == 75
        assert "is served by another weightcached (a process that left no pid)" in second.log
        assert daemon.stop() == 0


def test_runtime_directory_without_room_for_a_file_is_named(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    # The one inode is the directory's own.
    with mounted(short_tmp / "run", "nr_inodes=1,mode=0700") as run:
        daemon = make_daemon([model("tiny", checkpoint)]).launch()
        assert daemon.wait() == 78
        assert daemon.log.splitlines()[-1].partition("ERROR ")[2] == (
            f"cannot open the lock {run}/cpu0.lock: No space left on device; free space or inodes: df -i {run}"
        )


def watched(make_daemon: Launcher, checkpoint: Path, **options: Any) -> DaemonProcess:
    """A daemon that looks after itself ten times a second; without a watchdog, every five seconds."""
    daemon = make_daemon([model("tiny", checkpoint)], **options)
    daemon.env = {"WATCHDOG_USEC": "200000"}
    return daemon


def test_runtime_directory_that_is_removed_is_made_again(
    make_daemon: Launcher, checkpoint: Path
) -> None:
    daemon = watched(make_daemon, checkpoint).start()
    key = key_of({"model": str(checkpoint)})
    with daemon.client() as engine:
        handout = engine.attach(key)
        # Renamed first: the daemon may write into it while its files are being removed.
        gone = daemon.runtime.rename(daemon.runtime.with_suffix(".gone"))
        shutil.rmtree(gone)
        until(
            lambda: "our socket was removed, it is made again" in daemon.log,
            "the daemon has noticed",
        )
        # Connections stay, and newcomers find it.
        assert engine.status().caches[0].engines[0].pid == os.getpid()
        assert (
            os.pread(handout.segment_fds[0].fileno(), 4096, 0)
            == (checkpoint / "model.safetensors").read_bytes()[:4096]
        )
        handout.close()
    attaches(daemon, key)
    assert oct(daemon.runtime.stat().st_mode & 0o7777) == "0o700"
    assert oct(daemon.socket.stat().st_mode & 0o7777) == "0o600"
    daemon.notified("WATCHDOG=1")
    # It has the new lock, too.
    second = make_daemon()
    second.launch()
    assert second.wait() == 75
    assert daemon.stop() == 0
    assert not daemon.socket.exists()


@pytest.mark.slow
def test_socket_that_is_removed_is_made_again_without_a_watchdog(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    daemon.socket.unlink()
    until(lambda: daemon.answer() is not None, "the daemon has noticed")
    attaches(daemon, key_of({"model": str(checkpoint)}))


def test_runtime_directory_without_a_parent_is_said_and_made_when_it_can_be(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    """As /run/user/<uid> after a user's last logout without lingering. The weights must stay."""
    session = short_tmp / "session"
    session.mkdir(mode=0o700)
    daemon = watched(make_daemon, checkpoint)
    daemon.runtime = session / "run"
    daemon.socket = daemon.runtime / "cpu0.sock"
    daemon.start()
    key = key_of({"model": str(checkpoint)})
    with daemon.client() as engine:
        engine.attach(key).close()
        # At once: while its files go one by one, the daemon could find other faults.
        shutil.rmtree(session.rename(session.with_suffix(".gone")))
        reason = f"cannot create the runtime directory {daemon.runtime}: No such file or directory"
        assert daemon.notified("unreachable") == f"STATUS=unreachable: {reason}"
        # A restart would fail: the manager is told that all is well otherwise.
        daemon.notified("WATCHDOG=1")
        daemon.notified("WATCHDOG=1")
        assert engine.status().state == "ready"
        session.mkdir(mode=0o700)
        assert daemon.notified("serving") == "STATUS=serving 1 of 1 caches, 3.0 MiB"
        assert engine.status().caches[0].engines[0].pid == os.getpid()
    attaches(daemon, key)
    text = f"our socket is gone and cannot be made again socket={daemon.socket} error={reason}\n"
    assert daemon.log.count(text) == 1


def test_daemon_whose_place_another_one_took_says_so_and_leaves_it_alone(
    make_daemon: Launcher, checkpoint: Path
) -> None:
    daemon = watched(make_daemon, checkpoint).start()
    daemon.signal(signal.SIGSTOP)
    daemon.socket.with_suffix(".lock").unlink()
    second = make_daemon([model("tiny", checkpoint)]).start()
    daemon.signal(signal.SIGCONT)
    until(
        lambda: f"another daemon, pid {second.pid}, answers on our socket" in daemon.log,
        "it has noticed",
    )
    busy = f"error=device cpu0 is served by another weightcached (pid {second.pid})"
    until(lambda: busy in daemon.log, "it has tried to take its place again")
    assert daemon.stop() == 0
    assert second.status().pid == second.pid


def test_checkpoint_deleted_while_it_is_served_is_served_on(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    daemon = make_daemon([model("tiny", checkpoint)])
    # An attempt after the failed reload would find the next checkpoint before our own reload does.
    daemon.options = ["--no-retry"]
    daemon.start()
    key = key_of({"model": str(checkpoint)})
    copy = full_key_of(write_checkpoint(short_tmp / "copy"))
    until(lambda: "digest made" in daemon.log, "the digest is made")
    shutil.rmtree(checkpoint)
    attaches(daemon, key)
    # Its files are gone, but their content is known.
    attaches(daemon, copy)
    (failed,) = reload(daemon).outcomes
    assert (failed.outcome, failed.generation) == ("failed", 1)
    attaches(daemon, key)
    for seed, expected in ((1, ("unchanged", 1)), (2, ("loaded", 2))):
        write_checkpoint(checkpoint, seed=seed)
        assert [(o.outcome, o.generation) for o in reload(daemon).outcomes] == [expected]


# ---- limits


def _greeted(client: Client) -> Reply:
    return client.ask(Hello(protocol=PROTOCOL_VERSION, purpose="engine"))


def limited(make_daemon: Launcher, checkpoint: Path) -> DaemonProcess:
    daemon = make_daemon([model("tiny", checkpoint)])
    daemon.env = {"WATCHDOG_USEC": "200000"}
    daemon.limits = {resource.RLIMIT_NOFILE: (FEW_DESCRIPTORS, FEW_DESCRIPTORS)}
    return daemon.start()


def test_with_64_descriptors_a_crowd_is_refused_and_the_daemon_lives(
    make_daemon: Launcher, checkpoint: Path
) -> None:
    daemon = limited(make_daemon, checkpoint)
    key = key_of({"model": str(checkpoint)})
    with contextlib.ExitStack() as stack:
        clients = []
        # Each is served or refused before the next one comes. The silent ones would be hung up on.
        while isinstance(answer := _greeted(stack.enter_context(Client(daemon.socket))), Welcome):
            clients.append(answer)
        assert isinstance(answer, Refused)
        refusal = answer
        assert refusal.code == "busy"
        # Its own handshake may be one of them.
        assert re.fullmatch(
            r"this daemon has \d+ connections, the maximum for its limit of open files "
            r"\(LimitNOFILE=, ulimit -n\): close some, then try again",
            refusal.message,
        )
        # Two descriptors each; a child that makes a digest has some, too.
        assert len(clients) > 5
        # Its own handshake and a load go on beside the crowd.
        daemon.notified("WATCHDOG=1")
        daemon.notified("WATCHDOG=1")
    until(
        lambda: not any("pidfd" in target for target in daemon.descriptors()), "the crowd has left"
    )
    attaches(daemon, key)
    write_manifest(daemon.manifest, [model("tiny", checkpoint, x_segments=4)])
    assert [o.outcome for o in reload(daemon).outcomes] == ["loaded"]


def test_more_segments_than_descriptors_fail_by_name_and_leave_what_is_served(
    make_daemon: Launcher, checkpoint: Path
) -> None:
    daemon = limited(make_daemon, checkpoint)
    # The loader, which inherits the limit, can just make them.
    write_manifest(daemon.manifest, [model("tiny", checkpoint, x_segments=48)])
    (outcome,) = reload(daemon).outcomes
    assert outcome.outcome == "failed"
    assert (
        "more descriptors than this process may still open (LimitNOFILE=, ulimit -n)"
        in outcome.error
    )
    attaches(daemon, key_of({"model": str(checkpoint)}))


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[Path]:
    """A memory cgroup, of version 1 or 2, and the file that takes processes into it."""
    base, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    if not base.is_dir():
        base, name = Path("/sys/fs/cgroup"), "memory.max"
    group = base / f"weightcached-test-{os.getpid()}-{time.monotonic_ns()}"
    group.mkdir()
    try:
        (group / name).write_text(str(limit_bytes))
        swap = group / (
            "memory.memsw.limit_in_bytes" if name != "memory.max" else "memory.swap.max"
        )
        if swap.exists():
            swap.write_text(str(limit_bytes) if name != "memory.max" else "0")
        yield group / "cgroup.procs"
    finally:
        until(lambda: _removed(group), "its processes are gone")


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def test_loader_that_runs_out_of_memory_is_named_and_what_is_served_stays(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    with memory_cgroup(200 << 20) as procs:
        script = short_tmp / "limited-loader"
        script.write_text(f"#!/bin/sh\necho $$ > {procs}\nexec {LOADER}\n")
        daemon = make_daemon([model("tiny", checkpoint)])
        daemon.loader_command = f"sh {script}"
        daemon.start()
        write_manifest(
            daemon.manifest, [model("tiny", checkpoint, x_fault="eat-memory-in-packing")]
        )
        (outcome,) = reload(daemon).outcomes
        assert (outcome.outcome, outcome.generation, outcome.error) == (
            "failed",
            1,
            "loader of tiny/target died of SIGKILL; if the kernel ran out of memory, 'journalctl --user -k' or "
            "dmesg says so",
        )
        attaches(daemon, key_of({"model": str(checkpoint)}))
        daemon.stop()


# ---- clock, names, locale


@pytest.mark.slow
@pytest.mark.timed
def test_deadlines_do_not_follow_the_wall_clock(
    make_daemon: Launcher, checkpoint: Path, gate: Path
) -> None:
    daemon = make_daemon([model("tiny", checkpoint, x_gate=str(gate))])
    daemon.module = "tests.fakes.jumping_clock"
    daemon.options = ["--stall-timeout", "5", "--idle-timeout", "0.5"]
    daemon.launch().notified("weights")
    began_s = time.monotonic()
    with daemon.client() as engine, daemon.client("ctl") as tool, Client(daemon.socket) as silent:
        assert tool.closed_by_daemon()
        idle_s = time.monotonic() - began_s
        assert idle_s > 0.4
        limits.hold("an idle tool is closed", idle_s, 3)
        gate.write_bytes(b"")
        daemon.notified("READY=1")
        engine.attach(key_of({"model": str(checkpoint)})).close()
        assert silent.closed_by_daemon()
        silent_s = time.monotonic() - began_s
        assert silent_s > 4.5
        limits.hold("a silent peer is closed", silent_s, 8)
        assert engine.status().state == "ready"


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
@pytest.mark.parametrize(
    "name", ["räum e", "new\nline", "%i $HOME 'q'", os.fsdecode(b"latin\xe9")], ids=repr
)
def test_odd_characters_in_paths_under_any_locale(
    make_daemon: Launcher, checkpoint: Path, name: str, locale: str
) -> None:
    odd = checkpoint.parent / name
    odd.mkdir()
    daemon = make_daemon([model("tiny", checkpoint)])
    shutil.move(daemon.manifest, odd / "manifest.yaml")
    daemon.manifest = odd / "manifest.yaml"
    daemon.runtime = odd / "run"
    daemon.socket = daemon.runtime / "cpu0.sock"
    daemon.env = {"LC_ALL": locale, "LANG": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    daemon.start()
    assert daemon.status().manifest.endswith("/manifest.yaml")
    attaches(daemon, key_of({"model": str(checkpoint)}))
    daemon.manifest.write_text("version: 1\nmodels: {\n")
    assert reload(daemon).error
    assert daemon.status().manifest_error
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log
