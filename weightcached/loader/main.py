"""The loader child's life: read the job, load, pack, prove, hand over, tune, exit.

Started by the daemon with the interpreter of the model's engine. Its job comes as JSON on standard
input, its messages go over the inherited socket, its log to standard error. A failure is sent as
LoaderFailed and ends the process with status 1, or 78 if a retry is pointless; the daemon drops an
incomplete delivery.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from weightcached import __version__
from weightcached.checkpoint.identity import CheckpointIdentity
from weightcached.errors import (
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
from weightcached.system.cgroups import memory_room
from weightcached.system.fds import close_all
from weightcached.system.gpus import check_present, holders
from weightcached.system.paths import is_host_device
from weightcached.system.text import bytes_text
from weightcached.system.versions import installed
from weightcached.wire.delivery import DaemonChannel, run_job
from weightcached.wire.loader_job import LoaderJob
from weightcached.wire.messages import LoaderKey

if TYPE_CHECKING:
    from weightcached.vllm_compat.group_rank import Peers

log = logging.getLogger("weightcached.loader")

# As it was given: vLLM sets variables of its own.
_ENVIRONMENT = dict(os.environ)


def main() -> None:
    """Run the job on standard input and exit."""
    run_job(_run)


def _run(job: LoaderJob, daemon: DaemonChannel) -> None:
    daemon.phase("configuring")
    # Imports make objects by the million and no garbage: looking for it is a quarter of their time.
    gc.disable()
    # A context takes device memory, which is for the load whose turn it is.
    backend = None if job.waits else _open(job.device)
    # Before vLLM's imports, which take seconds: a missing checkpoint fails at once.
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
            solo_rank.init_workspace(vllm_config)
            _load(job, daemon, backend, vllm_config, model_config, None)
        return
    daemon.phase("meeting")
    with group_rank.group_rank(
        vllm_config, job, job.rendezvous, lambda: daemon.progress(0, 0)
    ) as peers:
        solo_rank.init_workspace(vllm_config)
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
    _check_memory(job, backend, built, vllm_config)
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
        daemon.hand_over(index, packed.fds, peak_bytes=_peak_bytes(), checkpoint_bytes=counter.done)

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
    """The key, with the record of the files that an engine would choose now, all of which exist."""
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
    """The record of the files read, with its sample. Raises LoadError if one has changed."""
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
    job: LoaderJob,
    backend: Backend,
    built: Callable[[], AbstractContextManager[Any]],
    vllm_config: Any,
) -> None:
    """Refuse before loading. Raises OutOfDeviceMemoryError: needed, free, and who holds memory."""
    from weightcached.vllm_compat import room

    with built() as bare:
        needed = room.least_bytes(bare, vllm_config)
    free, total = backend.free_bytes()
    if needed <= free:
        return
    raise OutOfDeviceMemoryError(
        f"{job.cache} needs at least {bytes_text(needed)} on {job.device}, {bytes_text(free)} of "
        f"{bytes_text(total)} are free; "
        f"{_why_no_room(backend, job.device, total)}"
    )


def _why_no_room(backend: Backend, device: str, total: int) -> str:
    """The limit or the holders of the memory, and a remedy."""
    if backend.name == "host" and (room := memory_room()) and room.limit == total:
        return f"the limit is {room.file}: raise MemoryMax= of the unit or of its slice, or use another device"
    held = (
        [f"pid {h.pid} ({h.name}) {bytes_text(h.nbytes)}" for h in holders(device)]
        if backend.name == "cuda"
        else []
    )
    return (
        f"held by {', '.join(held) or 'no listed process'}: stop one, 'weightcachectl drop' a cache, "
        "or use another device"
    )


def _peak_bytes() -> int:
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
