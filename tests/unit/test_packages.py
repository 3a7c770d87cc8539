"""Packages that are installed while a process runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from weightcached.system.packages import describe_change, installed_packages


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of packages; a relative one and one that is not there are no matter."""
    monkeypatch.setattr(sys, "path", ["", "relative", str(tmp_path / "nowhere"), str(tmp_path)])
    (tmp_path / "vllm-0.33.0.dist-info").mkdir()
    (tmp_path / "vllm").mkdir()
    return tmp_path


def test_nothing_installed_is_no_change(site: Path) -> None:
    before = installed_packages()
    assert [os.path.basename(path) for path in before] == ["vllm-0.33.0.dist-info"]
    (site / "vllm/cache").touch()
    assert describe_change(before, installed_packages()) == ""


def test_another_version_and_a_new_package_are_named(site: Path) -> None:
    before = installed_packages()
    (site / "vllm-0.33.0.dist-info").rename(site / "vllm-0.34.0.dist-info")
    (site / "xxhash-3.5.egg-info").touch()
    assert describe_change(before, installed_packages()) == (
        "vllm-0.33.0.dist-info, vllm-0.34.0.dist-info, xxhash-3.5.egg-info"
    )


def test_same_version_installed_again_is_a_change(site: Path) -> None:
    before = installed_packages()
    os.utime(site / "vllm-0.33.0.dist-info", ns=(0, 0))
    assert describe_change(before, installed_packages()) == "vllm-0.33.0.dist-info"
