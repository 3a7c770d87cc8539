"""Which caches to load, keep and drop, as a function of data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from weightcached.config.manifest import ModelSpec
from weightcached.config.wanted import Wanted
from weightcached.daemon.caches import Caches
from weightcached.wire.loader_job import Meeting
from weightcached.wire.messages import Role


class Plan(NamedTuple):
    load: list[Wanted]
    unchanged: list[Wanted]
    drop: list[str]
    # On demand: not loaded before an engine asks.
    offer: list[Wanted]


def meeting_of(spec: ModelSpec, role: Role) -> Meeting | None:
    """The meeting place of the role's loaders; None if each loads alone."""
    place = spec.rendezvous
    if place is None:
        return None
    return Meeting(
        host=place.host, port=place.port_of(role), timeout_s=place.timeout_s, devices=spec.devices
    )


def plan(
    wanted: Sequence[Wanted],
    caches: Caches,
    *,
    stale: Collection[str],
    force: bool,
    only: Collection[str],
    starting: bool = False,
) -> Plan:
    """The caches to load, keep and drop.

    stale: caches that a load would make differently; empty `only`: all. A daemon that is `starting`
    does not load caches that were dropped before. On-demand models that are not served are loaded
    only if they are named.
    """
    aside = caches.aside() if starting else {}
    chosen = [want for want in wanted if (not only or want.name in only) and want.name not in aside]
    load: list[Wanted] = []
    unchanged: list[Wanted] = []
    offer: list[Wanted] = []
    for want in chosen:
        cache = caches.get(want.name)
        if want.spec.on_demand and not only and (cache is None or cache.generation is None):
            # One that an engine waits for is loaded already, or will be.
            if cache is None or cache.load is None:
                offer.append(want)
            continue
        current = is_current(want, caches, stale)
        (unchanged if current and not force else load).append(want)
    names = {want.name for want in wanted}
    drop = [
        cache.name
        for cache in caches
        if cache.name not in names and (not only or cache.name in only)
    ]
    return Plan(load, unchanged, drop, offer)


def is_current(want: Wanted, caches: Caches, stale: Collection[str]) -> bool:
    """Whether the served generation is the wanted one."""
    cache = caches.get(want.name)
    served = cache.generation if cache else None
    return served is not None and served.spec_digest == want.spec_digest and want.name not in stale
