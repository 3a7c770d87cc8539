"""A private `systemd --system` with logind and a bus: a small machine on which a user can log in
and out.

It is PID 1 of namespaces of its own (process, mount, host name, IPC, network, cgroup), so nothing
that it stops, mounts or removes is the real machine's, and the end of that one process ends all
others. Needs root. boot.py prepares the inside of the namespaces; manager.py runs user managers
without logins.
"""

from __future__ import annotations

import contextlib
import glob
import os
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.systemd.boot import SYSTEMD, UNIT_DIR
from tests.systemd.manager import ManagerError, entering, exit_status, new_cgroups, remove_cgroup

USER, UID = "resident", 64321
# Nothing is held to these: a machine may be busy.
BOOT_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 120.0
_POLL_S = 0.02
_END_AGAIN_S = 5.0
_ROOT = Path(__file__).resolve().parents[2]
_SYSTEM_UNITS = Path(SYSTEMD).parent / "system"
# All that a login needs. The rest of a machine's units would look for its disks, network and clock.
_UNITS = [
    "dbus.service",
    "dbus.socket",
    "systemd-logind.service",
    "user@.service",
    "user-runtime-dir@.service",
]
_UNITS += ["user.slice", "user@.service.d", "user-.slice.d"]
_TARGETS = {
    "sysinit.target": "",
    "default.target": "Requires=dbus.service systemd-logind.service\nAfter=dbus.service systemd-logind.service\n",
}
# No wait for a login that may follow a logout.
_LOGIND = "[Login]\nUserStopDelaySec=0\nKillUserProcesses=no\n"
# Without that wait, tests log in more often than the five times in ten seconds that systemd allows.
_OFTEN = "[Unit]\nStartLimitIntervalSec=0\n"
_ACCOUNT = {
    "passwd": f"{USER}:x:{UID}:{UID}::/home/{USER}:/bin/sh\n",
    "group": f"{USER}:x:{UID}:\n",
    "shadow": f"{USER}:!:20000::::::\n",
}
# Killed with the test, and the system with it.
_UNSHARE = [
    "setpriv",
    "--pdeathsig=KILL",
    "unshare",
    "--fork",
    "--kill-child",
    "--pid",
    "--mount",
    "--mount-proc",
]
_UNSHARE += ["--uts", "--ipc", "--net"]
# Later than the others: the process's cgroup at that moment becomes the root for it and its
# children.
_UNSHARE_CGROUP = ["unshare", "--cgroup"]
_PATH = "PATH=/usr/sbin:/usr/bin:/sbin:/bin"


def missing() -> str | None:
    """Why this machine cannot run such a system; None if it can."""
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    logind = Path(SYSTEMD).with_name("systemd-logind")
    bus = (Path("/usr/bin/dbus-daemon"), _SYSTEM_UNITS / "dbus.service")
    for path, package in (
        (Path(SYSTEMD), "systemd"),
        (logind, "systemd"),
        *((path, "dbus") for path in bus),
    ):
        if not path.exists():
            return f"{path} is missing: install {package}"
    if not glob.glob("/lib/*/security/pam_systemd.so") and not glob.glob(
        "/lib*/security/pam_systemd.so"
    ):
        return "pam_systemd.so is missing: install libpam-systemd"
    if not any(
        Path("/sys/fs/cgroup", folder, "cgroup.controllers").exists() for folder in ("", "unified")
    ):
        return "no cgroups of version 2"
    probe = [
        *_UNSHARE,
        *_UNSHARE_CGROUP,
        "sh",
        "-c",
        "mount -t tmpfs tmpfs /run && mount -t cgroup2 cgroup2 /run",
    ]
    done = subprocess.run(
        probe, capture_output=True, text=True, timeout=ANSWER_TIMEOUT_S, check=False
    )
    return f"no namespaces of our own: {done.stderr.strip()}" if done.returncode else None


class PrivateSystem:
    """One system, from boot() to close(). home: its user's home directory, as the test sees it."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="wcs-", dir="/tmp"))
        self.home = self.directory / "home" / USER
        self.log_path = self.directory / "console.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._cgroups: list[Path] = []
        self._sessions: list[Session] = []
        self._log_reader: threading.Thread | None = None
        self._pid = 0
        self._furnish()

    def _furnish(self) -> None:
        subprocess.run(["cp", "-a", "/etc", str(self.directory)], check=True)
        (self.directory / "state").mkdir()
        self._make_home()
        etc = self.directory / "etc"
        for name, line in _ACCOUNT.items():
            with open(etc / name, "a", encoding="utf-8") as f:
                f.write(line)
        units = self.directory / UNIT_DIR.lstrip("/")
        units.mkdir(parents=True)
        for name in _UNITS:
            if (_SYSTEM_UNITS / name).exists():
                (units / name).symlink_to(_SYSTEM_UNITS / name)
        for name, text in _TARGETS.items():
            (units / name).write_text(f"[Unit]\nDefaultDependencies=no\n{text}")
        for name in ("user@", "user-runtime-dir@"):
            drop_in = units / f"{name}{UID}.service.d/test.conf"
            drop_in.parent.mkdir()
            drop_in.write_text(_OFTEN)
        settings = etc / "systemd/logind.conf.d"
        settings.mkdir(parents=True, exist_ok=True)
        (settings / "zz-test.conf").write_text(_LOGIND)

    def boot(self) -> Self:
        """Start the system and wait until it and its logind answer. Raises ManagerError."""
        self._cgroups = new_cgroups()
        try:
            self._process = self._spawn()
            self._wait_for_boot(self._process)
        except BaseException:
            self.close()
            raise
        return self

    def _spawn(self) -> subprocess.Popen[bytes]:
        terminal, console = os.openpty()
        # A terminal that nobody reads stops its writers.
        self._log_reader = threading.Thread(target=self._copy_log, args=(terminal,), daemon=True)
        self._log_reader.start()
        # Only processes inside are in the cgroup: one with both processes and groups gets no
        # controllers.
        boot = [*_UNSHARE_CGROUP, sys.executable, "-m", "tests.systemd.boot", str(self.directory)]
        try:
            return subprocess.Popen(
                [*_UNSHARE, *entering(self._cgroups, shlex.join(boot))],
                cwd=_ROOT,
                env={**os.environ, "PYTHONPATH": str(_ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
                stdin=console,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        finally:
            os.close(console)

    def _wait_for_boot(self, process: subprocess.Popen[bytes]) -> None:
        deadline_s = time.monotonic() + BOOT_TIMEOUT_S
        while not self._is_up(process):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise ManagerError(f"systemd --system does not come up: {self.log()[-2000:]}")
            time.sleep(_POLL_S)

    def _is_up(self, process: subprocess.Popen[bytes]) -> bool:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        try:
            pid = int(children.read_text())
            # Until then it is our boot.py, in a mount namespace that is not finished.
            if Path(f"/proc/{pid}/comm").read_text() != "systemd\n":
                return False
        except (OSError, ValueError):
            return False
        self._pid = pid
        return self.run("systemctl", "is-active", "default.target", check=False).returncode == 0

    def _copy_log(self, terminal: int) -> None:
        # Without its last writer, a terminal answers reads with EIO.
        with open(self.log_path, "ab", buffering=0) as log, contextlib.suppress(OSError):
            while data := os.read(terminal, 65536):
                log.write(data.replace(b"\r\n", b"\n"))
        os.close(terminal)

    def log(self) -> str:
        """The console output of the system's manager."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def path(self, path: str) -> Path:
        """The test's path to a file of the running system."""
        return Path(f"/proc/{self._pid}/root", path.lstrip("/"))

    @property
    def enter(self) -> list[str]:
        """The command that runs another one inside, as root, without this environment."""
        if not self._pid:
            raise ManagerError("the private system is not running")
        return ["nsenter", f"--target={self._pid}", "--all", "env", "-i", _PATH]

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command inside as root, outside of any session."""
        return subprocess.run(
            [*self.enter, *command],
            capture_output=True,
            text=True,
            timeout=ANSWER_TIMEOUT_S,
            check=check,
        )

    def run_as_user(self, command: str) -> subprocess.CompletedProcess[str]:
        """A shell command of the user outside of any session, as after `su`: without pam_systemd."""
        user = [
            "setpriv",
            f"--reuid={UID}",
            f"--regid={UID}",
            "--clear-groups",
            "env",
            f"HOME=/home/{USER}",
        ]
        return self.run(*user, "sh", "-c", command, check=False)

    def log_in(self) -> Session:
        """Open a session and wait until its shell answers. It ends with the system, if not before."""
        session = Session(self.enter)
        self._sessions.append(session)
        session.start()
        return session

    def processes(self) -> dict[int, str]:
        """The user's processes by their pids inside, each with its command line; no zombies."""
        found = {}
        for process in self.path("/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                command = (
                    (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                if command and process.stat().st_uid == UID:
                    found[int(process.name)] = command.strip()
        return found

    def user_state(self) -> str:
        """logind's state of the user; "gone" once logind has removed the runtime directory."""
        shown = self.run(
            "loginctl", "show-user", str(UID), "--property=State", "--value", check=False
        )
        left = self.path(f"/run/user/{UID}").exists()
        return shown.stdout.strip() or ("leaving" if left else "gone")

    def forget_user(self) -> None:
        """Log the user out everywhere, end remaining processes, and empty the home directory."""
        self._log_out_everywhere()
        self.run("loginctl", "disable-linger", USER, check=False)
        deadline_s, end_s = time.monotonic() + ANSWER_TIMEOUT_S, 0.0
        while self.user_state() != "gone":
            if time.monotonic() > deadline_s:
                raise ManagerError(f"the user stays {self.user_state()}: {self.processes()}")
            if time.monotonic() > end_s:
                # Processes of sessions that are closed already outlive `terminate-user`. And once
                # logind kept a user of whom nothing was left: so it is asked again.
                self.run("loginctl", "kill-user", "--signal=SIGKILL", USER, check=False)
                self.run("loginctl", "terminate-user", USER, check=False)
                end_s = time.monotonic() + _END_AGAIN_S
            time.sleep(_POLL_S)
        shutil.rmtree(self.home)
        self._make_home()

    def _make_home(self) -> None:
        self.home.mkdir(parents=True)
        os.chown(self.home, UID, UID)

    def _log_out_everywhere(self) -> None:
        sessions, self._sessions = self._sessions, []
        for session in sessions:
            session.log_out()

    def shut_down(self) -> None:
        """End all processes at once, as a power cut. Files stay for the next boot()."""
        process, self._process, self._pid = self._process, None, 0
        if process is not None:
            # By --kill-child the system's manager goes too, and with it all of its namespace.
            process.kill()
            process.wait()
        self._log_out_everywhere()
        cgroups, self._cgroups = self._cgroups, []
        for cgroup in cgroups:
            remove_cgroup(cgroup)
        reader, self._log_reader = self._log_reader, None
        if reader is not None:
            reader.join(ANSWER_TIMEOUT_S)

    def close(self) -> None:
        """Shut down and remove all files. May be called twice."""
        self.shut_down()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.boot()

    def __exit__(self, *exc: object) -> None:
        self.close()


class Session:
    """A login shell of the user, opened through PAM as by sshd, that runs one command after the
    other.

    `enter` is the command that runs another one inside; `id` is logind's name of the session.
    """

    def __init__(self, enter: Sequence[str]) -> None:
        # Without a terminal it would count as a background job.
        login = [*enter, "XDG_SESSION_CLASS=user", "runuser", "--login", USER]
        self._shell = subprocess.Popen(
            login,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._unread = b""
        self.id = ""

    def start(self) -> None:
        """Wait until the shell answers."""
        self.id = self.output("echo $XDG_SESSION_ID")

    def run(self, command: str) -> tuple[int, str]:
        """Exit status and output of a shell command."""
        assert self._shell.stdin
        mark = f"--- {time.monotonic_ns()} "
        self._shell.stdin.write(
            f"{{ {command}\n}} </dev/null 2>&1; status=$?; echo; echo '{mark}'$status\n".encode()
        )
        self._shell.stdin.flush()
        output, status = self._read_until(f"\n{mark}".encode())
        return status, output.strip()

    def output(self, command: str) -> str:
        """Output of a shell command that must succeed."""
        status, output = self.run(command)
        assert status == 0, f"{command}: {status}: {output}"
        return output

    def _read_until(self, mark: bytes) -> tuple[str, int]:
        assert self._shell.stdout
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            before, found, after = self._unread.partition(mark)
            if found and b"\n" in after:
                status, _, self._unread = after.partition(b"\n")
                return before.decode(errors="replace"), int(status)
            readable, _, _ = select.select(
                [self._shell.stdout], [], [], max(0.0, deadline_s - time.monotonic())
            )
            data = os.read(self._shell.stdout.fileno(), 65536) if readable else b""
            assert data, (
                f"the session {'has ended' if readable else 'is silent'}: {self._unread.decode()}"
            )
            self._unread += data

    def log_out(self) -> None:
        """End the shell, as `exit` does; wait until PAM has closed the session. May be called
        twice.
        """
        assert self._shell.stdin
        with contextlib.suppress(BrokenPipeError):
            self._shell.stdin.close()
        try:
            self._shell.wait(ANSWER_TIMEOUT_S)
        finally:
            self._shell.kill()
            self._shell.wait()
            if self._shell.stdout:
                self._shell.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.log_out()


def main(argv: Sequence[str]) -> int:
    """`python -m tests.systemd.system_manager CMD…` runs CMD inside, as root, for inspection."""
    reason = missing()
    if reason is not None:
        raise ManagerError(reason)
    with PrivateSystem() as system:
        return subprocess.run([*system.enter, *(argv or ["sh"])], check=False).returncode


if __name__ == "__main__":
    sys.exit(exit_status(main))
