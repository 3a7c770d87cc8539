"""Are engines slower to start beside the child that makes the full digest? Starts of both kinds, in turn.

The digest runs again and again, over all files of the checkpoint, for as long as the engine starts:
more than it ever does beside a daemon, which makes it once. With `--load-format ipc_cache` a daemon
must serve the model, or --preload starts one.

    python bench/beside_digest.py --model /models/llama-8b --preload --runs 5 --json digest.json
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.engine import DAEMON_TIMEOUT_S, Process, until, workplace
from weightcached.checkpoint.identity import record_checkpoint

START = """
import json, os, sys, time
if __name__ == "__main__":
    began = time.monotonic()
    from vllm import LLM
    imported = time.monotonic()
    LLM(**json.loads(sys.argv[1]))
    print("SECONDS", time.monotonic() - imported, time.monotonic() - began, flush=True)
    os._exit(0)
"""
# In one process: killed with its end, an engine core of its own would hold the GPU's memory beyond it.
IN_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
START_TIMEOUT_S = 240.0
# Digests that were kept would not be made again.
WITHOUT_CACHE = {"XDG_CACHE_HOME": "/proc/nowhere"}


@contextmanager
def digesting(model: str) -> Iterator[list[float]]:
    """Make digests, one after the other, during the block; the seconds that each took."""
    job = msgspec.json.encode(record_checkpoint(model))
    command = [sys.executable, "-m", "weightcached.checkpoint.identity", "full", "--idle"]
    took: list[float] = []
    children: list[subprocess.Popen[bytes]] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            began = time.monotonic()
            # As the daemon starts it.
            child = subprocess.Popen(
                command, env=os.environ | WITHOUT_CACHE, stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            children[:] = [child]
            child.communicate(job)
            if child.returncode == 0:
                took.append(time.monotonic() - began)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield took
    finally:
        stop.set()
        for child in children:
            child.kill()
        thread.join()


def start(engine: dict[str, Any]) -> tuple[float, float]:
    """(seconds without imports, seconds in all) of one engine start."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(START)
        script.flush()
        done = subprocess.run(
            [sys.executable, script.name, json.dumps(engine)],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | IN_PROCESS,
            timeout=START_TIMEOUT_S,
        )
    for line in done.stdout.splitlines():
        if line.startswith("SECONDS "):
            _, engine_s, all_s = line.split()
            return float(engine_s), float(all_s)
    raise SystemExit(done.stderr[-3000:])


@contextmanager
def preloaded(model: str) -> Iterator[dict[str, Any]]:
    """A daemon that serves the model; engine arguments that attach to it."""
    with workplace(keep=False) as work:
        command = [sys.executable, "-m", "weightcached", "preload", "--model", model]
        command += ["--weight-cache-socket-dir", str(work / "run"), "--skip-tokenizer-init"]
        daemon = Process(command, work / "daemon.log")

        def serves() -> bool:
            if daemon.process.poll() is not None:
                raise click.ClickException(f"the daemon ended:\n{daemon.tail()}")
            return "READY" in daemon.log.read_text(errors="replace")

        try:
            until(serves, "the daemon serves", timeout_s=DAEMON_TIMEOUT_S, poll_s=0.2)
            options = {"socket_dir": str(work / "run"), "fallback": False}
            yield {"load_format": "ipc_cache", "model_loader_extra_config": options}
        finally:
            daemon.end()


@click.command()
@click.option("--model", required=True, help="A directory, or a Hub id in the local cache.")
@click.option("--digest", help="Make the digests of this model instead.")
@click.option("--load-format", default="ipc_cache", show_default=True)
@click.option("--engine", default="{}", help="More engine arguments, as JSON.")
@click.option("--preload", is_flag=True, help="Start a daemon for the time of this run.")
@click.option("--runs", default=5, show_default=True, help="Starts of each kind.")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write the figures here.")
def main(
    model: str, digest: str | None, load_format: str, engine: str, preload: bool, runs: int, out: Path | None
) -> None:  # fmt: skip
    # A time limit ends what was started too, and the figures so far are written.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments = {"model": model, "load_format": load_format, "skip_tokenizer_init": True}
    arguments |= json.loads(engine)
    figures: dict[str, list[tuple[float, float]]] = {"alone": [], "beside": []}
    digests: list[float] = []
    try:
        with ExitStack() as stack:
            if preload:
                arguments |= stack.enter_context(preloaded(model))
            start(arguments)  # compiled code, page cache
            for _ in range(runs):
                figures["alone"].append(start(arguments))
                with digesting(digest or model) as took:
                    figures["beside"].append(start(arguments))
                digests += took
    finally:
        if out is not None:
            out.write_text(json.dumps({"figures": figures, "digests": digests}))
    click.echo(f"{'':8} {'start':>8} {'with imports':>13}   (medians, seconds, of {runs})")
    for kind, pairs in figures.items():
        engine_s, all_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        click.echo(f"{kind:8} {engine_s:8.2f} {all_s:13.2f}")
    click.echo(
        f"digests made meanwhile: {len(digests)}, {statistics.mean(digests or [0]):.2f} s each"
    )


if __name__ == "__main__":
    main()
