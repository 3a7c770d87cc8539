"""The protocol of a service and its manager: sd_notify(3) and sd_listen_fds(3), both ways.

The daemon is such a service; `weightcached preload` is a manager too.
"""

from __future__ import annotations

import array
import fcntl
import os
import select
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from weightcached.system.fds import OwnedFd

# The first descriptor that a manager passes (SD_LISTEN_FDS_START).
LISTEN_FDS_START = 3
# Variables that the manager gives to one process: a child that used them would speak in its name.
FOR_THIS_PROCESS = (
    "NOTIFY_SOCKET",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
)
# systemd ignores a datagram of more than 4096 bytes entirely.
_STATUS_CHARS = 3500


def status_line(text: str) -> str:
    """STATUS= with one ASCII line, cut to the length that the protocol takes."""
    plain = " ".join(text.split()).encode("ascii", "replace").decode()
    return f"STATUS={plain[:_STATUS_CHARS]}"


def fields_of(state: str) -> dict[str, str]:
    """The assignments of one message, by name."""
    return dict(line.partition("=")[::2] for line in state.splitlines())


def watchdog_period_s(environ: Mapping[str, str]) -> float | None:
    """The period for WATCHDOG=1: half of the manager's limit for this process; or None."""
    usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", str(os.getpid()))
    if not usec.isdecimal() or int(usec) == 0 or pid != str(os.getpid()):
        return None
    return int(usec) / 2_000_000


class Stored(NamedTuple):
    """A descriptor as the manager passed it, under its name in the store."""

    name: str
    fd: OwnedFd


def inherited(environ: MutableMapping[str, str]) -> list[Stored]:
    """The descriptors that the manager passed to this very process; the variables are removed."""
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    names = environ.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    stored = []
    for number in range(int(count)):
        fd = LISTEN_FDS_START + number
        fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        stored.append(Stored(names[number] if number < len(names) else "", OwnedFd(fd)))
    return stored


def listen_variables(names: Sequence[str]) -> dict[str, str]:
    """Variables that tell the calling process, after its exec, of its inherited descriptors."""
    if not names:
        return {}
    return {
        "LISTEN_PID": str(os.getpid()),
        "LISTEN_FDS": str(len(names)),
        "LISTEN_FDNAMES": ":".join(names),
    }


def connect(address: str) -> socket.socket:
    """A socket for messages to the manager at `address`. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        # "@" stands for the zero byte of an abstract socket.
        sock.connect("\0" + address[1:] if address.startswith("@") else address)
    except BaseException:
        sock.close()
        raise
    return sock


def send(sock: socket.socket, state: str, fd: int | None = None) -> None:
    """Send one message, and a copy of a descriptor with it. Raises OSError."""
    rights = array.array("i", [] if fd is None else [fd])
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
    sock.sendmsg([state.encode()], ancillary, socket.MSG_NOSIGNAL)


def store_message(name: str) -> str:
    """Has the manager keep the descriptor that comes with it, under `name`.

    FDPOLL=0: it would otherwise watch the descriptor and drop it on POLLHUP or POLLERR.
    """
    return f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0"


def remove_message(name: str) -> str:
    """Has the manager close what it keeps under `name`."""
    return f"FDSTOREREMOVE=1\nFDNAME={name}"


class StoreConnection:
    """A connection to the manager's descriptor store. Without an address nothing happens.

    Every call raises OSError if the manager cannot be reached within `timeout_s`.
    """

    def __init__(self, address: str | None, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._sock = connect(address) if address else None
        if self._sock is not None:
            self._sock.settimeout(timeout_s)

    def store(self, name: str, fd: OwnedFd) -> None:
        """Have the manager keep a descriptor under `name`."""
        self._send(store_message(name), fd.fileno())

    def remove(self, name: str) -> None:
        """Have the manager close what it keeps under `name`."""
        self._send(remove_message(name))

    def barrier(self) -> None:
        """Return once the manager has handled all messages: it then closes its end of a pipe."""
        if self._sock is None:
            return
        reader, writer = map(OwnedFd, os.pipe2(os.O_CLOEXEC))
        with reader:
            with writer:
                self._send("BARRIER=1", writer.fileno())
            poll = select.poll()
            poll.register(reader.fileno(), select.POLLHUP)
            if not poll.poll(self._timeout_s * 1000):
                raise TimeoutError(f"no answer for {self._timeout_s:.0f} s")

    def _send(self, state: str, fd: int | None = None) -> None:
        if self._sock is not None:
            send(self._sock, state, fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._sock is not None:
            self._sock.close()
