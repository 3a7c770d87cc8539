"""While this process's engine measures the device's memory, sleeps or wakes, the daemon neither loads nor frees.

vLLM asserts on the free memory of the whole device then. The connection is the guard: it ends with
the process in every case. An engine holds loads off from its attach to the end of its start.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from weightcache_loader import client
from weightcached.wire.connection import Connection

_held: Connection | None = None
_asked = False
# The socket at which this process's engine attached, or asked.
_path: Path | None = None


def begin(path: Path, *, connect_timeout_s: float, state_timeout_s: float) -> None:
    """Hold loads off until end(); replaces this process's former hold."""
    global _asked, _held, _path  # noqa: PLW0603  one engine a process at a time, as vLLM has it
    end()
    _path, _asked = path, True
    _held = client.hold_loads(
        path, connect_timeout_s=connect_timeout_s, state_timeout_s=state_timeout_s
    )


def was_asked() -> bool:
    """Whether this process's engine has asked since it began to start, whatever the answer was."""
    return _asked


def end() -> None:
    """The engine has started; may be called at any time."""
    global _asked, _held
    held, _held, _asked = _held, None, False
    if held is not None:
        held.close()


def for_a_moment() -> AbstractContextManager[None]:
    """For the time of the block, if this process's engine has a daemon."""
    return client.loads_held(_path)
