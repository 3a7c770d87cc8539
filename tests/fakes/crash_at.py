"""Runs a module that ends, or stops, at its n-th step: `python -m tests.fakes.crash_at FILE -m MODULE …`.

FILE has a module, a number and a signal, e.g. "weightcached.snapshot.writer 3 KILL"; without it, or
for another module, nothing happens. A step is a call that a crash can come before or after: it
changes a file or a directory, or sends a packet. Then FILE.reached is made first. With number 0 the
names of all steps are added to FILE.steps.

As an interpreter of the manifest: see interpreter().
"""

from __future__ import annotations

import fcntl
import io
import os
import runpy
import shlex
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

_STEPS = (
    (os, ("mkdir", "open", "write", "fdatasync", "fsync", "rename", "unlink", "rmdir", "utime")),
    (os, ("preadv", "memfd_create", "ftruncate")),
    (fcntl, ("fcntl", "flock")),
    (socket.socket, ("sendmsg",)),
)


def interpreter(directory: Path, file: Path) -> Path:
    """A program that takes an interpreter's arguments, and has FILE's module end at its step."""
    path = directory / "python"
    real = shlex.quote(sys.executable)
    path.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = -m ] && [ -e {shlex.quote(str(file))} ]; then\n'
        f'  exec {real} -m tests.fakes.crash_at {shlex.quote(str(file))} "$@"\n'
        "fi\n"
        f'exec {real} "$@"\n'
    )
    path.chmod(0o755)
    return path


def _arm(file: Path, number: int, sent: str) -> None:
    steps, lock = 0, threading.Lock()
    reached = file.with_name(f"{file.name}.reached")
    # Without buffer: os._exit() ends some of these modules.
    log = None if number else io.FileIO(file.with_name(f"{file.name}.steps"), "a")

    def wrapped(original: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            with lock:
                steps += 1
                mine = steps
            if log is not None:
                log.write(f"{original.__name__}\n".encode())
            # What touches the file itself has a higher number.
            if mine == number:
                reached.touch()
                os.kill(os.getpid(), signal.Signals[f"SIG{sent}"])
            return original(*args, **kwargs)

        return step

    for owner, names in _STEPS:
        for name in names:
            setattr(owner, name, wrapped(getattr(owner, name)))


def main() -> None:
    file, module, arguments = Path(sys.argv[1]), sys.argv[3], sys.argv[4:]
    wanted, number, name = file.read_text().split()
    sys.argv = [module, *arguments]
    if module == wanted:
        _arm(file, int(number), name)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
