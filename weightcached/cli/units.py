"""`weightcachectl start`, `stop` and `restart`: queue the job, show the load from the socket, end
as the unit ended.
"""

from __future__ import annotations

import subprocess
import time
from typing import Literal, NamedTuple

from weightcached.cli.progress import ProgressDisplay
from weightcached.cli.status import ask_status
from weightcached.errors import WeightcachedError
from weightcached.system.paths import session_environment

Verb = Literal["start", "stop", "restart"]
COMMAND_TIMEOUT_S = 30.0
# systemctl has no way to wait for one unit's job beside other work; this is how often it is asked.
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
)


class UnitError(WeightcachedError):
    """systemd could not carry out the job, or the unit ended in another state than was asked
    for.
    """

    code = "unit"


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


def unit_of(device: str) -> str:
    """The unit that serves `device`."""
    return f"weightcached@{device}.service"


def systemctl(*arguments: str) -> str:
    """Output of `systemctl --user`. Raises UnitError with systemctl's own words."""
    try:
        done = subprocess.run(
            ["systemctl", "--user", *arguments],
            env=session_environment(),
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
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
    """Have the user manager read its unit files again. False where none answers."""
    try:
        systemctl("daemon-reload")
    except (UnitError, OSError):
        return False
    return True


def _first_words(stderr: str, status: int) -> str:
    lines = stderr.strip().splitlines()
    return lines[0].rstrip(".") if lines else f"systemctl ended with status {status}"


def unit_state(device: str) -> UnitState:
    """What systemd says about the unit of `device`. Raises UnitError."""
    text = systemctl("show", unit_of(device), *(f"--property={name}" for name in _PROPERTIES))
    values = dict(line.partition("=")[::2] for line in text.splitlines())
    return UnitState(*(values.get(name, "") for name in _PROPERTIES))


def failures() -> dict[str, WeightcachedError]:
    """Of each device whose unit has failed, what its daemon said last. Empty where no user manager
    answers.
    """
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
    """Queue the job for every device and follow them to the end. By device: None for success, or
    what went wrong.
    """
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
    """Whether `job`, the one that was queued, has come to its end.

    A job stays queued while the unit waits for its next attempt after an earlier failure. If this
    attempt fails, it is gone, and the one that the next attempt brings has another number.
    """
    return state.job in ("", "0") or state.job != job


def check_unit_state(
    verb: Verb, device: str, state: UnitState, before: UnitState | None = None
) -> UnitError | None:
    """None where the unit is as `verb` wants it, else the reason, with the daemon's last words.

    `before` is the last state that was seen of the attempt that is over.
    """
    unit = unit_of(device)
    wanted = ("inactive",) if verb == "stop" else ("active", "reloading")
    if state.active in wanted:
        return None
    if state.load == "not-found":
        return UnitError(f"{unit} is not installed: weightcachectl install")
    if state.result == "start-limit-hit":
        return UnitError(
            f"{unit} failed too often in a row: systemctl --user reset-failed {unit}, then start it again"
        )
    nothing = f"no message; journalctl --user -u {unit}"
    if state.active == "activating" and state.sub != "auto-restart":
        # The next attempt: the unit tells nothing of the one before any more, its journal does.
        words = (_read_last_line(before) or before.status_text) if before else ""
        return UnitError(f"{unit} failed, systemd tries again: {words or nothing}")
    again = ", systemd tries again" if state.sub == "auto-restart" else ""
    words = state.status_text or _read_last_line(state) or nothing
    return UnitError(
        f"{unit} is {state.active} ({state.result}, status {state.exit_status}{again}): {words}"
    )


def _read_last_line(state: UnitState) -> str:
    """The last line that the daemon of this run logged, "" where there is no journal."""
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
    # journalctl says so itself where there is nothing: "-- No entries --".
    return "" if journal.startswith("-- ") else journal


def _show_load(device: str, state: UnitState, display: ProgressDisplay) -> None:
    try:
        caches = ask_status(device).caches
    except WeightcachedError:
        # Not up yet, or on its way down; what systemd was told last is all there is.
        if state.status_text:
            display.show(device, state.status_text, 0, 0, None)
        return
    for cache in caches:
        if cache.state == "loading":
            display.show(
                f"{device} {cache.name}",
                cache.phase,
                cache.done_bytes,
                cache.total_bytes,
                cache.eta_s,
            )
