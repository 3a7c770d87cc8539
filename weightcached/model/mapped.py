"""The models whose weights this process maps, and the changes of a mapping after the load.

While its engine sleeps a model may be unmapped, if the daemon needs the room, and is mapped again
at the same addresses before the engine wakes. A newer generation may replace the mapped one in the
same way, if all but the bytes of the weights is equal.

      AWAKE ──park()──► PARKED ──unmap()──► UNMAPPED
        ▲                  │                    │
        └───wake()─── WAKING ◄──prepare_wake()──┘        give_up_wake(): back to PARKED or UNMAPPED
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Protocol
from weakref import WeakKeyDictionary

from torch import nn

from weightcached.errors import CacheConfigMismatchError, WeightcachedError
from weightcached.index.tensors import TensorIndex, layout_difference
from weightcached.model.bind import Storages
from weightcached.segments.cuda import CudaMapping
from weightcached.system.fds import OwnedFd
from weightcached.wire.messages import Ready

log = logging.getLogger("vllm.weightcached")


class MappedAttachment(Protocol):
    """As client.Attachment."""

    @property
    def ready(self) -> Ready: ...
    @property
    def tensor_index(self) -> TensorIndex: ...
    @property
    def fds(self) -> list[OwnedFd]: ...

    def close(self) -> None: ...


class HeldLease(Protocol):
    """As client.LeaseKeeper."""

    def park(self, parked: bool) -> None: ...

    def close(self) -> None: ...


class State(Enum):
    AWAKE = "awake"
    PARKED = "parked"
    UNMAPPED = "unmapped"
    WAKING = "waking"


class MappedModel:
    """One model's mapping. mapping: None if it cannot be changed, as in host memory; attach: gets
    the newest generation, waiting as a load does; lease: keeps one; its second argument is called
    when the daemon asks to unmap.
    """

    def __init__(
        self,
        attachment: MappedAttachment,
        mapping: CudaMapping | None,
        storages: Storages,
        *,
        attach: Callable[[], MappedAttachment],
        lease: Callable[[MappedAttachment, Callable[[], bool]], HeldLease],
    ) -> None:
        self.ready = attachment.ready
        self.state = State.AWAKE
        self._index = attachment.tensor_index
        self._mapping = mapping
        self._storages: Storages | None = storages
        self._attach = attach
        self._new_lease = lease
        # The lease's thread unmaps, the engine's does all else.
        self._lock = threading.Lock()
        self._stale_copies = False
        self._lease = lease(attachment, self.unmap)

    @property
    def cache(self) -> str:
        return self.ready.cache

    @property
    def can_change(self) -> bool:
        """Whether other memory can come under the mapping."""
        return self._mapping is not None

    def park(self) -> None:
        """The engine sleeps: from here on the daemon may ask for the room."""
        if self._mapping is None:
            return
        with self._lock:
            if self.state is not State.AWAKE:
                return
            self.state = State.PARKED
        self._lease.park(True)

    def unmap(self) -> bool:
        """Give the memory back if the engine sleeps; whether that was done. Any thread may ask."""
        with self._lock:
            if self.state is not State.PARKED or self._mapping is None:
                return False
            try:
                self._mapping.unmap()
            except WeightcachedError as e:
                log.error("%s stays mapped: %s", self.cache, str(e))
                return False
            self.state = State.UNMAPPED
            return True

    def prepare_wake(self) -> None:
        """Have the weights mapped. Attaches again only if they are not.

        Raises the reason as a load does, and CacheConfigMismatchError if the newest generation
        cannot replace the old one. May be tried again.
        """
        with self._lock:
            if self.state is State.PARKED:
                self.state = State.WAKING
            if self.state is not State.UNMAPPED:
                return
        # An unmapped mapping cannot be unmapped again: no lock while waiting for the daemon.
        self._replace(self._attach())
        self.state = State.WAKING

    def give_up_wake(self) -> None:
        """The engine sleeps on."""
        with self._lock:
            if self.state is State.WAKING:
                self.state = State.PARKED
                # As a new lease does not know yet.
                self._lease.park(True)

    def wake(self) -> None:
        """After prepare_wake(), once the process has its own memory back.

        Refreshes the process's private copies if the weights were unmapped meanwhile.
        """
        self._refresh()
        with self._lock:
            if self.state is State.WAKING:
                self.state = State.AWAKE
                self._lease.park(False)

    def prepare_newest(self) -> MappedAttachment | None:
        """The newest generation for take(), if it is not the mapped one. The caller closes it.

        Raises the reason why there is none, and CacheConfigMismatchError.
        """
        attachment = self._attach()
        try:
            if attachment.ready.index_digest == self.ready.index_digest:
                attachment.close()
                return None
            self._check(attachment)
        except BaseException:
            attachment.close()
            raise
        return attachment

    def take(self, attachment: MappedAttachment) -> None:
        """Map another generation in place of this one. Raises SegmentError."""
        self._replace(attachment)
        self._refresh()

    def close(self) -> None:
        """Give the lease back. The model's tensors are all that keeps the memory mapped then."""
        self._lease.close()
        self._mapping = self._storages = None

    def _check(self, attachment: MappedAttachment) -> None:
        if difference := layout_difference(self._index, attachment.tensor_index):
            raise CacheConfigMismatchError(
                f"generation {attachment.ready.generation} of {self.cache} cannot take the place of generation "
                f"{self.ready.generation} in a running engine: {difference}; restart the engine"
            )

    def _replace(self, attachment: MappedAttachment) -> None:
        try:
            self._check(attachment)
            if self._mapping is None:
                raise CacheConfigMismatchError(
                    f"the mapped weights of {self.cache} are in host memory, where a running engine cannot take "
                    "another generation; restart the engine"
                )
            self._mapping.map_again(attachment.fds)
        except BaseException:
            attachment.close()
            raise
        self._stale_copies = True
        self._lease.close()
        before, self.ready = self.ready, attachment.ready
        self._index = attachment.tensor_index
        self._lease = self._new_lease(attachment, self.unmap)
        log.info(
            "mapped %s generation %d at the addresses of generation %d",
            self.cache,
            self.ready.generation,
            before.generation,
        )

    def _refresh(self) -> None:
        if self._stale_copies and self._storages is not None:
            self._storages.refresh()
            self._stale_copies = False


_models: WeakKeyDictionary[nn.Module, MappedModel] = WeakKeyDictionary()


def keep(model: nn.Module, mapped: MappedModel) -> None:
    """Remember a model's mapping as long as the model lives."""
    _models[model] = mapped
    # With the model: an engine that is shut down while its process lives on maps nothing any more.
    weakref.finalize(model, mapped.close).atexit = False


def of(model: object) -> MappedModel | None:
    """This model's mapping; None if its weights are private."""
    return _models.get(model) if isinstance(model, nn.Module) else None


def of_process() -> Iterator[MappedModel]:
    """Target and draft."""
    return iter(list(_models.values()))
