"""doctor, the budget of devices, and models on demand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.checkpoints import write_checkpoint
from weightcached.cli import doctor
from weightcached.cli.doctor import Finding
from weightcached.config.manifest import load_manifest


def found(tmp_path: Path, *, b: str = "", keys: str = "") -> list[Finding]:
    """Models a and b of 3 MiB on cpu0."""
    path = tmp_path / "manifest.yaml"
    models = []
    for name, more in (("a", ""), ("b", b)):
        checkpoint = write_checkpoint(tmp_path / name)
        models.append(f"{{name: {name}, devices: [cpu0], engine: {{model: {checkpoint}}}{more}}}")
    path.write_text(f"version: 1\nmodels: [{', '.join(models)}]\n{keys}")
    return list(doctor._residency(load_manifest(path)))


def test_without_budget_and_on_demand_models_nothing_is_said(tmp_path: Path) -> None:
    assert found(tmp_path) == []
    assert list(doctor._residency(None)) == []


def test_on_demand_models_without_snapshots_take_as_long_as_a_load(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, b=", resident: on-demand")
    assert (finding.level, finding.text) == (
        "warn",
        "each return of b takes as long as a load: there is no snapshots:",
    )
    assert found(tmp_path, b=", resident: on-demand", keys="snapshots: {}\n") == []


@pytest.mark.parametrize(
    ("b", "mib", "level", "text"),
    [
        ("", 6, "ok", "always resident are about 6.0 MiB"),
        ("", 5, "warn", "always resident are about 6.0 MiB: the last of them finds no room"),
        (
            ", resident: on-demand", 6, "ok",
            "always resident are about 3.0 MiB, b on demand has about 3.0 MiB",
        ),
        (
            ", resident: on-demand", 5, "warn",
            "always resident are about 3.0 MiB, b on demand has about 3.0 MiB: b finds no room",
        ),
    ],
)  # fmt: skip
def test_budget_is_compared_with_the_checkpoints(
    tmp_path: Path, b: str, mib: int, level: str, text: str
) -> None:
    (finding,) = found(tmp_path, b=b, keys=f"snapshots: {{}}\nbudget: {{cpu0: {mib} MiB}}\n")
    assert (finding.level, finding.text) == (level, f"budget of cpu0 {mib}.0 MiB, {text}")
