"""The exporter's own unit file under a real user manager: its settings let it work."""

from __future__ import annotations

import re
import shlex
import sys
from functools import partial
from pathlib import Path

from tests.fakes.daemon import ROOT, until
from tests.process.test_exporter import get
from tests.systemd.conftest import Unit
from tests.systemd.manager import PrivateManager
from weightcached.system.units import source

NAME = "weightcached-exporter.service"


def answers(port: int, path: str, expected: str) -> bool:
    return expected in get(port, f"/{path}")[1]


def test_unit_serves_the_page_health_and_metrics_and_stops(
    manager: PrivateManager, unit: Unit, tmp_path: Path
) -> None:
    unit.install().systemctl("start")
    log = tmp_path / "exporter.log"
    command = f"{shlex.quote(sys.executable)} -m weightcached exporter --port 0 --manifest {unit.manifest}"
    text = source(NAME).read_text().replace("/usr/bin/weightcached exporter", command)
    more = f"Environment=PYTHONPATH={ROOT}\nWorkingDirectory={ROOT}\nStandardError=append:{log}\n"
    manager.write_unit(NAME, text.replace("Type=notify\n", f"Type=notify\n{more}"))
    try:
        # Type=notify: returns once it listens.
        manager.systemctl("start", NAME)
        found = re.search(r"port=(\d+)", log.read_text())
        assert found
        for path, expected in (
            ("", "m/target"),
            ("health", "ready: 1 cache\n"),
            ("metrics", "weightcached_up"),
        ):
            # On a busy machine the daemon may miss a deadline of the exporter's.
            until(partial(answers, int(found[1]), path, expected), f"/{path} shows {expected}")
    finally:
        manager.systemctl("stop", NAME, check=False)
    assert manager.show(NAME, "Result") == "success"
    assert manager.show(NAME, "ExecMainStatus") == "0"
