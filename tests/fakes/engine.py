"""An engine as a process of its own: attaches, maps the segments, prints a line, and stays.

    python -m tests.fakes.engine SOCKET CHECKPOINT [--shared-socket]

With --shared-socket a child process keeps the connection open when the engine dies; it ends with
the connection. It answers each line on its standard input with the digest of the mapped bytes, and
ends with the input.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import select
import socket
import sys
from pathlib import Path

from tests.fakes.checkpoints import key_of
from tests.fakes.client import Client


def _hold_open(sock: socket.socket) -> None:
    """Sleep until the daemon has hung up; reads nothing, the answers are the parent's."""
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLHUP)
    poll.poll()
    os._exit(0)


def main() -> None:
    path, checkpoint, *flags = sys.argv[1:]
    client = Client.welcome(Path(path))
    if "--shared-socket" in flags and os.fork() == 0:
        _hold_open(client.sock)
    handout = client.attach(key_of({"model": checkpoint}))
    maps = [mmap.mmap(fd.fileno(), 0, prot=mmap.PROT_READ) for fd in handout.segment_fds]
    handout.close()
    print(f"attached {sum(len(m) for m in maps)}", flush=True)
    for _ in sys.stdin:
        print(hashlib.sha256(b"".join(m[:] for m in maps)).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
