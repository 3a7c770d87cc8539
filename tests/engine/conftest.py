"""Fixtures of the end-to-end tests: real vLLM on the CPU, the product's unit, a real user manager."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from bench.checkpoints import llama_config, write_checkpoint
from tests.fakes.daemon import end_tree
from tests.systemd.manager import PrivateManager
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Counters, Status, StatusReply

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
# For what must happen, and takes as long as the machine is busy. Nothing is held to these times.
ANSWER_TIMEOUT_S = 900.0
READY_TIMEOUT_S = 300.0
# Of one test, with what its fixtures start: above those, so that the one that waits says for what.
TEST_TIMEOUT_S = 3 * ANSWER_TIMEOUT_S
PYTHONPATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": PYTHONPATH,
    "PATH": f"{BIN}:{os.environ['PATH']}",
    # Models as small as these are faster with one thread; two wait for each other on a busy machine.
    "OMP_NUM_THREADS": "1",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            # It starts engines, or imports vLLM.
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))
    # Lanes take whole files, and end together if the last ones are short.
    items.sort(key=lambda item: (*LONGEST, item.path.stem).index(item.path.stem))


# What takes minutes, the longest first.
LONGEST = (
    "test_end_to_end", "test_engine_service", "test_drafts", "test_live", "test_memory",
    "test_checkpoints", "test_groups", "test_real_loaders", "test_layouts", "test_quantized",
    "test_first_steps", "test_residency", "test_sleep", "test_key", "test_preload_engines",
    "test_solo_ranks", "test_tuning",
)  # fmt: skip


class Engines:
    """The host process of engines (host.py, or what else `command` runs), in a session of its own.

    One that ended fails the test that asks it, and only that one: the next finds another in its
    place. `log()` returns the output of vLLM and the plug-in since the last call.
    """

    def __init__(
        self,
        env: dict[str, str],
        log_path: Path,
        command: Sequence[str] = (sys.executable, "-m", "tests.engine.host"),
    ) -> None:
        self._env, self._log_path, self._command = env, log_path, command
        self._seen = 0
        self._asked = 0
        log_path.unlink(missing_ok=True)
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        with open(self._log_path, "a", encoding="utf-8") as log:
            return subprocess.Popen(
                self._command, env=self._env, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, start_new_session=True,
            )  # fmt: skip

    def ask(self, **command: Any) -> dict[str, Any]:
        self.send(**command)
        return self.answer()

    def send(self, **command: Any) -> None:
        """Ask, and leave the answer for answer()."""
        assert self.process.stdin is not None
        self._asked += 1
        try:
            self.process.stdin.write(json.dumps(command | {"number": self._asked}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self._replace()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            if not line.startswith("ANSWER "):
                self._replace()
            answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
            # A test that ran out of time left its answer behind.
            if answer.pop("number") == self._asked:
                return answer

    def _replace(self) -> NoReturn:
        """Start another host instead of one that ended. Raises AssertionError."""
        self._kill_session()
        status = self._end()
        said = self.log()[-3000:]
        self.process = self._start()
        raise AssertionError(f"the engine host ended with status {status}: {said}") from None

    def _end(self) -> int:
        """Wait until the process ends, as it does when its input does."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        # What could not be written is written again here.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(ANSWER_TIMEOUT_S)

    def tokens(
        self,
        model: Path,
        load_format: str = "auto",
        *,
        loader: dict[str, Any] | None = None,
        **engine: Any,
    ) -> Any:
        """Start an engine and return its tokens."""
        if loader is not None:
            engine["model_loader_extra_config"] = loader
        answer = self.ask(engine={"model": str(model), "load_format": load_format, **engine})
        assert "tokens" in answer, answer.get("error")
        return answer["tokens"]

    def log(self) -> str:
        text = self._log_path.read_text(encoding="utf-8")
        new, self._seen = text[self._seen :], len(text)
        return new

    def plugin_log(self) -> list[str]:
        """The plug-in's own lines since the last call, without time and file."""
        lines = (
            line
            for line in self.log().splitlines()
            if "[ipc_loader.py:" in line or "[client.py:" in line
        )
        return [line.split("] ", 1)[1] for line in lines]

    def need_operator(self, name: str) -> None:
        """Skip the test if this machine's vLLM lacks the operator: its library differs by
        processor.
        """
        if not self.ask(operator=name)["there"]:
            pytest.skip(f"vLLM has no operator _C.{name} for this processor")

    def close(self) -> None:
        try:
            self._end()
        finally:
            self._kill_session()

    def _kill_session(self) -> None:
        """Workers of its engine would keep cores, memory and ports."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Service:
    """The product's units under the private manager, as `weightcachectl install` wrote them."""

    def __init__(self, manager: PrivateManager) -> None:
        self.manager = manager
        self.env = manager.env | ENVIRONMENT
        self.ctl("install")

    def manifest(self, *models: dict[str, Any], **keys: Any) -> None:
        path = self.manager.config_dir / "weightcached/manifest.yaml"
        document = {"version": 1, "models": list(models), **keys}
        path.write_text(json.dumps(document), encoding="utf-8")

    def ctl(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [BIN / "weightcachectl", *arguments], env=self.env, capture_output=True, text=True, check=False,
            timeout=ANSWER_TIMEOUT_S,
        )  # fmt: skip
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def caches(self, device: str) -> list[dict[str, Any]]:
        devices = json.loads(self.ctl("status", "--json").stdout)["devices"]
        found: list[dict[str, Any]] = next(d["caches"] for d in devices if d["device"] == device)
        return found

    def counters(self, device: str) -> Counters:
        """The counts of the device's daemon since it started."""
        socket = self.manager.runtime_dir / f"weightcached/{device}.sock"
        with Connection.connect(socket, timeout_s=READY_TIMEOUT_S, purpose="ctl") as connection:
            reply = connection.request(Status(), READY_TIMEOUT_S)
        assert isinstance(reply, StatusReply)
        assert reply.counters
        return reply.counters

    def pid(self, device: str) -> int:
        return int(self.manager.show(f"weightcached@{device}.service", "MainPID"))

    def kill(self, device: str) -> None:
        """SIGKILL the daemon and wait until its successor serves."""
        pid = self.pid(device)
        os.kill(pid, signal.SIGKILL)
        self.until_ready(device, other_than=pid)

    def until_ready(self, device: str, *, other_than: int = 0) -> None:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            status = self.ctl("status", "--json", check=False)
            devices = json.loads(status.stdout)["devices"] if status.returncode == 0 else []
            mine = [d for d in devices if d["device"] == device and d["pid"] != other_than]
            if mine and all(cache["state"] == "ready" for cache in mine[0]["caches"]):
                return
            time.sleep(0.1)
        raise AssertionError(f"{device} did not become ready: {status.stdout}{status.stderr}")


def run_tree(
    command: Sequence[str | Path],
    env: dict[str, str],
    *,
    stdin: str = "",
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> subprocess.CompletedProcess[str]:
    """Run a command that starts processes of its own, in this tree; its output and theirs.

    However this ends, none is left: they would take the cores from the tests that follow.
    """
    process = subprocess.Popen(
        command, env=env, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    with process:
        try:
            output, errors = process.communicate(stdin, timeout=timeout_s)
        finally:
            end_tree(process)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def answers_of_ranks(
    module: str, argument: str, question: str, base: Path, environments: Sequence[dict[str, str]]
) -> list[Any]:
    """Ask one process for each rank, `python -m tests.engine.MODULE RANK ARGUMENT`; their answers,
    by rank.

    environments: variables of each besides the tests' own; logs go to `base`.
    """
    ranks = range(len(environments))
    with contextlib.ExitStack() as stack:
        children = []
        for rank, more in zip(ranks, environments, strict=True):
            log = stack.enter_context(open(base / f"log{rank}", "wb"))
            child = subprocess.Popen(
                [sys.executable, "-m", f"tests.engine.{module}", str(rank), argument], cwd=ROOT, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, text=True,
                env=os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": "1"} | more,
            )  # fmt: skip
            stack.callback(child.wait)
            stack.callback(child.kill)
            children.append(child)
            assert child.stdin
            child.stdin.write(question)
            child.stdin.close()
            child.stdin = None
        answers = [child.communicate(timeout=ANSWER_TIMEOUT_S)[0] for child in children]
    said = [(base / f"log{rank}").read_text()[-2000:] for rank in ranks]
    assert [child.returncode for child in children] == [0 for _ in ranks], "\n".join(said)
    return [json.loads(answer) for answer in answers]


def checkpoint(path: Path, *, tied: bool, dtype: str, seed: int = 0, shards: int = 3) -> Path:
    """A small Llama-shaped checkpoint whose larger tensors go to shared segments."""
    config = llama_config(
        hidden=256,
        intermediate=512,
        layers=4,
        heads=8,
        kv_heads=4,
        vocab=1024,
        dtype=dtype,
        tied=tied,
    )
    write_checkpoint(path, config, shards=shards, seed=seed)
    return path


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoints of all tests by name. `tuned`: a fine-tune of `untied`, with equal headers."""
    base = tmp_path_factory.mktemp("models")
    return {
        "untied": checkpoint(base / "untied", tied=False, dtype="bfloat16"),
        "tied": checkpoint(base / "tied", tied=True, dtype="float32", seed=1),
        "tuned": checkpoint(base / "tuned", tied=False, dtype="bfloat16", seed=2),
    }


@pytest.fixture(scope="session")
def manager() -> Iterator[PrivateManager]:
    with PrivateManager(ENVIRONMENT) as manager:
        yield manager


@pytest.fixture(scope="session")
def service(manager: PrivateManager) -> Service:
    return Service(manager)


@pytest.fixture(scope="session")
def engines(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    engines = Engines(service.env, tmp_path_factory.mktemp("engines") / "log")
    yield engines
    engines.close()
