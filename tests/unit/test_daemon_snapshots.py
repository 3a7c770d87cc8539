"""The daemon's side of snapshots: writers begin, are replaced, and end with it; what is before."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.models import an_index
from tests.unit.test_daemon_caches import generation
from weightcached.config.snapshots import SnapshotSpec
from weightcached.config.wanted import Wanted
from weightcached.daemon.caches import Generation
from weightcached.daemon.rollbacks import Rollbacks, generation_of
from weightcached.daemon.snapshots import Snapshots
from weightcached.errors import SnapshotError
from weightcached.index import tensors as index_format
from weightcached.index.key import WeightCacheKey
from weightcached.index.tensors import StorageRecord, TensorIndex
from weightcached.segments.host import HostBackend
from weightcached.snapshot import writer
from weightcached.snapshot.files import cache_directory, name_of
from weightcached.snapshot.rollback import RolledBack, inputs_of, read_rollback, write_rollback
from weightcached.system.fds import sealed_memfd


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint", nbytes=4096)


def an_interpreter(tmp_path: Path, script: str) -> str:
    """A stand-in for the model's interpreter, in which the writer would run."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


async def appears(path: Path) -> str:
    async with asyncio.timeout(120):
        while not path.exists() or not path.read_text().endswith("\n"):
            await asyncio.sleep(0.01)
    return path.read_text()


def test_no_writer_outlives_the_daemon_even_one_of_a_generation_that_was_replaced(
    tmp_path: Path, checkpoint: Path
) -> None:
    said = tmp_path / "pid"
    python = an_interpreter(tmp_path, f"echo $$ > {said}; exec sleep 600")

    async def test() -> None:
        snapshots = Snapshots("cpu0", tmp_path)
        snapshots.spec = SnapshotSpec(directory=tmp_path / "snapshots")
        written = generation(checkpoint, 1)
        snapshots.write_later(written, python)
        pid = int(await appears(said))
        snapshots.stop_writing(written)
        await snapshots.close()
        assert not is_alive(pid)
        written.retire()

    asyncio.run(test())


# ---- the generation before


class Kept:
    """A directory of snapshots of a/target, with the daemon's view of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.rollbacks = Rollbacks("cpu0")
        self.age = 1000.0
        self.want = Wanted("a/target", "target", None, "spec")  # type: ignore[arg-type]

    def write(self, weights: bytes, **changed: Any) -> Path:
        """A snapshot, older than those that were written here before. Returns its path."""
        index = index_of(weights, **changed)
        path = cache_directory(self.root, "cpu0", "a/target") / name_of(index)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        backend = HostBackend()
        mapping = backend.map([backend.create(4096).publish()], [4096])
        writer._write(path, index_format.encode(index), index, mapping)
        mapping.close()
        self.age -= 1
        os.utime(path, (self.age, self.age))
        return path

    def before(self, weights: bytes, other_software: str = "", **changed: Any) -> Path:
        """The generation before one with these weights. Raises SnapshotError."""

        async def software(found: Generation, want: Wanted) -> str:
            return other_software if found.versions else ""

        async def test() -> Path:
            spec = SnapshotSpec(directory=self.root, keep=9)
            await self.rollbacks.read(spec, ["a/target"])
            data = index_format.encode(index_of(weights, **changed))
            served = Generation(
                index_format.decode(data), "", sealed_memfd("index", data), [], "loaded"
            )
            try:
                return (await self.rollbacks.before(self.want, served, software)).path
            finally:
                served.retire()

        return asyncio.run(test())


def index_of(weights: bytes, **changed: Any) -> TensorIndex:
    digest = xxhash.xxh3_128_digest(weights)
    return an_index(cache="a/target", storages=[StorageRecord(0, 0, 512, digest)], **changed)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "snapshots")


def test_the_one_before_is_the_next_older_than_the_served_one(kept: Kept) -> None:
    newest, middle, oldest = kept.write(b"3"), kept.write(b"2"), kept.write(b"1")
    assert kept.before(b"3") == middle
    assert kept.before(b"2") == oldest
    # Its own snapshot is not written yet.
    assert kept.before(b"4") == newest
    with pytest.raises(SnapshotError, match=r"none in .* is older; snapshots: keep is 9"):
        kept.before(b"1")


def test_the_same_weights_are_not_gone_back_to(kept: Kept) -> None:
    kept.write(b"2", spec_digest="new")
    same, other = kept.write(b"2", spec_digest="old"), kept.write(b"1")
    assert kept.before(b"2", spec_digest="new") == other
    shutil.rmtree(other)
    with pytest.raises(SnapshotError, match=f"{same}: it has the same weights"):
        kept.before(b"2", spec_digest="new")


def test_weights_that_engines_of_now_could_not_attach_are_passed_over(kept: Kept) -> None:
    kept.write(b"3")
    older = kept.write(b"2", versions={"vllm": "0.32"})
    oldest = kept.write(b"1")
    reason = "vllm was 0.32, is 0.33"
    assert kept.before(b"3", reason) == oldest
    assert kept.before(b"3") == older
    shutil.rmtree(oldest)
    with pytest.raises(SnapshotError, match=f"{older}: {reason}"):
        kept.before(b"3", reason)


def test_what_is_damaged_or_anothers_is_passed_over_by_name(kept: Kept) -> None:
    kept.write(b"3")
    damaged, moved = kept.write(b"2"), kept.write(b"1", device="cpu7")
    (damaged / "header").write_bytes(b"WCSN")
    with pytest.raises(SnapshotError) as e:
        kept.before(b"3")
    assert f"{damaged}: its header has 4 bytes, fewer than 38" in str(e.value)
    assert f"{moved}: its device is cpu7, wanted is cpu0" in str(e.value)


def test_what_is_gone_away_from_is_known_by_its_key_also_before_its_digest_is_made(
    kept: Kept,
) -> None:
    old, new = index_of(b"1"), index_of(b"2", key=other_key(full="ab"))
    note = RolledBack(to="0", at=1.5, spec_digest="spec", replaced=inputs_of(new))
    directory = kept.write(b"1").parent
    write_rollback(directory, note)
    asyncio.run(kept.rollbacks.read(SnapshotSpec(directory=kept.root), ["a/target"]))
    assert kept.rollbacks.at(generation_of(old)) == 1.5
    undigested = index_of(b"2", key=other_key(full=""))
    assert kept.rollbacks.at(generation_of(undigested)) is None


def other_key(*, full: str) -> WeightCacheKey:
    checkpoint = msgspec.structs.replace(an_index().key.checkpoint, root="/other", full=full)
    return msgspec.structs.replace(an_index().key, checkpoint=checkpoint)


# ---- the note of a rollback


NOTE = RolledBack(to="0123456789abcdef", at=1.5, spec_digest="spec", replaced=inputs_of(an_index()))


def test_a_note_comes_back_and_goes(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert read_rollback(tmp_path) is None
    write_rollback(tmp_path, NOTE)
    assert read_rollback(tmp_path) == NOTE
    assert NOTE.index().key == an_index().key
    write_rollback(tmp_path, None)
    assert read_rollback(tmp_path) is None
    write_rollback(tmp_path, None)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("fault", ["flipped", "truncated", "others", "link", "name"])
def test_a_note_that_is_not_as_written_is_refused(tmp_path: Path, fault: str) -> None:
    tmp_path.chmod(0o700)
    away = msgspec.structs.replace(NOTE, to="../../elsewhere")
    write_rollback(tmp_path, away if fault == "name" else NOTE)
    path = tmp_path / ".rollback"
    data = path.read_bytes()
    match fault:
        case "flipped":
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        case "truncated":
            path.write_bytes(data[:-1])
        case "others":
            path.chmod(0o622)
        case "link":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SnapshotError, match=r"\.rollback"):
        read_rollback(tmp_path)


def test_a_note_that_cannot_be_read_is_passed_over(kept: Kept) -> None:
    path = kept.write(b"2").parent / ".rollback"
    path.write_bytes(b"x")
    kept.write(b"1")
    assert kept.before(b"2")
