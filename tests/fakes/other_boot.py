"""`weightcached` after a reboot: `python -m tests.fakes.other_boot serve …` in another boot than the real one."""

from __future__ import annotations

import os
from pathlib import Path

from weightcached.cli.weightcached import main
from weightcached.wire import resident

VARIABLE = "WEIGHTCACHED_TEST_BOOT_ID"

if __name__ == "__main__":
    resident._BOOT_ID = Path(os.environ[VARIABLE])
    main()
