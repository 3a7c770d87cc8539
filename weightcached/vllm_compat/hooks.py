"""vLLM's post-processing hooks: which ones a model has, and running each by its plan.

A hook belongs to a module's quantization method, or to a module itself (attention layers, and the
model). The plans are: `rerun`, after binding, in vLLM's already-processed mode; `replay`, before
binding, on the meta device; `restore`, not at all. With every plan, model/bind.py binds tensors and
restores values afterwards.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType, new_class
from typing import Any, NamedTuple

import torch
from torch import nn

from weightcached.errors import UnsupportedQuantForIPCError
from weightcached.index.tensors import ModulePlan, PlanName
from weightcached.model.plans import HookFailure, HookKey, HooksFailedError
from weightcached.model.values import loaded_module
from weightcached.model.walk import type_name
from weightcached.vllm_compat import replay

_HOOK = "process_weights_after_loading"
_SUPPORTS = "supports_pre_processed_weights"
# Weights that vLLM packs on the CPU have at most so many bytes.
_PACKED_NBYTES = 1 << 20


class Hook(NamedTuple):
    """One hook. owner: the module, or its quantization method, which declares supports_rerun."""

    module: str
    owner: Any
    layer: nn.Module
    supports_rerun: bool

    @property
    def key(self) -> HookKey:
        """Its name in a ModulePlan: path of the module, import path of the owner's class."""
        return self.module, type_name(type(self.owner))


def hooks_of(model: nn.Module) -> list[Hook]:
    """All hooks, in the order in which vLLM runs them."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader.utils import is_deferred_attention_layer

    found: list[Hook] = []
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase):
            found.append(Hook(name, method, module, bool(getattr(method, _SUPPORTS, True))))
    for name, module in model.named_modules():
        if is_deferred_attention_layer(module) or (
            module is model and callable(getattr(module, _HOOK, None))
        ):
            found.append(Hook(name, module, module, supports_rerun=True))
    return found


class PostProcessing:
    """The hooks of one stage: whole on `loaded` weights; on `processed` ones each by its plan."""

    def __init__(self, model_config: Any, device: torch.device, *, stage: str) -> None:
        self._model_config = model_config
        self._device = device
        self._stage = stage

    def first_plans(self, model: nn.Module) -> list[ModulePlan]:
        """The plan to try first for each hook; none on `loaded` weights, which need no plans."""
        if self._stage != "processed":
            return []
        plans = []
        for hook in hooks_of(model):
            module, method = hook.key
            plan, reason = (
                ("rerun", "") if hook.supports_rerun else ("replay", "rerun: not offered")
            )
            plans.append(ModulePlan(module=module, plan=plan, method=method, reason=reason))  # type: ignore[arg-type]
        return plans

    def module_of(self, name: str) -> ModuleType:
        """The module of an enum that the index names; modules of vLLM are imported if needed.

        Raises ValueError, ImportError.
        """
        of_vllm = isinstance(name, str) and name.startswith("vllm.")
        return importlib.import_module(name) if of_vllm else loaded_module(name)

    def before_binding(self, model: nn.Module, plans: Sequence[ModulePlan]) -> None:
        """Run the hooks to `replay`. Raises HooksFailedError."""
        from vllm.utils.torch_utils import set_default_torch_dtype

        chosen = _match_plans(model, plans)
        failures: list[HookFailure] = []
        with set_default_torch_dtype(self._model_config.dtype), replay.on_meta(self._device):
            for hook, plan in chosen:
                if plan == "replay":
                    _call_hook(hook, lambda hook=hook: self._call(hook), failures)  # type: ignore[misc]
        if failures:
            raise HooksFailedError(failures)

    def _call(self, hook: Hook) -> None:
        if hook.owner is not hook.layer:
            hook.owner.process_weights_after_loading(hook.layer)
            if hasattr(hook.layer, "update_param_tp_status"):
                hook.layer.update_param_tp_status()
        elif hook.module:
            hook.owner.process_weights_after_loading(self._model_config.dtype)
        else:
            hook.owner.process_weights_after_loading()

    def after_binding(
        self, model: nn.Module, plans: Sequence[ModulePlan], shared: Collection[int]
    ) -> None:
        """Run the hooks to `rerun`, or all of them on `loaded` weights.

        shared: addresses of the storages that a hook may not write into. Raises HooksFailedError.
        """
        from vllm.model_executor.model_loader.utils import process_weights_after_loading
        from vllm.model_executor.utils import weights_already_processed
        from vllm.utils.torch_utils import set_default_torch_dtype

        with set_default_torch_dtype(self._model_config.dtype):
            if self._stage == "loaded":
                _give_memory(model)
                process_weights_after_loading(model, self._model_config, self._device)
                return
            failures: list[HookFailure] = []
            with (
                weights_already_processed(),
                by_plan(_match_plans(model, plans), failures),
                replay.WriteGuard(shared),
            ):
                process_weights_after_loading(model, self._model_config, self._device)
        if failures:
            raise HooksFailedError(failures)


def _give_memory(model: nn.Module) -> None:
    """Make contiguous the small weights that a draft will take from its target (draft_sharing.py).

    On processors with AMX, vLLM packs small weights, and that refuses a tensor over one element.
    Larger ones stay as they are: the memory would be a gigabyte and more, and nobody reads it.
    """
    for parameter in model.parameters():
        if parameter.ndim and not any(parameter.stride()) and parameter.nbytes <= _PACKED_NBYTES:
            parameter.data = parameter.data.contiguous()


def _match_plans(model: nn.Module, plans: Sequence[ModulePlan]) -> list[tuple[Hook, PlanName]]:
    """Each hook with its plan. Raises UnsupportedQuantForIPCError for one without."""
    by_key = {(plan.module, plan.method): plan.plan for plan in plans}
    chosen = []
    for hook in hooks_of(model):
        plan = by_key.get(hook.key)
        if plan is None:
            module, method = hook.key
            raise UnsupportedQuantForIPCError(
                f"{module or '<root>'}: the index has no plan for the hook of {method}"
            )
        chosen.append((hook, plan))
    return chosen


def _call_hook(hook: Hook, call: Callable[[], Any], failures: list[HookFailure]) -> None:
    try:
        call()
    except Exception as e:
        # Any error: the next plan may work.
        failures.append(
            HookFailure(hook.key, f"{type(e).__name__}: {' '.join(str(e).split())[:300]}")
        )


@contextmanager
def by_plan(chosen: Sequence[tuple[Hook, PlanName]], failures: list[HookFailure]) -> Iterator[None]:
    """Let vLLM's own loop run over the hooks, and have only those run whose plan is `rerun`.

    A method is asked whether it supports processed weights and then called; the answer and the call
    are ours while the block lasts. Raises UnsupportedQuantForIPCError for a method that cannot be
    stood in for.
    """
    by_owner: dict[int, list[tuple[Hook, PlanName]]] = {}
    for hook, plan in chosen:
        by_owner.setdefault(id(hook.owner), []).append((hook, plan))
    runs: dict[int, Callable[..., None]] = {}
    stand_ins: dict[type, type] = {}
    with ExitStack() as undo:
        for number, hooks in by_owner.items():
            owner = hooks[0][0].owner
            runs[number] = _runner(owner, hooks, failures)
            if owner is hooks[0][0].layer:
                _patch_instance(owner, runs[number], undo)
            else:
                _patch_class(hooks[0][0], runs, stand_ins, undo)
        yield


def _runner(
    owner: Any, hooks: Sequence[tuple[Hook, PlanName]], failures: list[HookFailure]
) -> Callable[..., None]:
    original = getattr(owner, _HOOK)
    by_layer = {id(hook.layer): (hook, plan) for hook, plan in hooks}

    def run(*args: Any, **kwargs: Any) -> None:
        layer = args[0] if args and isinstance(args[0], nn.Module) else owner
        hook, plan = by_layer.get(id(layer), (None, None))
        if hook is None:
            # Called by another method for a layer that is not its own.
            original(*args, **kwargs)
        elif plan == "rerun":
            _call_hook(hook, lambda: original(*args, **kwargs), failures)

    return run


def _patch_instance(owner: nn.Module, run: Callable[..., None], undo: ExitStack) -> None:
    attributes = vars(owner)
    undo.callback(attributes.pop, _HOOK)
    if _HOOK in attributes:
        undo.callback(attributes.__setitem__, _HOOK, attributes[_HOOK])
    attributes[_HOOK] = run


def _patch_class(
    hook: Hook, runs: dict[int, Callable[..., None]], stand_ins: dict[type, type], undo: ExitStack
) -> None:
    # Methods answer by class attribute, instance attribute or property. A property of a subclass
    # precedes them all.
    cls = type(hook.owner)
    if cls not in stand_ins:
        members = {
            "__slots__": (),
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            _SUPPORTS: property(lambda owner: True),
            _HOOK: property(lambda owner: runs[id(owner)]),
        }
        stand_ins[cls] = new_class(
            cls.__name__, (cls,), {}, lambda namespace: namespace.update(members)
        )
    try:
        object.__setattr__(hook.owner, "__class__", stand_ins[cls])
    except TypeError as e:
        raise UnsupportedQuantForIPCError(
            f"{hook.module or '<root>'}: {type_name(cls)} cannot have a stand-in ({e}); load this model from disk"
        ) from e
    undo.callback(object.__setattr__, hook.owner, "__class__", cls)
