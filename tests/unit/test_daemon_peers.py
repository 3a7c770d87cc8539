"""Peers are accepted by the kernel's credentials, never by default."""

from __future__ import annotations

import os
import socket
import struct
from typing import cast

import pytest

from weightcached.daemon.peers import PeerRefusedError, identify


class Socket:
    """Answers SO_PEERCRED as the test says, and knows no SO_PEERPIDFD, as before Linux 6.5."""

    def __init__(self, credentials: bytes | OSError) -> None:
        self._credentials = credentials

    def getsockopt(self, level: int, option: int, size: int = 0) -> bytes:
        assert level == socket.SOL_SOCKET
        if option == socket.SO_PEERCRED and isinstance(self._credentials, bytes):
            return self._credentials
        raise (
            self._credentials
            if isinstance(self._credentials, OSError)
            else OSError(92, "Protocol not available")
        )


def peer(credentials: bytes | OSError) -> socket.socket:
    return cast(socket.socket, Socket(credentials))


@pytest.mark.parametrize(
    "credentials", [OSError(95, "Operation not supported"), b"", b"\1\2\3"], ids=repr
)
def test_peer_whose_credentials_cannot_be_read_is_refused(credentials: bytes | OSError) -> None:
    with pytest.raises(
        PeerRefusedError,
        match=r"^cannot read the uid of this connection's peer \(.+\): the connection is refused$",
    ):
        identify(peer(credentials))


def test_peer_of_another_user_is_refused() -> None:
    text = f"uid 65534 may not use this daemon, it serves uid {os.getuid()} alone: run the engine as that user"
    with pytest.raises(PeerRefusedError) as refused:
        identify(peer(struct.pack("3i", 1, 65534, 65534)))
    assert str(refused.value) == text


def test_peer_without_a_pid_that_we_can_see_is_known_by_its_connection_alone() -> None:
    """pid 0: it lives in a pid namespace that is not ours."""
    connection = peer(struct.pack("3i", 0, os.getuid(), 0))
    seen = identify(connection)
    seen.follow(connection)
    assert (seen.pid, seen.pidfd) == (0, None)


def test_peer_is_followed_by_a_pidfd_on_older_kernels_too() -> None:
    connection = peer(struct.pack("3i", os.getpid(), os.getuid(), 0))
    seen = identify(connection)
    seen.follow(connection)
    assert seen.pid == os.getpid()
    assert seen.pidfd is not None
    assert os.readlink(f"/proc/self/fd/{seen.pidfd.fileno()}") == "anon_inode:[pidfd]"
    seen.close()


def test_real_connection_is_identified() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        seen = identify(ours)
        seen.follow(ours)
        assert seen.pid == os.getpid()
        assert seen.pidfd is not None
        seen.close()


def test_peer_that_we_cannot_see_is_known_even_without_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The daemon would accept nobody any more."""

    class Seen(Socket):
        def getsockopt(self, level: int, option: int, size: int = 0) -> bytes:
            if option == socket.SO_PEERCRED:
                return super().getsockopt(level, option, size)
            return cast(bytes, os.open("/", os.O_RDONLY | os.O_CLOEXEC))

    def fail(pid: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", fail)
    credentials = struct.pack("3i", 0, os.getuid(), 0)
    first, second = (identify(cast(socket.socket, Seen(credentials))) for _ in range(2))
    assert 0 > first.process > second.process
