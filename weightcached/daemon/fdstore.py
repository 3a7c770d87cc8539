"""The unit's file-descriptor store: a second copy of every descriptor, kept by systemd while the
daemon is gone.

One generation is one set: names "wc1.<first 40 hex digits of the index digest>.<place>", place
"index" or the number of the segment. The index is stored first, so a set cut short by a crash is
recognised as incomplete. Beside the sets stands at most one note, "wc1.aside.<n>": which caches are
to stay unloaded. It lives as long as the weights do: across crashes and restarts, not across a
stop. Without NOTIFY_SOCKET every call does nothing. See sd_notify(3) and sd_listen_fds(3).
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from weightcached.daemon.caches import Aside, Generation
from weightcached.daemon.loading import host_segment_fault
from weightcached.daemon.logs import printable
from weightcached.errors import IndexFormatError
from weightcached.index.tensors import TensorIndex, read_index
from weightcached.system import gpus
from weightcached.system.fds import OwnedFd, close_all, read_sealed, sealed_memfd
from weightcached.system.notify import StoreConnection, Stored
from weightcached.system.paths import is_host_device

log = logging.getLogger(__name__)

# The manager answers in microseconds; when it is stopped or far behind we go on and say so.
_MANAGER_TIMEOUT_S = 30.0
_INDEX = "index"
_NAME = re.compile(r"wc1\.([0-9a-f]{40})\.(index|0|[1-9][0-9]{0,5})")
_NOTE = re.compile(r"wc1\.aside\.([0-9]{1,9})")
_MAX_NOTE_BYTES = 1 << 20
# The unit's FileDescriptorStoreMax=. systemd 254 and newer say it in $FDSTORE.
DEFAULT_MAX = 1024


class StoreError(Exception):
    """The manager could not be reached. Served generations are not affected."""


def _tag(index_digest: str) -> str:
    return f"wc1.{index_digest[:40]}"


class FdStore:
    """Puts generations into the store and takes them out again. Blocking: call it from a thread."""

    def __init__(self, notify_socket: str | None, *, limit: int = DEFAULT_MAX) -> None:
        self._address = notify_socket
        self._limit = limit
        self._note = 0
        # Descriptors in the store, by set.
        self._kept: dict[str, int] = {}

    def kept(self, generation: Generation) -> None:
        """Count a generation that was stored by an earlier daemon."""
        self._kept[_tag(generation.index_digest)] = len(generation.fds)

    def put(self, generation: Generation) -> None:
        """Store all descriptors of a generation; wait for the manager.

        Raises StoreError, also for more than the store takes: systemd silently closes those.
        """
        tag = _tag(generation.index_digest)
        # One for the note.
        used = sum(list(self._kept.values())) + 1
        if self._address is not None and used + len(generation.fds) > self._limit:
            raise StoreError(
                f"the descriptor store holds {used} of {self._limit}, these are {len(generation.fds)} more: raise "
                "FileDescriptorStoreMax= with a drop-in"
            )
        self.kept(generation)
        with self._connection() as manager, generation.handout() as fds:
            for place, fd in zip([_INDEX, *map(str, range(len(fds) - 1))], fds, strict=True):
                manager.store(f"{tag}.{place}", fd)
            manager.barrier()

    def remove(self, generation: Generation) -> None:
        """Take a generation out. Raises StoreError."""
        tag = _tag(generation.index_digest)
        self._kept.pop(tag, None)
        # Segments first: if this is cut short, an index without segments stays, which adopt()
        # drops.
        self.remove_names(
            [*(f"{tag}.{n}" for n in range(len(generation.segment_nbytes))), f"{tag}.{_INDEX}"]
        )

    def note_aside(self, aside: Mapping[str, Aside]) -> None:
        """Store the names of caches that stay unloaded; replaces the note. Raises StoreError."""
        last, self._note = self._note, self._note + 1
        with self._connection() as manager:
            if aside:
                with sealed_memfd("weightcached-aside", msgspec.json.encode(aside)) as fd:
                    manager.store(f"wc1.aside.{self._note}", fd)
            # After the new one: cut short, two notes stand there, of which the later counts.
            manager.remove(f"wc1.aside.{last}")
            manager.barrier()

    def take_note(self, stored: list[Stored]) -> dict[str, Aside]:
        """The note of an earlier daemon; taken out of `stored`, and kept in the store."""
        notes = {int(m[1]): item for item in stored if (m := _NOTE.fullmatch(item.name))}
        stored[:] = [item for item in stored if not _NOTE.fullmatch(item.name)]
        if not notes:
            return {}
        self._note = max(notes)
        try:
            data = read_sealed(notes[self._note].fd.fileno(), max_nbytes=_MAX_NOTE_BYTES)
            return msgspec.json.decode(data, type=dict[str, Aside])
        except (ValueError, OSError) as e:
            log.warning("stored note passed over name=%s error=%s", notes[self._note].name, e)
            return {}
        finally:
            close_all(item.fd for item in notes.values())

    def remove_names(self, names: list[str]) -> None:
        """Remove descriptors by name; wait until they are closed. Raises StoreError."""
        with self._connection() as manager:
            for name in names:
                manager.remove(name)
            # Once we say that something was freed, it has been.
            manager.barrier()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[StoreConnection]:
        try:
            with StoreConnection(self._address, timeout_s=_MANAGER_TIMEOUT_S) as manager:
                yield manager
        except OSError as e:
            raise StoreError(
                f"the service manager's socket {self._address}: {e.strerror or e}"
            ) from e


# ---- adoption


class Expected(NamedTuple):
    """The origin that a set must have. driver: None if unknown; then it is not compared."""

    device: str
    boot_id: str
    driver: str | None


def adopt(
    stored: list[Stored], expected: Expected, drop_names: Callable[[list[str]], None]
) -> list[Generation]:
    """Turn the store's descriptors back into generations, at most one per cache.

    Unusable descriptors are closed, removed from the store through `drop_names`, and logged with
    the reason.
    """
    sets: dict[str, dict[str, OwnedFd]] = {}
    for name, fd in stored:
        match = _NAME.fullmatch(name)
        tag, place = match.groups() if match else ("", "")
        members = sets.setdefault(tag, {})
        if match is None:
            # Not ours, or from another version of this software: of no use, and it would never be
            # freed.
            _drop(
                printable(name),
                "its name does not have the format of this version",
                [(name, fd)],
                drop_names,
            )
        else:
            # A second descriptor of one name makes the set unusable: removing either would remove
            # both.
            members[place if place not in members else f"{place}.again"] = fd
    kept: dict[str, Generation] = {}
    for tag, members in sets.items():
        if members:
            _adopt_set(tag, members, expected, kept, drop_names)
    return list(kept.values())


def _adopt_set(
    tag: str,
    members: dict[str, OwnedFd],
    expected: Expected,
    kept: dict[str, Generation],
    drop_names: Callable[[list[str]], None],
) -> None:
    named = [(f"wc1.{tag}.{place}", fd) for place, fd in members.items()]
    try:
        generation = _generation(tag, members, expected)
    except IndexFormatError as e:
        _drop(tag, str(e), named, drop_names)
        return
    rival = kept.get(generation.cache)
    if rival is not None:
        generation, rival = (
            (generation, rival) if generation.number > rival.number else (rival, generation)
        )
        names = [
            f"{_tag(rival.index_digest)}.{p}" for p in (_INDEX, *range(len(rival.segment_nbytes)))
        ]
        reason = f"{rival.cache} has generation {generation.number}, this is {rival.number}"
        _drop(rival.index_digest[:40], reason, list(zip(names, rival.fds, strict=True)), drop_names)
    kept[generation.cache] = generation


def _generation(tag: str, members: dict[str, OwnedFd], expected: Expected) -> Generation:
    """Check one set. Raises IndexFormatError with the reason why it is of no use."""
    if _INDEX not in members:
        raise IndexFormatError(f"it has {len(members)} segments and no index")
    # Another format version is recognised before anything else, and the digest is checked.
    index, digest = read_index(members[_INDEX])
    if not digest.startswith(tag):
        raise IndexFormatError(f"its index has digest {digest[:40]}")
    _check_origin(index, expected)
    count = len(index.segments)
    places = [str(number) for number in range(count)]
    if set(members) != {_INDEX, *places}:
        raise IndexFormatError(
            f"it is not complete: its index lists {count} segments, {len(members) - 1} are stored"
        )
    segments = [members[place] for place in places]
    if is_host_device(expected.device):
        for number, (fd, record) in enumerate(zip(segments, index.segments, strict=True)):
            fault = host_segment_fault(fd.fileno(), record.nbytes)
            if fault:
                raise IndexFormatError(f"segment {number} {fault}")
    return Generation(index, digest, members[_INDEX], segments, "adopted")


def _check_origin(index: TensorIndex, expected: Expected) -> None:
    if index.device != expected.device:
        raise IndexFormatError(
            f"it is for device {index.device}, this daemon serves {expected.device}"
        )
    if index.boot_id != expected.boot_id:
        raise IndexFormatError(f"it is from boot {index.boot_id}, this is boot {expected.boot_id}")
    if expected.driver is not None and index.driver != expected.driver:
        raise IndexFormatError(
            f"it was made under driver {index.driver}, the loaded driver is {expected.driver}"
        )


def _drop(
    what: str,
    reason: str,
    named: list[tuple[str, OwnedFd]],
    drop_names: Callable[[list[str]], None],
) -> None:
    log.warning("stored set dropped set=%s descriptors=%d reason=%s", what, len(named), reason)
    close_all(fd for _, fd in named)
    try:
        drop_names([name for name, _ in named])
    except StoreError as e:
        log.warning("stored set stays in the store set=%s error=%s", what, e)


def current_driver(device: str) -> str | None:
    """The driver that a stored segment depends on, as its backend names it; None if unknown."""
    if is_host_device(device):
        return None
    version = gpus.kernel_driver_version()
    return None if version == "unknown" else gpus.driver_name(version)
