"""The README's picture: drawn from a recording, of text alone, without anything from the network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from bench.first_steps import COMMANDS
from bench.picture import ROOT, final_lines, last_lines, svg
from tests.fakes.daemon import BOUND_S

RECORDING = "ready\n\x1b[32mattach\x1b[0m  0.174 s\n"


def texts(picture: str) -> list[str]:
    """The words of each line, in order."""
    root = ElementTree.fromstring(picture)
    lines: dict[str, str] = {}
    for element in root.iter("{http://www.w3.org/2000/svg}text"):
        if "terminal-title" not in element.attrib["class"]:
            lines[element.attrib["y"]] = lines.get(element.attrib["y"], "") + (element.text or "")
    return [line.replace("\xa0", " ").strip() for line in lines.values()]


def test_picture_shows_the_recording_line_by_line() -> None:
    assert texts(svg(RECORDING, 60, "make demo")) == ["$ make demo", "ready", "attach  0.174 s"]


def test_picture_needs_nothing_from_the_network() -> None:
    for picture in (svg(RECORDING, 60, "t"), (ROOT / "docs/demo.svg").read_text(encoding="utf-8")):
        addresses = re.findall(r"https?://[^\"' )]*", picture)
        assert set(addresses) == {"http://www.w3.org/2000/svg"}
        assert "@import" not in picture
        assert "@font-face" not in picture


def test_picture_of_the_readme_is_the_end_of_its_recording() -> None:
    recording = (ROOT / "docs/demo.txt").read_text(encoding="utf-8")
    command, ellipsis, *shown = texts((ROOT / "docs/demo.svg").read_text(encoding="utf-8"))
    assert (command, ellipsis) == ("$ make demo", "…")
    written = [line.strip() for line in recording.splitlines() if line.strip()]
    assert [line for line in shown if line] == written[-len([line for line in shown if line]) :]
    assert any(line.startswith("weights from") for line in shown)


def test_picture_of_the_first_steps_is_its_recording_and_shows_the_four_commands() -> None:
    recording = (ROOT / "docs/first-steps.txt").read_text(encoding="utf-8")
    shown = texts((ROOT / "docs/first-steps.svg").read_text(encoding="utf-8"))
    written = [line.strip() for line in recording.splitlines()]
    assert [line for line in shown if line] == [re.sub(r"\x1b\[\d*m", "", x) for x in written if x]
    commands = [line.removeprefix("$ ") for line in shown if line.startswith("$ ")]
    assert commands == [*COMMANDS, "weightcachectl status"]


def test_readme_shows_the_same_commands() -> None:
    """With another model, and without the option that saves the recording its compilation."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    _, _, block = page.partition("docs/first-steps.svg")[2].partition("```\n")
    lines = [re.sub(r"\s+#.*", "", line) for line in block.partition("```")[0].splitlines()]
    model = "/srv/models/Llama-3.1-8B-Instruct"
    wanted = [x.replace("~/models/tiny", model).replace(" --enforce-eager", "") for x in COMMANDS]
    assert lines == wanted


def test_last_lines_follow_an_ellipsis() -> None:
    assert last_lines("a\nb\nc\n", 2) == "…\nb\nc\n"
    assert last_lines("a\nb\nc\n", 3) == "a\nb\nc\n"
    assert last_lines("a\nb\nc\n", 0) == "a\nb\nc\n"


def test_line_that_redraws_itself_is_kept_as_it_was_left() -> None:
    assert final_lines("a\r\n1 of 3\r\x1b[K3 of 3\r\nend\r\n") == "a\n3 of 3\nend\n"


def test_lines_that_only_count_seconds_are_left_out() -> None:
    assert final_lines("starts\n  … 15 s\n  … 30 s\n  done after 44.6 s\n") == (
        "starts\n  done after 44.6 s\n"
    )


def test_command_that_fails_draws_nothing_and_gives_its_status(tmp_path: Path) -> None:
    out = tmp_path / "p.svg"
    done = subprocess.run(
        [sys.executable, ROOT / "bench/picture.py", "--out", out, "--", "sh", "-c", "echo no; exit 3"],
        capture_output=True, text=True, check=False, timeout=BOUND_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, "no\n")
    assert not out.exists()


def test_command_runs_on_a_terminal_of_the_given_width(tmp_path: Path) -> None:
    out = tmp_path / "p.svg"
    subprocess.run(
        [sys.executable, ROOT / "bench/picture.py", "--out", out, "--columns", "71", "--", "stty", "size"],
        check=True, capture_output=True, timeout=BOUND_S,
    )  # fmt: skip
    assert out.with_suffix(".txt").read_text() == "50 71\n"
