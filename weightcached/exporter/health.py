"""Whether this node's daemons serve the caches that the manifest wants. Asks each time, so an
answer is never old.

Knows nothing of HTTP. Between two questions it keeps which daemon answered last, to notice
restarts, how many takeovers there were, and the last errors.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from weightcached import __version__
from weightcached.config.manifest import ALL, Manifest, load_manifest
from weightcached.config.wanted import wanted_caches
from weightcached.errors import WeightcachedError
from weightcached.exporter.history import Fault, History
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


class View(NamedTuple):
    """Everything that a page shows, asked at `at`, in seconds since 1970."""

    at: float
    replies: dict[str, StatusReply | WeightcachedError]
    services: Services
    health: Health


class Node:
    """The daemons of this user on this machine. Safe to use from several threads."""

    def __init__(self, manifest: Path | None = None, socket_dir: Path | None = None) -> None:
        self._manifest = manifest
        self._socket_dir = socket_dir
        self._lock = threading.Lock()
        self._pids: dict[str, int] = {}
        # By device: how often another process answered than the time before.
        self.restarts: Counter[str] = Counter()
        # By engine service.
        self._takeovers: dict[str, int] = {}
        self.history = History()

    def health(self) -> Health:
        """Ask every daemon that the manifest needs. Raises nothing: silence is a fault."""
        try:
            manifest = load_manifest(manifest_path(self._manifest))
            devices = _devices(manifest, devices_with_socket(self._socket_dir))
        except WeightcachedError as e:
            return Health(0, [str(e)])
        return self._health(manifest, devices, self.ask(devices))

    def look(self) -> View:
        """Daemons and engine services, asked now. Raises nothing."""
        at = time.time()
        replies = self.ask(self.known_devices())
        services = self.services()
        try:
            manifest = load_manifest(manifest_path(self._manifest))
        except WeightcachedError as e:
            self.history.note([Fault("manifest", str(e))], at)
            return View(at, replies, services, Health(0, [str(e)]))
        wanted = [device for device in _devices(manifest, list(replies)) if device in replies]
        self.history.note(_unknown_caches(manifest, wanted, replies), at)
        return View(at, replies, services, self._health(manifest, wanted, replies))

    def _health(
        self,
        manifest: Manifest,
        devices: list[str],
        replies: dict[str, StatusReply | WeightcachedError],
    ) -> Health:
        if not devices:
            return Health(0, ["no daemon runs here, and the manifest names no device"])
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
                    before = self._pids.get(device, reply.pid)
                    self.restarts[device] += before != reply.pid
                    if before != reply.pid:
                        text = f"the daemon restarted: pid {reply.pid} follows pid {before}"
                        self.history.note([Fault(device, text)], time.time())
                    self._pids[device] = reply.pid
        self.history.note(_daemon_faults(replies), time.time())
        return replies

    def services(self) -> Services:
        """The engine services that have a supervisor, asked now. Raises nothing."""
        try:
            services = ask_all_services(
                self._socket_dir or runtime_dir(), timeout_s=ANSWER_TIMEOUT_S
            )
        except WeightcachedError:
            return Services([], {})
        with self._lock:
            faults = list(self._service_faults(services))
        self.history.note(faults, time.time())
        return services

    def _service_faults(self, services: Services) -> Iterator[Fault]:
        for name, error in services.errors.items():
            yield Fault(f"engine {name}", str(error))
        for reply in services.replies:
            name, count = reply["name"], reply["takeovers"]
            # A new supervisor counts from 0.
            if count > self._takeovers.get(name, count):
                text = f"a parked engine took over after {reply['last_takeover_s']:.2f} s"
                yield Fault(f"engine {name}", f"{text} (takeover {count})")
            self._takeovers[name] = count
            if reply["error"]:
                yield Fault(f"engine {name}", reply["error"])

    def known_devices(self) -> list[str]:
        """Devices with a socket, and those that the manifest names. Never raises."""
        try:
            sockets = devices_with_socket(self._socket_dir)
        except WeightcachedError:
            sockets = []
        try:
            named = _devices(load_manifest(manifest_path(self._manifest)), sockets)
        except WeightcachedError:
            named = []
        return list(dict.fromkeys([*named, *sockets]))

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


def _daemon_faults(replies: dict[str, StatusReply | WeightcachedError]) -> Iterator[Fault]:
    for device, reply in replies.items():
        if isinstance(reply, WeightcachedError):
            yield Fault(device, str(reply))
            continue
        if reply.manifest_error:
            yield Fault(device, reply.manifest_error)
        for cache in reply.caches:
            # A released cache says who asked for that.
            if cache.error and cache.state != "released":
                yield Fault(f"{device} {cache.name}", cache.error)


def _unknown_caches(
    manifest: Manifest, devices: list[str], replies: dict[str, StatusReply | WeightcachedError]
) -> Iterator[Fault]:
    for device in devices:
        reply = replies[device]
        if isinstance(reply, StatusReply):
            known = {cache.name for cache in reply.caches}
            for want in wanted_caches(manifest, device):
                if want.name not in known:
                    yield Fault(f"{device} {want.name}", _fault(None))


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
