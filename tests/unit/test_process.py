"""Processes: the credentials of peers, names of signals, and the end that follows a parent's."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
from multiprocessing import util
from pathlib import Path
from typing import Any, cast

import pytest

from weightcached.daemon import peers
from weightcached.system.process import Credentials, holds_lock, peer_credentials, signal_name
from weightcached.vllm_compat import server
from weightcached.wire import connection

# As a user namespace or a directory service gives.
LARGE_UID = 2**31 + 7


class Socket:
    """Answers SO_PEERCRED with bytes as the kernel packs them."""

    def __init__(self, credentials: bytes) -> None:
        self.credentials = credentials

    def getsockopt(self, level: int, option: int, size: int = 0) -> bytes:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return self.credentials


def test_uids_are_unsigned_and_pids_are_not() -> None:
    packed = struct.pack("=iII", 1, 2**32 - 2, 2**31)
    found = peer_credentials(cast(socket.socket, Socket(packed)))
    assert found == Credentials(1, 2**32 - 2)


def test_short_answer_is_an_error() -> None:
    with pytest.raises(OSError, match=r"SO_PEERCRED gave 3 bytes"):
        peer_credentials(cast(socket.socket, Socket(b"\1\2\3")))


def test_both_sides_let_a_large_uid_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The daemon's check of an engine, and an engine's check of the daemon."""
    peer: Any = Socket(struct.pack("=iII", 1, LARGE_UID, 0))
    monkeypatch.setattr(os, "getuid", lambda: LARGE_UID)
    monkeypatch.setattr(connection, "getuid", lambda: LARGE_UID)
    assert peers.identify(peer).pid == 1
    connection._check_peer(peer, tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_real_user_with_a_large_uid_is_let_in() -> None:
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(LARGE_UID, LARGE_UID, LARGE_UID)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ours, theirs:
                connection._check_peer(ours, Path("socket"))
                os._exit(0 if peers.identify(ours).pid == os.getpid() else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_signals_have_names() -> None:
    assert [signal_name(signal.SIGKILL), signal_name(99)] == ["SIGKILL", "signal 99"]


def test_child_ends_with_its_parent() -> None:
    """The parent is killed; its child holds the pipe open for as long as it lives."""
    child = (
        "import time; from weightcached.system.process import die_with_parent;"
        "die_with_parent(); print('follows', flush=True); time.sleep(60)"
    )
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"follows\n"
        process.kill()
        assert process.stdout.read() == b""


# ---- the fence


def answer(fence: Path) -> None:
    sys.exit(int(holds_lock(fence)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_lock_is_held_by_whoever_inherits_it_and_by_nobody_who_only_opens_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """As an engine's workers inherit the fence, however vLLM starts them."""
    monkeypatch.setattr(util, "spawnv_passfds", util.spawnv_passfds)
    fence = tmp_path / "fence"

    def answers() -> tuple[bool, bool]:
        """This process's, and a worker's."""
        worker: Any = multiprocessing.get_context(method).Process(target=answer, args=(fence,))  # type: ignore[attr-defined]
        worker.start()
        worker.join()
        return holds_lock(fence), bool(worker.exitcode)

    with open(fence, "w") as ours, open(fence) as theirs:
        server._hand_on(ours.fileno(), fence)
        assert answers() == (False, False)
        fcntl.flock(ours, fcntl.LOCK_EX)
        assert answers() == (True, True)
        fcntl.flock(ours, fcntl.LOCK_UN)
        assert answers() == (False, False), "it is free, and stays so"
        fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
    stranger = subprocess.Popen(
        ["flock", fence, "sh", "-c", "echo; read _"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert stranger.stdout
    stranger.stdout.readline()
    with open(fence):
        assert not holds_lock(fence), "another engine's"
    stranger.communicate()
