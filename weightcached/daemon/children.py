"""Child processes: how one is started, watched, killed and listened to; and the child that digests a checkpoint.

What a loader says and delivers is loading.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence

import msgspec

from weightcached.daemon.logs import printable
from weightcached.errors import CheckpointError
from weightcached.identity import CheckpointIdentity
from weightcached.paths import is_host_device

log = logging.getLogger(__name__)

# Pipes stay open for as long as any stray grandchild holds them.
_PIPE_TIMEOUT_S = 2.0
_LINE_BYTES = 4096
# What systemd gave to the daemon alone; a child that used it would speak in the daemon's name.
_NOT_FOR_CHILDREN = ("NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_USEC", "WATCHDOG_PID")


class Supervised:
    """A child whose output goes to the log, and of whom nothing is left when the block ends."""

    def __init__(self, child: asyncio.subprocess.Process, name: str) -> None:
        self._child = child
        self._name = name
        self._pumps: list[asyncio.Task[None]] = []
        self.last_error_line = ""

    async def __aenter__(self) -> Supervised:
        for stream, is_error in ((self._child.stdout, False), (self._child.stderr, True)):
            if stream is not None:
                self._pumps.append(asyncio.create_task(self._pump(stream, is_error=is_error)))
        return self

    async def __aexit__(self, *exc: object) -> None:
        kill_group(self._child)
        await self._child.wait()
        await self._drain()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def ended(self) -> int:
        """Wait for the child and for its last lines. Returns its status, negative for a signal."""
        status = await self._child.wait()
        # Grandchildren would keep the pipes open, and device memory too.
        kill_group(self._child)
        await self._drain()
        return status

    async def _drain(self) -> None:
        if self._pumps:
            await asyncio.wait(self._pumps, timeout=_PIPE_TIMEOUT_S)

    async def _pump(self, stream: asyncio.StreamReader, *, is_error: bool) -> None:
        rest = b""
        while chunk := await stream.read(_LINE_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._line(line, is_error=is_error)
            if len(rest) > _LINE_BYTES:
                self._line(rest, is_error=is_error)
                rest = b""
        self._line(rest, is_error=is_error)

    def _line(self, raw: bytes, *, is_error: bool) -> None:
        # Of a progress bar, which redraws itself after each \r, the last state.
        line = printable(raw.decode(errors="replace").strip().rpartition("\r")[2])
        if line:
            log.info("loader cache=%s %s", self._name, line)
            if is_error:
                self.last_error_line = line


async def make_full_digest(identity: CheckpointIdentity) -> str:
    """The full digest of a checkpoint, by a child at the lowest priority. Raises CheckpointError."""
    child = await spawn([sys.executable, "-m", "weightcached.identity", "full"], device=None)
    with contextlib.suppress(ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, child.pid, 19)
    try:
        output, errors = await child.communicate(msgspec.json.encode(identity))
    except BaseException:
        kill_group(child)
        await child.wait()
        raise
    if child.returncode != 0:
        lines = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
        reason = printable(lines[-1]) if lines else "it printed no reason"
        raise CheckpointError(f"the digest of {identity.root} ended with status {child.returncode}: {reason}")
    try:
        return msgspec.json.decode(output, type=CheckpointIdentity).full
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise CheckpointError(f"the digest of {identity.root} came back malformed: {e}") from e


async def spawn(
    command: Sequence[str], *, device: str | None, pass_fds: Sequence[int] = ()
) -> asyncio.subprocess.Process:
    """Start a child in a session of its own, with pipes on all three streams. It sees `device` alone, if one is given.

    Raises OSError.
    """
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=pass_fds,
        start_new_session=True,
        env=_environment(device),
    )


def kill_group(child: asyncio.subprocess.Process) -> None:
    """Kill the child and everything it started that stayed in its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def _environment(device: str | None) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_CHILDREN}
    if device is not None and not is_host_device(device):
        environment["CUDA_VISIBLE_DEVICES"] = device
    return environment


async def feed(child: asyncio.subprocess.Process, data: bytes) -> None:
    if child.stdin is None:
        raise AssertionError("the child was started without a pipe on its input")
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        child.stdin.write(data)
        await child.stdin.drain()
    # A child that died before it read its job is judged by its exit status.
    child.stdin.close()


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
