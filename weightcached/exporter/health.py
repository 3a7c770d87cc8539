"""Whether this node's daemons serve the caches that the manifest wants. Asks each time, so an
answer is never old.

Knows nothing of HTTP. Between two questions it keeps only which daemon answered last, to notice
restarts.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from weightcached import __version__
from weightcached.config.manifest import ALL, Manifest, load_manifest
from weightcached.config.wanted import wanted_caches
from weightcached.errors import WeightcachedError
from weightcached.system.paths import devices_with_socket, manifest_path, runtime_dir, socket_path
from weightcached.system.text import progress_text
from weightcached.wire.messages import CacheStatus, StatusReply
from weightcached.wire.requests import ask_status
from weightcached.wire.services import Services, ask_all_services

# A daemon answers within milliseconds; one that does not is worth an alarm within 2 s.
ANSWER_TIMEOUT_S = 1.0
_MAX_PARALLEL = 32
_SOFTWARE = f"weightcached exporter {__version__}"


class Health(NamedTuple):
    """faults: one line for each cache that is not ready, and each unanswered question."""

    ready: int
    faults: list[str]


class Node:
    """The daemons of this user on this machine. Safe to use from several threads."""

    def __init__(self, manifest: Path | None = None, socket_dir: Path | None = None) -> None:
        self._manifest = manifest
        self._socket_dir = socket_dir
        self._lock = threading.Lock()
        self._pids: dict[str, int] = {}
        # By device: how often another process answered than the time before.
        self.restarts: Counter[str] = Counter()

    def health(self) -> Health:
        """Ask every daemon that the manifest needs. Raises nothing: silence is a fault."""
        try:
            manifest = load_manifest(manifest_path(self._manifest))
            sockets = devices_with_socket(self._socket_dir)
        except WeightcachedError as e:
            return Health(0, [str(e)])
        devices = _devices(manifest, sockets)
        if not devices:
            return Health(0, ["no daemon runs here, and the manifest names no device"])
        replies = self.ask(devices)
        faults: list[str] = []
        ready = 0
        for device in devices:
            faults += _faults(manifest, device, replies[device])
            ready += _ready(manifest, device, replies[device])
        return Health(ready, faults)

    def ask(self, devices: list[str]) -> dict[str, StatusReply | WeightcachedError]:
        """The answer of each daemon; all are asked at the same time."""
        if not devices:
            return {}
        with ThreadPoolExecutor(min(len(devices), _MAX_PARALLEL)) as pool:
            replies = dict(zip(devices, pool.map(self._ask, devices), strict=True))
        with self._lock:
            for device, reply in replies.items():
                if isinstance(reply, StatusReply):
                    self.restarts[device] += self._pids.get(device, reply.pid) != reply.pid
                    self._pids[device] = reply.pid
        return replies

    def services(self) -> Services:
        """The engine services that have a supervisor, asked now. Raises nothing."""
        try:
            return ask_all_services(self._socket_dir or runtime_dir(), timeout_s=ANSWER_TIMEOUT_S)
        except WeightcachedError:
            return Services([], {})

    def known_devices(self) -> list[str]:
        """Devices with a socket, and those that the manifest names. Never raises."""
        try:
            sockets = devices_with_socket(self._socket_dir)
        except WeightcachedError:
            sockets = []
        try:
            return _devices(load_manifest(manifest_path(self._manifest)), sockets)
        except WeightcachedError:
            return sockets

    def _ask(self, device: str) -> StatusReply | WeightcachedError:
        try:
            path = socket_path(device, self._socket_dir)
            return ask_status(path, timeout_s=ANSWER_TIMEOUT_S, software=_SOFTWARE)
        except WeightcachedError as e:
            return e


def _devices(manifest: Manifest, sockets: list[str]) -> list[str]:
    """Devices on which the manifest wants caches: `all` stands for every device that has a daemon."""
    named = [device for model in manifest.models for device in model.devices if device != ALL]
    everywhere = sockets if any(model.devices == [ALL] for model in manifest.models) else []
    return list(dict.fromkeys([*named, *everywhere]))


def _faults(
    manifest: Manifest, device: str, reply: StatusReply | WeightcachedError
) -> Iterator[str]:
    """One line for each wanted cache that is not ready."""
    caches = (
        {}
        if isinstance(reply, WeightcachedError)
        else {cache.name: cache for cache in reply.caches}
    )
    for want in wanted_caches(manifest, device):
        reason = (
            str(reply) if isinstance(reply, WeightcachedError) else _fault(caches.get(want.name))
        )
        if reason:
            yield f"{device} {want.name}: {' '.join(reason.split())}"


def _ready(manifest: Manifest, device: str, reply: StatusReply | WeightcachedError) -> int:
    caches = [] if isinstance(reply, WeightcachedError) else reply.caches
    ready = {cache.name for cache in caches if cache.state == "ready"}
    return sum(want.name in ready for want in wanted_caches(manifest, device))


def _fault(cache: CacheStatus | None) -> str:
    if cache is None:
        return "the daemon does not know it: weightcachectl reload"
    # Somebody asked for its release: an engine that has a copy, or a `drop`. An evicted one comes
    # back when it is asked for.
    if cache.state in ("ready", "released", "evicted"):
        return ""
    detail = cache.error or progress_text(cache)
    return f"{cache.state}: {detail}" if detail else cache.state
