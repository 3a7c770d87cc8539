"""Starts from a snapshot on one GPU: the unit's start to READY, the copy itself, memory, a drop.

    python bench/snapshot.py --json snapshot.json

One 8B model is loaded once and written; then the daemon is stopped and started, with nothing kept
but the files. Figures stand beside their limits; "!" marks one that is missed.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pynvml  # noqa: E402

from bench.attach import SIZES, Memory, rss_of_tree  # noqa: E402
from bench.checkpoints import llama_config, write_checkpoint_apart  # noqa: E402
from tests.fakes.daemon import DaemonProcess, model, until, write_manifest  # noqa: E402
from weightcached.system.gpus import list_gpus, visible_gpus  # noqa: E402
from weightcached.wire.messages import Drop, Progress, Reload  # noqa: E402

READY_TIMEOUT_S = 240.0
MIB = 1 << 20


class Bench:
    """The daemon, and the figures."""

    def __init__(self, device: str, work: Path, checkpoint: Path) -> None:
        self.daemon = DaemonProcess(work, device=device)
        self.daemon.loader_command = None
        self.memory = Memory(device)
        self.idle_bytes = self.memory.used()
        self.figures: dict[str, Any] = {}
        write_manifest(
            self.daemon.manifest,
            [model("big", checkpoint, device, max_model_len=4096)],
            snapshots={"dir": str(work / "snapshots")},
        )

    def start(self) -> float:
        """Seconds to READY=1."""
        began_s = time.monotonic()
        self.daemon.launch()
        manager = self.daemon.manager
        assert manager
        until(
            lambda: any("READY=1" in state for state in manager.states),
            "READY",
            bound_s=READY_TIMEOUT_S,
        )
        return time.monotonic() - began_s

    def cache(self) -> Any:
        return self.daemon.status().caches[0]

    def run(self, starts: int) -> None:
        self.figures["loaded: start to READY, s"] = self.start()
        began_s = time.monotonic()
        until(
            lambda: self.cache().snapshot not in ("", "writing"),
            "the snapshot",
            bound_s=READY_TIMEOUT_S,
        )
        self.figures["written in, s"] = time.monotonic() - began_s
        if self.cache().snapshot != "written":
            raise SystemExit(f"not written: {self.cache().snapshot}")
        self.figures["source of each start"] = []
        seconds, rates, phases = [], [], []
        for _ in range(starts):
            self.daemon.stop()
            seconds.append(self.start())
            cache = self.cache()
            self.figures["source of each start"].append(cache.source)
            counters = self.daemon.status().counters
            assert counters
            found = counters.phase_seconds["big/target"]
            phases.append(found)
            rates.append(cache.bytes / found["restoring"] / 1e9)
        self.figures["restored: start to READY, s"] = seconds
        self.figures["restoring alone, GB/s"] = rates
        self.figures["phases of the restorer, s"] = phases
        cache = self.cache()
        used = self.memory.used() - self.idle_bytes - cache.bytes
        self.figures["GPU memory beside the weights, MiB"] = used / MIB
        self.figures["daemon RSS, MiB"] = rss_of_tree(self.daemon.pid) / MIB
        self.drop()

    def drop(self) -> None:
        with self.daemon.client("ctl") as client:
            began_s = time.monotonic()
            client.ask(Drop(cache="big/target"))
            self.figures["drop, s"] = time.monotonic() - began_s
            began_s = time.monotonic()
            reply = client.ask(Reload())
            while isinstance(reply, Progress):
                reply = client.receive()
            self.figures["reload of a dropped cache, s"] = time.monotonic() - began_s


def show(figures: dict[str, Any]) -> None:
    """The figures beside their limits."""
    limits = {
        "restored: start to READY, s": ("≤", 3.0),
        "restoring alone, GB/s": ("≥", 15.0),
        "GPU memory beside the weights, MiB": ("≤", 16.0),
        "daemon RSS, MiB": ("≤", 64.0),
        "drop, s": ("≤", 0.1),
        "reload of a dropped cache, s": ("≤", 2.0),
    }
    for name, value in figures.items():
        median = (
            statistics.median(value)
            if isinstance(value, list) and value and (isinstance(value[0], float))
            else value
        )
        sign, limit = limits.get(name, ("", 0.0))
        missed = sign and (median > limit if sign == "≤" else median < limit)
        text = f"{median:.3f}" if isinstance(median, float) else str(median)
        print(f"{'!' if missed else ' '} {name:40} {text} {f'({sign} {limit})' if sign else ''}")


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=None)
@click.option("--work", type=click.Path(path_type=Path), default=None, help="Default: a new one.")
@click.option("--checkpoint", type=click.Path(path_type=Path), default=None)
@click.option("--size", type=click.Choice(sorted(SIZES)), default="8b", show_default=True)
@click.option("--starts", default=5, show_default=True)
def main(
    json_path: Path | None, work: Path | None, checkpoint: Path | None, size: str, starts: int
) -> None:
    pynvml.nvmlInit()
    device = visible_gpus(list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))[0]
    directory = work or Path(tempfile.mkdtemp(prefix="wcs-"))
    directory.mkdir(parents=True, exist_ok=True)
    if checkpoint is None:
        checkpoint = directory / "model"
        write_checkpoint_apart(
            checkpoint, llama_config(**SIZES[size], dtype="bfloat16", tied=False), device="cuda"
        )
    bench = Bench(device, directory, checkpoint)
    try:
        bench.run(starts)
    finally:
        bench.daemon.close()
        show(bench.figures)
        if json_path is not None:
            json_path.write_text(json.dumps(bench.figures, indent=1))
        if work is None:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
