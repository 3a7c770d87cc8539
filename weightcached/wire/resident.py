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
ON_DEMAND = "models on demand"
NEXT = "next weights of live models"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Device memory of one generation, and the engines that map it.

    reserved: not held yet, but kept for models on demand, or for new weights beside the present ones.
    """

    cache: str
    generation: int
    nbytes: int
    engines: list[EngineStatus]
    reserved: bool = False


def held(status: StatusReply) -> list[Held]:
    """The daemon's list of the memory that it holds, of old generations that engines keep, and of
    what it may hold yet.
    """
    served = [
        Held(
            cache=c.name,
            generation=c.generation,
            nbytes=c.bytes,
            engines=[e for e in c.engines if e.generation in (0, c.generation)],
        )
        for c in status.caches
        if c.bytes
    ]
    old = [
        Held(cache=o.cache, generation=o.generation, nbytes=o.bytes, engines=o.engines)
        for o in status.old_generations
    ]
    reserved = _reserved(status, sum(h.nbytes for h in served + old))
    return [*served, *old, *reserved, *_next(status)]


def _next(status: StatusReply) -> list[Held]:
    """Room for the next generation of a live model beside the present one, for the largest of them.

    One that is there already, because an engine still maps the one before, needs no more.
    """
    by_model: dict[str, int] = {}
    for cache in status.caches:
        if cache.live:
            model = cache.name.rpartition("/")[0]
            by_model[model] = by_model.get(model, 0) + cache.bytes
    for old in status.old_generations:
        model = old.cache.rpartition("/")[0]
        if model in by_model:
            by_model[model] -= old.bytes
    nbytes = max([0, *by_model.values()])
    return (
        [Held(cache=NEXT, generation=0, nbytes=nbytes, engines=[], reserved=True)] if nbytes else []
    )


def _reserved(status: StatusReply, held_bytes: int) -> list[Held]:
    """The rest of the budget, as far as models on demand that are not there may need it."""
    away = [c for c in status.caches if c.resident == "on-demand" and not c.bytes]
    nbytes = status.budget - held_bytes
    if all(cache.snapshot_bytes for cache in away):
        nbytes = min(nbytes, sum(cache.snapshot_bytes for cache in away))
    if not away or nbytes <= 0:
        return []
    return [Held(cache=ON_DEMAND, generation=0, nbytes=nbytes, engines=[], reserved=True)]


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
