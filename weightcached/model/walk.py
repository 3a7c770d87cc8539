"""One walk over a model: every tensor and value that a forward pass may depend on, by path.

Paths read as Python would reach them: `model.layers.0.mlp.quant_method.kernel.workspace`,
`scales[0]`, `tables['cos']`. A module's children, parameters and buffers are dotted as torch dots
them.

These belong to the model: modules, their parameters and buffers, and the attributes of modules and
of the objects of vLLM and its plug-ins below them (quantization methods, schemes, kernels,
attention implementations). These belong to the process and are passed over: configuration, process
groups, platforms, streams, loggers, KV caches, objects of torch and of the standard library. In
functions, and in the attributes that weight loading puts on tensors, only tensors count. Every
object is visited once, so cycles end, and a shared object counts at the first place that reaches
it.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from weightcached.index.tensors import Kind
from weightcached.model.values import NotAValue, to_wire

# Modules of vLLM whose objects are the process's, not the model's.
_PROCESS_MODULES = (
    "vllm.config",
    "vllm.compilation",
    "vllm.distributed",
    "vllm.engine",
    "vllm.envs",
    "vllm.forward_context",
    "vllm.logger",
    "vllm.platforms",
    "vllm.transformers_utils",
    "vllm.v1.core",
    "vllm.v1.engine",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.worker",
)
# Packages whose objects hold no tensors of the model, or are each process's own.
_PASSED_OVER = sys.stdlib_module_names | {
    "PIL", "compressed_tensors", "cuda", "flashinfer", "huggingface_hub", "msgspec", "numpy", "nvtx", "pydantic", "ray",
    "regex", "tokenizers", "torch", "torchvision", "tqdm", "transformers", "transformers_modules", "triton", "zmq",
}  # fmt: skip
# torch.nn.Module's own bookkeeping, and attributes that each engine fills for itself.
_SKIPPED_ATTRIBUTES = frozenset(
    {
        "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training", "kv_cache",
        "vllm_config", "compilation_config", "_compiled_callable", "_compiled_bytecode", "_is_full_backward_hook",
        "_forward_hooks_always_called",
    }
)  # fmt: skip


_SCALARS = frozenset({type(None), bool, int, float, str})


class TensorSlot(NamedTuple):
    """A tensor and its path."""

    path: str
    tensor: torch.Tensor
    kind: Kind
    persistent: bool


class ValueSlot(NamedTuple):
    """Any other value: `wire` is its typed value, or {"$type": name} if only types are compared."""

    path: str
    wire: Any
    restorable: bool


Slot = TensorSlot | ValueSlot


class _Seen(set[int]):
    """Identities of visited objects. `later` is visited at the end, for tensors alone, by path.

    scalars: whether to yield attributes that are None, numbers or text.
    """

    def __init__(self, model: nn.Module, *, scalars: bool) -> None:
        super().__init__(id(module) for module in model.modules())
        self.scalars = scalars
        self.later: list[tuple[str, Any]] = []

    def first_time(self, value: Any) -> bool:
        if id(value) in self:
            return False
        self.add(id(value))
        return True


def walk(model: nn.Module, *, scalars: bool = True) -> Iterator[Slot]:
    """Every slot of the model, modules in torch's order, tied names included.

    Without `scalars`, most values that are None, numbers or text are left out.
    """
    seen = _Seen(model, scalars=scalars)
    for name, module in _named_modules("", model, ()):
        yield from _walk_registries(name, module, seen)
    for name, module in model.named_modules():
        yield ValueSlot(name or "<root>", {"$type": type_name(type(module))}, restorable=False)
        yield from _attributes(name, vars(module), seen, in_module=True)
    while seen.later:
        path, value = seen.later.pop(0)
        slots = (slot for slot in _value(path, value, seen) if isinstance(slot, TensorSlot))
        # vLLM keeps tensors without memory there, for reloading weights.
        yield from (slot for slot in slots if not slot.tensor.is_meta)


def _named_modules(
    prefix: str, module: nn.Module, above: tuple[nn.Module, ...]
) -> Iterator[tuple[str, nn.Module]]:
    # torch's own with remove_duplicate=False has tied modules under each name too, but never ends
    # in a cycle.
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and child is not module and child not in above:
            yield from _named_modules(join(prefix, name), child, (*above, module))


def tensors(model: nn.Module) -> Iterator[TensorSlot]:
    """The tensor slots alone."""
    return (slot for slot in walk(model, scalars=False) if isinstance(slot, TensorSlot))


def type_name(cls: type) -> str:
    """Import path of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def join(prefix: str, name: str) -> str:
    """A dotted path; the root has no name."""
    return f"{prefix}.{name}" if prefix else name


def _walk_registries(prefix: str, module: nn.Module, seen: _Seen) -> Iterator[Slot]:
    for name, param in module._parameters.items():
        if param is None:
            yield ValueSlot(join(prefix, name), None, restorable=True)
        else:
            yield TensorSlot(join(prefix, name), param, "parameter", persistent=True)
            _hung_on(join(prefix, name), param, seen)
    for name, buffer in module._buffers.items():
        if buffer is None:
            yield ValueSlot(join(prefix, name), None, restorable=True)
        else:
            persistent = name not in module._non_persistent_buffers_set
            yield TensorSlot(join(prefix, name), buffer, "buffer", persistent)


def _hung_on(path: str, tensor: torch.Tensor, seen: _Seen) -> None:
    # Mostly numbers and functions for weight loading, which differ between a loaded and an attached
    # model.
    attributes = vars(tensor)
    if attributes and seen.first_time(attributes):
        held = (
            (name, v)
            for name, v in attributes.items()
            if type(v) not in _SCALARS and not callable(v)
        )
        seen.later += [(join(path, name), value) for name, value in held]


def _attributes(
    prefix: str, attributes: dict[str, Any], seen: _Seen, *, in_module: bool
) -> Iterator[Slot]:
    for name, value in list(attributes.items()):
        if name in _SKIPPED_ATTRIBUTES or (
            in_module and name.endswith(("_hooks", "_hooks_with_kwargs"))
        ):
            continue
        if type(value) not in _SCALARS:
            yield from _value(join(prefix, name), value, seen)
        elif seen.scalars:
            # Nine of ten attributes, and an engine walks its model while it starts.
            yield ValueSlot(join(prefix, name), value, restorable=True)


def _value(path: str, value: Any, seen: _Seen) -> Iterator[Slot]:
    if type(value) in _SCALARS:
        yield ValueSlot(path, value, restorable=True)
    elif isinstance(value, torch.Tensor):
        yield TensorSlot(path, value, "attribute", persistent=False)
        _hung_on(path, value, seen)
    elif isinstance(value, list | tuple | dict) and _holds_objects(value):
        if seen.first_time(value):
            yield ValueSlot(
                path, {"$type": type_name(type(value)), "$len": len(value)}, restorable=False
            )
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                yield from _value(f"{path}[{key!r}]", item, seen)
    elif is_plain(value):
        yield ValueSlot(path, to_wire(value), restorable=True)
    elif isinstance(value, nn.Module):
        yield from _foreign_module(path, value, seen)
    elif _is_callable_reference(value):
        yield ValueSlot(path, _callable_to_wire(value), restorable=False)
        if seen.first_time(value):
            seen.later += _list_captured(path, value)
    elif not _is_process_object(value):
        yield from _object(path, value, seen)


def _callable_to_wire(function: Any) -> dict[str, Any]:
    """The name of a callable, and the plain values that it holds, which nobody could restore."""
    name = getattr(function, "__qualname__", type_name(type(function)))
    held = {path: value for path, value in _list_captured("", function) if is_plain(value)}
    return {"$callable": name} | (
        {"$holds": {path: to_wire(value) for path, value in held.items()}} if held else {}
    )


def _list_captured(path: str, function: Any) -> Iterator[tuple[str, Any]]:
    """The objects that a callable holds, apart from its code, by path."""
    if isinstance(function, functools.partial):
        yield f"{path}.func", function.func
        yield from ((f"{path}.args[{n}]", value) for n, value in enumerate(function.args))
        yield from (
            (f"{path}.keywords[{name!r}]", value) for name, value in function.keywords.items()
        )
    elif isinstance(function, MethodType):
        yield f"{path}.__self__", function.__self__
    elif isinstance(function, FunctionType):
        for number, cell in enumerate(function.__closure__ or ()):
            try:
                yield f"{path}.__closure__[{number}].cell_contents", cell.cell_contents
            except ValueError:
                # Not filled yet.
                continue


def _object(path: str, value: Any, seen: _Seen) -> Iterator[Slot]:
    yield ValueSlot(path, {"$type": type_name(type(value))}, restorable=False)
    if not _belongs_to_model(type(value)) or not seen.first_time(value):
        return
    slots = {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}
    yield from _attributes(path, slots | getattr(value, "__dict__", {}), seen, in_module=False)


def _find_slots(cls: type) -> tuple[str, ...]:
    declared = [base.__dict__.get("__slots__", ()) for base in cls.__mro__]
    names = [name for slots in declared for name in ([slots] if isinstance(slots, str) else slots)]
    return tuple(name for name in dict.fromkeys(names) if not name.startswith("__"))


_slots: Callable[[type], tuple[str, ...]] = functools.cache(_find_slots)


def _foreign_module(path: str, module: nn.Module, seen: _Seen) -> Iterator[Slot]:
    # A module of the tree, held once more, is only a reference; one outside the tree is walked like
    # an object.
    yield ValueSlot(path, {"$type": type_name(type(module))}, restorable=False)
    if id(module) in seen:
        return
    seen.update(id(m) for m in module.modules())
    for name, child in module.named_modules():
        here = join(path, name) if name else path
        if child is not module:
            yield ValueSlot(here, {"$type": type_name(type(child))}, restorable=False)
        yield from _walk_registries(here, child, seen)
        yield from _attributes(here, vars(child), seen, in_module=True)


def is_plain(value: Any) -> bool:
    """Whether the value is of a type that may cross the index."""
    try:
        to_wire(value)
    except NotAValue:
        return False
    return True


def _holds_objects(value: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> bool:
    return not is_plain(value)


def _is_callable_reference(value: Any) -> bool:
    return callable(value) and not _belongs_to_model(type(value))


def _is_of_model(cls: type) -> bool:
    if issubclass(cls, enum.Enum) or cls.__module__.startswith(_PROCESS_MODULES):
        return False
    if cls.__module__.startswith("vllm."):
        return True
    # A plug-in's object. A base class of transformers, as its configuration has, rules it out.
    bases = {base.__module__.split(".")[0] for base in cls.__mro__ if base is not object}
    return not bases & (_PASSED_OVER - {"abc", "typing"})


_belongs_to_model: Callable[[type], bool] = functools.cache(_is_of_model)


def _is_process_object(value: Any) -> bool:
    module = type(value).__module__
    return module.startswith(_PROCESS_MODULES) or module.split(".")[0] in (
        "logging",
        "threading",
        "torch",
    )
