"""A private `systemd --user`: its own runtime and configuration directories, its own cgroup, its
own bus address.

Needs root, or a delegated cgroup, and systemd's binary; the machine's own service manager is not
touched.

    python tests/systemd/manager.py run -- CMD…     runs CMD inside it and ends with CMD's status
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Self

SYSTEMD = "/lib/systemd/systemd"
# Nothing is held to these: a machine may be busy.
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 120.0
# For a unit's WatchdogSec=: longer than a daemon that does not hang is silent on such a machine.
WATCHDOG_S = 10
_POLL_S = 0.05
# Variables that would lead back to another manager or its bus.
_FOREIGN = (
    "DBUS_SESSION_BUS_ADDRESS",
    "NOTIFY_SOCKET",
    "INVOCATION_ID",
    "JOURNAL_STREAM",
    "MANAGERPID",
    "LISTEN_FDS",
)


class ManagerError(Exception):
    """The private manager could not be started or ended; the text has its last lines."""


class PrivateManager:
    """One user manager, from start() to close(). `runtime_dir` is its XDG_RUNTIME_DIR.

    home: a home directory for it, with configuration and data at their usual places, which stays;
    else configuration and data go with the runtime directory.
    """

    def __init__(
        self, extra_env: Mapping[str, str] | None = None, *, home: Path | None = None
    ) -> None:
        # Short: sockets have 107 bytes for their path.
        self.runtime_dir = Path(tempfile.mkdtemp(prefix="wcm-", dir="/tmp"))
        self.home = home
        self.config_dir = home / ".config" if home else self.runtime_dir / "config"
        self.unit_dir = self.config_dir / "systemd" / "user"
        self.unit_dir.mkdir(parents=True)
        self.log_path = self.runtime_dir / "manager.log"
        self._extra_env = dict(extra_env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._cgroups: list[Path] = []

    @property
    def env(self) -> dict[str, str]:
        """The environment in which `systemctl --user` reaches this manager."""
        env = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
        own = {"XDG_RUNTIME_DIR": str(self.runtime_dir)}
        if self.home is not None:
            usual = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME")
            env = {name: value for name, value in env.items() if name not in usual}
            own["HOME"] = str(self.home)
        else:
            own["XDG_CONFIG_HOME"] = str(self.config_dir)
            own["XDG_DATA_HOME"] = str(self.runtime_dir / "data")
        return {**env, **self._extra_env, **own}

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ManagerError("the private manager is not running")
        return self._process.pid

    def start(self) -> Self:
        """Start the manager and wait until it answers. Raises ManagerError."""
        # sd_booted(3): systemctl talks to no manager on a machine without this directory.
        Path("/run/systemd/system").mkdir(parents=True, exist_ok=True)
        self._cgroups = new_cgroups()
        with open(self.log_path, "wb") as log:
            self._process = _spawn(self._cgroups, self.env, log)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self.systemctl("is-system-running", check=False).returncode != 0:
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                tail = self.log_path.read_text(errors="replace")[-2000:]
                self.close()
                raise ManagerError(f"systemd --user does not come up: {tail}")
            time.sleep(_POLL_S)
        return self

    def systemctl(
        self, *arguments: str, check: bool = True, timeout_s: float = 240.0
    ) -> subprocess.CompletedProcess[str]:
        """`systemctl --user …` on this manager."""
        return subprocess.run(
            ["systemctl", "--user", "--no-pager", *arguments],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=check,
        )

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.systemctl("show", "--value", "-p", name, unit).stdout.strip()

    def write_unit(self, name: str, text: str) -> None:
        """Put a unit file in place and have the manager read it."""
        (self.unit_dir / name).write_text(text)
        self.systemctl("daemon-reload")

    def reexecute(self) -> None:
        """`daemon-reexec`. It returns before the new one listens."""
        self.systemctl("daemon-reexec")
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self.systemctl("show", "-p", "Version", check=False).returncode != 0:
            if time.monotonic() > deadline_s:
                raise ManagerError("systemd --user does not come back after daemon-reexec")
            time.sleep(_POLL_S)

    def memfds(self) -> int:
        """How many segments and indexes it holds for its units."""
        return sum("/memfd:" in target for target in self.descriptors())

    def descriptors(self) -> list[str]:
        """The targets of the manager's open descriptors."""
        found = []
        for fd in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(fd))
        return found

    def close(self) -> None:
        """Stop all units, end the manager, remove its files. May be called twice."""
        process, self._process = self._process, None
        if process is not None:
            self._end(process)
        cgroups, self._cgroups = self._cgroups, []
        for cgroup in cgroups:
            remove_cgroup(cgroup)
        shutil.rmtree(self.runtime_dir, ignore_errors=True)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.systemctl("exit", check=False, timeout_s=STOP_TIMEOUT_S)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()


def new_cgroups() -> list[Path]:
    """A cgroup of our own in every hierarchy by which a manager tracks processes.

    On a machine with both versions these are two, and the manager looks at the one of version 2.
    Without a group of its own there, its units would have the root's, and two managers with a unit
    of one name would kill each other's.
    """
    own = dict(
        line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines()
    )
    mounts = {"name=systemd": Path("/sys/fs/cgroup/systemd"), "": Path("/sys/fs/cgroup/unified")}
    bases = {kind: base for kind, base in mounts.items() if base.is_dir()} or {
        "": Path("/sys/fs/cgroup")
    }
    name = f"weightcached-manager-{os.getpid()}-{time.monotonic_ns()}"
    groups = [base / own.get(kind, "/").lstrip("/") / name for kind, base in bases.items()]
    for group in groups:
        try:
            group.mkdir()
        except OSError as e:
            raise ManagerError(
                f"cannot make the cgroup {group}: {e.strerror}; run as root or with a delegated cgroup"
            ) from e
    return groups


def _spawn(cgroups: Sequence[Path], env: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        entering(cgroups, f"{SYSTEMD} --user --log-target=console"),
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def entering(cgroups: Sequence[Path], command: str) -> list[str]:
    """The command that runs a shell's `command` in these cgroups."""
    # The shell moves itself first, so that a manager finds itself in groups of its own from the
    # start.
    moves = " && ".join(f'echo $$ > "{cgroup}/cgroup.procs"' for cgroup in cgroups)
    return ["/bin/sh", "-c", f"{moves} && exec {command}"]


def remove_cgroup(cgroup: Path) -> None:
    """End all processes in it and below, and remove it."""
    # The manager removes its own on the way out; after a SIGKILL groups with processes in them may
    # be left.
    for directory, _, _ in os.walk(cgroup, topdown=False):
        for pid in _processes(Path(directory)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while os.path.isdir(directory):
            try:
                os.rmdir(directory)
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(_POLL_S)


def _processes(cgroup: Path) -> list[int]:
    try:
        return [int(pid) for pid in (cgroup / "cgroup.procs").read_text().split()]
    except FileNotFoundError:
        return []


def main(argv: Sequence[str]) -> int:
    if len(argv) < 3 or list(argv[:2]) != ["run", "--"]:
        sys.stderr.write("usage: python tests/systemd/manager.py run -- CMD…\n")
        return 2
    with PrivateManager() as manager:
        return subprocess.run(argv[2:], env=manager.env, check=False).returncode


def exit_status(main: Callable[[Sequence[str]], int]) -> int:
    """Run a command's `main` on this process's arguments; print a ManagerError on standard error."""
    try:
        return main(sys.argv[1:])
    except ManagerError as e:
        sys.stderr.write(f"{e}\n")
        return 1


if __name__ == "__main__":
    sys.exit(exit_status(main))
