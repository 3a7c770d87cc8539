"""Which caches the manifest places on a device, as a function of data.

The daemon loads them, the exporter checks them, `weightcachectl plan` lists them.
"""

from __future__ import annotations

from typing import NamedTuple

from weightcached.config.drafts import has_cached_draft
from weightcached.config.manifest import Manifest, ModelSpec
from weightcached.config.ranks import Placement, layout_of
from weightcached.wire.messages import Role


class Wanted(NamedTuple):
    """One cache that the manifest places on a device."""

    name: str
    role: Role
    spec: ModelSpec
    spec_digest: str


def wanted_caches(manifest: Manifest, device: str) -> list[Wanted]:
    """The caches that the manifest places on `device`, in its order; with a draft there are two."""
    return [
        Wanted(f"{spec.name}/{role}", role, spec, spec.digest(device))
        for spec in manifest.on(device)
        for role in roles(spec, spec.placement_of(device))
    ]


def roles(spec: ModelSpec, placement: Placement) -> tuple[Role, ...]:
    """The caches of one rank of a model. Only ranks of the last pipeline stage have the draft."""
    last = placement.pp_rank == layout_of(spec.engine).pp_size - 1
    return ("target", "draft") if last and has_cached_draft(spec.engine) else ("target",)
