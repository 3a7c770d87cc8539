"""Run a command with descriptors at 3 and up, as a manager passes a unit's store.

python -m tests.fakes.with_store FD=NAME,… COMMAND…
"""

from __future__ import annotations

import fcntl
import os
import sys

_FIRST = 3


def main() -> None:
    pairs = [pair.split("=", 1) for pair in sys.argv[1].split(",") if pair]
    # Out of the way first: the numbers that are wanted may be taken by others of them.
    moved = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 500) for fd, _ in pairs]
    for number, fd in enumerate(moved, start=_FIRST):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)
    os.closerange(_FIRST + len(moved), 500)
    names = ":".join(name for _, name in pairs)
    passed = {
        "LISTEN_PID": str(os.getpid()),
        "LISTEN_FDS": str(len(pairs)),
        "LISTEN_FDNAMES": names,
    }
    os.execvpe(sys.argv[2], sys.argv[2:], {**os.environ, **passed})


if __name__ == "__main__":
    main()
