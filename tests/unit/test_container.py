"""What a process in a container knows of it: marks, namespaces, maps of uids."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightcached.system import container

FIRST = "pid:[4026531836]"


@pytest.fixture(autouse=True)
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host: no mark of a container, the first pid namespace, the first user namespace."""
    for name in ("_BOOTED", "_PODMAN", "_UID_MAP", "_OVERFLOW_UID", "_NAMESPACES"):
        monkeypatch.setattr(container, name, tmp_path / name)
    (tmp_path / "_NAMESPACES").mkdir()
    (tmp_path / "_NAMESPACES/pid").symlink_to(FIRST)
    (tmp_path / "_UID_MAP").write_text("         0          0 4294967295\n")
    (tmp_path / "_OVERFLOW_UID").write_text("65534\n")
    monkeypatch.delenv("container", raising=False)
    return tmp_path


def enter_pids(marks: Path) -> None:
    (marks / "_NAMESPACES/pid").unlink()
    (marks / "_NAMESPACES/pid").symlink_to("pid:[4026532451]")


def test_host_is_no_container() -> None:
    assert not container.in_container()
    assert not container.own_pids()


def test_each_mark_makes_a_container(marks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (marks / "_PODMAN").touch()
    assert container.in_container()
    (marks / "_PODMAN").unlink()
    monkeypatch.setenv("container", "oci")
    assert container.in_container()
    monkeypatch.delenv("container")
    enter_pids(marks)
    assert container.in_container()
    assert container.own_pids()


def test_system_that_systemd_booted_is_none(marks: Path) -> None:
    enter_pids(marks)
    (marks / "_BOOTED").mkdir()
    assert not container.in_container()


def test_uids_of_rootless_podman(marks: Path) -> None:
    """Its default: root inside is the user outside, and others come from /etc/subuid."""
    (marks / "_UID_MAP").write_text("0 1000 1\n1 100000 65536\n")
    assert container.outside_uid(0) == 1000
    assert container.outside_uid(1000) == 100999
    assert container.outside_uid(70000) is None
    assert not container.is_unmapped(65534), "the container has a user with this number"


def test_uid_of_nobody_stands_for_users_that_the_namespace_lacks(marks: Path) -> None:
    assert not container.is_unmapped(65534), "a host has that user"
    (marks / "_UID_MAP").write_text("0 1000 1\n")
    assert container.is_unmapped(65534)
    assert not container.is_unmapped(0)
    (marks / "_UID_MAP").unlink()
    assert not container.is_unmapped(65534), "nobody tells"
