"""Adoption from systemd's descriptor store: each unusable set is dropped, with its reason."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fakes.checkpoints import key_of, write_checkpoint
from weightcached.daemon.fdstore import (
    Expected,
    FdStore,
    StoreError,
    adopt,
    current_driver,
)
from weightcached.index import tensors as index_format
from weightcached.index.tensors import LoadReport, SegmentRecord, TensorIndex
from weightcached.segments.cuda import CudaBackend
from weightcached.system import gpus
from weightcached.system.fds import OwnedFd, sealed_memfd
from weightcached.system.notify import Stored, inherited

BOOT = "5e9f1c7a-0000-4000-8000-000000000001"
EXPECTED = Expected("cpu0", BOOT, None)
SEGMENT = b"\x07" * 4096


class Set:
    """The descriptors of one stored generation, under the names of the store."""

    def __init__(self, checkpoint: Path, *, segments: int = 2, **changes: Any) -> None:
        index = TensorIndex(
            software="test",
            backend="host",
            driver="host",
            boot_id=BOOT,
            device="cpu0",
            cache="tiny/target",
            role="target",
            generation=1,
            spec_digest="spec",
            stage="loaded",
            skeleton="tiny",
            key=key_of({"model": str(checkpoint)}),
            segments=[SegmentRecord(len(SEGMENT), private=False)] * segments,
            storages=[],
            tensors=[],
            load=LoadReport(seconds=1.0, finished_at=2.0),
        )
        self.data = index_format.encode(msgspec.structs.replace(index, **changes))
        self.tag = index_format.digest_of(self.data)[:40]
        self.stored = [Stored(f"wc1.{self.tag}.index", sealed_memfd("index", self.data))]
        self.stored += [
            Stored(f"wc1.{self.tag}.{n}", sealed_memfd(f"s{n}", SEGMENT)) for n in range(segments)
        ]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", nbytes=4096)


def dropped(
    stored: list[Stored], caplog: pytest.LogCaptureFixture, expected: Expected = EXPECTED
) -> str:
    """Try to adopt an unusable set. Returns the reason; all is closed and out of the store."""
    removed: list[str] = []
    with caplog.at_level(logging.WARNING):
        assert adopt(stored, expected, removed.extend) == []
    assert all(member.fd.closed for member in stored)
    assert {member.name for member in stored} <= set(removed)
    (line,) = [record.getMessage() for record in caplog.records]
    return line.partition("reason=")[2]


def test_complete_set_is_adopted_in_whatever_order_it_comes(checkpoint: Path) -> None:
    stored = Set(checkpoint, segments=12).stored
    fds = {member.name.rpartition(".")[2]: member.fd.fileno() for member in stored}
    (generation,) = adopt(stored[::-1], EXPECTED, lambda names: pytest.fail(str(names)))
    assert (generation.cache, generation.number, generation.source) == ("tiny/target", 1, "adopted")
    assert [fd.fileno() for fd in generation.fds] == [
        fds[place] for place in ["index", *map(str, range(12))]
    ]
    generation.retire()


def test_set_without_a_segment_is_dropped(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = Set(checkpoint).stored
    stored.pop().fd.close()
    assert dropped(stored, caplog) == "it is not complete: its index lists 2 segments, 1 are stored"


def test_set_without_its_index_is_dropped(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = Set(checkpoint).stored
    stored.pop(0).fd.close()
    assert dropped(stored, caplog) == "it has 2 segments and no index"


def test_set_of_another_boot_is_dropped(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert (
        dropped(Set(checkpoint, boot_id="other").stored, caplog)
        == f"it is from boot other, this is boot {BOOT}"
    )


def test_set_of_another_device_is_dropped(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert (
        dropped(Set(checkpoint, device="cpu1").stored, caplog)
        == "it is for device cpu1, this daemon serves cpu0"
    )


def test_set_made_under_another_driver_is_dropped(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = EXPECTED._replace(driver="580.159")
    stored = Set(checkpoint, driver="570.1").stored
    assert (
        dropped(stored, caplog, expected)
        == "it was made under driver 570.1, the loaded driver is 580.159"
    )


def test_unknown_driver_is_not_compared(checkpoint: Path) -> None:
    (generation,) = adopt(Set(checkpoint, driver="570.1").stored, EXPECTED, lambda names: None)
    generation.retire()


def test_index_of_another_format_version_is_dropped(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Set(checkpoint)
    made.stored[0].fd.close()
    data = made.data[:4] + (99).to_bytes(2, "little") + made.data[6:]
    made.stored[0] = Stored(made.stored[0].name, sealed_memfd("index", data))
    assert (
        dropped(made.stored, caplog) == "tensor index has format version 99, this software reads 2"
    )


def test_index_with_a_flipped_bit_is_dropped(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Set(checkpoint)
    made.stored[0].fd.close()
    data = made.data[:-1] + bytes([made.data[-1] ^ 1])
    made.stored[0] = Stored(made.stored[0].name, sealed_memfd("index", data))
    assert dropped(made.stored, caplog) == "tensor index: its digest does not match its content"


def test_index_under_the_name_of_another_is_dropped(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Set(checkpoint)
    stored = [Stored(member.name.replace(made.tag, "0" * 40), member.fd) for member in made.stored]
    assert dropped(stored, caplog) == f"its index has digest {made.tag}"


def test_segment_of_another_size_is_dropped(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Set(checkpoint)
    made.stored[2].fd.close()
    made.stored[2] = Stored(made.stored[2].name, sealed_memfd("short", SEGMENT[:-1]))
    assert dropped(made.stored, caplog) == "segment 1 holds 4095 bytes, its index says 4096"


def test_unsealed_index_is_dropped(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = Set(checkpoint)
    made.stored[0].fd.close()
    made.stored[0] = Stored(made.stored[0].name, OwnedFd(os.memfd_create("unsealed")))
    assert (
        dropped(made.stored, caplog)
        == "tensor index: the descriptor is not a memfd sealed against change"
    )


def test_doubled_name_makes_the_set_unusable(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Set(checkpoint)
    made.stored.append(Stored(made.stored[1].name, sealed_memfd("again", SEGMENT)))
    assert (
        dropped(made.stored, caplog)
        == "it is not complete: its index lists 2 segments, 3 are stored"
    )


def test_foreign_descriptor_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    stored = [Stored("connection", sealed_memfd("x", b"x"))]
    assert dropped(stored, caplog) == "its name does not have the format of this version"


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_generations_the_higher_is_kept(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, order: int
) -> None:
    old, new = Set(checkpoint, generation=3), Set(checkpoint, generation=4)
    removed: list[str] = []
    pair = [old, new][::order]
    with caplog.at_level(logging.WARNING):
        (generation,) = adopt(pair[0].stored + pair[1].stored, EXPECTED, removed.extend)
    assert generation.number == 4
    assert sorted(removed) == sorted(member.name for member in old.stored)
    assert all(member.fd.closed for member in old.stored)
    assert not any(member.fd.closed for member in new.stored)
    assert caplog.messages[0].endswith("reason=tiny/target has generation 4, this is 3")
    generation.retire()


def test_store_that_cannot_be_reached_is_only_logged(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def unreachable(names: list[str]) -> None:
        raise StoreError("the service manager's socket @x: Connection refused")

    stored = Set(checkpoint, device="cpu1").stored
    with caplog.at_level(logging.WARNING):
        assert adopt(stored, EXPECTED, unreachable) == []
    assert "stays in the store" in caplog.messages[1]


def test_descriptors_for_another_process_are_left_alone() -> None:
    environ = {"LISTEN_PID": "1", "LISTEN_FDS": "3", "LISTEN_FDNAMES": "a:b:c"}
    assert inherited(environ) == []
    # A child must not take them for its own either.
    assert environ == {}


def test_store_without_a_manager_does_nothing(checkpoint: Path) -> None:
    (generation,) = adopt(Set(checkpoint).stored, EXPECTED, lambda names: None)
    store = FdStore(None)
    store.put(generation)
    store.remove(generation)
    generation.retire()


def test_names_fit_what_systemd_allows(checkpoint: Path) -> None:
    names = [member.name for member in Set(checkpoint).stored]
    assert len(set(names)) == 3
    assert all(len(name) <= 255 and ":" not in name and name.isprintable() for name in names)


def test_driver_of_host_memory_is_unknown() -> None:
    assert current_driver("cpu0") is None


def test_driver_of_a_gpu_is_named_as_its_backend_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "kernel_driver_version", lambda: "580.159.03")
    uuid = "GPU-00000000-0000-0000-0000-000000000001"
    assert (
        current_driver(uuid)
        == CudaBackend.driver(object.__new__(CudaBackend))
        == "nvidia 580.159.03"
    )
    monkeypatch.setattr(gpus, "kernel_driver_version", lambda: "unknown")
    assert current_driver(uuid) is None
