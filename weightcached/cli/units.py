"""`weightcachectl start`, `stop` and `restart`: queue the job, show the load, end as the unit."""

from __future__ import annotations

import subprocess
import time
from typing import Literal, NamedTuple

from weightcached.cli.progress import ProgressDisplay
from weightcached.cli.status import ask_device
from weightcached.errors import EXIT_CONFIG, UnitError, WeightcachedError
from weightcached.system.paths import session_environment

Verb = Literal["start", "stop", "restart"]
COMMAND_TIMEOUT_S = 30.0
# systemctl cannot wait for one unit's job during other work, so it is asked this often.
POLL_S = 0.25
_PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "ExecMainStatus",
    "StatusText",
    "Job",
    "InvocationID",
    "NRestarts",
)


class UnitState(NamedTuple):
    """Properties of one unit, by their systemd names."""

    load: str
    active: str
    sub: str
    result: str
    exit_status: str
    status_text: str
    job: str
    invocation: str
    restarts: str = ""

    @property
    def given_up(self) -> bool:
        """Whether the manager starts it again only after reset-failed.

        `result` stays that of the last attempt, unless that was refused too.
        """
        repeated = self.restarts not in ("", "0") and self.exit_status != str(EXIT_CONFIG)
        return self.active == "failed" and (self.result == "start-limit-hit" or repeated)


def unit_of(device: str) -> str:
    """The unit that serves `device`."""
    return f"weightcached@{device}.service"


def systemctl(*arguments: str, timeout_s: float | None = COMMAND_TIMEOUT_S) -> str:
    """Output of `systemctl --user`. Raises UnitError with systemctl's own words."""
    try:
        done = subprocess.run(
            ["systemctl", "--user", *arguments],
            env=session_environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as e:
        raise UnitError(
            "systemctl is not installed: run 'weightcached preload' without systemd instead"
        ) from e
    except subprocess.TimeoutExpired as e:
        raise UnitError(
            f"systemctl --user {arguments[0]} did not end within {COMMAND_TIMEOUT_S:.0f} s"
        ) from e
    if done.returncode:
        raise UnitError(
            f"{_first_words(done.stderr, done.returncode)}: see 'weightcachectl doctor'"
        )
    return done.stdout


def reload_manager() -> bool:
    """Have the user manager read its unit files again. False if none answers."""
    try:
        systemctl("daemon-reload")
    except (UnitError, OSError):
        return False
    return True


def _first_words(stderr: str, status: int) -> str:
    lines = stderr.strip().splitlines()
    return lines[0].rstrip(".") if lines else f"systemctl ended with status {status}"


def unit_state(device: str) -> UnitState:
    """systemd's properties of the unit of `device`. Raises UnitError."""
    text = systemctl("show", unit_of(device), *(f"--property={name}" for name in _PROPERTIES))
    values = dict(line.partition("=")[::2] for line in text.splitlines())
    return UnitState(*(values.get(name, "") for name in _PROPERTIES))


def failures() -> dict[str, WeightcachedError]:
    """The last words of each device's failed unit. Empty if no user manager answers."""
    try:
        listed = systemctl("list-units", "--state=failed", "--plain", "--no-legend", unit_of("*"))
        devices = [
            line.split()[0].removeprefix("weightcached@").removesuffix(".service")
            for line in listed.splitlines()
        ]
        found = {
            device: check_unit_state("start", device, unit_state(device)) for device in devices
        }
    except UnitError:
        return {}
    return {device: error for device, error in found.items() if error is not None}


def run_job(
    verb: Verb, devices: list[str], display: ProgressDisplay
) -> dict[str, WeightcachedError | None]:
    """Queue the job for every device and follow them to the end. By device: None, or the error."""
    ended: dict[str, WeightcachedError | None] = {}
    jobs: dict[str, str] = {}
    before: dict[str, UnitState] = {}
    for device in devices:
        try:
            systemctl(verb, "--no-block", unit_of(device))
        except UnitError as e:
            ended[device] = e
    while len(ended) < len(devices):
        for device in (d for d in devices if d not in ended):
            try:
                state = unit_state(device)
            except UnitError as e:
                ended[device] = e
                continue
            if is_over(state, jobs.setdefault(device, state.job)):
                ended[device] = check_unit_state(verb, device, state, before.get(device))
                continue
            before[device] = state
            if verb != "stop":
                _show_load(device, state, display)
        if len(ended) < len(devices):
            time.sleep(POLL_S)
    return {device: ended[device] for device in devices}


def is_over(state: UnitState, job: str) -> bool:
    """Whether the queued `job` is over.

    A job stays queued while the unit waits for its next attempt after an earlier failure. If this
    attempt fails, the job is gone, and that of the next attempt has another number.
    """
    return state.job in ("", "0") or state.job != job


def check_unit_state(
    verb: Verb, device: str, state: UnitState, before: UnitState | None = None
) -> UnitError | None:
    """None if the unit has the state that `verb` wants; else the reason, with the daemon's last
    words.

    before: the last state seen of the attempt that is over.
    """
    unit = unit_of(device)
    wanted = ("inactive",) if verb == "stop" else ("active", "reloading")
    if state.active in wanted:
        return None
    if state.load == "not-found":
        return UnitError(f"{unit} is not installed: weightcachectl install")
    nothing = f"no message; journalctl --user -u {unit}"
    if state.active == "activating" and state.sub != "auto-restart":
        # The next attempt runs: only the journal still has the last one's words.
        words = (_read_last_line(before) or before.status_text) if before else ""
        return UnitError(f"{unit} failed, systemd tries again: {words or nothing}")
    if state.given_up:
        words = state.status_text or _read_last_line(state) or nothing
        return UnitError(
            f"{unit} failed too often in a row ({state.result}, status {state.exit_status}): {words}; "
            f"systemctl --user reset-failed {unit}, then weightcachectl start {device}"
        )
    again = ", systemd tries again" if state.sub == "auto-restart" else ""
    words = state.status_text or _read_last_line(state) or nothing
    return UnitError(
        f"{unit} is {state.active} ({state.result}, status {state.exit_status}{again}): {words}"
    )


def running_units() -> dict[str, str]:
    """Our units that run or are about to, with their files. Empty if no user manager answers."""
    states = "--state=active,activating,reloading,deactivating"
    try:
        listed = systemctl("list-units", states, "--plain", "--no-legend", "weightcached*.service")
        names = [line.split()[0] for line in listed.splitlines() if line.strip()]
        return {
            x: systemctl("show", "--value", "--property=FragmentPath", x).strip() for x in names
        }
    except UnitError:
        return {}


def _read_last_line(state: UnitState) -> str:
    """The last line that the daemon of this run logged, "" without a journal."""
    command = [
        "journalctl",
        "--user",
        f"_SYSTEMD_INVOCATION_ID={state.invocation}",
        "--output=cat",
        "--lines=1",
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
        journal = done.stdout.strip() if done.returncode == 0 and state.invocation else ""
    except (OSError, subprocess.TimeoutExpired):
        journal = ""
    # Without entries journalctl prints "-- No entries --".
    return "" if journal.startswith("-- ") else journal


def _show_load(device: str, state: UnitState, display: ProgressDisplay) -> None:
    try:
        caches = ask_device(device).caches
    except WeightcachedError:
        # Not up yet, or on its way down: only the last message to systemd is known.
        if state.status_text:
            display.show_text(device, state.status_text)
        return
    for cache in caches:
        if cache.state == "loading":
            display.show(f"{device} {cache.name}", cache)
