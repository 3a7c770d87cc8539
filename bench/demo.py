"""The demo: a tiny model, a unit, an engine from disk and two attached ones, with a crash of the daemon in between.

Prints one table and ends with status 1 if any engine decoded other tokens. Uses the user manager that answers, with a
unit of its own in the runtime directory, or starts a private one; nothing is installed and nothing stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.checkpoints import llama_config, write_checkpoint  # noqa: E402
from weightcached import index as index_format  # noqa: E402
from weightcached.devices import list_gpus  # noqa: E402
from weightcached.errors import WeightcachedError  # noqa: E402
from weightcached.install import source  # noqa: E402
from weightcached.paths import socket_path  # noqa: E402
from weightcached.wire.client import Connection  # noqa: E402
from weightcached.wire.fds import close_all, read_sealed  # noqa: E402
from weightcached.wire.messages import Ready, Status, StatusReply, Verify  # noqa: E402

WORK = ROOT / ".demo"
CACHE = "demo/target"
START_TIMEOUT_S = 300.0
ENGINE_TIMEOUT_S = 600.0
ADOPT_TIMEOUT_S = 60.0
_POLL_S = 0.02


class Round(NamedTuple):
    """One engine: how it got its weights, what it decoded, and what the daemon read for it."""

    name: str
    load_seconds: float
    checkpoint_bytes: int | None
    tokens: list[list[int]]


@click.command()
@click.option("--hidden", default=512, show_default=True, help="Width of the model.")
@click.option("--layers", default=8, show_default=True)
@click.option("--keep", is_flag=True, help="Keep .demo, with the checkpoint and the logs.")
def main(hidden: int, layers: int, keep: bool) -> None:
    """Show disk, attach, and attach after a crash, side by side."""
    if not _manager_answers():
        sys.exit(_again_in_private_manager())
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir()
    config = llama_config(
        hidden=hidden, intermediate=3 * hidden, layers=layers, heads=8, kv_heads=4, vocab=8192, dtype="bfloat16", tied=False
    )  # fmt: skip
    nbytes = write_checkpoint(WORK / "model", config, shards=3)
    click.echo(f"model: {nbytes / 2**20:.0f} MiB in 3 shards, random weights")
    try:
        rounds = _run()
    except (subprocess.CalledProcessError, WeightcachedError, TimeoutError) as e:
        click.echo(f"the demo failed: {e}; logs are in {WORK}", err=True)
        sys.exit(1)
    equal = all(r.tokens == rounds[0].tokens for r in rounds)
    _print_table(rounds, equal)
    if equal and not keep:
        shutil.rmtree(WORK)
    sys.exit(0 if equal else 1)


def _manager_answers() -> bool:
    done = subprocess.run(["systemctl", "--user", "list-units"], capture_output=True, check=False)
    return done.returncode == 0


def _again_in_private_manager() -> int:
    if "WEIGHTCACHED_DEMO_INSIDE" in os.environ:
        click.echo("the private user manager does not answer: see tests/systemd/manager.py", err=True)
        return 1
    click.echo("no user manager answers: starting a private one for the time of the demo")
    command = [sys.executable, str(ROOT / "tests/systemd/manager.py"), "run", "--", sys.executable, *sys.argv]
    return subprocess.run(command, env=os.environ | {"WEIGHTCACHED_DEMO_INSIDE": "1"}, check=False).returncode


def _run() -> list[Round]:
    device = _device()
    with _unit(device) as unit:
        began = time.monotonic()
        _systemctl("start", unit, timeout_s=START_TIMEOUT_S)
        click.echo(f"unit {unit}: ready after {time.monotonic() - began:.1f} s")
        disk = _round("disk", "auto", None)
        read = _bytes_read_since(device, 0.0)
        with _engine("attach", "ipc_cache") as engine:
            attached = _answer(engine)
            crashed_at = time.time()
            pid = int(_systemctl("show", "--value", "-p", "MainPID", unit))
            os.kill(pid, signal.SIGKILL)
            adopted = _wait_for_adoption(device, pid)
            click.echo(f"daemon killed while the engine serves; served again after {adopted - crashed_at:.2f} s")
            after_crash = _next_answer(engine)["tokens"]
        if after_crash != attached["tokens"]:
            raise WeightcachedError("the running engine decoded other tokens after the daemon was killed")
        again = _round("attach after the crash", "ipc_cache", _bytes_read_since(device, crashed_at))
        return [disk, Round("attach", _seconds(attached), read, attached["tokens"]), again]


def _device() -> str:
    gpus = list_gpus()
    return gpus[0].uuid if gpus else "cpu0"


@contextlib.contextmanager
def _unit(device: str) -> Iterator[str]:
    """The product's unit under a name of its own, with the demo's manifest and sockets."""
    directory = Path(os.environ["XDG_RUNTIME_DIR"]) / "systemd/user"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "weightcached-demo@.service"
    manifest = WORK / "manifest.yaml"
    entry = {"name": "demo", "devices": [device], "engine": {"model": str(WORK / "model"), "max_model_len": 512}}
    manifest.write_text(json.dumps({"version": 1, "models": [entry]}), encoding="utf-8")
    command = f"{sys.executable} -m weightcached serve %i --manifest {manifest} --socket-dir {_socket_dir()}"
    text = source("weightcached@.service").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith(("ExecReload=", "PartOf="))]
    lines = [f"ExecStart={command}" if line.startswith("ExecStart=") else line for line in lines]
    at = lines.index("[Service]") + 1
    lines[at:at] = [
        f"StandardError=append:{WORK / 'daemon.log'}",
        f"Environment=PYTHONPATH={os.environ.get('PYTHONPATH', '')}:{ROOT} HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    unit = f"weightcached-demo@{device}.service"
    _systemctl("daemon-reload")
    try:
        yield unit
    finally:
        subprocess.run(["systemctl", "--user", "stop", unit], check=False)
        path.unlink()
        subprocess.run(["systemctl", "--user", "daemon-reload"], check=False)


def _socket_dir() -> Path:
    directory = Path(os.environ["XDG_RUNTIME_DIR"]) / "weightcached-demo"
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def _systemctl(*arguments: str, timeout_s: float = 60.0) -> str:
    done = subprocess.run(
        ["systemctl", "--user", *arguments], check=True, stdout=subprocess.PIPE, text=True, timeout=timeout_s
    )
    return done.stdout.strip()


@contextlib.contextmanager
def _engine(name: str, load_format: str) -> Iterator[subprocess.Popen[str]]:
    """A serving engine in a process of its own."""
    options: dict[str, Any] = {"enforce_eager": True}
    if load_format == "ipc_cache":
        options["model_loader_extra_config"] = {"socket_dir": str(_socket_dir()), "fallback": False}
    command = [
        sys.executable, str(ROOT / "bench/generate.py"), str(WORK / "model"), "--serve", "--load-format", load_format,
        "--engine", json.dumps(options),
    ]  # fmt: skip
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"} | os.environ
    with open(WORK / f"engine-{name.replace(' ', '-')}.log", "w", encoding="utf-8") as log:
        engine = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
        try:
            yield engine
        finally:
            assert engine.stdin is not None
            engine.stdin.close()
            try:
                engine.wait(ENGINE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                engine.kill()


def _answer(engine: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line of the engine that is JSON; vLLM's own lines pass by."""
    out: IO[str] | None = engine.stdout
    assert out is not None
    for line in out:
        if line.startswith("{"):
            answer: dict[str, Any] = json.loads(line)
            return answer
    raise WeightcachedError(f"the engine ended with status {engine.wait()}")


def _next_answer(engine: subprocess.Popen[str]) -> dict[str, Any]:
    assert engine.stdin is not None
    engine.stdin.write("\n")
    engine.stdin.flush()
    return _answer(engine)


def _round(name: str, load_format: str, checkpoint_bytes: int | None) -> Round:
    with _engine(name, load_format) as engine:
        answer = _answer(engine)
    return Round(name, _seconds(answer), checkpoint_bytes, answer["tokens"])


def _seconds(answer: dict[str, Any]) -> float:
    return max(float(load["load_seconds"]) for load in answer["loads"])


def _wait_for_adoption(device: str, killed_pid: int) -> float:
    deadline = time.monotonic() + ADOPT_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(WeightcachedError), _connect(device) as connection:
            status = connection.request(Status(), 5.0)
            if isinstance(status, StatusReply) and status.pid != killed_pid:
                caches = {cache.name: cache for cache in status.caches}
                if caches[CACHE].state == "ready":
                    return time.time()
        time.sleep(_POLL_S)
    raise TimeoutError(f"the daemon of {device} did not serve again within {ADOPT_TIMEOUT_S:.0f} s")


def _connect(device: str) -> Connection:
    return Connection.connect(socket_path(device, _socket_dir()), timeout_s=5.0, purpose="ctl")


def _bytes_read_since(device: str, since: float) -> int:
    """Checkpoint bytes that the loader counted for what is served, if it was loaded after `since` (epoch seconds)."""
    with _connect(device) as connection:
        ready = connection.request(Verify(cache=CACHE), 10.0)
        if not isinstance(ready, Ready):
            raise WeightcachedError(f"{CACHE} is not ready: {ready}")
        fds = connection.receive_descriptors(ready.descriptors, 10.0)
        try:
            data = read_sealed(fds[0].fileno(), max_nbytes=index_format.MAX_INDEX_BYTES)
        finally:
            close_all(fds)
    load = index_format.decode(data).load
    return load.checkpoint_bytes if load.finished_at > since else 0


def _print_table(rounds: list[Round], equal: bool) -> None:
    click.echo()
    click.echo(f"{'weights from':<24}{'load phase':>12}{'checkpoint bytes read by the daemon':>38}")
    for r in rounds:
        read = "-" if r.checkpoint_bytes is None else f"{r.checkpoint_bytes:,}"
        click.echo(f"{r.name:<24}{r.load_seconds:>10.3f} s{read:>38}")
    click.echo(f"tokens equal: {'yes' if equal else 'no'}")


if __name__ == "__main__":
    main()
