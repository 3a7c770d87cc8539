"""One load in its stages: key, weights, packing, proof, delivery, tuning.

Imports torch at its top, so main.py imports it only once the checkpoint has been looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from weightcached import __version__
from weightcached.checkpoint.identity import CheckpointIdentity, changed_files, with_sample
from weightcached.errors import (
    CheckpointError,
    CheckpointMissingError,
    LoadError,
    OutOfDeviceMemoryError,
)
from weightcached.index.key import WeightCacheKey
from weightcached.index.tensors import LoadReport, TensorIndex
from weightcached.loader.watch import Watch
from weightcached.model import bind, pack, proof
from weightcached.segments.api import Backend
from weightcached.segments.api import Mapping as SegmentMapping
from weightcached.system.cgroups import memory_room
from weightcached.system.fds import close_all
from weightcached.system.gpus import holders
from weightcached.system.text import bytes_text
from weightcached.system.versions import installed
from weightcached.vllm_compat import build, draft_sharing, group_rank, room, solo_rank, tuning
from weightcached.vllm_compat.fetch import fetch
from weightcached.vllm_compat.hooks import PostProcessing
from weightcached.vllm_compat.key import build_key
from weightcached.wire.delivery import DaemonChannel
from weightcached.wire.loader_job import LoaderJob
from weightcached.wire.messages import LoaderKey


@dataclass(frozen=True)
class Proven:
    """A generation that can be attached, and the hooks for that."""

    index: TensorIndex
    mapping: SegmentMapping
    hooks: PostProcessing


class Load:
    """One load, from vLLM's configuration to the delivered generation. `environment` is the
    process's as it was given: vLLM sets variables of its own. `peers` are the other ranks of a
    group.
    """

    def __init__(
        self,
        job: LoaderJob,
        daemon: DaemonChannel,
        backend: Backend,
        vllm_config: Any,
        model_config: Any,
        *,
        environment: Mapping[str, str],
        peers: group_rank.Peers | None,
    ) -> None:
        self._job = job
        self._daemon = daemon
        self._backend = backend
        self._vllm_config = vllm_config
        self._model_config = model_config
        self._environment = environment
        self._peers = peers
        self._stage = build.stage_of_platform()
        self._device = (
            torch.device("cpu")
            if backend.name == "host"
            else torch.device("cuda", torch.cuda.current_device())
        )
        self._read_bytes = 0

    def run(self) -> None:
        """Load, pack, prove, deliver, tune. Raises a stage's error; delivers all or nothing."""
        key = self._announce_key()
        self._check_memory()
        model, read = self._load_weights(key)
        key = msgspec.structs.replace(key, checkpoint=self._check_unchanged(read))
        loaded = proof.slots_of(model)
        with ExitStack() as undo:
            packed = self._pack(model)
            undo.callback(close_all, packed.fds)
            # Its memory, before the proof needs as much again.
            del model
            proven = self._prove(key, packed, loaded, undo)
            self._deliver(proven.index, packed)
            self._tune(proven)

    @contextmanager
    def _built(self) -> Iterator[nn.Module]:
        """The model on the meta device, for the time of the block."""
        with build.isolated_build(self._vllm_config, keep=False):
            yield build.build_on_meta(self._vllm_config, self._model_config)

    # ---- key

    def _announce_key(self) -> WeightCacheKey:
        """Send the key: engines that start meanwhile learn that their cache is coming."""
        key = self._key_before()
        self._daemon.send(LoaderKey(key=key))
        if self._peers is not None:
            self._peers.agree("known by their keys", group_rank.comparable(key))
        return key

    def _key_before(self) -> WeightCacheKey:
        """The key, with the record of the files that an engine would choose now: all of them exist."""
        failure = fetch(self._vllm_config, self._model_config)
        try:
            key = build_key(self._vllm_config, self._model_config, role=self._job.role)
        except CheckpointError as e:
            if not failure:
                raise
            raise CheckpointMissingError(f"{e}; the download failed: {failure}") from e
        return msgspec.structs.replace(key, checkpoint=with_sample(key.checkpoint))

    # ---- room

    def _check_memory(self) -> None:
        """Refuse before loading. Raises OutOfDeviceMemoryError: needed, free, who holds memory."""
        with self._built() as bare:
            needed = room.least_bytes(bare, self._vllm_config)
        free, total = self._backend.free_bytes()
        if needed <= free:
            return
        raise OutOfDeviceMemoryError(
            f"{self._job.cache} needs at least {bytes_text(needed)} on {self._job.device}, "
            f"{bytes_text(free)} of {bytes_text(total)} are free; {self._explain_no_room(total)}"
        )

    def _explain_no_room(self, total: int) -> str:
        """The limit or the holders of the memory, and a remedy."""
        if self._backend.name == "host" and (limit := memory_room()) and limit.limit == total:
            return (
                f"the limit is {limit.file}: raise MemoryMax= of the unit or of its slice, "
                "or use another device"
            )
        held = (
            [f"pid {h.pid} ({h.name}) {bytes_text(h.nbytes)}" for h in holders(self._job.device)]
            if self._backend.name == "cuda"
            else []
        )
        return (
            f"held by {', '.join(held) or 'no listed process'}: stop one, 'weightcachectl drop' a cache, "
            "or use another device"
        )

    # ---- weights

    def _load_weights(self, key: WeightCacheKey) -> tuple[nn.Module, CheckpointIdentity]:
        """The model as vLLM loads it, and the record of the files that were read."""
        total = sum(file.size for file in key.checkpoint.files)
        self._daemon.phase("weights", total)

        def count(nbytes: int) -> None:
            self._read_bytes += nbytes
            self._daemon.progress(min(self._read_bytes, total), total)

        watch = Watch(key.checkpoint)
        with watch.watching():
            model = solo_rank.load_for_stage(
                self._vllm_config, self._model_config, self._stage, count
            )
        if self._peers is not None:
            # From here on nobody needs the others, nor the place that rank 0 serves.
            self._daemon.phase("meeting")
            self._peers.part("loaded")
        if self._job.role == "draft":
            draft_sharing.leave_out(model, self._vllm_config)
        return model, watch.read(str(self._vllm_config.load_config.load_format))

    def _check_unchanged(self, read: CheckpointIdentity) -> CheckpointIdentity:
        """The record of the files read, with its sample. Raises LoadError if one has changed."""
        if changed := changed_files(read):
            raise LoadError(
                f"{self._job.cache}: {changed[0]} in {read.root} changed while it was loaded: "
                "wait until it is complete, then 'weightcachectl reload'"
            )
        return read if read.sample else with_sample(read)

    # ---- packing

    def _pack(self, model: nn.Module) -> pack.Packed:
        self._daemon.phase("packing")
        records, sources = pack.describe(model)
        return pack.pack(records, sources, self._backend, self._daemon.progress)

    # ---- proof

    def _prove(
        self, key: WeightCacheKey, packed: pack.Packed, loaded: proof.ModelSlots, undo: ExitStack
    ) -> Proven:
        """Attach the packed generation, as an engine would. The mapping is closed by `undo`."""
        self._daemon.phase("proving")
        hooks = PostProcessing(self._model_config, self._device, stage=self._stage)
        with self._built() as bare:
            skeleton = bind.skeleton_of(bare)
            plans = hooks.first_plans(bare)
            del bare
        index = self._index_of(key, packed, skeleton)
        fds = [fd.dup() for fd in packed.fds]
        mapping = self._backend.map(fds, [segment.nbytes for segment in packed.segments])
        undo.callback(mapping.close)
        index = proof.prove(
            loaded, index, mapping, self._device, built=self._built, hooks=hooks, plans=plans
        )
        return Proven(index, mapping, hooks)

    def _index_of(self, key: WeightCacheKey, packed: pack.Packed, skeleton: str) -> TensorIndex:
        """The index before the proof, without plans and report."""
        environment = {
            name: self._environment[name] for name in key.environment if name in self._environment
        }
        return TensorIndex(
            software=f"weightcached {__version__}",
            backend=self._backend.name,
            driver=self._backend.driver(),
            boot_id=self._job.boot_id,
            device=self._job.device,
            cache=self._job.cache,
            role=self._job.role,
            generation=self._job.generation,
            spec_digest=self._job.spec_digest,
            stage=self._stage,  # type: ignore[arg-type]
            skeleton=skeleton,
            key=key,
            segments=packed.segments,
            storages=packed.storages,
            tensors=packed.tensors,
            versions=installed(),
            environment=environment,
            label=self._job.label,
            load=LoadReport(seconds=0.0, finished_at=0.0),
        )

    # ---- delivery and after

    def _deliver(self, index: TensorIndex, packed: pack.Packed) -> None:
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
        self._daemon.hand_over(
            index, packed.fds, peak_bytes=peak, checkpoint_bytes=self._read_bytes
        )

    def _tune(self, proven: Proven) -> None:
        """Tune on the generation as an engine has it; it is served whatever becomes of that."""

        def attach(model: nn.Module) -> None:
            storages = bind.Storages(proven.index, proven.mapping, self._device, copy=False)
            bind.Binder(model, proven.index, storages).attach(proven.hooks)

        tuning.run(
            self._vllm_config,
            self._model_config,
            self._device,
            attach,
            role=self._job.role,
            begin=lambda: self._daemon.phase("tuning"),
        )
