"""A file beside the daemon's socket with the memory that it holds, for an engine that asks while
the daemon restarts.

The descriptor store's memory outlives the daemon. An engine that believed the device to be empty
would ask for more than there is. The file is a hint: a daemon's answer counts more.

    $XDG_RUNTIME_DIR/weightcached/<DEVICE>.resident      0600, JSON, replaced as a whole
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import msgspec

from weightcached.errors import RuntimePathError
from weightcached.system.paths import check_private_dir
from weightcached.wire.messages import EngineStatus, StatusReply

MAX_BYTES = 1 << 20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Device memory of one generation, and the engines that map it.

    live: engines that run get its successor, which has to be beside it then.
    """

    cache: str
    generation: int
    nbytes: int
    engines: list[EngineStatus]
    live: bool = False


def held(status: StatusReply) -> list[Held]:
    """The daemon's list of the memory that it holds, and of old generations that engines keep."""
    served = [
        Held(
            cache=c.name,
            generation=c.generation,
            nbytes=c.bytes,
            engines=[e for e in c.engines if e.generation in (0, c.generation)],
            live=c.live,
        )
        for c in status.caches
        if c.bytes
    ]
    return served + [
        Held(cache=o.cache, generation=o.generation, nbytes=o.bytes, engines=o.engines)
        for o in status.old_generations
    ]


class Resident(msgspec.Struct, frozen=True, kw_only=True):
    """Memory held by the daemon of `device` at the last change.

    stopped: it was told to end, so it may not come back; but a manager that restarts it keeps the
    memory.
    """

    device: str
    boot_id: str
    generations: list[Held]
    stopped: bool = False


def path_of(socket: Path) -> Path:
    """The file beside this socket."""
    return socket.with_suffix(".resident")


def write(socket: Path, resident: Resident) -> None:
    """Replace the file as a whole. Raises OSError."""
    path = path_of(socket)
    part = path.with_suffix(".resident.part")
    # O_EXCL on a fresh name never writes through a link that somebody put there.
    part.unlink(missing_ok=True)
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(resident))
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def read(socket: Path) -> Resident | None:
    """Memory last held by the daemon of this socket; None without a trustworthy file of this boot."""
    path = path_of(socket)
    try:
        check_private_dir(path.parent)
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
                return None
            found = msgspec.json.decode(file.read(MAX_BYTES), type=Resident)
    except (OSError, RuntimePathError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    # Device memory ends with the boot, and a socket_path may name another device's daemon.
    return found if (found.boot_id, found.device) == (boot_id(), socket.stem) else None


def boot_id() -> str:
    """Names this boot of the kernel."""
    return _BOOT_ID.read_text(encoding="ascii").strip()
