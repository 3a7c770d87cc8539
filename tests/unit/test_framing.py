"""Packets and descriptors: limits hold in both directions, and no descriptor stays open."""

from __future__ import annotations

import array
import fcntl
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightcached.errors import ProtocolError
from weightcached.system.fds import OwnedFd, close_all, is_sealed, read_sealed, sealed_memfd
from weightcached.wire import framing
from weightcached.wire.framing import (
    MAX_LARGE_BYTES,
    MAX_PACKET_BYTES,
    MAX_PACKET_FDS,
    recv_packet,
    send_packet,
)

CUT_OFF = (
    "a packet was cut off: too many bytes or descriptors for this message, or more descriptors than this process may "
    "still open (LimitNOFILE=, ulimit -n)"
)
Pair = tuple[socket.socket, socket.socket]


def open_descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@pytest.fixture(autouse=True)
def no_descriptor_leaks() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() == before


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(60)
        theirs.settimeout(60)
        yield ours, theirs


@pytest.fixture
def files() -> Iterator[list[int]]:
    """As many descriptors as the kernel takes in one message: 253."""
    fds = [os.memfd_create("f") for _ in range(253)]
    yield fds
    for fd in fds:
        os.close(fd)


def raw_send(sock: socket.socket, data: bytes, *fds: int) -> None:
    """A packet of a peer without our limits."""
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


def refused(sock: socket.socket, text: str, *, max_fds: int = 0) -> None:
    with pytest.raises(ProtocolError, match=f"^{re.escape(text)}$"):
        recv_packet(sock, max_fds=max_fds)


@pytest.mark.parametrize("nbytes", [1, MAX_PACKET_BYTES, MAX_PACKET_BYTES + 1, MAX_LARGE_BYTES])
def test_data_arrives_whole(pair: Pair, nbytes: int) -> None:
    data = os.urandom(min(nbytes, 1024)) * (nbytes // min(nbytes, 1024) + 1)
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_PACKET_BYTES)
    send_packet(pair[0], data[:nbytes])
    packet = recv_packet(pair[1], max_fds=0)
    assert packet.data == data[:nbytes]
    assert packet.fds == []


@pytest.mark.parametrize("count", [1, 2, 3, MAX_PACKET_FDS])
def test_descriptors_arrive_in_order_and_close_on_exec(
    pair: Pair, files: list[int], count: int
) -> None:
    send_packet(pair[0], b"x", files[:count])
    packet = recv_packet(pair[1], max_fds=count)
    inodes = [os.fstat(fd.fileno()).st_ino for fd in packet.fds]
    flags = {fcntl.fcntl(fd.fileno(), fcntl.F_GETFD) for fd in packet.fds}
    close_all(packet.fds)
    assert inodes == [os.fstat(fd).st_ino for fd in files[:count]]
    assert flags == {fcntl.FD_CLOEXEC}


@pytest.mark.parametrize(
    ("data", "count", "text"),
    [
        (b"x", 251, "251 descriptors in one packet, at most 250 fit"),
        (b"", 0, "an empty packet cannot be told from the end of the connection"),
        (
            b"x" * (MAX_LARGE_BYTES + 1),
            0,
            "message of 16777217 bytes, at most 16777216 are allowed",
        ),
        (
            b"x" * (MAX_PACKET_BYTES + 1),
            1,
            "a message larger than one packet cannot carry descriptors of its own",
        ),
    ],
)
def test_sender_refuses_what_is_out_of_limits(
    pair: Pair, files: list[int], data: bytes, count: int, text: str
) -> None:
    with pytest.raises(ProtocolError, match=f"^{re.escape(text)}$"):
        send_packet(pair[0], data, files[:count])
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        recv_packet(pair[1], max_fds=0)


def test_end_of_connection_is_eof(pair: Pair) -> None:
    pair[0].close()
    with pytest.raises(EOFError, match=r"^the peer closed the connection$"):
        recv_packet(pair[1], max_fds=MAX_PACKET_FDS)


def test_packets_sent_before_the_end_are_read_first(pair: Pair) -> None:
    send_packet(pair[0], b"last")
    pair[0].close()
    assert recv_packet(pair[1], max_fds=0).data == b"last"
    with pytest.raises(EOFError):
        recv_packet(pair[1], max_fds=0)


def test_full_non_blocking_socket_takes_nothing(pair: Pair, files: list[int]) -> None:
    pair[0].setblocking(False)
    sent = 0
    with pytest.raises(BlockingIOError):  # noqa: PT012
        while True:
            send_packet(pair[0], b"%d" % sent + b"x" * 60_000, files[:1])
            sent += 1
    for number in range(sent):
        packet = recv_packet(pair[1], max_fds=1)
        close_all(packet.fds)
        assert packet.data.startswith(b"%dx" % number)
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        recv_packet(pair[1], max_fds=1)


def test_too_long_packet_is_refused_and_the_next_one_is_read(pair: Pair, files: list[int]) -> None:
    pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_PACKET_BYTES)
    raw_send(pair[0], b"x" * (MAX_PACKET_BYTES + 1), files[0])
    send_packet(pair[0], b"next")
    refused(pair[1], CUT_OFF, max_fds=1)
    assert recv_packet(pair[1], max_fds=0).data == b"next"


@pytest.mark.parametrize(("sent", "allowed"), [(1, 0), (2, 1), (4, 3), (251, 250)])
def test_excess_of_descriptors_is_counted_and_closed(
    pair: Pair, files: list[int], sent: int, allowed: int
) -> None:
    raw_send(pair[0], b"x", *files[:sent])
    refused(
        pair[1], f"{sent} descriptors came with a message that may carry {allowed}", max_fds=allowed
    )


@pytest.mark.parametrize(("sent", "allowed"), [(253, 0), (253, 100), (9, 1)])
def test_truncated_ancillary_data_is_refused_and_what_came_is_closed(
    pair: Pair, files: list[int], sent: int, allowed: int
) -> None:
    raw_send(pair[0], b"x", *files[:sent])
    refused(pair[1], CUT_OFF, max_fds=allowed)


def test_more_is_never_taken_than_the_kernels_limit(pair: Pair, files: list[int]) -> None:
    raw_send(pair[0], b"x", *files[:251])
    refused(pair[1], "251 descriptors came with a message that may carry 250", max_fds=250)
    raw_send(pair[0], b"x", *files)
    refused(pair[1], CUT_OFF, max_fds=10_000)


def test_lack_of_free_descriptors_is_named_and_what_came_is_closed(
    pair: Pair, files: list[int]
) -> None:
    send_packet(pair[0], b"x", files[:100])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The fixture's files are open, so this leaves room for about 30 of the 100.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, open_descriptors())) + 30, limits[1]))
    try:
        refused(pair[1], CUT_OFF, max_fds=100)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_empty_packet_with_descriptors_is_refused(pair: Pair, files: list[int]) -> None:
    raw_send(pair[0], b"", files[0])
    refused(pair[1], "a packet without data carried descriptors", max_fds=1)


# ---- messages in a memfd


def large(sock: socket.socket, *fds: int) -> None:
    raw_send(sock, framing._LARGE, *fds)


def test_large_message_in_an_unsealed_memfd_is_refused(pair: Pair) -> None:
    with OwnedFd(os.memfd_create("m", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)) as fd:
        os.write(fd.fileno(), b"x")
        large(pair[0], fd.fileno())
        refused(pair[1], "message in a memfd: the descriptor is not a memfd sealed against change")


@pytest.mark.parametrize(
    "left_out", [fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL]
)
def test_every_seal_is_required(left_out: int) -> None:
    every = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    with OwnedFd(os.memfd_create("m", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)) as fd:
        fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, every & ~left_out)
        assert not is_sealed(fd.fileno())


def test_large_message_in_something_else_is_refused(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    reader, writer = os.pipe()
    descriptors = [
        os.open(tmp_path / "f", os.O_RDONLY),
        os.open("/dev/zero", os.O_RDONLY),
        reader,
        writer,
    ]
    descriptors.append(os.open(tmp_path / "f", os.O_PATH))
    for fd in descriptors:
        large(pair[0], fd)
        refused(pair[1], "message in a memfd: the descriptor is not a memfd sealed against change")
        os.close(fd)


def test_large_message_open_for_writing_only_is_refused(pair: Pair) -> None:
    with (
        sealed_memfd("m", b"x") as fd,
        OwnedFd(os.open(f"/proc/self/fd/{fd.fileno()}", os.O_WRONLY)) as blind,
    ):
        large(pair[0], blind.fileno())
        refused(pair[1], "message in a memfd: the descriptor is not open for reading")


def test_large_message_over_its_limit_is_refused_unread(pair: Pair) -> None:
    with OwnedFd(os.memfd_create("m", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)) as fd:
        # Sparse: 1 TiB that nobody could read into memory.
        os.ftruncate(fd.fileno(), 1 << 40)
        fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, 0x000F)
        large(pair[0], fd.fileno())
        refused(
            pair[1],
            "message in a memfd: the memfd holds 1099511627776 bytes, at most 16777216 are allowed",
        )


def test_large_message_with_two_descriptors_is_no_large_message(
    pair: Pair, files: list[int]
) -> None:
    large(pair[0], *files[:2])
    refused(pair[1], "2 descriptors came with a message that may carry 0")


def test_large_message_without_its_descriptor_is_plain_data(pair: Pair) -> None:
    send_packet(pair[0], framing._LARGE)
    assert recv_packet(pair[1], max_fds=0).data == framing._LARGE


def test_position_of_a_memfd_does_not_matter() -> None:
    with sealed_memfd("m", b"content") as fd:
        os.lseek(fd.fileno(), 3, os.SEEK_SET)
        assert read_sealed(fd.fileno(), max_nbytes=7) == b"content"
        with pytest.raises(ValueError, match=r"^the memfd holds 7 bytes, at most 6 are allowed$"):
            read_sealed(fd.fileno(), max_nbytes=6)


def test_sealed_memfd_cannot_be_changed() -> None:
    with sealed_memfd("m", b"content") as fd:
        assert is_sealed(fd.fileno())
        with pytest.raises(PermissionError):
            os.pwrite(fd.fileno(), b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd.fileno(), 3)


# ---- owners


def test_owned_descriptor_is_closed_once() -> None:
    fd = OwnedFd(os.memfd_create("m"))
    number = fd.fileno()
    fd.close()
    reused = os.memfd_create("other")
    assert reused == number, "the kernel gives the lowest free number"
    fd.close()
    assert os.fstat(reused)
    os.close(reused)
    assert fd.closed
    assert repr(fd) == "OwnedFd(closed)"
    with pytest.raises(ValueError, match=r"^descriptor is closed or was taken$"):
        fd.fileno()


def test_taken_descriptor_is_the_callers() -> None:
    with OwnedFd(os.memfd_create("m")) as fd:
        number = fd.take()
        assert fd.closed
    assert os.fstat(number)
    os.close(number)
    with pytest.raises(ValueError, match=r"^descriptor is closed or was taken$"):
        fd.take()


def test_forgotten_descriptor_is_closed_with_its_owner() -> None:
    fd = OwnedFd(os.memfd_create("m"))
    number = fd.fileno()
    del fd
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_duplicate_lives_on_its_own_and_not_past_exec() -> None:
    with OwnedFd(os.memfd_create("m")) as fd:
        twin = fd.dup()
    with twin:
        assert twin.fileno() > 2
        assert fcntl.fcntl(twin.fileno(), fcntl.F_GETFD) == fcntl.FD_CLOEXEC
        command = [sys.executable, "-c", f"import os; os.fstat({twin.fileno()})"]
        done = subprocess.run(command, capture_output=True, text=True, close_fds=False, check=False)
        assert "Bad file descriptor" in done.stderr


def test_half_built_owner_is_destroyed_quietly() -> None:
    OwnedFd.__new__(OwnedFd).__del__()
