"""Which packages this interpreter finds, to notice that others have been installed since."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping

# pip makes the directory anew, whose name has the version.
_METADATA = (".dist-info", ".egg-info")


def installed_packages() -> dict[str, int]:
    """Installed packages by the directories of their metadata, each with its time of change (ns).

    Not by their versions: the same one may be installed again, with other files.
    """
    found: dict[str, int] = {}
    for path in filter(os.path.isabs, sys.path):
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            for entry in entries:
                if entry.name.endswith(_METADATA):
                    with contextlib.suppress(OSError):
                        found[entry.path] = entry.stat().st_mtime_ns
    return found


def describe_change(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """The packages that came, went or changed, as their metadata are named; "" if none has."""
    paths = {path for path, _ in before.items() ^ after.items()}
    return ", ".join(sorted({os.path.basename(path) for path in paths}))
