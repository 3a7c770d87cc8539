"""Processes: who they are, how they end, and the end that follows their parent's."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from weightcached.system.fds import OwnedFd
from weightcached.system.notify import FOR_THIS_PROCESS

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# struct ucred of unix(7): pid_t is signed, uid_t and gid_t are not. A uid of 2³¹ and more, as user
# namespaces and directory services give, would come out negative and equal nobody's.
_UCRED = struct.Struct("=iII")
# Linux 6.5; not in the socket module. Free of the race between reading a pid and opening it.
_SO_PEERPIDFD = 77


class Credentials(NamedTuple):
    """Of a peer, when it connected. `pid` is 0 if it lives in a pid namespace that we cannot see."""

    pid: int
    uid: int


def peer_credentials(sock: socket.socket) -> Credentials:
    """The process at the other end of a connected Unix socket. Raises OSError."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    if len(data) != _UCRED.size:
        raise OSError(f"SO_PEERCRED gave {len(data)} bytes")
    pid, uid, _ = _UCRED.unpack(data)
    return Credentials(pid, uid)


def peer_pidfd(sock: socket.socket, pid: int) -> OwnedFd | None:
    """A pidfd of the process `pid` at the other end.

    None if that process is gone, or invisible to us.
    """
    try:
        return OwnedFd(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    except OSError:
        pass
    try:
        return OwnedFd(os.pidfd_open(pid)) if pid > 0 else None
    except OSError:
        return None


def label_of_this_process() -> str:
    """Its pid and cgroup as it sees them itself, e.g. "pid 7 in docker-3f2a.scope on node4": for whoever is in
    another pid namespace.
    """
    try:
        cgroups = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        cgroups = ""
    # "0::/…" of the unified hierarchy comes last; in a cgroup namespace of its own it is "/".
    path = (cgroups.splitlines() or [""])[-1].rpartition(":")[2]
    own = f" in {path.rpartition('/')[2]}" if path.strip("/") else ""
    return f"pid {os.getpid()}{own} on {socket.gethostname()}"


def holds_file(pid: int, path: Path) -> bool:
    """Whether the process has `path` open: of an engine's processes, those that hold its fence are
    the engine; a compiler that it runs is not.
    """
    return any(_descriptors_of(pid, path))


def holds_lock(path: Path) -> bool:
    """Whether this process has `path` open, by itself or inherited, by the very open() on which it is
    locked (flock(2)).

    flock() cannot tell: it would take a lock that is free.
    """
    for fd in _descriptors_of(os.getpid(), path):
        with contextlib.suppress(OSError):
            if "FLOCK" in Path(f"/proc/self/fdinfo/{fd}").read_text():
                return True
    return False


def _descriptors_of(pid: int, path: Path) -> Iterator[str]:
    """The numbers of the descriptors by which the process has `path` open."""
    wanted = os.fspath(path)
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as fds:
        for fd in fds:
            # The name alone: looking at the file itself could hang with its file system.
            with contextlib.suppress(OSError):
                if os.readlink(fd.path) == wanted:
                    yield fd.name


def signal_name(number: int) -> str:
    """E.g. SIGKILL; "signal 64" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class ParentDeath:
    """The kernel kills this process when its parent ends.

    To be made before a fork and used in the child: after the fork of a process that has threads,
    loading a library could wait for ever.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)

    def follow(self, parent: int) -> bool:
        """Die with the parent from now on. False if `parent` is gone already."""
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        return os.getppid() == parent


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies; ends it if the parent is gone."""
    if not ParentDeath().follow(os.getppid()):
        os._exit(1)


def become_subreaper() -> None:
    """Orphans among this process's descendants become its children. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def prefer_for_oom_killer() -> None:
    """Offer this process to the kernel first when memory runs out: its work can be repeated."""
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
        score.write("800")


def environment_for(program: str, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a child that runs `program`: ours, without the manager's variables, and
    with the program's directory in PATH.

    Without ninja, vLLM does not use FlashInfer's kernels. ninja is usually installed beside the
    interpreter, in a directory that a service manager does not search. The working directory may
    have a directory named vllm: PYTHONSAFEPATH keeps the child, and its own children, from importing
    that. -P would not reach its children.
    """
    found = {name: value for name, value in os.environ.items() if name not in FOR_THIS_PROCESS}
    directory, searched = os.path.dirname(program), found.get("PATH", os.defpath)
    if os.path.isabs(directory) and directory not in searched.split(os.pathsep):
        found["PATH"] = f"{directory}{os.pathsep}{searched}"
    return found | {"PYTHONSAFEPATH": "1"} | dict(extra or {})
