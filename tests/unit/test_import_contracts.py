"""The contracts in pyproject.toml hold the arrows between rooms: a reversed one fails `make lint`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT = (
    "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the packages and of their contracts."""
    for package in ("weightcached", "weightcache_loader"):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(tree: Path) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "200", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-c", LINT], cwd=tree, env=environment, capture_output=True, text=True,
        check=False, timeout=240,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def append(file: Path, line: str) -> None:
    file.write_text(f"{file.read_text()}\n{line}\n")


def test_reversed_arrows_and_strangers_to_vllm_are_told(tree: Path) -> None:
    status, text = lint(tree)
    assert status == 0, text

    # An import inside a function counts as well.
    append(tree / "weightcached/system/fds.py", "def f():\n    import weightcached.daemon.leases")
    append(tree / "weightcached/model/walk.py", "import weightcached.vllm_compat.build")
    append(tree / "weightcached/model/values.py", "from vllm.platforms import current_platform")
    append(tree / "weightcached/daemon/leases.py", "import torch")
    append(tree / "weightcached/exporter/health.py", "import weightcached.daemon.leases")
    status, text = lint(tree)
    assert status == 1, text
    for arrow in (
        "weightcached.system.fds -> weightcached.daemon.leases",
        "weightcached.model.walk -> weightcached.vllm_compat.build",
        "weightcached.model.values -> vllm",
        "weightcached.daemon.leases -> torch",
        "weightcached.exporter.health -> weightcached.daemon.leases",
    ):
        assert arrow in text


def test_a_new_room_needs_a_floor(tree: Path) -> None:
    (tree / "weightcached/attic").mkdir()
    (tree / "weightcached/attic/__init__.py").write_text("")
    status, text = lint(tree)
    assert (status, "attic" in text) == (1, True), text


def test_make_lint_runs_the_contracts() -> None:
    dry = subprocess.run(
        ["make", "-n", "lint", f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert "lint-imports" in dry.stdout
