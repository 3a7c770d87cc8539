"""Paths: which names are devices, and that nothing of another user's is trusted."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from weightcached.errors import (
    DeviceError,
    ManifestError,
    RuntimePathError,
    WeightcachedError,
    WeightCacheUnavailableError,
)
from weightcached.system import paths

UUID = "0e3f0000-0000-4000-8000-00000000000a"


def fails(kind: type[WeightcachedError], call: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@pytest.fixture
def private(tmp_path: Path) -> Path:
    directory = tmp_path / "weightcached"
    directory.mkdir(mode=0o700)
    return directory


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(path))


@pytest.mark.parametrize(
    "device", [f"GPU-{UUID}", f"MIG-{UUID}", "cpu0", "cpu7", "cpu10", "cpu999"]
)
def test_device_names_are_accepted(device: str) -> None:
    assert paths.check_device(device) == device
    assert paths.is_host_device(device) == device.startswith("cpu")


@pytest.mark.parametrize(
    "device",
    ["", "0", "cpu", "cpu00", "cpu01", "cpu1000", "cpu-1", "CPU0", "cpu0\n", "cpu٣", "../cpu0", "cpu0/..", "GPU-",
     f"GPU-{UUID.upper()}", f"gpu-{UUID}", f"GPU-{UUID}0", f"GPU-{UUID}\n", f"MIG-GPU-{UUID}/1/0", "all"],
)  # fmt: skip
def test_other_names_are_refused(device: str) -> None:
    text = (
        f"{device!r} is not a device name: expected GPU-<uuid> or MIG-<uuid> as nvidia-smi -L prints it, "
        "or cpu0 … cpu999 for host memory; 'weightcachectl devices' lists the devices of this machine"
    )
    for check in (paths.check_device, paths.socket_path, paths.lock_path):
        assert fails(DeviceError, lambda check=check: check(device)) == text  # type: ignore[misc]


def test_runtime_directory_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert paths.runtime_dir() == tmp_path / "weightcached"
    assert paths.socket_path("cpu0") == tmp_path / "weightcached/cpu0.sock"
    assert paths.lock_path("cpu0") == tmp_path / "weightcached/cpu0.lock"
    assert paths.lock_path("cpu0", Path("/elsewhere")) == Path("/elsewhere/cpu0.lock")


def test_systemctl_is_sent_where_our_own_sockets_are_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/elsewhere")
    assert paths.session_environment() == dict(os.environ)
    for value in ("", None):
        if value is None:
            monkeypatch.delenv("XDG_RUNTIME_DIR")
        else:
            monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        expected = {**os.environ, "XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}"}
        assert paths.session_environment() == expected


def test_relative_runtime_directory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "run")
    text = "XDG_RUNTIME_DIR is 'run': it must be an absolute path, as systemd sets it"
    assert fails(RuntimePathError, paths.runtime_dir) == text


def test_missing_runtime_directory_names_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nonexistent")
    monkeypatch.setattr(paths, "in_container", lambda: True)
    assert fails(RuntimePathError, paths.runtime_dir) == (
        "the runtime directory /nonexistent does not exist: this is a container: mount the directory of the daemon's "
        "sockets, and set XDG_RUNTIME_DIR to the one above it, or name it: --socket-dir, or socket_dir of the engine's "
        "loader options (docs/containers.md)"
    )
    monkeypatch.setattr(paths, "in_container", lambda: False)
    assert fails(RuntimePathError, paths.runtime_dir) == (
        "the runtime directory /nonexistent does not exist: log in through a session that systemd-logind opens, "
        f"or run 'loginctl enable-linger {os.getuid()}', or set XDG_RUNTIME_DIR, "
        "or name the directory of the sockets: --socket-dir"
    )


def test_longest_socket_path_is_what_the_kernel_takes(tmp_path: Path) -> None:
    def directory(path_nbytes: int) -> Path:
        return Path("/", "d" * (path_nbytes - len("//cpu0.sock")))

    assert len(str(paths.socket_path("cpu0", directory(107)))) == 107
    too_long = directory(108)
    assert fails(RuntimePathError, lambda: paths.socket_path("cpu0", too_long)) == (
        f"socket path {too_long}/cpu0.sock has 108 bytes, the kernel allows 107: "
        "set XDG_RUNTIME_DIR (or socket_dir) to a shorter directory"
    )
    base = tmp_path
    while len(str(base)) < 95:
        base /= "d" * min(30, 96 - len(str(base)) - 1)
    base.mkdir(parents=True)
    path = base / ("s" * (107 - len(str(base)) - 1))
    make_socket(path)
    with pytest.raises(OSError, match="AF_UNIX path too long"):
        make_socket(Path(f"{path}x"))


def test_directory_is_made_private_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        paths.create_runtime_dir(tmp_path / "new")
    finally:
        os.umask(old)
    assert (tmp_path / "new").stat().st_mode & 0o7777 == 0o700
    paths.create_runtime_dir(tmp_path / "new")


def test_directory_without_a_parent_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "a/b"
    text = f"cannot create the runtime directory {directory}: No such file or directory"
    assert fails(RuntimePathError, lambda: paths.create_runtime_dir(directory)) == text


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o720, 0o777])
def test_directory_open_to_others_is_refused(private: Path, mode: int) -> None:
    private.chmod(mode)
    text = f"runtime directory {private} has mode {mode:04o}, expected 0700: chmod 700 {private}"
    assert fails(RuntimePathError, lambda: paths.check_private_dir(private)) == text
    assert fails(RuntimePathError, lambda: paths.create_runtime_dir(private)) == text


def test_link_to_a_private_directory_is_refused(private: Path) -> None:
    link = private.with_name("link")
    link.symlink_to(private)
    text = f"runtime directory {link} is a symbolic link: a real directory is required"
    assert fails(RuntimePathError, lambda: paths.create_runtime_dir(link)) == text


def test_file_and_nothing_in_place_of_the_directory_are_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch(mode=0o600)
    text = f"runtime directory {file} is not a directory: move it away"
    assert fails(RuntimePathError, lambda: paths.check_private_dir(file)) == text
    text = f"cannot create the runtime directory {file}: File exists"
    assert fails(RuntimePathError, lambda: paths.create_runtime_dir(file)) == text
    text = f"runtime directory {tmp_path}/none: No such file or directory"
    assert fails(RuntimePathError, lambda: paths.check_private_dir(tmp_path / "none")) == text


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_directory_and_socket_of_another_user_are_refused(private: Path) -> None:
    path = private / "cpu0.sock"
    make_socket(path)
    os.chown(path, 65534, -1)
    text = f"socket {path} belongs to uid 65534, expected 0: remove it"
    assert fails(RuntimePathError, lambda: paths.check_socket(path)) == text
    os.chown(private, 65534, -1)
    text = f"runtime directory {private} belongs to uid 65534, expected 0: run as that user, or remove it"
    assert fails(RuntimePathError, lambda: paths.check_private_dir(private)) == text
    assert fails(RuntimePathError, lambda: paths.check_socket(path)) == text


def test_socket_is_accepted(private: Path) -> None:
    make_socket(private / "cpu0.sock")
    paths.check_socket(private / "cpu0.sock")


@pytest.mark.parametrize("where", ["weightcached/cpu0.sock", "none/cpu0.sock"])
def test_absent_socket_or_directory_means_no_daemon(
    private: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "in_container", lambda: False)
    path = private.parent / where
    text = f"no weightcached daemon listens on {path}: systemctl --user start weightcached@cpu0.service"
    assert fails(WeightCacheUnavailableError, lambda: paths.check_socket(path)) == text


def test_absent_directory_in_a_container_has_to_be_mounted(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "in_container", lambda: True)
    path = private.parent / "none/cpu0.sock"
    text = (
        f"no weightcached daemon listens on {path}: in this container, mount the directory of the daemon's socket at "
        f"{path.parent} (docs/containers.md)"
    )
    assert fails(WeightCacheUnavailableError, lambda: paths.check_socket(path)) == text


def test_socket_that_a_starting_daemon_removes_meanwhile_means_no_daemon(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = private / "cpu0.sock"
    make_socket(path)
    monkeypatch.setattr(paths, "check_private_dir", lambda directory: path.unlink())
    text = f"no weightcached daemon listens on {path}: systemctl --user start weightcached@cpu0.service"
    assert fails(WeightCacheUnavailableError, lambda: paths.check_socket(path)) == text


def test_file_or_link_in_place_of_the_socket_is_refused(private: Path) -> None:
    make_socket(private / "real.sock")
    (private / "link.sock").symlink_to("real.sock")
    (private / "dangling.sock").symlink_to("none")
    (private / "file.sock").touch()
    for name in ("link.sock", "dangling.sock", "file.sock"):
        path = private / name
        text = f"{path} is not a socket (symbolic links are refused): remove it"
        assert fails(RuntimePathError, lambda path=path: paths.check_socket(path)) == text  # type: ignore[misc]


def test_manifest_is_the_explicit_the_users_or_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    looked = f"{tmp_path}/.config/weightcached/manifest.yaml or /etc/weightcached/manifest.yaml"
    hint = "'weightcachectl install' writes an example to edit"
    assert fails(ManifestError, paths.manifest_path) == f"no model manifest at {looked}: {hint}"
    users = tmp_path / ".config/weightcached/manifest.yaml"
    users.parent.mkdir(parents=True)
    users.touch()
    assert paths.manifest_path() == users
    given = tmp_path / "m.yaml"
    assert (
        fails(ManifestError, lambda: paths.manifest_path(given))
        == f"no model manifest at {given}: {hint}"
    )
    given.touch()
    assert paths.manifest_path(given) == given
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert re.search(
        re.escape(f"{tmp_path}/xdg/weightcached"), fails(ManifestError, paths.manifest_path)
    )
