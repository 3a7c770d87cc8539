"""Pack a loaded model's tensors into segments, freeing each source as soon as it is copied.

Tensors of one storage are packed once; each keeps its offset and stride. Each packed storage is
compared with its source before the source is freed, and its digest is made from the segment's
bytes, not from the source's.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import nn

from weightcached.errors import SegmentError, UnsupportedQuantForIPCError
from weightcached.index.sharing import explain_written
from weightcached.index.tensors import Kind, SegmentRecord, StorageRecord, TensorRecord
from weightcached.model.bind import LOOKUP_ERRORS, look_up, resolve_owner
from weightcached.model.hashing import SegmentHasher
from weightcached.model.walk import TensorSlot, tensors, type_name
from weightcached.segments.api import Backend, WritableSegment
from weightcached.segments.packing import (
    Packing,
    StoragePlacement,
    StorageSpec,
    plan_segments,
    segment_nbytes_for,
)
from weightcached.system.fds import OwnedFd, close_all

Progress = Callable[[int, int], None]

_COMPARED_NBYTES = 64 << 20


class Packed(NamedTuple):
    """One descriptor and record per segment in mapping order, and the tensors over the storages."""

    fds: list[OwnedFd]
    segments: list[SegmentRecord]
    storages: list[StorageRecord]
    tensors: list[TensorRecord]


class StorageSource(NamedTuple):
    """One storage of the loaded model, and the names and kinds of the tensors over it."""

    storage: torch.UntypedStorage
    nbytes: int
    names: list[str]
    kinds: list[Kind]


def describe(model: nn.Module) -> tuple[list[TensorRecord], list[StorageSource]]:
    """Records of all tensors, one per object with all its names, and the distinct storages below
    them, in walk order.

    Raises UnsupportedQuantForIPCError for a tensor without plain memory behind it.
    """
    slots: dict[int, list[TensorSlot]] = {}
    for slot in tensors(model):
        _check_path(model, slot)
        slots.setdefault(id(slot.tensor), []).append(slot)
    sources: dict[int, int] = {}
    found: list[StorageSource] = []
    records: list[TensorRecord] = []
    for same in slots.values():
        storage = plain_storage(same[0])
        number: int | None = None
        if storage.nbytes():
            number = sources.setdefault(storage._cdata, len(found))
            if number == len(found):
                found.append(StorageSource(storage, storage.nbytes(), [], []))
            found[number].names.extend(slot.path for slot in same)
            # As its record says it, which is all that can be asked later.
            found[number].kinds.append(same[0].kind)
        records.append(_record(same, number))
    return records, found


def _check_path(model: nn.Module, slot: TensorSlot) -> None:
    try:
        found = look_up(*resolve_owner(model, slot.path))
    except LOOKUP_ERRORS:
        found = None
    if found is not slot.tensor:
        raise UnsupportedQuantForIPCError(
            f"{slot.path}: this path does not reach the tensor; dict keys must be text or integers"
        )


def plain_storage(slot: TensorSlot) -> torch.UntypedStorage:
    """A tensor's memory as shape, stride and dtype describe it.

    Raises UnsupportedQuantForIPCError if they do not describe it.
    """
    tensor = slot.tensor
    if tensor.is_meta:
        raise UnsupportedQuantForIPCError(f"{slot.path}: the loader left it on the meta device")
    if not _is_plain(tensor):
        raise UnsupportedQuantForIPCError(
            f"{slot.path}: {type_name(type(tensor))} of layout {tensor.layout} and dtype {tensor.dtype} is not a "
            "plain strided tensor"
        )
    return tensor.untyped_storage()


def _is_plain(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    # A wrapper subclass (torchao) keeps its data in inner tensors and flattens by protocol.
    return not (tensor.is_conj() or tensor.is_neg() or hasattr(tensor, "__tensor_flatten__"))


def _record(same: list[TensorSlot], storage: int | None) -> TensorRecord:
    tensor, first = same[0].tensor, same[0]
    is_subclass = isinstance(tensor, nn.Parameter) and type(tensor) is not nn.Parameter
    return TensorRecord(
        names=[slot.path for slot in same],
        kind=first.kind,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=list(tensor.shape),
        stride=list(tensor.stride()),
        storage=storage,
        storage_offset=int(tensor.storage_offset()),
        persistent=first.persistent,
        on_host=tensor.device.type == "cpu",
        param_class=type_name(type(tensor)) if is_subclass else "",
    )


def pack(
    records: list[TensorRecord], sources: list[StorageSource], backend: Backend, progress: Progress
) -> Packed:
    """Copy all sources into published segments and free them: the model has no usable tensors
    afterwards.

    A source over memory that is not torch's, e.g. of a NumPy array, goes with its last tensor.

    progress: called with (bytes packed, bytes in all). Raises SegmentError and
    OutOfDeviceMemoryError.
    """
    layout = plan_segments(
        [
            StorageSpec(source.nbytes, mutable=bool(explain_written(source.names, source.kinds)))
            for source in sources
        ],
        granularity=backend.granularity(),
        segment_nbytes=segment_nbytes_for(backend.free_bytes()[1]),
    )
    done, total = 0, sum(source.nbytes for source in sources)
    storages: list[StorageRecord | None] = [None] * len(sources)
    fds: list[OwnedFd] = []
    with ExitStack() as undo:
        undo.callback(close_all, fds)
        hasher = undo.enter_context(_hasher(layout, backend))
        for number, plan in enumerate(layout.segments):
            members = [i for i, place in enumerate(layout.placements) if place.segment == number]
            with ExitStack() as segment_open:
                segment = backend.create(plan.nbytes)
                segment_open.callback(segment.close)
                digests = _fill(
                    segment.tensor(), [(sources[i], layout.placements[i]) for i in members], hasher
                )
                fds.append(_publish(segment))
            for i, digest in zip(members, digests, strict=True):
                storages[i] = StorageRecord(
                    number, layout.placements[i].offset_bytes, sources[i].nbytes, digest
                )
                if sources[i].storage.resizable():
                    sources[i].storage.resize_(0)
                done += sources[i].nbytes
            if torch.cuda.is_initialized():
                # Back to the driver, where the next segment is allocated.
                torch.cuda.empty_cache()
            progress(done, total)
        hasher.close()
        undo.pop_all()
    records_of_segments = [SegmentRecord(plan.nbytes, plan.private) for plan in layout.segments]
    return Packed(fds, records_of_segments, [s for s in storages if s is not None], records)


def _publish(segment: WritableSegment) -> OwnedFd:
    try:
        return segment.publish()
    except SegmentError:
        # A tensor over it may hang in a cycle. Not before each segment: a collection looks through
        # all of vLLM's heap.
        gc.collect()
        return segment.publish()


def _hasher(layout: Packing, backend: Backend) -> SegmentHasher:
    device = (
        torch.device("cpu")
        if backend.name == "host"
        else torch.device("cuda", torch.cuda.current_device())
    )
    return SegmentHasher(max((plan.nbytes for plan in layout.segments), default=0), device)


def _fill(
    segment: torch.Tensor,
    members: list[tuple[StorageSource, StoragePlacement]],
    hasher: SegmentHasher,
) -> list[bytes]:
    for source, place in members:
        target = segment[place.offset_bytes : place.offset_bytes + source.nbytes]
        original = torch.empty(0, dtype=torch.uint8, device=source.storage.device).set_(
            source.storage
        )
        target.copy_(original)
        if original.device == target.device and not _equal(target, original):
            raise SegmentError(
                f"{source.names[0]}: {source.nbytes} bytes in the segment differ from their source"
            )
    return hasher.digests(
        segment, [(place.offset_bytes, source.nbytes) for source, place in members]
    )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    # In parts: comparing takes device memory for as many bytes as are compared at once.
    steps = range(0, a.numel(), _COMPARED_NBYTES)
    return all(
        torch.equal(a[at : at + _COMPARED_NBYTES], b[at : at + _COMPARED_NBYTES]) for at in steps
    )
