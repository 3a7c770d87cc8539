"""Wild messages at a real daemon: each is answered, its caches stay. bench/fuzz.py sends more."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import fuzz
from tests import limits
from tests.fakes.checkpoints import key_of, write_checkpoint
from tests.fakes.client import Client
from tests.fakes.daemon import BOUND_S, DaemonProcess, model
from weightcached.checkpoint.identity import CheckpointIdentity, FileRecord
from weightcached.index.key import WeightCacheKey
from weightcached.system.fds import sealed_memfd
from weightcached.wire.framing import MAX_REQUEST_BYTES
from weightcached.wire.messages import (
    Attach,
    Drop,
    Fallback,
    Hello,
    Memory,
    Message,
    Refused,
    Rejoin,
    Release,
    Status,
    Verify,
    encode,
)

# `make fuzz` has a profile with more.
EXAMPLES = max(300, settings().max_examples)
SETTINGS = settings(max_examples=EXAMPLES, derandomize=True, deadline=None, database=None)
STATUS_LIMIT_S = 0.05
ATTACH_LIMIT_S = 0.5

# ---- well-typed and wild

text = st.text(max_size=40)
name = st.text(min_size=1, max_size=300)
count = st.integers(min_value=0, max_value=2**63 - 1)
files = st.builds(
    FileRecord,
    name=text,
    device=st.integers(0, 2**63 - 1),
    inode=count,
    size=count,
    mtime_ns=count,
    ctime_ns=count,
)
checkpoints = st.builds(
    CheckpointIdentity, root=text, files=st.lists(files, max_size=4), sample=text, full=text
)
keys = st.builds(
    WeightCacheKey,
    checkpoint=checkpoints,
    role=st.sampled_from(["target", "draft"]),
    architecture=text,
    dtype=text,
    tp_size=st.integers(0, 2**40),
    tp_rank=st.integers(0, 2**40),
    stage=st.sampled_from(["loaded", "processed"]),
    versions=st.dictionaries(text, text, max_size=3),
)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Hello, protocol=st.integers(-(2**63), 2**63 - 1), software=text),
    st.just(Status()),
    st.builds(Attach, key=keys, wait=st.booleans()),
    st.builds(Memory, key=keys),
    st.just(Release()),
    st.builds(Rejoin, cache=name, generation=count, index_digest=name),
    st.builds(Drop, cache=name, force=st.just(False)),
    st.builds(Verify, cache=name),
    st.builds(Fallback, reason=text | st.just("no-room")),
)

# ---- ill-typed

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | text
    | st.binary(max_size=40)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(text | st.sampled_from(["type", "key"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@st.composite
def ill_typed(draw: st.DrawFn) -> bytes:
    """A message some of whose fields, at any depth, are of other types, gone, or new."""
    tree: Any = msgspec.msgpack.decode(encode(draw(messages)))
    node = tree
    while isinstance(node, dict | list) and node:
        place = draw(
            st.sampled_from(sorted(node, key=repr) if isinstance(node, dict) else range(len(node)))
        )
        inner = node[place]
        if isinstance(inner, dict | list) and inner and draw(st.booleans()):
            node = inner
        else:
            node[place] = draw(values)
            break
    return msgspec.msgpack.encode(tree)


class Target:
    """One daemon for all examples; each is put to it on a connection of its own or after others."""

    def __init__(self, directory: Path) -> None:
        self.checkpoint = write_checkpoint(directory / "checkpoint", nbytes=64 * 1024)
        self.daemon = DaemonProcess(directory, [model("tiny", self.checkpoint)])
        self.daemon.options = ["--log-level", "error"]
        self.daemon.start()
        # limits.hold() has the deadline.
        self.peer = fuzz.Peer(self.daemon.socket, deadline_s=BOUND_S)

    def put(self, data: bytes, *, first: bool) -> None:
        if data and len(data) < 65_000 and not fuzz._is_destructive(data):
            self.peer.put(data, [], first=first)

    def is_unharmed(self) -> None:
        """It logged no fault, serves the same caches, and holds no more than before."""
        self.peer.close()
        assert self.daemon.log == ""
        status, attach = [], []
        for _ in range(20):
            began_s = time.monotonic()
            assert self.daemon.status().state == "ready"
            status.append(time.monotonic() - began_s)
            began_s = time.monotonic()
            with self.daemon.client() as client:
                client.attach(key_of({"model": str(self.checkpoint)})).close()
            attach.append(time.monotonic() - began_s)
        limits.hold("status afterwards, median", statistics.median(status), STATUS_LIMIT_S)
        limits.hold("attach afterwards, third longest", sorted(attach)[-3], ATTACH_LIMIT_S)
        self.daemon.settled()


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    directory = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp"))
    target = Target(directory)
    yield target
    target.daemon.close()
    shutil.rmtree(directory)


@pytest.mark.slow
@pytest.mark.timed
def test_well_typed_messages_with_wild_values_are_answered(target: Target) -> None:
    @SETTINGS
    @given(messages, st.booleans())
    def put(message: Message, first: bool) -> None:
        target.put(encode(message), first=first)

    put()
    target.is_unharmed()
    # Not all were refused for their form: the daemon had to think about them.
    assert {"Mismatch", "Absent", "Refused:unknown-cache", "Refused:no-lease"} <= set(
        target.peer.kinds
    )


@pytest.mark.slow
@pytest.mark.timed
def test_ill_typed_messages_are_answered(target: Target) -> None:
    @SETTINGS
    @given(
        ill_typed() | values.map(msgspec.msgpack.encode) | st.binary(max_size=200), st.booleans()
    )
    def put(data: bytes, first: bool) -> None:
        target.put(data, first=first)

    put()
    target.is_unharmed()
    assert target.peer.kinds["Refused:protocol"] > EXAMPLES // 4


@pytest.mark.slow
@pytest.mark.timed
def test_mutated_messages_with_and_without_descriptors_are_answered(target: Target) -> None:
    key = key_of({"model": str(target.checkpoint)})
    inputs = fuzz.Inputs(seed=7, key=key)
    before = target.daemon.settled()
    for _ in range(5000):
        data, fds = inputs.descriptors(inputs.next())
        target.peer.put(data, fds, first=inputs.random.random() < 0.1)
    target.is_unharmed()
    target.daemon.holds_no_more_than(before)
    limits.hold("the slowest answer", target.peer.slowest_s, fuzz.ANSWER_DEADLINE_S)


def test_message_that_would_take_long_to_decode_is_refused_by_its_size(target: Target) -> None:
    data = msgspec.msgpack.encode({"type": "Reload", "caches": ["a"] * MAX_REQUEST_BYTES})
    with target.daemon.client() as client, sealed_memfd("large", data) as large:
        client.send_raw(b"\xc1large", [large.fileno()])
        refused = client.receive()
    assert refused == Refused(
        code="protocol",
        message=f"message in a memfd: the memfd holds {len(data)} bytes, at most {MAX_REQUEST_BYTES} are allowed",
    )


def test_mappings_of_a_key_are_limited_in_number(target: Target) -> None:
    key = msgspec.msgpack.decode(encode(Attach(key=key_of({"model": str(target.checkpoint)}))))
    key["key"]["versions"] = {str(n): "1" for n in range(1001)}
    with target.daemon.client() as client:
        client.send_raw(msgspec.msgpack.encode(key))
        refused = client.receive()
    message = "message does not decode: Expected `object` of length <= 1000 - at `$.key.versions`"
    assert refused == Refused(code="protocol", message=message)


def test_names_in_a_reload_are_limited_in_number(target: Target) -> None:
    with target.daemon.client() as client:
        client.send_raw(msgspec.msgpack.encode({"type": "Reload", "caches": ["a"] * 1001}))
        refused = client.receive()
    message = "message does not decode: Expected `array` of length <= 1000 - at `$.caches`"
    assert refused == Refused(code="protocol", message=message)


def test_refusal_of_many_unknown_names_can_be_read(target: Target) -> None:
    with Client.welcome(target.daemon.socket, "ctl") as client:
        client.send_raw(msgspec.msgpack.encode({"type": "Reload", "caches": ["x" * 300] * 1000}))
        refused = client.receive()
    assert isinstance(refused, Refused)
    assert refused.code == "unknown-cache"
    assert len(refused.message) < 1100
