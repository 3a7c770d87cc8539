"""Facts about the host for `doctor`: from commands, or from files if there is no command."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from weightcached.system.paths import session_environment

COMMAND_TIMEOUT_S = 20.0
LINGER_DIR = Path("/var/lib/systemd/linger")
DEV = Path("/dev")
PROC_NVIDIA = Path("/proc/driver/nvidia")
_ESCAPES = {ord("\\"): "\\\\", ord('"'): '\\"', ord("'"): "\\'"}


def output(*command: str) -> str | None:
    """A command's output, at any exit status; None if it is missing, silent or hangs."""
    try:
        env = session_environment()
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def units_that_are(state: str) -> Iterator[tuple[str, str]]:
    """Name and device of each unit of ours in this state."""
    options = ("--plain", "--no-legend", "weightcached@*")
    listed = output("systemctl", "--user", "list-units", f"--state={state}", *options)
    for name in re.findall(r"^(weightcached@\S+\.service)", listed or "", re.MULTILINE):
        yield name, name.removeprefix("weightcached@").removesuffix(".service")


def lingers(uid: int) -> bool:
    """Whether logind keeps a user manager for `uid` without a login.

    loginctl knows a user only while he is logged in or lingers; logind keeps the setting in a file
    of his name.
    """
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return False
    return (LINGER_DIR / _escape(name)).exists()


def _escape(name: str) -> str:
    """Escaped as by systemd's cescape(): user names may have backslashes, spaces or umlauts."""
    return "".join(
        _ESCAPES.get(byte) or (chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}")
        for byte in os.fsencode(name)
    )


def is_full(directory: Path) -> bool:
    """Whether the file system has no free inode. False if it has no limit or does not answer."""
    try:
        info = os.statvfs(directory)
    except OSError:
        return False
    return info.f_files > 0 and info.f_favail == 0


def missing_device_nodes() -> list[Path] | None:
    """Missing device nodes that CUDA opens; None if no NVIDIA driver is loaded.

    The driver makes none itself. The first use of NVML or CUDA runs nvidia-modprobe, which makes
    them. It is setuid, so it does nothing for a process with NoNewPrivileges=.
    """
    if not PROC_NVIDIA.is_dir():
        return None
    needed = [DEV / "nvidiactl", DEV / "nvidia-uvm"]
    minors = [
        DEV / f"nvidia{minor}"
        for path in sorted(PROC_NVIDIA.glob("gpus/*/information"))
        for minor in re.findall(r"^Device Minor:\s*(\d+)", path.read_text(), re.MULTILINE)
    ]
    # A container sees those of its own GPUs alone.
    if not any(path.exists() for path in minors):
        needed += minors
    return [path for path in needed if not path.exists()]
