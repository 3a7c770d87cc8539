"""Fixtures of the tests under a real user manager."""

from __future__ import annotations

import contextlib
import itertools
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.client import Client
from tests.fakes.daemon import LOADER, ROOT, model, until, write_manifest
from tests.systemd.manager import PrivateManager
from weightcached.wire.messages import CacheStatus

PRODUCT_UNIT = ROOT / "systemd/weightcached@.service"
# Settings for tests beside the product's unit file: this tree, a loader without vLLM, a log file.
SETTINGS = """
[Service]
Environment=PYTHONPATH={root} PYTHONDONTWRITEBYTECODE=1
WorkingDirectory={root}
StandardError=append:{log}
LimitCORE=0
"""


def product_unit(start: str, reload: str) -> str:
    """The product's unit file with other commands, as `weightcachectl install` replaces them."""
    text = PRODUCT_UNIT.read_text()
    for old, new in (
        ("/usr/bin/weightcached serve %i", start),
        ("/usr/bin/weightcachectl reload %i", reload),
    ):
        assert text.count(f"={old}\n") == 1
        text = text.replace(f"={old}\n", f"={new}\n")
    return text


def holds(manager: PrivateManager, memfds: int) -> None:
    """Wait until the manager holds so many: it frees those of a unit soon after its end."""
    until(lambda: manager.memfds() == memfds, lambda: f"{memfds} instead of {manager.memfds()}")


class Unit:
    """One daemon as a unit of the private manager, with one model on its device."""

    def __init__(self, manager: PrivateManager, directory: Path, device: str) -> None:
        self.manager = manager
        self.device = device
        self.name = f"weightcached@{device}.service"
        self.checkpoint = write_checkpoint(directory / "checkpoint")
        self.manifest = directory / "manifest.yaml"
        self.spawns = directory / "spawns"
        self.log_path = directory / "daemon.log"
        self.socket = manager.runtime_dir / "weightcached" / f"{device}.sock"
        self.configure()

    def configure(self, **engine: Any) -> None:
        """Write the manifest with these engine arguments."""
        entry = model("m", self.checkpoint, self.device, x_spawns=str(self.spawns), **engine)
        write_manifest(self.manifest, [entry])

    def install(self, *settings: str, module: str = "weightcached") -> Unit:
        """Write the unit. settings: come last and so win; module: runs as the daemon."""
        python = shlex.quote(sys.executable)
        text = product_unit(
            start=f'{python} -m {module} serve %i --manifest {self.manifest} --loader-command "{LOADER}"',
            reload=f"{python} -m tests.fakes.client %t/weightcached/%i.sock",
        )
        text += SETTINGS.format(root=ROOT, log=self.log_path)
        self.manager.write_unit(self.name, text + "\n".join(settings) + "\n")
        return self

    def systemctl(self, verb: str, *, check: bool = True, block: bool = True) -> int:
        options = [] if block else ["--no-block"]
        return self.manager.systemctl(*options, verb, self.name, check=check).returncode

    def show(self, name: str) -> str:
        return self.manager.show(self.name, name)

    @property
    def pid(self) -> int:
        return int(self.show("MainPID"))

    @property
    def engine(self) -> dict[str, Any]:
        return {"model": str(self.checkpoint)}

    def client(self) -> Client:
        return Client.welcome(self.socket)

    def cache(self) -> CacheStatus:
        with self.client() as client:
            (cache,) = client.status().caches
        return cache

    def answers(self) -> bool:
        """Whether it listens."""
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            self.client().close()
            return True
        return False

    def says(self, text: str) -> None:
        """Wait until its line in `systemctl status` has this."""
        until(
            lambda: text in self.show("StatusText"), lambda: f"{text!r}: {self.show('StatusText')}"
        )

    def loads(self) -> int:
        """How often a loader was started."""
        return len(self.spawns.read_text().splitlines()) if self.spawns.exists() else 0

    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""


@pytest.fixture(scope="session")
def manager() -> Iterator[PrivateManager]:
    with PrivateManager() as manager:
        yield manager


_devices = itertools.count()


@pytest.fixture
def unit(manager: PrivateManager, tmp_path: Path) -> Iterator[Unit]:
    """A unit of a device that no other test uses; stopped and forgotten afterwards."""
    unit = Unit(manager, tmp_path, f"cpu{next(_devices)}")
    yield unit
    with contextlib.suppress(Exception):
        manager.systemctl("kill", "--signal=SIGCONT", unit.name, check=False)
    manager.systemctl("stop", unit.name, check=False)
    manager.systemctl("reset-failed", unit.name, check=False)
    holds(manager, 0)
