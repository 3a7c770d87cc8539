"""The wheel, installed where there is no torch: a host whose engines live in other environments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.package import ROOT, build_wheel, environment_without_torch


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("package")
    return environment_without_torch(base / "venv", build_wheel(base))


def run(
    commands: Path, home: Path, *command: str, status: int = 0
) -> subprocess.CompletedProcess[str]:
    (home / "run").mkdir(mode=0o700, exist_ok=True)
    env = {
        "HOME": str(home),
        "PATH": f"{commands}:{os.environ['PATH']}",
        "XDG_RUNTIME_DIR": str(home / "run"),
    }
    done = subprocess.run(
        command, env=env, cwd=home, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_make_lint_builds_the_package_and_checks_it() -> None:
    dry = subprocess.run(
        ["make", "-n", "lint", f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True,
        text=True, check=True, timeout=240,
    )  # fmt: skip
    assert "-m build --quiet --no-isolation" in dry.stdout
    assert "-m twine check --strict" in dry.stdout


@pytest.mark.slow
def test_control_program_works_without_torch(commands: Path, tmp_path: Path) -> None:
    absent = "import importlib.util as u; print([x for x in ('torch', 'vllm', 'numpy') if u.find_spec(x)])"
    assert run(commands, tmp_path, "python", "-c", absent).stdout == "[]\n"

    run(commands, tmp_path, "weightcachectl", "install")
    unit = (tmp_path / ".config/systemd/user/weightcached@.service").read_text()
    assert f"ExecStart={commands}/weightcached serve %i\n" in unit
    assert (tmp_path / ".local/share/man/man1/weightcachectl.1").exists()

    examined = run(commands, tmp_path, "weightcachectl", "doctor", "--json", status=1).stdout
    findings = json.loads(examined)["findings"]
    levels = {finding["check"]: finding["level"] for finding in findings}
    assert levels["version"] == levels["kernel"] == levels["manifest"] == "ok"
    (plug_in,) = [f for f in findings if f["check"] == "plug-in"]
    assert plug_in["level"] != "ok", "there is no vLLM that could load it"
    assert "vLLM" in plug_in["text"] + plug_in["fix"]
    run(commands, tmp_path, "weightcachectl", "status", status=3)
    run(commands, tmp_path, "weightcached", "serve", "--help")

    # The engine's interpreter parses the engine's arguments.
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    refused = run(
        commands, tmp_path, "weightcachectl", "add", "model", "--dtype", "auto", status=78
    )
    assert "No module named 'vllm'" in refused.stderr
    assert "--python" in refused.stderr
    run(commands, tmp_path, "weightcachectl", "add", "model", "--device", "cpu0")
    assert "cpu0" in run(commands, tmp_path, "weightcachectl", "plan").stdout
    assert sys.prefix not in run(commands, tmp_path, "weightcachectl", "doctor", status=1).stdout
