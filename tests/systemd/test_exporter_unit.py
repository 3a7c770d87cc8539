"""The exporter's own unit file under a real user manager: its settings let it work."""

from __future__ import annotations

import re
import shlex
import sys
import urllib.request
from pathlib import Path

from tests.fakes.daemon import ROOT
from tests.systemd.conftest import Unit
from tests.systemd.manager import PrivateManager
from weightcached.system.units import source

NAME = "weightcached-exporter.service"


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
            with urllib.request.urlopen(
                f"http://127.0.0.1:{found[1]}/{path}", timeout=30
            ) as answer:
                assert expected in answer.read().decode()
    finally:
        manager.systemctl("stop", NAME, check=False)
    assert manager.show(NAME, "Result") == "success"
    assert manager.show(NAME, "ExecMainStatus") == "0"
