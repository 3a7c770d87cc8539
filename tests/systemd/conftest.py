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
from tests.fakes.daemon import LOADER, ROOT, model, write_manifest
from tests.systemd.manager import PrivateManager
from weightcached.wire.messages import CacheStatus

# What the tests are about and the product's own unit has too; times are those of a test.
UNIT = """
[Service]
Type=notify
NotifyAccess=main
Environment=PYTHONPATH={root} PYTHONDONTWRITEBYTECODE=1
WorkingDirectory={root}
ExecStart={python} -m weightcached serve {device} --manifest {manifest} --loader-command "{loader}"
ExecReload={python} -m tests.fakes.client %t/weightcached/{device}.sock
StandardError=append:{log}
Restart=on-failure
RestartPreventExitStatus=78
RestartSec=100ms
FileDescriptorStoreMax=64
LimitCORE=0
KillMode=mixed
TimeoutStartSec=20s
TimeoutStopSec=5s
"""


class Unit:
    """One daemon as a unit of the private manager, with one model on its device."""

    def __init__(self, manager: PrivateManager, directory: Path, device: str) -> None:
        self.manager = manager
        self.device = device
        self.name = f"weightcached-{device}.service"
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

    def install(self, *settings: str) -> Unit:
        """Write the unit; `settings` come last and so count."""
        text = UNIT.format(
            root=ROOT,
            python=shlex.quote(sys.executable),
            device=self.device,
            manifest=self.manifest,
            loader=LOADER,
            log=self.log_path,
        )
        self.manager.write_unit(self.name, text + "\n".join(settings) + "\n")
        return self

    def systemctl(self, verb: str, *, check: bool = True) -> int:
        return self.manager.systemctl(verb, self.name, check=check).returncode

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
