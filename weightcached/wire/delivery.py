"""A loading child's side of the socket to its daemon: progress, failure, and the delivery.

The loader and the restorer of snapshots both speak it; daemon/loading.py is the other end.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable

import msgspec

from weightcached.errors import EXIT_CONFIG, LoadError, WeightcachedError
from weightcached.index import tensors as index_format
from weightcached.system.fds import OwnedFd, sealed_memfd
from weightcached.system.process import die_with_parent, prefer_for_oom_killer
from weightcached.wire.framing import MAX_PACKET_FDS, send_packet
from weightcached.wire.loader_job import YOUR_TURN, LoaderJob, decode_job
from weightcached.wire.messages import (
    Descriptors,
    LoaderFailed,
    LoaderIndex,
    LoaderProgress,
    Message,
    encode,
)

log = logging.getLogger("weightcached.loader")

_PROGRESS_INTERVAL_S = 0.2


class DaemonChannel:
    """The socket to the daemon, and the time spent in each phase."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._phase = ""
        self._phase_began = self._started = time.monotonic()
        self._last_sent = 0.0
        self.phases: dict[str, float] = {}

    def send(self, message: Message, fds: list[OwnedFd] | None = None) -> None:
        send_packet(self._sock, encode(message), [fd.fileno() for fd in fds or []])

    def phase(self, name: str, total_bytes: int = 0) -> None:
        """A new phase begins."""
        now = time.monotonic()
        if self._phase:
            self.phases[self._phase] = self.phases.get(self._phase, 0.0) + now - self._phase_began
        self._phase, self._phase_began = name, now
        self._last_sent = 0.0
        self.progress(0, total_bytes)

    def set_apart(self, name: str, seconds: float) -> None:
        """Count some of the present phase's seconds as another phase's, which went on beside it."""
        self.phases[name] = self.phases.get(name, 0.0) + seconds
        self._phase_began += seconds

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """Bytes within the phase; sent at most a few times a second."""
        now = time.monotonic()
        if now - self._last_sent >= _PROGRESS_INTERVAL_S or done_bytes == total_bytes:
            self._last_sent = now
            self.send(
                LoaderProgress(phase=self._phase, done_bytes=done_bytes, total_bytes=total_bytes)
            )

    def wait_for_turn(self) -> None:
        """Wait until the device is free for this load. Raises LoadError if the daemon goes away."""
        self.phase("waiting")
        if not self._sock.recv(len(YOUR_TURN)):
            raise LoadError("the daemon hung up before this load could begin")

    def seconds(self) -> float:
        """Since the start, without the time spent waiting for others."""
        return time.monotonic() - self._started - self.phases.get("waiting", 0.0)

    def hand_over(
        self,
        index: index_format.TensorIndex,
        fds: list[OwnedFd],
        *,
        peak_bytes: int = 0,
        checkpoint_bytes: int = 0,
    ) -> None:
        """Deliver: the index, with the report of this load filled in, then the segments in order."""
        self.phase("publishing")
        spent = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self.phases.items())
        log.info("%s took %.1f s: %s", index.cache, self.seconds(), spent)
        report = index_format.LoadReport(
            seconds=self.seconds(),
            finished_at=time.time(),
            phases=self.phases,
            peak_bytes=peak_bytes,
            checkpoint_bytes=checkpoint_bytes,
        )
        data = index_format.encode(msgspec.structs.replace(index, load=report))
        with sealed_memfd("weightcached-index", data) as index_fd:
            self.send(LoaderIndex(segments=len(fds)), [index_fd])
        for first in range(0, len(fds), MAX_PACKET_FDS):
            self.send(Descriptors(first=first), fds[first : first + MAX_PACKET_FDS])


def run_job(run: Callable[[LoaderJob, DaemonChannel], None]) -> None:
    """Run the job on standard input and end the process: 0, or 1 or 78 after LoaderFailed."""
    die_with_parent()
    prefer_for_oom_killer()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )
    job = decode_job(sys.stdin.buffer.read())
    daemon = DaemonChannel(socket.socket(fileno=job.socket_fd))
    try:
        run(job, daemon)
    except BaseException as e:
        _tell(daemon, e)
        # Not through the interpreter's shutdown: vLLM's threads and torch's groups may hang or
        # crash there.
        _exit(EXIT_CONFIG if _is_permanent(e) else 1)
    _exit(0)


def _exit(status: int) -> None:
    sys.stderr.flush()
    os._exit(status)


def _tell(daemon: DaemonChannel, e: BaseException) -> None:
    traceback.print_exc()
    code = e.code if isinstance(e, WeightcachedError) else "load-failed"
    text = str(e) if isinstance(e, WeightcachedError) else f"{type(e).__name__}: {e}"
    try:
        daemon.send(LoaderFailed(code=code, message=text[:10_000], permanent=_is_permanent(e)))
    except OSError as gone:
        log.error("cannot tell the daemon of the failure: %s", gone)
    # The last line of standard error is the failure's text should the message be lost.
    sys.stderr.write(f"{text}\n")


def _is_permanent(e: BaseException) -> bool:
    return isinstance(e, WeightcachedError) and e.exit_status == EXIT_CONFIG
