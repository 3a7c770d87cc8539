"""start, stop and restart: followed to the unit's final state, with the daemon's last words."""

from __future__ import annotations

import io
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.fakes.commands import Commands
from tests.fakes.stub_daemon import StubDaemon, cache, status
from weightcached.cli import units
from weightcached.cli.progress import ProgressDisplay
from weightcached.cli.weightcachectl import main
from weightcached.wire.messages import Loading

UNIT = "weightcached@cpu0.service"
GIB = 1 << 30


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    commands = Commands(tmp_path / "commands")
    monkeypatch.setenv("PATH", f"{commands.folder}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(units, "POLL_S", 0.01)
    return commands


def properties(
    active: str, sub: str, *, result: str = "success", code: int = 0, text: str = "", job: str = ""
) -> str:
    return (
        f"Result={result}\nExecMainStatus={code}\nStatusText={text}\nLoadState=loaded\nActiveState={active}\n"
        f"SubState={sub}\nInvocationID=abc\n" + (f"Job={job}\n" if job else "")
    )


def run(commands: Commands, *arguments: str) -> Result:
    commands.finish()
    return CliRunner().invoke(main, arguments)


def test_start_shows_the_load_and_ends_with_the_unit(systemd: Commands, tmp_path: Path) -> None:
    systemd.answer("systemctl", f"--user start --no-block {UNIT}")
    starting = properties("activating", "start", job="7")
    systemd.answer(
        "systemctl", f"--user show {UNIT} *", starting, starting, properties("active", "running")
    )
    loading = cache(
        state="loading", phase="read weights", done_bytes=GIB, total_bytes=4 * GIB, eta_s=9.0
    )
    with StubDaemon(
        tmp_path / "weightcached/cpu0.sock",
        lambda request: [status("cpu0", loading, cache("b/target"))],
    ):
        result = run(systemd, "start", "cpu0")
    assert (result.exit_code, result.stdout) == (0, "cpu0: started\n")
    assert result.stderr == "cpu0 tiny/target: read weights, 1.0 of 4.0 GiB, 9.0 s left\n"


@pytest.mark.parametrize(
    "fields", [{"state": "failed", "retry_at": 1.0}, {"state": "loading", "phase": "weights"}]
)
def test_start_of_what_fails_is_a_failure_also_while_it_is_tried_again(
    systemd: Commands, tmp_path: Path, fields: dict[str, Any]
) -> None:
    systemd.answer("systemctl", f"--user start --no-block {UNIT}")
    systemd.answer("systemctl", f"--user show {UNIT} *", properties("active", "running"))
    failed = cache("m/target", generation=0, error="loader ended with status 1", **fields)
    with StubDaemon(tmp_path / "weightcached/cpu0.sock", lambda _: [status("cpu0", failed)]):
        result = run(systemd, "start", "cpu0")
    assert (result.exit_code, result.stdout) == (1, "cpu0: started\n")
    said = "cpu0 m/target failed: loader ended with status 1; it is tried again\n"
    assert result.stderr.endswith(said)


def test_start_shows_what_systemd_was_told_while_there_is_no_socket(systemd: Commands) -> None:
    systemd.answer("systemctl", f"--user start --no-block {UNIT}")
    starting = properties("activating", "start", text="checking what is resident", job="7")
    systemd.answer("systemctl", f"--user show {UNIT} *", starting, properties("active", "running"))
    result = run(systemd, "start", "cpu0")
    assert (result.exit_code, result.stdout, result.stderr) == (
        0,
        "cpu0: started\n",
        "cpu0: checking what is resident\n",
    )


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            properties("failed", "failed", result="start-limit-hit"),
            f"{UNIT} failed too often in a row (start-limit-hit, status 0): the last line of the journal; "
            f"systemctl --user reset-failed {UNIT}, then weightcachectl start cpu0",
        ),
        (
            properties(
                "failed", "failed", result="exit-code", code=78, text="m.yaml:3: models: wrong"
            ),
            f"{UNIT} is failed (exit-code, status 78): m.yaml:3: models: wrong",
        ),
        (
            properties("activating", "auto-restart", result="exit-code", code=75, text="busy"),
            f"{UNIT} is activating (exit-code, status 75, systemd tries again): busy",
        ),
        (
            properties("failed", "failed", result="watchdog"),
            f"{UNIT} is failed (watchdog, status 0): the last line of the journal",
        ),
    ],
)
def test_failed_start_exits_1_with_the_daemons_words(
    systemd: Commands, state: str, text: str
) -> None:
    systemd.answer("systemctl", f"--user start --no-block {UNIT}")
    systemd.answer("systemctl", f"--user show {UNIT} *", state)
    arguments = "--user _SYSTEMD_INVOCATION_ID=abc --output=cat --lines=1"
    systemd.answer("journalctl", arguments, "the last line of the journal\n")
    result = run(systemd, "start", "cpu0")
    assert (result.exit_code, result.stdout, result.stderr) == (
        1,
        "",
        f"weightcachectl: cpu0: {text}\n",
    )


def test_start_waits_for_its_turn_after_an_earlier_failure(systemd: Commands) -> None:
    systemd.answer("systemctl", f"--user start --no-block {UNIT}")
    waiting = properties("activating", "auto-restart", result="exit-code", code=1, job="7")
    systemd.answer(
        "systemctl", f"--user show {UNIT} *", waiting, waiting, properties("active", "running")
    )
    result = run(systemd, "start", "cpu0")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "cpu0: started\n", "")


@pytest.mark.parametrize(
    ("words", "said"), [("no room\n", "no room"), ("-- No entries --\n", "loading")]
)
def test_next_attempts_job_is_not_taken_for_this_one(
    systemd: Commands, words: str, said: str
) -> None:
    systemd.answer("systemctl", f"--user start --no-block {UNIT}")
    starting = properties("activating", "start", job="7", text="loading")
    again = properties("activating", "start", job="8").replace("=abc", "=def")
    systemd.answer("systemctl", f"--user show {UNIT} *", starting, again)
    systemd.answer("journalctl", "--user _SYSTEMD_INVOCATION_ID=abc --output=cat --lines=1", words)
    result = run(systemd, "start", "cpu0")
    assert result.exit_code == 1
    text = f"weightcachectl: cpu0: {UNIT} failed, systemd tries again: {said}\n"
    assert result.stderr.splitlines(keepends=True)[-1] == text


def test_failure_without_any_words_names_the_journal(systemd: Commands) -> None:
    systemd.answer("systemctl", f"--user start --no-block {UNIT}")
    systemd.answer(
        "systemctl",
        f"--user show {UNIT} *",
        properties("failed", "failed", result="signal", code=9),
    )
    systemd.answer("journalctl", "*", "-- No entries --\n")
    result = run(systemd, "start", "cpu0")
    assert result.stderr == (
        f"weightcachectl: cpu0: {UNIT} is failed (signal, status 9): no message; journalctl --user -u {UNIT}\n"
    )


def test_unit_that_is_not_installed_is_named_with_its_installer(systemd: Commands) -> None:
    said = f"Failed to start {UNIT}: Unit {UNIT} not found.\n"
    systemd.answer("systemctl", f"--user start --no-block {UNIT}", status=5, stderr=said)
    result = run(systemd, "start", "cpu0")
    assert (result.exit_code, result.stderr) == (
        1,
        f"weightcachectl: cpu0: Failed to start {UNIT}: Unit {UNIT} not found: see 'weightcachectl doctor'\n",
    )


def test_no_manager_is_told_in_its_own_words(systemd: Commands) -> None:
    said = "Failed to connect to bus: No such file or directory\n"
    systemd.answer("systemctl", "*", status=1, stderr=said)
    result = run(systemd, "stop", "cpu0", "cpu1")
    text = "Failed to connect to bus: No such file or directory: see 'weightcachectl doctor'"
    assert result.exit_code == 1
    assert result.stderr == f"weightcachectl: cpu0: {text}\nweightcachectl: cpu1: {text}\n"


def test_stop_ends_with_an_inactive_unit(systemd: Commands) -> None:
    systemd.answer("systemctl", f"--user stop --no-block {UNIT}")
    stopping = properties("deactivating", "stop-sigterm", job="3")
    systemd.answer("systemctl", f"--user show {UNIT} *", stopping, properties("inactive", "dead"))
    result = run(systemd, "stop", "cpu0")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "cpu0: stopped\n", "")


def test_stop_of_a_unit_that_had_to_be_killed_exits_1(systemd: Commands) -> None:
    systemd.answer("systemctl", f"--user stop --no-block {UNIT}")
    systemd.answer(
        "systemctl",
        f"--user show {UNIT} *",
        properties("failed", "failed", result="timeout", text="stopping"),
    )
    result = run(systemd, "stop", "cpu0")
    assert result.exit_code == 1
    assert (
        result.stderr == f"weightcachectl: cpu0: {UNIT} is failed (timeout, status 0): stopping\n"
    )


def test_restart_of_several_units_fails_if_one_fails(systemd: Commands) -> None:
    for device, state in (
        ("cpu0", properties("active", "running")),
        ("cpu1", properties("failed", "failed", text="x")),
    ):
        systemd.answer("systemctl", f"--user restart --no-block weightcached@{device}.service")
        systemd.answer("systemctl", f"--user show weightcached@{device}.service *", state)
    result = run(systemd, "restart", "cpu0", "cpu1", "cpu0")
    assert (result.exit_code, result.stdout) == (1, "cpu0: restarted\n")
    assert (
        result.stderr
        == "weightcachectl: cpu1: weightcached@cpu1.service is failed (success, status 0): x\n"
    )
    assert [call for call in systemd.calls() if "restart" in call] == [
        "systemctl --user restart --no-block weightcached@cpu0.service",
        "systemctl --user restart --no-block weightcached@cpu1.service",
    ]


# ---- the display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def load(phase: str, done: int, total: int, eta_s: float | None = None) -> Loading:
    return Loading(cache="a/target", phase=phase, done_bytes=done, total_bytes=total, eta_s=eta_s)


def test_terminal_gets_a_bar_for_each_load_and_keeps_none() -> None:
    terminal = Terminal()
    display = ProgressDisplay(terminal)
    display.show("cpu0 a/target", load("read weights", GIB, 4 * GIB, 3.0))
    display.show("cpu0 a/target", load("read weights", 4 * GIB, 4 * GIB, 0.0))
    display.show("cpu0 b/[draft]", load("proof", 0, 0))
    display.show_text("cpu1", "stopping")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "━ cpu0 a/target: read weights, 1.0 of 4.0 GiB, 3.0 s left" in shown
    last = shown.splitlines()[-3:]
    assert [line.strip("━╸╺ \r") for line in last] == [
        "cpu0 a/target: read weights, 4.0 of 4.0 GiB, 0.0 s left",
        "cpu0 b/[draft]: proof",
        "cpu1: stopping",
    ]
    display.clear()
    # Up, and each line erased.
    assert terminal.getvalue().endswith("\x1b[1A\x1b[2K" * 3)
    display.clear()


def test_file_gets_each_phase_once_and_then_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    file = io.StringIO()
    display = ProgressDisplay(file)
    for at_s, done in ((0.0, 1), (9.9, 2), (10.0, 3), (10.1, 4)):
        now_s[0] = 100.0 + at_s
        display.show("a", load("read", done * GIB, 9 * GIB))
    display.show("b", load("read", 1 << 20, 3 << 20))
    display.clear()
    assert (
        file.getvalue()
        == "a: read, 1.0 of 9.0 GiB\na: read, 3.0 of 9.0 GiB\nb: read, 1.0 of 3.0 MiB\n"
    )
