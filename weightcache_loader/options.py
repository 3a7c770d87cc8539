"""The loader's options in `--model-loader-extra-config`: those of vLLM's `ipc_cache`, and more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from weightcached.config.load_formats import OWN_LOAD_FORMATS
from weightcached.system.text import near_miss


class LoaderOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """socket_path names one daemon's socket, socket_dir the directory of all; timeouts are in
    seconds.

    mode: map the cache, or copy it and let the daemon free it. fallback: load from disk, by
    fallback_load_format with fallback_extra_config, if the cache cannot be used; otherwise raise
    the reason. start_parked: the engine is asleep when it is ready, and its first wake takes the
    memory for its KV cache.
    """

    socket_path: str | None = None
    socket_dir: str | None = None
    mode: Literal["zero_copy", "copy"] = "zero_copy"
    fallback: bool = True
    connect_timeout_s: float = 5.0
    state_timeout_s: float = 300.0
    fallback_load_format: str = "auto"
    fallback_extra_config: dict[str, Any] = {}
    identity: Literal["full", "sampled"] = "full"
    start_parked: bool = False
    # Set by vLLM itself for the loader of a speculative draft.
    is_draft: bool = False

    @property
    def role(self) -> Literal["target", "draft"]:
        return "draft" if self.is_draft else "target"

    def directory(self) -> Path | None:
        return Path(self.socket_dir) if self.socket_dir else None


def parse_options(extra_config: Mapping[str, Any] | None, load_format: str) -> LoaderOptions:
    """Check the options. Raises ValueError naming key, value and the expected value."""
    given = dict(extra_config or {})
    known = LoaderOptions.__struct_fields__
    for name in given:
        if name not in known:
            raise ValueError(
                f"model_loader_extra_config of load format {load_format}: unknown key {name!r}"
                f"{near_miss(name, known)}; known keys: {', '.join(k for k in known if k != 'is_draft')}"
            )
    try:
        options = msgspec.convert(given, LoaderOptions, strict=False)
    except msgspec.ValidationError as e:
        raise ValueError(f"model_loader_extra_config of load format {load_format}: {e}") from e
    if options.socket_path and options.socket_dir:
        raise ValueError(
            "model_loader_extra_config: socket_path and socket_dir exclude each other; leave one out"
        )
    if not (options.connect_timeout_s > 0 and options.state_timeout_s >= 0):
        raise ValueError(
            f"model_loader_extra_config: connect_timeout_s {options.connect_timeout_s} must be above 0, "
            f"state_timeout_s {options.state_timeout_s} at least 0"
        )
    if options.fallback_load_format in OWN_LOAD_FORMATS:
        raise ValueError(
            "model_loader_extra_config: fallback_load_format must be a load format that reads from disk"
        )
    return options
