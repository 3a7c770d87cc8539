"""Snapshots: what is written comes back byte for byte, and anything else is refused by name."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from tests.fakes.cuda_driver import MIB, FakeDriver, FakeGpu, FakeTensor, Live
from tests.fakes.models import Packed, an_index, random_bytes
from weightcached.config.snapshots import default_directory
from weightcached.errors import SnapshotError
from weightcached.index import tensors as index_format
from weightcached.index.tensors import SegmentRecord
from weightcached.segments.cuda import CudaBackend
from weightcached.segments.host import HostBackend
from weightcached.snapshot import restorer, writer
from weightcached.snapshot.files import (
    decode_header,
    encode_header,
    list_snapshots,
    open_snapshot,
    remove_leftovers,
)
from weightcached.snapshot.rollback import RolledBack, inputs_of, write_rollback
from weightcached.snapshot.writer import WriterJob
from weightcached.system import gpus
from weightcached.system.fds import OwnedFd, close_all, read_sealed
from weightcached.wire.delivery import DaemonChannel
from weightcached.wire.loader_job import LoaderJob, encode_job
from weightcached.wire.messages import Descriptors, LoaderIndex, LoaderKey

GPU = f"GPU-{FakeGpu().uuid}"


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the little segments of these tests have several."""
    monkeypatch.setattr(writer, "CHUNK_NBYTES", 64 << 10)


def build(seed: int = 1) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(
        random_bytes(torch.empty(300_000, dtype=torch.uint8), seed), requires_grad=False
    )
    model.scale = nn.Parameter(random_bytes(torch.empty(70, dtype=torch.uint8), 2), False)
    return model


@pytest.fixture
def packed() -> Iterator[Packed]:
    with Packed.of(build) as packed:
        yield packed


@pytest.fixture
def path(packed: Packed, tmp_path: Path) -> Path:
    """A snapshot of `packed`."""
    tmp_path.chmod(0o700)
    path = tmp_path / "snapshot"
    mapping = packed.map()
    writer._write(path, index_format.encode(packed.index), packed.index, mapping)
    mapping.close()
    return path


def job(**changed: Any) -> LoaderJob:
    fields: dict[str, Any] = {
        "device": "cpu0", "cache": "tiny/target", "role": "target", "generation": 7,
        "spec_digest": "spec", "engine": {}, "rank": 0, "boot_id": "boot", "socket_fd": 0,
    }  # fmt: skip
    return LoaderJob(**(fields | changed))


class Channel(DaemonChannel):
    """Keeps what a child would send."""

    def __init__(self) -> None:
        super().__init__(socket.socket())
        self._sock.close()
        self.sent: list[Any] = []
        self.fds: list[OwnedFd] = []

    def send(self, message: Any, fds: list[OwnedFd] | None = None) -> None:
        self.sent.append(message)
        self.fds += [fd.dup() for fd in fds or []]

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


def restored(path: Path, **changed: Any) -> Channel:
    channel = Channel()
    restorer.restore(job(**changed), channel, path)
    return channel


def contents(fds: list[OwnedFd]) -> list[bytes]:
    return [read_sealed(fd.fileno(), max_nbytes=1 << 30) for fd in fds]


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def test_what_is_restored_is_what_was_written(packed: Packed, path: Path) -> None:
    channel = restored(path)
    index_fd, *segments = channel.fds
    assert contents(segments) == contents(packed.fds)
    index = index_format.decode(contents([index_fd])[0])
    same = msgspec.structs.replace(
        packed.index, generation=7, device="cpu0", boot_id="boot", spec_digest="spec",
        driver=HostBackend().driver(), load=index.load,
    )  # fmt: skip
    assert index == same
    assert channel.of(LoaderKey)[0].key == packed.index.key
    assert channel.of(LoaderIndex)[0].segments == len(packed.fds)
    assert [message.first for message in channel.of(Descriptors)] == [0]
    assert set(index.load.phases) == {"opening", "segments", "locking", "restoring", "publishing"}
    assert all(seconds >= 0 for seconds in index.load.phases.values())
    close_all(channel.fds)


def test_a_snapshot_that_is_removed_meanwhile_is_restored(path: Path) -> None:
    """As a writer of another device makes room: what is open can be read to its end."""
    gone, channel = path.with_name("gone"), Channel()
    send = channel.send

    def move_and_send(message: Any, fds: list[OwnedFd] | None = None) -> None:
        if path.exists():
            path.rename(gone)
        send(message, fds)

    channel.send = move_and_send  # type: ignore[method-assign]
    # The first message is sent before the files are opened.
    channel.phase = lambda *arguments: None  # type: ignore[method-assign]
    restorer.restore(job(), channel, path)
    assert len(channel.of(Descriptors)) == 1


def test_restored_segments_are_sealed(path: Path) -> None:
    channel = restored(path)
    with pytest.raises(OSError):
        os.write(channel.fds[1].fileno(), b"x")
    close_all(channel.fds)


@pytest.mark.parametrize("chunk", range(5))
def test_a_flipped_byte_in_any_chunk_is_found(path: Path, chunk: int) -> None:
    flip(path / "data", chunk * (64 << 10) + 5)
    with pytest.raises(SnapshotError, match="do not have the digest in the header"):
        restored(path)


@pytest.mark.parametrize("position", [0, 4, 6, 37, 38, -1])
def test_a_flipped_byte_in_the_header_is_found(path: Path, position: int) -> None:
    flip(path / "header", position)
    with pytest.raises(SnapshotError, match=r"header|format"):
        open_snapshot(path)


@pytest.mark.parametrize("position", [0, 5, 10, 60, -1])
def test_a_flipped_byte_in_the_index_is_found(path: Path, position: int) -> None:
    flip(path / "index", position)
    with pytest.raises(SnapshotError, match="index"):
        open_snapshot(path)


def test_a_flipped_digest_is_found(path: Path) -> None:
    header = decode_header((path / "header").read_bytes())
    chunks = [bytes(16), *header.chunks[1:]]
    (path / "header").write_bytes(encode_header(msgspec.structs.replace(header, chunks=chunks)))
    with pytest.raises(SnapshotError, match="do not have the digest in the header"):
        restored(path)


@pytest.mark.parametrize("name", ["header", "index", "data"])
@pytest.mark.parametrize("change", ["truncated", "extended", "missing", "link", "fifo", "others"])
def test_a_changed_file_is_refused_by_name(path: Path, name: str, change: str) -> None:
    file = path / name
    data = file.read_bytes()
    match change:
        case "truncated":
            file.write_bytes(data[:-1])
        case "extended":
            file.write_bytes(data + b"x")
        case "others":
            file.chmod(0o622)
        case _:
            file.rename(path.parent / "elsewhere")
            if change == "link":
                file.symlink_to(path.parent / "elsewhere")
            if change == "fifo":
                os.mkfifo(file)
    with pytest.raises(SnapshotError) as e:
        open_snapshot(path).close()
    assert name in str(e.value)


def test_files_of_two_snapshots_do_not_mix(packed: Packed, path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    index = msgspec.structs.replace(packed.index, generation=9)
    mapping = packed.map()
    writer._write(other, index_format.encode(index), index, mapping)
    mapping.close()
    (other / "index").rename(path / "index")
    with pytest.raises(SnapshotError, match="its header says"):
        open_snapshot(path)


def test_swapped_data_is_found_although_its_size_is_right(
    packed: Packed, path: Path, tmp_path: Path
) -> None:
    """Of two snapshots of one cache, with other weights of the same sizes."""
    with Packed.of(lambda: build(seed=7)) as others:
        mapping = others.map()
        other = tmp_path / "other"
        writer._write(other, index_format.encode(others.index), others.index, mapping)
        mapping.close()
    (path / "data").rename(tmp_path / "data")
    (other / "data").rename(path / "data")
    (tmp_path / "data").rename(other / "data")
    for each in (path, other):
        open_snapshot(each).close()
        with pytest.raises(SnapshotError, match="do not have the digest in the header"):
            restored(each)


def test_data_that_shrinks_while_it_is_read_is_found(path: Path) -> None:
    with open_snapshot(path) as snapshot:
        os.truncate(path / "data", 4096)
        with pytest.raises(SnapshotError, match="became shorter while it was read"):
            snapshot.verify()


# ---- weights that were quantized while they were loaded


def build_fp8() -> nn.Module:
    """As vLLM's online fp8 leaves a layer: a transposed weight of one byte each, and its scales."""
    model = nn.Module()
    weight = torch.empty((512, 768), dtype=torch.float8_e4m3fn)
    model.weight = nn.Parameter(random_bytes(weight, 3).t(), requires_grad=False)
    model.weight_scale = nn.Parameter(torch.full((512,), 0.25), requires_grad=False)
    model.norm = nn.Parameter(torch.ones(768, dtype=torch.bfloat16), requires_grad=False)
    return model


def test_fp8_weights_come_back_with_type_bytes_and_strides(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with Packed.of(build_fp8) as packed:
        mapping = packed.map()
        writer._write(tmp_path / "fp8", index_format.encode(packed.index), packed.index, mapping)
        mapping.close()
        channel = restored(tmp_path / "fp8")
        index_fd, *segments = channel.fds
        index = index_format.decode(contents([index_fd])[0])
        (record,) = [record for record in index.tensors if record.names == ["weight"]]
        assert (record.dtype, record.shape, record.stride) == (
            "float8_e4m3fn", [768, 512], [1, 768],
        )  # fmt: skip
        assert record.storage is not None
        # A byte for each weight: nothing is widened on the way.
        assert index.storages[record.storage].nbytes == 512 * 768
        assert (tmp_path / "fp8" / "data").stat().st_size == index.nbytes
        assert 512 * 768 <= index.nbytes < 2 * 512 * 768
        model = packed.but(index=index, fds=segments).attach()
        expected = build_fp8()
        assert model.weight.dtype == torch.float8_e4m3fn
        assert model.weight.stride() == (1, 768)
        assert torch.equal(model.weight.view(torch.uint8), expected.weight.view(torch.uint8))
        assert torch.equal(model.weight_scale, expected.weight_scale)
        assert torch.equal(model.norm, expected.norm)
        close_all(channel.fds)


def test_a_linked_directory_is_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(SnapshotError, match="cannot open the directory"):
        open_snapshot(tmp_path / "link")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("what", [".", "header", "index", "data"])
def test_a_file_of_another_user_is_refused(path: Path, what: str) -> None:
    os.chown(path / what, 12345, 12345)
    with pytest.raises(SnapshotError, match="belongs to uid 12345"):
        open_snapshot(path)


def test_fuzzed_headers_are_refused_with_a_reason(path: Path) -> None:
    good = (path / "header").read_bytes()
    chance = random.Random(20261130)
    for _ in range(1000):
        data = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            kind = chance.randrange(3)
            if kind == 0 and data:
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            elif kind == 1:
                del data[chance.randrange(len(data) + 1) :]
            else:
                data += chance.randbytes(chance.randint(1, 64))
        if bytes(data) != good:
            with pytest.raises(SnapshotError):
                decode_header(bytes(data))


def test_a_header_that_is_well_formed_and_lies_is_refused(path: Path) -> None:
    """The digest guards against torn writes; whoever makes a header anew meets the other checks."""
    header = decode_header((path / "header").read_bytes())
    for changed in (
        {"chunks": header.chunks[:-1]}, {"segments": [*header.segments, 4096]},
        {"segments": [1 << 62]}, {"chunk_nbytes": 4096}, {"index_digest": "0" * 64},
    ):  # fmt: skip
        (path / "header").write_bytes(encode_header(msgspec.structs.replace(header, **changed)))
        with pytest.raises(SnapshotError):
            open_snapshot(path)


# ---- on a GPU


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    monkeypatch.setattr(gpus, "holders", lambda uuid: [])
    monkeypatch.setattr(gpus, "kernel_driver_version", lambda: "580.159.03")
    fake = FakeDriver()
    yield fake
    # The back ends that a test made still hold their context.
    assert fake.live()._replace(contexts=0) == Live(0, 0, 0, 0, 0)
    fake.die()


def on_gpu(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    backend = CudaBackend(GPU, driver, as_tensor=lambda array: FakeTensor(driver, array))
    monkeypatch.setattr(restorer, "open_backend", lambda device: backend)
    return backend


@pytest.fixture
def gpu_path(driver: FakeDriver, tmp_path: Path) -> Path:
    """A snapshot of two segments on the fake GPU."""
    backend = CudaBackend(GPU, driver, as_tensor=lambda array: FakeTensor(driver, array))
    sizes = [2 * MIB, 4 * MIB]
    fds = []
    for number, nbytes in enumerate(sizes):
        segment = backend.create(nbytes)
        segment.write(0, memoryview(bytearray(random.Random(number).randbytes(nbytes))))
        fds.append(segment.publish())
    index = an_index(segments=[SegmentRecord(nbytes, False) for nbytes in sizes], device=GPU)
    mapping = backend.map(fds, sizes)
    writer._write(tmp_path / "gpu", index_format.encode(index), index, mapping)
    mapping.close()
    return tmp_path / "gpu"


def test_device_memory_comes_back_under_another_driver(
    driver: FakeDriver, gpu_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reboot into a newer driver: segments are new ones, so nothing depends on the old."""
    monkeypatch.setattr(gpus, "kernel_driver_version", lambda: "590.10")
    backend = on_gpu(driver, monkeypatch)
    channel = restored(gpu_path, device=GPU)
    index_fd, *segments = channel.fds
    index = index_format.decode(contents([index_fd])[0])
    assert (index.driver, index.boot_id) == ("nvidia 590.10", "boot")
    mapping = backend.map(segments, [2 * MIB, 4 * MIB])
    for number, nbytes in enumerate((2 * MIB, 4 * MIB)):
        expected = random.Random(number).randbytes(nbytes)
        assert mapping.read(number, 0, nbytes).tobytes() == expected
    mapping.close()
    index_fd.close()


def test_the_time_of_the_copy_is_that_without_locking_memory(
    driver: FakeDriver, gpu_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = on_gpu(driver, monkeypatch)
    lock = backend.staging

    def slowly(nbytes: int) -> Any:
        time.sleep(0.3)
        return lock(nbytes)

    monkeypatch.setattr(backend, "staging", slowly)
    began_s = time.monotonic()
    channel = restored(gpu_path, device=GPU)
    took_s = time.monotonic() - began_s
    phases = index_format.decode(contents(channel.fds[:1])[0]).load.phases
    assert phases["locking"] >= 0.3
    # Every reader waited for its memory before it copied anything, and no time counts twice.
    assert sum(phases.values()) <= took_s
    assert phases["restoring"] <= took_s - 0.3
    close_all(channel.fds)


def test_device_memory_is_given_back_when_a_chunk_is_wrong(
    driver: FakeDriver, gpu_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu(driver, monkeypatch)
    flip(gpu_path / "data", 3 * MIB)
    with pytest.raises(SnapshotError, match="do not have the digest"):
        restored(gpu_path, device=GPU)


@pytest.mark.parametrize("call", ["cuMemHostAlloc", "cuMemcpyHtoD", "cuMemCreate"])
def test_a_driver_that_fails_loses_nothing(
    driver: FakeDriver, gpu_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    on_gpu(driver, monkeypatch)
    driver.fail(call)
    with pytest.raises(Exception, match=call):
        restored(gpu_path, device=GPU)


class Waiting(Channel):
    """Its turn comes at once; at_turn is what the driver had given out by then."""

    def __init__(self, driver: FakeDriver) -> None:
        super().__init__()
        self._driver = driver
        self.at_turn: Live | None = None

    def wait_for_turn(self) -> None:
        self.at_turn = self._driver.live()


@pytest.mark.parametrize("prepares", [True, False])
def test_memory_is_locked_before_the_turn_if_the_job_says_so(
    driver: FakeDriver, gpu_path: Path, monkeypatch: pytest.MonkeyPatch, prepares: bool
) -> None:
    backend = on_gpu(driver, monkeypatch)
    channel = Waiting(driver)
    restorer.restore(job(device=GPU, waits=True, prepares=prepares), channel, gpu_path)
    assert channel.at_turn is not None
    assert channel.at_turn.handles == 0, "no memory of the device"
    assert channel.at_turn.locked == (restorer._readers() if prepares else 0)
    assert driver.live().locked == 0
    index_fd, *segments = channel.fds
    mapping = backend.map(segments, [2 * MIB, 4 * MIB])
    expected = random.Random(1).randbytes(4 * MIB)
    assert mapping.read(1, 0, 4 * MIB).tobytes() == expected
    mapping.close()
    index_fd.close()


@pytest.mark.parametrize("nth", [1, 2])
def test_restorer_that_cannot_prepare_does_it_after_the_turn(
    driver: FakeDriver, gpu_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    on_gpu(driver, monkeypatch)
    driver.fail("cuMemHostAlloc", nth=nth)
    channel = Waiting(driver)
    restorer.restore(job(device=GPU, waits=True, prepares=True), channel, gpu_path)
    assert channel.at_turn is not None
    assert channel.at_turn.locked == 0
    assert len(channel.fds) == 3
    close_all(channel.fds)


# ---- the children as processes


def test_the_restorer_imports_neither_torch_nor_vllm(path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = (
        "import sys; from pathlib import Path; from weightcached.snapshot.restorer import restore;"
        "from weightcached.wire.delivery import run_job\n"
        "def run(job, daemon):\n"
        "    restore(job, daemon, Path(sys.argv[1]))\n"
        "    assert not {'torch', 'vllm'} & set(sys.modules)\n"
        "run_job(run)"
    )
    with ours, theirs:
        child = subprocess.run(
            [sys.executable, "-c", code, str(path)],
            input=encode_job(job(socket_fd=theirs.fileno())), pass_fds=[theirs.fileno()],
            check=False, capture_output=True,
        )  # fmt: skip
    assert child.returncode == 0, child.stderr.decode()


def test_a_killed_writer_leaves_nothing_that_is_taken_for_a_snapshot(
    packed: Packed, tmp_path: Path
) -> None:
    directory = tmp_path / "cpu0" / "tiny.target"
    directory.mkdir(parents=True, mode=0o700)
    code = (
        "import os, signal, sys; from pathlib import Path; from weightcached.snapshot import writer\n"
        "class Dying:\n"
        "    def read(self, segment, offset, nbytes):\n"
        "        if offset: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return memoryview(bytes(nbytes))\n"
        "from tests.fakes.models import an_index; from weightcached.index.tensors import *\n"
        "writer.CHUNK_NBYTES = writer._PIECE_NBYTES = 4096\n"
        "index = an_index(segments=[SegmentRecord(1 << 20, False)])\n"
        "writer._write(Path(sys.argv[1]), encode(index), index, Dying())"
    )
    child = subprocess.run([sys.executable, "-c", code, str(directory / "x")], check=False)
    assert child.returncode == -signal.SIGKILL
    assert len(os.listdir(directory)) == 1
    assert list_snapshots(tmp_path, "cpu0", "tiny/target") == []
    assert remove_leftovers(directory) == 1
    assert os.listdir(directory) == []


def test_a_writer_that_lives_keeps_its_directory(tmp_path: Path) -> None:
    writing = tmp_path / ".abc"
    writing.mkdir()
    with OwnedFd(os.open(writing, os.O_RDONLY)) as lock:
        import fcntl

        fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
        assert remove_leftovers(tmp_path) == 0
    assert remove_leftovers(tmp_path) == 1


# ---- room


def a_job(root: Path, **changed: Any) -> WriterJob:
    fields: dict[str, Any] = {
        "root": str(root), "device": "cpu0", "cache": "a/target", "generation": 1, "socket_dir": "",
    }  # fmt: skip
    return WriterJob(**(fields | changed))


def with_data(root: Path, name: str, nbytes: int, used_at: float) -> Path:
    directory = root / "cpu0" / name / "0"
    directory.mkdir(parents=True)
    (directory / "data").write_bytes(bytes(nbytes))
    os.utime(directory / "data", (used_at, used_at))
    return directory


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    old, new = with_data(tmp_path, "b", 1000, 1.0), with_data(tmp_path, "c", 1000, 2.0)
    writer._make_room(tmp_path, tmp_path, 900, a_job(tmp_path, max_bytes=2000))
    assert (old.exists(), new.exists()) == (False, True)


def test_what_a_rollback_went_back_to_makes_no_room(tmp_path: Path) -> None:
    old, new = with_data(tmp_path, "b", 1000, 1.0), with_data(tmp_path, "c", 1000, 2.0)
    for directory in (tmp_path, old.parent.parent, old.parent):
        directory.chmod(0o700)
    note = RolledBack(to=old.name, at=1.0, spec_digest="", replaced=inputs_of(an_index()))
    write_rollback(old.parent, note)
    writer._make_room(tmp_path, tmp_path, 900, a_job(tmp_path, max_bytes=2000))
    assert (old.exists(), new.exists()) == (True, False)
    with pytest.raises(SnapshotError, match="no room for a snapshot of 1100 bytes"):
        writer._make_room(tmp_path, tmp_path, 1100, a_job(tmp_path, max_bytes=2000))
    assert old.exists()


def test_a_full_file_system_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="no room for a snapshot of 1152921504606846976 bytes"):
        writer._make_room(tmp_path, tmp_path, 1 << 60, a_job(tmp_path))


def test_the_default_directory_needs_an_absolute_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    with pytest.raises(SnapshotError, match="no directory for snapshots"):
        default_directory()
