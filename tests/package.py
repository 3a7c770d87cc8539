"""The package as it is published, and environments that have it; made from what is installed, without
a network.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_BUILT_FROM = (
    "weightcached", "weightcache_loader", "systemd", "etc", "README.md", "LICENSE", "pyproject.toml",
)  # fmt: skip


def copy_tree(to: Path) -> Path:
    """What the package is built from: setuptools leaves files behind."""
    to.mkdir()
    for name in _BUILT_FROM:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, to)
    return to


def build_wheel(directory: Path) -> Path:
    """The wheel."""
    tree = str(copy_tree(directory / "tree"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir"]
    subprocess.run([*command, str(directory), tree], check=True, capture_output=True, timeout=240)
    (wheel,) = directory.glob("*.whl")
    return wheel


def environment_without_torch(directory: Path, wheel: Path) -> Path:
    """A virtual environment of the wheel and what it requires, and of nothing else; its commands."""
    packages = _make(directory)
    for name in required(wheel):
        for file in importlib.metadata.files(name) or []:
            if ".." not in file.parts and file.suffix != ".pyc":
                target = packages / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), target)
    return _install(directory, wheel)


def environment_with_vllm(directory: Path) -> Path:
    """A virtual environment over all that this one has, its pip too; its commands."""
    packages = _make(directory)
    # A list of paths, whose own .pth files do not count: not the tree of an editable installation.
    inherited = {path for path in sys.path if path.endswith("-packages")}
    (packages / "inherited.pth").write_text("\n".join(sorted(inherited)) + "\n")
    pip = directory / "bin/pip"
    pip.write_text(f'#!/bin/sh\nexec {directory}/bin/python -m pip "$@"\n')
    pip.chmod(0o755)
    return directory / "bin"


def required(wheel: Path) -> set[str]:
    """What the package needs, and what that needs, without extras."""
    found: set[str] = set()
    (info,) = (
        entry for entry in zipfile.Path(wheel).iterdir() if entry.name.endswith(".dist-info")
    )
    # Not that of the installed one: a tree has metadata of its own, which may be old.
    asked: list[importlib.metadata.Distribution] = [importlib.metadata.PathDistribution(info)]
    while asked:
        for requirement in asked.pop().requires or []:
            name = re.match(r"[\w.-]+", requirement)
            assert name is not None
            # Extras, and what another system or Python needs.
            if ";" not in requirement and name[0] not in found:
                found.add(name[0])
                asked.append(importlib.metadata.distribution(name[0]))
    return found


def _make(directory: Path) -> Path:
    venv.create(directory, symlinks=True, with_pip=False)
    (packages,) = directory.glob("lib/python3*/site-packages")
    return packages


def _install(directory: Path, wheel: Path) -> Path:
    uv = str(Path(sys.executable).with_name("uv"))
    command = [uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--no-cache"]
    into = ["--python", str(directory / "bin/python"), str(wheel)]
    subprocess.run([*command, *into], check=True, timeout=240)
    return directory / "bin"
