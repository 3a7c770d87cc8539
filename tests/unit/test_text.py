"""Tables and words: plain for programs, coloured on a terminal; sizes, times and progress."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any

import pytest

from weightcached.cli import text
from weightcached.cli.text import columns, mark
from weightcached.system.text import bytes_text, progress_text, seconds_text
from weightcached.wire.messages import Loading

ROWS = [("DEVICE", "STATE"), ("cpu0", "ready"), ("GPU-[x]", "failed")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    # Not sys.stdout itself, which pytest replaces for the call.
    monkeypatch.setattr(text, "sys", SimpleNamespace(stdout=Terminal()))


def plain(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


def test_table_for_a_program_is_plain() -> None:
    assert columns(ROWS) == ["DEVICE   STATE", "cpu0     ready", "GPU-[x]  failed"]
    assert mark("ok  ") == "ok  "


def test_table_on_a_terminal_has_the_same_words_in_colour(terminal: None) -> None:
    lines = columns(ROWS)
    assert [plain(line).rstrip() for line in lines] == [
        "DEVICE   STATE", "cpu0     ready", "GPU-[x]  failed",
    ]  # fmt: skip
    assert "\x1b[32mready" in lines[1]
    assert "\x1b[1;31mfailed" in lines[2]
    assert mark("fail") == "\x1b[1;31mfail\x1b[0m"
    assert mark("other") == "other"


def test_no_color_is_respected(terminal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in "".join(columns(ROWS))


def test_long_text_is_folded_and_not_cut(terminal: None) -> None:
    words = " ".join(f"word{n}" for n in range(40))
    lines = columns([("A", "DETAIL"), ("x", words)])
    assert max(len(plain(line)) for line in lines) <= 80
    assert re.findall(r"word\d+", " ".join(map(plain, lines))) == words.split()


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [(0, "0 KiB"), (1, "1 KiB"), (512 << 10, "512 KiB"), (3 << 20, "3.0 MiB"), (15 << 30, "15.0 GiB")],
)  # fmt: skip
def test_sizes(nbytes: int, said: str) -> None:
    assert bytes_text(nbytes) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.41, "0.4 s"), (59, "59 s"), (720, "12 min"), (3 * 3600, "3 h"), (5 * 86400, "5 d"), (1e10, "?")],
)  # fmt: skip
def test_times(seconds: float, said: str) -> None:
    assert seconds_text(seconds) == said


def test_progress() -> None:
    def said(**fields: Any) -> str:
        return progress_text(Loading(cache="a/target", **fields))

    assert said(phase="proof") == "proof"
    assert said(phase="read", done_bytes=1 << 20, total_bytes=3 << 20) == "read, 1.0 of 3.0 MiB"
    full = said(phase="read", done_bytes=1 << 30, total_bytes=15 << 30, eta_s=12.0)
    assert full == "read, 1.0 of 15.0 GiB, 12 s left"
