"""weightcachectl explain with a real daemon: served caches, and refusals of the loader's proof."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.daemon import BOUND_S, ROOT, DaemonProcess, environment, model
from tests.fakes.loader_child import REFUSAL

Launcher = Callable[..., DaemonProcess]


def explain(daemon: DaemonProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weightcached.cli.weightcachectl", "explain", *arguments],
        env=environment(XDG_RUNTIME_DIR=str(daemon.directory)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=BOUND_S,
    )


def test_daemon_keeps_the_refusal_of_a_model_and_serves_the_others(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    other = write_checkpoint(short_tmp / "other", seed=2)
    refused = model("refused", other, x_fault="cannot-prove-in-packing")
    daemon = make_daemon([refused, model("tiny", checkpoint)])
    daemon.runtime = short_tmp / "weightcached"
    daemon.socket = daemon.runtime / "cpu0.sock"
    daemon.start()
    told = explain(daemon, "refused")
    assert (told.returncode, told.stdout, told.stderr) == (
        1,
        f"cpu0 refused/target: refused at {REFUSAL}\n",
        "",
    )
    (found,) = json.loads(explain(daemon, "refused/target", "--json").stdout)["caches"]
    assert found["refused_at"] == "model.layers.3.mlp.experts.quant_method.kernel.workspace"
    served: dict[str, Any] = json.loads(explain(daemon, "tiny", "--json").stdout)["caches"][0]
    assert (served["state"], served["stage"], served["private"]) == ("ready", "loaded", [])
    assert set(served["phases"]) == {"weights", "packing"}
    # Its descriptors were taken and given back, and no lease is left behind.
    assert [cache.engines for cache in daemon.status().caches] == [[], []]
