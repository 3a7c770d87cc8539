"""All messages of the protocol, with their limits. docs/protocol.md shows the dialogues.

A connection starts with Hello and is answered by Welcome or Refused. Then the client asks and the
daemon answers, in turn; answers to Attach are distinct states, each final except Loading.
Descriptors follow Ready in Descriptors packets. Unknown fields are ignored, so a field may be added
without a new PROTOCOL_VERSION.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from weightcached.checkpoint.identity import MAX_FILES
from weightcached.checkpoint.identity import Name as FileName
from weightcached.errors import ProtocolError, Refusal
from weightcached.index.key import WeightCacheKey

PROTOCOL_VERSION = 1

Name = Annotated[str, Meta(min_length=1, max_length=300)]
Text = Annotated[str, Meta(max_length=20_000)]
Count = Annotated[int, Meta(ge=0)]
Role = Literal["target", "draft"]
Source = Literal["loaded", "adopted", "restored"]
CacheState = Literal["loading", "ready", "failed", "released", "evicted"]
LoadFrom = Literal["", "checkpoint", "snapshot"]
Residence = Literal["always", "on-demand"]


class Message(msgspec.Struct, tag=True, tag_field="type", frozen=True, kw_only=True):
    """Base: a msgpack map whose `type` is the class name."""


# ---- client to daemon


class Hello(Message, frozen=True):
    """First message of every connection.

    label: the peer's own name, for people, if its pid cannot be seen; nothing depends on it.
    """

    protocol: int
    software: Text = ""
    purpose: Literal["engine", "ctl", "self"] = "ctl"
    label: Text = ""


class Status(Message, frozen=True):
    """Ask for the whole state; answered by StatusReply."""


class Attach(Message, frozen=True):
    """Ask for the generation that matches `key`, and hold a lease on it for as long as the
    connection lives.

    With `wait`, a matching cache that is still loading is answered by Loading again and again until
    it is final. With identity `sampled`, equal samples of the checkpoints are enough for this
    engine. With `cache`, a running engine asks for the newest generation of the cache that it maps,
    from whatever checkpoint that was made: all of the key but the checkpoint must be equal.
    """

    key: WeightCacheKey
    wait: bool = True
    identity: Literal["full", "sampled"] = "full"
    cache: Annotated[str, Meta(max_length=300)] = ""


class Memory(Message, frozen=True):
    """Ask for the bytes of the generation that matches `key`.

    Answered as Attach is, without descriptors.
    """

    key: WeightCacheKey


class Release(Message, frozen=True):
    """The engine has its own copy: free the leased generation after the last other lease.

    Answered by Done.
    """


class Rejoin(Message, frozen=True):
    """Renew a lease on exactly the generation that is mapped, after a restart of the daemon."""

    cache: Name
    generation: Count
    index_digest: Name


class HoldLoads(Message, frozen=True):
    """While this connection is open nothing of the daemon's changes the device's memory: an engine
    measures it, sleeps or wakes.

    Answered by Done, before that by Loading at least once a second while a load has the device.
    Without `wait` by one of them: Loading says that nothing is held.
    """

    wait: bool = True


class Parked(Message, frozen=True):
    """The engine of this connection's leases sleeps, or has woken; answered by Done.

    While it sleeps the daemon may send Unmap at any time. Only for a daemon whose Welcome says
    `parking`.
    """

    parked: bool


class Reload(Message, frozen=True):
    """Read the manifest again and load what changed, failed or was released; Progress*, then
    ReloadReply.

    With `force`, load unchanged caches too. `caches` limits it to names like "llama-8b/target", or
    "llama-8b" for all of a model's; empty means all. Unknown names are ignored, unless all are
    unknown. `along` comes from another rank of a group, which lost its generation: load with it,
    and go on serving the own generation. With `live` engines that run get the new generations, as
    they do of models that the manifest says so of; also those of an earlier reload that they lack.
    """

    caches: Annotated[list[Name], Meta(max_length=1000)] = []
    force: bool = False
    along: bool = False
    live: bool = False


class Drop(Message, frozen=True):
    """Free one cache; refused while engines hold leases, unless `force`. Answered by Done."""

    cache: Name
    force: bool = False


class Evict(Message, frozen=True):
    """Free one cache until an engine asks for it; refused while engines that are awake map it.

    Answered by Done.
    """

    cache: Name


class Verify(Message, frozen=True):
    """Hand out a generation, whose digests the client recomputes. No lease begins.

    Answered as Attach is.
    """

    cache: Name


class WriteSnapshot(Message, frozen=True):
    """Write a cache's served generation to a snapshot now, unless it is there.

    Progress at least once a second, then Done or Refused. The writing goes on if the client leaves.
    """

    cache: Name


class Rollback(Message, frozen=True):
    """Go back to a cache's generation before, whose `snapshot` has this name; Progress*, then
    ReloadReply. Without a name only say which it is; answered by RollbackReply.
    """

    cache: Name
    snapshot: Annotated[str, Meta(max_length=300)] = ""


class Fallback(Message, frozen=True):
    """An engine of this device loads from disk; `reason` is the code. Answered by Done."""

    reason: Annotated[str, Meta(pattern="^[a-z][a-z0-9-]{0,49}$")]


# ---- daemon to client


class Welcome(Message, frozen=True):
    """The connection is accepted. With `parking` the daemon knows Parked and may send Unmap."""

    protocol: int
    device: Name
    pid: Count
    software: Text = ""
    parking: bool = False


class Refused(Message, frozen=True):
    """Request or connection are refused. `code` is stable (errors.py), `message` is for a person."""

    code: Name
    message: Text


def refusal(code: Refusal, message: str) -> Refused:
    """A Refused that no error stands for."""
    return Refused(code=code, message=message)


class Ready(Message, frozen=True):
    """The key matches. `descriptors` follow in Descriptors packets: the index first, then the
    segments in order.

    For Memory the counts are given and nothing follows. `nbytes` counts device memory, private
    segment included.
    """

    cache: Name
    generation: Count
    nbytes: Count
    segment_nbytes: list[Count]
    index_digest: Name
    descriptors: Count = 0


class Descriptors(Message, frozen=True):
    """The next descriptors, number `first` on; at most 250 a packet."""

    first: Count


class LoadMessage(Message, frozen=True):
    """Base of messages about a load's progress. Bytes count within the phase.

    `eta_s` is None until it can be estimated.
    """

    cache: Name
    phase: Text
    done_bytes: Count = 0
    total_bytes: Count = 0
    eta_s: float | None = None


class Loading(LoadMessage, frozen=True):
    """A matching cache is being loaded."""


class FieldMismatch(msgspec.Struct, frozen=True, array_like=True):
    """One field of the key that differs, with both values as text."""

    field: Name
    cached: Text
    asked: Text


class Mismatch(Message, frozen=True):
    """No cache has this key; `fields` compares with the nearest one."""

    cache: Name
    fields: list[FieldMismatch]


class NeedDigest(Message, frozen=True):
    """Undecided on the checkpoint: send the request again with more of the record.

    It needs the record of `files`, by the engine's names and in this order, and their digest of
    `rung`; rung `files`: the record alone.
    """

    rung: Literal["files", "sample", "full"]
    files: Annotated[list[FileName], Meta(max_length=3 * MAX_FILES)] = []


class Absent(Message, frozen=True):
    """The daemon has no cache in this role at all."""

    reason: Text


class Failed(Message, frozen=True):
    """The matching cache failed to load."""

    cache: Name
    error: Text


class Released(Message, frozen=True):
    """The matching cache was released by an engine in copy mode, or dropped. Reload brings it back."""

    cache: Name


class Done(Message, frozen=True):
    """The request was carried out."""


class Rejoined(Message, frozen=True):
    """The lease is renewed."""


class Unmap(Message, frozen=True):
    """To a parked engine, unasked: the daemon needs the room of its weights. The engine unmaps and
    hangs up, and attaches again before it wakes. An engine that wakes just now sends Parked
    instead, and keeps them.
    """


class Progress(LoadMessage, frozen=True):
    """One cache's progress during Reload."""


class CacheOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a reload for one cache. note: why an unchanged one stays, if that surprises."""

    cache: Name
    outcome: Literal["loaded", "unchanged", "failed", "dropped"]
    generation: Count = 0
    seconds: float = 0.0
    error: Text = ""
    note: Text = ""


class SwapOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one engine of a live model.

    engine: of a service, SERVICE/NUMBER, or as in EngineStatus.name. `unchanged`: it had the newest
    weights; `restarting`: its service starts another one, because it cannot take them while it
    runs; `left`: on its old generation; `unasked`: as well, and it is its program's to swap.
    drain_s: how long requests took to end; pause_s: how long none was computed after that.
    """

    model: Name
    engine: Name
    outcome: Literal["swapped", "unchanged", "restarting", "left", "unasked"]
    generation: Count = 0
    drain_s: float = 0.0
    pause_s: float = 0.0
    reason: Text = ""


class ReloadReply(Message, frozen=True):
    """The reload is over. With `error` the manifest was refused, and nothing has changed."""

    outcomes: list[CacheOutcome] = []
    error: Text = ""
    swaps: list[SwapOutcome] = []


class RollbackReply(Message, frozen=True):
    """The generation before: name of its snapshot, and when that was written, from the epoch."""

    snapshot: Name
    created_at: float


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's lease, and the generation that it maps, which older daemons do not name.

    A parked engine sleeps, and would unmap if asked.
    """

    pid: int
    since: float
    parked: bool = False
    generation: Count = 0
    bytes: Count = 0
    label: Text = ""

    @property
    def name(self) -> str:
        """For people: its pid, or its own label if the daemon cannot see the pid."""
        return f"pid {self.pid}" if self.pid or not self.label else self.label


class OldGeneration(msgspec.Struct, frozen=True, kw_only=True):
    """A generation that is not served any more and that engines still map: their end frees it."""

    cache: Name
    generation: Count
    bytes: Count
    engines: list[EngineStatus]
    label: Text = ""


class CacheStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One cache as `weightcachectl status --json` prints it; other tools read these names.

    `engines` are on any generation of it. `retry_at`, in seconds since the epoch, is when a failed
    load is tried again; None if it is not. `warning` is a note about a served cache. `snapshot` is
    "writing", "written", the reason why it could not be written, or "" if none is wanted, with
    `snapshot_bytes` of weights in it. `snapshot_use` says whether the last load used a snapshot,
    and why not. An evicted cache is loaded or restored when an engine asks for it.
    `rolled_back_at`, in seconds since the epoch, is set while a rollback holds. `load_from` is what
    a load under way could take the weights from, once that is known: a fitting snapshot if there is
    one.
    `label` names the served weights; engines that run get new ones of a `live` cache.
    """

    name: Name
    role: Role
    state: CacheState
    generation: Count
    source: Source
    bytes: Count
    segments: Count
    tensors: Count
    load_seconds: float
    phase: Text
    done_bytes: Count
    total_bytes: Count
    error: Text
    engines: list[EngineStatus]
    eta_s: float | None = None
    retry_at: float | None = None
    warning: Text = ""
    snapshot: Text = ""
    snapshot_use: Text = ""
    snapshot_bytes: Count = 0
    resident: Residence = "always"
    label: Text = ""
    live: bool = False
    rolled_back_at: float | None = None
    load_from: LoadFrom = ""


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the daemon started, for metrics.

    attaches and attach_seconds are by cache: generations handed out, and the seconds from the
    request, or from the end of the load that it waited for, to the last descriptor. mismatches are
    by field of the key, refusals by the kind of the final answer that was not Ready, fallbacks by
    the code that engines gave. phase_seconds are of the generations served, by cache and phase.
    hits are attaches that did not wait; evictions, restores from snapshots and their seconds are by
    cache.
    """

    attaches: dict[Name, Count] = {}
    attach_seconds: dict[Name, float] = {}
    mismatches: dict[Name, Count] = {}
    refusals: dict[Name, Count] = {}
    fallbacks: dict[Name, Count] = {}
    adoptions: Count = 0
    digest_failures: Count = 0
    phase_seconds: dict[Name, dict[Name, float]] = {}
    hits: dict[Name, Count] = {}
    evictions: dict[Name, Count] = {}
    restores: dict[Name, Count] = {}
    restore_seconds: dict[Name, float] = {}


class StatusReply(Message, frozen=True):
    """The daemon's whole state. since: seconds from the epoch. Older daemons have no counters.

    budget: most bytes of weights that it holds, 0 for no limit.
    """

    device: Name
    pid: Count
    state: CacheState
    since: float
    caches: list[CacheStatus]
    manifest: Text = ""
    manifest_error: Text = ""
    software: Text = ""
    counters: Counters | None = None
    old_generations: list[OldGeneration] = []
    budget: Count = 0


# ---- loader child to daemon (over the socketpair)


class LoaderProgress(Message, frozen=True):
    """The loader's phase. Bytes count within the phase."""

    phase: Text
    done_bytes: Count = 0
    total_bytes: Count = 0


class LoaderKey(Message, frozen=True):
    """The key, before weights are read, for engines that start meanwhile."""

    key: WeightCacheKey


class LoaderIndex(Message, frozen=True):
    """The index, in one descriptor; `segments` descriptors follow in Descriptors packets."""

    segments: Count


class LoaderFailed(Message, frozen=True):
    """The load failed, with a reason for a person. permanent: a retry would not help."""

    code: Name
    message: Text
    permanent: bool = False


Request = (
    Hello
    | Status
    | Attach
    | Memory
    | Release
    | Rejoin
    | HoldLoads
    | Parked
    | Reload
    | Drop
    | Evict
    | Verify
    | WriteSnapshot
    | Rollback
    | Fallback
)
Reply = (
    Welcome | Refused | Ready | Descriptors | Loading | Mismatch | NeedDigest | Absent | Failed | Released
    | Done | Rejoined | Unmap | Progress | ReloadReply | RollbackReply | StatusReply
)  # fmt: skip
LoaderMessage = LoaderProgress | LoaderKey | LoaderIndex | LoaderFailed | Descriptors

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)
_loader = msgspec.msgpack.Decoder(LoaderMessage)


def encode(message: Message) -> bytes:
    """The message as msgpack. In a path that is not UTF-8, "?" replaces undecodable bytes."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return _encoder.encode(_without_surrogates(msgspec.to_builtins(message)))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    return [_without_surrogates(v) for v in value] if isinstance(value, list | tuple) else value


def decode_request(data: bytes) -> Request:
    """A client's message. Raises ProtocolError with the path of the wrong value."""
    return _decode(_requests, data)


def decode_reply(data: bytes) -> Reply:
    """A daemon's message. Raises ProtocolError with the path of the wrong value."""
    return _decode(_replies, data)


def decode_loader(data: bytes) -> LoaderMessage:
    """A loader child's message. Raises ProtocolError with the path of the wrong value."""
    return _decode(_loader, data)


_T = TypeVar("_T")


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    try:
        return decoder.decode(data)
    # RecursionError: deeply nested msgpack from a hostile peer.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ProtocolError(f"message does not decode: {e}") from e
