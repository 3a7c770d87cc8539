"""The demo, in two acts: an engine from disk and two attached ones, with a crash of the daemon in
between; then two engines behind one port, and a crash of the one that serves.

Prints a table for each and ends with status 1 if any engine decoded other tokens. Uses the user manager
that answers, with a unit of its own in the runtime directory, or starts a private one; nothing is
installed and nothing stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import harness  # noqa: E402
from bench.checkpoints import llama_config, write_checkpoint  # noqa: E402
from bench.engine import Clients, Process, complete, free_ports, until  # noqa: E402
from weightcached.errors import WeightcachedError  # noqa: E402
from weightcached.system.gpus import list_gpus  # noqa: E402
from weightcached.wire.services import ask_all_services  # noqa: E402

WORK = ROOT / ".demo"
SAY_PERIOD_S = 15.0
# Nothing is held to it: the machine may be busy.
ENGINES_TIMEOUT_S = 900.0


class Takeover(NamedTuple):
    """The clients' view of the serving engine's death."""

    seconds: float
    refused: int
    lost: int
    equal: bool


class Round(NamedTuple):
    """One engine: the source of its weights, its tokens, and the bytes that the daemon read for it."""

    name: str
    load_seconds: float
    checkpoint_bytes: int | None
    tokens: list[list[int]]


@click.command()
@click.option("--hidden", default=512, show_default=True, help="Width of the model.")
@click.option("--layers", default=8, show_default=True)
@click.option("--keep", is_flag=True, help="Keep .demo, with the checkpoint and the logs.")
def main(hidden: int, layers: int, keep: bool) -> None:
    """Show disk, attach, and attach after a crash, side by side; then a takeover."""
    if not harness.manager_answers():
        click.echo("no user manager answers: starting a private one for the time of the demo")
        sys.exit(harness.again_in_private_manager())
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir()
    config = llama_config(
        hidden=hidden, intermediate=3 * hidden, layers=layers, heads=8, kv_heads=4, vocab=8192, dtype="bfloat16",
        tied=False,
    )  # fmt: skip
    nbytes = write_checkpoint(WORK / "model", config, shards=3)
    click.echo(f"model: {nbytes / 2**20:.0f} MiB in 3 shards, random weights")
    try:
        rounds, takeover = _run(str(WORK / "model"))
    except (subprocess.SubprocessError, WeightcachedError, TimeoutError) as e:
        click.echo(f"the demo failed: {e}; logs are in {WORK}", err=True)
        sys.exit(1)
    equal = all(r.tokens == rounds[0].tokens for r in rounds)
    _print_table(rounds, equal)
    _print_takeover(takeover)
    equal = equal and takeover.equal
    if equal and not keep:
        shutil.rmtree(WORK)
    sys.exit(0 if equal else 1)


def _run(model: str) -> tuple[list[Round], Takeover]:
    gpus = list_gpus()
    device = gpus[0].uuid if gpus else "cpu0"
    with harness.unit(device, WORK, model, {"max_model_len": 512}) as unit:
        with _step(f"unit {unit.name} loads the model"):
            unit.start()
        with _engine("disk", model, "auto", unit) as engine:
            disk = Round("disk", engine.load_seconds, None, engine.first["tokens"])
        with _engine("attach", model, "ipc_cache", unit) as engine:
            attach = Round(
                "attach", engine.load_seconds, unit.bytes_read_since(0.0), engine.first["tokens"]
            )
            crashed_at, seconds = unit.kill()
            click.echo(f"daemon killed while the engine serves; served again after {seconds:.2f} s")
            if engine.again() != attach.tokens:
                raise WeightcachedError(
                    "the running engine decoded other tokens after the daemon was killed"
                )
        with _engine("attach after the crash", model, "ipc_cache", unit) as engine:
            read = unit.bytes_read_since(crashed_at)
            again = Round(
                "attach after the crash", engine.load_seconds, read, engine.first["tokens"]
            )
        takeover = _take_over(model, device, unit)
    return [disk, attach, again], takeover


def _take_over(model: str, device: str, unit: harness.Unit) -> Takeover:
    """Two engines behind one port; SIGKILL of the one that serves, while a client asks."""
    port = free_ports(1)
    arguments = {"enforce_eager": True, "skip_tokenizer_init": True, "served_model_name": ["bench"]}
    document = {
        "version": 1,
        "models": [
            {"name": "bench", "devices": [device], "engine": {"model": model, "max_model_len": 512}}
        ],
        "engines": [
            {
                "name": "demo",
                "model": "bench",
                "listen": f"127.0.0.1:{port}",
                "arguments": arguments,
            }
        ],
    }
    manifest = WORK / "service.yaml"
    manifest.write_text(json.dumps(document), encoding="utf-8")
    command = [sys.executable, "-m", "weightcached", "engine", "demo", "--manifest", str(manifest)]
    service = Process(
        [*command, "--socket-dir", str(unit.socket_dir)], WORK / "service.log",
        # On a CPU vLLM binds every engine to the same core, where one that serves starves another.
        VLLM_CPU_OMP_THREADS_BIND="nobind",
    )  # fmt: skip
    try:
        with _step("engine service starts two engines"):
            status = _two_engines(service, unit)
        click.echo(f"engine 1 serves on port {port}, engine 2 is parked")
        tokens = complete(port, tokens=16)
        with Clients(port) as clients:
            at = time.time()
            os.kill(status["pid"], signal.SIGKILL)
            seconds = clients.first_after(at)
            equal = complete(port, tokens=16) == tokens
        click.echo(f"engine 1 killed; engine 2 answered after {seconds:.2f} s")
    finally:
        with _step("engine service ends"):
            service.end()
    return Takeover(seconds, len(clients.refused), len(clients.failed), equal)


def _two_engines(service: Process, unit: harness.Unit) -> dict[str, Any]:
    """Wait until one serves and one is parked; the service's status."""

    def there() -> dict[str, Any] | None:
        if service.process.poll() is not None:
            raise WeightcachedError(f"the engine service ended:\n{service.tail()}")
        (status,) = ask_all_services(unit.socket_dir).replies or [{"engines": []}]
        states = sorted(engine["state"] for engine in status["engines"])
        return status if states == ["parked", "serving"] else None

    found: dict[str, Any] = until(there, "two engines", timeout_s=ENGINES_TIMEOUT_S, poll_s=0.2)
    return found


@contextlib.contextmanager
def _step(what: str) -> Iterator[None]:
    """Print the current step and its duration, again and again."""
    began_s, over = time.monotonic(), threading.Event()

    def say_again() -> None:
        while not over.wait(SAY_PERIOD_S):
            click.echo(f"  … {time.monotonic() - began_s:.0f} s")

    click.echo(what)
    thread = threading.Thread(target=say_again, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    click.echo(f"  done after {time.monotonic() - began_s:.1f} s")


@contextlib.contextmanager
def _engine(
    name: str, model: str, load_format: str, unit: harness.Unit
) -> Iterator[harness.Engine]:
    options: dict[str, Any] = {"enforce_eager": True, "max_model_len": 512}
    if load_format == "ipc_cache":
        options["model_loader_extra_config"] = {
            "socket_dir": str(unit.socket_dir),
            "fallback": False,
        }
    log = WORK / f"{name.replace(' ', '-')}.log"
    with _step(f"engine, weights from {name}: starts and decodes"):
        engine = harness.Engine(model, load_format, options, log)
    try:
        yield engine
    finally:
        with _step("engine ends"):
            engine.close()


def _print_table(rounds: list[Round], equal: bool) -> None:
    click.echo()
    click.echo(f"{'weights from':<24}{'load phase':>12}{'checkpoint bytes read by the daemon':>38}")
    for r in rounds:
        read = "-" if r.checkpoint_bytes is None else f"{r.checkpoint_bytes:,}"
        click.echo(f"{r.name:<24}{r.load_seconds:>10.3f} s{read:>38}")
    click.echo(f"tokens equal: {'yes' if equal else 'no'}")


def _print_takeover(takeover: Takeover) -> None:
    click.echo()
    click.echo(f"{'serving engine killed':<44}")
    click.echo(f"{'to the next answer, same port':<44}{takeover.seconds:>8.2f} s")
    click.echo(f"{'connections refused':<44}{takeover.refused:>10}")
    click.echo(f"{'requests lost (those under way)':<44}{takeover.lost:>10}")
    click.echo(f"tokens equal: {'yes' if takeover.equal else 'no'}")


if __name__ == "__main__":
    main()
