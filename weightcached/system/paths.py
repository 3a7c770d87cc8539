"""Runtime directory, sockets, locks and the manifest: where they are and which owner and mode they
must have.

    $XDG_RUNTIME_DIR/weightcached/          0700, owned by the user, no symlink
        <DEVICE>.sock                       0600, bound by the daemon that holds the lock
        <DEVICE>.lock                       0600, flock()ed for the daemon's whole life, never unlinked

Both sides check with lstat() before they trust a path, so another user cannot plant a socket.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from weightcached.errors import (
    DeviceError,
    HomeError,
    ManifestError,
    RuntimePathError,
    WeightCacheUnavailableError,
)
from weightcached.system.container import in_container, is_unmapped

# sun_path holds 108 bytes with the terminating zero (unix(7)).
SOCKET_PATH_MAX_BYTES = 107
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_DEVICE = re.compile(rf"(GPU-{_UUID}|MIG-{_UUID}|cpu(0|[1-9][0-9]{{0,2}}))")


def check_device(device: str) -> str:
    """`device`, if it is well-formed: GPU-<uuid>, MIG-<uuid> or cpuN. Raises DeviceError otherwise."""
    if not _DEVICE.fullmatch(device):
        raise DeviceError(
            f"{device!r} is not a device name: expected GPU-<uuid> or MIG-<uuid> as nvidia-smi -L prints it, "
            "or cpu0 … cpu999 for host memory; 'weightcachectl devices' lists the devices of this machine"
        )
    return device


def is_host_device(device: str) -> bool:
    """Whether the device's segments live in host memory."""
    return device.startswith("cpu")


class _Choice:
    """Set by this process's command line."""

    runtime_dir: Path | None = None


def choose_runtime_dir(directory: Path | None) -> None:
    """Have runtime_dir() return `directory` in this process, for --socket-dir; None undoes that."""
    _Choice.runtime_dir = directory.absolute() if directory else None


def runtime_dir() -> Path:
    """The default runtime directory, which need not exist. Raises RuntimePathError without a base."""
    if _Choice.runtime_dir is not None:
        return _Choice.runtime_dir
    base = _session_dir()
    if not Path(base).is_absolute():
        raise RuntimePathError(
            f"XDG_RUNTIME_DIR is {base!r}: it must be an absolute path, as systemd sets it"
        )
    if not Path(base).is_dir():
        way = (
            "log in through a session that systemd-logind opens, or run 'loginctl enable-linger "
            f"{os.getuid()}', or set XDG_RUNTIME_DIR, or name the directory of the sockets: --socket-dir"
        )
        if in_container():
            way = (
                "this is a container: mount the directory of the daemon's sockets, and set XDG_RUNTIME_DIR to the one "
                "above it, or name it: --socket-dir, or socket_dir of the engine's loader options (docs/containers.md)"
            )
        raise RuntimePathError(f"the runtime directory {base} does not exist: {way}")
    return Path(base) / "weightcached"


def session_environment() -> dict[str, str]:
    """The environment for `systemctl --user`, so that it looks where runtime_dir() does.

    In a shell of `su` or `sudo`, in a cron job and in a system service XDG_RUNTIME_DIR is not set.
    """
    return {**os.environ, "XDG_RUNTIME_DIR": _session_dir()}


def _session_dir() -> str:
    return os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"


def create_runtime_dir(directory: Path) -> None:
    """Make the directory with mode 0700, or check an existing one. Raises RuntimePathError."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as e:
        raise RuntimePathError(
            f"cannot create the runtime directory {directory}: {e.strerror}"
        ) from e
    check_private_dir(directory)


def check_private_dir(directory: Path) -> None:
    """Require a real directory of this user that nobody else may enter. Raises RuntimePathError."""
    try:
        info = os.lstat(directory)
    except OSError as e:
        raise RuntimePathError(f"runtime directory {directory}: {e.strerror}") from e
    if stat.S_ISLNK(info.st_mode):
        raise RuntimePathError(
            f"runtime directory {directory} is a symbolic link: a real directory is required"
        )
    if not stat.S_ISDIR(info.st_mode):
        raise RuntimePathError(f"runtime directory {directory} is not a directory: move it away")
    if is_unmapped(info.st_uid):
        raise RuntimePathError(
            f"runtime directory {directory} belongs to a user that this user namespace does not have (shown as uid "
            f"{info.st_uid}), expected uid {os.getuid()}: start the container with that user in it, as 'podman run "
            "--userns=keep-id' does (docs/containers.md)"
        )
    if info.st_uid != os.getuid():
        raise RuntimePathError(
            f"runtime directory {directory} belongs to uid {info.st_uid}, expected {os.getuid()}: "
            "run as that user, or remove it"
        )
    if info.st_mode & 0o077:
        raise RuntimePathError(
            f"runtime directory {directory} has mode {stat.S_IMODE(info.st_mode):04o}, expected 0700: "
            f"chmod 700 {directory}"
        )


def socket_path(device: str, socket_dir: Path | None = None) -> Path:
    """The socket of `device`. Raises RuntimePathError if its path is too long for a socket."""
    name = f"{check_device(device)}.sock"
    path = (socket_dir or runtime_dir()) / name
    nbytes = len(os.fsencode(path))
    if nbytes > SOCKET_PATH_MAX_BYTES:
        raise RuntimePathError(
            f"socket path {path} has {nbytes} bytes, the kernel allows {SOCKET_PATH_MAX_BYTES}: "
            "set XDG_RUNTIME_DIR (or socket_dir) to a shorter directory"
        )
    return path


def devices_with_socket(directory: Path | None = None) -> list[str]:
    """Devices with a socket in the runtime directory, also without a listener; may be empty.

    Raises RuntimePathError.
    """
    return sorted(path.stem for path in (directory or runtime_dir()).glob("*.sock"))


def lock_path(device: str, socket_dir: Path | None = None) -> Path:
    """The file whose flock() makes one daemon the owner of `device`."""
    name = f"{check_device(device)}.lock"
    return (socket_dir or runtime_dir()) / name


def check_socket(path: Path) -> None:
    """Require a socket of this user in a private directory, before connecting.

    Raises WeightCacheUnavailableError if there is nothing, RuntimePathError if it is not a socket.
    """
    absent = WeightCacheUnavailableError(
        f"no weightcached daemon listens on {path}: systemctl --user start weightcached@{path.stem}.service",
        code="no-daemon",
    )
    if not os.path.lexists(path.parent):
        if in_container():
            way = (
                f"mount the directory of the daemon's socket at {path.parent} (docs/containers.md)"
            )
            text = f"no weightcached daemon listens on {path}: in this container, {way}"
            raise WeightCacheUnavailableError(text, code="no-daemon")
        raise absent
    # First: in another user's directory a socket that is there cannot be seen.
    check_private_dir(path.parent)
    if not os.path.lexists(path):
        raise absent
    try:
        info = os.lstat(path)
    except FileNotFoundError as e:
        # A daemon that starts removes the socket of its predecessor just now.
        raise absent from e
    if not stat.S_ISSOCK(info.st_mode):
        raise RuntimePathError(f"{path} is not a socket (symbolic links are refused): remove it")
    if info.st_uid != os.getuid():
        raise RuntimePathError(
            f"socket {path} belongs to uid {info.st_uid}, expected {os.getuid()}: remove it"
        )


def home() -> Path:
    """The user's home directory. Raises HomeError if nothing names one."""
    try:
        return Path.home()
    except RuntimeError as e:
        raise HomeError(
            f"no home directory: HOME is not set and uid {os.getuid()} has no passwd entry: "
            "set HOME, or XDG_CONFIG_HOME, XDG_DATA_HOME and XDG_CACHE_HOME"
        ) from e


def config_home() -> Path:
    """$XDG_CONFIG_HOME, or ~/.config. Raises HomeError."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return Path(base) if base else home() / ".config"


def data_home() -> Path:
    """$XDG_DATA_HOME, or ~/.local/share. Raises HomeError."""
    base = os.environ.get("XDG_DATA_HOME")
    return Path(base) if base else home() / ".local/share"


def cache_home() -> Path:
    """$XDG_CACHE_HOME, or ~/.cache. Raises HomeError, also for a relative path."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache")
    if not base.is_absolute():
        raise HomeError(f"XDG_CACHE_HOME is {base}, expected an absolute path")
    return base


def make_private(directory: Path) -> None:
    """Make a directory for this user alone, if there is none. Raises OSError.

    So are those above it that are missing: with a umask of 002 its group could write to them, and
    what is in them would not be believed.
    """
    for each in (*reversed(directory.parents), directory):
        each.mkdir(mode=0o700, exist_ok=True)


def manifest_path(explicit: Path | None = None) -> Path:
    """The manifest in force: the explicit one, the user's, or the machine's.

    Raises ManifestError if none exists, HomeError if the user has no home directory and there is no
    other manifest.
    """
    of_machine = Path("/etc/weightcached/manifest.yaml")
    if explicit is not None:
        candidates = [explicit]
    else:
        try:
            candidates = [config_home() / "weightcached/manifest.yaml", of_machine]
        except HomeError:
            if of_machine.is_file():
                return of_machine
            raise
    for path in candidates:
        if path.is_file():
            return path
    looked = " or ".join(str(p) for p in candidates)
    raise ManifestError(
        f"no model manifest at {looked}: 'weightcachectl install' writes an example to edit"
    )
