"""Packages that are installed while a process runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from weightcached.system.packages import InstalledPackages


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of packages; a relative one and one that is not there are no matter."""
    monkeypatch.setattr(sys, "path", ["", "relative", str(tmp_path / "nowhere"), str(tmp_path)])
    (tmp_path / "vllm-0.33.0.dist-info").mkdir()
    (tmp_path / "vllm").mkdir()
    return tmp_path


def test_nothing_installed_is_no_change(site: Path) -> None:
    packages = InstalledPackages()
    (site / "vllm/cache").touch()
    assert packages.changed() == ""


def test_another_version_and_a_new_package_are_named(site: Path) -> None:
    packages = InstalledPackages()
    (site / "vllm-0.33.0.dist-info").rename(site / "vllm-0.34.0.dist-info")
    (site / "xxhash-3.5.egg-info").touch()
    assert packages.changed() == (
        "vllm-0.33.0.dist-info, vllm-0.34.0.dist-info, xxhash-3.5.egg-info"
    )


def test_same_version_installed_again_is_a_change(site: Path) -> None:
    packages = InstalledPackages()
    os.utime(site / "vllm-0.33.0.dist-info", ns=(0, 0))
    assert packages.changed() == "vllm-0.33.0.dist-info"


def test_directory_that_an_import_adds_is_no_change(site: Path, tmp_path: Path) -> None:
    """As setuptools adds that of the packages that it brings along."""
    packages = InstalledPackages()
    (tmp_path / "vendor/wheel-0.45.dist-info").mkdir(parents=True)
    sys.path.append(str(tmp_path / "vendor"))
    assert packages.changed() == ""
