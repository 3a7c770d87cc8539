"""A supervisor of newer software in the place of this one, in the same process.

Engines and socket go on, as after a crash, and the service manager sees nothing of it. To restart
the unit would end the engines.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from weightcached.engine.endpoint import STORE_NAME
from weightcached.errors import EXIT_FAILURE, EngineError
from weightcached.system.notify import LISTEN_FDS_START, listen_variables
from weightcached.system.process import environment_for

# A supervisor that has no handlers yet would die of them, and leave the engines to nobody.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_CHECK_TIMEOUT_S = 60.0
# A supervisor that ended over a half-installed package, or a manifest that it does not read, would
# leave the engines to nobody.
_CHECK = """
import sys
from pathlib import Path
from weightcached.config.manifest import load_manifest
import weightcached.engine.supervisor
load_manifest(Path(sys.argv[1])).service(sys.argv[2])
print("fit")
"""


async def check_newer(manifest: Path, service: str) -> None:
    """Have the software that is installed now read the manifest. Raises EngineError if it cannot."""
    command = [sys.executable, "-c", _CHECK, str(manifest), service]
    try:
        done = await asyncio.to_thread(
            subprocess.run, command, env=environment_for(sys.executable), text=True, timeout=_CHECK_TIMEOUT_S,
            stdin=subprocess.DEVNULL, capture_output=True, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as e:
        raise EngineError(f"the software that is installed now does not start: {e}") from e
    # Not its status, which reap() may have taken.
    if done.stdout != "fit\n":
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise EngineError(f"the software that is installed now cannot keep the service: {reason}")


def become_newer(public: int) -> NoReturn:
    """Run this process's command line anew, with the public socket as from a service manager.

    All other descriptors are closed by exec, the service's lock among them.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    os.dup2(public, LISTEN_FDS_START)
    # dup2() leaves it as it is if it has that number already.
    os.set_inheritable(LISTEN_FDS_START, True)
    environment = {**os.environ, **listen_variables([STORE_NAME])}
    try:
        os.execve(sys.executable, sys.orig_argv, environment)
    except OSError:
        # Another descriptor may have had that number. The service manager starts another supervisor.
        traceback.print_exc()
        os._exit(EXIT_FAILURE)
