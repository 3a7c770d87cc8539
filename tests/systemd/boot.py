"""Make fresh namespaces look like a small machine of their own, then become its systemd.

    unshare --mount --pid … python -m tests.systemd.boot PRIVATE

PRIVATE holds that machine's own directories: `etc`, `home` and `state` (/var/lib/systemd). All else
belongs to the real machine and is read-only, because programs in here run as root, with the unit
files of the real machine at hand. Borders: namespaces, cgroup and the content of PRIVATE are
system_manager.py's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

SYSTEMD = "/lib/systemd/systemd"
# A directory with only this machine's units; sessions and `systemctl` add units at run time.
UNIT_DIR = "/etc/systemd/only"
UNIT_PATH = f"/run/systemd/control:/run/systemd/transient:{UNIT_DIR}"
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
# The kernel and its clock are shared with the real machine.
_CAPABILITIES = "-sys_module,-sys_time,-sys_rawio,-syslog,-mac_admin"
_PRIVATE = Path("/run/private")
_MACHINE = Path("/run/machine")


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, stdin=subprocess.DEVNULL)


def bind(source: Path | str, target: Path | str) -> None:
    mount("--bind", str(source), str(target))


def read_only(target: str) -> None:
    # With `bind` it is this mount that changes, not the file system that it shows.
    mount("-o", "remount,bind,ro", target)


def needed() -> Iterator[Path]:
    """Paths that an ordinary user must read in order to run this interpreter with its imports."""
    tree = Path(__file__).resolve().parents[2]
    found = [tree, *(Path(path) for path in (sys.prefix, sys.base_prefix, *sys.path) if path)]
    kept: list[Path] = []
    for path in sorted({Path(os.path.realpath(path)) for path in found}):
        if path.exists() and not any(path.is_relative_to(other) for other in kept):
            kept.append(path)
            yield path


def closed_above(path: Path) -> Path | None:
    """The uppermost directory on the way to `path` that others may not enter."""
    return next(
        (folder for folder in reversed(path.parents) if not folder.stat().st_mode & 0o001), None
    )


def open_ways(paths: Iterable[Path]) -> None:
    """Hide /tmp, /home and every directory that is closed to users; show only `paths` in them."""
    paths = list(paths)
    hidden = {Path("/tmp"), Path("/var/tmp"), Path("/home")}
    hidden |= {folder for path in paths if (folder := closed_above(path)) is not None}
    tops = [folder for folder in hidden if not hidden.intersection(folder.parents)]
    for folder in tops:
        mount(
            "-t",
            "tmpfs",
            "-o",
            "mode=1777" if folder.name == "tmp" else "mode=755",
            "tmpfs",
            str(folder),
        )
    for path in paths:
        if any(path.is_relative_to(folder) for folder in tops):
            path.mkdir(parents=True)
            bind(f"{_MACHINE}{path}", path)


def file_systems(private: Path) -> None:
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    for folder in (_PRIVATE, _MACHINE):
        folder.mkdir()
    bind(private, _PRIVATE)
    ways = list(needed())
    read_only("/")
    mount("--rbind", "/", str(_MACHINE))
    open_ways(ways)
    for name, target in (("etc", "/etc"), ("state", "/var/lib/systemd"), ("home", "/home")):
        bind(_PRIVATE / name, target)
    subprocess.run(["umount", "--lazy", str(_MACHINE)], check=True)


def devices(console: str) -> None:
    """A /dev with harmless devices, and the terminal `console` for systemd's log."""
    dev = Path("/run/dev")
    dev.mkdir()
    for name in (*_DEVICES, "console"):
        (dev / name).touch()
        bind(console if name == "console" else f"/dev/{name}", dev / name)
    for name in ("pts", "shm"):
        (dev / name).mkdir()
    mount("-t", "devpts", "-o", "newinstance,ptmxmode=0666", "devpts", str(dev / "pts"))
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", str(dev / "shm"))
    (dev / "ptmx").symlink_to("pts/ptmx")
    (dev / "fd").symlink_to("/proc/self/fd")
    mount("--rbind", str(dev), "/dev")


def kernel_interfaces() -> None:
    # Only a mount made in here has the own cgroup as its root.
    subprocess.run(["umount", "--lazy", "/sys/fs/cgroup"], check=True)
    mount("-t", "cgroup2", "cgroup2", "/sys/fs/cgroup")
    read_only("/sys")
    bind("/proc/sys", "/proc/sys")
    read_only("/proc/sys")
    if os.path.exists("/proc/sysrq-trigger"):
        bind("/dev/null", "/proc/sysrq-trigger")


def main() -> None:
    console = os.ttyname(sys.stdin.fileno())
    file_systems(Path(sys.argv[1]))
    devices(console)
    kernel_interfaces()
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        # This makes it skip steps that concern the kernel and a machine's first boot.
        "container": "weightcached-test",
        "SYSTEMD_UNIT_PATH": UNIT_PATH,
        "SYSTEMD_GENERATOR_PATH": "/nonexistent",
        "SYSTEMD_ENVIRONMENT_GENERATOR_PATH": "/nonexistent",
    }
    command = [
        "setpriv",
        f"--bounding-set={_CAPABILITIES}",
        SYSTEMD,
        "--system",
        "--log-target=console",
    ]
    os.execvpe(command[0], [*command, "--show-status=no"], environment)


if __name__ == "__main__":
    main()
