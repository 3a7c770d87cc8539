"""The engine's side of the protocol: attach to a generation, keep the lease, rejoin a restarted
daemon.

Knows nothing of vLLM or torch.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from weightcached import __version__
from weightcached.checkpoint.identity import with_files, with_full, with_sample
from weightcached.errors import (
    CacheConfigMismatchError,
    Cause,
    ProtocolError,
    WeightcachedError,
    WeightCacheUnavailableError,
)
from weightcached.index.key import WeightCacheKey
from weightcached.index.tensors import TensorIndex
from weightcached.system.fds import OwnedFd, close_all
from weightcached.system.text import progress_text
from weightcached.wire.connection import Connection
from weightcached.wire.fetch import receive_generation
from weightcached.wire.messages import (
    Absent,
    Attach,
    Done,
    Failed,
    FieldMismatch,
    HoldLoads,
    Loading,
    Mismatch,
    NeedDigest,
    Parked,
    Ready,
    Refused,
    Rejoin,
    Rejoined,
    Release,
    Released,
    Reply,
    Unmap,
)

log = logging.getLogger("vllm.weightcached")

SOFTWARE = f"weightcached {__version__}"
_PROGRESS_LOG_INTERVAL_S = 5.0
# A daemon says Loading about once a second; silence for this long is a wedged daemon.
_SILENCE_S = 30.0
# The engine stops waiting for a load that moves no byte and changes no phase for this long. Loads
# that wait for their turn, digests and tuning report no bytes: the daemon itself watches these.
_STALL_S = 120.0
# How long a hold of loads may take to come about, and to last, while an engine sleeps or wakes.
_MOMENT_S = 0.5
_LONGEST_MOMENT_S = 60.0
_PHASES_WITHOUT_BYTES = ("queued", "digest", "tuning")
# A restarted daemon listens again after some tenths of a second.
_COMING_POLL_S = 0.1
_REJOIN_FIRST_S = 0.2
_DAEMON_AWAY = frozenset({"no-daemon", "connection-lost"})
_REJOIN_MAX_S = 2.0
# If a lease is closed while it connects and asks, its thread may take two deadlines to notice.
_JOIN_S = 3 * _REJOIN_MAX_S


class Attachment(NamedTuple):
    """A lease on one generation: connection, index, and segment descriptors (owned here)."""

    connection: Connection
    ready: Ready
    tensor_index: TensorIndex
    fds: list[OwnedFd]

    def close(self) -> None:
        close_all(self.fds)
        self.connection.close()


def attach(
    path: Path,
    key: WeightCacheKey,
    *,
    connect_timeout_s: float,
    state_timeout_s: float,
    device: str = "",
    identity: Literal["full", "sampled"] = "full",
    patient: bool = False,
    cache: str = "",
) -> Attachment:
    """Attach to the generation that matches `key`, waiting up to `state_timeout_s` while it loads;
    with `cache` to the newest one of that cache, whatever checkpoint it was made from.

    patient: wait up to `connect_timeout_s` for a daemon that is not there yet. With `device`, only
    to the daemon of that device; with identity `sampled`, equal samples of the checkpoints are
    enough. Raises WeightCacheUnavailableError and CacheConfigMismatchError with the one reason;
    RuntimePathError and ProtocolError for a socket or daemon that cannot be trusted.
    """
    connection = _connect(path, connect_timeout_s, patient=patient)
    try:
        if device and connection.welcome.device != device:
            raise CacheConfigMismatchError(
                f"the daemon on {path} serves {connection.welcome.device}, this engine runs on {device}: name its "
                "socket in socket_path, or leave socket_path out",
                code="wrong-device",
            )
        request = Attach(key=key, wait=state_timeout_s > 0, identity=identity, cache=cache)
        ready = _final_answer(connection, request, time.monotonic() + state_timeout_s)
        fetched = receive_generation(connection, ready, connect_timeout_s)
        return Attachment(connection, ready, fetched.index, fetched.fds)
    except BaseException:
        connection.close()
        raise


def patiently(attach: Callable[[], Attachment]) -> Attachment:
    """Attach; try again for half a minute while no daemon answers, because units restart.

    Raises the last reason.
    """
    deadline_s = time.monotonic() + _SILENCE_S
    while True:
        try:
            return attach()
        except WeightCacheUnavailableError as e:
            if e.code not in _DAEMON_AWAY or time.monotonic() >= deadline_s:
                raise
        time.sleep(_REJOIN_FIRST_S)


def _connect(path: Path, timeout_s: float, *, patient: bool) -> Connection:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return _connect_once(path, timeout_s)
        except WeightCacheUnavailableError as e:
            if not (patient and e.code == "no-daemon" and time.monotonic() < deadline_s):
                raise
        time.sleep(_COMING_POLL_S)


def _connect_once(path: Path, timeout_s: float) -> Connection:
    try:
        return Connection.connect(path, timeout_s=timeout_s, purpose="engine", software=SOFTWARE)
    except WeightcachedError as e:
        if type(e) is not WeightcachedError:
            raise
        # A refusal whose code has no class of its own here.
        code: Cause = "protocol-version" if e.code == "protocol-version" else "refused"
        raise WeightCacheUnavailableError(f"the daemon refused: {e}", code=code) from e


def _final_answer(connection: Connection, attach: Attach, deadline: float) -> Ready:
    reply = connection.request(attach, _SILENCE_S)
    waiting = _Waiting(deadline)
    while True:
        if isinstance(reply, Loading):
            waiting.note(reply)
            reply = connection.receive(_SILENCE_S)[0]
        elif isinstance(reply, NeedDigest):
            attach = msgspec.structs.replace(attach, key=_with_digest(attach.key, reply))
            reply = connection.request(attach, _SILENCE_S)
        else:
            return _ready_or_raise(reply)


def _with_digest(key: WeightCacheKey, need: NeedDigest) -> WeightCacheKey:
    checkpoint = with_files(key.checkpoint, need.files) if need.files else key.checkpoint
    if checkpoint is key.checkpoint and getattr(checkpoint, need.rung):
        asked = "record" if need.rung == "files" else f"{need.rung} digest"
        raise ProtocolError(
            f"the daemon asks for the {asked} of {checkpoint.root}, which it was given"
        )
    if need.rung == "files":
        return msgspec.structs.replace(key, checkpoint=checkpoint)
    log.info(
        "comparing the checkpoint with the cached one by %s digest: %s",
        need.rung,
        checkpoint.root,
    )
    fill = with_sample if need.rung == "sample" else with_full
    return msgspec.structs.replace(key, checkpoint=fill(checkpoint))


def _ready_or_raise(reply: Reply) -> Ready:
    match reply:
        case Ready():
            return reply
        case Mismatch():
            raise CacheConfigMismatchError(
                f"{reply.cache} is cached with another key: {mismatch_text(reply.fields)}"
            )
        case Absent():
            raise WeightCacheUnavailableError(
                f"the daemon has no such cache: {reply.reason}", code="absent"
            )
        case Failed():
            raise WeightCacheUnavailableError(
                f"{reply.cache} failed to load: {reply.error}", code="failed"
            )
        case Released():
            raise WeightCacheUnavailableError(
                f"{reply.cache} was dropped, or released to an engine in copy mode; "
                "'weightcachectl reload' brings it back",
                code="released",
            )
        case Refused():
            raise WeightCacheUnavailableError(
                f"the daemon refused: {reply.message}", code="refused"
            )
        case _:
            raise ProtocolError(f"the daemon answered Attach with {type(reply).__name__}")


def mismatch_text(fields: list[FieldMismatch]) -> str:
    """Names and both values, e.g. `dtype is torch.bfloat16, asked torch.float16`."""
    return "; ".join(f"{f.field} is {f.cached}, asked {f.asked}" for f in fields)


class _Waiting:
    """Watches a load: logs it every few seconds, and ends the wait if time or progress run out."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._logged_at = 0.0
        self._last = ("", 0)
        self._advanced_at = time.monotonic()

    def note(self, loading: Loading) -> None:
        """Note the daemon's answer. Raises WeightCacheUnavailableError if waiting is pointless."""
        now = time.monotonic()
        if (
            loading.phase,
            loading.done_bytes,
        ) != self._last or loading.phase in _PHASES_WITHOUT_BYTES:
            self._last, self._advanced_at = (loading.phase, loading.done_bytes), now
        self._log(loading, now)
        if now >= self._deadline:
            raise WeightCacheUnavailableError(
                f"{loading.cache} is still loading ({loading.phase}); raise state_timeout_s to wait longer, "
                "'weightcachectl status' shows its progress",
                code="still-loading",
            )
        if now - self._advanced_at >= _STALL_S:
            raise WeightCacheUnavailableError(
                f"{loading.cache} has stopped loading: {loading.phase} stands at {loading.done_bytes} of "
                f"{loading.total_bytes} bytes for {now - self._advanced_at:.0f} s; 'weightcachectl status' shows its "
                "state, 'journalctl --user' its loader's log",
                code="stalled",
            )

    def _log(self, loading: Loading, now: float) -> None:
        if now - self._logged_at < _PROGRESS_LOG_INTERVAL_S:
            return
        self._logged_at = now
        log.info("waiting for %s: %s", loading.cache, progress_text(loading))


def hold_loads(
    path: Path, *, connect_timeout_s: float, state_timeout_s: float
) -> Connection | None:
    """Have the daemon leave the device's memory as it is until the connection is closed. Waits for a load that has
    the device, up to `state_timeout_s`.

    None if that is impossible, which is logged: at worst it costs KV cache, which is no reason to
    end an engine.
    """
    connection: Connection | None = None
    try:
        connection = _connect(path, connect_timeout_s, patient=False)
        reply = connection.request(HoldLoads(), _SILENCE_S)
        waiting = _Waiting(time.monotonic() + state_timeout_s)
        while isinstance(reply, Loading):
            waiting.note(reply)
            reply = connection.receive(_SILENCE_S)[0]
        if isinstance(reply, Done):
            return connection
        log.debug("the daemon does not hold loads off: it answered %s", type(reply).__name__)
    except WeightcachedError as e:
        level = logging.WARNING if e.code in ("still-loading", "stalled") else logging.DEBUG
        log.log(level, "the daemon goes on loading while this engine measures memory: %s", e)
    if connection is not None:
        connection.close()
    return None


@contextmanager
def loads_held(path: Path | None) -> Iterator[None]:
    """The same for a moment, in the background, if there is a path: sleep and wake do not wait."""
    over = threading.Event()

    def hold(path: Path) -> None:
        with (
            suppress(WeightcachedError, OSError),
            Connection.connect(
                path, timeout_s=_MOMENT_S, purpose="engine", software=SOFTWARE
            ) as connection,
        ):
            connection.request(HoldLoads(wait=False), _MOMENT_S)
            over.wait(_LONGEST_MOMENT_S)

    if path is not None:
        threading.Thread(target=hold, args=(path,), name="weightcached-hold", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def release(attachment: Attachment, *, timeout_s: float) -> None:
    """Copy mode: tell the daemon that it may free the generation, and give the lease back."""
    try:
        reply = attachment.connection.request(Release(), timeout_s)
        if isinstance(reply, Refused):
            log.warning("the daemon keeps %s: %s", attachment.ready.cache, reply.message)
    except WeightcachedError as e:
        log.warning("cannot ask the daemon to free %s: %s", attachment.ready.cache, e)
    finally:
        attachment.close()


class LeaseKeeper:
    """Keeps the connection of a mapped generation, and rejoins the daemon after a restart, in a
    thread of its own.

    The mapped weights need neither. But `weightcachectl status` shows the engine, and the daemon
    knows whom a drop would concern. While the engine sleeps the daemon may ask for the room:
    `on_unmap`, called in that thread, unmaps and returns whether it did; then the lease ends.
    """

    def __init__(
        self,
        connection: Connection,
        path: Path,
        ready: Ready,
        *,
        on_unmap: Callable[[], bool] = lambda: False,
    ) -> None:
        self._connection = connection
        self._path = path
        self._ready = ready
        self._on_unmap = on_unmap
        self._parked = self._parked_there = False
        self._stop = threading.Event()
        # Wakes the thread: closing a socket that another thread polls would neither wake that one
        # nor end the lease.
        self._wake = OwnedFd(os.eventfd(0, os.EFD_CLOEXEC))
        self.connected = threading.Event()
        self.connected.set()
        # A daemon thread: it must not keep a finished engine alive.
        self._thread = threading.Thread(target=self._run, name="weightcached-lease", daemon=True)
        self._thread.start()

    def park(self, parked: bool) -> None:
        """Tell the daemon that the engine sleeps, or has woken. Does not wait."""
        self._parked = parked
        self._wake_thread()

    def close(self) -> None:
        """Give the lease back and end the thread; may be called twice."""
        self._stop.set()
        self._wake_thread()
        if self._thread is threading.current_thread():
            return
        self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._wake.close()

    def _wake_thread(self) -> None:
        if not self._wake.closed:
            os.eventfd_write(self._wake.fileno(), 1)

    def _run(self) -> None:
        try:
            self._keep()
        finally:
            self.connected.clear()
            self._connection.close()

    def _keep(self) -> None:
        while self._attend():
            self.connected.clear()
            log.warning(
                "the daemon of %s is gone; the engine goes on with the weights it has mapped",
                self._ready.cache,
            )
            if not self._rejoin():
                return
            self.connected.set()
            log.info(
                "rejoined the daemon of %s, generation %d",
                self._ready.cache,
                self._ready.generation,
            )

    def _attend(self) -> bool:
        """Exchange messages. True once the daemon has hung up, False once the lease is over."""
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLIN | select.POLLRDHUP)
        poll.register(self._wake.fileno(), select.POLLIN)
        while not self._stop.is_set():
            try:
                self._tell_parked()
                ready = dict(poll.poll())
                if self._wake.fileno() in ready:
                    os.eventfd_read(self._wake.fileno())
                if self._connection.fileno() in ready and self._unmaps():
                    return False
            except WeightcachedError as e:
                log.debug("the lease on %s: %s", self._ready.cache, e)
                return not self._stop.is_set()
        return False

    def _tell_parked(self) -> None:
        parked = self._parked
        if parked != self._parked_there and self._connection.welcome.parking:
            # _listen_once() reads its Done, as all messages.
            self._connection.send(Parked(parked=parked), _REJOIN_MAX_S)
        self._parked_there = parked

    def _unmaps(self) -> bool:
        """Read one message. True if it was Unmap and the engine has unmapped. Raises as receive()."""
        message = self._connection.receive(_REJOIN_MAX_S)[0]
        if not isinstance(message, Unmap) or not self._on_unmap():
            return False
        log.info(
            "unmapped %s generation %d, because the daemon needs the room; the engine attaches again before it wakes",
            self._ready.cache,
            self._ready.generation,
        )
        return True

    def _rejoin(self) -> bool:
        self._connection.close()
        delay_s = _REJOIN_FIRST_S
        while not self._stop.wait(delay_s):
            delay_s = min(2 * delay_s, _REJOIN_MAX_S)
            try:
                connection = Connection.connect(
                    self._path, timeout_s=_REJOIN_MAX_S, purpose="engine", software=SOFTWARE
                )
            except (WeightcachedError, OSError):
                # OSError: the daemon puts its socket back just now.
                continue
            try:
                rejoin = Rejoin(
                    cache=self._ready.cache,
                    generation=self._ready.generation,
                    index_digest=self._ready.index_digest,
                )
                reply = connection.request(rejoin, _REJOIN_MAX_S)
            except WeightcachedError:
                connection.close()
                continue
            if isinstance(reply, Rejoined):
                self._connection, self._parked_there = connection, False
                return True
            connection.close()
            if isinstance(reply, Refused):
                log.warning(
                    "the restarted daemon no longer serves the weights that this engine maps: %s",
                    reply.message,
                )
                return False
        return False
