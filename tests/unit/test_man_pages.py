"""Manual pages and shell completion: rendered, complete, and found where `install` puts them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tests.fakes.daemon import BOUND_S
from weightcached.cli import man_pages, weightcachectl
from weightcached.cli.weightcached import main as weightcached_main
from weightcached.config.manifest import Document
from weightcached.system.units import UNITS, is_unmodified, source

PAGES = man_pages.pages()
BIN = Path(sys.executable).parent
needs_man = pytest.mark.skipif(shutil.which("man") is None, reason="man is not installed (man-db)")


def rendered(page: Path) -> str:
    """The page as a reader sees it. Fails if groff has anything to say."""
    done = subprocess.run(
        ["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", page], capture_output=True, text=True, check=False,
        timeout=BOUND_S, env=os.environ | {"LC_ALL": "C.UTF-8", "MANWIDTH": "80", "MAN_KEEP_FORMATTING": ""},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return re.sub(r".\x08|\x1b\[[0-9;]*m", "", done.stdout)


@needs_man
@pytest.mark.parametrize("name", PAGES)
def test_page_renders_without_a_warning(name: str, tmp_path: Path) -> None:
    page = tmp_path / Path(name).name
    page.write_text(PAGES[name])
    text = rendered(page)
    for heading in ("NAME", "SYNOPSIS", "DESCRIPTION", "SEE ALSO"):
        assert f"\n{heading}\n" in text
    # What groff took for a request of its own would be missing: every word of ours is there.
    assert page.stem in text


@needs_man
def test_a_page_that_is_wrong_would_be_told(tmp_path: Path) -> None:
    page = tmp_path / "wrong.1"
    page.write_text(".TH WRONG 1\n.SH NAME\nwrong \\- x\n.NONSENSE y\n")
    with pytest.raises(AssertionError, match="NONSENSE"):
        rendered(page)


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        yield f"{path}{name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")


@needs_man
@pytest.mark.parametrize(
    ("name", "group"), [("weightcachectl", weightcachectl.main), ("weightcached", weightcached_main)]
)  # fmt: skip
def test_page_has_every_command_and_option(name: str, group: click.Group, tmp_path: Path) -> None:
    page = tmp_path / f"{name}.1"
    page.write_text(PAGES[f"man1/{name}.1"])
    text = rendered(page)
    for path, command in commands(group):
        _, found, section = text.partition(f"\n   {path} [OPTIONS]")
        section = re.split(r"\n   \w|\n\w", section)[0]
        assert found, path
        for param in command.params:
            if isinstance(param, click.Option):
                assert (f"       {param.opts[0]}" in section) is not param.hidden, (
                    path,
                    param.opts,
                )


def test_every_key_of_the_manifest_has_its_words() -> None:
    said = man_pages.comments(source("manifest.yaml").read_text(encoding="utf-8"))
    keys = [*Document.__struct_fields__]
    for section, entry in man_pages._ENTRIES.items():
        keys += [f"{section}.{field}" for field in entry.__struct_fields__]
    for key in keys:
        # `models:` needs no words beside its entries'.
        assert said.get(key) or key == "models", f"{key} has no comment in the example"
        last = man_pages._text(key.rpartition(".")[2])
        tags = (rf"\fB{last}\fR", f".SH {last.upper()}")
        assert any(tag in PAGES["man5/weightcached-manifest.5"] for tag in tags), key


def test_words_that_groff_would_take_for_its_own_are_kept() -> None:
    assert man_pages._text(".TP --a-b 'c' \\n …") == (r"\&.TP \-\-a\-b \(aqc\(aq \(rsn \[u2026]")
    assert all(text.isascii() for text in PAGES.values())


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory after `weightcachectl install`."""
    for variable in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "MANPATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/.local/bin:{BIN}:{os.environ['PATH']}")
    (tmp_path / ".local/bin").mkdir(parents=True)
    # A manager of the one who runs the tests is not told.
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    done = CliRunner().invoke(weightcachectl.main, ["install"])
    assert done.exit_code == 0, done.output
    assert "man does not look" not in done.output
    return tmp_path


@needs_man
def test_man_finds_the_pages_that_the_units_name(home: Path) -> None:
    named = set()
    for unit in UNITS:
        (line,) = re.findall(r"^Documentation=(.*)$", source(unit).read_text(), re.MULTILINE)
        named |= set(re.findall(r"man:([\w-]+)\((\d)\)", line))
    assert ("weightcached-manifest", "5") in named
    for name, section in named:
        found = subprocess.run(
            ["man", "-w", section, name], capture_output=True, text=True, check=True
        )
        assert found.stdout.strip() == f"{home}/.local/share/man/man{section}/{name}.{section}"


def test_installed_pages_and_scripts_are_known_as_ours_until_edited(home: Path) -> None:
    share = home / ".local/share"
    files = [path for path in share.rglob("*") if path.is_file()]
    assert len(files) == 9
    for path in files:
        text = path.read_text()
        assert is_unmodified(text), path
        assert not is_unmodified(text + "x"), path
    (zsh,) = share.glob("zsh/*/_weightcachectl")
    assert zsh.read_text().startswith("#compdef weightcachectl\n# Written by")


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("words", "completed"), [("weightcachectl rel", "reload"), ("weightcachectl snapshot v", "verify"),
                             ("weightcachectl add --dev", "--device"), ("weightcached ser", "serve")]
)  # fmt: skip
def test_bash_completes(home: Path, words: str, completed: str) -> None:
    assert completions(home, words) == [completed]


def completions(home: Path, words: str) -> list[str]:
    """What bash would offer for the last word. Fails if the program says anything else."""
    command, *_ = words.split()
    script = home / f".local/share/bash-completion/completions/{command}"
    asked = (
        f"source {script}; COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}; "
        f'_{command}_completion {command}; echo "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(
        ["bash", "-c", asked], capture_output=True, text=True, check=True, timeout=BOUND_S
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_devices_and_models(home: Path) -> None:
    manifest = home / ".config/weightcached/manifest.yaml"
    manifest.write_text(
        "version: 1\nmodels:\n  - {name: tiny, devices: [cpu7], engine: {model: org/a}}\n"
    )
    for words, completed in (
        ("start cpu", "cpu7"),
        ("add m --device c", "cpu7"),
        ("drop t", "tiny"),
    ):
        assert completions(home, f"weightcachectl {words}") == [completed]
    manifest.write_text("no manifest")
    assert completions(home, "weightcachectl drop t") == []


def test_a_package_build_gets_the_same_pages(tmp_path: Path) -> None:
    man_pages.main(str(tmp_path))
    assert {str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*.[15]")} == PAGES
