"""The daemons' state and counters as Prometheus metrics. Needs prometheus_client; imported for
/metrics only.

Engines decide on fallbacks and tell the daemon of their device. If an engine cannot reach its
daemon, nobody counts the fallback; weightcached_up shows that.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from weightcached.exporter.health import Node
from weightcached.wire.messages import CacheStatus, Counters, StatusReply
from weightcached.wire.services import Services

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_ENGINE_STATES = ("starting", "serving", "taking-over", "draining", "asleep", "stopping")
_STATES = ("loading", "ready", "failed", "released", "evicted")


def text_of(node: Node) -> str:
    """Everything in Prometheus's text format; the daemons are asked now."""
    registry = CollectorRegistry()
    registry.register(_NodeCollector(node))
    return generate_latest(registry).decode()


class _NodeCollector(Collector):
    def __init__(self, node: Node) -> None:
        self._node = node

    def describe(self) -> list[Metric]:
        """Nothing: the registry would else collect once only to learn the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        replies = self._node.ask(self._node.known_devices())
        answered = {
            device: reply for device, reply in replies.items() if isinstance(reply, StatusReply)
        }
        up = GaugeMetricFamily(
            "weightcached_up", "Whether the device's daemon answers.", labels=["device"]
        )
        for device in replies:
            up.add_metric([device], float(device in answered))
        yield up
        restarts = CounterMetricFamily(
            "weightcached_daemon_restarts",
            "Changes of the daemon's process seen by the exporter.",
            labels=["device"],
        )
        for device, count in self._node.restarts.items():
            restarts.add_metric([device], count)
        yield restarts
        yield from _engines(self._node.services())
        yield from _caches(answered)
        yield from _counters(
            {d: reply.counters for d, reply in answered.items() if reply.counters is not None}
        )


def _engines(services: Services) -> Iterator[Metric]:
    up = GaugeMetricFamily(
        "weightcached_engine_up", "Whether an engine of the service serves.", labels=["engine"]
    )
    state = GaugeMetricFamily(
        "weightcached_engine_state", "1 for the service's state.", labels=["engine", "state"]
    )
    standby = GaugeMetricFamily(
        "weightcached_engine_parked", "Parked engines that are ready.", labels=["engine"]
    )
    takeovers = CounterMetricFamily(
        "weightcached_engine_takeovers",
        "Parked engines that replaced a dead one, since the supervisor's start.",
        labels=["engine"],
    )
    last = GaugeMetricFamily(
        "weightcached_engine_last_takeover_seconds",
        "From the death of the engine to the next one that accepts.",
        labels=["engine"],
    )
    for name in services.errors:
        up.add_metric([name], 0.0)
    for reply in services.replies:
        name = reply["name"]
        up.add_metric([name], float(reply["state"] == "serving"))
        for known in _ENGINE_STATES:
            state.add_metric([name, known], float(reply["state"] == known))
        parked = sum(engine["state"] == "parked" for engine in reply["engines"])
        standby.add_metric([name], parked)
        takeovers.add_metric([name], reply["takeovers"])
        if reply["takeovers"]:
            last.add_metric([name], reply["last_takeover_s"])
    yield from (up, state, standby, takeovers, last)


def _labels(device: str, cache: str) -> list[str]:
    """device, model, role."""
    model, _, role = cache.rpartition("/")
    return [device, model, role]


def _caches(replies: dict[str, StatusReply]) -> Iterator[Metric]:
    names = ["device", "model", "role"]
    nbytes = GaugeMetricFamily(
        "weightcached_cache_bytes",
        "Device memory of the served generation.",
        labels=[*names, "generation"],
    )
    leases = GaugeMetricFamily("weightcached_leases", "Engines that hold the cache.", labels=names)
    state = GaugeMetricFamily(
        "weightcached_cache_state", "1 for the cache's state.", labels=[*names, "state"]
    )
    engines = GaugeMetricFamily(
        "weightcached_generation_engines",
        "Engines that map a generation, served or older; `label` names its weights.",
        labels=[*names, "generation", "label"],
    )
    for device, reply in replies.items():
        for old in reply.old_generations:
            labels = [*_labels(device, old.cache), str(old.generation), old.label]
            engines.add_metric(labels, len(old.engines))
        for cache in reply.caches:
            labels = _labels(device, cache.name)
            if cache.generation:
                nbytes.add_metric([*labels, str(cache.generation)], cache.bytes)
                mapping = [e for e in cache.engines if e.generation in (0, cache.generation)]
                served = [*labels, str(cache.generation), cache.label]
                engines.add_metric(served, len(mapping))
            leases.add_metric(labels, len(cache.engines))
            for name in _STATES:
                state.add_metric([*labels, name], _is(cache, name))
    yield from (nbytes, leases, state, engines)


def _is(cache: CacheStatus, state: str) -> float:
    return float(cache.state == state)


def _counters(counters: dict[str, Counters]) -> Iterator[Metric]:
    names = ["device", "model", "role"]
    attaches = SummaryMetricFamily(
        "weightcached_attach_seconds",
        "Time to hand out a generation, without waiting for a load.",
        labels=names,
    )
    phases = GaugeMetricFamily(
        "weightcached_load_seconds",
        "Time of the served generation's load.",
        labels=[*names, "phase"],
    )
    restores = SummaryMetricFamily(
        "weightcached_restore_seconds",
        "Time to bring a generation back from its snapshot.",
        labels=names,
    )
    by_cache = {
        "hits": CounterMetricFamily(
            "weightcached_attach_hits",
            "Attaches that waited for no load.",
            labels=names,
        ),
        "evictions": CounterMetricFamily(
            "weightcached_evictions",
            "Generations freed until an engine asks for them.",
            labels=names,
        ),
    }
    by_label = {
        "mismatches": CounterMetricFamily(
            "weightcached_mismatches",
            "Attaches refused for a field of the key.",
            labels=["device", "field"],
        ),
        "refusals": CounterMetricFamily(
            "weightcached_attach_refusals",
            "Attaches answered without a generation.",
            labels=["device", "answer"],
        ),
        "fallbacks": CounterMetricFamily(
            "weightcached_fallbacks",
            "Loads from disk that engines reported, by reason.",
            labels=["device", "reason"],
        ),
    }
    plain = {
        "adoptions": CounterMetricFamily(
            "weightcached_adoptions",
            "Generations taken back from the descriptor store.",
            labels=["device"],
        ),
        "digest_failures": CounterMetricFamily(
            "weightcached_digest_failures",
            "Checkpoint digests that could not be made.",
            labels=["device"],
        ),
    }
    for device, counted in counters.items():
        for cache, count in counted.attaches.items():
            attaches.add_metric(
                _labels(device, cache), count, counted.attach_seconds.get(cache, 0.0)
            )
        for cache, seconds in counted.phase_seconds.items():
            for phase, value in seconds.items():
                phases.add_metric([*_labels(device, cache), phase], value)
        for cache, count in counted.restores.items():
            restores.add_metric(
                _labels(device, cache), count, counted.restore_seconds.get(cache, 0.0)
            )
        for name, family in by_cache.items():
            for cache, count in getattr(counted, name).items():
                family.add_metric(_labels(device, cache), count)
        for name, family in by_label.items():
            for label, count in getattr(counted, name).items():
                family.add_metric([device, label], count)
        for name, family in plain.items():
            family.add_metric([device], getattr(counted, name))
    yield from (attaches, phases, restores, *by_cache.values(), *by_label.values(), *plain.values())
