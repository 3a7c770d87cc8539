"""The first five minutes, recorded: from `pip install` to an engine that has attached, in a home directory
that is empty at the beginning.

The four commands of the README, run as they are printed: with a service manager of its own, a tiny
model, and no network. Paths below the home directory are shown with `~`. Ends with status 1 unless
the engine maps the weights and answers.

    make steps     # docs/first-steps.txt, and the picture from it
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.checkpoints import llama_config, write_checkpoint  # noqa: E402
from bench.engine import Process, free_ports, until  # noqa: E402
from bench.harness import ENGINE_ENVIRONMENT  # noqa: E402
from tests.package import copy_tree, environment_with_vllm  # noqa: E402
from tests.systemd.manager import PrivateManager  # noqa: E402
from weightcached.system.gpus import list_gpus  # noqa: E402

COMMANDS = (
    "pip install .",
    "weightcachectl install",
    "weightcachectl add ~/models/tiny --start --enforce-eager",
    "vllm serve ~/models/tiny --enforce-eager --load-format ipc_cache",
)
# Nothing is held to these times: the machine may be busy.
START_TIMEOUT_S = 900.0
COMMAND_TIMEOUT_S = 900.0
# The index is this environment, which has what the package needs. pip reads the second as: no isolation.
_PIP = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_QUIET": "1"}
# vLLM's command of this environment. That of the CPU build asks for the version of a package named vllm, and ends.
_VLLM = """\
#!/bin/sh
exec python -m vllm.entrypoints.cli.main "$@"
"""
_VLLM_OF_CPU_BUILD = """\
#!/bin/sh
shift; model=$1; shift
exec python -m vllm.entrypoints.openai.api_server --model "$model" "$@"
"""
WORDS = [f"w{number}" for number in range(1024)]


class Shell:
    """Runs commands in the home directory and shows them as a terminal would."""

    def __init__(self, home: Path, env: dict[str, str]) -> None:
        self.home, self.env = home, env
        self.directory = home

    def shown(self, text: str) -> str:
        return text.replace(str(self.home), "~")

    def run(self, command: str) -> str:
        """Show and run a command; its output. Ends this process if the command fails."""
        click.secho(f"$ {command}", bold=True)
        done = subprocess.run(
            ["/bin/sh", "-c", command], cwd=self.directory, env=self.env, text=True,
            capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False,
        )  # fmt: skip
        click.echo(self.shown(done.stdout), nl=False)
        if done.returncode:
            fail(f"{done.stderr}\n{command} ended with status {done.returncode}")
        return done.stdout


def fail(text: str) -> NoReturn:
    """End with the text on standard error."""
    click.echo(text, err=True)
    sys.exit(1)


@click.command()
def main() -> None:
    """Run the four commands and show what they say."""
    base = Path(tempfile.mkdtemp(prefix="wc-first-", dir="/tmp"))
    try:
        home = base / "home"
        home.mkdir()
        commands = environment_with_vllm(base / "venv")
        (commands / "vllm").write_text(_VLLM if list_gpus() else _VLLM_OF_CPU_BUILD)
        (commands / "vllm").chmod(0o755)
        environment = ENGINE_ENVIRONMENT | {
            "PATH": f"{home}/.local/bin:{commands}:{os.environ['PATH']}", "SHELL": "/bin/bash",
            # A shell's own: the tree that is installed is a copy.
            "PYTHONPATH": "",
        }  # fmt: skip
        with PrivateManager(environment, home=home) as manager:
            _first_steps(Shell(home, manager.env), copy_tree(base / "weightcached"), base)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _first_steps(shell: Shell, tree: Path, base: Path) -> None:
    write_model(shell.home / "models/tiny")
    shell.directory, shell.env = tree, shell.env | _PIP
    shell.run(COMMANDS[0])
    shell.directory = shell.home
    shell.run(COMMANDS[1])
    printed = shell.run(COMMANDS[2]).splitlines()[-1].strip()
    if shell.shown(printed) != COMMANDS[3]:
        fail(f"the line that attaches is {shell.shown(printed)!r}, expected {COMMANDS[3]!r}")
    click.secho(f"$ {COMMANDS[3]}", bold=True)
    # The port is the machine's matter: others may have 8000.
    port = free_ports(1)
    words = [*shlex.split(printed), "--port", str(port)]
    elsewhere = ["/usr/bin/env", f"--chdir={shell.home}"]
    engine = Process([*elsewhere, *words], base / "engine.log", **shell.env)
    try:
        until(
            _serving(engine, port), "an engine that serves", timeout_s=START_TIMEOUT_S, poll_s=0.2
        )
        (line,) = re.findall(r"\] (attached .*)", engine.log.read_text(errors="replace"))
        click.echo(line)
        if not _words_of(port, shell.home / "models/tiny"):
            fail("the engine has no words")
        status = shell.run("weightcachectl status")
        if "1 " not in status.splitlines()[1]:
            fail("no engine maps the weights")
    finally:
        engine.end()
        subprocess.run(
            ["systemctl", "--user", "stop", "weightcached@*"], env=shell.env, check=False, timeout=60
        )  # fmt: skip


def write_model(path: Path) -> None:
    """A tiny Llama with random weights and a word for each token."""
    config = llama_config(
        hidden=256, intermediate=512, layers=4, heads=8, kv_heads=4, vocab=len(WORDS), dtype="bfloat16", tied=False,
    )  # fmt: skip
    write_checkpoint(path, config, shards=1)
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    files: dict[str, dict[str, Any]] = {
        "tokenizer.json": {
            "version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "added_tokens": [],
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": WORDS[0]},
        },
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": WORDS[0]},
    }  # fmt: skip
    for name, content in files.items():
        (path / name).write_text(json.dumps(content), encoding="utf-8")


def _serving(engine: Process, port: int) -> Callable[[], bool]:
    def answers() -> bool:
        if engine.process.poll() is not None:
            fail(f"the engine ended:\n{engine.tail()}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    return answers


def _words_of(port: int, model: Path) -> str:
    """What the engine says after some words."""
    body = {"model": str(model), "prompt": " ".join(WORDS[5:13]), "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )  # fmt: skip
    with urllib.request.urlopen(request, timeout=START_TIMEOUT_S) as reply:
        return str(json.load(reply)["choices"][0]["text"]).strip()


if __name__ == "__main__":
    main()
