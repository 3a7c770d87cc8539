"""The speed of the disk below a snapshot: reads past the page cache, as `fio --direct=1` does.

`doctor` says how long a restore takes at least, and bench/snapshot.py what a restore could reach.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from weightcached.system.fds import OwnedFd

# As the restorer reads: chunks of a snapshot, several at once.
_BLOCK_NBYTES = 64 << 20
_READERS = 12
_PAGE_NBYTES = 4096


class Reading(NamedTuple):
    """What was read, and how long that took."""

    nbytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds if self.seconds else 0.0


def read_direct(path: Path, *, limit_s: float = float("inf")) -> Reading | None:
    """Read a file past the page cache; no further blocks are begun after `limit_s`.

    None on a file system that has no such reads, which is memory (tmpfs). Raises OSError.
    """
    flags = os.O_RDONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = OwnedFd(os.open(path, flags))
    except OSError as e:
        if e.errno == errno.EINVAL:
            return None
        raise
    with fd:
        size = os.fstat(fd.fileno()).st_size
        began_s = time.monotonic()

        def read(offset: int) -> int:
            if time.monotonic() - began_s > limit_s:
                return 0
            # Anonymous memory begins at a page, as such reads want it.
            with mmap.mmap(-1, _BLOCK_NBYTES) as window:
                return _read_all(fd.fileno(), window, offset)

        with ThreadPoolExecutor(_READERS, thread_name_prefix="direct") as pool:
            nbytes = sum(pool.map(read, range(0, size, _BLOCK_NBYTES)))
        return Reading(nbytes, time.monotonic() - began_s)


def _read_all(fd: int, window: mmap.mmap, offset: int) -> int:
    done = 0
    with memoryview(window) as view:
        while done < len(view):
            with view[done:] as rest:
                got = os.preadv(fd, [rest], offset + done)
            done += got
            # The end of the file, which need not be at a block's end.
            if not got or got % _PAGE_NBYTES:
                break
    return done
