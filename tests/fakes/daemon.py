"""A daemon of cpuN as a real process, with runtime directory, manifest and a manager's socket."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import resource
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import yaml

from tests.fakes.client import Client
from weightcached.system.fds import OwnedFd
from weightcached.wire.messages import StatusReply

ROOT = Path(__file__).resolve().parents[2]
LOADER = f"{shlex.quote(sys.executable)} -m tests.fakes.loader_child"
# For what must happen, and takes as long as the machine is busy. Nothing is held to this time.
BOUND_S = 120.0
_LOG_CHARS = 20_000
# The tree first; what else is there may hold the packages that this interpreter has.
PYTHONPATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def environment(**extra: str) -> dict[str, str]:
    """This process's environment, with the tree on the path and nothing of a service manager."""
    env = {
        k: v for k, v in os.environ.items() if not k.startswith(("NOTIFY_", "LISTEN_", "WATCHDOG_"))
    }
    return {**env, "PYTHONPATH": PYTHONPATH, **extra}


def write_manifest(path: Path, models: list[dict[str, Any]], **keys: Any) -> None:
    """Write the manifest as an editor does: the daemon never sees half of it."""
    part = path.with_suffix(".part")
    part.write_text(yaml.safe_dump({"version": 1, "models": models, **keys}))
    part.replace(path)


def model(name: str, checkpoint: Path, device: str = "cpu0", **engine: Any) -> dict[str, Any]:
    """One manifest entry."""
    return {"name": name, "devices": [device], "engine": {"model": str(checkpoint), **engine}}


def until(
    condition: Callable[[], bool], what: str | Callable[[], str], *, bound_s: float = BOUND_S
) -> None:
    """Wait for a condition that has no event of its own, within a bound."""
    deadline_s = time.monotonic() + bound_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(
                f"not within {bound_s} s: {what if isinstance(what, str) else what()}"
            )
        time.sleep(0.01)


# Of pytest; more would share ports.
_WORKERS = 8


def _ports() -> Iterator[int]:
    """Ports below those of bind(0) and connect(), each once before one comes again.

    No two workers of pytest get the same: it is free until the service that it is for binds it.
    """
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    rows = range(1024 + (first_given - 1024) // 2, first_given - _WORKERS, _WORKERS)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
    first = random.randrange(len(rows))
    while True:
        yield from (row + worker for row in [*rows[first:], *rows[:first]])


_next_ports = _ports()


def free_port() -> int:
    """A port that nobody has, and that nobody is given."""
    for port in _next_ports:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise AssertionError("not reached")


def print_log(path: Path) -> None:
    """Print the end of a process's log, if it has one; pytest shows it if the test failed."""
    if path.exists():
        print(path.read_text(errors="replace")[-_LOG_CHARS:])


def remove_tree(directory: Path) -> None:
    """Remove a directory under a daemon, which may make its files in it again meanwhile."""
    while directory.exists():
        try:
            shutil.rmtree(directory)
            return
        except OSError as e:
            if e.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise


class ManagerSocket:
    """The receiving end of NOTIFY_SOCKET, in a thread: keeps descriptors by name, answers barriers."""

    def __init__(self, path: str, stored: dict[str, int] | None = None) -> None:
        self.address = path
        self.states: list[str] = []
        self.stored: dict[str, int] = stored or {}
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind("\0" + path[1:] if path.startswith("@") else path)
        self._news = threading.Condition()
        self._read = 0
        self._faults: list[str] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            data, fds, _, _ = socket.recv_fds(self._sock, 4096, 8)
            if data == b"end":
                return
            with self._news:
                try:
                    self._take(data.decode(), fds)
                except ValueError as e:
                    # Said at the end. Were nobody left to read, the daemon and close() would wait
                    # for ever.
                    self._faults.append(f"{data!r} with {len(fds)} descriptors: {e}")
                self._news.notify_all()

    def _take(self, state: str, fds: list[int]) -> None:
        fields = dict(line.split("=", 1) for line in state.splitlines())
        self.states.append(state)
        if (
            "FDSTORE" in fields
            and fields.get("FDPOLL") == "0"
            and fields["FDNAME"] not in self.stored
        ):
            (self.stored[fields["FDNAME"]],) = fds
            return
        if "FDSTOREREMOVE" in fields:
            # As with systemd, a name that is not stored is no error.
            fds = [self.stored.pop(fields["FDNAME"])] if fields["FDNAME"] in self.stored else []
        # Closing its end of the pipe answers a BARRIER=1.
        for fd in fds:
            os.close(fd)

    def wait_for(self, word: str, ended: Callable[[], bool]) -> str | None:
        """The next unread state with `word` in it; None if the sender has `ended` without one."""
        deadline_s = time.monotonic() + BOUND_S
        with self._news:
            while True:
                no_more = ended()
                while self._read < len(self.states):
                    self._read += 1
                    if word in self.states[self._read - 1]:
                        return self.states[self._read - 1]
                if no_more:
                    return None
                assert time.monotonic() < deadline_s, f"not within {BOUND_S} s: {word}"
                self._news.wait(0.2)

    def end(self) -> dict[str, int]:
        """Take all that was sent, also by a process that is dead; returns what is stored then."""
        if self._thread.is_alive():
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ender:
                ender.settimeout(BOUND_S)
                ender.sendto(b"end", self._sock.getsockname())
            self._thread.join()
            self._sock.close()
        stored, self.stored = self.stored, {}
        return stored

    def close(self) -> None:
        for fd in self.end().values():
            os.close(fd)
        assert not self._faults, self._faults


class DaemonProcess:
    """`weightcached serve` with the test's loader. `log` comes from a file, so it survives."""

    def __init__(
        self, directory: Path, models: list[dict[str, Any]] | None = None, *, device: str = "cpu0"
    ) -> None:
        self.device = device
        self.directory = directory
        self.runtime = directory / "run"
        self.manifest = directory / "manifest.yaml"
        self.socket = self.runtime / f"{device}.sock"
        self.log_path = directory / "daemon.log"
        self.manager: ManagerSocket | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.options: list[str] = []
        self.env: dict[str, str] = {}
        self.loader_command: str | None = LOADER
        self.module = "weightcached"
        # Run by this, e.g. in a namespace of its own.
        self.prefix: list[str] = []
        self.limits: dict[int, tuple[int, int]] = {}
        # Children of killed daemons, which the kernel ends a moment later.
        self._orphans: list[OwnedFd] = []
        if models is not None:
            write_manifest(self.manifest, models)

    def launch(self, *, keep_store: bool = False) -> Self:
        """Start the process, do not wait. keep_store: pass the manager's descriptors, as at a
        restart.
        """
        stored: dict[str, int] = {}
        if self.manager is not None:
            if keep_store:
                stored = self.manager.end()
            self.manager.close()
        self.manager = ManagerSocket(
            f"@weightcached-test-{os.getpid()}-{time.monotonic_ns()}", stored
        )
        command = [sys.executable, "-m", self.module, "serve", self.device]
        if stored:
            passed = ",".join(f"{fd}={name}" for name, fd in stored.items())
            command = [sys.executable, "-m", "tests.fakes.with_store", passed, *command]
        command += [
            "--manifest",
            str(self.manifest),
            "--socket-dir",
            str(self.runtime),
            "--log-level",
            "debug",
        ]
        command += self.options
        if self.loader_command is not None:
            command += ["--loader-command", self.loader_command]
        for name, (soft, hard) in self.limits.items():
            option = {resource.RLIMIT_NOFILE: "nofile"}[name]
            command = ["prlimit", f"--{option}={soft}:{hard}", *command]
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                [*self.prefix, *command],
                stderr=log,
                cwd=ROOT,
                pass_fds=list(stored.values()),
                env=environment(**{"NOTIFY_SOCKET": self.manager.address, **self.env}),
            )
        return self

    def start(self) -> Self:
        """Start the process and wait for READY=1."""
        self.launch().notified("READY=1")
        return self

    def notified(self, word: str) -> str:
        """Wait until the daemon tells its manager something with `word` in it."""
        assert self.manager
        process = self.process
        assert process
        state = self.manager.wait_for(word, ended=lambda: process.poll() is not None)
        assert state is not None, f"the daemon ended without {word}: {self.log[-3000:]}"
        return state

    @property
    def pid(self) -> int:
        assert self.process
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def client(self, purpose: str = "engine") -> Client:
        return Client.welcome(self.socket, purpose)  # type: ignore[arg-type]

    def status(self) -> StatusReply:
        with self.client("ctl") as client:
            return client.status()

    def is_ready(self) -> bool:
        """Whether it serves all its caches; a socket that does not answer yet is not an error."""
        status = self.answer()
        return status is not None and status.state == "ready"

    def answer(self) -> StatusReply | None:
        """Its status, if it serves peers by now."""
        try:
            return self.status()
        except (FileNotFoundError, ConnectionRefusedError):
            return None

    def until(self, condition: Callable[[StatusReply], bool], what: str) -> StatusReply:
        """Wait for a status that fulfils the condition; returns it."""
        seen: list[StatusReply] = []

        def holds() -> bool:
            seen[:] = [self.status()]
            return condition(seen[0])

        until(holds, what)
        return seen[0]

    def signal(self, number: signal.Signals) -> None:
        assert self.process
        if number == signal.SIGKILL:
            self._orphans += [opened for pid in tree_of(self.pid) if (opened := open_process(pid))]
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            # It runs on for a moment.
            until(lambda: state_of(self.pid) in "tTZX", "it is stopped")

    def wait(self) -> int:
        """Wait for the process's own end. Returns its exit status."""
        assert self.process
        return self.process.wait(BOUND_S)

    def stop(self) -> int:
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait()

    def descriptors(self, *, first: int = 0) -> list[str]:
        """The targets of the daemon's open descriptors, from this number on."""
        found = []
        for fd in Path(f"/proc/{self.pid}/fd").iterdir():
            # One that has just been closed is not counted.
            with contextlib.suppress(FileNotFoundError):
                if int(fd.name) >= first:
                    found.append(os.readlink(fd))
        return found

    def settled(self) -> Counter[str]:
        """The kinds of its descriptors, once it has no peer, its own handshake included, and no child.

        It has a pidfd of each, and reads the last lines of a child a little longer than that.
        """
        kinds: Counter[str] = Counter()

        def alone() -> bool:
            # Those that it was started with may be pipes.
            targets = self.descriptors(first=3)
            kinds.clear()
            kinds.update(re.sub("[0-9]+", "", target) for target in targets)
            return not any("pidfd" in target or "pipe" in target for target in targets)

        until(alone, "no connection and no child is left")
        return kinds

    def holds_no_more_than(self, before: Counter[str]) -> None:
        """Wait until it has no descriptor beside those of settled() before. One of a peer that left
        may have been among them.
        """
        until(lambda: not self.settled() - before, f"nothing is open but {before}")

    def close(self) -> None:
        """End the daemon and all that it has started: the test's directory goes next."""
        if self.process is not None:
            end_tree(self.process)
        end_processes(self._orphans)
        if self.manager is not None:
            self.manager.close()


def children_of(pid: int) -> list[int]:
    """The processes that it has started, by any of its threads."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def tree_of(pid: int) -> list[int]:
    """Its children, and theirs."""
    return [each for child in children_of(pid) for each in (child, *tree_of(child))]


def stop_tree(pid: int) -> None:
    """SIGSTOP to a process and, once it cannot start more, to its children."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        until(lambda: state_of(pid) in "tTZX", f"{pid} is stopped")
    for child in children_of(pid):
        stop_tree(child)


def state_of(pid: int) -> str:
    """The letter of proc_pid_stat(5), of the slowest thread; X for one that is gone."""
    letters = ["X"]
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            # A thread that ends meanwhile is no matter.
            with contextlib.suppress(OSError):
                letters.append((thread / "stat").read_text().rpartition(")")[2].split()[0])
    return min(letters, key="RSDIPWtTZX".index)


def has_ended(pid: int) -> bool:
    """Whether at most its exit status is left: an orphan may have nobody who waits for it."""
    return state_of(pid) in "ZX"


def open_process(pid: int) -> OwnedFd | None:
    try:
        return OwnedFd(os.pidfd_open(pid))
    except OSError:
        return None


def end_processes(processes: list[OwnedFd]) -> None:
    """Kill them, and wait until each has ended."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process.fileno(), signal.SIGKILL)
    for process in processes:
        with process:
            ended, _, _ = select.select([process], [], [], BOUND_S)
            assert ended, "a killed process does not end"
    processes.clear()


def end_tree(process: subprocess.Popen[Any]) -> None:
    """Kill a process and all that it has started, and wait until each has ended."""
    if process.poll() is not None:
        return
    # Stopped first: what it starts after we have looked would outlive it for a moment.
    stop_tree(process.pid)
    children = [opened for pid in tree_of(process.pid) if (opened := open_process(pid))]
    process.kill()
    process.wait()
    end_processes(children)


def loaders_of(pid: int) -> list[int]:
    """The daemon's children, but for the one that makes digests.

    That one looks like a loader, for a moment after its fork: wait for what you expect.
    """
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if not makes_digests(int(child))]


def makes_digests(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True  # it has ended
    # Empty: it is ending.
    return not command or b"weightcached.checkpoint.identity" in command
