"""Points at which a process of the tests waits until it is let go on: a FIFO named after the phase
arms one.

The daemon's own phases are made to wait by running it as `python -m tests.fakes.pauses serve …`,
which wraps the functions where a phase begins; the product has no hook for this.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "WEIGHTCACHED_TEST_PAUSES"


class Pauses:
    """The test's side: a directory of armed phases."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)

    def arm(self, phase: str) -> None:
        (self.directory / f"{phase}.reached").unlink(missing_ok=True)
        os.mkfifo(self.directory / phase)

    def reached(self, phase: str) -> bool:
        return (self.directory / f"{phase}.reached").exists()

    def let_go(self, phase: str, ended: Callable[[], bool]) -> None:
        """Let the process that waits in the phase go on; there is none if it has `ended`."""
        # Here: a daemon that is made to wait does not need it.
        from tests.fakes.daemon import until

        def opened() -> bool:
            with contextlib.suppress(OSError):
                os.close(os.open(self.directory / phase, os.O_WRONLY | os.O_NONBLOCK))
                return True
            return ended()

        until(opened, f"somebody waits in {phase}")
        (self.directory / phase).unlink()


def at(directory: str | None, phase: str) -> None:
    """The process's side: wait here if the phase is armed, the first time only.

    A second wait before let_go() has removed the FIFO would wait for a writer that never comes.
    """
    if directory is None:
        return
    fifo = Path(directory, phase)
    if not fifo.exists():
        return
    try:
        fifo.with_name(f"{phase}.reached").touch(exist_ok=False)
    except FileExistsError:
        return
    with open(fifo, "rb") as gate:
        gate.read()


def _before(owner: Any, name: str, phase: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        at(os.environ.get(VARIABLE), phase)
        return original(*args, **kwargs)

    setattr(owner, name, waiting)


def _after(owner: Any, name: str, phase: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        at(os.environ.get(VARIABLE), phase)
        return result

    setattr(owner, name, waiting)


def main() -> None:
    from weightcached.cli import weightcached as cli
    from weightcached.daemon import fdstore, reconcile
    from weightcached.daemon import main as daemon
    from weightcached.daemon.caches import Cache
    from weightcached.daemon.endpoint import Endpoint
    from weightcached.daemon.publishing import Publisher
    from weightcached.daemon.reconcile import Reconciler
    from weightcached.system.notify import StoreConnection

    _before(daemon, "_raise_descriptor_limit", "lock")
    _before(fdstore, "adopt", "adopt")
    _after(Endpoint, "listen", "bind")
    # In a thread: the daemon serves meanwhile.
    _before(reconcile, "load_manifest", "manifest")
    # Each of these has its first descriptor on its way when it waits: the set in the store is cut
    # short.
    _after(StoreConnection, "_send", "store")
    _before(Publisher, "publish", "publish")
    _before(Cache, "publish", "stored")
    _before(daemon, "shake_hands", "handshake")
    _before(fdstore.FdStore, "remove", "unstore")
    _before(Reconciler, "release", "release")
    cli.main()


if __name__ == "__main__":
    main()
