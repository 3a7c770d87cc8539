"""A supervisor of newer software in the place of this one, in the same process.

Engines and socket go on, as after a crash, and the service manager sees nothing of it. To restart
the unit would end the engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NoReturn

from weightcached.config.engines import EngineSpec
from weightcached.engine.endpoint import STORE_NAME, moved
from weightcached.errors import EXIT_FAILURE, EngineError
from weightcached.system.notify import LISTEN_FDS_START, listen_variables
from weightcached.system.packages import InstalledPackages
from weightcached.system.process import environment_for

log = logging.getLogger(__name__)

# A supervisor that has no handlers yet would die of them, and leave the engines to nobody.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_CHECK_TIMEOUT_S = 60.0
# With the check shorter than weightcachectl waits.
_UNREST_TIMEOUT_S = 20.0
_UNREST_PERIOD_S = 0.05
_HANDLED_S = 0.01
# A supervisor that ended over a half-installed package, or a manifest that it does not read, would
# leave the engines to nobody.
_CHECK = """
import sys
from pathlib import Path
from weightcached.config.manifest import load_manifest
import weightcached.cli.weightcached, weightcached.engine.supervisor
print("fit", load_manifest(Path(sys.argv[1])).service(sys.argv[2])[0].listen)
"""


class Renewal:
    """Whether and when another supervisor takes the place of this one.

    unrest: what is under way that another could not take up, or "".
    """

    def __init__(self, unrest: Callable[[], str], stopping: Callable[[], bool]) -> None:
        self._packages = InstalledPackages()
        self._unrest = unrest
        self._stopping = stopping

    async def begin(self, manifest: Path, spec: EngineSpec, public: int) -> bool:
        """Whether packages have changed: then the other begins once the caller has said so.

        Raises EngineError if it cannot.
        """
        changed = self._packages.changed()
        if not changed:
            return False
        await check_newer(manifest, spec)
        deadline_s = time.monotonic() + _UNREST_TIMEOUT_S
        while self._unrest() and time.monotonic() < deadline_s and not self._stopping():
            await asyncio.sleep(_UNREST_PERIOD_S)
        async with holding_stops():
            if self._stopping():
                raise EngineError("the service is stopping")
            if unrest := self._unrest():
                raise EngineError(
                    f"{spec.name} {unrest}: wait for that, then run weightcachectl engine restart {spec.name}"
                )
            log.info(
                "service=%s supervisor begins anew, packages have changed: %s", spec.name, changed
            )
        asyncio.get_running_loop().call_soon(become_newer, public)
        return True


async def check_newer(manifest: Path, spec: EngineSpec) -> None:
    """Have the software that is installed now read the manifest. Raises EngineError if it cannot, or
    would listen elsewhere.
    """
    again = f"mend that, then run weightcachectl engine restart {spec.name}"
    now = "the software that is installed now"
    try:
        done = await asyncio.to_thread(_ask_newer, manifest, spec.name)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise EngineError(f"{now} does not start: {e}; {again}") from e
    # Not its status, which reap() may have taken.
    fit, _, where = done.stdout.partition(" ")
    if fit != "fit":
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise EngineError(f"{now} cannot keep the service: {reason}; {again}")
    if where.strip() != str(spec.listen):
        raise moved(spec.listen, where.strip())


def _ask_newer(manifest: Path, service: str) -> subprocess.CompletedProcess[str]:
    # This thread outlives the question. The kernel may give it a signal that the main thread holds,
    # and what it gets is lost with it at the exec.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    return subprocess.run(
        [sys.executable, "-c", _CHECK, str(manifest), service],
        env=environment_for(sys.executable), text=True, timeout=_CHECK_TIMEOUT_S, stdin=subprocess.DEVNULL,
        capture_output=True, check=False,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def holding_stops() -> AsyncIterator[None]:
    """Signals to stop wait for the next supervisor, unless the block raises an exception. Those from
    before are handled on entry: one that is only noted would be lost at the exec.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        # A few rounds of the event loop: it reads them from a pipe first.
        await asyncio.sleep(_HANDLED_S)
        yield
    except BaseException:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        raise


def become_newer(public: int) -> NoReturn:
    """Run this process's command line anew, with the public socket as from a service manager.

    Within holding_stops(). All other descriptors are closed by exec, the service's lock among them.
    """
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
