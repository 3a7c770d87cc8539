"""Digests of storages: recomputed through the mapping, without torch; what has changed is named."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from tests.fakes.daemon import BOUND_S
from tests.fakes.models import Packed, an_index, random_bytes
from tests.fakes.stub_daemon import Answer, Packet, StubDaemon
from weightcached.cli import verify_cache
from weightcached.cli.verify_cache import wrong_storages
from weightcached.errors import ProtocolError, WeightcachedError, WeightCacheUnavailableError
from weightcached.index import tensors as index_format
from weightcached.index.tensors import SegmentRecord, StorageRecord
from weightcached.segments.host import HostBackend, HostMapping
from weightcached.system.fds import OwnedFd, close_all, read_sealed, sealed_memfd
from weightcached.wire.messages import (
    Absent,
    Descriptors,
    Failed,
    Loading,
    Ready,
    Refused,
    Released,
    Request,
    Verify,
    encode,
)

LARGE = 100_000


def build() -> nn.Module:
    model = nn.Module()
    for name, count in (("small", 10), ("large", LARGE), ("table", 20)):
        setattr(model, name, random_bytes(torch.empty(count, dtype=torch.uint8), count))
    # A parameter, for large ones that are none are private.
    model.large = nn.Parameter(model.__dict__.pop("large"), requires_grad=False)
    model.view = model.large[5:]
    return model


@pytest.fixture
def packed() -> Iterator[Packed]:
    with Packed.of(build) as packed:
        yield packed


def changed(packed: Packed, *names: str) -> list[OwnedFd]:
    """Descriptors of all segments, with the last byte of these tensors' storages flipped."""
    records = {record.names[0]: record for record in packed.index.tensors}
    contents = [bytearray(read_sealed(fd.fileno(), max_nbytes=1 << 30)) for fd in packed.fds]
    for name in names:
        storage = packed.index.storages[records[name].storage or 0]
        contents[storage.segment][storage.offset_bytes + storage.nbytes - 1] ^= 1
    return [sealed_memfd("segment", bytes(content)) for content in contents]


def mapped(packed: Packed, fds: list[OwnedFd]) -> HostMapping:
    return HostBackend().map(fds, [segment.nbytes for segment in packed.index.segments])


def test_unchanged_segments_have_no_wrong_storage(packed: Packed) -> None:
    mapping = packed.map()
    assert list(wrong_storages(packed.index, mapping)) == []


@pytest.mark.parametrize("names", [["small"], ["large"], ["table"], ["small", "large", "table"]])
def test_changed_storages_are_named_by_their_first_tensor(packed: Packed, names: list[str]) -> None:
    mapping = mapped(packed, changed(packed, *names))
    assert sorted(wrong_storages(packed.index, mapping)) == sorted(names)


def test_storage_without_a_tensor_is_named_by_its_number() -> None:
    index = an_index(
        segments=[SegmentRecord(4096, private=False)],
        storages=[StorageRecord(0, 0, 4096, bytes(16))],
    )
    mapping = HostBackend().map([sealed_memfd("segment", bytes(4096))], [4096])
    assert list(wrong_storages(index, mapping)) == ["storage 0"]


def test_long_storages_are_read_in_parts(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_cache, "_READ_NBYTES", 999)
    assert list(wrong_storages(packed.index, packed.map())) == []
    assert list(wrong_storages(packed.index, mapped(packed, changed(packed, "large")))) == ["large"]


# ---- against a daemon


Script = Callable[[Request], Iterable[Answer]]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Script], StubDaemon]]:
    """Start a scripted daemon of cpu0; verify_cache() leaves no descriptor behind."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    daemons: list[StubDaemon] = []

    def start(script: Script) -> StubDaemon:
        daemons.append(StubDaemon(tmp_path / "weightcached" / "cpu0.sock", script).__enter__())
        return daemons[-1]

    before = len(os.listdir("/proc/self/fd"))
    yield start
    for daemon in daemons:
        daemon.__exit__(None, None, None)
    assert len(os.listdir("/proc/self/fd")) == before


def handing_out(
    packed: Packed, segments: list[OwnedFd], index_fd: OwnedFd, announced: int
) -> Script:
    def script(request: Request) -> Iterable[Answer]:
        assert request == Verify(cache="tiny/target")
        yield Ready(
            cache="tiny/target",
            generation=3,
            nbytes=packed.index.nbytes,
            segment_nbytes=[],
            index_digest=index_format.digest_of(index_format.encode(packed.index)),
            descriptors=announced,
        )
        yield Packet(
            encode(Descriptors(first=0)), [fd.fileno() for fd in (index_fd, *segments)][:announced]
        )

    return script


@pytest.mark.parametrize("names", [[], ["large"]])
def test_cache_of_a_daemon_is_verified(
    packed: Packed, run: Callable[[Script], StubDaemon], names: list[str]
) -> None:
    fds = [*changed(packed, *names), sealed_memfd("index", index_format.encode(packed.index))]
    run(handing_out(packed, fds[:-1], fds[-1], len(fds)))
    result = verify_cache.verify_cache("cpu0", "tiny/target")
    close_all(fds)
    assert result.mismatched == names
    assert (result.nbytes, result.tensors) == (packed.index.nbytes, 4)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (Absent(reason="no cache 'tiny/target' on cpu0: it has none"), "its state is absent"),
        (Failed(cache="tiny/target", error="x"), "its state is failed"),
        (Released(cache="tiny/target"), "its state is released"),
        (Loading(cache="tiny/target", phase="weights"), "its state is loading"),
        (Refused(code="busy", message="too many connections"), "too many connections"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_cache_that_cannot_be_verified_is_explained(
    run: Callable[[Script], StubDaemon], answer: Answer, text: str
) -> None:
    run(lambda request: [answer])
    with pytest.raises(WeightCacheUnavailableError) as e:
        verify_cache.verify_cache("cpu0", "tiny/target")
    assert str(e.value) == f"tiny/target on cpu0 cannot be verified: {text}"


def test_missing_segment_is_a_fault_of_the_daemon(
    packed: Packed, run: Callable[[Script], StubDaemon]
) -> None:
    fds = [*changed(packed), sealed_memfd("index", index_format.encode(packed.index))]
    run(handing_out(packed, fds[:-1], fds[-1], len(fds) - 1))
    with pytest.raises(ProtocolError) as e:
        verify_cache.verify_cache("cpu0", "tiny/target")
    close_all(fds)
    assert str(e.value) == "tiny/target has 2 segments, 1 descriptors came"


def test_index_that_is_not_sealed_is_a_fault_of_the_daemon(
    packed: Packed, run: Callable[[Script], StubDaemon]
) -> None:
    unsealed = OwnedFd(os.memfd_create("index"))
    os.write(unsealed.fileno(), index_format.encode(packed.index))
    fds = [*changed(packed), unsealed]
    run(handing_out(packed, fds[:-1], unsealed, len(fds)))
    with pytest.raises(WeightcachedError) as e:
        verify_cache.verify_cache("cpu0", "tiny/target")
    close_all(fds)
    assert str(e.value) == "tensor index: the descriptor is not a memfd sealed against change"


def test_daemon_that_hands_out_nothing_is_a_fault_of_the_daemon(
    packed: Packed, run: Callable[[Script], StubDaemon]
) -> None:
    ready = Ready(
        cache="tiny/target",
        generation=1,
        nbytes=0,
        segment_nbytes=[],
        index_digest="x",
        descriptors=0,
    )
    run(lambda request: [ready])
    with pytest.raises(ProtocolError) as e:
        verify_cache.verify_cache("cpu0", "tiny/target")
    assert str(e.value) == "the daemon handed out no index of tiny/target"


def test_verifying_imports_no_torch(packed: Packed) -> None:
    index = msgspec.structs.replace(packed.index)
    fds = [*packed.fds, sealed_memfd("index", index_format.encode(index))]
    code = (
        "import sys; from weightcached.cli import verify_cache;"
        "from weightcached.index import tensors as index; from weightcached.segments.api import open_backend;"
        "from weightcached.system.fds import OwnedFd, read_sealed; *s, i = [OwnedFd(int(a)) for a in sys.argv[1:]];"
        "x = index.decode(read_sealed(i.fileno(), max_nbytes=1 << 30));"
        "m = open_backend('cpu0').map(s, [r.nbytes for r in x.segments]);"
        "print(list(verify_cache.wrong_storages(x, m)), [m for m in ('torch', 'vllm', 'numpy') if m in sys.modules])"
    )
    numbers = [fd.fileno() for fd in fds]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, numbers)],
        pass_fds=numbers,
        capture_output=True,
        text=True,
        check=True,
        timeout=BOUND_S,
    )
    fds[-1].close()
    assert done.stdout == "[] []\n"
