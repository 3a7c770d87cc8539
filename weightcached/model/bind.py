"""Bind a tensor index to a model built on the meta device.

The loader child attaches each generation with this same code before it publishes it
(weightcached/model/proof.py), so an engine repeats exactly the steps that were proven. Every tensor
of the model comes from the index. A tensor that does not is an error, never uninitialised memory.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Collection, Iterable, Sequence
from types import ModuleType
from typing import Any, Protocol

import msgspec
import torch
from torch import nn

from weightcached.errors import IndexFormatError, UnsupportedQuantForIPCError
from weightcached.index.tensors import Kind, ModulePlan, TensorIndex, TensorRecord
from weightcached.model.values import ModuleOf, decode_value
from weightcached.model.walk import TensorSlot, tensors, type_name, walk
from weightcached.segments.api import Mapping, PrivateCopy

# A key in brackets, as repr() writes an integer or a string, or a name.
_PATH_TOKEN = re.compile(r"""\[(-?\d+|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\]|([^.\[\]]+)""")
# Errors raised while following a path, if a step of it is missing.
LOOKUP_ERRORS = (AttributeError, LookupError, TypeError)


class PathError(UnsupportedQuantForIPCError):
    """A tensor or value of the index cannot be put at its path. The text begins with the path."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path}: {what}")
        self.path = path


class Hooks(Protocol):
    """The engine's part in binding, which vllm_compat.hooks.PostProcessing implements."""

    def module_of(self, name: str) -> ModuleType: ...

    def before_binding(self, model: nn.Module, plans: Sequence[ModulePlan]) -> None: ...

    def after_binding(
        self, model: nn.Module, plans: Sequence[ModulePlan], shared: Collection[int]
    ) -> None: ...


class Storages:
    """The storages of one index as torch storages, each made once and owned by the tensors over it.

    With `copy`, every storage is this process's own; otherwise only those of private segments are.
    """

    def __init__(
        self, index: TensorIndex, mapping: Mapping, device: torch.device, *, copy: bool
    ) -> None:
        self._index = index
        self._mapping = mapping
        self._device = device
        self._copy = copy
        self._private: dict[int, PrivateCopy] = {}
        self._made: dict[tuple[int, bool], torch.UntypedStorage] = {}

    def get(self, number: int | None, *, on_host: bool) -> torch.UntypedStorage:
        """Storage `number`; None is an empty one. on_host: a copy in host memory."""
        host = on_host and self._device.type != "cpu"
        if number is None:
            return torch.empty(
                0, dtype=torch.uint8, device="cpu" if host else self._device
            ).untyped_storage()
        made = self._made.get((number, host))
        if made is None:
            view = self._view(number)
            if host:
                view = view.cpu()
            made = self._made[number, host] = view.untyped_storage()
        return made

    def shared(self) -> frozenset[int]:
        """Addresses of the storages made so far that other processes map."""
        if self._copy:
            return frozenset()
        records = self._index.storages
        return frozenset(
            storage.data_ptr()
            for (number, host), storage in self._made.items()
            if not host and not self._index.segments[records[number].segment].private
        )

    def refresh(self) -> None:
        """Refresh this process's copies after other bytes came under the mapping."""
        for segment, copy in self._private.items():
            nbytes = self._index.segments[segment].nbytes
            copy.view(0, nbytes).copy_(self._mapping.view(segment, 0, nbytes))
        for (number, host), storage in self._made.items():
            if host:
                torch.empty(0, dtype=torch.uint8).set_(storage).copy_(self._view(number))

    def _view(self, number: int) -> torch.Tensor:
        record = self._index.storages[number]
        if self._index.segments[record.segment].private:
            copy = self._private.get(record.segment)
            if copy is None:
                copy = self._private[record.segment] = self._mapping.private_copy(record.segment)
            return copy.view(record.offset_bytes, record.nbytes)
        view = self._mapping.view(record.segment, record.offset_bytes, record.nbytes)
        return view.clone() if self._copy else view


def tensor_of(record: TensorRecord, storages: Storages) -> torch.Tensor:
    """The tensor that a record describes, over its storage.

    Raises IndexFormatError if it would reach outside of the storage.
    """
    dtype = getattr(torch, record.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise IndexFormatError(
            f"tensor {record.names[0]}: this torch has no dtype {record.dtype!r}"
        )
    storage = storages.get(record.storage, on_host=record.on_host)
    if 0 not in record.shape:
        last = record.storage_offset + sum(
            (n - 1) * step for n, step in zip(record.shape, record.stride, strict=True)
        )
        end = (last + 1) * dtype.itemsize
        if end > storage.nbytes():
            raise IndexFormatError(
                f"tensor {record.names[0]} reaches to byte {end} of a storage of {storage.nbytes()}"
            )
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    try:
        return empty.set_(storage, record.storage_offset, record.shape, record.stride)
    except (RuntimeError, TypeError, ValueError) as e:
        # Numbers beyond 64 bits with a sign, in a tensor without elements.
        raise IndexFormatError(
            f"tensor {record.names[0]}: torch cannot count shape {record.shape}, stride {record.stride}, "
            f"offset {record.storage_offset}"
        ) from e


def skeleton_of(model: nn.Module) -> str:
    """Digest of a freshly built model's structure: names, shapes, dtypes and classes.

    Enums count, because they choose kernel backends. Other values do not. Neither do differences
    that come from compilation alone: an engine started with enforce_eager or another max_model_len
    maps the same bytes.
    """
    digest = hashlib.sha256()
    for slot in walk(model, scalars=False):
        if isinstance(slot, TensorSlot):
            t = slot.tensor
            line = f"{slot.path} {slot.kind} {slot.persistent} {t.dtype} {tuple(t.shape)} {type_name(type(t))}"
        elif (slot.restorable and not _is_backend(slot.wire)) or slot.path.endswith(
            "._forward_method"
        ):
            continue
        elif isinstance(slot.wire, dict) and "$callable" in slot.wire:
            line = f"{slot.path} {slot.wire['$callable']}"
        else:
            line = f"{slot.path} {slot.wire}"
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def _is_backend(wire: Any) -> bool:
    return (
        isinstance(wire, dict)
        and "$enum" in wire
        and not wire["$enum"][0].startswith("vllm.config")
    )


class Binder:
    """Puts the index's tensors and values into one model."""

    def __init__(self, model: nn.Module, index: TensorIndex, storages: Storages) -> None:
        self._model = model
        self._index = index
        self._storages = storages
        self._bound: dict[str, torch.Tensor] = {}
        # Tensors that were removed from the model, after attach().
        self.leftovers: list[str] = []

    def attach(self, hooks: Hooks) -> None:
        """Post-process by plan, bind all tensors, set values, check.

        On `processed` weights, hooks to replay run before binding, and hooks to rerun after it;
        tensors that these replaced are bound once more. On `loaded` weights all hooks come last:
        their results belong to the engine. Raises IndexFormatError or UnsupportedQuantForIPCError
        naming the path; the model is unusable then.
        """
        plans = self._index.modules
        if self._index.stage == "processed":
            hooks.before_binding(self._model, plans)
            self._bind_all(may_be_absent=True)
            hooks.after_binding(self._model, plans, self._storages.shared())
        self._bind_all(may_be_absent=False)
        self._set_values(hooks.module_of)
        self._remove_leftovers()
        if self._index.stage == "loaded":
            hooks.after_binding(self._model, plans, ())

    def _set_values(self, module_of: ModuleOf) -> None:
        # Values first: a parameter that is None keeps its place in the module's registry that way.
        for plan in self._index.modules:
            for path, raw in plan.values.items():
                self._set_value(path, raw, module_of)

    def _bind_all(self, *, may_be_absent: bool) -> None:
        for record in self._index.tensors:
            tensor = self._bound.get(record.names[0])
            for name in record.names:
                try:
                    owner, leaf = resolve_owner(self._model, name)
                    there = look_up(owner, leaf)
                except LOOKUP_ERRORS as e:
                    if may_be_absent:
                        continue
                    raise PathError(name, f"no object here for the tensor ({e})") from e
                if tensor is None:
                    tensor = self._bound[record.names[0]] = self._make_tensor(record, there)
                if there is not tensor:
                    attach_tensor(owner, leaf, tensor, record, name)

    def _make_tensor(self, record: TensorRecord, template: Any) -> torch.Tensor:
        tensor = tensor_of(record, self._storages)
        if record.kind != "parameter":
            return tensor
        # Loaders of LoRA adapters and later reloads read a parameter's class and attributes
        # (input_dim, weight_loader).
        if isinstance(template, nn.Parameter) and type_name(type(template)) == (
            record.param_class or _PLAIN
        ):
            parameter = torch.Tensor._make_subclass(type(template), tensor, False)
            parameter.__dict__.update(template.__dict__)
            return parameter
        parameter = nn.Parameter(tensor, requires_grad=False)
        parameter.__dict__.update(getattr(template, "__dict__", {}))
        return parameter

    def _remove_leftovers(self) -> None:
        # Tensors that post-processing consumed: the loaded model no longer has them, so this model
        # must not have them either.
        self.leftovers = (
            self._find_leftovers() if self._index.leftovers is None else self._index.leftovers
        )
        for path in self.leftovers:
            try:
                owner, leaf = resolve_owner(self._model, path)
                there = look_up(owner, leaf)
            except LOOKUP_ERRORS as e:
                raise PathError(path, f"no tensor here to remove ({e})") from e
            if isinstance(owner, tuple):
                raise PathError(path, "still on the meta device, the index has no tensor for it")
            if isinstance(there, torch.Tensor) and there.is_meta:
                remove(owner, leaf)

    def _find_leftovers(self) -> list[str]:
        known = {name for record in self._index.tensors for name in record.names}
        found = [slot.path for slot in tensors(self._model) if slot.tensor.is_meta]
        if left := [path for path in found if path in known]:
            raise PathError(left[0], "still on the meta device after binding")
        return found

    def _set_value(self, path: str, raw: msgspec.Raw, module_of: ModuleOf) -> None:
        try:
            owner, leaf = resolve_owner(self._model, path)
        except LOOKUP_ERRORS as e:
            raise PathError(path, f"no object here for the value ({e})") from e
        if isinstance(owner, tuple):
            raise PathError(path, "a value inside a tuple cannot be replaced")
        value = decode_value(raw, module_of)
        if isinstance(owner, list | dict):
            owner[leaf] = value
            return
        if isinstance(owner, nn.Module):
            for registry in (owner._parameters, owner._buffers):
                if value is None and leaf in registry:
                    registry[leaf] = None
                    return
            remove(owner, leaf)
        object.__setattr__(owner, leaf, value)


_PLAIN = type_name(nn.Parameter)


def resolve_owner(model: nn.Module, path: str) -> tuple[Any, Any]:
    """(object, attribute name) or (container, key) that the path's last step names. Raises as the steps do."""
    head, _, leaf = path.rpartition(".")
    if "[" not in path:
        # By far the most paths, and thousands of them.
        steps: list[Any] = head.split(".") if head else []
    else:
        *steps, leaf = _steps(path)
    owner: Any = model
    for step in steps:
        owner = _step(owner, step)
    return owner, leaf


def _steps(path: str) -> list[Any]:
    found = [match.groups() for match in _PATH_TOKEN.finditer(path)]
    return [name if name is not None else ast.literal_eval(key) for key, name in found]


def _step(owner: Any, step: Any) -> Any:
    return owner[step] if isinstance(owner, list | tuple | dict) else getattr(owner, step)


def look_up(owner: Any, leaf: Any) -> Any:
    """The present value, or None. Raises IndexError past the end of a list or tuple."""
    if isinstance(owner, list | tuple):
        return owner[leaf]
    if isinstance(owner, dict):
        return owner.get(leaf)
    return getattr(owner, leaf, None)


def attach_tensor(
    owner: Any, leaf: Any, tensor: torch.Tensor, record: TensorRecord, name: str
) -> None:
    """Put the tensor there, under this name of the record. Raises PathError if that is impossible."""
    if isinstance(owner, tuple):
        raise PathError(name, "a tensor inside a tuple cannot be replaced")
    if isinstance(owner, list | dict):
        owner[leaf] = tensor
        return
    if not isinstance(owner, nn.Module):
        object.__setattr__(owner, leaf, tensor)
        return
    kinds: dict[Kind, dict[str, Any]] = {
        "parameter": owner._parameters,
        "buffer": owner._buffers,
        "attribute": owner.__dict__,
    }
    kind, persistent = record.kind, record.persistent
    if name != record.names[0]:
        # The record describes its first name; in another module the same buffer may be an
        # attribute.
        kind = next((k for k, registry in kinds.items() if leaf in registry), kind)
        persistent = leaf not in owner._non_persistent_buffers_set
    for other, registry in kinds.items():
        if other != kind:
            registry.pop(leaf, None)
    # In place, so that the order of a module's parameters stays.
    kinds[kind][leaf] = tensor
    owner._non_persistent_buffers_set.discard(leaf)
    if kind == "buffer" and not persistent:
        owner._non_persistent_buffers_set.add(leaf)


def remove(owner: Any, leaf: Any) -> None:
    """Remove the value there, if there is one."""
    if isinstance(owner, nn.Module):
        for registry in (owner._parameters, owner._buffers, owner.__dict__):
            registry.pop(leaf, None)
        owner._non_persistent_buffers_set.discard(leaf)
    elif isinstance(owner, dict):
        owner.pop(leaf, None)
    elif isinstance(owner, list):
        owner[leaf] = None
    elif hasattr(owner, leaf):
        object.__delattr__(owner, leaf)


def copy_into(
    model: nn.Module, index: TensorIndex, storages: Storages, *, attributes: bool = False
) -> int:
    """Copy the index's parameters and buffers in place into a model that has them all, with
    `attributes` all other tensors too; returns the tensors copied.

    Raises IndexFormatError before anything is written when the model has other names, shapes or
    dtypes.
    """
    present = {slot.path: slot.tensor for slot in tensors(model)}
    pairs: list[tuple[torch.Tensor, TensorRecord]] = []
    for record in index.tensors if attributes else _registry_records(index.tensors):
        target = present.get(record.names[0])
        if target is None:
            raise IndexFormatError(
                f"the model has no tensor {record.names[0]}: it was built or post-processed differently"
            )
        if list(target.shape) != record.shape or str(target.dtype) != f"torch.{record.dtype}":
            raise IndexFormatError(
                f"tensor {record.names[0]} is {target.dtype} {tuple(target.shape)} in the model and "
                f"torch.{record.dtype} {tuple(record.shape)} in the cache"
            )
        pairs.append((target, record))
    with torch.no_grad():
        for target, record in pairs:
            target.data.copy_(tensor_of(record, storages))
    return len(pairs)


def _registry_records(records: Iterable[TensorRecord]) -> Iterable[TensorRecord]:
    return (record for record in records if record.kind != "attribute")
