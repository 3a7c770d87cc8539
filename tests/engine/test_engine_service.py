"""The engine service with real vLLM engines on the CPU, as `weightcachectl` and systemd run it.

One service and one daemon for all tests, in file order: each start of an engine takes long.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import ANSWER_TIMEOUT_S, Service
from tests.fakes.daemon import free_port, print_log, until
from tests.fakes.service import Packages

UNIT = "weightcached-engine@chat.service"
KEY = "secret"
# Above what a busy machine needs for a step, or one that works would be killed.
HANG_S = 30
# Eight ids: of four, vLLM 0.32 dies of SIGILL on processors with AMX, in its attention kernel.
PROMPT = [3, 14, 25, 36, 47, 58, 69, 80]


class Chat:
    """The service `chat`, asked over HTTP and by weightcachectl."""

    def __init__(self, service: Service, model: Path, device: str = "cpu0") -> None:
        self.service = service
        self.port = free_port()
        # There is no journal here.
        self.log = service.manager.runtime_dir / "chat.log"
        self.model: dict[str, Any] = {
            "name": "tiny", "devices": [device], "engine": {"model": str(model), "dtype": "bfloat16"},
        }  # fmt: skip
        self.arguments: dict[str, Any] = {
            "max_model_len": 256, "enforce_eager": True, "skip_tokenizer_init": True,
            "served_model_name": ["tiny"], "api_key": [KEY],
        }  # fmt: skip
        self.write()

    def write(self, **arguments: Any) -> None:
        self.arguments |= arguments
        entry = {
            "name": "chat", "model": "tiny", "listen": f"127.0.0.1:{self.port}", "hang_s": HANG_S,
            "arguments": self.arguments,
        }  # fmt: skip
        path = self.service.manager.config_dir / "weightcached/manifest.yaml"
        document = {"version": 1, "models": [self.model], "engines": [entry]}
        path.write_text(json.dumps(document))

    def status(self) -> dict[str, Any]:
        done = self.service.ctl("engine", "status", "chat", "--json", check=False)
        if done.returncode:
            return {"engines": [], "generation": 0}
        (found,) = json.loads(done.stdout)["engines"]
        return dict(found)

    def until_standby(self) -> dict[str, Any]:
        """Wait until one engine serves and one is parked."""
        seen: list[dict[str, Any]] = []

        def there() -> bool:
            seen[:] = [self.status()]
            states = [e["state"] for e in seen[0]["engines"]]
            return sorted(states) == ["parked", "serving"]

        until(there, "an engine serves, one is parked", bound_s=ANSWER_TIMEOUT_S)
        return seen[0]

    def request(
        self, path: str, body: Any = None, *, key: str = KEY
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        with self.response(path, body, key=key) as response:
            return response.status, response.headers, response.read()

    @contextlib.contextmanager
    def response(
        self, path: str, body: Any, *, key: str = KEY
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer as it comes, on a connection that lasts as long as the block."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_TIMEOUT_S)
        with contextlib.closing(connection):
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            data = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, data, headers)
            yield connection.getresponse()

    @contextlib.contextmanager
    def served(self, *environment: str) -> Iterator[None]:
        """Daemon and service run within the block, with these variables."""
        manager, (device,) = self.service.manager, self.model["devices"]
        directory = "weightcached-engine@.service.d"
        (manager.unit_dir / directory).mkdir(parents=True, exist_ok=True)
        manager.write_unit(
            f"{directory}/log.conf",
            f"[Service]\nEnvironment={' '.join(environment)}\n"
            f"StandardOutput=append:{self.log}\nStandardError=append:{self.log}\n",
        )
        self.service.ctl("start", device)
        try:
            # Type=notify: returns when an engine serves.
            self.service.ctl("engine", "start", "chat")
            yield
        finally:
            print_log(self.log)
            self.service.ctl("engine", "stop", "chat", check=False)
            self.service.ctl("stop", device, check=False)

    def tokens(self, count: int = 8) -> list[int]:
        status, _, data = self.request("/v1/completions", completion(count))
        assert status == 200, data
        found: list[int] = json.loads(data)["choices"][0]["token_ids"]
        return found

    def members(self, number: int) -> list[int]:
        """Processes of an engine."""
        pid = next(e["pid"] for e in self.status()["engines"] if e["number"] == number)
        found = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        return [p for p in found if _session(p) == pid]


def _session(pid: int) -> int:
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return 0


def completion(count: int, **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny", "prompt": PROMPT, "max_tokens": count, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    return Packages(tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def chat(service: Service, models: dict[str, Path], packages: Packages) -> Iterator[Chat]:
    chat = Chat(service, models["untied"])
    # vLLM binds every engine to the same core, where one that serves starves one that starts.
    with chat.served("VLLM_CPU_OMP_THREADS_BIND=nobind", f"PYTHONPATH={packages.path}"):
        yield chat


class Loop:
    """One client that asks again and again, and leaves the cores time for engines that start."""

    def __init__(self, chat: Chat) -> None:
        self.answers: list[list[int]] = []
        self.refused: list[str] = []
        self.failed: list[str] = []
        self._chat = chat
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.answers.append(self._chat.tokens(2))
            except ConnectionRefusedError as e:
                self.refused.append(repr(e))
            except (OSError, http.client.HTTPException, AssertionError) as e:
                self.failed.append(repr(e))
            time.sleep(0.2)

    def until_next(self) -> None:
        seen = len(self.answers)
        until(lambda: len(self.answers) > seen + 2, "answers go on", bound_s=ANSWER_TIMEOUT_S)

    def __enter__(self) -> Loop:
        self._thread.start()
        self.until_next()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        assert len({tuple(tokens) for tokens in self.answers}) == 1, "every engine decodes alike"


def test_http_is_vllms_own(chat: Chat) -> None:
    assert chat.request("/v1/models", key="wrong")[0] == 401
    status, _, data = chat.request("/v1/models")
    assert (status, json.loads(data)["data"][0]["id"]) == (200, "tiny")
    assert chat.request("/health")[0] == 200
    status, _, data = chat.request("/metrics")
    assert status == 200
    assert b"vllm:num_requests_running" in data
    assert chat.tokens() == chat.tokens()
    status, headers, data = chat.request("/v1/completions", completion(6, stream=True))
    assert status == 200
    assert headers["Content-Type"].startswith("text/event-stream")
    events = [line for line in data.decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert len(events) > 2, "it streams"


def test_engine_maps_the_resident_weights(chat: Chat) -> None:
    chat.until_standby()
    (cache,) = chat.service.caches("cpu0")
    assert len(cache["engines"]) == 2, "the serving and the parked one"
    document = json.loads(chat.service.ctl("status", "--json").stdout)
    (engine,) = document["engines"]
    assert (engine["name"], engine["state"], engine["generation"]) == ("chat", "serving", 1)


def test_supervisor_killed_costs_no_request_and_its_successor_takes_all_back(chat: Chat) -> None:
    before = chat.until_standby()
    with Loop(chat) as loop:
        os.kill(before["supervisor_pid"], signal.SIGKILL)
        loop.until_next()
        after = chat.until_standby()
    assert loop.refused == loop.failed == []
    assert after["supervisor_pid"] != before["supervisor_pid"]
    assert [e["pid"] for e in after["engines"]] == [e["pid"] for e in before["engines"]]


def test_killed_core_brings_the_parked_engine(chat: Chat) -> None:
    status = chat.until_standby()
    number = status["generation"]
    head = status["pid"]
    with Loop(chat) as loop:
        victims = [pid for pid in chat.members(number) if pid != head]
        os.kill(_process_of(victims, "core"), signal.SIGKILL)
        until(
            lambda: chat.status()["generation"] not in (0, number),
            "another serves",
            bound_s=ANSWER_TIMEOUT_S,
        )
        loop.until_next()
    assert loop.refused == []
    assert len(loop.failed) <= 1, "only the request under way"
    until(
        lambda: not [pid for pid in victims if os.path.exists(f"/proc/{pid}/exe")],
        "nothing is left",
    )


def _process_of(pids: list[int], part: str) -> int:
    title = {"core": "EngineCore", "worker": "Worker"}[part]
    for pid in pids:
        with contextlib.suppress(OSError):
            if title in Path(f"/proc/{pid}/cmdline").read_text():
                return pid
    raise AssertionError(f"no {part} in {pids}")


@pytest.mark.parametrize("part", ["server", "core", "worker"])
def test_hung_process_is_replaced(chat: Chat, part: str) -> None:
    status = chat.until_standby()
    number = status["generation"]
    pid = status["pid"] if part == "server" else _process_of(chat.members(number), part)
    # A worker that hangs is noticed when it should compute.
    with Loop(chat) as loop:
        os.kill(pid, signal.SIGSTOP)
        until(
            lambda: chat.status()["generation"] not in (0, number),
            "another serves",
            bound_s=ANSWER_TIMEOUT_S,
        )
        loop.until_next()
    assert loop.refused == []
    assert len(loop.failed) <= 1, "only the request under way"


def test_rolling_restart_after_an_upgrade_with_other_arguments_loses_no_request(
    chat: Chat, packages: Packages
) -> None:
    before = chat.until_standby()
    packages.upgrade()
    chat.write(max_model_len=128)
    with Loop(chat) as loop:
        chat.service.ctl("engine", "restart", "chat")
        loop.until_next()
    assert loop.refused == loop.failed == []
    after = chat.status()
    assert after["generation"] > before["generation"]
    assert after["supervisor_since"] > before["supervisor_since"]
    assert after["supervisor_pid"] == before["supervisor_pid"]
    assert json.loads(chat.request("/v1/models")[2])["data"][0]["max_model_len"] == 128


def test_restart_with_bad_arguments_tells_vllms_reason_and_the_old_one_serves_on(
    chat: Chat,
) -> None:
    number = chat.status()["generation"]
    before = dict(chat.arguments)
    chat.write(no_such_argument=1)
    done = chat.service.ctl("engine", "restart", "chat", check=False)
    chat.arguments = before
    chat.write()
    assert done.returncode == 1
    assert "the old one serves on: vllm serve has no argument no_such_argument" in done.stderr
    assert chat.status()["generation"] == number
    assert chat.tokens()


def test_stop_leaves_nothing(chat: Chat) -> None:
    chat.service.ctl("engine", "stop", "chat")
    directory = chat.service.manager.runtime_dir / "weightcached/engines/chat"
    assert sorted(path.name for path in directory.iterdir()) == ["fence", "lock"]
    assert chat.service.manager.show(UNIT, "Result") == "success"
