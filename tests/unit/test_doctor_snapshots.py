"""doctor and the directory of snapshots: whose it is, whether it can be written, room, speed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.page_cache import cached_share, drop_from_page_cache
from tests.fakes.checkpoints import write_checkpoint
from tests.unit.test_cli_snapshot import snapshot_of
from weightcached.cli import doctor
from weightcached.cli.doctor import Finding
from weightcached.config.manifest import Manifest, load_manifest
from weightcached.snapshot import speed
from weightcached.snapshot.speed import Reading, read_direct


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory on a disk, not in memory: reads past the page cache are meant."""
    with tempfile.TemporaryDirectory(prefix="wc-", dir="/var/tmp") as directory:
        yield Path(directory)


def manifest_of(base: Path, keys: str = "") -> Manifest:
    """One model of 3 MiB, with snapshots in base/snapshots."""
    write_checkpoint(base / "model")
    path = base / "manifest.yaml"
    path.write_text(
        "version: 1\n"
        f"models: [{{name: a, devices: [cpu0], engine: {{model: {base}/model}}}}]\n"
        f"snapshots: {{dir: {base}/snapshots{keys}}}\n"
    )
    return load_manifest(path)


def found(base: Path, keys: str = "") -> list[Finding]:
    return list(doctor._snapshots(manifest_of(base, keys)))


def test_without_the_key_there_is_nothing_to_look_at(base: Path) -> None:
    path = manifest_of(base).path
    path.write_text(path.read_text().partition("snapshots:")[0])
    assert list(doctor._snapshots(load_manifest(path))) == []
    assert list(doctor._snapshots(None)) == []


def test_a_directory_that_is_not_there_yet_is_made_by_the_first(base: Path) -> None:
    assert found(base) == [
        Finding(
            "snapshots", "ok", f"{base}: 0 KiB held, the models need about 3.0 MiB for 1 of each"
        ),
        Finding("snapshots", "ok", "none is there yet, so the disk's speed is not known"),
    ]
    assert not (base / "snapshots").exists()


def test_room_and_speed_are_told(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot_of(base / "snapshots", "a/target")
    monkeypatch.setattr(doctor, "read_direct", lambda path, limit_s: Reading(4096, 2e-6))
    room, disk = found(base)
    assert room.text == (
        f"{base}/snapshots: 4 KiB held, the models need about 3.0 MiB for 1 of each"
    )
    assert disk.level == "ok"
    assert disk.text.startswith("the disk gives 2.05 GB/s: 4 KiB, the largest, take ")
    monkeypatch.setattr(doctor, "read_direct", lambda path, limit_s: Reading(4096, 1.0))
    assert found(base)[1].level == "warn"


@pytest.mark.parametrize("fault", ["file", "others", "another's", "not writable"])
def test_a_directory_that_cannot_be_used_is_a_warning_with_the_reason(
    base: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    directory = base / "snapshots"
    if fault == "file":
        directory.write_text("")
    else:
        directory.mkdir(mode=0o700)
    if fault == "others":
        directory.chmod(0o777)
    if fault == "another's":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if fault == "not writable":
        # Root may write everywhere.
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    (finding,) = found(base)
    reason = {
        "file": f"{directory} is not a directory",
        "others": f"{directory} has mode 0777: others may write to it; chmod go-w {directory}",
        "another's": f"{directory} belongs to uid {os.getuid()}, expected 12345",
        "not writable": f"{directory} is not writable",
    }[fault]
    assert finding.level == "warn"
    assert finding.text == f"{reason}: no snapshot is written there, and models are loaded"
    assert finding.fix.startswith(f"ls -ld {directory}; ")


def test_too_little_room_is_a_warning(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (over,) = [f for f in found(base, ", max_bytes: 1 MiB") if f.level == "warn"]
    assert over.text == (
        "the models need about 3.0 MiB for 1 of each, max_bytes is 1.0 MiB: the least recently used go"
    )
    full = SimpleNamespace(f_flag=0, f_bavail=1, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    (short,) = [f for f in found(base, ", keep: 2") if f.level == "warn"]
    assert short.text == (
        f"{base}: the models need about 6.0 MiB for 2 of each, there is room for 4 KiB: "
        "the least recently used go"
    )


# ---- reads past the page cache


def test_a_file_is_read_past_the_page_cache(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_BLOCK_NBYTES", 1 << 20)
    path = base / "data"
    path.write_bytes(os.urandom((5 << 20) + 512))
    drop_from_page_cache(path)
    assert cached_share(path) < 0.1
    read = read_direct(path)
    if read is None:
        pytest.skip("the file system of this directory has no direct reads")
    assert read.nbytes == path.stat().st_size
    assert cached_share(path) < 0.1
    path.read_bytes()
    assert cached_share(path) == 1.0


def test_a_look_at_the_speed_ends(base: Path) -> None:
    path = base / "data"
    path.write_bytes(bytes(4096))
    read = read_direct(path, limit_s=-1.0)
    assert read is None or read.nbytes == 0
