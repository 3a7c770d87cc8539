"""Model trees without vLLM, and the way from a loaded model to segments, index and attached model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Self

import msgspec
import torch
from torch import nn

from weightcached.checkpoint.identity import CheckpointIdentity
from weightcached.index import tensors as index_format
from weightcached.index.key import WeightCacheKey
from weightcached.index.tensors import (
    LoadReport,
    ModulePlan,
    SegmentRecord,
    StorageRecord,
    TensorIndex,
    TensorRecord,
)
from weightcached.model import pack, proof
from weightcached.model.bind import Binder, Hooks, Storages, skeleton_of
from weightcached.model.values import loaded_module
from weightcached.segments.host import HostBackend, HostMapping
from weightcached.system.fds import OwnedFd, close_all

CPU = torch.device("cpu")
Build = Callable[[], nn.Module]
RunHooks = Callable[[Any], None]


class AfterBinding:
    """Post-processing by one function, run after binding with any plans."""

    def __init__(self, run: RunHooks) -> None:
        self._run = run

    def module_of(self, name: str) -> ModuleType:
        return loaded_module(name)

    def before_binding(self, model: nn.Module, plans: Sequence[ModulePlan]) -> None:
        pass

    def after_binding(
        self, model: nn.Module, plans: Sequence[ModulePlan], shared: Collection[int]
    ) -> None:
        self._run(model)


NO_HOOKS = AfterBinding(lambda model: None)


def an_index(
    tensors: list[TensorRecord] | None = None,
    *,
    segments: list[SegmentRecord] | None = None,
    storages: list[StorageRecord] | None = None,
    skeleton: str = "",
    **changed: Any,
) -> TensorIndex:
    """A tensor index of cpu0; by default one segment, one storage of 4096 bytes, no tensor."""
    fields: dict[str, Any] = {
        "software": "test",
        "backend": "host",
        "driver": "linux",
        "boot_id": "boot",
        "device": "cpu0",
        "cache": "tiny/target",
        "role": "target",
        "generation": 1,
        "spec_digest": "spec",
        "stage": "loaded",
        "skeleton": skeleton,
        "key": WeightCacheKey(checkpoint=CheckpointIdentity(root="/models/tiny")),
        "segments": [SegmentRecord(4096, private=False)] if segments is None else segments,
        "storages": [StorageRecord(0, 0, 4096, bytes(16))] if storages is None else storages,
        "tensors": tensors or [],
        "load": LoadReport(seconds=1.0, finished_at=2.0),
    }
    return TensorIndex(**(fields | changed))


@dataclass(frozen=True)
class Packed:
    """A model as its loader leaves it: its snapshot, its decoded index, its segments' descriptors."""

    loaded: proof.ModelSlots
    index: TensorIndex
    fds: list[OwnedFd]
    build: Build

    @classmethod
    def of(cls, build: Build, change: Callable[[Any], object] = lambda model: None) -> Self:
        """Build, post-process, and pack. `build` is called on the meta device for engines."""
        model = build()
        change(model)
        return cls.of_loaded(model, build)

    @classmethod
    def of_loaded(cls, model: nn.Module, build: Build) -> Self:
        """Pack a model, which has no usable tensors afterwards."""
        loaded = proof.slots_of(model)
        records, sources = pack.describe(model)
        packed = pack.pack(records, sources, HostBackend(), lambda done, total: None)
        index = an_index(
            packed.tensors,
            segments=packed.segments,
            storages=packed.storages,
            skeleton=skeleton_of(on_meta(build)),
            stage="processed",
        )
        return cls(loaded, index_format.decode(index_format.encode(index)), packed.fds, build)

    def but(self, **changed: Any) -> Self:
        return replace(self, **changed)

    def map(self) -> HostMapping:
        return HostBackend().map(
            [fd.dup() for fd in self.fds], [s.nbytes for s in self.index.segments]
        )

    def attach(self, hooks: Hooks | RunHooks = NO_HOOKS, *, copy: bool = False) -> Any:
        """A new model of an engine."""
        mapping = self.map()
        model = on_meta(self.build)
        Binder(model, self.index, Storages(self.index, mapping, CPU, copy=copy)).attach(
            _as_hooks(hooks)
        )
        mapping.close()
        return model

    def prove(
        self, hooks: Hooks | RunHooks = NO_HOOKS, plans: Sequence[ModulePlan] = ()
    ) -> TensorIndex:
        """The loader's proof, with this snapshot and index."""
        with ExitStack() as stack:
            mapping = self.map()
            stack.callback(mapping.close)
            return proof.prove(
                self.loaded, self.index, mapping, CPU,
                built=lambda: nullcontext(on_meta(self.build)), hooks=_as_hooks(hooks), plans=plans,
            )  # fmt: skip

    def close(self) -> None:
        close_all(self.fds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def without_leftovers(index: TensorIndex) -> TensorIndex:
    """The index as it was before the proof looked for leftovers."""
    return msgspec.structs.replace(index, leftovers=None)


def _as_hooks(hooks: Hooks | RunHooks) -> Hooks:
    return AfterBinding(hooks) if callable(hooks) else hooks


def on_meta(build: Build) -> nn.Module:
    with torch.device("meta"):
        return build()


def random_bytes(tensor: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Fill the storage below a tensor of any dtype with reproducible bytes. Returns the tensor."""
    if tensor.is_meta:
        return tensor
    memory = bytes_below(tensor)
    generator = torch.Generator().manual_seed(seed)
    memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8, generator=generator))
    return tensor


def bytes_below(tensor: torch.Tensor) -> torch.Tensor:
    """uint8, the whole storage below a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
