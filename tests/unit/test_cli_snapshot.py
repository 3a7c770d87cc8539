"""`weightcachectl snapshot`: lists, verifies and removes snapshots, without a daemon."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.fakes.models import an_index
from tests.fakes.stub_daemon import StubDaemon, cache, status
from weightcached.cli.weightcachectl import main
from weightcached.index import tensors as index_format
from weightcached.segments.host import HostBackend
from weightcached.snapshot import writer
from weightcached.wire.messages import Done, Message, Progress, Refused, Request, WriteSnapshot

Ctl = Callable[..., Result]


@pytest.fixture
def ctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ctl:
    """Run `weightcachectl snapshot` with a manifest whose snapshots are in tmp_path/snapshots."""
    config = tmp_path / "config" / "weightcached"
    config.mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (config / "manifest.yaml").write_text(
        "version: 1\n"
        f"models: [{{name: a, devices: [cpu0], engine: {{model: {tmp_path}/model}}}}]\n"
        f"snapshots: {{dir: {tmp_path}/snapshots}}\n"
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return lambda *arguments: CliRunner().invoke(main, ["snapshot", *arguments])


def snapshot_of(root: Path, cache: str) -> Path:
    backend = HostBackend()
    segment = backend.create(4096)
    index = an_index(cache=cache)
    directory = root / "cpu0" / cache.replace("/", ".")
    directory.mkdir(parents=True)
    path = directory / index_format.digest_of(index_format.encode(index))[:16]
    mapping = backend.map([segment.publish()], [4096])
    writer._write(path, index_format.encode(index), index, mapping)
    mapping.close()
    return path


def test_snapshots_are_listed_with_their_sum(ctl: Ctl, tmp_path: Path) -> None:
    snapshot_of(tmp_path / "snapshots", "a/target")
    snapshot_of(tmp_path / "snapshots", "b.1/draft")
    result = ctl("list")
    first, second, last = result.stdout.splitlines()
    assert first.startswith("cpu0 a/target: 4 KiB, written 20")
    assert second.startswith("cpu0 b.1/draft: 4 KiB, written 20")
    assert last == "2 snapshots, 8 KiB"


def test_a_model_names_all_of_its_caches(ctl: Ctl, tmp_path: Path) -> None:
    path = snapshot_of(tmp_path / "snapshots", "a/target")
    snapshot_of(tmp_path / "snapshots", "b/target")
    (row,) = json.loads(ctl("list", "a", "--json").stdout)
    assert row["cache"] == "a/target"
    assert (row["bytes"], row["path"], row["error"]) == (4096, str(path), "")


def test_verify_names_the_one_that_has_changed(ctl: Ctl, tmp_path: Path) -> None:
    snapshot_of(tmp_path / "snapshots", "a/target")
    changed = snapshot_of(tmp_path / "snapshots", "b/target") / "data"
    changed.write_bytes(b"x" * 4096)
    result = ctl("verify")
    good, bad = result.stdout.splitlines()
    assert good == "cpu0 a/target: all digests equal"
    assert bad.startswith(f"cpu0 b/target: {changed}: the 4096 bytes at 0 do not have the digest")
    assert result.exit_code == 1


def test_rm_removes_those_of_one_cache(ctl: Ctl, tmp_path: Path) -> None:
    path = snapshot_of(tmp_path / "snapshots", "a/target")
    kept = snapshot_of(tmp_path / "snapshots", "b/target")
    assert ctl("rm", "a/target").stdout == f"removed {path}\n"
    assert (path.exists(), kept.exists()) == (False, True)


def test_rm_says_where_it_found_none(ctl: Ctl, tmp_path: Path) -> None:
    result = ctl("rm", "c")
    assert result.exit_code == 1
    assert f"{tmp_path}/snapshots has no snapshot of c" in result.stderr


def test_without_the_key_the_default_directory_is_looked_at(
    ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = tmp_path / "config" / "weightcached" / "manifest.yaml"
    manifest.write_text(manifest.read_text().partition("snapshots:")[0])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    snapshot_of(tmp_path / "cache" / "weightcached" / "snapshots", "a/target")
    assert ctl("list").stdout.splitlines()[-1] == "1 snapshots, 4 KiB"


def a_daemon(tmp_path: Path, answer: Callable[[str], list[Message]]) -> StubDaemon:
    """A daemon of cpu0 that serves a/target and lacks b/target; `answer`: what it says to write one."""

    def script(request: Request) -> list[Message]:
        if isinstance(request, WriteSnapshot):
            return answer(request.cache)
        manifest = str(tmp_path / "config" / "weightcached" / "manifest.yaml")
        missing = cache("b/target", generation=0, state="failed")
        return [status("cpu0", cache("a/target"), missing, manifest=manifest)]

    return StubDaemon(tmp_path / "run" / "cpu0.sock", script)


def test_a_word_that_is_no_command_is_a_cache_to_write(ctl: Ctl, tmp_path: Path) -> None:
    progress = Progress(cache="a/target", phase="writing the snapshot")
    with a_daemon(tmp_path, lambda name: [progress, progress, Done()]) as daemon:
        result = ctl("a", "--socket-dir", str(tmp_path / "run"))
    assert result.stdout == "cpu0 a/target: the snapshot is there\n"
    assert result.stderr == "cpu0 a/target: writing the snapshot\n"
    assert result.exit_code == 0
    assert daemon.requests[-1] == WriteSnapshot(cache="a/target")


def test_all_that_is_served_is_written(ctl: Ctl, tmp_path: Path) -> None:
    with a_daemon(tmp_path, lambda name: [Done()]):
        result = ctl("--all", "--socket-dir", str(tmp_path / "run"))
    assert result.stdout == "cpu0 a/target: the snapshot is there\n"


def test_a_refusal_is_said_and_fails(ctl: Ctl, tmp_path: Path) -> None:
    refused = Refused(code="snapshot", message="no room for a snapshot of 7 bytes")
    with a_daemon(tmp_path, lambda name: [refused]):
        result = ctl("write", "a", "--socket-dir", str(tmp_path / "run"))
    assert result.stderr == "weightcachectl: cpu0 a/target: no room for a snapshot of 7 bytes\n"
    assert result.exit_code == 1


@pytest.mark.parametrize("arguments", [["write"], ["a", "--all"], ["--all", "a"]])
def test_caches_are_named_or_all_are_meant(ctl: Ctl, arguments: list[str]) -> None:
    result = ctl(*arguments)
    assert result.exit_code == 2
    assert "name caches, or say --all" in result.stderr
