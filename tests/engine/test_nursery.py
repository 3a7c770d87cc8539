"""What a nursery of real engines imports."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.engine.conftest import ANSWER_TIMEOUT_S, ENVIRONMENT
from tests.fakes.daemon import ROOT

PROGRAM = """
import importlib, sys
from weightcached.system.packages import InstalledPackages
packages = InstalledPackages()
from weightcached.vllm_compat import server
for name in server._MODULES:
    importlib.import_module(name)
assert packages.changed() == "", packages.changed()
"""


def test_imports_of_an_engine_are_no_change_of_packages() -> None:
    """They put setuptools' own packages on the path. After a change no engine would be forked."""
    subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | ENVIRONMENT, cwd=ROOT, check=True, timeout=ANSWER_TIMEOUT_S
    )  # fmt: skip
