"""Child processes: start one, read its output, and end it with every process that it started.

loading.py handles a loader's messages. Not asyncio's subprocesses: their wait() also waits for the
pipes, which a stray grandchild can hold open for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Self

import msgspec

from weightcached.checkpoint.identity import CheckpointIdentity
from weightcached.daemon.logs import printable
from weightcached.errors import CheckpointError
from weightcached.system.fds import OwnedFd, sealed_memfd
from weightcached.system.paths import is_host_device
from weightcached.system.process import environment_for
from weightcached.system.waits import end_tasks, readable

log = logging.getLogger(__name__)

# A dead child's last output is there at once; only a grandchild outside of its session keeps a pipe
# open.
_DRAIN_TIMEOUT_S = 2.0
_READ_BYTES = 64 * 1024
_LINE_BYTES = 4096
# How often we look whether a digest gets further.
_LOOK_PERIOD_S = 5.0
# A digest's answer is a few hundred bytes for each file of the checkpoint.
_CAPTURE_BYTES = 8 * 1024 * 1024


class Child:
    """One child in a session of its own. Its lines go to the log; leave the block, and nothing of
    it is left.

    `exit` is done once it has ended, its session has been killed and its last lines have been read;
    its result is the exit status, negative for a signal.
    """

    def __init__(
        self,
        command: Sequence[str],
        name: str,
        *,
        stdin: bytes,
        device: str | None = None,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        capture: bool = False,
    ) -> None:
        """Start it. It sees `device` alone, if one is given. `capture` keeps its output instead of
        logging it.

        Raises OSError.
        """
        self._name = name
        self.output = bytearray() if capture else None
        self.last_error_line = ""
        # A file and no pipe: a child that never reads its input must not stop us.
        with sealed_memfd("weightcached-input", stdin) as job:
            os.lseek(job.fileno(), 0, os.SEEK_SET)
            self._process = subprocess.Popen(
                command,
                stdin=job.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=pass_fds,
                start_new_session=True,
                env=environment_of(command[0], device, env),
                bufsize=0,
            )
        self.pid = self._process.pid
        try:
            self._pidfd = OwnedFd(os.pidfd_open(self.pid))
        except OSError:
            # Out of descriptors: nobody would ever hear of its end.
            self._kill_session()
            self._process.communicate()
            raise
        self._pumps = [
            asyncio.create_task(self._pump(pipe, is_error=pipe is self._process.stderr))
            for pipe in (self._process.stdout, self._process.stderr)
            if pipe is not None
        ]
        self.exit = asyncio.create_task(self._reap())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        # Not by `exit`, which comes later: once the child is reaped its number may be another's.
        if self._process.returncode is None:
            self._kill_session()
        await asyncio.shield(self.exit)

    async def _reap(self) -> int:
        with self._pidfd:
            await readable(self._pidfd.fileno())
        # Before wait(): until then no other process can get this pid. Processes that the child
        # started would keep the pipes open, and device memory.
        self._kill_session()
        status = self._process.wait()
        await asyncio.wait(self._pumps, timeout=_DRAIN_TIMEOUT_S)
        await end_tasks(*self._pumps)
        return status

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        # Processes with their own process group are left, such as each compiler that ninja runs.
        killed: set[int] = set()
        while found := _members(self.pid) - killed:
            for pid in found:
                _kill_member(pid, self.pid)
            killed |= found

    async def _pump(self, pipe: IO[bytes], *, is_error: bool) -> None:
        """Read a pipe to its end, line by line."""
        with pipe:
            os.set_blocking(pipe.fileno(), False)
            rest = b""
            while True:
                await readable(pipe.fileno())
                try:
                    chunk = os.read(pipe.fileno(), _READ_BYTES)
                except BlockingIOError:
                    continue
                if not chunk:
                    break
                if self.output is not None and not is_error:
                    self.output += chunk[: _CAPTURE_BYTES - len(self.output)]
                    continue
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._line(line, is_error=is_error)
                rest = rest[-_LINE_BYTES:]
            self._line(rest, is_error=is_error)

    def _line(self, raw: bytes, *, is_error: bool) -> None:
        # Of a progress bar, which redraws itself after each \r, the last state.
        line = printable(raw[-_LINE_BYTES:].decode(errors="replace").strip().rpartition("\r")[2])
        if line:
            log.info("loader cache=%s %s", self._name, line)
            if is_error:
                self.last_error_line = line


async def make_full_digest(
    identity: CheckpointIdentity,
    on_progress: Callable[[], None] = lambda: None,
    *,
    idle: bool = True,
) -> str:
    """The full digest of a checkpoint, by a child, of lowest priority if nobody waits (`idle`).

    Raises CheckpointError.
    """
    command = [sys.executable, "-m", "weightcached.checkpoint.identity", "full"]
    if idle:
        command.append("--idle")
    try:
        child = Child(command, "digest", stdin=msgspec.json.encode(identity), capture=True)
    except OSError as e:
        raise CheckpointError(
            f"the digest of {identity.root} cannot be started: {e.strerror}"
        ) from e
    async with child:
        read = 0
        while not child.exit.done():
            await asyncio.wait({child.exit}, timeout=_LOOK_PERIOD_S)
            if (now := _bytes_read(child.pid)) > read:
                read = now
                on_progress()
        status = child.exit.result()
    if status != 0:
        reason = child.last_error_line or "it printed no reason"
        raise CheckpointError(f"the digest of {identity.root} ended with status {status}: {reason}")
    try:
        return msgspec.json.decode(bytes(child.output or b""), type=CheckpointIdentity).full
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise CheckpointError(f"the digest of {identity.root} came back malformed: {e}") from e


def _bytes_read(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/io", encoding="ascii") as f:
        return int(f.readline().split()[1])
    return 0


def _members(session: int) -> set[int]:
    """The processes of a session."""
    return {
        int(name)
        for name in os.listdir("/proc")
        if name.isdecimal() and _session_of(int(name)) == session
    }


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _kill_member(pid: int, session: int) -> None:
    with contextlib.suppress(OSError), OwnedFd(os.pidfd_open(pid)) as process:
        # Asked again: the number may have become another process's before we held it.
        if _session_of(pid) == session:
            signal.pidfd_send_signal(process.fileno(), signal.SIGKILL)


def environment_of(
    program: str, device: str | None = None, env: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of a child. With `device`, the child sees no other device."""
    visible = device is not None and not is_host_device(device)
    own = {"CUDA_VISIBLE_DEVICES": device} if visible and device else {}
    return environment_for(program, dict(env or {}) | own)
