"""Throw wild inputs at a real daemon over its socket, while a normal client is timed.

    python bench/fuzz.py --inputs 1000000 --workers 2 --seed 1
    python bench/fuzz.py --inputs 200000 --atheris       # libFuzzer's mutations; needs the package atheris

Inputs: random bytes, random msgpack, valid messages with wild values, valid messages mutated, all
of them with and without descriptors, as first message and later. Fails when the daemon ends,
answers later than ANSWER_DEADLINE_S, closes without an answer, or keeps memory or descriptors.
Messages that free weights (a reload, a drop, a release after an attach that fits) are not sent: the
normal client needs its weights.
"""

from __future__ import annotations

import argparse
import array
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
from collections import Counter
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.fakes import lag  # noqa: E402
from tests.fakes.checkpoints import key_of, write_checkpoint  # noqa: E402
from tests.fakes.client import Client  # noqa: E402
from tests.fakes.daemon import DaemonProcess, model  # noqa: E402
from weightcached.errors import ProtocolError  # noqa: E402
from weightcached.index.key import WeightCacheKey  # noqa: E402
from weightcached.system.fds import OwnedFd, close_all, sealed_memfd  # noqa: E402
from weightcached.wire.framing import recv_packet  # noqa: E402
from weightcached.wire.messages import (  # noqa: E402
    PROTOCOL_VERSION,
    Attach,
    Drop,
    Hello,
    Loading,
    Memory,
    Ready,
    Rejoin,
    Release,
    Reload,
    Status,
    Verify,
    decode_reply,
    decode_request,
    encode,
)

ANSWER_DEADLINE_S = 5.0
STATUS_LIMIT_S = 0.05
ATTACH_LIMIT_S = 0.5
PROBE_PERIOD_S = 0.05
MAX_RSS_GROWTH_KIB = 8 * 1024
INPUTS_PER_CONNECTION = 8
CACHE = "tiny/target"


# ---- inputs


class Inputs:
    """A seeded stream of inputs: bytes, and the descriptors to send with them."""

    def __init__(self, seed: int, key: WeightCacheKey) -> None:
        self.random = random.Random(seed)
        other = msgspec.structs.replace(key, dtype="float16")
        self._valid = [
            Hello(protocol=PROTOCOL_VERSION),
            Status(),
            Attach(key=other, wait=False),
            Memory(key=key),
            Release(),
            Rejoin(cache=CACHE, generation=1, index_digest="0" * 32),
            Drop(cache="none/target"),
            Verify(cache=CACHE),
        ]
        self._maps: list[dict[str, Any]] = [
            msgspec.msgpack.decode(encode(message)) for message in self._valid
        ]

    def next(self) -> bytes:
        kinds = (self._bytes, self._msgpack, self._wild, self._mutated, self._mutated, self._as_is)
        while True:
            data = self.random.choice(kinds)()
            if data and not _is_destructive(data):
                return data

    def _bytes(self) -> bytes:
        r = self.random
        return r.randbytes(
            r.choice((1, 2, 3, 7, 40, 200, r.randrange(1, 4000), r.randrange(1, 90_000) // 20 + 1))
        )

    def _msgpack(self) -> bytes:
        return msgspec.msgpack.encode(self._value(4))

    def _as_is(self) -> bytes:
        return encode(self.random.choice(self._valid))

    def _wild(self) -> bytes:
        """A valid message with some fields changed, removed or doubled, at any depth."""
        tree = json.loads(json.dumps(self.random.choice(self._maps)))
        for _ in range(self.random.randrange(1, 4)):
            self._change(tree)
        return msgspec.msgpack.encode(tree)

    def _change(self, tree: Any) -> None:
        r = self.random
        while isinstance(tree, dict | list) and tree:
            places = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
            place = r.choice(places)
            if isinstance(tree[place], dict | list) and tree[place] and r.random() < 0.7:
                tree = tree[place]
                continue
            if r.random() < 0.15:
                del tree[place]
            else:
                tree[place] = self._value(2)
            return

    def _mutated(self) -> bytes:
        r = self.random
        data = bytearray(self._as_is())
        for _ in range(r.choice((1, 1, 2, 5, 20))):
            at = r.randrange(len(data)) if data else 0
            change = r.randrange(6)
            if change == 0 and data:
                data[at] ^= 1 << r.randrange(8)
            elif change == 1 and data:
                data[at] = r.choice((0, 1, 0x7F, 0x80, 0xC1, 0xDD, 0xDF, 0xFF))
            elif change == 2:
                data[at:at] = r.randbytes(r.randrange(1, 9))
            elif change == 3:
                del data[at : at + r.randrange(1, 9)]
            elif change == 4:
                data[at:at] = data[at : at + r.randrange(1, 64)]
            else:
                other = self._as_is()
                data[at:] = other[r.randrange(len(other)) :]
        return bytes(data[:65_000])

    def _value(self, depth: int) -> Any:
        r = self.random
        plain: tuple[Callable[[], Any], ...] = (
            lambda: None,
            lambda: r.random() < 0.5,
            lambda: r.choice((0, -1, 1, 255, 2**31, 2**63 - 1, -(2**63), 2**64 - 1)),
            lambda: r.choice((0.0, -0.0, float("inf"), float("nan"), 1e308)),
            lambda: "".join(
                r.choice("a/\n\0\x1b%é🙂") for _ in range(r.choice((0, 1, 5, 299, 301, 2000)))
            ),
            lambda: r.randbytes(r.randrange(40)),
            lambda: r.choice(("Status", "Attach", "Reload", "target", "draft", CACHE, "../../etc")),
        )
        if depth and r.random() < 0.3:
            if r.random() < 0.5:
                return [self._value(depth - 1) for _ in range(r.randrange(6))]
            return {
                r.choice(("type", "key", "cache", "x")): self._value(depth - 1)
                for _ in range(r.randrange(4))
            }
        return r.choice(plain)()

    def _large(self) -> bytes:
        """Up to 16 MiB that decode for as long as possible."""
        count = self.random.choice((50_000, 500_000, 4_000_000))
        tree = self.random.choice(
            (
                {"type": "Reload", "caches": ["a"] * count},
                {"x": [[0]] * count, "type": "Status"},
                {**self._maps[2], "x": {"k": [1.5] * (count // 8)}},
            )
        )
        return msgspec.msgpack.encode(tree)

    def descriptors(self, data: bytes) -> tuple[bytes, list[OwnedFd]]:
        """Sometimes descriptors go along; sometimes the message is in one, sealed or not."""
        r = self.random
        choice = r.random()
        if choice < 0.001:
            return b"\xc1large", [sealed_memfd("fuzz", self._large())]
        if choice < 0.90:
            return data, []
        if choice < 0.94:
            return b"\xc1large", [sealed_memfd("fuzz", data)]
        if choice < 0.96:
            fd = OwnedFd(os.memfd_create("fuzz", os.MFD_CLOEXEC))
            os.ftruncate(fd.fileno(), r.choice((0, 100, 1 << 34)))
            return b"\xc1large", [fd]
        ends = [OwnedFd(end) for end in os.pipe2(os.O_CLOEXEC)]
        return data, ends


def _is_destructive(data: bytes) -> bool:
    try:
        request = decode_request(data)
    except ProtocolError:
        return False
    # An Attach that fits would become destructive by a Release after it.
    fits = isinstance(request, Attach) and request.key.dtype != "float16"
    return (
        fits
        or isinstance(request, Reload)
        or (isinstance(request, Drop) and request.cache == CACHE)
    )


# ---- one connection


class Peer:
    """Sends inputs, and requires an answer to each within the deadline."""

    def __init__(self, path: Path, *, deadline_s: float = ANSWER_DEADLINE_S) -> None:
        self._path = path
        self._deadline_s = deadline_s
        self._sock: socket.socket | None = None
        self._left = 0
        self.kinds: Counter[str] = Counter()
        self.slowest_s = 0.0

    def put(self, data: bytes, fds: list[OwnedFd], *, first: bool) -> None:
        """One input and its answer; `first`: in place of Hello."""
        if self._sock is None or first or not self._left:
            self._connect(hello=not first)
        self._left -= 1
        began_s = time.monotonic()
        numbers = [fd.fileno() for fd in fds]
        if len(numbers) == 2:
            numbers = numbers * 60
        assert self._sock
        ancillary = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))] if numbers else []
        )
        self._sock.sendmsg([data], ancillary)
        close_all(fds)
        self.kinds[self._answer()] += 1
        self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
        if first:
            self.close()

    def _connect(self, *, hello: bool) -> None:
        self.close()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(self._deadline_s)
        self._sock.connect(str(self._path))
        self._left = INPUTS_PER_CONNECTION
        if hello:
            self._sock.send(encode(Hello(protocol=PROTOCOL_VERSION)))
            self._answer()

    def _answer(self) -> str:
        assert self._sock
        while True:
            packet = recv_packet(self._sock, max_fds=250)
            close_all(packet.fds)
            reply = decode_reply(packet.data)
            if isinstance(reply, Loading):
                continue
            left = reply.descriptors if isinstance(reply, Ready) else 0
            while left:
                more = recv_packet(self._sock, max_fds=250)
                left -= len(more.fds)
                close_all(more.fds)
            name = type(reply).__name__
            code = getattr(reply, "code", "")
            if code in ("protocol", "protocol-version", "busy"):
                self.close()
            return f"{name}:{code}" if code else name

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def fuzz(path: Path, checkpoint: Path, seed: int, count: int, result: Any) -> None:
    """One worker. Puts its figures, or its error, into `result`."""
    inputs = Inputs(seed, key_of({"model": str(checkpoint)}))
    peer = Peer(path)
    data = b""
    try:
        for _ in range(count):
            data, fds = inputs.descriptors(inputs.next())
            peer.put(data, fds, first=inputs.random.random() < 0.1)
        result.put((seed, "", dict(peer.kinds), peer.slowest_s))
    except (OSError, EOFError, ProtocolError) as e:
        result.put(
            (
                seed,
                f"{type(e).__name__}: {e}; input {data[:200].hex()}",
                dict(peer.kinds),
                peer.slowest_s,
            )
        )


# ---- the normal client


def probe(path: Path, checkpoint: Path, stop: Event, result: Any) -> None:
    """Repeat status and attach, each on a connection of its own; collect the times in seconds."""
    key = key_of({"model": str(checkpoint)})
    status: list[float] = []
    attach: list[float] = []
    fault = ""
    try:
        # Once at least, however late a busy machine begins.
        while not (attach and stop.wait(PROBE_PERIOD_S)):
            stolen_before_s = stolen_s()
            began_s = time.monotonic()
            with Client.welcome(path, "ctl") as client:
                client.status()
            status.append(time.monotonic() - began_s)
            if status[-1] > STATUS_LIMIT_S:
                stolen = stolen_s() - stolen_before_s
                sys.stderr.write(
                    f"a status took {status[-1]:.3f} s; meanwhile the machine lost {stolen:.2f} s\n"
                )
            began_s = time.monotonic()
            with Client.welcome(path) as client:
                client.attach(key).close()
            attach.append(time.monotonic() - began_s)
    except (OSError, EOFError, ProtocolError, AssertionError) as e:
        fault = f"the normal client: {type(e).__name__}: {e}"
    result.put((status, attach, fault))


def stolen_s() -> float:
    """Processor time of all cores that the host kept from this machine since boot, in 0.01 s."""
    ticks = Path("/proc/stat").read_text().split("\n", 1)[0].split()[8]
    return int(ticks) / os.sysconf("SC_CLK_TCK")


def summary(times_s: list[float], limit_s: float) -> dict[str, Any]:
    ordered = sorted(times_s) or [float("nan")]
    at = {
        name: round(ordered[int(len(ordered) * q)] * 1000, 2)
        for name, q in (("p50", 0.5), ("p99", 0.99))
    }
    late = sum(t > limit_s for t in ordered)
    return {
        "count": len(ordered),
        **at,
        "max": round(ordered[-1] * 1000, 2),
        "over_limit": late,
        "unit": "ms",
    }


# ---- the run


class Run:
    """A daemon, its normal client, and its memory and descriptors before and after."""

    def __init__(self, directory: Path, priority: int) -> None:
        self.checkpoint = write_checkpoint(directory / "checkpoint", nbytes=64 * 1024)
        self.daemon = DaemonProcess(directory, [model("tiny", self.checkpoint)])
        self.daemon.options = ["--log-level", "error"]
        self.daemon.module = "tests.fakes.lag"
        self._lag = directory / "lag"
        self.daemon.env = {lag.VARIABLE: str(self._lag)}
        self.daemon.start()
        self._stop = multiprocessing.Event()
        self._times: Any = multiprocessing.SimpleQueue()
        arguments = (self.daemon.socket, self.checkpoint, self._stop, self._times)
        self._prober = multiprocessing.Process(target=probe, args=arguments)
        self.descriptors = self._settled()
        self._prober.start()
        assert self._prober.pid
        for pid in (self.daemon.pid, self._prober.pid):
            os.setpriority(os.PRIO_PROCESS, pid, priority)
        self.began_s = time.monotonic()

    def rss_kib(self) -> int:
        return int(
            Path(f"/proc/{self.daemon.pid}/status").read_text().split("VmRSS:")[1].split()[0]
        )

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.daemon.pid}/task"))

    def _settled(self) -> int:
        """Descriptors once no peer is left."""
        deadline_s = time.monotonic() + 15
        while (
            any("pidfd" in target for target in self.daemon.descriptors())
            and time.monotonic() < deadline_s
        ):
            time.sleep(0.05)
        return len(self.daemon.descriptors())

    def finish(
        self, inputs: int, rss_early_kib: int, faults: list[str], extra: dict[str, Any]
    ) -> int:
        """Print the figures; returns the exit status."""
        ended_s = time.monotonic()
        took_s = ended_s - self.began_s
        rss_kib = self.rss_kib()
        self._stop.set()
        status, attach, fault = self._times.get()
        faults += [fault] if fault else []
        self._prober.join()
        after = self._settled()
        faults += (
            [] if after == self.descriptors else [f"{after} descriptors, before {self.descriptors}"]
        )
        growth = rss_kib - rss_early_kib
        faults += (
            []
            if growth < MAX_RSS_GROWTH_KIB
            else [f"{growth} KiB more memory than after the first tenth"]
        )
        ended = self.daemon.process is None or self.daemon.process.poll() is not None
        faults += ["the daemon ended"] if ended else []
        faults += [f"log: {line}" for line in self.daemon.log.splitlines()[:5]]
        exit_status = self.daemon.stop()
        faults += [] if exit_status == 0 else [f"the daemon ended with status {exit_status}"]
        during = [turn for turn in lag.read(self._lag) if self.began_s < turn.at_s < ended_s]
        longest = lag.longest(during)
        report = {
            "inputs": inputs,
            "seconds": round(took_s, 1),
            "inputs_per_s": round(inputs / took_s),
            "rss_kib": [rss_early_kib, rss_kib],
            "descriptors": [self.descriptors, after],
            "status": summary(status, STATUS_LIMIT_S),
            "attach": summary(attach, ATTACH_LIMIT_S),
            "longest_turn_cpu_ms": round(longest.cpu_s * 1000, 1) if longest else 0.0,
            "longest_turn": longest.worst if longest else "",
            **extra,
            "faults": faults,
        }
        print(json.dumps(report, indent=1))
        return int(bool(faults))


def run_workers(run: Run, inputs: int, workers: int, seed: int) -> int:
    result: Any = multiprocessing.SimpleQueue()
    kinds: Counter[str] = Counter()
    slowest_s, early_kib, faults = 0.0, 0, []
    # Two rounds: memory and descriptors after the first tenth are the base line of the second.
    for round_number, share in enumerate((inputs // 10, inputs - inputs // 10)):
        seeds = [seed * 1000 + round_number * 100 + n for n in range(workers)]
        arguments = [
            (run.daemon.socket, run.checkpoint, s, share // workers, result) for s in seeds
        ]
        children = [multiprocessing.Process(target=fuzz, args=a) for a in arguments]
        for child in children:
            child.start()
        for _ in children:
            failed_seed, fault, seen, slow_s = result.get()
            kinds.update(seen)
            slowest_s = max(slowest_s, slow_s)
            faults += [f"seed {failed_seed}: {fault}"] if fault else []
        for child in children:
            child.join()
        early_kib = early_kib or run.rss_kib()
    extra = {
        "seed": seed,
        "slowest_answer_s": round(slowest_s, 3),
        "answers": dict(kinds.most_common()),
    }
    return run.finish(sum(kinds.values()), early_kib, faults, extra)


def run_atheris(run: Run, inputs: int, seed: int) -> int:
    """libFuzzer's mutations, guided by coverage of our own decoding, sent to the daemon."""
    import atheris  # type: ignore[import-untyped]

    peer = Peer(run.daemon.socket)
    early_kib: list[int] = []

    @atheris.instrument_func  # type: ignore[untyped-decorator]
    def one_input(data: bytes) -> None:
        if not data or len(data) > 65_000 or _is_destructive(data):
            return
        with contextlib.suppress(ProtocolError):
            decode_request(data)
        peer.put(data, [], first=len(data) % 4 == 0)
        if len(early_kib) == 0 and peer.kinds.total() > inputs // 10:
            early_kib.append(run.rss_kib())
        if peer.kinds.total() >= inputs:
            status = run.finish(
                peer.kinds.total(), early_kib[0], [], {"answers": dict(peer.kinds.most_common())}
            )
            sys.stdout.flush()
            os._exit(status)

    inputs_of = Inputs(seed, key_of({"model": str(run.checkpoint)}))

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        # From bytes alone libFuzzer hardly ever makes a message that decodes.
        inputs_of.random.seed(seed)
        base = data if inputs_of.random.random() < 0.3 else inputs_of.next()
        if inputs_of.random.random() < 0.5:
            return base[:max_size]
        mutated: bytes = atheris.Mutate(base[:max_size], max_size)
        return mutated

    arguments = [sys.argv[0], f"-seed={seed}", "-max_len=4096", "-verbosity=0"]
    atheris.Setup(arguments, one_input, custom_mutator=mutate)
    atheris.Fuzz()
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--priority", type=int, default=0, help="nice value of daemon and normal client"
    )
    parser.add_argument("--atheris", action="store_true")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))
    try:
        run = Run(directory, options.priority)
        try:
            if options.atheris:
                return run_atheris(run, options.inputs, options.seed)
            return run_workers(run, options.inputs, options.workers, options.seed)
        finally:
            run.daemon.close()
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    sys.exit(main())
