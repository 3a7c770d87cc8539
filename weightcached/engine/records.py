"""An engine's record in its directory, so that a new supervisor can take it back.

The engine writes it first, itself: a supervisor that is killed right after the fork knows nothing
of it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec

from weightcached.engine.tree import stat_of
from weightcached.wire.resident import boot_id


class Record(msgspec.Struct, kw_only=True):
    """An engine's record.

    start: of the first process, in ticks since `boot`; since, serving_since: seconds since 1970.
    """

    number: int
    digest: str
    pid: int
    start: int
    boot: str
    since: float
    arguments: dict[str, Any] = {}
    serving_since: float = 0.0
    facts: dict[str, Any] = {}


def record_of(number: int, digest: str, pid: int, arguments: dict[str, Any]) -> Record:
    """The record of an engine just started, which may have ended already."""
    stat = stat_of(pid, dead_too=True)
    return Record(
        number=number,
        digest=digest,
        pid=pid,
        start=stat.start if stat else 0,
        boot=boot_id(),
        since=time.time(),
        arguments=arguments,
    )


def write_record(directory: Path, record: Record) -> None:
    """Replace the file. Raises OSError, also if the directory is gone."""
    part = directory / f"record.{os.getpid()}"
    part.write_bytes(msgspec.json.encode(record))
    part.replace(directory / "record.json")


def read_record(directory: Path) -> Record | None:
    """The record of an engine that an earlier supervisor has started; None if it is unusable."""
    try:
        record = msgspec.json.decode((directory / "record.json").read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError):
        return None
    return record if record.boot == boot_id() else None
