"""The steps for a GPU: options that their programs know, the order of steps, their ends."""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from bench import all_gpu
from bench.all_gpu import TABLE, Step

STEPS = msgspec.yaml.decode(TABLE.read_bytes(), type=list[Step])
PROGRAM = re.compile(r"^\{python\} bench/(\w+)\.py ")


def test_programs_know_their_options() -> None:
    checked = 0
    for step in STEPS:
        words = shlex.split(step.command.format(python="{python}", out="/o", models="/m", gpu="G"))
        if not (found := PROGRAM.match(step.command)):
            continue
        command: click.Command = importlib.import_module(f"bench.{found[1]}").main
        # Reads the options and checks their values; runs nothing.
        command.make_context(step.name, words[2:])
        checked += 1
    assert checked >= 12


def test_each_step_writes_the_figures_that_are_collected() -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in STEPS:
        if "--json" in step.command:
            assert f"--json {{out}}/{step.name}.json" in step.command
        assert step.seconds < step.limit_s


def test_the_readme_lists_the_steps() -> None:
    text = (TABLE.parent / "README.md").read_text(encoding="utf-8")
    rows = [tuple(cell.strip() for cell in row.split("|")[1:5]) for row in text.splitlines()]
    for step in STEPS:
        assert (f"`{step.name}`", str(step.gpus or "all"), str(step.seconds), step.fills) in rows


def step(name: str, script: str, *, seconds: int = 5, limit_s: int = 600, gpus: int = 1) -> Step:
    command = f"{{python}} -c {shlex.quote(script)} {{out}}"
    return Step(name, command, seconds, limit_s, name, gpus)


def drive(out: Path, *steps: Step, gpus: str = "x,y") -> None:
    table = out / "table"
    table.write_bytes(msgspec.yaml.encode(list(steps)))
    all_gpu.drive(list(steps), out, gpus.split(","), ["--table", str(table)])


def done(out: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / f"{name}.done").read_text())
    return found


# Waits for the others of a step's GPUs: it ends only if they run at the same time.
MEET = """
import os, sys, time
out, gpu = sys.argv[1], os.environ["CUDA_VISIBLE_DEVICES"]
open(f"{out}/at-{gpu}", "w")
while len([n for n in os.listdir(out) if n.startswith("at-")]) < 2: time.sleep(0.01)
"""
ALONE = """
import os, sys
print(os.environ["CUDA_VISIBLE_DEVICES"], sorted(n for n in os.listdir(sys.argv[1]) if n.endswith(".done")))
"""


def test_steps_of_one_gpu_run_side_by_side_and_those_of_two_alone(tmp_path: Path) -> None:
    drive(
        tmp_path,
        step("a", MEET),
        step("b", MEET),
        step("both", ALONE, gpus=2),
        step("all", ALONE, gpus=0),
    )
    assert [done(tmp_path, name)["status"] for name in ("a", "b", "both", "all")] == [0] * 4
    assert {done(tmp_path, name)["gpus"][0] for name in "ab"} == {"x", "y"}
    assert (tmp_path / "both.log").read_text() == "x,y ['a.done', 'b.done']\n"
    assert (tmp_path / "all.log").read_text() == "x,y ['a.done', 'b.done', 'both.done']\n"


def test_a_short_step_overtakes_one_that_waits_for_both(tmp_path: Path) -> None:
    wait = "import os, sys, time\nwhile not os.path.exists(sys.argv[1] + '/short.done'): time.sleep(0.01)"
    drive(
        tmp_path,
        step("long", wait, seconds=100_000),
        step("both", ALONE, gpus=2),
        step("too-long", ALONE, seconds=200_000),
        step("short", ALONE),
    )
    assert "'short.done'" in (tmp_path / "both.log").read_text()
    assert "too-long" not in (tmp_path / "both.log").read_text()
    assert done(tmp_path, "too-long")["status"] == 0


def test_a_step_that_fails_or_hangs_ends_with_all_that_it_started(tmp_path: Path) -> None:
    # A daemon of the step holds a lock; it has a session of its own and no parent any more.
    hang = """
import fcntl, os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        held = open(sys.argv[1] + "/held", "w")
        fcntl.flock(held, fcntl.LOCK_EX)
        open(sys.argv[1] + "/holds", "w")
        time.sleep(600)
    os._exit(0)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
while not os.path.exists(sys.argv[1] + "/holds"): time.sleep(0.01)
print("figures so far", flush=True)
time.sleep(600)
"""
    drive(
        tmp_path, step("fails", "raise SystemExit(7)"), step("hangs", hang, limit_s=2), step("last", "print(1)"),
        gpus="x",
    )  # fmt: skip
    assert done(tmp_path, "fails")["status"] == 7
    assert done(tmp_path, "last")["status"] == 0
    assert done(tmp_path, "hangs")["status"] in (3, -15)
    if (tmp_path / "holds").exists():
        with open(tmp_path / "held") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_driver_goes_on_after_its_command_and_is_met_again(tmp_path: Path) -> None:
    gate = "import os, sys, time\nwhile not os.path.exists(sys.argv[1] + '/gate'): time.sleep(0.01)"
    table = tmp_path / "table"
    table.write_bytes(
        msgspec.yaml.encode(
            [step("gated", gate), step("last", "print(1)"), step("two", "", gpus=2)]
        )
    )
    command = f"{sys.executable} {all_gpu.__file__} --out {tmp_path} --table {table} --gpus x"

    def asked(*more: str) -> str:
        with os.popen(shlex.join([*shlex.split(command), *more])) as output:
            return output.read()

    told = asked("--wait", "0")
    assert told.endswith("not all done: run this command again\n")
    assert not re.search(r"^two ", told, re.MULTILINE)
    (tmp_path / "gate").touch()
    told = asked()
    assert re.search(r"^gated +status 0 after \d+ s", told, re.MULTILINE), told
    assert told.endswith("all done\n")
    assert (tmp_path / "figures.tar.gz").stat().st_size
    (tmp_path / "last.log").write_text("kept")
    assert asked().endswith("all done\n")
    assert (tmp_path / "last.log").read_text() == "kept"
    asked("--only", "last", "--again")
    assert (tmp_path / "last.log").read_text() == "1\n"
