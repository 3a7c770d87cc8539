"""How much memory this process's control groups leave it: the kernel kills a process that takes
more.

Version 2, version 1, and a machine that has both mounted; each group above counts too.

    /proc/self/cgroup            0::/user.slice/…/weightcached@cpu0.service     version 2
                                 9:memory:/user.slice/…                         version 1
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_OWN = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
# Memory that the kernel reclaims before it kills a process: the page cache, and its own caches.
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
# Version 1 writes "no limit" as the largest multiple of a page.
_NO_LIMIT = 1 << 60


def machine_memory() -> tuple[int, int]:
    """Bytes that the machine can give without swapping, and all that it has; limits not counted."""
    values: dict[str, int] = {}
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        for line in meminfo:
            name, _, rest = line.partition(":")
            values[name] = int(rest.split()[0]) * 1024
    return values["MemAvailable"], values["MemTotal"]


class Room(NamedTuple):
    """The tightest limit: `free` bytes of `limit` are left. file: the file with the limit."""

    free: int
    limit: int
    file: Path


class _Version(NamedTuple):
    limit: str
    usage: str
    stat_prefix: str


_V2 = _Version("memory.max", "memory.current", "")
# total_: with the groups below, as in version 2.
_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def memory_room(*, own: Path = _OWN, mount: Path = _MOUNT) -> Room | None:
    """The tightest limit on this process's memory; None if there is none or it is unknown."""
    rooms = [
        room
        for directory, version in _groups(own, mount)
        if (room := _room(directory, version)) is not None
    ]
    return min(rooms, default=None)


def _groups(own: Path, mount: Path) -> Iterator[tuple[Path, _Version]]:
    """Each group that this process is in, with those above it."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            # Beside version 1 the unified hierarchy may have a mount of its own, and no memory.
            roots, version = [mount, mount / "unified"], _V2
        elif "memory" in controllers.split(","):
            roots, version = [mount / "memory"], _V1
        else:
            continue
        for root in roots:
            group = root / path.lstrip("/")
            # In a container the path may be the host's, of which only the root is mounted.
            for directory in (group, *group.parents):
                yield directory, version
                if directory == root:
                    break


def _room(directory: Path, version: _Version) -> Room | None:
    with suppress(OSError, ValueError):
        text = (directory / version.limit).read_text().strip()
        limit = _NO_LIMIT if text == "max" else int(text)
        if limit >= _NO_LIMIT:
            return None
        used = int((directory / version.usage).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        cache = sum(int(stat.get(version.stat_prefix + name, 0)) for name in _RECLAIMABLE)
        return Room(max(0, limit - max(0, used - cache)), limit, directory / version.limit)
    return None
