"""What doctor reads of the host from files, where no command tells it."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

LINGER_DIR = Path("/var/lib/systemd/linger")
_ESCAPES = {ord("\\"): "\\\\", ord('"'): '\\"', ord("'"): "\\'"}


def lingers(uid: int) -> bool:
    """Whether logind keeps a user manager for `uid` without a login.

    loginctl knows a user only while he is logged in or lingers; logind keeps the setting in a file of his name.
    """
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return False
    return (LINGER_DIR / _escaped(name)).exists()


def _escaped(name: str) -> str:
    """As systemd's cescape() writes it: names from a directory service may hold backslashes, spaces or umlauts."""
    return "".join(
        _ESCAPES.get(byte) or (chr(byte) if 32 <= byte < 127 else f"\\{byte:03o}") for byte in os.fsencode(name)
    )


def is_full(directory: Path) -> bool:
    """Whether no file can be made there for want of inodes. False where it cannot be told, or is not limited."""
    try:
        info = os.statvfs(directory)
    except OSError:
        return False
    return info.f_files > 0 and info.f_favail == 0
