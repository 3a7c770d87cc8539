"""Which vLLM versions were seen: an unseen one gets one warning, and what it lacks is named."""

from __future__ import annotations

import ast
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from weightcached.vllm_compat import guarded, versions
from weightcached.vllm_compat.versions import VllmName, find, imports_of, is_seen, warn_of_unseen

log = logging.getLogger("test")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_warned", False)


@pytest.mark.parametrize("version", ["0.30.0", "0.31.0", "0.32.0", "0.33.0", "0.33.7.dev3+g1234"])
def test_seen_release_gets_no_warning(version: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_unseen(log, version)
    assert is_seen(version)
    assert caplog.messages == []


@pytest.mark.parametrize("version", ["0.29.2", "0.34.0", "1.0.0", "0.330.0", "nightly"])
def test_unseen_release_gets_one_warning(version: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        warn_of_unseen(log, version)
    (message,) = caplog.messages
    assert message == (
        f"weightcached was not tried with vLLM {version}, only with 0.30, 0.31, 0.32, 0.33; if the cache is "
        "not used, 'python -m weightcached.vllm_compat.versions' lists the names that this vLLM lacks"
    )


@pytest.mark.slow
def test_installed_vllm_has_every_name_that_is_used() -> None:
    # In a process of its own: some modules of vLLM warn when they are imported, or set the process up.
    command = [sys.executable, "-m", "weightcached.vllm_compat.versions"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(
        r"vLLM \S+ \(seen\): [1-9]\d* names used, 0 missing", done.stdout.strip().splitlines()[-1]
    )


def test_imports_are_read_from_the_sources(tmp_path: Path) -> None:
    source = tmp_path / "hooks.py"
    source.write_text(
        "import torch\nfrom vllm.envs import X\ndef f():\n    from vllm.config import A, B\n"
    )
    assert sorted(imports_of(source)) == [
        VllmName("hooks", "vllm.config:A"),
        VllmName("hooks", "vllm.config:B"),
        VllmName("hooks", "vllm.envs:X"),
    ]


def test_name_that_moved_is_one_name_at_several_places(tmp_path: Path) -> None:
    source = tmp_path / "server.py"
    source.write_text(
        "try:\n    from vllm.gone import environ, other\n"
        "except ImportError:\n    from vllm.envs import environ, other\n"
    )
    names = list(dict.fromkeys(imports_of(source)))
    assert [name.where for name in names] == [
        "vllm.gone:environ or vllm.envs:environ",
        "vllm.gone:other or vllm.envs:other",
    ]


def test_what_a_release_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = VllmName("build", "vllm.envs:no_such_name")
    monkeypatch.setattr(versions, "needs", lambda: [gone, VllmName("key", "vllm.envs:environ")])
    monkeypatch.setattr(versions, "find", lambda where: find(where) if "no_such" in where else 1)
    assert versions.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("vllm.envs:no_such_name, used in build: AttributeError: ")
    assert lines[-1].endswith("2 names used, 1 missing")


def test_every_patched_method_is_looked_for() -> None:
    """A method that is gone is left alone in silence when an engine starts."""
    patched = set(guarded.WRITERS)
    for source in Path(versions.__file__).parent.glob("*.py"):
        for call in ast.walk(ast.parse(source.read_text())):
            match call:
                case ast.Call(
                    func=ast.Name("wrap_once"), args=[_, ast.Constant(str() as name), *_]
                ) if name != "__init__":
                    patched.add(name)
    assert {"wake_up", "run_busy_loop"} <= patched
    assert patched <= {name.where.rpartition(".")[2] for name in versions.REACHED}
