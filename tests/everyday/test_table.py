"""docs/faults.md: each row says cause, effect and remedy, and names a test that there is."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs/faults.md"
HEAD = "| cause | effect | remedy | test |"


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    kept = [line for line in lines if line != HEAD and not line.startswith("|---")]
    # A bar inside a code span is written \| in a table.
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in kept]


def fault_of(row: list[str]) -> str:
    if len(row) != 4 or not all(row):
        return "it does not fill four columns"
    named = re.findall(r"`(tests/[^:`]+)::(test_\w+)`", row[3])
    if not named:
        return "it names no `tests/…/test_x.py::test_y`"
    for path, test in named:
        file = ROOT / path
        if not file.is_file():
            return f"{path} does not exist"
        if not re.search(rf"^(async )?def {test}\(", file.read_text(), re.MULTILINE):
            return f"{path} has no {test}"
    return ""


def test_every_row_names_a_test_that_there_is() -> None:
    faults = {row[0]: fault for row in rows(TABLE.read_text()) if (fault := fault_of(row))}
    assert faults == {}


@pytest.mark.parametrize(
    "row",
    [
        "| a | b | c |",
        "| a | b |  | `tests/everyday/test_table.py::test_every_row_names_a_test_that_there_is` |",
        "| a | b | c | by reading |",
        "| a | b | c | `tests/everyday/test_none.py::test_x` |",
        "| a | b | c | `tests/everyday/test_table.py::test_gone` |",
    ],
)
def test_a_row_that_proves_nothing_is_seen(row: str) -> None:
    (cells,) = rows(row)
    assert fault_of(cells)
