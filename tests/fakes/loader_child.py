"""A loader child without vLLM: same job, same messages, real sealed segments with the checkpoint's
bytes.

Engine arguments name the fault, so that one manifest holds healthy and faulty models:

    x_fault: NAME          one of FAULTS below, in the phase that its name says
    x_until: PATH          … and only while there is no PATH
    x_once: PATH           … and only the first time: PATH is made then
    x_gate: PATH           before packing, wait until PATH can be opened for reading (a FIFO that the test opens)
    x_gate_before_key: …   the same before the key is sent
    x_pauses: PATH         a directory of tests/fakes/pauses.py: wait in each phase that is armed there
    x_steps: N             report N steps of progress, 0.1 s apart
    x_segments: N          cut the weights into N segments
    x_tuning: PATH         after delivery say "tuning", then wait until PATH can be opened for reading; "" for no wait
    x_spawns: PATH         append a line to PATH at start, so that a test can count the loads
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import xxhash

from tests.fakes import pauses
from tests.fakes.checkpoints import WEIGHTS, key_of
from weightcached.index import tensors as index_format
from weightcached.index.tensors import (
    LoadReport,
    SegmentRecord,
    StorageRecord,
    TensorIndex,
    TensorRecord,
)
from weightcached.segments.packing import ALIGN_BYTES, align_up
from weightcached.system.fds import OwnedFd, sealed_memfd
from weightcached.wire.framing import MAX_PACKET_FDS, send_packet
from weightcached.wire.loader_job import YOUR_TURN, LoaderJob, decode_job
from weightcached.wire.messages import (
    Descriptors,
    LoaderFailed,
    LoaderIndex,
    LoaderKey,
    LoaderProgress,
    Message,
    encode,
)

_PR_SET_PDEATHSIG = 1


class Child:
    def __init__(self, job: LoaderJob) -> None:
        self.job = job
        self.sock = socket.socket(fileno=job.socket_fd)
        self.fault = job.engine.get("x_fault", "")
        if os.path.exists(job.engine.get("x_until", "")):
            self.fault = ""
        self.began_s = time.monotonic()

    def send(self, message: Message, fds: list[int] | None = None) -> None:
        send_packet(self.sock, encode(message), fds or [])

    def at(self, moment: str) -> None:
        """Have the fault that is due now."""
        for name, act in FAULTS.items():
            if self.fault == f"{name}-{moment}" and self.is_due():
                act(self)

    def is_due(self) -> bool:
        if "x_once" not in self.job.engine:
            return True
        try:
            os.close(os.open(self.job.engine["x_once"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def gate(self, name: str) -> None:
        if self.job.engine.get(name):
            with open(self.job.engine[name], "rb") as fifo:
                fifo.read()

    def phase(self, name: str) -> None:
        self.send(LoaderProgress(phase=name))
        pauses.at(self.job.engine.get("x_pauses"), name)

    def run(self) -> None:
        print(
            f"loading {self.job.cache} generation {self.job.generation}",
            file=sys.stderr,
            flush=True,
        )
        self.at("at-start")
        self.phase("configuring")
        if self.job.waits:
            self.phase("waiting")
            self.at("while-waiting")
            assert self.sock.recv(64) == YOUR_TURN
        self.gate("x_gate_before_key")
        self.at("before-key")
        self.send(LoaderKey(key=key_of(self.job.engine, role=self.job.role, rank=self.job.rank)))
        self.weights()
        self.gate("x_gate")
        self.at("in-packing")
        pauses.at(self.job.engine.get("x_pauses"), "weights")
        if "x_pauses" in self.job.engine:
            self.phase("packing")
        index, segments = self.pack()
        if "x_pauses" in self.job.engine:
            self.phase("proof")
        self.hand_over(index, segments)
        self.at("after-delivery")
        if "x_tuning" in self.job.engine:
            self.phase("tuning")
            self.gate("x_tuning")
            self.at("while-tuning")

    def weights(self) -> None:
        total = (Path(self.job.engine["model"]) / WEIGHTS).stat().st_size
        steps = self.job.engine.get("x_steps", 1)
        for step in range(1, steps + 1):
            self.send(
                LoaderProgress(phase="weights", done_bytes=total * step // steps, total_bytes=total)
            )
            if steps > 1:
                time.sleep(0.1)

    def pack(self) -> tuple[bytes, list[OwnedFd]]:
        data = (Path(self.job.engine["model"]) / WEIGHTS).read_bytes()
        count = self.job.engine.get("x_segments", 2)
        step = align_up(-(-len(data) // count), ALIGN_BYTES)
        pieces = [data[n * step : (n + 1) * step].ljust(step, b"\0") for n in range(count)]
        segments = [sealed_memfd(f"segment-{n}", piece) for n, piece in enumerate(pieces)]
        if self.fault == "unsealed-segment":
            segments[0] = OwnedFd(os.memfd_create("unsealed"))
            os.write(segments[0].fileno(), pieces[0])
        if self.fault == "short-segment":
            segments[0] = sealed_memfd("short", pieces[0][:-512])
        return index_format.encode(self.index(pieces)), segments

    def index(self, pieces: list[bytes]) -> TensorIndex:
        job = self.job
        return TensorIndex(
            software="test",
            backend="cuda" if self.fault == "wrong-backend" else "host",
            driver="host",
            boot_id="0" if self.fault == "wrong-boot" else job.boot_id,
            device="cpu999" if self.fault == "wrong-device" else job.device,
            cache=job.cache,
            role=job.role,
            generation=job.generation + 7 if self.fault == "wrong-generation" else job.generation,
            spec_digest=job.spec_digest,
            stage="loaded",
            skeleton="",
            key=key_of(job.engine, role=job.role, rank=job.rank),
            label=job.label,
            segments=[SegmentRecord(len(piece), private=False) for piece in pieces],
            storages=[
                StorageRecord(n, 0, len(piece), xxhash.xxh3_128(piece).digest())
                for n, piece in enumerate(pieces)
            ],
            tensors=[
                TensorRecord(
                    names=[f"w.{n}"],
                    kind="parameter",
                    dtype="uint8",
                    shape=[len(p)],
                    stride=[1],
                    storage=n,
                )
                for n, p in enumerate(pieces)
            ],
            load=LoadReport(
                seconds=time.monotonic() - self.began_s,
                finished_at=time.time(),
                phases={"weights": 1.5, "packing": 0.5},
            ),
        )

    def hand_over(self, index: bytes, segments: list[OwnedFd]) -> None:
        if self.fault == "no-index":
            return
        if self.fault == "corrupt-index":
            index = index[:-1] + bytes([index[-1] ^ 1])
        with sealed_memfd("index", index) as index_fd:
            self.send(LoaderIndex(segments=len(segments)), [index_fd.fileno()])
        pauses.at(self.job.engine.get("x_pauses"), "handover")
        if self.fault == "truncated-descriptors":
            segments = segments[:-1]
        for first in range(0, len(segments), MAX_PACKET_FDS):
            fds = [fd.fileno() for fd in segments[first : first + MAX_PACKET_FDS]]
            self.send(Descriptors(first=first), fds)


def _hang(child: Child) -> None:
    while True:
        signal.pause()


def _hang_while_talking(child: Child) -> None:
    # Says the same again and again: alive, but no progress.
    while True:
        child.send(LoaderProgress(phase="stuck", done_bytes=1, total_bytes=2))
        time.sleep(0.05)


def _eat_memory(child: Child) -> None:
    # Until the kernel, or the cgroup of the test, has had enough.
    kept = []
    while True:
        kept.append(b"x" * (8 << 20))


def _raise(child: Child) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def _refuse(child: Child) -> None:
    child.send(
        LoaderFailed(code="checkpoint", message="config.json names no architecture", permanent=True)
    )
    sys.exit(78)


def _cannot_prove(child: Child) -> None:
    child.send(LoaderFailed(code="unsupported-quantization", message=REFUSAL, permanent=True))
    sys.exit(78)


def _find_no_room(child: Child) -> None:
    child.send(LoaderFailed(code="out-of-memory", message="it needs 15.0 GiB, 2.0 GiB are free"))
    sys.exit(1)


# As the real loader's proof says it.
REFUSAL = (
    "model.layers.3.mlp.experts.quant_method.kernel.workspace: missing (vllm.Method of model.layers.3.mlp.experts: "
    "rerun: not offered); this model cannot be attached, load it from disk"
)

FAULTS: dict[str, Callable[[Child], None]] = {
    "sigkill": lambda child: os.kill(os.getpid(), signal.SIGKILL),
    "sigsegv": lambda child: os.kill(os.getpid(), signal.SIGSEGV),
    "exception": _raise,
    "exit-0": lambda child: sys.exit(0),
    "exit-3-silently": lambda child: os._exit(3),
    "hang": _hang,
    "hang-while-talking": _hang_while_talking,
    "eat-memory": _eat_memory,
    "garbage": lambda child: send_packet(child.sock, b"\xff\xff garbage"),
    "refuse": _refuse,
    "no-room": _find_no_room,
    "cannot-prove": _cannot_prove,
}


def _die_with_parent() -> None:
    # As the real loader does, whose module would take half a second to import here.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    _die_with_parent()
    job = decode_job(sys.stdin.buffer.read())
    if "x_spawns" in job.engine:
        with open(job.engine["x_spawns"], "a") as f:
            f.write(f"{job.cache} {job.generation} {os.getpid()}\n")
    Child(job).run()


if __name__ == "__main__":
    main()
