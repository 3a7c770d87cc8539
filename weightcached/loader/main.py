"""The loader child's life: read the job, load, pack, prove, hand over, tune, exit.

Started by the daemon with the interpreter of the model's engine. Its job comes as JSON on standard
input, what it has to say goes over the inherited socket, its log to standard error. Whatever fails
is told as LoaderFailed and ends the process with status 1; the daemon drops what has not been
handed over completely.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from weightcached import __version__
from weightcached.checkpoint.identity import CheckpointIdentity
from weightcached.errors import (
    EXIT_CONFIG,
    CheckpointError,
    CheckpointMissingError,
    LoadError,
    OutOfDeviceMemoryError,
    SegmentError,
    WeightcachedError,
)
from weightcached.index import tensors as index_format
from weightcached.index.key import WeightCacheKey
from weightcached.segments.api import Backend, open_backend
from weightcached.system.fds import OwnedFd, close_all, sealed_memfd
from weightcached.system.gpus import check_present, holders
from weightcached.system.paths import is_host_device
from weightcached.system.versions import installed
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

if TYPE_CHECKING:
    from weightcached.vllm_compat.group_rank import Peers

log = logging.getLogger("weightcached.loader")

# As it was given: vLLM sets variables of its own.
_ENVIRONMENT = dict(os.environ)
_PR_SET_PDEATHSIG = 1
_PROGRESS_INTERVAL_S = 0.2


class DaemonChannel:
    """The socket to the daemon, and the time spent in each phase."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._phase = ""
        self._phase_began = self._started = time.monotonic()
        self._last_sent = 0.0
        self.phases: dict[str, float] = {}

    def send(self, message: Message, fds: list[OwnedFd] | None = None) -> None:
        send_packet(self._sock, encode(message), [fd.fileno() for fd in fds or []])

    def phase(self, name: str, total_bytes: int = 0) -> None:
        """A new phase begins."""
        now = time.monotonic()
        if self._phase:
            self.phases[self._phase] = self.phases.get(self._phase, 0.0) + now - self._phase_began
        self._phase, self._phase_began = name, now
        self._last_sent = 0.0
        self.progress(0, total_bytes)

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """Bytes within the phase; sent at most a few times a second."""
        now = time.monotonic()
        if now - self._last_sent >= _PROGRESS_INTERVAL_S or done_bytes == total_bytes:
            self._last_sent = now
            self.send(
                LoaderProgress(phase=self._phase, done_bytes=done_bytes, total_bytes=total_bytes)
            )

    def wait_for_turn(self) -> None:
        """Wait until the device is free for this load. Raises LoadError when the daemon goes away
        instead.
        """
        self.phase("waiting")
        if not self._sock.recv(len(YOUR_TURN)):
            raise LoadError("the daemon hung up before this load had its turn")

    def seconds(self) -> float:
        """Since the start, without the time spent waiting for others."""
        return time.monotonic() - self._started - self.phases.get("waiting", 0.0)


def main() -> None:
    """Run the job on standard input and exit."""
    _die_with_parent()
    _prefer_for_oom_killer()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )
    job = decode_job(sys.stdin.buffer.read())
    daemon = DaemonChannel(socket.socket(fileno=job.socket_fd))
    try:
        _run(job, daemon)
    except BaseException as e:
        _tell(daemon, e)
        # Not through the interpreter's shutdown: vLLM's threads and torch's groups may hang or
        # crash there.
        _exit(EXIT_CONFIG if _is_permanent(e) else 1)
    _exit(0)


def _exit(status: int) -> None:
    sys.stderr.flush()
    os._exit(status)


def _tell(daemon: DaemonChannel, e: BaseException) -> None:
    traceback.print_exc()
    code = e.code if isinstance(e, WeightcachedError) else "load-failed"
    text = str(e) if isinstance(e, WeightcachedError) else f"{type(e).__name__}: {e}"
    try:
        daemon.send(LoaderFailed(code=code, message=text[:10_000], permanent=_is_permanent(e)))
    except OSError as gone:
        log.error("the daemon did not hear of the failure: %s", gone)
    # The last line of standard error is the failure's text should the message be lost.
    sys.stderr.write(f"{text}\n")


def _is_permanent(e: BaseException) -> bool:
    return isinstance(e, WeightcachedError) and e.exit_status == EXIT_CONFIG


def _die_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _prefer_for_oom_killer() -> None:
    # The loader can be started again; what the daemon and the engines hold cannot.
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
        score.write("800")


def _run(job: LoaderJob, daemon: DaemonChannel) -> None:
    daemon.phase("configuring")
    # Imports make objects by the million and no garbage: looking for it is a quarter of their time.
    gc.disable()
    # A context takes device memory, which is for the load whose turn it is.
    backend = None if job.waits else _open(job.device)
    # Before vLLM's imports, which take seconds: a checkpoint that is not there is said at once.
    _check_checkpoint(job)
    daemon.phase("importing")
    import torch

    from weightcached.segments.cuda import CudaBackend
    from weightcached.vllm_compat import group_rank, solo_rank

    daemon.phase("configuring")
    vllm_config = solo_rank.create_vllm_config(job)
    vllm_config, model_config = solo_rank.configs_of(vllm_config, job.role)
    if vllm_config.device_config.device_type != ("cpu" if is_host_device(job.device) else "cuda"):
        raise WeightcachedError(
            f"{job.cache}: the vLLM of {sys.executable} runs on {vllm_config.device_config.device_type}, "
            f"the device is {job.device}"
        )
    gc.freeze()
    gc.enable()
    if backend is None:
        daemon.wait_for_turn()
        backend = _open(job.device)
    if isinstance(backend, CudaBackend):
        torch.cuda.set_device(0)
        if (warning := backend.persistence_warning()) is not None:
            log.warning("%s", warning)
    if job.rendezvous is None:
        with solo_rank.solo_rank(vllm_config, job.rank):
            _load(job, daemon, backend, vllm_config, model_config, None)
        return
    daemon.phase("meeting")
    with group_rank.group_rank(
        vllm_config, job, job.rendezvous, lambda: daemon.progress(0, 0)
    ) as peers:
        _load(job, daemon, backend, vllm_config, model_config, peers)


def _open(device: str) -> Backend:
    try:
        return open_backend(device)
    except SegmentError:
        # CUDA says the same of a name that no GPU has and of a driver that finds none, which may
        # come back.
        check_present(device)
        raise


def _check_checkpoint(job: LoaderJob) -> None:
    from weightcached.checkpoint.identity import check_headers, record_checkpoint
    from weightcached.config.drafts import checkpoint_arguments
    from weightcached.config.manifest import check_checkpoint

    check_checkpoint(job.engine)
    arguments = checkpoint_arguments(job.engine, job.role)
    if os.path.isdir(arguments["model"]) and arguments["load_format"] in (
        "auto",
        "hf",
        "safetensors",
    ):
        check_headers(record_checkpoint(**arguments))


def _load(
    job: LoaderJob,
    daemon: DaemonChannel,
    backend: Backend,
    vllm_config: Any,
    model_config: Any,
    peers: Peers | None,
) -> None:
    from weightcached.loader.watch import Watch
    from weightcached.model import bind, pack, proof
    from weightcached.vllm_compat import build, draft_sharing, group_rank, solo_rank
    from weightcached.vllm_compat.hooks import PostProcessing

    key = _key_before(job, vllm_config, model_config)
    daemon.send(LoaderKey(key=key))
    if peers is not None:
        peers.agree("known by their keys", group_rank.comparable(key))
    stage = build.stage_of_platform()
    device = _device(backend)

    @contextmanager
    def built() -> Iterator[Any]:
        with build.isolated_build(vllm_config, keep=False):
            yield build.build_on_meta(vllm_config, model_config)

    total = sum(file.size for file in key.checkpoint.files)
    _check_memory(job, backend, total, vllm_config, model_config)
    daemon.phase("weights", total)
    counter = Counter(daemon, total)
    watch = Watch(key.checkpoint)
    with watch.watching():
        model = solo_rank.load_for_stage(vllm_config, model_config, stage, counter)
    if peers is not None:
        # From here on nobody needs the others, nor the place that rank 0 serves.
        daemon.phase("meeting")
        peers.meet("loaded")
    read = watch.read(str(vllm_config.load_config.load_format))
    key = msgspec.structs.replace(key, checkpoint=_still_as_read(job, read))
    if job.role == "draft":
        draft_sharing.leave_out(model, vllm_config)
    loaded = proof.slots_of(model)
    daemon.phase("packing")
    records, sources = pack.describe(model)
    with ExitStack() as undo:
        packed = pack.pack(records, sources, backend, daemon.progress)
        undo.callback(close_all, packed.fds)
        del model, sources
        daemon.phase("proving")
        with built() as bare:
            skeleton = bind.skeleton_of(bare)
            hooks = PostProcessing(model_config, device, stage=stage)
            plans = hooks.first_plans(bare)
            del bare
        index = index_format.TensorIndex(
            software=f"weightcached {__version__}",
            backend=backend.name,
            driver=backend.driver(),
            boot_id=job.boot_id,
            device=job.device,
            cache=job.cache,
            role=job.role,
            generation=job.generation,
            spec_digest=job.spec_digest,
            stage=stage,  # type: ignore[arg-type]
            skeleton=skeleton,
            key=key,
            segments=packed.segments,
            storages=packed.storages,
            tensors=packed.tensors,
            versions=installed(),
            environment={
                name: _ENVIRONMENT[name] for name in key.environment if name in _ENVIRONMENT
            },
            load=index_format.LoadReport(seconds=0.0, finished_at=0.0),
        )
        mapping = backend.map([fd.dup() for fd in packed.fds], [s.nbytes for s in packed.segments])
        undo.callback(mapping.close)
        index = proof.prove(loaded, index, mapping, device, built=built, hooks=hooks, plans=plans)
        _hand_over(daemon, index, packed.fds, _peak_bytes(), counter.done)

        from weightcached.vllm_compat import tuning

        def as_engine(model: Any) -> None:
            storages = bind.Storages(index, mapping, device, copy=False)
            bind.Binder(model, index, storages).attach(hooks)

        tuning.run(
            vllm_config,
            model_config,
            device,
            as_engine,
            role=job.role,
            begin=lambda: daemon.phase("tuning"),
        )


def _key_before(job: LoaderJob, vllm_config: Any, model_config: Any) -> WeightCacheKey:
    """The key, with the record of what an engine would choose now, which is there to be read."""
    from weightcached.checkpoint.identity import with_sample
    from weightcached.vllm_compat.fetch import fetch
    from weightcached.vllm_compat.key import build_key

    failure = fetch(vllm_config, model_config)
    try:
        key = build_key(vllm_config, model_config, role=job.role)
    except CheckpointError as e:
        if not failure:
            raise
        raise CheckpointMissingError(f"{e}; the download failed: {failure}") from e
    return msgspec.structs.replace(key, checkpoint=with_sample(key.checkpoint))


def _still_as_read(job: LoaderJob, read: CheckpointIdentity) -> CheckpointIdentity:
    """The record of what was read, with its sample. Raises LoadError if a file is another by now."""
    from weightcached.checkpoint.identity import changed_files, with_sample

    if changed := changed_files(read):
        raise LoadError(
            f"{job.cache}: {changed[0]} in {read.root} changed while it was loaded: "
            "wait until it is complete, then 'weightcachectl reload'"
        )
    return read if read.sample else with_sample(read)


def _device(backend: Backend) -> Any:
    import torch

    return (
        torch.device("cpu")
        if backend.name == "host"
        else torch.device("cuda", torch.cuda.current_device())
    )


class Counter:
    """Counts checkpoint bytes as the model takes them, and reports progress."""

    def __init__(self, daemon: DaemonChannel, total: int) -> None:
        self._daemon = daemon
        self._total = total
        self.done = 0

    def __call__(self, nbytes: int) -> None:
        self.done += nbytes
        self._daemon.progress(min(self.done, self._total), self._total)


def _check_memory(
    job: LoaderJob, backend: Backend, checkpoint_bytes: int, vllm_config: Any, model_config: Any
) -> None:
    """Refuse before anything is loaded. Raises OutOfDeviceMemoryError with needed, free, and who
    holds the memory.
    """
    from weightcached.vllm_compat.room import least_bytes

    needed = least_bytes(checkpoint_bytes, vllm_config, model_config)
    free, total = backend.free_bytes()
    if needed <= free:
        return
    held = (
        [f"pid {h.pid} ({h.name}) {_gib(h.nbytes)}" for h in holders(job.device)]
        if backend.name == "cuda"
        else []
    )
    raise OutOfDeviceMemoryError(
        f"{job.cache} needs at least {_gib(needed)} on {job.device}, {_gib(free)} of {_gib(total)} are free; held by "
        f"{', '.join(held) or 'no listed process'}: stop one, 'weightcachectl drop' a cache, or use another device"
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def _peak_bytes() -> int:
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0


def _hand_over(
    daemon: DaemonChannel,
    index: index_format.TensorIndex,
    fds: list[OwnedFd],
    peak_bytes: int,
    checkpoint_bytes: int,
) -> None:
    daemon.phase("publishing")
    spent = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in daemon.phases.items())
    log.info("%s took %.1f s: %s", index.cache, daemon.seconds(), spent)
    report = index_format.LoadReport(
        seconds=daemon.seconds(),
        finished_at=time.time(),
        phases=daemon.phases,
        peak_bytes=peak_bytes,
        checkpoint_bytes=checkpoint_bytes,
    )
    data = index_format.encode(msgspec.structs.replace(index, load=report))
    with sealed_memfd("weightcached-index", data) as index_fd:
        daemon.send(LoaderIndex(segments=len(fds), peak_bytes=peak_bytes), [index_fd])
    for first in range(0, len(fds), MAX_PACKET_FDS):
        daemon.send(Descriptors(first=first), fds[first : first + MAX_PACKET_FDS])
