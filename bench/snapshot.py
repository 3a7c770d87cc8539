"""Starts from a snapshot on one GPU: the unit's start to READY, the copy itself, memory, a drop.

    python bench/snapshot.py --json snapshot.json

One 8B model is loaded once and written; then the daemon is stopped and started, with nothing kept
but the files: from the page cache, and from the disk, beside a direct reading of the same file.
Then the same with weights that vLLM quantizes to fp8 while it loads. Figures stand beside their
limits; "!" marks one that is missed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pynvml  # noqa: E402

from bench.attach import SIZES, Memory, rss_of_tree  # noqa: E402
from bench.checkpoints import llama_config, write_checkpoint_apart  # noqa: E402
from bench.page_cache import cached_share, drop_from_page_cache  # noqa: E402
from tests.fakes.daemon import DaemonProcess, model, until, write_manifest  # noqa: E402
from weightcached.snapshot.speed import read_direct  # noqa: E402
from weightcached.system.gpus import list_gpus, visible_gpus  # noqa: E402
from weightcached.system.paths import is_host_device  # noqa: E402
from weightcached.wire.messages import CacheStatus, Drop, Progress, Reload  # noqa: E402

READY_TIMEOUT_S = 240.0
MIB = 1 << 20
# What a restore does beside reading, checking and copying.
APART = ("segments", "locking", "publishing")
LIMITS: dict[str, tuple[str, float]] = {
    "start to READY, s": ("≤", 3.0),
    "the copy alone, GB/s": ("≥", 15.0),
    "cold: of the direct reading": ("≥", 0.8),
    "GPU memory beside the weights, MiB": ("≤", 16.0),
    "daemon RSS, MiB": ("≤", 64.0),
    "drop, s": ("≤", 0.1),
    "reload of a dropped cache, s": ("≤", 2.0),
}


class Bench:
    """One daemon with one model, and its figures. engine: arguments of the model's engine."""

    def __init__(self, device: str, work: Path, checkpoint: Path, **engine: Any) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.daemon = DaemonProcess(work, device=device)
        self.daemon.loader_command = None
        self.memory = None if is_host_device(device) else Memory(device)
        self.idle_bytes = self.memory.used() if self.memory else 0
        self.snapshots = work / "snapshots"
        self.figures: dict[str, Any] = {}
        write_manifest(
            self.daemon.manifest,
            [model("big", checkpoint, device, max_model_len=4096, **engine)],
            snapshots={"dir": str(self.snapshots)},
        )

    def start(self) -> float:
        """Seconds to READY=1."""
        began_s = time.monotonic()
        self.daemon.launch()
        manager = self.daemon.manager
        assert manager

        def ready() -> bool:
            assert self.daemon.process
            if self.daemon.process.poll() is not None:
                raise RuntimeError(f"the daemon ended: {self.daemon.log[-2000:]}")
            return any("READY=1" in state for state in manager.states)

        until(ready, "READY", bound_s=READY_TIMEOUT_S)
        return time.monotonic() - began_s

    def cache(self) -> CacheStatus:
        return self.daemon.status().caches[0]

    @property
    def data(self) -> Path:
        """The snapshot's weights."""
        (found,) = self.snapshots.glob("*/*/[0-9a-f]*/data")
        return found

    def load(self) -> None:
        """The load by vLLM, and the snapshot."""
        self.figures["loaded: start to READY, s"] = self.start()
        if self.cache().state != "ready":
            # A daemon is ready without it, and tries again.
            raise RuntimeError(f"not loaded: {self.cache().error}")
        began_s = time.monotonic()
        until(
            lambda: self.cache().snapshot not in ("", "writing"),
            "the snapshot",
            bound_s=READY_TIMEOUT_S,
        )
        self.figures["written in, s"] = time.monotonic() - began_s
        if self.cache().snapshot != "written":
            raise RuntimeError(f"not written: {self.cache().snapshot}")
        self.figures["bytes, GiB"] = self.cache().bytes / (1 << 30)

    def restore(
        self, starts: int, prefix: str = "", before: Callable[[], None] | None = None
    ) -> None:
        """Starts from the snapshot; `before` each: e.g. drop it from the page cache."""
        found: dict[str, list[Any]] = {
            name: []
            for name in (
                "source of each start", "start to READY, s", "the copy alone, GB/s",
                "with segments and locked memory, GB/s", "phases of the restorer, s",
            )
        }  # fmt: skip
        # They grow: after a failure those of the starts before it are there.
        self.figures |= {f"{prefix}{name}": values for name, values in found.items()}
        for _ in range(starts):
            self.daemon.stop()
            if before is not None:
                before()
            seconds = self.start()
            cache, counters = self.cache(), self.daemon.status().counters
            assert counters
            phases = counters.phase_seconds["big/target"]
            apart_s = sum(phases.get(name, 0.0) for name in APART)
            for name, value in zip(
                found,
                (
                    cache.source, seconds, cache.bytes / phases["restoring"] / 1e9,
                    cache.bytes / (phases["restoring"] + apart_s) / 1e9, phases,
                ),
                strict=True,
            ):  # fmt: skip
                found[name].append(value)

    def restore_cold(self, starts: int) -> None:
        """From the disk, each start after a direct reading of the same file."""
        direct: list[float] = []
        cached: list[float] = []

        def drop() -> None:
            drop_from_page_cache(self.data)
            read = read_direct(self.data)
            if read is None:
                raise RuntimeError(f"{self.data} is in memory: --work names a directory on a disk")
            direct.append(read.bytes_per_s / 1e9)
            cached.append(cached_share(self.data))

        self.restore(starts, "cold: ", drop)
        copies = self.figures["cold: the copy alone, GB/s"]
        self.figures["cold: direct reading, GB/s"] = direct
        self.figures["cold: share in the page cache before"] = cached
        self.figures["cold: of the direct reading"] = [
            copy / reading for copy, reading in zip(copies, direct, strict=True)
        ]

    def rest(self) -> None:
        """Memory, and a drop and the way back."""
        cache = self.cache()
        if self.memory is not None:
            used = self.memory.used() - self.idle_bytes - cache.bytes
            self.figures["GPU memory beside the weights, MiB"] = used / MIB
        self.figures["daemon RSS, MiB"] = rss_of_tree(self.daemon.pid) / MIB
        with self.daemon.client("ctl") as client:
            began_s = time.monotonic()
            client.ask(Drop(cache="big/target"))
            self.figures["drop, s"] = time.monotonic() - began_s
            began_s = time.monotonic()
            reply = client.ask(Reload())
            while isinstance(reply, Progress):
                reply = client.receive()
            self.figures["reload of a dropped cache, s"] = time.monotonic() - began_s


def show(title: str, figures: dict[str, Any]) -> None:
    """The figures beside their limits."""
    print(f"\n{title}")
    for name, value in figures.items():
        median = (
            statistics.median(value)
            if isinstance(value, list) and value and isinstance(value[0], float)
            else value
        )
        sign, limit = LIMITS.get(name, ("", 0.0))
        missed = isinstance(median, float) and sign
        missed = missed and (median > limit if sign == "≤" else median < limit)
        text = f"{median:.3f}" if isinstance(median, float) else str(median)
        print(f"{'!' if missed else ' '} {name:44} {text} {f'({sign} {limit})' if sign else ''}")


def measure(bench: Bench, title: str, starts: int, cold: int, report: dict[str, Any]) -> None:
    """All figures of one model. A part that fails is noted and does not keep the others from it."""
    report[title] = bench.figures
    errors: dict[str, str] = report["errors"]
    parts: dict[str, Callable[[], None]] = {
        "load": bench.load,
        "restore": lambda: bench.restore(starts),
        "rest": bench.rest,
        # Last: it takes as long as the disk does.
        "cold": lambda: bench.restore_cold(cold),
    }
    try:
        for name, part in parts.items():
            try:
                part()
            except Exception as e:
                errors[f"{title}: {name}"] = f"{type(e).__name__}: {e}"[:2000]
                if name == "load":
                    return
    finally:
        bench.daemon.close()
        show(title, bench.figures)


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=None)
@click.option(
    "--work", type=click.Path(path_type=Path), default=None,
    help="On a disk, or there are no figures of a cold one. Default: a new one.",
)  # fmt: skip
@click.option("--checkpoint", type=click.Path(path_type=Path), default=None)
@click.option("--size", type=click.Choice(sorted(SIZES)), default="8b", show_default=True)
@click.option("--starts", default=5, show_default=True)
@click.option("--cold", default=3, show_default=True, help="Starts from the disk.")
@click.option("--fp8/--no-fp8", default=True, show_default=True)
@click.option("--device", default=None, help="Default: the first GPU. cpuN to try this script.")
def main(
    json_path: Path | None,
    work: Path | None,
    checkpoint: Path | None,
    size: str,
    starts: int,
    cold: int,
    fp8: bool,
    device: str | None,
) -> None:
    # A time limit ends the daemon too, and what was measured so far is written.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    device = device or visible_gpus(list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))[0]
    on_gpu = not is_host_device(device)
    if on_gpu:
        pynvml.nvmlInit()
    directory = work or Path(tempfile.mkdtemp(prefix="wcs-", dir="/var/tmp"))
    directory.mkdir(parents=True, exist_ok=True)
    if checkpoint is None:
        checkpoint = directory / "model"
        config = llama_config(**SIZES[size], dtype="bfloat16", tied=False)
        write_checkpoint_apart(checkpoint, config, device="cuda" if on_gpu else "cpu")
    report: dict[str, Any] = {"errors": {}}
    try:
        measure(Bench(device, directory / "bf16", checkpoint), "bf16", starts, cold, report)
        if fp8:
            quantized = Bench(device, directory / "fp8", checkpoint, quantization="fp8")
            measure(quantized, "fp8, quantized while loading", starts, cold, report)
    finally:
        if json_path is not None:
            json_path.write_text(json.dumps(report, indent=1))
        if work is None:
            shutil.rmtree(directory, ignore_errors=True)
    for part, error in report["errors"].items():
        print(f"! {part} FAILED: {error}")
    sys.exit(bool(report["errors"]))


if __name__ == "__main__":
    main()
