"""The limits of control groups, from files as the kernel writes them in version 1 and 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightcached.system.cgroups import Room, memory_room

MIB = 1 << 20


def group(directory: Path, **files: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / f"memory.{name}").write_text(f"{text}\n")
    return directory


def own(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own"
    path.write_text(text)
    return path


def test_tightest_of_the_groups_above_counts(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    stat = f"anon 1\ninactive_file {8 * MIB}\nactive_file {4 * MIB}\nslab_reclaimable {2 * MIB}"
    # The root of version 2 has no limit file.
    group(mount, stat="anon 1")
    user = group(mount / "user.slice", max=str(100 * MIB), current=str(94 * MIB), stat=stat)
    group(user / "unit.service", max=str(90 * MIB), current=str(20 * MIB), stat="anon 1")
    group(user / "unit.service/child", max="max", current="1", stat="anon 1")
    room = memory_room(own=own(tmp_path, "0::/user.slice/unit.service/child\n"), mount=mount)
    # 100 - 94 + what can be reclaimed, 14.
    assert room == Room(20 * MIB, 100 * MIB, user / "memory.max")


def test_version_1_counts_with_what_is_below(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    unit = group(
        mount / "memory/unit",
        limit_in_bytes=str(64 * MIB),
        usage_in_bytes=str(60 * MIB),
        stat=f"inactive_file 7\ntotal_inactive_file {10 * MIB}\ntotal_active_file 0",
    )
    group(
        mount / "memory", limit_in_bytes=str((1 << 63) - 4096), usage_in_bytes="1", stat="cache 1"
    )
    lines = "9:name=systemd:/unit\n4:cpu,memory:/unit\n0::/\n"
    assert memory_room(own=own(tmp_path, lines), mount=mount) == Room(
        14 * MIB, 64 * MIB, unit / "memory.limit_in_bytes"
    )


def test_container_that_sees_the_hosts_path_has_the_limit_of_its_root(tmp_path: Path) -> None:
    mount = group(
        tmp_path / "cgroup", max=str(10 * MIB), current=str(9 * MIB), stat="inactive_file 0"
    )
    room = memory_room(own=own(tmp_path, "0::/kubepods/pod1/abc\n"), mount=mount)
    assert room == Room(MIB, 10 * MIB, mount / "memory.max")


@pytest.mark.parametrize("text", ["", "0::/\n", "4:memory:/gone\n", "0::/../..\n"])
def test_no_limit_is_none(tmp_path: Path, text: str) -> None:
    assert memory_room(own=own(tmp_path, text), mount=tmp_path / "cgroup") is None
    assert memory_room(own=tmp_path / "none", mount=tmp_path / "cgroup") is None
