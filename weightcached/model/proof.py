"""The proof: attach a packed generation as an engine would, and compare with the model that was
loaded.

compare() looks at modules, parameters, buffers, attributes, quantization and kernel objects: path,
type, kind, persistence, dtype, shape, stride, offset, which names are one object, which share a
storage; bytes by digest. If a restorable value differs, the plan records it and the attach is
repeated. Any other difference gives its hook the next plan (plans.py), or refuses the load if there
is none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from weightcached.errors import SegmentError
from weightcached.index.tensors import ModulePlan, TensorIndex
from weightcached.model.bind import Binder, Hooks, PathError, Storages
from weightcached.model.hashing import SegmentHasher
from weightcached.model.pack import plain_storage
from weightcached.model.plans import Difference, HooksFailedError, Plans
from weightcached.model.values import loaded_module
from weightcached.model.walk import TensorSlot, ValueSlot, type_name, walk
from weightcached.segments.api import Mapping


class ModelSlots(NamedTuple):
    """A model's slots in comparable form: `tensors` and `values` by path."""

    tensors: dict[str, tuple[Any, ...]]
    values: dict[str, ValueSlot]


def slots_of(model: nn.Module) -> ModelSlots:
    """The model as it is now, without its tensors.

    Raises UnsupportedQuantForIPCError for a model that cannot be packed.
    """
    tensors: dict[str, tuple[Any, ...]] = {}
    values: dict[str, ValueSlot] = {}
    objects: dict[int, str] = {}
    storages: dict[int, str] = {}
    for slot in walk(model):
        if isinstance(slot, TensorSlot):
            tensors[slot.path] = _tensor_signature(slot, objects, storages)
        else:
            values[slot.path] = slot
    return ModelSlots(tensors, values)


def _tensor_signature(
    slot: TensorSlot, objects: dict[int, str], storages: dict[int, str]
) -> tuple[Any, ...]:
    tensor = slot.tensor
    same_object = objects.setdefault(id(tensor), slot.path)
    memory = plain_storage(slot)
    storage = storages.setdefault(memory._cdata, slot.path) if memory.nbytes() else None
    return (
        slot.kind, slot.persistent, str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()),
        int(tensor.storage_offset()), tensor.device.type, _class_of(tensor), same_object, storage,
    )  # fmt: skip


def _class_of(tensor: torch.Tensor) -> str:
    name = type_name(type(tensor))
    # vLLM's own parameter classes only say how to read a checkpoint, which is over. If a hook
    # renames such a parameter, it keeps its class; the engine's model, which was never loaded, has
    # none of that class there.
    return _PARAMETER if name.startswith("vllm.model_executor.parameter.") else name


_PARAMETER = type_name(nn.Parameter)


_SIGNATURE = (
    "kind", "persistence", "dtype", "shape", "stride", "storage offset", "device", "class", "object shared with",
    "storage shared with",
)  # fmt: skip


def tensor_differences(loaded: ModelSlots, attached: ModelSlots) -> list[Difference]:
    """The differences between the tensors of two models, in the order of the loaded one."""
    found = []
    for path, ours in loaded.tensors.items():
        theirs = attached.tensors.get(path)
        if theirs is None:
            found.append(Difference(path, "missing"))
            continue
        what = next(
            ((w, a, b) for w, a, b in zip(_SIGNATURE, ours, theirs, strict=True) if a != b), None
        )
        if what is not None:
            found.append(Difference(path, f"{what[0]} is {what[2]}, loaded as {what[1]}"))
    extra = (path for path in attached.tensors if path not in loaded.tensors)
    return found + [Difference(path, "not in the loaded model") for path in extra]


def value_differences(
    loaded: ModelSlots, attached: ModelSlots
) -> tuple[dict[str, Any], list[Difference]]:
    """(values to restore by path, differences that cannot be restored)."""
    restore: dict[str, Any] = {}
    found = []
    for path, ours in loaded.values.items():
        theirs = attached.values.get(path)
        if theirs is not None and _equal_as_encoded(theirs.wire, ours.wire):
            continue
        if ours.restorable:
            restore[path] = ours.wire
        else:
            found.append(
                Difference(
                    path, f"is {theirs.wire if theirs else 'missing'}, loaded as {ours.wire}"
                )
            )
    for path, extra in attached.values.items():
        if path not in loaded.values and path not in loaded.tensors:
            found.append(Difference(path, f"{extra.wire} is not in the loaded model"))
    return restore, found


def _equal_as_encoded(a: Any, b: Any) -> bool:
    # As encoded: for Python True equals 1 and 1.0, and NaN nothing.
    return msgspec.msgpack.encode(a) == msgspec.msgpack.encode(b)


class _NoHooks:
    """On loaded weights an engine post-processes after binding, so the proof ends before that."""

    def module_of(self, name: str) -> ModuleType:
        return loaded_module(name)

    def before_binding(self, model: nn.Module, plans: Sequence[ModulePlan]) -> None:
        pass

    def after_binding(
        self, model: nn.Module, plans: Sequence[ModulePlan], shared: Collection[int]
    ) -> None:
        pass


def prove(
    loaded: ModelSlots,
    index: TensorIndex,
    mapping: Mapping,
    device: torch.device,
    *,
    built: Callable[[], AbstractContextManager[nn.Module]],
    hooks: Hooks,
    plans: Sequence[ModulePlan],
) -> TensorIndex:
    """Attach, compare, and return the index with the plans that passed.

    If a hook's plan fails, the hook gets the next one of rerun, replay, restore, and a new model is
    attached. built: a model on the meta device, for the time of the block; hooks: post-processing
    around binding, as the engine runs it; plans: the first ones to try. Raises
    UnsupportedQuantForIPCError naming the path of the first difference, SegmentError for wrong
    bytes.
    """
    if (wrong := first_wrong_storage(index, mapping, device)) is not None:
        raise SegmentError(
            f"{wrong}: the bytes in its segment do not have the digest that was made while packing"
        )
    hooks = hooks if index.stage == "processed" else _NoHooks()
    tried = Plans(plans)
    # Each time round either a hook gets its next plan, or values are recorded, which happens once
    # for a set of plans.
    while True:
        attempt = msgspec.structs.replace(index, modules=tried.records())
        try:
            attached, leftovers = _attach_and_read(attempt, mapping, device, built, hooks)
        except HooksFailedError as e:
            tried.advance_hooks(e.failures, e)
            continue
        except PathError as e:
            tried.advance_alike(e.path, e)
            continue
        restore, others = value_differences(loaded, attached)
        differences = tensor_differences(loaded, attached) + others
        if restore and tried.values and not differences:
            differences = [Difference(path, "cannot be restored") for path in restore]
        if differences:
            tried.advance(differences)
        elif restore:
            tried.values = restore
        else:
            # Looking for them takes a walk over the model, which each engine is spared.
            return msgspec.structs.replace(attempt, leftovers=leftovers)


def _attach_and_read(
    index: TensorIndex,
    mapping: Mapping,
    device: torch.device,
    built: Callable[[], AbstractContextManager[nn.Module]],
    hooks: Hooks,
) -> tuple[ModelSlots, list[str]]:
    """The model as an engine would attach it, and the tensors that attaching removed.

    Its private tensors are freed before the next attempt copies them again.
    """
    with built() as model:
        binder = Binder(model, index, Storages(index, mapping, device, copy=False))
        binder.attach(hooks)
        return slots_of(model), binder.leftovers


def first_wrong_storage(index: TensorIndex, mapping: Mapping, device: torch.device) -> str | None:
    """Digest all mapped storages; the first tensor over the first storage that differs, or None."""
    names: dict[int | None, str] = {}
    for record in index.tensors:
        names.setdefault(record.storage, record.names[0])
    with SegmentHasher(max((s.nbytes for s in index.segments), default=0), device) as hasher:
        for number, segment in enumerate(index.segments):
            members = [i for i, storage in enumerate(index.storages) if storage.segment == number]
            spans = [(index.storages[i].offset_bytes, index.storages[i].nbytes) for i in members]
            found = hasher.digests(mapping.view(number, 0, segment.nbytes), spans)
            for i, digest in zip(members, found, strict=True):
                if digest != index.storages[i].digest:
                    return names.get(i, f"storage {i}")
    return None
