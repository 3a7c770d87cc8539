"""Daemon and loader of a version with an older index format, as before an upgrade."""

from __future__ import annotations

import os
import sys

from weightcached.index import tensors as index

OLD_FORMAT = 0


def main() -> None:
    index.FORMAT_VERSION = OLD_FORMAT
    if sys.argv[1:2] == ["serve"]:
        from weightcached.cli.weightcached import main as cli

        at = sys.argv.index("--loader-command") + 1
        sys.argv[at] = f"{sys.executable} -m tests.fakes.older"
        cli()
    else:
        from tests.fakes.loader_child import main as loader

        loader()


if __name__ == "__main__":
    main()
    os._exit(0)
