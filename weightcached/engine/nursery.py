"""The nursery: a process with an engine's imports done, which forks engines on request.

    python -m weightcached.engine.nursery MODULE     a SOCK_SEQPACKET socket to the supervisor as descriptor 3

Its first packet says whether it can fork. A fork copies neither threads nor a CUDA context, so
there must be none that an engine would wait for. It checks that: before each fork it looks for
threads and CUDA, and once it tries a fork. It ends with the supervisor's end of the socket, and
when packages are installed: what an engine imports later would be of another version than what it
has.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
import traceback
import warnings
from typing import NoReturn, cast

import msgspec

from weightcached.engine.child import Module, run
from weightcached.errors import ProtocolError
from weightcached.system.fds import OwnedFd, close_all
from weightcached.system.packages import InstalledPackages
from weightcached.wire.engine_job import Job
from weightcached.wire.framing import recv_packet, send_packet

SOCKET_FD = 3
_TRIAL_TIMEOUT_S = 20


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`refusal` says why no engine can be forked, or is empty; `pid` is the new engine's. outdated:
    another nursery can.
    """

    refusal: str = ""
    pid: int = 0
    outdated: bool = False


def find_fork_obstacle() -> str:
    """Why this process must not be forked, or ""."""
    # Threads of libraries (OpenBLAS has some from its import on) have fork handlers, or are found by
    # the trial.
    threads = [thread.name for thread in threading.enumerate()]
    if len(threads) > 1:
        return f"threads run after the imports: {', '.join(threads[1:])}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialized after the imports"
    return ""


def _trial(module: Module) -> str:
    """Why a fork would hang or crash; "" if one did an engine's work."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            module.try_in_fork()
            status = 0
        finally:
            os._exit(status)
    with OwnedFd(os.pidfd_open(pid)) as pidfd:
        poll = select.poll()
        poll.register(pidfd.fileno(), select.POLLIN)
        ended = bool(poll.poll(_TRIAL_TIMEOUT_S * 1000))
        if not ended:
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not ended:
        return f"a fork that was tried hung for {_TRIAL_TIMEOUT_S} s"
    return f"a fork that was tried ended with status {status}" if status else ""


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def serve(sock: socket.socket, module: Module, packages: InstalledPackages) -> None:
    """Fork an engine for every job that comes, until the supervisor is gone.

    packages: those before the imports.
    """
    refusal = module.prepare() or find_fork_obstacle() or _trial(module)
    send_packet(sock, msgspec.json.encode(Answer(refusal=refusal)))
    if refusal:
        return
    # Freeze the present objects: then no collection in an engine copies these pages.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        try:
            data, fds = recv_packet(sock, max_fds=2)
        except (EOFError, OSError, ProtocolError):
            return
        changed = packages.changed()
        refusal = f"packages have changed: {changed}" if changed else find_fork_obstacle()
        if refusal:
            close_all(fds)
            send_packet(sock, msgspec.json.encode(Answer(refusal=refusal, outdated=bool(changed))))
            return
        job = msgspec.json.decode(data, type=Job)
        _fork(sock, module, job, fds)


def _fork(sock: socket.socket, module: Module, job: Job, fds: list[OwnedFd]) -> None:
    pid = os.fork()
    if pid == 0:
        _become_engine(sock, module, job, fds)
    close_all(fds)
    send_packet(sock, msgspec.json.encode(Answer(pid=pid)))


def _become_engine(sock: socket.socket, module: Module, job: Job, fds: list[OwnedFd]) -> NoReturn:
    status = 1
    try:
        os.setsid()
        sock.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        public, control = fds
        status = run(job, module, public_fd=public.take(), control_fd=control.take())
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def main() -> None:
    """Serve the supervisor on the socket that it passed."""
    # Ctrl-C is for the supervisor, which ends its children in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Python warns of any thread at a fork, of numpy's too; which fork works is tried.
    warnings.filterwarnings(
        "ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning
    )
    os.set_inheritable(SOCKET_FD, False)
    packages = InstalledPackages()
    with socket.socket(fileno=SOCKET_FD) as sock:
        serve(sock, cast(Module, importlib.import_module(sys.argv[1])), packages)


if __name__ == "__main__":
    main()
