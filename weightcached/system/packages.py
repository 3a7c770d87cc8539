"""Which packages this interpreter finds, to notice that others have been installed since."""

from __future__ import annotations

import contextlib
import os
import sys

# pip makes the directory anew, whose name has the version.
_METADATA = (".dist-info", ".egg-info")


class InstalledPackages:
    """The packages that this interpreter found when this object was made."""

    def __init__(self) -> None:
        # Not as they are later: an import may add a directory, as that of setuptools does.
        self._paths = [path for path in sys.path if os.path.isabs(path)]
        self._found = self._look()

    def changed(self) -> str:
        """Those that came, went or changed since, as their metadata are named; "" if none has."""
        paths = {path for path, _ in self._found.items() ^ self._look().items()}
        return ", ".join(sorted({os.path.basename(path) for path in paths}))

    def _look(self) -> dict[str, int]:
        """Times of change (ns) of metadata, by path.

        Not versions: the same one may be installed again, with other files.
        """
        found: dict[str, int] = {}
        for path in self._paths:
            with contextlib.suppress(OSError), os.scandir(path) as entries:
                for entry in entries:
                    if entry.name.endswith(_METADATA):
                        with contextlib.suppress(OSError):
                            found[entry.path] = entry.stat().st_mtime_ns
        return found
