"""Random operations on one daemon from a seed, with every invariant checked after each.

    python -m tests.process.soak --seconds 1800 --seed 7

Ends with the figures, or with the seed, the step and the last operations when an invariant is
broken.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import flood, fuzz
from tests.fakes import lag
from tests.fakes.checkpoints import WEIGHTS, key_of, write_checkpoint
from tests.fakes.client import Client, Handout
from tests.fakes.daemon import DaemonProcess, model, remove_tree, until, write_manifest
from tests.process.conftest import Engine
from weightcached.wire.messages import (
    Attach,
    Done,
    Drop,
    Evict,
    Loading,
    Ready,
    Refused,
    Release,
    Released,
    Reload,
    ReloadReply,
)

MAX_RSS_KIB = 64 * 1024
MAX_ENGINES = 6
CACHE = "tiny/target"
FAULTS = (
    "sigkill-in-packing",
    "exception-in-packing",
    "garbage-in-packing",
    "corrupt-index",
    "truncated-descriptors",
)


@dataclasses.dataclass
class Attached:
    """An engine of this process: a connection and its generation."""

    client: Client
    handout: Handout
    digest: str

    def content(self) -> str:
        return digest_of(self.handout)

    def close(self) -> None:
        self.handout.close()
        self.client.close()


def digest_of(handout: Handout) -> str:
    digest = hashlib.sha256()
    for fd in handout.segment_fds:
        digest.update(os.pread(fd.fileno(), os.fstat(fd.fileno()).st_size, 0))
    return digest.hexdigest()


class Soak:
    """The daemon, its engines, and their expected state. served: digest of the generation, if any."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.directory = directory
        self.checkpoints = [
            write_checkpoint(directory / f"c{n}", seed=n, nbytes=3 * 512 * 1024) for n in (1, 2)
        ]
        self.digests = [
            hashlib.sha256((c / WEIGHTS).read_bytes()).hexdigest() for c in self.checkpoints
        ]
        self.inputs = fuzz.Inputs(seed, key_of({"model": str(self.checkpoints[0])}))
        self.daemon = DaemonProcess(directory)
        self.daemon.options = ["--log-level", "info"]
        self.daemon.module = "tests.fakes.lag"
        self.lag_path = directory / "lag"
        self.daemon.env = {lag.VARIABLE: str(self.lag_path)}
        self.spawns = directory / "spawns"
        self.engines: list[Attached] = []
        self.processes: list[tuple[Engine, str]] = []
        self.segments, self.current = 3, 0
        self.served: str | None = None
        self.generation = 0
        self.done: collections.Counter[str] = collections.Counter()
        self.last: collections.deque[str] = collections.deque(maxlen=20)
        self.status_s: list[float] = []
        self.rss_kib: list[int] = []
        self.configure()
        self.daemon.start()
        self.loaded()

    # ---- knowledge

    def configure(self, fault: str = "") -> None:
        options: dict[str, Any] = {"x_segments": self.segments, "x_spawns": str(self.spawns)} | (
            {"x_fault": fault} if fault else {}
        )
        write_manifest(
            self.daemon.manifest, [model("tiny", self.checkpoints[self.current], **options)]
        )

    def change(self) -> None:
        self.current = self.random.randrange(2)
        self.segments = self.random.choice((1, 2, 3, 8, 30))

    def loaded(self) -> None:
        self.served = self.digests[self.current]

    def forget_engines(self) -> None:
        """Their connections ended with the daemon; they keep their mappings."""
        for engine in self.engines:
            engine.client.close()

    # ---- operations

    def kill(self) -> None:
        self.daemon.signal(signal.SIGKILL)
        self.daemon.wait()
        self.again()

    def restart(self) -> None:
        self.daemon.signal(self.random.choice((signal.SIGTERM, signal.SIGINT)))
        assert self.daemon.wait() == 0
        assert not self.daemon.socket.exists()
        self.again()

    def again(self) -> None:
        """The store's generations are taken back; caches that then differ from the manifest are
        loaded.
        """
        self.forget_engines()
        self.configure()
        self.daemon.launch(keep_store=True).notified("READY=1")
        self.loaded()

    def kill_while_loading(self) -> None:
        self.change()
        self.configure()
        with self.daemon.client("ctl") as tool:
            tool.send(Reload(force=True))
            self.pause(0.4)
            self.daemon.signal(signal.SIGKILL)
            self.daemon.wait()
        self.again()

    def stop_and_start(self) -> None:
        assert self.daemon.stop() == 0
        self.forget_engines()
        self.change()
        self.configure()
        self.daemon.start()
        self.loaded()

    def reload(self) -> None:
        self.change()
        self.configure()
        reply = self.ask_reload(Reload(force=self.random.random() < 0.5))
        assert [o.error for o in reply.outcomes] == [""], reply
        self.loaded()

    def faulty_reload(self) -> None:
        before = (self.current, self.segments)
        self.change()
        self.configure(fault=self.random.choice(FAULTS))
        reply = self.ask_reload(Reload(force=True))
        assert [o.outcome for o in reply.outcomes] == ["failed"], reply
        self.current, self.segments = before
        self.configure()
        self.ask_reload(Reload())
        self.loaded()

    def ask_reload(self, request: Reload) -> ReloadReply:
        with self.daemon.client("ctl") as tool:
            reply = tool.ask(request)
            while not isinstance(reply, ReloadReply):
                reply = tool.receive()
        return reply

    def attach(self) -> None:
        if self.served is None or len(self.engines) >= MAX_ENGINES:
            return
        client = self.daemon.client()
        handout = client.attach(key_of({"model": str(self.checkpoints[self.current])}))
        self.engines.append(Attached(client, handout, digest_of(handout)))

    def detach(self) -> None:
        if self.engines:
            self.engines.pop(self.random.randrange(len(self.engines))).close()

    def start_engine(self) -> None:
        if self.served is None or len(self.processes) >= 2:
            return
        engine = Engine(self.daemon, self.checkpoints[self.current])
        engine.attached()
        self.processes.append((engine, engine.digest().decode()))

    def kill_engine(self) -> None:
        if self.processes:
            self.processes.pop()[0].close()

    def leave(self) -> None:
        """All engines end."""
        while self.engines:
            self.detach()
        while self.processes:
            self.kill_engine()

    def release(self) -> None:
        """By the only engine there is: the others leave first."""
        if self.served is None:
            return
        self.leave()
        self.attach()
        engine = self.engines.pop()
        assert isinstance(engine.client.ask(Release()), Done)
        assert isinstance(
            engine.client.ask(Attach(key=key_of({"model": str(self.checkpoints[self.current])}))),
            Released,
        )
        engine.close()
        self.served = None

    def drop(self) -> None:
        with self.daemon.client("ctl") as tool:
            reply = tool.ask(Drop(cache=CACHE, force=True))
            assert isinstance(reply, Done), reply
        self.ask_reload(Reload())
        self.loaded()

    def refused_drop(self) -> None:
        if self.live():
            with self.daemon.client("ctl") as tool:
                reply = tool.ask(Drop(cache=CACHE))
                assert isinstance(reply, Refused), reply

    def evict(self) -> None:
        """The next engine brings it back."""
        if self.served is None:
            return
        self.leave()
        self.daemon.until(lambda s: not s.caches[0].engines, "the end of the leases")
        with self.daemon.client("ctl") as tool:
            tool.expect(Evict(cache=CACHE), Done)
        self.attach()
        self.loaded()

    def hostile_bytes(self) -> None:
        peer = fuzz.Peer(self.daemon.socket)
        for _ in range(200):
            data, fds = self.inputs.descriptors(self.inputs.next())
            peer.put(data, fds, first=self.random.random() < 0.2)
        peer.close()

    def silent_crowd(self) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(Client(self.daemon.socket))
            self.timed_status()

    def never_reads(self) -> None:
        with self.daemon.client() as client:
            client.sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    client.send(Attach(key=key_of({"model": str(self.checkpoints[self.current])})))
            self.timed_status()

    def descriptor_spam(self) -> None:
        reader, writer = os.pipe()
        for _ in range(20):
            with self.daemon.client() as client, contextlib.suppress(OSError):
                client.send_raw(b"x", [writer] * 250)
        os.close(writer)
        until(lambda: os.read(reader, 1) == b"", "the daemon holds no copy")
        os.close(reader)

    def flood(self) -> None:
        """A hostile process with hundreds of connections, while a normal client is timed."""
        stop = multiprocessing.Event()
        kind = self.random.choice(flood.KINDS)
        hostile = multiprocessing.Process(
            target=flood.flood, args=(kind, self.daemon.socket, self.checkpoints[0], stop, 200)
        )
        hostile.start()
        for _ in range(5):
            self.pause(0.1)
            self.timed_status()
        stop.set()
        hostile.join()

    def remove_socket(self) -> None:
        """It is made again; connections stay."""
        if self.random.random() < 0.5:
            self.daemon.socket.unlink()
        else:
            remove_tree(self.daemon.runtime)
        until(lambda: self.daemon.answer() is not None, "the socket is made again")

    def freeze(self) -> None:
        self.daemon.signal(signal.SIGSTOP)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(str(self.daemon.socket))
            self.pause(0.1)
        self.daemon.signal(signal.SIGCONT)

    def pause(self, most_s: float) -> None:
        time.sleep(self.random.random() * most_s)

    # ---- invariants

    def live(self) -> int:
        return sum(engine.client.sock.fileno() >= 0 for engine in self.engines)

    def timed_status(self) -> None:
        began_s = time.monotonic()
        self.daemon.status()
        self.status_s.append(time.monotonic() - began_s)

    def check(self) -> None:
        daemon = self.daemon
        assert daemon.process
        assert daemon.process.poll() is None
        self.timed_status()
        status = daemon.until(lambda s: not any(c.phase for c in s.caches), "no load goes on")
        (cache,) = status.caches
        assert cache.state == ("ready" if self.served else "released"), cache
        stored = cache.segments + 1 if self.served else 0
        assert daemon.manager
        manager = daemon.manager
        # Beside the note of what was released.
        until(
            lambda: sum("aside" not in name for name in manager.stored) == stored,
            f"{stored} descriptors are stored, {list(manager.stored)}",
        )
        until(
            lambda: sum("memfd" in t for t in daemon.descriptors()) == stored,
            f"the daemon holds {stored}",
        )
        pids = sorted(
            [os.getpid()] * self.live() + [engine.process.pid for engine in self.reconnected()]
        )
        daemon.until(
            lambda s: sorted(e.pid for e in s.caches[0].engines) == pids, f"leases of {pids}"
        )
        if self.served:
            with daemon.client() as client:
                reply = client.ask(
                    Attach(key=key_of({"model": str(self.checkpoints[self.current])}))
                )
                while isinstance(reply, Loading):
                    reply = client.receive()
                assert isinstance(reply, Ready), reply
                handout = client.take(reply)
                content = b"".join(os.pread(f.fileno(), 1 << 30, 0) for f in handout.segment_fds)
                handout.close()
            # Segments are padded to 512 bytes.
            nbytes = (self.checkpoints[self.current] / WEIGHTS).stat().st_size
            assert hashlib.sha256(content[:nbytes]).hexdigest() == self.served
        for engine in self.engines:
            assert engine.content() == engine.digest
        for process, digest in self.processes:
            assert process.digest().decode() == digest
        text = Path(f"/proc/{daemon.pid}/status").read_text()
        self.rss_kib.append(int(text.split("VmRSS:")[1].split()[0]))
        assert self.rss_kib[-1] < MAX_RSS_KIB
        children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children")
        # An input may have made it digest a checkpoint, with the priority that is left over on a
        # busy machine.
        until(lambda: children.read_text() == "", "it has no child", bound_s=300)
        log = daemon.log
        # A loader's traceback stands behind a prefix.
        assert "\nTraceback" not in log
        assert "session failed" not in log

    def reconnected(self) -> list[Engine]:
        """Processes whose connection is to the daemon that runs now."""
        return [engine for engine, _ in self.processes if engine.daemon_pid == self.daemon.pid]

    # ---- the run

    def operations(self) -> dict[Callable[[], None], int]:
        return {
            self.attach: 8,
            self.detach: 5,
            self.start_engine: 2,
            self.kill_engine: 2,
            self.reload: 3,
            self.faulty_reload: 2,
            self.release: 1,
            self.drop: 1,
            self.evict: 2,
            self.refused_drop: 1,
            self.kill: 2,
            self.restart: 2,
            self.kill_while_loading: 2,
            self.stop_and_start: 1,
            self.hostile_bytes: 3,
            self.silent_crowd: 2,
            self.never_reads: 1,
            self.descriptor_spam: 1,
            self.freeze: 1,
            self.flood: 2,
            self.remove_socket: 1,
        }

    def step(self) -> None:
        operations = self.operations()
        if self.served is None:
            self.reload()
        (operation,) = self.random.choices(list(operations), list(operations.values()))
        self.last.append(operation.__name__)
        operation()
        self.check()
        self.done[operation.__name__] += 1

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for process, _ in self.processes:
            process.close()
        self.daemon.close()


def soak(seconds: float, seed: int) -> dict[str, object]:
    """Run for so long; the figures. Raises AssertionError with seed, step and last operations."""
    directory = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))
    run = Soak(directory, seed)
    deadline_s = time.monotonic() + seconds
    steps = 0
    try:
        while time.monotonic() < deadline_s:
            run.step()
            steps += 1
        assert run.daemon.stop() == 0
        ordered = sorted(run.status_s)
        return {
            "seed": seed,
            "seconds": seconds,
            "steps": steps,
            "operations": dict(run.done.most_common()),
            "status_ms": {
                "p50": round(ordered[len(ordered) // 2] * 1000, 2),
                "p99": round(ordered[int(len(ordered) * 0.99)] * 1000, 2),
                "max": round(ordered[-1] * 1000, 2),
            },
            "longest_turn": lag.longest(lag.read(run.lag_path)),
            "rss_kib": {"first": run.rss_kib[0], "max": max(run.rss_kib), "last": run.rss_kib[-1]},
        }
    except BaseException as e:
        tail = run.daemon.log[-3000:]
        raise AssertionError(
            f"seed {seed}, step {steps}, last operations {list(run.last)}: {type(e).__name__}: {e}\n{tail}"
        ) from e
    finally:
        run.close()
        shutil.rmtree(directory)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(json.dumps(soak(options.seconds, options.seed), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
