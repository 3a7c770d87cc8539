"""Surroundings for post-processing hooks: tensors without memory, and a guard of shared tensors.

on_meta() is for the plan `replay`: tensors for a device go to the meta device, custom operators run
their fakes, yes-or-no questions about values get the answer no, and anything that needs a value or
an address raises. So a hook does the same each time, in the proof and in every engine. The proof
shows whether it did the same to the loaded weights. WriteGuard is for the plan `rerun`. hooks.py
decides which hook runs where.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operators of torch itself; each has a meta implementation, or says that it has none.
_TORCH_NAMESPACES = frozenset({"aten", "prim", "prims"})
_META = torch.device("meta")
# Hooks ask these in order to warn of an odd checkpoint, and to skip unneeded steps.
_QUESTIONS = frozenset(
    {
        torch.Tensor.__bool__,
        torch.Tensor.equal,
        torch.Tensor.allclose,
        torch.equal,
        torch.allclose,
        torch.is_nonzero,
    }
)
# The same, of a layer's scales: whether they are all one.
_DISTINCT = frozenset({torch.unique, torch.Tensor.unique})
# Tensors of the process that hooks move to the device of the weights: (module, object, attribute).
_OF_THE_PROCESS = (
    (
        "vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils",
        "kE2M1ToFloat_handle",
        "val",
    ),
)


class NoMetaError(NotImplementedError):
    """A hook needs something that no meta tensor has: a value, an address, an operator's result."""


class SharedWriteError(RuntimeError):
    """A hook writes into a tensor that others map."""


@contextmanager
def on_meta(device: torch.device) -> Iterator[None]:
    """Run hooks on meta tensors. Host tensors that they make are real; `device` is the engine's.

    Raises NoMetaError inside the block, or torch's own error, if a hook needs values.
    """
    with ExitStack() as stack:
        for tensor in _OF_THE_PROCESS:
            stack.enter_context(_moved_in_earnest(*tensor, device))
        stack.enter_context(_quiet(logging.getLogger("vllm")))
        jit = sys.modules.get("triton.runtime.jit")
        if jit is not None:
            # A kernel launched with null pointers would take the device's context down with it.
            stack.enter_context(mock.patch.object(jit.JITFunction, "run", _no_triton))
        stack.enter_context(_Functions())
        stack.enter_context(_Operators())
        yield


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    # The answers would make vLLM warn without a reason.
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _moved_in_earnest(
    module: str, name: str, attribute: str, device: torch.device
) -> Iterator[None]:
    holder = getattr(sys.modules.get(module), name, None)
    before = getattr(holder, attribute, None)
    try:
        yield
    finally:
        if isinstance(before, torch.Tensor) and getattr(holder, attribute).is_meta:
            setattr(holder, attribute, before.to(device))


def _no_triton(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    name = getattr(getattr(kernel, "fn", kernel), "__name__", "?")
    raise NoMetaError(f"the Triton kernel {name} cannot run on meta tensors")


class _Functions(TorchFunctionMode):  # type: ignore[misc]
    """Intercepts requests for devices, before torch looks for them, and for addresses."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.data_ptr and args[0].is_meta:
            raise NoMetaError("the address of a meta tensor was asked for")
        if func in _QUESTIONS and any(tensor.is_meta for tensor in _tensors_in(args, kwargs or {})):
            return False
        if func in _DISTINCT and args[0].is_meta and not _asks_for_more(kwargs or {}):
            return args[0].new_empty(1)
        if func is torch.Tensor.cuda:
            return args[0].to(_META)
        if func is torch.Tensor.to:
            args = tuple(_META if _is_device(value) else value for value in args)
        return func(*args, **_device_is_meta(kwargs))


def _asks_for_more(kwargs: dict[str, Any]) -> bool:
    # These return indices and counts of the values too.
    more = ("return_inverse", "return_counts")
    return any(kwargs.get(name) for name in more) or kwargs.get("dim") is not None


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device | str) and torch.device(value).type != "cpu"


class _Operators(TorchDispatchMode):  # type: ignore[misc]
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Also for tensors that C++ code makes on a device.
        kwargs = _device_is_meta(kwargs)
        if _lacks_meta(func) and any(t.is_meta for t in _tensors_in(args, kwargs)):
            if func._schema.returns:
                raise NoMetaError(f"the operator {func} has no fake")
            # Nothing but writing into its arguments, which have no memory.
            return None
        return func(*args, **kwargs)


def _device_is_meta(kwargs: dict[str, Any] | None) -> dict[str, Any]:
    kwargs = dict(kwargs or {})
    device = kwargs.get("device")
    # A bare number counts devices of the accelerator.
    if _is_device(device) or type(device) is int:
        kwargs["device"] = _META
    return kwargs


@functools.cache
def _lacks_meta(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload) or func.namespace in _TORCH_NAMESPACES:
        return False
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return not any(has(func.name(), key) for key in keys)


def _tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, torch.Tensor))


class WriteGuard(TorchDispatchMode):  # type: ignore[misc]
    """Refuse operators that write into one of the `shared` storages, by address, before they do.

    On a GPU the write would be an illegal memory access, which ends the process's context.
    """

    def __init__(self, shared: Collection[int]) -> None:
        super().__init__()
        self._shared = shared

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "_schema", None) is not None and func._schema.is_mutable:
            self._check(func, args, kwargs)
        return func(*args, **kwargs)

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            for tensor in _tensors_in((value,), {}):
                if not tensor.is_meta and tensor.untyped_storage().data_ptr() in self._shared:
                    raise SharedWriteError(
                        f"the operator {func} writes into a tensor that engines share"
                    )
