"""Logins and logouts through a real logind: daemon and weights, with lingering and without."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.daemon import LOADER, ROOT, model, until, write_manifest
from tests.fakes.pauses import Pauses
from tests.systemd.system_manager import UID, USER, PrivateSystem, Session, missing

HOME = f"/home/{USER}"
RUNTIME = f"/run/user/{UID}"
SOCKET = f"{RUNTIME}/weightcached/cpu0.sock"
CTL = Path(sys.executable).with_name("weightcachectl")
PYTHON = f"env PYTHONPATH={shlex.quote(str(ROOT))} PYTHONDONTWRITEBYTECODE=1 {shlex.quote(sys.executable)}"
# Settings beside the unit of `weightcachectl install`: this tree, a loader without vLLM, a log
# file.
DROP_IN = f"""
[Service]
ExecStart=
ExecStart={shlex.quote(sys.executable)} -m weightcached serve %i --loader-command "{LOADER}"
Environment=PYTHONPATH={ROOT} PYTHONDONTWRITEBYTECODE=1
StandardError=append:%h/daemon.log
LimitCORE=0
"""
ABSENT = (
    f"the runtime directory {RUNTIME} does not exist: log in through a session that systemd-logind opens, "
    f"or run 'loginctl enable-linger {UID}', or set XDG_RUNTIME_DIR, "
    "or name the directory of the sockets: --socket-dir"
)


class Site:
    """The user's files, and questions to the daemon of cpu0, which has one model."""

    def __init__(self, system: PrivateSystem) -> None:
        self.system = system
        write_checkpoint(system.home / "checkpoint")
        self.pauses = Pauses(system.home / "pauses")
        self.configuration = system.home / ".config/weightcached"
        self.configuration.mkdir(parents=True)
        engine = {"x_spawns": f"{HOME}/spawns", "x_pauses": f"{HOME}/pauses"}
        write_manifest(
            self.configuration / "manifest.yaml", [model("m", Path(HOME, "checkpoint"), **engine)]
        )
        drop_in = system.home / ".config/systemd/user/weightcached@.service.d/test.conf"
        drop_in.parent.mkdir(parents=True)
        drop_in.write_text(DROP_IN)
        for folder, _, files in os.walk(system.home):
            for path in (folder, *(os.path.join(folder, name) for name in files)):
                os.chown(path, UID, UID)

    def install(self, session: Session) -> None:
        session.output(f"{CTL} install")
        session.output("systemctl --user enable weightcached@cpu0.service")

    def serve(self) -> Session:
        """A session in which the unit was installed, enabled and started."""
        session = self.system.log_in()
        self.install(session)
        session.output(f"{CTL} start cpu0")
        return session

    def log_out(self, session: Session, state: str) -> None:
        """End a session; wait until logind has the user in this state. "gone": no runtime
        directory.
        """
        session.log_out()
        until(lambda: self.system.user_state() == state, f"the user is {state}")

    def status(self) -> dict[str, Any] | None:
        """The daemon's answer to `status --json`; None without an answer."""
        shown = self.system.run_as_user(f"{CTL} status --json")
        return json.loads(shown.stdout)["devices"][0] if shown.returncode == 0 else None

    def served(self) -> tuple[int, int, str]:
        """Pid of the daemon, generation and source of its cache, once it is ready."""
        seen: list[dict[str, Any]] = []

        def ready() -> bool:
            seen[:] = [
                status for status in [self.status()] if status and status["state"] == "ready"
            ]
            return bool(seen and seen[0]["caches"])

        until(ready, "the daemon serves")
        (cache,) = seen[0]["caches"]
        return seen[0]["pid"], cache["generation"], cache["source"]

    def loads(self) -> int:
        return len((self.system.home / "spawns").read_text().splitlines())

    def log(self) -> str:
        return (self.system.home / "daemon.log").read_text()

    def holders(self) -> set[int]:
        """Pids of the processes that hold or map a segment."""
        found = set()
        for process in self.system.path("/proc").glob("[0-9]*"):
            # One that ends meanwhile holds nothing.
            with contextlib.suppress(OSError):
                links = [os.readlink(fd) for fd in process.glob("fd/*")]
                if any(
                    "/memfd:segment-" in text for text in (*links, (process / "maps").read_text())
                ):
                    found.add(int(process.name))
        return found

    def findings(self, session: Session | None = None) -> dict[str, tuple[str, str, str]]:
        """doctor's findings about the login, in a session or in a shell outside of any."""
        command = f"{CTL} doctor --json"
        text = session.run(command)[1] if session else self.system.run_as_user(command).stdout
        checks = ("linger", "XDG_RUNTIME_DIR", "user manager", "runtime directory", "socket")
        return {
            f["check"]: (f["level"], f["text"], f["fix"])
            for f in json.loads(text)["findings"]
            if f["check"] in checks
        }


class Engine:
    """An engine inside that outlives its starter. Its input and output are files in the home."""

    def __init__(self, site: Site) -> None:
        self._home = site.system.home
        os.mkfifo(self._home / "ask")
        os.chown(self._home / "ask", UID, UID)
        # Opened for writing too, its input has no end.
        self.command = f"{PYTHON} -m tests.fakes.engine {SOCKET} {HOME}/checkpoint <>{HOME}/ask >{HOME}/engine.log 2>&1"

    def lines(self) -> list[str]:
        path = self._home / "engine.log"
        return path.read_text().splitlines() if path.exists() else []

    def wait(self) -> None:
        until(lambda: bool(self.lines()), "the engine has attached")
        assert self.lines()[0].startswith("attached "), self.lines()

    def digest(self) -> str:
        """The digest of its mapped bytes, computed now."""
        before = len(self.lines())
        (self._home / "ask").write_text("\n")
        until(lambda: len(self.lines()) > before, "the engine has looked at its weights")
        return self.lines()[-1]


@pytest.fixture(scope="module")
def system() -> Iterator[PrivateSystem]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with PrivateSystem() as system:
        yield system


@pytest.fixture
def site(system: PrivateSystem) -> Iterator[Site]:
    yield Site(system)
    system.forget_user()


def test_logout_without_lingering_ends_the_daemon_and_frees_the_weights(site: Site) -> None:
    session = site.serve()
    pid, _, _ = site.served()
    assert pid in site.holders()
    warning = "off: units of this user end with the last login, and their memory is freed"
    fix = f"loginctl enable-linger {UID} (as root if that is denied)"
    assert site.findings(session)["linger"] == ("warn", warning, fix)
    site.log_out(session, "gone")
    assert site.system.processes() == {}
    assert site.holders() == set()
    # Stopped in order, not killed.
    assert site.log().splitlines()[-1] == "<6>stopped device=cpu0"
    assert re.findall("^<[0-4]>.*|Traceback", site.log(), re.MULTILINE) == []
    shown = site.system.run_as_user(f"{CTL} status")
    assert (shown.returncode, shown.stdout, shown.stderr) == (78, "", f"weightcachectl: {ABSENT}\n")


def test_next_login_starts_the_enabled_unit_anew(site: Site) -> None:
    session = site.serve()
    first = site.served()
    site.log_out(session, "gone")
    with site.system.log_in() as again:
        assert again.id != session.id
        second = site.served()
        assert second[0] != first[0]
        assert (first[1:], second[1:], site.loads()) == ((1, "loaded"), (1, "loaded"), 2)
        assert "stale socket" not in site.log()


def test_login_on_the_heels_of_a_logout_finds_a_daemon(site: Site) -> None:
    session = site.serve()
    pids = [site.served()[0]]
    for _ in range(2):
        # Without a wait: logind may be anywhere between keeping the user's manager and removing
        # all.
        session.log_out()
        session = site.system.log_in()
        pids.append(site.served()[0])
    assert site.loads() == len(set(pids))
    assert session.output("systemctl --user list-units --failed --plain --no-legend") == ""


def test_daemon_lives_until_the_last_of_two_sessions_ends(site: Site) -> None:
    first = site.serve()
    with site.system.log_in() as second:
        before = site.served()
        first.log_out()
        until(
            lambda: first.id not in site.system.run("loginctl", "list-sessions").stdout.split(),
            "it is closed",
        )
        assert second.output(f"{CTL} status --json").count(f'"pid": {before[0]}') == 1
        assert (site.served(), site.loads()) == (before, 1)
    until(lambda: site.system.user_state() == "gone", "the second was the last")
    assert site.system.processes() == {}


def test_lingering_keeps_daemon_and_generation_until_it_is_switched_off(site: Site) -> None:
    session = site.serve()
    before, holders = site.served(), site.holders()
    # No polkit here: then an administrator has to allow it.
    assert session.run("loginctl enable-linger") == (1, "Could not enable linger: Access denied")
    site.system.run("loginctl", "enable-linger", str(UID))
    assert site.findings(session)["linger"] == ("ok", "units of this user run without a login", "")
    site.log_out(session, "lingering")
    assert (site.served(), site.holders(), site.loads()) == (before, holders, 1)
    with site.system.log_in() as again:
        assert site.served() == before
        assert again.output(f"{CTL} status").splitlines()[1].split()[:4] == [
            "cpu0",
            "m/target",
            "ready",
            "1",
        ]
    until(lambda: site.system.user_state() == "lingering", "the second session has ended too")
    assert (site.served(), site.loads()) == (before, 1)
    site.system.run("loginctl", "disable-linger", str(UID))
    until(lambda: site.system.user_state() == "gone", "nothing keeps the user's manager")
    assert (site.system.processes(), site.holders()) == ({}, set())


def test_weights_of_a_lingering_user_are_resident_after_a_boot_without_a_login(site: Site) -> None:
    session = site.serve()
    site.system.run("loginctl", "enable-linger", str(UID))
    session.log_out()
    site.system.shut_down()
    site.system.boot()
    assert site.served()[1:] == (1, "loaded")
    assert (site.system.user_state(), site.loads()) == ("lingering", 2)
    assert "No sessions." in site.system.run("loginctl", "list-sessions").stdout


def test_login_does_not_wait_for_the_weights_and_logout_ends_their_loader(site: Site) -> None:
    with site.system.log_in() as session:
        site.install(session)
    until(lambda: site.system.user_state() == "gone", "it is logged out")
    site.pauses.arm("weights")
    session = site.system.log_in()
    until(lambda: site.pauses.reached("weights"), "the loader runs")
    assert (
        session.output("systemctl --user is-active weightcached@cpu0.service || true")
        == "activating"
    )
    loader = int((site.system.home / "spawns").read_text().split()[-1])
    assert loader in site.system.processes()
    site.log_out(session, "gone")
    assert (site.system.processes(), site.holders()) == ({}, set())
    assert site.log().splitlines()[-1] == "<6>stopped device=cpu0"


def test_engine_left_behind_in_a_closed_session_keeps_the_daemon(site: Site) -> None:
    """As `nohup vllm serve …`, if logind does not kill a session's processes
    (KillUserProcesses=no).
    """
    session = site.serve()
    before, engine = site.served(), Engine(site)
    session.output(f"setsid nohup sh -c {shlex.quote(f'exec {engine.command}')} >/dev/null 2>&1 &")
    engine.wait()
    content = engine.digest()
    site.log_out(session, "closing")
    assert (site.served(), engine.digest()) == (before, content)
    (pid,) = [
        pid
        for pid, command in site.system.processes().items()
        if "-m tests.fakes.engine" in command
    ]
    site.system.run("kill", str(pid))
    until(lambda: site.system.user_state() == "gone", "nothing of the session is left")
    assert (site.system.processes(), site.holders()) == ({}, set())


def test_engine_that_is_a_system_service_keeps_its_weights_through_the_logout(site: Site) -> None:
    session = site.serve()
    engine = Engine(site)
    site.system.run(
        "systemd-run",
        "--quiet",
        f"--uid={USER}",
        "--unit=engine",
        "sh",
        "-c",
        f"exec {engine.command}",
    )
    engine.wait()
    content = engine.digest()
    site.log_out(session, "gone")
    service = int(site.system.run("systemctl", "show", "--value", "-p", "MainPID", "engine").stdout)
    assert (set(site.system.processes()), site.holders()) == ({service}, {service})
    assert engine.digest() == content
    site.system.run("systemctl", "stop", "engine")
    assert site.holders() == set()


@pytest.mark.slow
def test_doctor_tells_a_shell_outside_of_any_session_what_is_missing_and_its_commands_mend_it(
    site: Site,
) -> None:
    site.log_out(site.serve(), "gone")
    unset = ("warn", f"is not set, {RUNTIME} is used", f"export XDG_RUNTIME_DIR={RUNTIME}")
    warning = "off: units of this user end with the last login, and their memory is freed"
    enable = f"loginctl enable-linger {UID}"
    manager = f"{enable}; systemctl start user@{UID}.service"
    assert site.findings() == {
        "linger": ("warn", warning, f"{enable} (as root if that is denied)"),
        "XDG_RUNTIME_DIR": unset,
        "user manager": ("fail", "does not answer (no output)", f"{manager} (as root)"),
        "runtime directory": ("fail", ABSENT, f"{enable}; export XDG_RUNTIME_DIR={RUNTIME}"),
    }
    site.system.run("sh", "-c", manager)
    pid, _, _ = site.served()
    assert site.findings() == {
        "linger": ("ok", "units of this user run without a login", ""),
        "XDG_RUNTIME_DIR": unset,
        "user manager": ("ok", "running", ""),
        "runtime directory": ("ok", f"{RUNTIME}/weightcached", ""),
        "socket": ("ok", f"{SOCKET}: pid {pid}, ready", ""),
    }
    restarted = site.system.run_as_user(f"{CTL} restart cpu0")
    assert (restarted.returncode, restarted.stdout) == (0, "cpu0: restarted\n")
    assert site.served()[1:] == (1, "adopted")
