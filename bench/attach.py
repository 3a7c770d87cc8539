"""Disk, vLLM's own preload and weightcached side by side, in one run, on one model, on one GPU.

    python bench/attach.py --work /tmp/bench --json attach.json

Load phases are measured by the same wrapper for all three (probe/weightcached_probe.py).
bench/README.md explains the figures and keeps the latest table.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pynvml  # noqa: E402

from bench import harness  # noqa: E402
from bench.checkpoints import llama_config, write_checkpoint_apart  # noqa: E402
from weightcached.system.gpus import list_gpus, visible_gpus  # noqa: E402

PROMPTS, TOKENS = 8, 64
SAMPLE_INTERVAL_S = 0.05
PRELOAD_TIMEOUT_S = 600.0
SETTLE_S = 1.0
SIZES = {
    "small": {
        "hidden": 2048,
        "intermediate": 5632,
        "layers": 16,
        "heads": 16,
        "kv_heads": 8,
        "vocab": 32000,
    },
    "8b": {
        "hidden": 4096,
        "intermediate": 14336,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "vocab": 128256,
    },
    "32b": {
        "hidden": 5120,
        "intermediate": 27648,
        "layers": 64,
        "heads": 40,
        "kv_heads": 8,
        "vocab": 152064,
    },
}
# vLLM's own loader for ipc_cache: our plug-in stays away, the probe measures.
# The engine core in the process that asks, so that engines one after the other share its imports.
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
PEER_ENVIRONMENT = {"VLLM_PLUGINS": "weightcached_probe"}


class Memory:
    """Used bytes of one GPU, as NVML reports them, and their peak while sampling."""

    def __init__(self, uuid: str) -> None:
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def used(self) -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    @contextlib.contextmanager
    def peak(self) -> Iterator[Callable[[], int]]:
        """Sample during the block; yields a function that returns the peak."""
        highest = self.used()
        stop = threading.Event()

        def sample() -> None:
            nonlocal highest
            while not stop.wait(SAMPLE_INTERVAL_S):
                highest = max(highest, self.used())

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            yield lambda: highest
        finally:
            stop.set()
            thread.join()


def rss_of_tree(pid: int) -> int:
    """Resident bytes of a process and all below it."""
    total = 0
    with contextlib.suppress(FileNotFoundError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmRSS:"):
                total += int(line.split()[1]) * 1024
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split():
            total += rss_of_tree(int(child))
    return total


@click.command()
@click.option("--size", type=click.Choice(sorted(SIZES)), default="8b", show_default=True)
@click.option("--model", default=None, help="Use this checkpoint instead of a random one.")
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    default=Path("/tmp/weightcached-bench"),
    show_default=True,
)
@click.option(
    "--runs", default=5, show_default=True, help="Engine starts for each of the two caches."
)
@click.option("--disk-runs", default=2, show_default=True)
@click.option(
    "--utilization", default=0.5, show_default=True, help="gpu_memory_utilization of every engine."
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path),
    default=None,
    help="Write all figures there.",
)
@click.option("--quick", is_flag=True, help="Do not kill the peer and wait for its second load.")
@click.option(
    "--warm-up/--no-warm-up",
    default=True,
    show_default=True,
    help="Start one engine first, unmeasured.",
)
@click.option("--skip-peer", is_flag=True, help="Leave vLLM's preload out.")
def main(
    size: str, model: str | None, work: Path, runs: int, disk_runs: int, utilization: float, json_path: Path | None,
    quick: bool, warm_up: bool, skip_peer: bool,
) -> None:  # fmt: skip
    """Measure loads from disk, from vLLM's preload and from weightcached."""
    # A time limit ends unit and engines too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not harness.manager_answers():
        sys.exit(harness.again_in_private_manager())
    work.mkdir(parents=True, exist_ok=True)
    if model is None:
        model = str(work / f"model-{size}")
        if not Path(model, "config.json").exists():
            config = llama_config(**SIZES[size], dtype="bfloat16", tied=False)
            write_checkpoint_apart(Path(model), config, shards=8, device="cuda")
    bench = Bench(model, work, utilization)
    bench.warm_page_cache()
    if warm_up:
        # All three find the results of a first start that vLLM keeps: compiled kernels and facts
        # about the model.
        bench.start("warm-up", "auto").close()
    results: dict[str, Any] = {"machine": machine(), "model": model, "utilization": utilization}
    phases: dict[str, Callable[[], dict[str, Any]]] = {
        "weightcached": lambda: bench.weightcached(runs),
        "preload": lambda: bench.preload(runs, again=not quick),
        "disk": lambda: bench.disk(disk_runs),
    }
    for name, phase in phases.items():
        if name == "preload" and skip_peer:
            continue
        click.echo(f"measuring {name}", err=True)
        try:
            results[name] = phase()
        except Exception as e:
            # The others are worth their time.
            results.setdefault("errors", {})[name] = f"{type(e).__name__}: {e}"[:2000]
            click.echo(f"{name} failed: {e}", err=True)
        results["tokens_equal"] = bench.tokens_equal()
        if json_path:
            # After each phase: a run that is cut off keeps its figures so far.
            json_path.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if "weightcached" in results:
        print_table(results)
    sys.exit(0 if results["tokens_equal"] and "errors" not in results else 1)


class Bench:
    """One model on the machine's first GPU."""

    def __init__(self, model: str, work: Path, utilization: float) -> None:
        self.model = model
        self.work = work
        self.uuid = visible_gpus(list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))[0]
        self.memory = Memory(self.uuid)
        self.engine = {
            "gpu_memory_utilization": utilization,
            "enforce_eager": True,
            "max_model_len": 4096,
        }
        self._tokens: dict[str, Any] = {}

    def warm_page_cache(self) -> None:
        for file in Path(self.model).glob("*.safetensors"):
            with open(file, "rb") as data:
                while data.read(1 << 26):
                    pass

    def tokens_equal(self) -> bool:
        return len({json.dumps(tokens) for tokens in self._tokens.values()}) == 1

    def start(
        self, name: str, load_format: str, environment: dict[str, str] | None = None, **engine: Any
    ) -> harness.Engine:
        """One engine in a process of its own; its tokens are kept for the comparison."""
        started = harness.Engine(
            self.model, load_format, self.engine | engine, self.work / f"engine-{name}.log", prompts=PROMPTS,
            tokens=TOKENS, environment=IN_PROCESS | (environment or {}),
        )  # fmt: skip
        self._tokens[name] = started.first["tokens"]
        return started

    def measure(
        self, name: str, runs: int, started: harness.Engine, load_format: str, **engine: Any
    ) -> dict[str, Any]:
        """Figures of the engine that runs, and of `runs` - 1 more in the same process."""
        figures: dict[str, Any] = {
            "load_s": [], "load_minus_build_s": [], "worker_load_s": [], "worker_load_minus_build_s": [],
            "kv_blocks": started.first["kv_blocks"],
        }  # fmt: skip
        for run in range(runs):
            if run:
                started.renew(load_format, self.engine | engine)
                self._tokens[f"{name}-{run}"] = started.first["tokens"]
            figures["load_s"].append(started.load_seconds)
            figures["load_minus_build_s"].append(started.load_seconds - started.build_seconds)
            figures["worker_load_s"].append(started.worker_seconds)
            figures["worker_load_minus_build_s"].append(
                started.worker_seconds - started.build_seconds
            )
            figures["loader"] = started.first["loads"][-1]["loader"]
        return figures

    def disk(self, runs: int) -> dict[str, Any]:
        with self.start("disk", "auto", PEER_ENVIRONMENT) as started:
            first_s = started.first["start_seconds"]
            return {"first_token_s": first_s} | self.measure("disk", runs, started, "auto")

    def preload(self, runs: int, *, again: bool) -> dict[str, Any]:
        """`again`: kill it too, and wait for its second load."""
        before = self.memory.used()
        sockets = self.work / "preload-sockets"
        sockets.mkdir(mode=0o700, exist_ok=True)
        began = time.monotonic()
        with self.memory.peak() as peak:
            daemon = self._start_preload(sockets)
            ready_s = time.monotonic() - began
        figures: dict[str, Any] = {"ready_s": ready_s, "peak_bytes": peak() - before}
        try:
            time.sleep(SETTLE_S)
            figures["held_bytes"] = self.memory.used() - before
            figures["rss_bytes"] = rss_of_tree(daemon.pid)
            options = {"socket_dir": str(sockets), "fallback": False}
            with self.start(
                "preload", "ipc_cache", PEER_ENVIRONMENT, model_loader_extra_config=options
            ) as started:
                figures["first_token_s"] = started.first["start_seconds"]
                figures |= self.measure(
                    "preload", runs, started, "ipc_cache", model_loader_extra_config=options
                )
            if not again:
                return figures
            for child in (
                Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children")
                .read_text(encoding="utf-8")
                .split()
            ):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
            began = time.monotonic()
            daemon.kill()
            daemon.wait()
            self._wait_until_free(before)
            daemon = self._start_preload(sockets)
            figures["ready_after_kill_s"] = time.monotonic() - began
        finally:
            daemon.terminate()
            daemon.wait()
            self._wait_until_free(before)
        return figures

    def _start_preload(self, sockets: Path) -> subprocess.Popen[str]:
        command = [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "preload", "--model", self.model,
            "--skip-tokenizer-init", "--weight-cache-socket-dir", str(sockets),
        ]  # fmt: skip
        env = harness.ENGINE_ENVIRONMENT | dict(os.environ) | PEER_ENVIRONMENT
        log = self.work / "preload.log"
        with open(log, "w", encoding="utf-8") as out:
            daemon = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, text=True, env=env
            )
        deadline = time.monotonic() + PRELOAD_TIMEOUT_S
        # Its launcher says so once every rank listens.
        while "Weight cache daemon READY" not in log.read_text(encoding="utf-8", errors="replace"):
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(
                    f"vllm preload did not come up: {log.read_text(encoding='utf-8')[-3000:]}"
                )
            time.sleep(0.02)
        return daemon

    def _wait_until_free(self, nbytes: int) -> None:
        deadline = time.monotonic() + 30.0
        while self.memory.used() > nbytes + (64 << 20) and time.monotonic() < deadline:
            time.sleep(SAMPLE_INTERVAL_S)

    def weightcached(self, runs: int) -> dict[str, Any]:
        before = self.memory.used()
        with harness.unit(self.uuid, self.work, self.model, {}) as unit:
            with self.memory.peak() as peak:
                ready_s = unit.start()
            time.sleep(SETTLE_S)
            index = unit.index()
            figures: dict[str, Any] = {
                "ready_s": ready_s,
                "peak_bytes": peak() - before,
                "weight_bytes": sum(storage.nbytes for storage in index.storages),
                "held_bytes": self.memory.used() - before,
                "rss_bytes": rss_of_tree(unit.pid),
                "tensors": len(index.tensors),
                "phases_s": index.load.phases,
            }
            options = {"socket_dir": str(unit.socket_dir), "fallback": False}
            with self.start(
                "weightcached", "ipc_cache", model_loader_extra_config=options
            ) as started:
                figures["first_token_s"] = started.first["start_seconds"]
                figures |= self.measure(
                    "weightcached", runs, started, "ipc_cache", model_loader_extra_config=options
                )
                figures |= self._crash(unit, started, options)
        self._wait_until_free(before)
        figures["left_bytes_after_stop"] = self.memory.used() - before
        return figures

    def _crash(
        self, unit: harness.Unit, serving: harness.Engine, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Kill the daemon under a serving engine: 200 requests, the rejoin, the next attach."""
        expected = serving.first["tokens"]
        killed_at, ready_s = unit.kill()
        same = all(serving.again() == expected for _ in range(200 // PROMPTS))
        rejoined = [engine.pid for cache in unit.status().caches for engine in cache.engines]
        read = unit.bytes_read_since(killed_at)
        serving.renew("ipc_cache", self.engine | {"model_loader_extra_config": options})
        self._tokens["adopted"] = serving.first["tokens"]
        return {
            "ready_after_kill_s": ready_s,
            "checkpoint_bytes_after_kill": read,
            "requests_after_kill": 200,
            "requests_after_kill_equal": same,
            "rejoined": len(rejoined) == 1,
            "load_after_adoption_s": serving.load_seconds,
        }


def machine() -> dict[str, str]:
    """GPU, driver, versions and date."""
    import torch
    import vllm

    return {
        "gpu": torch.cuda.get_device_name(0),
        "driver": str(pynvml.nvmlSystemGetDriverVersion()) if _initialised() else "",
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "kernel": os.uname().release,
        "cores": str(os.cpu_count()),
        "date": time.strftime("%Y-%m-%d"),
    }


def _initialised() -> bool:
    pynvml.nvmlInit()
    return True


def print_table(results: dict[str, Any]) -> None:
    """All figures, and each one's ratio to the two others."""
    columns = [name for name in ("disk", "preload", "weightcached") if name in results]
    click.echo(json.dumps(results["machine"]))
    click.echo(
        f"{'':<44}"
        + "".join(f"{name:>16}" for name in columns)
        + f"{'of preload':>12}{'of disk':>10}"
    )
    gib, mib = 1 << 30, 1 << 20
    weights = results["weightcached"]["weight_bytes"]
    rows: list[tuple[str, Callable[[dict[str, Any]], float]]] = [
        ("load phase, median of the runs, s", lambda r: statistics.median(r["load_s"])),
        ("load phase, slowest run, s", lambda r: max(r["load_s"])),
        (
            "load phase minus meta build, median, s",
            lambda r: statistics.median(r["load_minus_build_s"]),
        ),
        ("load_model() of the worker, median, s", lambda r: statistics.median(r["worker_load_s"])),
        ("load_model() of the worker, slowest run, s", lambda r: max(r["worker_load_s"])),
        (
            "the same minus meta build, median, s",
            lambda r: statistics.median(r["worker_load_minus_build_s"]),
        ),
        (
            "the same minus meta build, slowest run, s",
            lambda r: max(r["worker_load_minus_build_s"]),
        ),
        ("process start to first tokens, s", lambda r: r["first_token_s"]),
        ("KV blocks", lambda r: r["kv_blocks"]),
        ("daemon start to ready, s", lambda r: r["ready_s"]),
        ("ready again after kill -9, s", lambda r: r["ready_after_kill_s"]),
        ("GPU memory beside the weights, MiB", lambda r: (r["held_bytes"] - weights) / mib),
        ("peak GPU memory while loading, GiB", lambda r: r["peak_bytes"] / gib),
        ("daemon RSS, MiB", lambda r: r["rss_bytes"] / mib),
    ]
    for label, value in rows:
        cells: dict[str, float] = {}
        for name in columns:
            with contextlib.suppress(KeyError):
                cells[name] = value(results[name])
        line = "".join(
            f"{cells[name]:>16.3f}" if name in cells else f"{'-':>16}" for name in columns
        )
        click.echo(f"{label:<44}{line}{_ratio(cells, 'preload'):>12}{_ratio(cells, 'disk'):>10}")
    ours = results["weightcached"]
    for figure in (
        "tensors", "checkpoint_bytes_after_kill", "requests_after_kill_equal", "rejoined", "load_after_adoption_s",
        "left_bytes_after_stop", "phases_s",
    ):  # fmt: skip
        click.echo(f"{figure}: {ours.get(figure)}")
    click.echo(
        f"tokens equal ({PROMPTS} prompts x {TOKENS}): {'yes' if results['tokens_equal'] else 'no'}"
    )


def _ratio(cells: dict[str, float], other: str) -> str:
    if other not in cells or "weightcached" not in cells or not cells[other]:
        return "-"
    return f"{cells['weightcached'] / cells[other]:.2f}"


if __name__ == "__main__":
    main()
