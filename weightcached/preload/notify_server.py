"""The service manager's part for one daemon of `weightcached preload`: keeps its descriptors, waits
for its readiness. Speaks sd_notify(3) as systemd does for a unit: FDSTORE=, FDSTOREREMOVE=,
BARRIER=, READY=, STATUS=. It ignores everything else, watchdog and time-outs too: the user of the
command sees a daemon that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from pathlib import Path

from weightcached.errors import ProtocolError, RuntimePathError
from weightcached.system.fds import OwnedFd, close_all
from weightcached.system.notify import fields_of
from weightcached.wire.framing import recv_unread

log = logging.getLogger(__name__)

_MAX_FDS = 16


class NotifyServer:
    """One daemon's manager. kept: its descriptors by name, owned here; ready: set by READY=1."""

    def __init__(self, path: Path) -> None:
        """Listen on a socket at `path`, in a directory that only this user may enter. Needs a
        running loop.

        Raises RuntimePathError.
        """
        self.address = str(path)
        self.kept: dict[str, OwnedFd] = {}
        self.status = ""
        self.ready = asyncio.Event()
        self._sock = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )
        try:
            self._sock.bind(self.address)
        except OSError as e:
            self._sock.close()
            raise RuntimePathError(
                f"cannot listen on {path}: {e.strerror or e}; use a shorter socket directory"
            ) from e
        asyncio.get_running_loop().add_reader(self._sock.fileno(), self.drain)

    def drain(self) -> None:
        """Take every message that has come so far."""
        while True:
            try:
                # Not socket.recv_fds(): the other daemons would inherit what it receives, and keep
                # memory that this one has freed.
                packet = recv_unread(self._sock, max_fds=_MAX_FDS)
            except BlockingIOError:
                return
            except (EOFError, ProtocolError) as e:
                log.warning("message of a daemon passed over: %s", e)
                continue
            self._take(packet.data.decode(errors="replace"), packet.fds)

    def _take(self, state: str, fds: list[OwnedFd]) -> None:
        fields = fields_of(state)
        name = fields.get("FDNAME", "")
        if (
            "FDSTORE" in fields
            and len(fds) == 1
            and name
            and ":" not in name
            and name not in self.kept
        ):
            self.kept[name] = fds.pop()
        elif "FDSTOREREMOVE" in fields and name in self.kept:
            self.kept.pop(name).close()
        # Also answers BARRIER=1: the sender waits until its pipe is closed.
        close_all(fds)
        self.status = fields.get("STATUS", self.status)
        if fields.get("READY") == "1":
            self.ready.set()

    def close(self) -> None:
        """Let go of all descriptors and of the socket. May be called twice."""
        if self._sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
            self._sock.close()
        with contextlib.suppress(FileNotFoundError):
            Path(self.address).unlink()
        close_all(self.kept.values())
        self.kept.clear()
