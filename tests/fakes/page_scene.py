"""A node for the exporter's page: two GPUs, host memory, two engine services, and some faults.

Daemons and supervisors are stand-ins on real sockets; the exporter that asks them is the real one.
The figures are made up, of the size that an H200 has.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from tests.fakes.daemon import BOUND_S
from tests.fakes.stub_daemon import StubDaemon, cache, status
from weightcached.exporter import health, page
from weightcached.exporter.health import Node
from weightcached.exporter.history import Fault
from weightcached.exporter.server import Server
from weightcached.system.gpus import GpuInfo
from weightcached.wire.framing import listen, recv_packet, send_packet
from weightcached.wire.messages import Counters, EngineStatus, OldGeneration, StatusReply
from weightcached.wire.services import Reply, Request

GPU0 = "GPU-0e3f5a1c-77a1-4d2b-9c58-2f6d5b1e0a44"
GPU1 = "GPU-77a1c0de-12ab-4c9f-8e21-90b7d4aa31f7"
GIB = 1 << 30
_TOTAL = 143771 << 20

GPUS = [
    GpuInfo(GPU0, "NVIDIA H200", _TOTAL, free_bytes=6 * GIB),
    GpuInfo(GPU1, "NVIDIA H200", _TOTAL, free_bytes=71 * GIB),
]


def replies() -> dict[str, StatusReply]:
    """What the daemons of the scene answer, with ages that do not depend on the day."""
    now = time.time()
    engines = [
        EngineStatus(pid=48211, since=now - 9300, generation=3, bytes=15 * GIB),
        EngineStatus(pid=48377, since=now - 8900, generation=3, bytes=15 * GIB, parked=True),
    ]
    old = EngineStatus(pid=31007, since=now - 90000, generation=2, bytes=15 * GIB)
    first = status(
        GPU0,
        cache(
            "llama-8b/target", generation=3, bytes=15 * GIB, load_seconds=2.1, source="restored",
            engines=[*engines, old], snapshot="written",
        ),
        cache("qwen-14b/target", bytes=28 * GIB, load_seconds=31.4, engines=[], snapshot="writing"),
        cache("qwen-14b/draft", role="draft", bytes=int(1.5 * GIB), load_seconds=9.2, engines=[],
              warning="a restart will load it again: the unit's descriptor store is full"),
        cache("mistral-7b/target", state="evicted", generation=0, bytes=0, engines=[], snapshot="written",
              snapshot_bytes=14 * GIB, resident="on-demand"),
        pid=2201, since=now - 260000, budget=64 * GIB,
        old_generations=[
            OldGeneration(cache="llama-8b/target", generation=2, bytes=15 * GIB, engines=[old])
        ],
        counters=Counters(
            attaches={"llama-8b/target": 41}, attach_seconds={"llama-8b/target": 5.1},
            hits={"llama-8b/target": 38}, evictions={"mistral-7b/target": 3},
            restores={"mistral-7b/target": 2, "llama-8b/target": 1},
            restore_seconds={"mistral-7b/target": 3.4, "llama-8b/target": 2.0},
            mismatches={"dtype": 2}, fallbacks={"no-room": 1}, refusals={"Mismatch": 2}, adoptions=3,
        ),
    )  # fmt: skip
    second = status(
        GPU1,
        cache(
            "mixtral-8x7b/target", state="loading", generation=0, bytes=0, engines=[], phase="read weights",
            done_bytes=31 * GIB, total_bytes=87 * GIB, eta_s=21.0,
        ),
        cache(
            "gemma-9b/target", state="failed", generation=0, bytes=0, engines=[], retry_at=now + 64,
            error="/srv/models/gemma-9b: no such directory; mount it, or correct model: in the manifest",
        ),
        pid=2202, state="loading", since=now - 95, counters=Counters(),
    )  # fmt: skip
    host = status("cpu0", cache("tiny/target", engines=[]), pid=2203, since=now - 7200)
    return {GPU0: first, GPU1: second, "cpu0": host}


def services() -> list[dict[str, Any]]:
    """What the supervisors answer."""
    now = time.time()

    def engine(number: int, state: str, pid: int, age_s: float, requests: int) -> dict[str, Any]:
        return {
            "number": number, "version": 1, "state": state, "pid": pid, "since": now - age_s,
            "requests": requests, "facts": {},
        }  # fmt: skip

    common = {"error": "", "awake": True, "share": 0.9, "supervisor_pid": 900, "used": now - 2}
    chat = common | {
        "name": "chat", "model": "llama-8b", "listen": "127.0.0.1:8000", "state": "serving",
        "pid": 48211, "generation": 4, "since": now - 9300, "takeovers": 2, "last_takeover_s": 0.76,
        "engines": [engine(4, "serving", 48211, 9300, 7), engine(5, "parked", 48377, 8900, 0)],
    }  # fmt: skip
    code = common | {
        "name": "code", "model": "qwen-14b", "listen": "unix:/run/user/1000/code.sock",
        "state": "asleep", "pid": 0, "generation": 0, "since": now - 50000, "takeovers": 0,
        "last_takeover_s": 0.0, "engines": [engine(1, "parked", 48620, 50000, 0)], "used": now - 5400,
        "error": "Free memory on device (6.0/140.4 GiB) is less than desired",
    }  # fmt: skip
    return [chat, code]


class StubSupervisor:
    """Answers every question with the status that `answer` gives."""

    def __init__(self, directory: Path, name: str, answer: Callable[[], dict[str, Any]]) -> None:
        home = directory / "engines" / name
        home.mkdir(parents=True, mode=0o700)
        self._sock = listen(home / "service.sock")
        self._sock.setblocking(True)
        self._answer = answer
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        # Ended by close(): the end of accept() is EINVAL then.
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._sock.accept()
                with peer, contextlib.suppress(OSError, EOFError):
                    request = msgspec.json.decode(recv_packet(peer, max_fds=0).data, type=Request)
                    reply = Reply(number=request.number, result=self._answer())
                    send_packet(peer, msgspec.json.encode(reply))

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._sock.close()


class Scene:
    """`node`, and what its daemons and supervisors answer, which a test may change."""

    def __init__(self, directory: Path) -> None:
        self.runtime = directory / "run"
        self.manifest = directory / "manifest.yaml"
        self.replies = replies()
        self.services = {service["name"]: service for service in services()}
        self.node = Node(self.manifest, self.runtime)
        models = [
            {"name": name, "devices": [device], "engine": {"model": f"org/{name}"}}
            for device, reply in self.replies.items()
            for name in dict.fromkeys(cache.name.split("/")[0] for cache in reply.caches)
        ]
        now = time.time()
        failed = self.replies[GPU1].caches[1]
        self.node.history.note([Fault(f"{GPU1} {failed.name}", failed.error)], now - 840)
        self.node.history.note(
            [Fault(GPU1, "the daemon restarted: pid 2202 follows pid 1977")], now - 95
        )
        self.node.history.note(
            [Fault("engine chat", "a parked engine took over after 0.76 s (takeover 2)")],
            now - 9300,
        )
        self.manifest.write_text(yaml.safe_dump({"version": 1, "models": models}))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The stand-ins answer, within this block."""
        with contextlib.ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            # All answer, in their own time.
            patch.setattr(health, "ANSWER_TIMEOUT_S", BOUND_S)
            patch.setattr(page, "list_gpus", lambda: GPUS)
            patch.setattr(page, "machine_memory", lambda: (401 * GIB, 503 * GIB))
            patch.setattr(socket, "gethostname", lambda: "gpu-node-1")
            for device in self.replies:
                path = self.runtime / f"{device}.sock"
                stack.enter_context(
                    StubDaemon(path, lambda _, device=device: [self.replies[device]])  # type: ignore[misc]
                )
            for name in self.services:
                supervisor = StubSupervisor(
                    self.runtime, name, lambda name=name: self.services[name]  # type: ignore[misc]
                )  # fmt: skip
                stack.callback(supervisor.close)
            yield

    @contextlib.contextmanager
    def served(self) -> Iterator[int]:
        """The exporter's own server answers for them. Gives its port."""
        with self.running(), Server(self.node, "127.0.0.1", 0) as server:
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
            thread.start()
            try:
                yield int(server.server_address[1])
            finally:
                server.shutdown()
                thread.join()
