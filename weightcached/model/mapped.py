"""The models whose weights this process maps, and the changes of a mapping after the load.

While its engine sleeps a model may be unmapped, if the daemon needs the room, and is mapped again
at the same addresses before the engine wakes. A newer generation may replace the mapped one in the
same way, if all but the bytes of the weights is equal; the one before stays held until the caller
says that all ranks have the newer one, and can come back until then.

      AWAKE ──park()──► PARKED ──unmap()──► UNMAPPED
        ▲                  │                    │
        └───wake()─── WAKING ◄──prepare_wake()──┘        give_up_wake(): back to PARKED or UNMAPPED
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from torch import nn

from weightcached.errors import CacheConfigMismatchError, SegmentError, WeightcachedError
from weightcached.index.tensors import TensorIndex, layout_difference
from weightcached.model.bind import Storages
from weightcached.segments.cuda import CudaMapping
from weightcached.system.fds import OwnedFd, close_all
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


class ChangeableMapping(Protocol):
    """As CudaMapping and HostMapping."""

    def map_again(self, fds: Sequence[OwnedFd]) -> None: ...

    def close(self) -> None: ...


class _Held(NamedTuple):
    """One generation of which the process holds the memory, with the descriptors that bring it back."""

    ready: Ready
    tensor_index: TensorIndex
    fds: list[OwnedFd]
    lease: HeldLease

    def close(self) -> None:
        self.lease.close()
        close_all(self.fds)


class State(Enum):
    AWAKE = "awake"
    PARKED = "parked"
    UNMAPPED = "unmapped"
    WAKING = "waking"


class MappedModel:
    """One model's mapping, which takes over the attachment and its open descriptors.

    attach: gets the generation of the engine's own checkpoint, waiting as a load does;
    attach_newest: gets the newest one of the cache, whatever checkpoint it was made from, waiting
    if asked to; lease: keeps one; its second argument is called when the daemon asks to unmap.
    rebind: puts the index's tensors into the model again and post-processes them, where models have
    results of that in memory of their own; None where they do not.
    """

    def __init__(
        self,
        attachment: MappedAttachment,
        mapping: ChangeableMapping,
        storages: Storages,
        *,
        attach: Callable[[], MappedAttachment],
        attach_newest: Callable[[bool], MappedAttachment],
        lease: Callable[[MappedAttachment, Callable[[], bool]], HeldLease],
        rebind: Callable[[TensorIndex], None] | None = None,
    ) -> None:
        self.state = State.AWAKE
        self._mapping: ChangeableMapping | None = mapping
        self._storages: Storages | None = storages
        self._attach = attach
        self._attach_newest = attach_newest
        self._new_lease = lease
        self._rebind = rebind
        # The lease's thread unmaps, the engine's does all else.
        self._lock = threading.Lock()
        self._stale_copies = False
        # Has taken a generation of another checkpoint than the engine's own.
        self._follows_cache = False
        self._before: _Held | None = None
        self._held = self._hold(attachment)

    @property
    def cache(self) -> str:
        return self._held.ready.cache

    @property
    def ready(self) -> Ready:
        """The mapped generation."""
        return self._held.ready

    @property
    def index(self) -> TensorIndex:
        return self._held.tensor_index

    def _hold(self, attachment: MappedAttachment) -> _Held:
        lease = self._new_lease(attachment, partial(self._unmap, attachment.ready))
        return _Held(attachment.ready, attachment.tensor_index, attachment.fds, lease)

    # ---- sleep and wake

    def park(self) -> None:
        """The engine sleeps: from here on the daemon may ask for the room."""
        if not isinstance(self._mapping, CudaMapping):
            return
        with self._lock:
            if self.state is not State.AWAKE:
                return
            self.state = State.PARKED
        self._held.lease.park(True)

    def _unmap(self, asked: Ready) -> bool:
        """Give the memory back if the engine sleeps; whether that was done. Any thread may ask."""
        with self._lock:
            if self.state is not State.PARKED or not isinstance(self._mapping, CudaMapping):
                return False
            if asked is not self._held.ready:
                # Asked for one that is not mapped any more.
                return False
            try:
                self._mapping.unmap()
            except WeightcachedError as e:
                log.error("%s stays mapped: %s", self.cache, str(e))
                return False
            close_all(self._held.fds)
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
        attachment = self._attach_newest(True) if self._follows_cache else self._attach()
        try:
            self._check(attachment)
        except BaseException:
            attachment.close()
            raise
        try:
            self._map_over(attachment, unmapped_becomes=State.WAKING)
        except BaseException:
            self._forget_taken()
            raise
        self.settle()

    def give_up_wake(self) -> None:
        """The engine sleeps on."""
        with self._lock:
            if self.state is State.WAKING:
                self.state = State.PARKED
                # As a new lease does not know yet.
                self._held.lease.park(True)

    def wake(self) -> None:
        """After prepare_wake(), once the process has its own memory back.

        Refreshes the process's private copies if the weights were unmapped meanwhile.
        """
        self._refresh()
        with self._lock:
            if self.state is State.WAKING:
                self.state = State.AWAKE
                self._held.lease.park(False)

    # ---- another generation

    def prepare_newest(self, *, wait: bool = True) -> MappedAttachment | None:
        """The newest generation for take(), if it is not the mapped one. The caller closes it.

        Raises the reason why there is none, and CacheConfigMismatchError (code `not-live`) if it
        cannot replace the mapped one in a running engine.
        """
        attachment = self._attach_newest(wait)
        try:
            same = attachment.ready.index_digest == self.ready.index_digest
            if same and self.state is not State.UNMAPPED:
                attachment.close()
                return None
            self._check(attachment)
        except BaseException:
            attachment.close()
            raise
        return attachment

    def take(self, attachment: MappedAttachment) -> None:
        """Map another generation in place of this one, which settle() lets go and go_back() brings
        back. After an error go_back() must be called.

        Raises SegmentError.
        """
        self._follows_cache = True
        self._map_over(attachment, unmapped_becomes=State.PARKED)
        if self.state is State.AWAKE:
            self._refresh()

    def owns(self, attachment: MappedAttachment) -> bool:
        """Whether the mapped generation came with it, whose end is this object's business then."""
        return self._held.ready is attachment.ready

    def rebind(self) -> None:
        """Have the model's own results of post-processing made again. Raises as a load does."""
        if self._rebind is not None:
            self._rebind(self._held.tensor_index)

    def settle(self) -> None:
        """The generation before is not needed any more: this tells the daemon."""
        before, self._before = self._before, None
        if before is None:
            return
        before.close()
        log.info(
            "mapped %s generation %d at the addresses of generation %d",
            self.cache,
            self.ready.generation,
            before.ready.generation,
        )

    def go_back(self) -> None:
        """Map the generation before take() again; nothing if none was taken.

        Raises SegmentError: then the model has no weights that may be used.
        """
        if self._before is None:
            return
        self._forget_taken()
        with self._lock:
            if not any(fd.closed for fd in self._held.fds):
                self._mapping_now().map_again([fd.dup() for fd in self._held.fds])
            elif isinstance(self._mapping, CudaMapping):
                # It slept without its memory, and does so again.
                self._mapping.unmap()
                self.state = State.UNMAPPED
        self._stale_copies = True
        if self.state is State.AWAKE:
            self._refresh()

    def close(self) -> None:
        """Give the lease back. The model's tensors are all that keeps the memory mapped then."""
        self.settle()
        self._held.close()
        if self._mapping is not None:
            self._mapping.close()
        self._mapping = self._storages = None
        # It refers to the model.
        self._rebind = None

    def _check(self, attachment: MappedAttachment) -> None:
        if difference := layout_difference(self.index, attachment.tensor_index):
            raise CacheConfigMismatchError(
                f"generation {attachment.ready.generation} of {self.cache} cannot take the place of generation "
                f"{self.ready.generation} in a running engine: {difference}; restart the engine",
                code="not-live",
            )

    def _map_over(self, attachment: MappedAttachment, *, unmapped_becomes: State) -> None:
        """Owns the attachment from here on. Raises SegmentError: what is mapped is nothing, the old
        generation or in part the newer one then.
        """
        fds = [fd.dup() for fd in attachment.fds]
        held = self._hold(attachment)
        with self._lock:
            self._before, self._held = self._held, held
            self._stale_copies = True
            self._mapping_now().map_again(fds)
            if self.state is State.UNMAPPED:
                self.state = unmapped_becomes
            if self.state is State.PARKED:
                held.lease.park(True)

    def _forget_taken(self) -> None:
        taken, before = self._held, self._before
        assert before is not None
        self._held, self._before = before, None
        taken.close()

    def _mapping_now(self) -> ChangeableMapping:
        if self._mapping is None:
            raise SegmentError(f"the mapping of {self.cache} is closed: its model has ended")
        return self._mapping

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
