"""One walk over a model: every tensor and value that a forward pass may depend on, by path.

Paths read as Python would reach them: `model.layers.0.mlp.quant_method.kernel.workspace`, `scales[0]`,
`tables['cos']`. A module's children, parameters and buffers are dotted as torch dots them.

What belongs to the model: modules, their parameters and buffers, and whatever hangs in the attributes of modules and
of vLLM's own objects below them (quantization methods, schemes, kernels, attention implementations). What belongs to
the process and is passed over: configuration, process groups, platforms, streams, loggers, functions, KV caches.
Every object is visited once, so cycles end and shared objects count where they are met first.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from weightcache_loader.values import NotAValue, to_wire

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
    """A tensor and where it hangs. `kind` is parameter, buffer or attribute."""

    path: str
    tensor: torch.Tensor
    kind: str
    persistent: bool


class ValueSlot(NamedTuple):
    """Anything else: `wire` is its typed value, or a one-key map {"$type": name} for an object compared by type."""

    path: str
    wire: Any
    restorable: bool


Slot = TensorSlot | ValueSlot


def walk(model: nn.Module) -> Iterator[Slot]:
    """Every slot of the model, modules in torch's order, tied names included."""
    seen: set[int] = {id(module) for module in model.modules()}
    for name, module in _named_modules("", model, ()):
        yield from _registered(name, module)
    for name, module in model.named_modules():
        yield ValueSlot(name or "<root>", {"$type": type_name(type(module))}, restorable=False)
        yield from _attributes(name, vars(module), seen, in_module=True)


def _named_modules(prefix: str, module: nn.Module, above: tuple[nn.Module, ...]) -> Iterator[tuple[str, nn.Module]]:
    # torch's own with remove_duplicate=False has tied modules under each name too, but never ends in a cycle.
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and child is not module and child not in above:
            yield from _named_modules(join(prefix, name), child, (*above, module))


def tensors(model: nn.Module) -> Iterator[TensorSlot]:
    """The tensor slots alone."""
    return (slot for slot in walk(model) if isinstance(slot, TensorSlot))


def type_name(cls: type) -> str:
    """Import path of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def join(prefix: str, name: str) -> str:
    """A dotted path; the root has no name."""
    return f"{prefix}.{name}" if prefix else name


def _registered(prefix: str, module: nn.Module) -> Iterator[Slot]:
    for name, param in module._parameters.items():
        if param is None:
            yield ValueSlot(join(prefix, name), None, restorable=True)
        else:
            yield TensorSlot(join(prefix, name), param, "parameter", persistent=True)
    for name, buffer in module._buffers.items():
        if buffer is None:
            yield ValueSlot(join(prefix, name), None, restorable=True)
        else:
            persistent = name not in module._non_persistent_buffers_set
            yield TensorSlot(join(prefix, name), buffer, "buffer", persistent)


def _attributes(prefix: str, attributes: dict[str, Any], seen: set[int], *, in_module: bool) -> Iterator[Slot]:
    for name, value in list(attributes.items()):
        if name in _SKIPPED_ATTRIBUTES or (in_module and name.endswith(("_hooks", "_hooks_with_kwargs"))):
            continue
        yield from _value(join(prefix, name), value, seen)


def _value(path: str, value: Any, seen: set[int]) -> Iterator[Slot]:
    if type(value) in _SCALARS:
        # Nine of ten attributes, and an engine walks its model while it starts.
        yield ValueSlot(path, value, restorable=True)
    elif isinstance(value, torch.Tensor):
        yield TensorSlot(path, value, "attribute", persistent=False)
    elif isinstance(value, list | tuple | dict) and _holds_objects(value):
        if id(value) not in seen:
            seen.add(id(value))
            yield ValueSlot(path, {"$type": type_name(type(value)), "$len": len(value)}, restorable=False)
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                yield from _value(f"{path}[{key!r}]", item, seen)
    elif is_plain(value):
        yield ValueSlot(path, to_wire(value), restorable=True)
    elif isinstance(value, nn.Module):
        yield from _foreign_module(path, value, seen)
    elif _is_callable_reference(value):
        yield ValueSlot(path, {"$callable": getattr(value, "__qualname__", type_name(type(value)))}, restorable=False)
    elif not _is_process_object(value):
        yield from _object(path, value, seen)


def _object(path: str, value: Any, seen: set[int]) -> Iterator[Slot]:
    yield ValueSlot(path, {"$type": type_name(type(value))}, restorable=False)
    if id(value) in seen or not _belongs_to_model(type(value)):
        return
    seen.add(id(value))
    yield from _attributes(path, getattr(value, "__dict__", {}), seen, in_module=False)


def _foreign_module(path: str, module: nn.Module, seen: set[int]) -> Iterator[Slot]:
    # A module of the tree, held once more, is only a reference; one outside the tree is walked like an object.
    yield ValueSlot(path, {"$type": type_name(type(module))}, restorable=False)
    if id(module) in seen:
        return
    seen.update(id(m) for m in module.modules())
    for name, child in module.named_modules():
        here = join(path, name) if name else path
        if child is not module:
            yield ValueSlot(here, {"$type": type_name(type(child))}, restorable=False)
        yield from _registered(here, child)
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


def _belongs_to_model(cls: type) -> bool:
    module = cls.__module__
    return module.startswith("vllm.") and not module.startswith(_PROCESS_MODULES) and not issubclass(cls, enum.Enum)


def _is_process_object(value: Any) -> bool:
    module = type(value).__module__
    return module.startswith(_PROCESS_MODULES) or module.split(".")[0] in ("logging", "threading", "torch")
