"""The programs that need a GPU, one after the other on every GPU of the machine: figures in one folder.

    python bench/all_gpu.py --out /tmp/figures --wait 570    # again and again, until it says "all done"
    python bench/all_gpu.py --out /tmp/figures --only swap,sleep --again
    python bench/all_gpu.py --list

The steps are in gpu_steps.yaml. A driver in the background, in a session of its own, runs them in
their order, each on a GPU that is free, those of two GPUs once both are. This command waits for it,
and says how far it is. A step that fails, or takes longer than its limit, does not keep the others
from running. Each leaves NAME.json, NAME.log and NAME.done in the folder; figures.tar.gz has all.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import click
import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.fakes.daemon import PYTHONPATH, tree_of  # noqa: E402
from weightcached.system.gpus import list_gpus, visible_gpus  # noqa: E402
from weightcached.system.process import become_subreaper  # noqa: E402

TABLE = ROOT / "bench/gpu_steps.yaml"
# Requests that hang end after a minute.
GRACE_S = 90.0
FREED_TIMEOUT_S = 20.0


class Step(msgspec.Struct, frozen=True):
    """One command. gpus: 0 takes all that there are; seconds: expected; fills: the figures."""

    name: str
    command: str
    seconds: int
    limit_s: int
    fills: str
    gpus: int = 1


def run_one(step: Step, out: Path, gpus: list[str], models: Path) -> None:
    """One step, then the end of all that it has started."""
    # Its daemons and engines have sessions of their own; orphaned they become our children.
    become_subreaper()
    began_s = time.monotonic()
    words = {"python": sys.executable, "out": out, "models": models, "gpu": gpus[0]}
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus), "PYTHONPATH": PYTHONPATH}
    with open(out / f"{step.name}.log", "wb") as log:
        process = subprocess.Popen(
            shlex.split(step.command.format(**words)), cwd=ROOT, stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, env=env | {"PYTHONUNBUFFERED": "1"}, start_new_session=True,
        )  # fmt: skip
    for limit_s, end in ((step.limit_s, process.terminate), (GRACE_S, process.kill)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limit_s)
            break
        end()
    status = process.wait()
    deadline_s = time.monotonic() + FREED_TIMEOUT_S
    while (left := tree_of(os.getpid())) and time.monotonic() < deadline_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)
    # The driver frees a killed process's memory a little later.
    while time.monotonic() < deadline_s and any(
        gpu.uuid in gpus and gpu.free_bytes < 0.98 * gpu.total_bytes for gpu in list_gpus()
    ):
        time.sleep(0.3)
    done = {"status": status, "seconds": round(time.monotonic() - began_s), "gpus": gpus}
    (out / f"{step.name}.done").write_text(json.dumps(done))


def drive(steps: list[Step], out: Path, gpus: list[str], options: list[str]) -> None:
    """All steps, as many at a time as there are GPUs. options: of this program, for each."""
    waiting = list(steps)
    running: list[tuple[Step, list[str], subprocess.Popen[bytes], float]] = []
    while waiting or running:
        running = [each for each in running if each[2].poll() is None]
        free = [gpu for gpu in gpus if all(gpu not in taken for _, taken, _, _ in running)]
        now_s = time.monotonic()
        left_s = max((began_s + step.seconds - now_s for step, _, _, began_s in running), default=0)
        for step in waiting:
            wanted = step.gpus or len(gpus)
            # A step that waits for several GPUs is overtaken by those alone that end before it can begin.
            if len(free) >= wanted and (step is waiting[0] or step.seconds <= left_s):
                command = [sys.executable, __file__, "--one", step.name, "--out", str(out)]
                process = subprocess.Popen([*command, "--gpus", ",".join(free[:wanted]), *options])
                running.append((step, free[:wanted], process, now_s))
                waiting.remove(step)
                print(f"{time.strftime('%H:%M:%S')} {step.name} on {free[:wanted]}", flush=True)
                break
        else:
            time.sleep(0.2)


def start_driver(steps: list[Step], out: Path, gpus: list[str], options: list[str]) -> None:
    """Run the steps in a process that outlives this one, unless one runs already."""
    lock = locked(out)
    if lock is None:
        return
    for step in steps:
        for kind in ("done", "log", "json"):
            (out / f"{step.name}.{kind}").unlink(missing_ok=True)
    if os.fork() == 0:
        try:
            os.setsid()
            with open(out / "driver.log", "ab") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            drive(steps, out, gpus, options)
        finally:
            # It held the lock.
            os._exit(0)
    os.close(lock)


def locked(out: Path) -> int | None:
    """The folder's lock; None if a driver has it."""
    fd = os.open(out / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def wait_for_driver(out: Path, until_s: float) -> None:
    """Return once no driver runs, or at the time."""
    while (lock := locked(out)) is None and time.monotonic() < until_s:
        time.sleep(0.5)
    if lock is not None:
        os.close(lock)


def report(steps: list[Step], out: Path) -> None:
    """Print how far each step is, and pack the folder."""
    for step in steps:
        done: dict[str, Any] | None = None
        with contextlib.suppress(OSError, ValueError):
            done = json.loads((out / f"{step.name}.done").read_text())
        how = "runs" if (out / f"{step.name}.log").exists() else "waits"
        if done is not None:
            how = f"status {done['status']} after {done['seconds']} s"
        print(f"{step.name:14} {how:24} expected {step.seconds:4} s   {step.fills}")
        if how == "runs":
            last = (out / f"{step.name}.log").read_text(errors="replace").splitlines()[-3:]
            print("".join(f"    {line[:200]}\n" for line in last), end="")
    with tarfile.open(out / "figures.tar.gz", "w:gz") as tar:
        for path in sorted(out.rglob("*")):
            if path.suffix in (".json", ".log", ".done") and "models" not in path.parts:
                tar.add(path, path.relative_to(out))


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default="/tmp/figures", show_default=True)
@click.option(
    "--models", type=click.Path(path_type=Path), help="Of the checkpoints.  [default: below --out]"
)
@click.option("--only", default="", help="These steps, by name, in this order.")
@click.option("--again", is_flag=True, help="Also those that have run.")
@click.option("--wait", "wait_s", default=86400.0, help="Return after so many seconds.")
@click.option("--list", "listed", is_flag=True, help="Print the steps as a table in Markdown.")
@click.option("--table", type=click.Path(path_type=Path), default=TABLE, help="Other steps.")
@click.option("--gpus", default="", help="UUIDs.  [default: those of CUDA_VISIBLE_DEVICES, or all]")
@click.option("--one", hidden=True)
def main(
    out: Path, models: Path | None, only: str, again: bool, wait_s: float, listed: bool, table: Path, gpus: str,
    one: str | None,
) -> None:  # fmt: skip
    """Run the steps of the table, or go on with them."""
    until_s = time.monotonic() + wait_s
    every = msgspec.yaml.decode(table.read_bytes(), type=list[Step])
    if listed:
        for step in every:
            cells = (step.name, step.gpus or "all", step.seconds, step.fills, f"`{step.command}`")
            print("| " + " | ".join(map(str, cells)) + " |")
        return
    by_name = {step.name: step for step in every}
    models = models or out / "models"
    if one is not None:
        run_one(by_name[one], out, gpus.split(","), models)
        return
    uuids = [gpu for gpu in gpus.split(",") if gpu]
    uuids = uuids or visible_gpus(list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    steps = [by_name[name] for name in only.split(",")] if only else every
    steps = [step for step in steps if step.gpus <= len(uuids)]
    out.mkdir(parents=True, exist_ok=True)
    models.mkdir(parents=True, exist_ok=True)
    wait_for_driver(out, until_s)
    todo = [step for step in steps if again or not (out / f"{step.name}.done").exists()]
    if todo:
        start_driver(todo, out, uuids, ["--table", str(table), "--models", str(models)])
        wait_for_driver(out, until_s)
    report(steps, out)
    done = all((out / f"{step.name}.done").exists() for step in steps)
    print("all done" if done else "not all done: run this command again")


if __name__ == "__main__":
    main()
