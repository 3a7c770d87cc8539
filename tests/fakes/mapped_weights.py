"""Weights that a fake engine maps: the plug-in's own client and lease, over plain mmap().

As model/mapped.py with the sleep back end `weightcached`: parked while its engine sleeps, unmapped
if the daemon asks then, attached again before it wakes.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
import time
from pathlib import Path

from tests.fakes.checkpoints import WEIGHTS, key_of
from tests.fakes.daemon import BOUND_S
from weightcache_loader import client
from weightcached.errors import WeightcachedError


def digest_of(checkpoint: Path) -> str:
    """The digest of a MappedWeights that maps this checkpoint."""
    return hashlib.sha256((checkpoint / WEIGHTS).read_bytes()).hexdigest()


class MappedWeights:
    """One model's weights. keeps: does not unmap them, whoever asks."""

    def __init__(self, socket: Path, checkpoint: str, *, keeps: bool = False) -> None:
        self._socket = socket
        self._checkpoint = checkpoint
        self._keeps = keeps
        self._lock = threading.Lock()
        self._parked = False
        self._follows_cache = False
        self._maps: list[mmap.mmap] = []
        self._take(self._attach())

    def _attach(self, *, newest: bool = False, wait: bool = True) -> client.Attachment:
        key, cache = key_of({"model": self._checkpoint}), "tiny/target" if newest else ""
        return client.attach(
            self._socket, key, connect_timeout_s=5.0, state_timeout_s=BOUND_S if wait else 0.0,
            cache=cache,
        )  # fmt: skip

    def _take(self, attachment: client.Attachment) -> None:
        maps = [mmap.mmap(fd.fileno(), 0, prot=mmap.PROT_READ) for fd in attachment.fds]
        for fd in attachment.fds:
            fd.close()
        ready = attachment.ready

        def unmap() -> bool:
            with self._lock:
                if not self._parked or self._keeps or self._ready is not ready:
                    return False
                self._maps = []
                return True

        with self._lock:
            self._maps, self._ready = maps, ready
            lease = client.LeaseKeeper(
                attachment.connection, self._socket, attachment.ready, on_unmap=unmap
            )
            before, self._lease = getattr(self, "_lease", None), lease
            lease.park(self._parked)
        if before is not None:
            before.close()

    def digest(self) -> str:
        """Of the mapped bytes, without the padding of the segments; "" if nothing is mapped."""
        nbytes = (Path(self._checkpoint) / WEIGHTS).stat().st_size
        data = b"".join(m[:] for m in self._maps)[:nbytes]
        return hashlib.sha256(data).hexdigest() if data else ""

    def park(self) -> None:
        with self._lock:
            self._parked = True
            self._lease.park(True)

    def wake(self) -> None:
        """Raises the reason why there are no weights to wake with."""
        with self._lock:
            self._parked, mapped = False, bool(self._maps)
        try:
            if not mapped:
                deadline_s = time.monotonic() + BOUND_S
                while True:
                    try:
                        self._take(self._attach(newest=self._follows_cache))
                        break
                    except WeightcachedError as e:
                        if e.code != "no-daemon" or time.monotonic() > deadline_s:
                            raise
                    time.sleep(0.05)
        except BaseException:
            self._parked = True
            raise
        self._lease.park(False)

    def swap(self) -> dict[str, object]:
        """As the engine's answer to a swap."""
        try:
            attachment = self._attach(newest=True, wait=False)
        except WeightcachedError as e:
            return {"outcome": "left", "reason": str(e), "code": e.code}
        if attachment.ready.index_digest == self._ready.index_digest and self._maps:
            attachment.close()
            return {"outcome": "unchanged", "generation": attachment.ready.generation}
        self._follows_cache = True
        self._take(attachment)
        return {"outcome": "swapped", "generation": self._ready.generation}
