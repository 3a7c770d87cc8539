"""A process with a number of one's choice, which must be free: `python -m tests.fakes.with_pid PID`.

It says a line once that process sleeps, and ends it with its own input. Not by way of
/proc/sys/kernel/ns_last_pid: then numbers that have just been used are given again to everybody.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_CLONE3 = 435


class _CloneArgs(ctypes.Structure):
    """struct clone_args of clone(2)."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack", "stack_size",
            "tls", "set_tid", "set_tid_size", "cgroup",
        )
    ]  # fmt: skip


def main() -> None:
    wanted = (ctypes.c_int * 1)(int(sys.argv[1]))
    args = _CloneArgs(exit_signal=signal.SIGCHLD, set_tid=ctypes.addressof(wanted), set_tid_size=1)
    libc = ctypes.CDLL(None, use_errno=True)
    pid = libc.syscall(_CLONE3, ctypes.byref(args), ctypes.sizeof(args))
    if pid == 0:
        os.execvp("sleep", ["sleep", "1000"])
    if pid < 0:
        raise OSError(ctypes.get_errno(), f"clone3: {os.strerror(ctypes.get_errno())}")
    print(pid, flush=True)
    sys.stdin.read()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
