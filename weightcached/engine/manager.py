"""Messages to the service manager, and descriptors that it keeps. Outside a unit: nothing."""

from __future__ import annotations

import contextlib
import socket

from weightcached.system import notify


class Manager:
    """The manager named in NOTIFY_SOCKET.

    Never waits: a message that it cannot take at once is lost, but a supervisor whose manager hangs
    goes on.
    """

    def __init__(self, address: str | None) -> None:
        self._sock: socket.socket | None = None
        with contextlib.suppress(OSError):
            if address:
                self._sock = notify.connect(address)
                self._sock.setblocking(False)

    def tell(self, state: str, fd: int | None = None) -> None:
        """Send one state, and a descriptor with it."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                notify.send(self._sock, state, fd)

    def status(self, text: str) -> None:
        self.tell(notify.status_line(text))

    def store(self, name: str, fd: int) -> None:
        """Keep a descriptor until the unit is stopped."""
        self.tell(notify.store_message(name), fd)

    def drop(self, name: str) -> None:
        self.tell(notify.remove_message(name))
