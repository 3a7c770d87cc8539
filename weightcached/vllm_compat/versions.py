"""Which versions of vLLM were seen, and which names of vLLM this package needs.

vLLM's internals change every few weeks. A new version is tried, not refused: if it lacks a name, an
error says so and the engine loads from disk. To support a new version, begin with `python -m
weightcached.vllm_compat.versions`: it looks for every name in the vLLM that is installed. Imported
names are read from our own sources; REACHED lists names that are patched or reached through an
attribute.
"""

from __future__ import annotations

import ast
import importlib
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Tests that ran, by release; docs/compatibility.md has the results.
SEEN = {
    "0.30": "CPU build 0.30.0: make matrix",
    "0.31": "CPU build 0.31.0: make matrix",
    "0.32": "CPU build 0.32.0: tests/engine, make matrix",
    "0.33": "CUDA build 0.33.0: tests/gpu, bench",
}


class VllmName(NamedTuple):
    """One name of vLLM. `where` is MODULE:ATTRIBUTE.PATH, `of` the module here that uses it."""

    of: str
    where: str


_LOADER = "vllm.model_executor.model_loader"
_GROUPS = "vllm.distributed.parallel_state"
_SERVER = "vllm.entrypoints.launchers.api_server.entry"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_EXPERTS = "vllm.model_executor.layers.fused_moe.expert_map_manager"

# Not imported by name: patched names, and names reached through an imported module or class.
REACHED = (
    VllmName("weightcache_loader", f"{_LOADER}:_LOAD_FORMAT_TO_MODEL_LOADER"),
    VllmName("weightcache_loader", f"{_LOADER}:register_model_loader"),
    VllmName("build", "vllm.model_executor.layers.rotary_embedding:_ROPE_DICT"),
    VllmName("build", f"{_EXPERTS}:determine_expert_map"),
    VllmName("key", "vllm.envs:environment_variables"),
    VllmName("key", f"{_GROUPS}:get_ep_group"),
    VllmName("guarded", "vllm.v1.executor.multiproc_executor:MultiprocExecutor.collective_rpc"),
    VllmName("live", "vllm.v1.engine.core:EngineCore.collective_rpc"),
    VllmName("live", "vllm.v1.engine.core:EngineCore.reset_prefix_cache"),
    VllmName("parked_start", "vllm.v1.engine.core:EngineCoreProc.run_busy_loop"),
    VllmName("parked_start", "vllm.v1.engine.core:DPEngineCoreProc.run_busy_loop"),
    VllmName("server", f"{_SERVER}:setup_server"),
    VllmName("server", f"{_SERVER}:build_async_engine_client"),
    VllmName("server", f"{_SERVER}:serve_http"),
    VllmName("server", f"{_SERVER}:build_and_serve"),
    VllmName("solo_rank", f"{_LOADER}.base_loader:BaseModelLoader.create_model"),
    VllmName("solo_rank", f"{_GROUPS}:init_distributed_environment"),
    VllmName("solo_rank", f"{_GROUPS}:ensure_model_parallel_initialized"),
    VllmName("solo_rank", f"{_GROUPS}:init_model_parallel_group"),
    VllmName("solo_rank", f"{_GROUPS}:_node_count"),
    VllmName("startup_plan", "vllm.v1.worker.startup_plan:compute_plan_fingerprint"),
    VllmName("worker", f"{_WORKER}.sleep"),
    VllmName("worker", f"{_WORKER}.wake_up"),
    VllmName("worker", f"{_WORKER}.compile_or_warm_up_model"),
    VllmName("worker", "vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model"),
    VllmName("worker", f"{_WORKER}._maybe_get_memory_pool_context"),
    VllmName("worker", f"{_WORKER}.shutdown"),
    VllmName("worker", f"{_WORKER}.reload_weights"),
    VllmName("worker", f"{_WORKER}.init_weight_transfer_engine"),
    VllmName("worker", f"{_WORKER}.start_weight_update"),
    VllmName("worker", f"{_WORKER}.start_draft_weight_update"),
    VllmName("worker", f"{_WORKER}.update_weights"),
    VllmName("worker", f"{_WORKER}.finish_weight_update"),
    VllmName("worker", f"{_WORKER}.reset_weights"),
)
# Optional: imported only if vLLM's own options ask for it, in another place in other releases, or
# not needed in a release that lacks it.
OPTIONAL = frozenset(
    {
        "vllm.device_allocator:alloc_conf",
        "vllm.model_executor.model_loader.utils:get_draft_load_config",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
        "vllm.v1.worker.gpu_worker:Worker.reset_weights",
        "vllm.entrypoints.common.cli_args:make_arg_parser",
        "vllm.entrypoints.common.cli_args:validate_parsed_serve_args",
        "vllm.entrypoints.launchers.cli_args:make_arg_parser",
        "vllm.entrypoints.launchers.cli_args:validate_parsed_serve_args",
    }
)

_warned = False


def is_seen(version: str) -> bool:
    """Whether this release, e.g. "0.33.1", is one of SEEN."""
    found = re.match(r"\d+\.\d+", version)
    return found is not None and found[0] in SEEN


def warn_of_unseen(log: logging.Logger, version: str) -> None:
    """Log one warning in this process if this release of vLLM was never tried; never refuse."""
    global _warned  # noqa: PLW0603
    if _warned or is_seen(version):
        return
    _warned = True
    log.warning(
        "weightcached was not tried with vLLM %s, only with %s; if the cache is not used, "
        "'python -m weightcached.vllm_compat.versions' lists the names that this vLLM lacks",
        version,
        ", ".join(SEEN),
    )


def imports_of(source: Path) -> Iterator[VllmName]:
    """The names of vLLM that a source file imports, at its top or inside functions. An import that
    is tried, and its replacement after an ImportError, are one name at several places.
    """
    tree = ast.parse(source.read_text(encoding="utf-8"))
    instead: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            for name, places in _alternatives(node).items():
                instead.update(dict.fromkeys((f"{place}:{name}" for place in places), places))
    for node in ast.walk(tree):
        for place, name in _imported(node):
            places = instead.get(f"{place}:{name}", [place])
            yield VllmName(source.stem, " or ".join(f"{each}:{name}" for each in places))


def _imported(node: ast.AST) -> list[tuple[str, str]]:
    """(module, name) of each name of vLLM that an import statement takes from a module."""
    if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "vllm":
        return []
    return [(node.module or "", name.name) for name in node.names]


def _alternatives(node: ast.Try) -> dict[str, list[str]]:
    """Of each name that is imported in a `try` or in its handlers: the modules, in order."""
    places: dict[str, list[str]] = {}
    for statement in [*node.body, *(s for handler in node.handlers for s in handler.body)]:
        for place, name in _imported(statement):
            places.setdefault(name, []).append(place)
    return places


def needs() -> list[VllmName]:
    """Every name of vLLM that the package uses."""
    compat = Path(__file__).parent
    sources = [*compat.glob("*.py"), *(compat.parents[1] / "weightcache_loader").glob("*.py")]
    imported = [need for source in sorted(sources) for need in imports_of(source)]
    return list(dict.fromkeys([*REACHED, *imported]))


def find(where: str) -> Any:
    """The object at MODULE:ATTRIBUTE.PATH; of several, the first that exists.

    Raises ImportError, AttributeError.
    """
    first, _, others = where.partition(" or ")
    try:
        return _find_at(first)
    except (ImportError, AttributeError):
        if not others:
            raise
    return find(others)


def _find_at(where: str) -> Any:
    module, _, path = where.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        if not hasattr(found, name) and hasattr(found, "__path__"):
            # A module that nobody has imported yet.
            importlib.import_module(f"{module}.{name}")
        found = getattr(found, name)
    return found


def missing() -> list[tuple[VllmName, str]]:
    """Names that the installed vLLM lacks, each with the reason."""
    lacking = []
    for need in needs():
        try:
            find(need.where)
        except (ImportError, AttributeError) as e:
            if need.where not in OPTIONAL:
                lacking.append((need, f"{type(e).__name__}: {e}"))
    return lacking


def main() -> int:
    """Print the names that the installed vLLM lacks. Returns 1 if there are any."""
    import vllm

    lacking = missing()
    for need, reason in lacking:
        print(f"{need.where}, used in {need.of}: {reason}")
    seen = "seen" if is_seen(vllm.__version__) else "never tried"
    print(f"vLLM {vllm.__version__} ({seen}): {len(needs())} names used, {len(lacking)} missing")
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
