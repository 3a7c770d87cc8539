"""Workers of an engine that are forks of its first process, as those of a GPU engine are.

vLLM's platform for the CPU has each of them import everything again, which takes longer than all
that the tests want of them. `python -m tests.engine.forking FILE …` runs a program so.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any


def fork_workers() -> None:
    """From here on, also in children. One thread: a fork has no other thread of its parent's pool."""
    from vllm.platforms.cpu import CpuPlatform

    assert os.environ.get("OMP_NUM_THREADS") == "1", "a pool of threads may be there"
    check: Any = CpuPlatform.check_and_update_config

    def check_and_fork(cls: type, vllm_config: Any) -> None:
        check(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    # `check` is bound to the class already.
    CpuPlatform.check_and_update_config = classmethod(check_and_fork)


if __name__ == "__main__":
    fork_workers()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
