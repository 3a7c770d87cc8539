"""One run of the loader child: from the job to a complete, checked generation.

A loader is not trusted to be well: it may crash, hang, be killed, or deliver half of what it
promised. In every case run() returns a complete and checked delivery or raises LoadFailedError, and
no process of it is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from weightcached.daemon import packets
from weightcached.daemon.children import Child
from weightcached.daemon.logs import printable
from weightcached.errors import (
    IndexFormatError,
    LoadError,
    OutOfDeviceMemoryError,
    ProtocolError,
)
from weightcached.index.key import WeightCacheKey
from weightcached.index.tensors import TensorIndex, read_index
from weightcached.system.fds import OwnedFd, close_all, is_sealed
from weightcached.system.paths import is_host_device
from weightcached.system.process import signal_name
from weightcached.system.waits import end_tasks, first_of
from weightcached.wire.framing import MAX_PACKET_FDS, Packet, recv_packet
from weightcached.wire.loader_job import YOUR_TURN, LoaderJob, Meeting, encode_job
from weightcached.wire.messages import (
    Descriptors,
    LoaderFailed,
    LoaderIndex,
    LoaderKey,
    LoaderMessage,
    LoaderProgress,
    Role,
    Source,
    decode_loader,
)

log = logging.getLogger(__name__)

DEFAULT_STALL_TIMEOUT_S = 600.0
# A loader that has said all it had to say unloads vLLM and leaves.
_EXIT_TIMEOUT_S = 60.0
_MAX_SEGMENTS = 16_384


class LoadFailedError(LoadError):
    """A load came to nothing. `permanent`: a retry without a change is pointless; no_room: for want
    of memory.
    """

    def __init__(self, message: str, *, permanent: bool = False, no_room: bool = False) -> None:
        super().__init__(message)
        self.permanent = permanent
        self.no_room = no_room


@dataclass(frozen=True)
class Delivery:
    """A loader's result, checked. The caller owns the descriptors."""

    index: TensorIndex
    index_digest: str
    index_fd: OwnedFd
    segment_fds: list[OwnedFd]
    source: Source = "loaded"
    # Where it was restored from.
    snapshot: Path | None = None


class LoadRequest(NamedTuple):
    """One cache to load, from the manifest. python: the engine's interpreter; None: ours. env:
    variables of its environment besides ours.
    """

    device: str
    cache: str
    role: Role
    generation: int
    spec_digest: str
    engine: dict[str, Any]
    rank: int
    dp_rank: int
    rendezvous: Meeting | None
    identity: Literal["full", "sampled"]
    python: str | None
    boot_id: str
    env: dict[str, str] = {}  # noqa: RUF012
    label: str = ""
    prepares: bool = False

    def job(self, socket_fd: int, *, waits: bool) -> LoaderJob:
        fields = self._asdict()
        del fields["python"], fields["env"]
        return LoaderJob(**fields, socket_fd=socket_fd, waits=waits)


OnProgress = Callable[[str, int, int], bool]
OnKey = Callable[[WeightCacheKey], None]


class LoaderRun:
    """One run of the loader.

    on_progress(phase, done_bytes, total_bytes) says whether that was progress; without any for
    `stall_timeout_s` the child is killed. A run whose `turn` is not set when it starts keeps away
    from the device until it is; how long that takes is not the child's fault. `command` replaces
    the interpreter and module, for tests.
    """

    def __init__(
        self,
        request: LoadRequest,
        *,
        on_progress: OnProgress,
        on_key: OnKey,
        turn: asyncio.Event | None = None,
        stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S,
        command: Sequence[str] | None = None,
    ) -> None:
        self._request = request
        self._name = request.cache
        self._on_progress = on_progress
        self._on_key = on_key
        self._turn = turn or asyncio.Event()
        if turn is None:
            self._turn.set()
        self._stall_timeout_s = stall_timeout_s
        self._command = list(
            command or (request.python or sys.executable, "-m", "weightcached.loader")
        )
        self._deadline_s = 0.0
        self._last = "starting"
        self._index: OwnedFd | None = None
        self._expected = 0
        self._segments: list[OwnedFd] = []

    async def run(self) -> Delivery:
        """Load. Raises LoadFailedError.

        After an error or cancellation every descriptor is closed and the child killed.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        waits = self._has_to_wait
        try:
            with ours:
                with theirs:
                    child = self._start(theirs.fileno(), waits=waits)
                ours.setblocking(False)
                async with child, self._announce_turn(ours, waits=waits):
                    await self._receive(ours, child)
                    # Published only once the child is gone: its device context counts against the
                    # first engine's memory, and the next load's.
                    await self._follow_tuning(ours, child)
                    await self._await_exit(child)
            return await asyncio.to_thread(self._check_delivery)
        except BaseException:
            close_all([*self._segments, *([self._index] if self._index else [])])
            raise

    def _start(self, socket_fd: int, *, waits: bool) -> Child:
        request = self._request
        job = encode_job(request.job(socket_fd, waits=waits))
        try:
            child = Child(
                self._command,
                self._name,
                stdin=job,
                device=request.device,
                env=request.env,
                pass_fds=[socket_fd],
            )
        except OSError as e:
            raise LoadFailedError(
                f"loader of {self._name} cannot be started with {self._command[0]}: {e.strerror}; "
                "python: in the manifest names the interpreter that runs the engine",
                permanent=isinstance(e, FileNotFoundError | PermissionError | NotADirectoryError),
            ) from e
        log.info(
            "loader started cache=%s generation=%d pid=%d",
            self._name,
            request.generation,
            child.pid,
        )
        return child

    @property
    def _has_to_wait(self) -> bool:
        return not self._turn.is_set()

    @contextlib.asynccontextmanager
    async def _announce_turn(self, ours: socket.socket, *, waits: bool) -> AsyncIterator[None]:
        """Tell a waiting child when its turn has come."""
        if not waits:
            yield
            return

        async def give() -> None:
            await self._turn.wait()
            self._deadline_s = asyncio.get_running_loop().time() + self._stall_timeout_s
            # A child that has ended meanwhile is its receiver's business.
            with contextlib.suppress(OSError):
                ours.send(YOUR_TURN)

        giver = asyncio.create_task(give())
        try:
            yield
        finally:
            await end_tasks(giver)

    async def _receive(self, ours: socket.socket, child: Child) -> None:
        """Take messages until the delivery is complete or the child has hung up."""
        loop = asyncio.get_running_loop()
        self._deadline_s = loop.time() + self._stall_timeout_s
        while not self._is_complete:
            try:
                packet = await self._next_packet(ours, child)
            except (EOFError, OSError):
                return
            except ProtocolError as e:
                raise self._protocol_error(str(e)) from e
            if self._handle_packet(packet):
                self._deadline_s = loop.time() + self._stall_timeout_s

    async def _next_packet(self, ours: socket.socket, child: Child) -> Packet:
        """The child's next packet. Raises EOFError, also if only a grandchild is left."""
        if not child.exit.done():
            loop = asyncio.get_running_loop()
            listener = asyncio.create_task(packets.recv(ours, max_fds=MAX_PACKET_FDS))
            try:
                while not child.exit.done():
                    left_s = (
                        self._stall_timeout_s
                        if self._has_to_wait
                        else self._deadline_s - loop.time()
                    )
                    await first_of(listener, child.exit, timeout_s=left_s)
                    if listener.done():
                        return listener.result()
                    if (
                        not self._has_to_wait
                        and loop.time() >= self._deadline_s
                        and not child.exit.done()
                    ):
                        raise self._stall_error()
            finally:
                await end_tasks(listener)
        # All that it had to say is in the queue by now.
        try:
            return recv_packet(ours, max_fds=MAX_PACKET_FDS)
        except BlockingIOError as e:
            raise EOFError from e

    @property
    def _is_complete(self) -> bool:
        return self._index is not None and len(self._segments) == self._expected

    def _handle_packet(self, packet: Packet) -> bool:
        """Act on one packet. Returns whether it was progress; keeps or closes its descriptors."""
        fds = packet.fds
        try:
            message = decode_loader(packet.data)
            if isinstance(message, LoaderProgress):
                self._last = f"{message.phase}, {message.done_bytes} of {message.total_bytes} bytes"
                return self._on_progress(message.phase, message.done_bytes, message.total_bytes)
            if isinstance(message, LoaderFailed):
                raise LoadFailedError(
                    printable(message.message) or message.code,
                    permanent=message.permanent,
                    no_room=message.code == OutOfDeviceMemoryError.code,
                )
            if isinstance(message, LoaderKey):
                self._on_key(message.key)
            elif isinstance(message, LoaderIndex):
                self._take_index(message, fds)
                fds = []
            else:
                self._take_segments(message, fds)
                fds = []
            return True
        except ProtocolError as e:
            raise self._protocol_error(str(e)) from e
        finally:
            close_all(fds)

    def _take_index(self, message: LoaderIndex, fds: list[OwnedFd]) -> None:
        if self._index is not None or len(fds) != 1 or message.segments > _MAX_SEGMENTS:
            close_all(fds)
            raise ProtocolError(
                f"an index of {message.segments} segments came with {len(fds)} descriptors: expected one index, "
                f"one descriptor, at most {_MAX_SEGMENTS} segments"
            )
        self._index, self._expected = fds[0], message.segments

    def _take_segments(self, message: Descriptors, fds: list[OwnedFd]) -> None:
        first, self._segments = len(self._segments), [*self._segments, *fds]
        if (
            self._index is None
            or message.first != first
            or not fds
            or len(self._segments) > self._expected
        ):
            raise ProtocolError(
                f"descriptors {message.first} to {message.first + len(fds) - 1} came, expected "
                f"number {first} of {self._expected}"
            )

    def _stall_error(self) -> LoadFailedError:
        return LoadFailedError(
            f"loader of {self._name} made no progress for {self._stall_timeout_s:.0f} s, last: {self._last}: "
            "it was killed; its last lines are in the log"
        )

    def _protocol_error(self, what: str) -> LoadFailedError:
        return LoadFailedError(
            f"loader of {self._name} broke the protocol: {what}; it was killed. Check that "
            f"{self._command[0]} has the daemon's version of weightcached"
        )

    async def _follow_tuning(self, ours: socket.socket, child: Child) -> None:
        """Let a child go on after its delivery, to tune kernels, as long as it reports progress."""
        loop = asyncio.get_running_loop()
        self._deadline_s = loop.time() + _EXIT_TIMEOUT_S
        # Nobody needs these messages, so errors in them do not matter.
        with contextlib.suppress(EOFError, OSError, ProtocolError, LoadFailedError):
            while self._is_complete:
                packet = await self._next_packet(ours, child)
                close_all(packet.fds)
                if self._is_progress(decode_loader(packet.data)):
                    self._deadline_s = loop.time() + self._stall_timeout_s

    def _is_progress(self, message: LoaderMessage) -> bool:
        return isinstance(message, LoaderProgress) and self._on_progress(
            message.phase, message.done_bytes, message.total_bytes
        )

    async def _await_exit(self, child: Child) -> None:
        """Wait for the child's end; judge it, unless it has delivered everything before."""
        try:
            async with asyncio.timeout_at(self._deadline_s):
                status: int | None = await asyncio.shield(child.exit)
        except TimeoutError:
            status = None
        if self._is_complete:
            if status != 0:
                log.warning(
                    "loader delivered everything and ended badly cache=%s status=%s",
                    self._name,
                    status,
                )
            return
        raise LoadFailedError(self._describe_exit(status, child.last_error_line))

    def _describe_exit(self, status: int | None, last_line: str) -> str:
        name = f"loader of {self._name}"
        if status is None:
            return f"{name} closed its socket and then ran on for {_EXIT_TIMEOUT_S:.0f} s: it was killed"
        if status == -signal.SIGKILL:
            return f"{name} died of SIGKILL; if the kernel ran out of memory, 'journalctl --user -k' or dmesg says so"
        if status < 0:
            return f"{name} died of {signal_name(-status)}" + (
                f": {last_line}" if last_line else ""
            )
        if status > 0:
            return f"{name} ended with status {status}: {last_line or 'it printed no reason'}"
        if self._index is None:
            return f"{name} ended with status 0 and delivered no index"
        return f"{name} ended with status 0 and delivered {len(self._segments)} of {self._expected} segments"

    def _check_delivery(self) -> Delivery:
        """Compare the delivery with the request. Runs in a thread: an index may be large."""
        if self._index is None:
            raise AssertionError("an incomplete delivery is never checked")
        try:
            index, digest = read_index(self._index)
        except IndexFormatError as e:
            raise self._protocol_error(str(e)) from e
        for field in ("device", "cache", "role", "generation", "spec_digest", "boot_id"):
            asked, got = getattr(self._request, field), getattr(index, field)
            if asked != got:
                raise self._protocol_error(f"its index has {field} {got!r}, expected {asked!r}")
        if len(index.segments) != len(self._segments):
            raise self._protocol_error(
                f"its index lists {len(index.segments)} segments, {len(self._segments)} came"
            )
        if is_host_device(self._request.device) != (index.backend == "host"):
            raise self._protocol_error(
                f"its index has backend {index.backend!r} for device {index.device}"
            )
        if index.backend == "host":
            for number, (fd, segment) in enumerate(
                zip(self._segments, index.segments, strict=True)
            ):
                fault = host_segment_fault(fd.fileno(), segment.nbytes)
                if fault:
                    raise self._protocol_error(f"segment {number} {fault}")
        return Delivery(index, digest, self._index, self._segments)


def host_segment_fault(fd: int, nbytes: int) -> str:
    """Why a descriptor is not a host segment of `nbytes`, or ""."""
    if not is_sealed(fd):
        return "is not a memfd sealed against write, grow and shrink"
    actual = os.fstat(fd).st_size
    return "" if actual == nbytes else f"holds {actual} bytes, its index says {nbytes}"
