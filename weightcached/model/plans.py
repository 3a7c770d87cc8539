"""The plan of each hook while a generation is being proven, and the next one if a plan fails.

The order is rerun, replay, restore; a plan that failed is not tried again. A difference refuses the
load if it belongs to no hook, or to a hook that has no plan left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import msgspec

from weightcached.errors import UnsupportedQuantForIPCError
from weightcached.index.tensors import ModulePlan, PlanName

# Path of the module, import path of the class whose hook it is.
HookKey = tuple[str, str]
_NEXT: dict[PlanName, PlanName] = {"rerun": "replay", "replay": "restore"}


class HookFailure(NamedTuple):
    key: HookKey
    text: str


class HooksFailedError(UnsupportedQuantForIPCError):
    """Hooks raised. `failures` are all of them; the text is that of the first."""

    def __init__(self, failures: Sequence[HookFailure]) -> None:
        (module, method), text = failures[0]
        super().__init__(f"{module or '<root>'}: the hook of {method} failed: {text}")
        self.failures = list(failures)


class Difference(NamedTuple):
    """A difference between the attached and the loaded model; `str()` is `path: what`."""

    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


class Plans:
    """The plans of one model. `values` are restored, by path; a hook's next plan clears its own."""

    def __init__(self, first: Sequence[ModulePlan]) -> None:
        self._plans = {(plan.module, plan.method): plan for plan in first}
        self._modules = {plan.module for plan in first}
        self.values: dict[str, Any] = {}
        # The first difference of an attached model, by hook.
        self._differed: dict[tuple[str, str], str] = {}

    def records(self) -> list[ModulePlan]:
        """The plans for the index: one per hook, with values below its module; then other values."""
        values: dict[tuple[str, str], dict[str, msgspec.Raw]] = {}
        for path, wire in self.values.items():
            keys = self._keys_at(path) or [(path.rpartition(".")[0], "")]
            values.setdefault(keys[0], {})[path] = msgspec.Raw(msgspec.msgpack.encode(wire))
        records = [
            msgspec.structs.replace(plan, values=values.pop(key)) if key in values else plan
            for key, plan in self._plans.items()
        ]
        return records + [
            ModulePlan(module=module, plan="restore", values=raw)
            for (module, _), raw in values.items()
        ]

    def advance(self, differences: Sequence[Difference]) -> None:
        """Give the hooks of these differences their next plan.

        Raises UnsupportedQuantForIPCError if none has one.
        """
        failed: dict[tuple[str, str], str] = {}
        for difference in differences:
            for key in self._keys_with_next_plan(difference.path) or self._refuse(
                difference.path, str(difference)
            ):
                failed.setdefault(key, str(difference))
        for key, text in failed.items():
            self._differed.setdefault(key, text)
        self._advance(failed)

    def advance_alike(self, path: str, error: Exception) -> None:
        """The same for one path at which binding stopped, and for all hooks of that class with that
        plan.

        Raises UnsupportedQuantForIPCError with the error's text if a hook has no next plan.
        """
        if not self._keys_at(path):
            raise error
        keys = self._keys_with_next_plan(path) or self._refuse(path, str(error))
        alike = {(method, self._plans[module, method].plan) for module, method in keys}
        self._advance(
            {key: str(error) for key, plan in self._plans.items() if (key[1], plan.plan) in alike}
        )

    def advance_hooks(self, failures: Iterable[HookFailure], error: Exception) -> None:
        """The same for hooks that raised. Raises `error` if one of them has no next plan."""
        failed = {failure.key: failure.text for failure in failures}
        if any(self._plans[key].plan not in _NEXT for key in failed):
            raise error
        self._advance(failed)

    def _advance(self, failed: dict[tuple[str, str], str]) -> None:
        for key, text in failed.items():
            plan = self._plans[key]
            reason = "; ".join(part for part in (plan.reason, f"{plan.plan}: {text}") if part)
            self._plans[key] = msgspec.structs.replace(plan, plan=_NEXT[plan.plan], reason=reason)
        self.values = {}

    def _keys_at(self, path: str) -> list[tuple[str, str]]:
        """The hooks of the nearest module at or above a path; the model's own hook has the root."""
        module = path
        while module and module not in self._modules:
            cut = max(module.rfind("."), module.rfind("["))
            module = module[:cut] if cut > 0 else ""
        if not module and ("." in path or "[" in path):
            return []
        return [key for key in self._plans if key[0] == module]

    def _keys_with_next_plan(self, path: str) -> list[tuple[str, str]]:
        return [key for key in self._keys_at(path) if self._plans[key].plan in _NEXT]

    def _refuse(self, path: str, text: str) -> NoReturn:
        """Raise with the plans tried. A difference after a hook ran explains more than one without."""
        keys = self._keys_at(path)
        lead = next((self._differed[key] for key in keys if key in self._differed), text)
        tried = []
        for key in keys:
            plan = self._plans[key]
            parts = [plan.reason] if plan.reason else []
            parts += [f"{plan.plan}: {text}"] if lead != text else []
            if parts:
                tried.append(f"{plan.method} of {plan.module or '<root>'}: {'; '.join(parts)}")
        told = f" ({' | '.join(tried)})" if tried else ""
        raise UnsupportedQuantForIPCError(
            f"{lead}{told}; this model cannot be attached, load it from disk"
        )
