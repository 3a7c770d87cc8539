"""Tables and words for a person: with colours on a terminal, plain elsewhere.

Plain, so that programs can read it. rich is imported only for a terminal, because machines run
`status` too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

_STYLES = {
    "ready": "green", "ok": "green", "serving": "green",
    "loading": "yellow", "warn": "yellow", "starting": "yellow",
    "failed": "bold red", "fail": "bold red",
}  # fmt: skip


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows, the first being the head, as lines with aligned columns, two spaces apart."""
    if sys.stdout.isatty():
        return _colour(rows)
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def mark(word: str) -> str:
    """A word that says how something is, in its colour on a terminal."""
    style = _STYLES.get(word.strip())
    if style is None or not sys.stdout.isatty():
        return word
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout)
    with console.capture() as capture:
        console.print(Text(word, style=style), end="")
    return capture.get()


def _colour(rows: Sequence[Sequence[str]]) -> list[str]:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows[1:]:
        # Not as markup: a name may have brackets.
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    console = Console(file=sys.stdout)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]
