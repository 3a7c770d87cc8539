"""The proof: attach a packed generation as an engine would, and compare with the model that was loaded.

compare() looks at modules, parameters, buffers, attributes, quantization and kernel objects: path, type, kind,
persistence, dtype, shape, stride, offset, which names are one object, which share a storage; bytes by digest. A
restorable value that differs is recorded in the plan and the attach repeated; any other difference refuses the load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from weightcache_loader.attach import Binder, Storages
from weightcache_loader.walk import TensorSlot, ValueSlot, type_name, walk
from weightcached.errors import SegmentError, UnsupportedQuantForIPCError
from weightcached.index import ModulePlan, TensorIndex
from weightcached.loader.hashing import SegmentHasher
from weightcached.loader.pack import plain_storage
from weightcached.segments.api import Mapping


class Snapshot(NamedTuple):
    """A model's slots in comparable form: `tensors` and `values` by path."""

    tensors: dict[str, tuple[Any, ...]]
    values: dict[str, ValueSlot]


def snapshot(model: nn.Module) -> Snapshot:
    """The model as it is now; holds no tensors. Raises UnsupportedQuantForIPCError for one that cannot be packed."""
    tensors: dict[str, tuple[Any, ...]] = {}
    values: dict[str, ValueSlot] = {}
    objects: dict[int, str] = {}
    storages: dict[int, str] = {}
    for slot in walk(model):
        if isinstance(slot, TensorSlot):
            tensors[slot.path] = _tensor_signature(slot, objects, storages)
        else:
            values[slot.path] = slot
    return Snapshot(tensors, values)


def _tensor_signature(slot: TensorSlot, objects: dict[int, str], storages: dict[int, str]) -> tuple[Any, ...]:
    tensor = slot.tensor
    same_object = objects.setdefault(id(tensor), slot.path)
    memory = plain_storage(slot)
    storage = storages.setdefault(memory._cdata, slot.path) if memory.nbytes() else None
    return (
        slot.kind, slot.persistent, str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()),
        int(tensor.storage_offset()), tensor.device.type, type_name(type(tensor)), same_object, storage,
    )  # fmt: skip


_SIGNATURE = (
    "kind", "persistence", "dtype", "shape", "stride", "storage offset", "device", "class", "object shared with",
    "storage shared with",
)  # fmt: skip


def first_tensor_difference(loaded: Snapshot, attached: Snapshot) -> str | None:
    """The first difference between two models' tensors as `path: what`, or None."""
    for path, ours in loaded.tensors.items():
        theirs = attached.tensors.get(path)
        if theirs is None:
            return f"{path}: missing"
        for what, a, b in zip(_SIGNATURE, ours, theirs, strict=True):
            if a != b:
                return f"{path}: {what} is {b}, loaded as {a}"
    for path in attached.tensors:
        if path not in loaded.tensors:
            return f"{path}: not in the loaded model"
    return None


def value_differences(loaded: Snapshot, attached: Snapshot) -> tuple[dict[str, Any], str | None]:
    """(values to restore by path, the first difference that cannot be restored as `path: what` or None)."""
    restore: dict[str, Any] = {}
    for path, ours in loaded.values.items():
        theirs = attached.values.get(path)
        if theirs is not None and _same(theirs.wire, ours.wire):
            continue
        if not ours.restorable:
            return restore, f"{path}: is {theirs.wire if theirs else 'missing'}, loaded as {ours.wire}"
        restore[path] = ours.wire
    for path, extra in attached.values.items():
        if path not in loaded.values and path not in loaded.tensors:
            return restore, f"{path}: {extra.wire} is not in the loaded model"
    return restore, None


def _same(a: Any, b: Any) -> bool:
    # As encoded: for Python True equals 1 and 1.0, and NaN nothing.
    return msgspec.msgpack.encode(a) == msgspec.msgpack.encode(b)


def prove(
    loaded: Snapshot,
    index: TensorIndex,
    mapping: Mapping,
    device: torch.device,
    *,
    build: Callable[[], nn.Module],
    run_hooks: Callable[[nn.Module], None],
) -> TensorIndex:
    """Attach, compare, and return the index with the plan that passed.

    build: makes a model on the meta device; run_hooks: what the engine runs between binding and use.
    Raises UnsupportedQuantForIPCError naming the path of the first difference, SegmentError for wrong bytes.
    """
    if (wrong := first_wrong_storage(index, mapping, device)) is not None:
        raise SegmentError(f"{wrong}: the bytes in its segment do not have the digest that was made while packing")
    for attempt in range(2):
        model = build()
        Binder(model, index, Storages(index, mapping, device, copy=False)).attach(lambda m=model: run_hooks(m))  # type: ignore[misc]
        attached = snapshot(model)
        if (difference := first_tensor_difference(loaded, attached)) is not None:
            raise UnsupportedQuantForIPCError(f"{difference}; this model cannot be attached, load it from disk")
        restore, difference = value_differences(loaded, attached)
        if difference is not None or (restore and attempt):
            difference = difference or f"{next(iter(restore))}: cannot be restored"
            raise UnsupportedQuantForIPCError(f"{difference}; this model cannot be attached, load it from disk")
        if not restore:
            return index
        index = msgspec.structs.replace(index, modules=_restoring(restore))
    raise AssertionError("unreachable")


def first_wrong_storage(index: TensorIndex, mapping: Mapping, device: torch.device) -> str | None:
    """Digest all storages as mapped; the first tensor over the first one whose bytes differ, or None."""
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


def _restoring(values: dict[str, Any]) -> list[ModulePlan]:
    by_owner: dict[str, dict[str, msgspec.Raw]] = {}
    for path, wire in values.items():
        owner = path.rpartition(".")[0]
        by_owner.setdefault(owner, {})[path] = msgspec.Raw(msgspec.msgpack.encode(wire))
    return [ModulePlan(module=owner, plan="restore", values=raw) for owner, raw in by_owner.items()]
