"""What a process sees of the host if it lives in a container: namespaces, and uids that they map."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Inode numbers of the namespaces that the kernel begins with (include/linux/proc_ns.h).
_FIRST_PIDS = "pid:[4026531836]"
_NAMESPACES = Path("/proc/self/ns")
_UID_MAP = Path("/proc/self/uid_map")
_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")
# As sd_booted(3) asks.
_BOOTED = Path("/run/systemd/system")
# Podman's mark, also where the container has the host's pids.
_PODMAN = Path("/run/.containerenv")


class Uids(NamedTuple):
    """`length` uids from `inside` on are those from `outside` on in the parent's user namespace."""

    inside: int
    outside: int
    length: int


def own_pids() -> bool:
    """Whether this process is in another pid namespace than the one that the kernel began with."""
    try:
        return os.readlink(_NAMESPACES / "pid") != _FIRST_PIDS
    except OSError:
        return False


def in_container() -> bool:
    """Whether this is a container with an application in it: no system that systemd has booted."""
    if _BOOTED.is_dir():
        return False
    return own_pids() or _PODMAN.exists() or "container" in os.environ


def uid_map() -> list[Uids]:
    """This process's user namespace; empty if /proc does not tell."""
    try:
        lines = _UID_MAP.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    return [Uids(*map(int, line.split())) for line in lines]


def outside_uid(uid: int) -> int | None:
    """The number that the parent's user namespace has for `uid`; None if it has none."""
    return next(_outside(uid), None)


def _outside(uid: int) -> Iterator[int]:
    for inside, outside, length in uid_map():
        if inside <= uid < inside + length:
            yield outside + uid - inside


def is_unmapped(uid: int) -> bool:
    """Whether the kernel shows `uid` for users that this user namespace does not have."""
    try:
        overflow = int(_OVERFLOW_UID.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return False
    return uid == overflow and bool(uid_map()) and outside_uid(uid) is None
