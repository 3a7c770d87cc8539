"""install and uninstall: files written, the operator's files kept, and output."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from weightcached.cli.weightcachectl import main
from weightcached.errors import InstallError
from weightcached.system.units import Outcome, install, is_unmodified, source, uninstall

UNIT = "systemd/user/weightcached@.service"
EXPORTER = "systemd/user/weightcached-exporter.service"
ENGINE = "systemd/user/weightcached-engine@.service"
TARGET = "systemd/user/weightcached.target"
MANIFEST = "weightcached/manifest.yaml"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "config"


def make_bin(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("weightcached", "weightcachectl"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    return make_bin(tmp_path / "bin")


def actions(outcomes: list[Outcome], config: Path) -> dict[str, str]:
    return {str(outcome.path.relative_to(config)): outcome.action for outcome in outcomes}


def exec_lines(config: Path) -> list[str]:
    return [line for line in (config / UNIT).read_text().splitlines() if line.startswith("Exec")]


def test_install_writes_units_with_this_environments_commands(config: Path, commands: Path) -> None:
    assert actions(install(bin_dir=commands), config) == {
        UNIT: "wrote",
        EXPORTER: "wrote",
        ENGINE: "wrote",
        TARGET: "wrote",
        MANIFEST: "wrote",
    }
    assert exec_lines(config) == [
        f"ExecStart={commands}/weightcached serve %i",
        f"ExecReload={commands}/weightcachectl reload %i",
    ]
    assert (config / MANIFEST).read_text().endswith(source("manifest.yaml").read_text())
    assert not list(config.rglob(".*")), "a partial file is left"


def test_second_install_changes_nothing(config: Path, commands: Path) -> None:
    install(bin_dir=commands)
    before = {path: path.stat().st_mtime_ns for path in config.rglob("*") if path.is_file()}
    assert set(actions(install(bin_dir=commands), config).values()) == {"unchanged"}
    assert before == {path: path.stat().st_mtime_ns for path in config.rglob("*") if path.is_file()}


def test_install_from_another_environment_updates_the_services_only(
    config: Path, commands: Path, tmp_path: Path
) -> None:
    install(bin_dir=commands)
    other = make_bin(tmp_path / "other")
    assert actions(install(bin_dir=other), config) == {
        UNIT: "updated",
        EXPORTER: "updated",
        ENGINE: "updated",
        TARGET: "unchanged",
        MANIFEST: "unchanged",
    }
    assert exec_lines(config)[0] == f"ExecStart={other}/weightcached serve %i"


def test_edited_files_are_kept_by_install_and_uninstall(
    config: Path, commands: Path, tmp_path: Path
) -> None:
    install(bin_dir=commands)
    for name in (UNIT, MANIFEST):
        with (config / name).open("a") as file:
            file.write("# mine\n")
    kept = {name: (config / name).read_bytes() for name in (UNIT, MANIFEST)}
    other = make_bin(tmp_path / "other")
    assert actions(install(bin_dir=other), config) == {
        UNIT: "kept",
        EXPORTER: "updated",
        ENGINE: "updated",
        TARGET: "unchanged",
        MANIFEST: "kept",
    }
    assert actions(uninstall(), config) == {
        UNIT: "kept",
        EXPORTER: "removed",
        ENGINE: "removed",
        TARGET: "removed",
        MANIFEST: "kept",
    }
    assert {name: (config / name).read_bytes() for name in (UNIT, MANIFEST)} == kept


def test_manifest_that_was_there_before_is_kept(config: Path, commands: Path) -> None:
    (config / MANIFEST).parent.mkdir(parents=True)
    (config / MANIFEST).write_text("version: 1\n")
    assert actions(install(bin_dir=commands), config)[MANIFEST] == "kept"
    assert (config / MANIFEST).read_text() == "version: 1\n"


def test_older_versions_example_is_never_overwritten_but_removed(
    config: Path, commands: Path
) -> None:
    text = "version: 1  # an older example\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    old = f"# Written by 'weightcachectl install', unchanged while sha256 is {digest}\n"
    (config / MANIFEST).parent.mkdir(parents=True)
    (config / MANIFEST).write_text(old + text)
    assert actions(install(bin_dir=commands), config)[MANIFEST] == "kept"
    assert actions(uninstall(), config)[MANIFEST] == "removed"


def test_uninstall_removes_what_install_wrote(config: Path, commands: Path) -> None:
    install(bin_dir=commands)
    assert actions(uninstall(), config) == {
        UNIT: "removed",
        EXPORTER: "removed",
        ENGINE: "removed",
        TARGET: "removed",
        MANIFEST: "removed",
    }
    assert actions(uninstall(), config) == {
        UNIT: "absent",
        EXPORTER: "absent",
        ENGINE: "absent",
        TARGET: "absent",
        MANIFEST: "absent",
    }


def test_uninstall_removes_what_enabled_the_units(config: Path, commands: Path) -> None:
    install(bin_dir=commands)
    wants = config / "systemd/user/weightcached.target.wants"
    wants.mkdir()
    (wants / "weightcached@cpu0.service").symlink_to(config / UNIT)
    (wants / "weightcached-other.service").symlink_to("/usr/lib/systemd/user/other.service")
    (wants / "weightcached-file.service").touch()
    assert actions(uninstall(), config) == {
        UNIT: "removed",
        EXPORTER: "removed",
        ENGINE: "removed",
        TARGET: "removed",
        MANIFEST: "removed",
        "systemd/user/weightcached.target.wants/weightcached@cpu0.service": "removed",
    }
    assert sorted(path.name for path in wants.iterdir()) == [
        "weightcached-file.service",
        "weightcached-other.service",
    ]


def test_units_that_are_kept_stay_enabled(config: Path, commands: Path) -> None:
    install(bin_dir=commands)
    link = config / "systemd/user/weightcached.target.wants/weightcached@cpu0.service"
    link.parent.mkdir()
    link.symlink_to(config / UNIT)
    (config / UNIT).write_text("mine")
    uninstall()
    assert link.is_symlink()


def test_modification_is_seen_wherever_it_is(config: Path, commands: Path) -> None:
    install(bin_dir=commands)
    text = (config / UNIT).read_text()
    assert is_unmodified(text)
    assert not is_unmodified(text + " ")
    assert not is_unmodified(text.replace("Restart=", "#Restart="))
    assert not is_unmodified(text.partition("\n")[2])
    assert not is_unmodified("\n" + text)


@pytest.mark.parametrize(
    ("folder", "written"),
    [
        ("100%", "DIR/100%%/weightcached"),
        ("with space", '"DIR/with space/weightcached"'),
    ],
)
def test_odd_paths_are_quoted_for_systemd(
    config: Path, tmp_path: Path, folder: str, written: str
) -> None:
    install(bin_dir=make_bin(tmp_path / folder))
    assert exec_lines(config)[0] == f"ExecStart={written.replace('DIR', str(tmp_path))} serve %i"


@pytest.mark.parametrize("name", ["a$b", 'a"b', "a'b", "a\\b", "a\nb"])
def test_path_that_a_unit_cannot_hold_is_refused_before_anything_is_written(
    config: Path, tmp_path: Path, name: str
) -> None:
    folder = make_bin(tmp_path / name)
    with pytest.raises(InstallError) as caught:
        install(bin_dir=folder)
    assert str(caught.value) == (
        f"{str(folder / 'weightcached')!r} cannot stand in a unit file: "
        "install under a path without $, quotes, backslashes"
    )
    assert not config.exists()


def test_environment_without_the_commands_is_refused(config: Path, tmp_path: Path) -> None:
    with pytest.raises(InstallError) as caught:
        install(bin_dir=tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/weightcached is not an executable file: install the package weightcached there"
    )
    assert not config.exists()


def test_directory_in_the_way_is_named(config: Path, commands: Path) -> None:
    (config / UNIT).mkdir(parents=True)
    with pytest.raises(InstallError) as caught:
        install(bin_dir=commands)
    assert str(caught.value) == f"{config / UNIT}: Is a directory: move it away"


@pytest.fixture
def no_manager(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A systemctl that logs its arguments and answers with the status in `status`; a bash that finds
    no page of the user.
    """
    monkeypatch.setenv("SHELL", "/bin/bash")
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "systemctl").write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/log\nexit $(cat {folder}/status)\n'
    )
    (folder / "manpath").write_text("#!/bin/sh\necho /usr/share/man\n")
    for name in ("systemctl", "manpath"):
        (folder / name).chmod(0o755)
    (folder / "status").write_text("1")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def said(result: Result, config: Path) -> str:
    text = result.stdout.replace(str(config), "CONFIG")
    return text.replace(str(config.parent / "data"), "DATA")


def test_commands_say_what_was_done_and_what_comes_next(
    config: Path, commands: Path, no_manager: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(commands))
    written = CliRunner().invoke(main, ["install"])
    assert (written.exit_code, written.stderr) == (0, "")
    assert said(written, config) == (
        "wrote CONFIG/systemd/user/weightcached@.service\n"
        "wrote CONFIG/systemd/user/weightcached-exporter.service\n"
        "wrote CONFIG/systemd/user/weightcached-engine@.service\n"
        "wrote CONFIG/systemd/user/weightcached.target\n"
        "wrote CONFIG/weightcached/manifest.yaml\n"
        "wrote manual pages and shell completion, 9 files in DATA\n"
        "no systemd user manager answers: once it runs, run 'systemctl --user daemon-reload'\n"
        "man does not look in DATA/man: export MANPATH=DATA/man:\n"
        "next:\n"
        "  weightcachectl doctor\n"
        "  weightcachectl add MODEL --start\n"
        "and for units that run from boot on, without a login:\n"
        f"  loginctl enable-linger {os.getuid()}\n"
        "  systemctl --user enable weightcached@DEVICE.service\n"
    )
    (config / MANIFEST).write_text("mine")
    with (config.parent / "data/man/man1/weightcachectl.1").open("a") as page:
        page.write("mine")
    (no_manager / "status").write_text("0")
    removed = CliRunner().invoke(main, ["uninstall"])
    assert (removed.exit_code, removed.stderr) == (0, "")
    assert said(removed, config) == (
        "removed CONFIG/systemd/user/weightcached@.service\n"
        "removed CONFIG/systemd/user/weightcached-exporter.service\n"
        "removed CONFIG/systemd/user/weightcached-engine@.service\n"
        "removed CONFIG/systemd/user/weightcached.target\n"
        "kept CONFIG/weightcached/manifest.yaml, which was edited\n"
        "kept DATA/man/man1/weightcachectl.1, which was edited\n"
        "removed manual pages and shell completion, 8 files in DATA\n"
    )
    assert (no_manager / "log").read_text().splitlines() == [
        "--user daemon-reload",
        "--user list-units --state=active,activating,reloading,deactivating --plain --no-legend weightcached*.service",
        "--user daemon-reload",
    ]


def test_install_says_nothing_of_the_manager_where_it_answers(
    config: Path, commands: Path, no_manager: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(commands))
    (no_manager / "status").write_text("0")
    assert "manager" not in CliRunner().invoke(main, ["install"]).stdout


def test_user_of_zsh_is_told_how_it_finds_the_completion(
    config: Path, commands: Path, no_manager: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(commands))
    hint = "zsh completes it after 'fpath+=(DATA/zsh/site-functions)' before compinit in ~/.zshrc\n"
    assert hint not in said(CliRunner().invoke(main, ["install"]), config)
    monkeypatch.setenv("SHELL", "/usr/bin/zsh")
    assert hint in said(CliRunner().invoke(main, ["install"]), config)


def test_failed_install_exits_1(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    result = CliRunner().invoke(main, ["install"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"weightcachectl: {tmp_path}/weightcached is not an executable file: install the package weightcached there\n"
    )
