"""What the service manager is told and keeps for the supervisor: sd_notify(3), sd_listen_fds(3).

Outside of a unit all of it does nothing.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
from collections.abc import Mapping, MutableMapping

from weightcached.system.fds import OwnedFd

_LISTEN_FDS_START = 3
_STATUS_CHARS = 3500


class Manager:
    """The manager named in NOTIFY_SOCKET. Never waits: what it cannot take at once is lost, but a
    supervisor whose manager hangs goes on.
    """

    def __init__(self, address: str | None) -> None:
        self._sock: socket.socket | None = None
        if address:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            sock.setblocking(False)
            try:
                sock.connect("\0" + address[1:] if address.startswith("@") else address)
                self._sock = sock
            except OSError:
                sock.close()

    def tell(self, state: str, fd: int | None = None) -> None:
        """Send one state, and a descriptor with it."""
        if self._sock is None:
            return
        rights = (
            [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        )
        with contextlib.suppress(OSError):
            self._sock.sendmsg([state.encode()], rights, socket.MSG_NOSIGNAL)

    def status(self, text: str) -> None:
        plain = " ".join(text.split()).encode("ascii", "replace").decode()[:_STATUS_CHARS]
        self.tell(f"STATUS={plain}")

    def store(self, name: str, fd: int) -> None:
        """Keep a descriptor until the unit is stopped. FDPOLL=0: a listening socket that reports
        an error must not be dropped.
        """
        self.tell(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", fd)

    def drop(self, name: str) -> None:
        self.tell(f"FDSTOREREMOVE=1\nFDNAME={name}")


def stored(environ: MutableMapping[str, str]) -> dict[str, OwnedFd]:
    """The descriptors that the manager passed to this very process, by name; the variables are
    removed. Of several with one name the last is kept.
    """
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    names = environ.pop("LISTEN_FDNAMES", "").split(":")
    found: dict[str, OwnedFd] = {}
    if pid != str(os.getpid()) or not count.isdecimal():
        return found
    for number in range(int(count)):
        fd = _LISTEN_FDS_START + number
        fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        found[names[number] if number < len(names) else ""] = OwnedFd(fd)
    return found


def watchdog_period_s(environ: Mapping[str, str]) -> float | None:
    """Half of the time within which the manager wants to hear from us; None where it does not
    watch.
    """
    usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", str(os.getpid()))
    if not usec.isdecimal() or int(usec) == 0 or pid != str(os.getpid()):
        return None
    return int(usec) / 2_000_000
