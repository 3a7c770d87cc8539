"""More models than fit: attaches by a Zipf trace, within a budget for some of the models.

    python bench/residency.py --mib 3072 --budget-mib 10240 --json residency.json
    python bench/residency.py --device GPU-… --checkpoint /tmp/a --checkpoint /tmp/b --budget-mib 16384

Each model is loaded once, which makes its snapshot. Then clients attach one after the other, or two
at a time, map all segments, compare samples of the bytes with those after the load, and leave. On a
GPU (--device GPU-…) and cpuN alike, segments of that size come from a loader without vLLM: what is
counted and timed is the daemon, which attaches found their model resident, and what the others
waited for. With --vllm, or --checkpoint, vLLM loads random checkpoints, or those, on a GPU.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import click
import xxhash

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.attach import rss_of_tree  # noqa: E402
from bench.checkpoints import llama_config, write_checkpoint_apart  # noqa: E402
from tests.fakes import checkpoints as small  # noqa: E402
from tests.fakes.daemon import LOADER, DaemonProcess, until, write_manifest  # noqa: E402
from weightcached.index.key import WeightCacheKey  # noqa: E402
from weightcached.index.tensors import read_index  # noqa: E402
from weightcached.segments.api import Backend, open_backend  # noqa: E402
from weightcached.system.fds import OwnedFd  # noqa: E402
from weightcached.system.paths import is_host_device  # noqa: E402
from weightcached.wire.messages import (  # noqa: E402
    Attach,
    Done,
    Evict,
    Loading,
    Progress,
    Ready,
    Reload,
    Verify,
)

MIB = 1 << 20
LOAD_TIMEOUT_S = 600.0
# Compared at the begin of each segment after every attach.
SAMPLE_BYTES = 1 * MIB


class Model(NamedTuple):
    """One model after its load: the key by which engines ask, and samples of its bytes."""

    name: str
    key: WeightCacheKey
    samples: list[bytes]
    nbytes: int


class Attached(NamedTuple):
    """One attach. outcome: hit, restored, loaded, refused or wrong bytes."""

    model: str
    outcome: str
    seconds: float


class Bench:
    """The daemon, its models, and the attaches."""

    def __init__(
        self, device: str, work: Path, paths: list[Path], nbytes: int, budget: int, seed: int,
        *, by_vllm: bool,
    ) -> None:  # fmt: skip
        self.device = device
        self.by_vllm = by_vllm
        self.nbytes = nbytes
        self.backend: Backend = open_backend(device)
        self.daemon = DaemonProcess(work, device=device)
        self._mapping = threading.Lock()
        # Each writer is a process of its own, which mostly starts.
        with ThreadPoolExecutor(3) as pool:
            entries = list(
                pool.map(lambda n: self._entry(paths[n], n, seed + n), range(len(paths)))
            )
        write_manifest(
            self.daemon.manifest, entries, snapshots={"dir": str(work / "snapshots")}, budget=budget
        )

    def _entry(self, directory: Path, number: int, seed: int) -> dict[str, Any]:
        engine: dict[str, Any] = {"model": str(directory)}
        if not self.by_vllm:
            small.write_checkpoint(directory, seed=seed)
            self.daemon.loader_command = LOADER.replace("loader_child", "large_loader")
            engine |= {
                "x_tensors": 96,
                "x_nbytes": self.nbytes * 3 // 2,
                "x_segment_nbytes": 512 * MIB,
                "x_seed": seed,
            }
        else:
            self.daemon.loader_command = None
            if not (directory / "config.json").exists():
                write_checkpoint_apart(directory, _config_of(self.nbytes), seed=seed, device="cuda")
            engine |= {"max_model_len": 4096}
        return {
            "name": f"model{number}",
            "devices": [self.device],
            "engine": engine,
            "resident": "on-demand",
        }

    def load(self, name: str) -> Model:
        """Have a model loaded once and its snapshot written."""
        with self.daemon.client("ctl") as tool:
            tool.sock.settimeout(LOAD_TIMEOUT_S)
            reply = tool.ask(Reload(caches=[name]))
            while isinstance(reply, Progress):
                reply = tool.receive()
            ready = tool.expect(Verify(cache=f"{name}/target"), Ready)
            handout = tool.take(ready)
        index, _ = read_index(handout.index_fd)
        handout.index_fd.close()
        samples = self._samples(handout.segment_fds, ready)
        until(
            lambda: all(
                c.snapshot != "writing" and (not c.generation or c.snapshot == "written")
                for c in self.daemon.status().caches
            ),
            f"the snapshot of {name}",
            bound_s=LOAD_TIMEOUT_S,
        )
        return Model(name, index.key, samples, ready.nbytes)

    def _samples(self, fds: list[OwnedFd], ready: Ready) -> list[bytes]:
        mapping = self.backend.map(fds, ready.segment_nbytes)
        try:
            return [
                xxhash.xxh3_128_digest(mapping.read(n, 0, min(SAMPLE_BYTES, nbytes)))
                for n, nbytes in enumerate(ready.segment_nbytes)
            ]
        finally:
            mapping.close()

    def attach(self, model: Model, hold_s: float) -> Attached:
        """Attach as an engine does, map everything, and leave after `hold_s`."""
        began_s = time.monotonic()
        phases: set[str] = set()
        with self.daemon.client() as engine:
            engine.sock.settimeout(LOAD_TIMEOUT_S)
            reply = engine.ask(Attach(key=model.key))
            while isinstance(reply, Loading):
                phases.add(reply.phase)
                reply = engine.receive()
            if not isinstance(reply, Ready):
                return Attached(model.name, "refused", time.monotonic() - began_s)
            handout = engine.take(reply)
            handout.index_fd.close()
            # A context of the driver belongs to the process, not to the thread.
            with self._mapping:
                samples = self._samples(handout.segment_fds, reply)
            took_s = time.monotonic() - began_s
            time.sleep(hold_s)
        if samples != model.samples:
            return Attached(model.name, "wrong bytes", took_s)
        if not phases:
            return Attached(model.name, "hit", took_s)
        return Attached(model.name, "restored" if self._was_restored(model) else "loaded", took_s)

    def _was_restored(self, model: Model) -> bool:
        caches = self.daemon.status().caches
        return any(c.name == f"{model.name}/target" and c.source == "restored" for c in caches)

    def evictions(self, models: list[Model]) -> list[float]:
        """Seconds to evict each model that is resident, by hand."""
        seconds: list[float] = []
        for model in models:
            with self.daemon.client("ctl") as tool:
                states = {c.name: c.state for c in self.daemon.status().caches}
                if states[f"{model.name}/target"] == "ready":
                    began_s = time.monotonic()
                    tool.expect(Evict(cache=f"{model.name}/target"), Done)
                    seconds.append(time.monotonic() - began_s)
        return seconds


def _config_of(nbytes: int) -> dict[str, Any]:
    """A Llama-shaped model of about so many bytes of bf16."""
    hidden, vocab, intermediate = 2048, 32000, 5632
    layer = 2 * (2 * hidden * hidden + 2 * hidden * 1024 + 3 * hidden * intermediate)
    layers = max(1, (nbytes - 4 * hidden * vocab) // layer)
    return llama_config(
        hidden=hidden, intermediate=intermediate, layers=layers, heads=16, kv_heads=8, vocab=vocab,
        dtype="bfloat16", tied=False,
    )  # fmt: skip


def trace(models: list[Model], count: int, exponent: float, seed: int) -> list[Model]:
    """`count` models, the n-th of them as often as 1/n**exponent."""
    weights = [1 / (n + 1) ** exponent for n in range(len(models))]
    return random.Random(seed).choices(models, weights, k=count)


def figures_of(attached: list[Attached], models: list[Model]) -> dict[str, Any]:
    """The table's rows, and what is over all."""
    rows = []
    for model in models:
        mine = [a for a in attached if a.model == model.name]
        waited = [a.seconds for a in mine if a.outcome == "restored"]
        counts = Counter(a.outcome for a in mine)
        rows.append(
            {
                "model": model.name,
                "MiB": round(model.nbytes / MIB),
                "attaches": len(mine),
                **{name: counts[name] for name in ("hit", "restored", "loaded", "refused")},
                "hit, median ms": _median([a.seconds for a in mine if a.outcome == "hit"], 1e3),
                "restored, median s": _median(waited, 1),
                "restored, longest s": round(max(waited), 3) if waited else None,
            }
        )
    total = Counter(a.outcome for a in attached)
    restored = [a.seconds for a in attached if a.outcome == "restored"]
    return {
        "rows": rows,
        "attaches": len(attached),
        "outcomes": dict(total),
        "hits": round(total["hit"] / len(attached), 3),
        "restored: attach to mapped, median s": _median(restored, 1),
        "restored: attach to mapped, longest s": round(max(restored), 3) if restored else None,
    }


def _median(values: list[float], factor: float) -> float | None:
    return round(statistics.median(values) * factor, 3) if values else None


def show(figures: dict[str, Any]) -> None:
    """The table in Markdown, then the rest."""
    rows = figures.pop("rows")
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join("" if v is None else str(v) for v in row.values()) + " |")
    for name, value in figures.items():
        print(f"{name:45} {value}")
    figures["rows"] = rows


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--device", default="cpu0", show_default=True)
@click.option("--models", default=6, show_default=True)
@click.option("--mib", default=3072, show_default=True, help="Weights of each model.")
@click.option("--budget-mib", default=10240, show_default=True)
@click.option("--attaches", default=60, show_default=True)
@click.option("--clients", default=1, show_default=True, help="Attached at the same time.")
@click.option("--hold-s", default=0.05, show_default=True, help="How long each stays.")
@click.option("--exponent", default=1.0, show_default=True, help="Of the Zipf distribution.")
@click.option("--seed", default=1, show_default=True)
@click.option(
    "--checkpoint", "checkpoints", type=click.Path(path_type=Path), multiple=True,
    help="A model on the GPU, instead of random ones. May be given several times.",
)  # fmt: skip
@click.option("--vllm", "by_vllm", is_flag=True, help="Load by vLLM, on a GPU.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=None)
def main(
    device: str, models: int, mib: int, budget_mib: int, attaches: int, clients: int, hold_s: float, exponent: float,
    seed: int, checkpoints: tuple[Path, ...], by_vllm: bool, json_path: Path | None,
) -> None:  # fmt: skip
    # A time limit ends the daemon too, and what was measured so far is written.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    work = Path(tempfile.mkdtemp(prefix="wcr-"))
    paths = list(checkpoints) or [work / f"model{n}" for n in range(models)]
    by_vllm = by_vllm or bool(checkpoints)
    if by_vllm and is_host_device(device):
        raise click.UsageError("--vllm and --checkpoint need a GPU: --device GPU-…")
    bench = Bench(device, work, paths, mib * MIB, budget_mib * MIB, seed, by_vllm=by_vllm)
    figures: dict[str, Any] = {}
    loaded: list[Model] = []
    attached: list[Attached] = []
    try:
        bench.daemon.start()
        for n in range(len(paths)):
            loaded.append(bench.load(f"model{n}"))
            print(f"model{n} loaded, its snapshot written", flush=True)
        wanted = trace(loaded, attaches, exponent, seed)
        with ThreadPoolExecutor(clients) as pool:
            for each in pool.map(lambda model: bench.attach(model, hold_s), wanted):
                attached.append(each)
        figures = figures_of(attached, loaded)
        counters = bench.daemon.status().counters
        assert counters
        figures["restores by the daemon, mean s"] = round(
            sum(counters.restore_seconds.values()) / max(1, sum(counters.restores.values())), 3
        )
        figures["evictions"] = sum(counters.evictions.values())
        figures["evicting one, longest s"] = round(max(bench.evictions(loaded), default=0.0), 4)
        figures["daemon RSS, MiB"] = round(rss_of_tree(bench.daemon.pid) / MIB, 1)
    finally:
        bench.daemon.close()
        if attached:
            figures = figures_of(attached, loaded) | figures
            show(figures)
        if json_path is not None:
            json_path.write_text(json.dumps(figures | {"loaded": len(loaded)}, indent=1))
        shutil.rmtree(work, ignore_errors=True)
    if set(figures.get("outcomes", {"": 0})) - {"hit", "restored"}:
        raise SystemExit("not all were served from the cache or its snapshots")


if __name__ == "__main__":
    main()
