"""Draw the picture of the README: run a command on a terminal of its own, and keep its output as an
SVG.

    python bench/picture.py                                  # the demo, on a GPU if there is one
    python bench/picture.py -- python bench/demo.py --hidden 4096 --layers 32
    python bench/picture.py --from docs/demo.txt             # the same recording, drawn again

The recording is kept beside the picture as plain text. The SVG needs nothing from the network: rich's
own template loads a web font, ours names the fonts that systems have.
"""

from __future__ import annotations

import os
import pty
import re
import shlex
import struct
import sys
import termios
from collections.abc import Sequence
from fcntl import ioctl
from io import StringIO
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
_READ_BYTES = 65_536
_COUNTS_SECONDS = re.compile(r"\s*… \d+ s")
# rich's own template has @font-face rules that name a content network.
_TEMPLATE = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: arial, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


@click.command()
@click.argument("command", nargs=-1)
@click.option(
    "--from", "recording", type=click.Path(exists=True, path_type=Path), help="Draw this recording."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=ROOT / "docs" / "demo.svg",
    show_default="docs/demo.svg",
    help="The picture; the recording is written beside it, as .txt.",
)
@click.option("--columns", default=96, show_default=True, help="Width of the terminal.")
@click.option(
    "--tail",
    default=11,
    show_default=True,
    help="Draw only the last lines, for the demo its two tables; 0: all.",
)
@click.option("--title", default="make demo", show_default=True, help="Title of the window.")
@click.option(
    "--prompt",
    default="make demo",
    show_default=True,
    help="The command that the picture begins with; empty: none.",
)
def main(
    command: Sequence[str],
    recording: Path | None,
    out: Path,
    columns: int,
    tail: int,
    title: str,
    prompt: str,
) -> None:
    """Run COMMAND, by default the demo, and draw its output.

    Exit status: that of COMMAND; nothing is drawn unless it is 0.
    """
    if recording is None:
        output = _recorded(
            list(command) or [sys.executable, str(ROOT / "bench" / "demo.py")], columns
        )
        recording = out.with_suffix(".txt")
        recording.write_text(output, encoding="utf-8")
    text = final_lines(recording.read_text(encoding="utf-8"))
    out.write_text(svg(last_lines(text, tail), columns, title, prompt), encoding="utf-8")
    click.echo(f"wrote {out}")


def _recorded(command: list[str], columns: int) -> str:
    """Everything that the command showed on a terminal, while it is shown here too. Exits as the command did."""
    pid, fd = pty.fork()
    if pid == 0:
        # Before the command runs, which may look at once.
        ioctl(0, termios.TIOCSWINSZ, struct.pack("4H", 50, columns, 0, 0))
        try:
            os.execvp(command[0], command)
        except OSError as e:
            os.write(2, f"{shlex.join(command)}: {e.strerror}\n".encode())
            os._exit(127)
    shown = bytearray()
    while chunk := _read(fd):
        shown += chunk
        sys.stdout.buffer.write(chunk)
        sys.stdout.flush()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != 0:
        sys.exit(status if status > 0 else 128 - status)
    return final_lines(shown.decode(errors="replace"))


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, _READ_BYTES)
    # A terminal whose last user has left says EIO, not the end.
    except OSError:
        return b""


def final_lines(shown: str) -> str:
    """Each line as it was left, after the last \\r; lines that only count seconds are left out."""
    lines = [
        line.rstrip("\r").rpartition("\r")[2].replace("\x1b[K", "") for line in shown.split("\n")
    ]
    return (
        "\n".join(line for line in lines if not _COUNTS_SECONDS.fullmatch(line)).strip("\n") + "\n"
    )


def last_lines(text: str, number: int) -> str:
    """The last lines of a recording, after an ellipsis; all of it for 0."""
    lines = text.splitlines()
    return text if not 0 < number < len(lines) else "\n".join(["…", *lines[-number:]]) + "\n"


def svg(recording: str, columns: int, title: str, prompt: str = "make demo") -> str:
    """The picture of a terminal that shows `recording`, with its colours; prompt: the command that
    made it, "" if the recording has its own.
    """
    console = Console(record=True, width=columns, file=StringIO(), force_terminal=True)
    if prompt:
        console.print(Text(f"$ {prompt}", style="bold"))
    console.print(Text.from_ansi(recording.rstrip("\n")), soft_wrap=True)
    return console.export_svg(title=title, code_format=_TEMPLATE, unique_id="terminal")


if __name__ == "__main__":
    main()
