"""Which part of a file is in the page cache, and how to get it out of there."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path


def drop_from_page_cache(path: Path) -> None:
    """Have the next reads come from the disk. Raises OSError.

    Pages that are mapped, or that are not written yet, would stay; the latter are written first.
    """
    with open(path, "rb") as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(path: Path) -> float:
    """Which part of a file is in the page cache, 0 to 1. Raises OSError.

    Not asked with preadv2(RWF_NOWAIT), which has the kernel read ahead.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        resident = (ctypes.c_ubyte * pages)()
        first = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(first))
        failed = libc.mincore(address, ctypes.c_size_t(len(mapped)), resident)
        del first
        if failed:
            raise OSError(ctypes.get_errno(), f"mincore of {path}")
        return sum(byte & 1 for byte in resident) / pages
