"""Hundreds of hostile connections at once at a real daemon, while a normal client is timed.

    python bench/flood.py --seconds 20 --priority -10

The daemon runs with a clock on its event loop (tests/fakes/lag.py): the processor time of its
longest turn does not depend on other work of the machine. It and the normal client get
`--priority`, the hostile processes do not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import fuzz  # noqa: E402
from tests.fakes import lag  # noqa: E402
from tests.fakes.checkpoints import key_of, write_checkpoint  # noqa: E402
from tests.fakes.daemon import DaemonProcess, model  # noqa: E402
from weightcached.checkpoint.identity import MAX_FILES, FileRecord  # noqa: E402
from weightcached.errors import ProtocolError  # noqa: E402
from weightcached.index.key import WeightCacheKey  # noqa: E402
from weightcached.system.fds import sealed_memfd  # noqa: E402
from weightcached.wire.framing import recv_packet, send_packet  # noqa: E402
from weightcached.wire.messages import PROTOCOL_VERSION, Attach, Hello, Status, encode  # noqa: E402

# Of all hostile processes together.
CONNECTIONS = 480
HELLO = encode(Hello(protocol=PROTOCOL_VERSION))
ERRORS = (OSError, EOFError, ProtocolError)


class Crowd:
    """Connections of one hostile process, opened again as the daemon closes them."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        self.members: list[socket.socket] = []

    def fill(self, first: bytes = HELLO) -> None:
        while len(self.members) < self._size:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.settimeout(1)
            try:
                sock.connect(str(self._path))
                sock.setblocking(False)
                if first:
                    send_packet(sock, first)
            except OSError:
                sock.close()
                return
            self.members.append(sock)

    def drop(self, sock: socket.socket) -> None:
        self.members.remove(sock)
        sock.close()

    def send(self, sock: socket.socket, data: bytes, fds: list[int]) -> bool:
        """False if it cannot take more now, or is closed (then it is dropped)."""
        try:
            send_packet(sock, data, fds)
        except BlockingIOError:
            return False
        except OSError:
            self.drop(sock)
            return False
        return True

    def read(self, sock: socket.socket) -> None:
        try:
            while True:
                for fd in recv_packet(sock, max_fds=250).fds:
                    fd.close()
        except BlockingIOError:
            return
        except ERRORS:
            self.drop(sock)


def large_key(key: WeightCacheKey) -> WeightCacheKey:
    """The longest key that is taken: it takes the longest to decode and to compare."""
    files = [
        FileRecord(f"model-{n:05}.safetensors" + "x" * 200, 1, n, 1, 1, 1) for n in range(MAX_FILES)
    ]
    return msgspec.structs.replace(
        key, checkpoint=msgspec.structs.replace(key.checkpoint, files=files)
    )


def flood(kind: str, path: Path, checkpoint: Path, stop: Event, connections: int) -> None:
    """One hostile process with so many connections."""
    key = key_of({"model": str(checkpoint)})
    chance = random.Random(kind)
    crowd = Crowd(path, connections)
    reader, writer = os.pipe()
    status = encode(Status())
    mismatch = encode(Attach(key=msgspec.structs.replace(key, dtype="float16"), wait=False))
    with sealed_memfd("large", encode(Attach(key=large_key(key), wait=False))) as large:
        kinds: dict[str, tuple[bytes, bytes, list[int], bool]] = {
            "silent": (b"", b"", [], False),
            "half": (HELLO[:-3], b"", [], False),
            "status": (HELLO, status, [], True),
            "never-reads": (HELLO, status, [], False),
            "mismatch": (HELLO, mismatch, [], True),
            "descriptors": (HELLO, status, [writer] * 250, True),
            "large": (HELLO, b"\xc1large", [large.fileno()], True),
            "garbage": (HELLO, b"\x91" * 60_000, [], True),
            "connect": (b"", b"", [], False),
        }
        first, data, fds, reads = kinds[kind]
        while not stop.is_set():
            crowd.fill(first)
            for sock in list(crowd.members):
                if kind == "connect":
                    crowd.drop(sock)
                    continue
                if data and crowd.send(sock, data, fds) and chance.random() < 0.5:
                    crowd.send(sock, data, fds) if sock in crowd.members else None
                if reads and sock in crowd.members:
                    crowd.read(sock)
            if not data and kind != "connect":
                stop.wait(0.05)
                for sock in list(crowd.members):
                    crowd.read(sock)
    os.close(reader)
    os.close(writer)


KINDS = (
    "silent",
    "half",
    "status",
    "never-reads",
    "mismatch",
    "descriptors",
    "large",
    "garbage",
    "connect",
)


class Figures(NamedTuple):
    """The normal client's times in seconds, and the turns of the daemon's loop, during a flood."""

    status_s: list[float]
    attach_s: list[float]
    turns: list[lag.Turn]
    busy: float
    faults: list[str]

    def summary(self) -> dict[str, Any]:
        longest = sorted(self.turns, key=lambda turn: -turn.cpu_s)[:3]
        return {
            "status": fuzz.summary(self.status_s, fuzz.STATUS_LIMIT_S),
            "attach": fuzz.summary(self.attach_s, fuzz.ATTACH_LIMIT_S),
            "busy": round(self.busy, 2),
            "longest_turns": [
                {
                    "cpu_ms": round(t.cpu_s * 1000, 1),
                    "wall_ms": round(t.wall_s * 1000, 1),
                    "callbacks": t.callbacks,
                    "worst_cpu_ms": round(t.worst_cpu_s * 1000, 1),
                    "worst": t.worst,
                }
                for t in longest
            ],
            "faults": self.faults,
        }


def measure(kinds: list[str], seconds: float, *, priority: int) -> Figures:
    """One flood by the hostile processes `kinds`. priority: nice value of daemon and normal client."""
    directory = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))
    checkpoint = write_checkpoint(directory / "checkpoint", nbytes=64 * 1024)
    daemon = DaemonProcess(directory, [model("tiny", checkpoint)])
    daemon.module = "tests.fakes.lag"
    daemon.env = {lag.VARIABLE: str(directory / "lag")}
    daemon.options = ["--log-level", "warning"]
    stop, times = multiprocessing.Event(), multiprocessing.SimpleQueue()  # type: ignore[var-annotated]
    hostile = [
        multiprocessing.Process(
            target=flood, args=(kind, daemon.socket, checkpoint, stop, CONNECTIONS // len(kinds))
        )
        for kind in kinds
    ]
    prober = multiprocessing.Process(
        target=_probe, args=(priority, daemon.socket, checkpoint, stop, times)
    )
    try:
        daemon.start()
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, daemon.pid, priority)
        began_s = time.monotonic()
        for process in [*hostile, prober]:
            process.start()
        time.sleep(seconds)
        stop.set()
        status_s, attach_s, fault = times.get()
        for process in [*hostile, prober]:
            process.join()
        ended_s = time.monotonic()
        faults = [fault] if fault else []
        faults += [] if daemon.stop() == 0 else ["the daemon did not end well"]
        faults += ["the daemon's log has a traceback"] if "Traceback" in daemon.log else []
        turns = lag.read(directory / "lag")
    finally:
        daemon.close()
        shutil.rmtree(directory)
    (total,) = [turn for turn in turns if turn.worst == lag.ALL]
    during = [turn for turn in turns if began_s < turn.at_s < ended_s]
    return Figures(status_s, attach_s, during, total.cpu_s / seconds, faults)


def _probe(priority: int, path: Path, checkpoint: Path, stop: Event, times: Any) -> None:
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, priority)
    fuzz.probe(path, checkpoint, stop, times)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument(
        "--kinds", default=",".join(KINDS), help="comma-separated; '+' joins those at once"
    )
    parser.add_argument("--priority", type=int, default=-10)
    options = parser.parse_args()
    for kinds in options.kinds.split(","):
        figures = measure(kinds.split("+"), options.seconds, priority=options.priority)
        print(json.dumps({kinds: figures.summary()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
