"""Checkpoint identity: the ladder never takes other values for the recorded ones."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tests import limits
from tests.fakes.daemon import BOUND_S
from weightcached.checkpoint import identity
from weightcached.checkpoint.identity import CheckpointIdentity, Different, Equal, FileRecord, Need
from weightcached.errors import CheckpointError

TENSOR_BYTES = 256 * 1024
SAMPLED_BYTES = 4096
SHA_A, SHA_B = "a" * 64, "b" * 64


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two shards of two tensors each, random bytes."""
    directory = tmp_path / "model"
    write_shards(directory, 2)
    return directory


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(20261129)
    return {f"layers.{i}.weight": rng.integers(0, 256, TENSOR_BYTES, np.uint8) for i in range(4)}


def write_shards(directory: Path, count: int) -> None:
    directory.mkdir(exist_ok=True)
    items = list(tensors().items())
    each = len(items) // count
    for i in range(count):
        path = directory / f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        save_file(dict(items[i * each : (i + 1) * each]), path, metadata={"format": "pt"})


def record(directory: Path) -> CheckpointIdentity:
    return identity.record_checkpoint(str(directory))


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))


def climb(
    cached: CheckpointIdentity, asked: CheckpointIdentity, mode: str = "full"
) -> tuple[identity.Decision, list[Need]]:
    """Act as daemon and engine: add the needed digests until the answer is final."""
    sides = {"cached": cached, "asked": asked}
    needs: list[Need] = []
    while True:
        decision = identity.decide(sides["cached"], sides["asked"], mode=mode)  # type: ignore[arg-type]
        if not isinstance(decision, Need):
            return decision, needs
        assert decision not in needs
        needs.append(decision)
        names = identity.names_to_compare(sides["cached"], sides["asked"])
        sides["asked"] = identity.with_files(sides["asked"], names)
        if decision.rung == "files":
            continue
        complete = identity.with_sample if decision.rung == "sample" else identity.with_full
        for side in decision.sides:
            sides[side] = complete(sides[side])


_opened: list[str] | None = None


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _opened is not None:
        _opened.append(
            os.fsdecode(arguments[0])
            if isinstance(arguments[0], str | bytes)
            else str(arguments[0])
        )


sys.addaudithook(_audit)


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """Every path that this process opens meanwhile."""
    global _opened  # noqa: PLW0603
    _opened = []
    try:
        yield _opened
    finally:
        _opened = None


def bytes_read() -> int:
    """Bytes that this process has asked read calls for so far."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


# ---- rung 1: the same files


def test_same_files_are_equal_and_none_is_opened(checkpoint: Path) -> None:
    cached = identity.with_sample(record(checkpoint))
    before = bytes_read()
    with opened_files() as opened:
        decision = identity.decide(cached, record(checkpoint))
        changed = identity.changed_files(cached)
    assert (decision, changed) == (Equal("files"), [])
    assert opened == []
    assert bytes_read() - before < 4096  # reading the counter itself


def test_opened_files_sees_an_opened_file(checkpoint: Path) -> None:
    with opened_files() as opened:
        identity.sample_digest(record(checkpoint))
    assert len(opened) == 2


def test_a_directory_of_symlinks_names_the_same_files(checkpoint: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in checkpoint.iterdir():
        (linked / path.name).symlink_to(path)
    assert identity.decide(record(checkpoint), record(linked)) == Equal("files")


def test_hard_links_made_before_recording_name_the_same_files(
    checkpoint: Path, tmp_path: Path
) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in checkpoint.iterdir():
        os.link(path, linked / path.name)
    assert identity.decide(record(checkpoint), record(linked)) == Equal("files")


def test_a_hard_link_made_after_recording_leaves_the_decision_to_the_values(
    checkpoint: Path, tmp_path: Path
) -> None:
    cached = identity.with_full(identity.with_sample(record(checkpoint)))
    os.link(checkpoint / "model-00001-of-00002.safetensors", tmp_path / "link")
    assert climb(cached, record(checkpoint)) == (
        Equal("full"),
        [Need("sample", ("asked",)), Need("full", ("asked",))],
    )


def test_changes_of_config_and_tokenizer_leave_the_identity_alone(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{}")
    before = record(checkpoint)
    (checkpoint / "config.json").write_text('{"rope_theta": 10000}')
    (checkpoint / "tokenizer.json").write_text("{}")
    assert record(checkpoint) == before


@pytest.mark.timed
def test_two_hundred_shards_are_recorded_and_compared_within_20_ms(tmp_path: Path) -> None:
    names = [f"model-{i:05d}-of-00200.safetensors" for i in range(1, 201)]
    for name in names:
        save_file({"a": np.zeros(4, np.uint8)}, tmp_path / name)
    weight_map = {"weight_map": {f"layers.{i}.weight": name for i, name in enumerate(names)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(weight_map))
    cached = record(tmp_path)
    times_s = []
    for _ in range(5):
        start = time.perf_counter()
        assert identity.decide(cached, record(tmp_path)) == Equal("files")
        times_s.append(time.perf_counter() - start)
    limits.hold("200 shards recorded and compared", min(times_s), 0.020)


# ---- copies, and others


def test_a_copy_elsewhere_is_equal_after_one_digest_that_is_then_cached(
    checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path / "copy")
    cached = identity.with_sample(record(checkpoint))
    asked = record(tmp_path / "copy")
    assert climb(cached, asked) == (
        Equal("full"),
        [Need("sample", ("asked",)), Need("full", ("cached", "asked"))],
    )

    before = bytes_read()
    with opened_files() as opened:
        again = identity.full_digest(asked)
    assert again == identity.full_digest(cached)
    assert [path for path in opened if path.endswith(".safetensors")] == []
    assert bytes_read() - before < 8192  # two cache entries twice, and the counter


def test_shard_names_do_not_count(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "renamed").mkdir()
    for i, path in enumerate(sorted(checkpoint.iterdir())):
        shutil.copy(path, tmp_path / "renamed" / f"part{i}.safetensors")
    assert climb(record(checkpoint), record(tmp_path / "renamed"))[0] == Equal("full")


def test_shards_read_in_another_order_are_not_equal(checkpoint: Path, tmp_path: Path) -> None:
    # A tensor that stands in two shards has the value of the one that is read last.
    (tmp_path / "swapped").mkdir()
    for i, path in enumerate(sorted(checkpoint.iterdir(), reverse=True)):
        os.link(path, tmp_path / "swapped" / f"part{i}.safetensors")
    assert isinstance(climb(record(checkpoint), record(tmp_path / "swapped"))[0], Different)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(shard=st.integers(0, 1), position=st.floats(0, 1, exclude_max=True))
def test_one_byte_changed_anywhere_is_different(
    checkpoint: Path, shard: int, position: float
) -> None:
    changed = checkpoint.parent / "changed"
    shutil.rmtree(changed, ignore_errors=True)
    shutil.copytree(checkpoint, changed)
    path = sorted(changed.iterdir())[shard]
    header_nbytes = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    flip(path, header_nbytes + int(position * (path.stat().st_size - header_nbytes)))
    assert isinstance(climb(record(checkpoint), record(changed))[0], Different)


def test_a_changed_value_inside_the_sample_is_found_without_the_full_digest(
    checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path / "changed")
    path = tmp_path / "changed/model-00002-of-00002.safetensors"
    flip(path, path.stat().st_size - 1)
    cached, asked = (identity.with_sample(record(d)) for d in (checkpoint, tmp_path / "changed"))
    assert identity.decide(cached, asked) == Different(
        f"sample digest is {cached.sample} in the cached checkpoint, {asked.sample} in the requested one"
    )


def test_sampled_mode_stops_after_the_sample_knowingly(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "changed")
    path = tmp_path / "changed/model-00002-of-00002.safetensors"
    flip(path, path.stat().st_size - SAMPLED_BYTES - 1)
    assert climb(record(checkpoint), record(tmp_path / "changed"), "sampled")[0] == Equal("sample")
    decision, _ = climb(record(checkpoint), record(tmp_path / "changed"), "full")
    assert isinstance(decision, Different)
    assert decision.reason.startswith("full digest is ")


def test_a_resave_with_another_shard_layout_is_different(checkpoint: Path, tmp_path: Path) -> None:
    write_shards(tmp_path / "resaved", 4)
    assert identity.decide(record(checkpoint), record(tmp_path / "resaved")) == Different(
        "the cached checkpoint has 2 weight files, the requested one 4"
    )


def test_a_shard_of_another_size_is_different_at_once(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "other")
    name = "model-00002-of-00002.safetensors"
    save_file({"a": np.zeros(16, np.uint8)}, tmp_path / "other" / name)
    sizes = [(directory / name).stat().st_size for directory in (checkpoint, tmp_path / "other")]
    assert identity.decide(record(checkpoint), record(tmp_path / "other")) == Different(
        f"{name} has {sizes[0]} bytes in the cached checkpoint, {name} has {sizes[1]} in the requested one"
    )


def test_a_read_only_sparse_checkpoint_is_compared_by_its_values(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "model.safetensors"
        header = b'{"w": {"dtype": "U8", "shape": [134217728], "data_offsets": [0, 134217728]}}'
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(path, 8 + len(header) + (128 << 20))
    flip(tmp_path / "b/model.safetensors", 100 << 20)
    for name in ("a", "b"):
        (tmp_path / name / "model.safetensors").chmod(0o400)
        assert (tmp_path / name / "model.safetensors").stat().st_blocks * 512 < 1 << 20
    decision, _ = climb(record(tmp_path / "a"), record(tmp_path / "b"))
    assert isinstance(decision, Different)
    assert decision.reason.startswith("full digest is ")


# ---- files that change after they were recorded


def test_a_replacement_in_place_with_restored_times_is_different(checkpoint: Path) -> None:
    cached = identity.with_full(identity.with_sample(record(checkpoint)))
    path = checkpoint / "model-00001-of-00002.safetensors"
    before = path.stat()
    flip(path, before.st_size - SAMPLED_BYTES - 1)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    asked = record(checkpoint)
    assert [(f.inode, f.size, f.mtime_ns) for f in asked.files] == [
        (f.inode, f.size, f.mtime_ns) for f in cached.files
    ]
    assert identity.changed_files(cached) == [path.name]
    decision, needs = climb(cached, asked)
    assert isinstance(decision, Different)
    assert needs == [Need("sample", ("asked",)), Need("full", ("asked",))]


def test_the_cached_side_gets_no_digest_of_files_that_changed_since(checkpoint: Path) -> None:
    cached = record(checkpoint)
    path = checkpoint / "model-00001-of-00002.safetensors"
    flip(path, 1000)
    for complete in (identity.with_sample, identity.with_full, identity.check_headers):
        with pytest.raises(CheckpointError) as raised:
            complete(cached)
        assert str(raised.value) == (
            f"weight file {path} changed since it was recorded: mtime_ns was {cached.files[0].mtime_ns}, "
            f"is {path.stat().st_mtime_ns}; wait until nothing writes to the checkpoint, then: weightcachectl reload"
        )


def test_a_file_renamed_over_another_is_different(checkpoint: Path, tmp_path: Path) -> None:
    cached = identity.with_full(identity.with_sample(record(checkpoint)))
    path = checkpoint / "model-00001-of-00002.safetensors"
    shutil.copy2(path, tmp_path / "new")
    flip(tmp_path / "new", 200_000)
    os.utime(tmp_path / "new", ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    os.rename(tmp_path / "new", path)
    assert identity.changed_files(cached) == [path.name]
    assert isinstance(climb(cached, record(checkpoint))[0], Different)


def test_a_missing_file_counts_as_changed(checkpoint: Path) -> None:
    cached = record(checkpoint)
    path = checkpoint / "model-00002-of-00002.safetensors"
    path.unlink()
    assert identity.changed_files(cached) == [path.name]
    with pytest.raises(CheckpointError) as raised:
        identity.with_full(cached)
    assert (
        str(raised.value)
        == f"weight file {path} is gone since it was recorded: No such file or directory"
    )


# ---- rung 2: Hub blobs


def hub_snapshot(cache: Path, commit: str, blobs: dict[str, str]) -> Path:
    """A snapshot whose files link to blobs of the given sha256 names; a blob holds its name."""
    repo = cache / "models--org--name"
    snapshot = repo / "snapshots" / commit
    for directory in (repo / "refs", repo / "blobs", snapshot):
        directory.mkdir(parents=True, exist_ok=True)
    (repo / "refs/main").write_text(commit)
    for name, sha in blobs.items():
        if not (repo / "blobs" / sha).exists():
            save_file({"w": np.frombuffer(sha.encode() * 1024, np.uint8)}, repo / "blobs" / sha)
        (snapshot / name).symlink_to(f"../../blobs/{sha}")
    return snapshot


def test_the_same_hub_blobs_in_two_caches_are_equal_without_reading(tmp_path: Path) -> None:
    records = [
        record(hub_snapshot(tmp_path / c, "c0", {"model.safetensors": SHA_A}))
        for c in ("one", "two")
    ]
    assert [r.files[0].blob for r in records] == [SHA_A, SHA_A]
    assert identity.decide(*records) == Equal("blobs")


def test_other_hub_blobs_are_different(tmp_path: Path) -> None:
    cached = record(hub_snapshot(tmp_path, "c0", {"model.safetensors": SHA_A}))
    asked = record(hub_snapshot(tmp_path, "c1", {"model.safetensors": SHA_B}))
    assert identity.decide(cached, asked) == Different(
        f"model.safetensors is Hub blob {SHA_A} in the cached checkpoint, {SHA_B} in the requested one"
    )


def test_a_blob_rewritten_in_place_is_not_trusted_for_its_name(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path, "c0", {"model.safetensors": SHA_A})
    cached = identity.with_full(identity.with_sample(record(snapshot)))
    flip(snapshot / "model.safetensors", 30_000)
    assert isinstance(climb(cached, record(snapshot))[0], Different)


def test_a_blob_replaced_under_its_name_is_not_trusted_for_it(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path, "c0", {"model.safetensors": SHA_A})
    other = hub_snapshot(tmp_path, "c1", {"model.safetensors": SHA_A})
    cached = identity.with_full(identity.with_sample(record(snapshot)))
    blob = tmp_path / "models--org--name/blobs" / SHA_A
    shutil.copy(blob, tmp_path / "new")
    flip(tmp_path / "new", 30_000)
    os.rename(tmp_path / "new", blob)
    assert isinstance(climb(cached, record(other))[0], Different)


def test_blobs_on_one_side_only_decide_nothing(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path / "hub", "c0", {"model.safetensors": SHA_A})
    (tmp_path / "copy").mkdir()
    shutil.copy(snapshot / "model.safetensors", tmp_path / "copy/model.safetensors")
    assert identity.decide(record(snapshot), record(tmp_path / "copy")) == Need(
        "sample", ("cached", "asked")
    )


# ---- what a load read, and what it did not


def loaded(
    directory: Path, *, extra: tuple[str, ...] = (), unread: tuple[str, ...] = ()
) -> CheckpointIdentity:
    """The record as a loader leaves it, with both digests."""
    chosen = record(directory)
    read = [name for name in chosen.names if name not in unread]
    kept = identity.with_files(chosen, [*read, *extra, *chosen.absent])
    kept = msgspec.structs.replace(kept, unread=list(unread))
    return identity.with_full(identity.with_sample(kept))


def dense(directory: Path) -> Path:
    (directory / "2_Dense").mkdir()
    save_file({"w": np.zeros(64, np.uint8)}, directory / "2_Dense/model.safetensors")
    return directory / "2_Dense/model.safetensors"


def test_weights_that_nobody_reads_change_nothing(checkpoint: Path) -> None:
    cached = loaded(checkpoint)
    for folder in ("checkpoint-500", "original"):
        (checkpoint / folder).mkdir()
        (checkpoint / folder / "model.safetensors").write_bytes(b"version https://git-lfs")
    with open(checkpoint / "checkpoint-500/pytorch_model.bin", "wb") as f:
        os.truncate(f.fileno(), 1 << 40)
    assert identity.decide(cached, record(checkpoint)) == Equal("files")
    assert identity.check_headers(record(checkpoint)) == 4 * TENSOR_BYTES


def test_weights_in_a_sub_folder_that_were_read_are_compared(checkpoint: Path) -> None:
    path = dense(checkpoint)
    cached = loaded(checkpoint, extra=("2_Dense/model.safetensors",))
    assert climb(cached, record(checkpoint)) == (Equal("files"), [Need("files", ("asked",))])
    path.chmod(0o400)
    assert climb(cached, record(checkpoint))[0] == Equal("full")
    path.chmod(0o600)
    flip(path, path.stat().st_size - 1)
    decision, _ = climb(cached, record(checkpoint))
    assert isinstance(decision, Different)
    path.unlink()
    assert climb(cached, record(checkpoint))[0] == Different(
        "2_Dense/model.safetensors, which the load read, is missing in the requested one"
    )


def test_file_that_the_load_looked_for_in_vain_may_not_appear(checkpoint: Path) -> None:
    cached = msgspec.structs.replace(
        loaded(checkpoint), absent=["2_Dense/model.safetensors", "model.safetensors.index.json"]
    )
    assert climb(cached, record(checkpoint)) == (Equal("files"), [Need("files", ("asked",))])
    assert identity.changed_files(cached) == []
    dense(checkpoint)
    assert climb(cached, record(checkpoint))[0] == Different(
        "2_Dense/model.safetensors, which the load did not find, is in the requested one"
    )
    assert identity.changed_files(cached) == ["2_Dense/model.safetensors"]


def test_index_of_the_shards_is_compared_too(checkpoint: Path) -> None:
    shards = sorted(path.name for path in checkpoint.iterdir())
    index = checkpoint / "model.safetensors.index.json"
    weight_map = {f"layers.{i}.weight": shards[i // 2] for i in range(4)}
    index.write_text(json.dumps({"weight_map": weight_map}))
    cached = loaded(checkpoint)
    assert [file.name for file in cached.extra] == [index.name]
    index.chmod(0o400)
    assert climb(cached, record(checkpoint))[0] == Equal("full")
    index.chmod(0o600)
    # The same shards by another map, in as many bytes.
    swapped = weight_map | {"layers.0.weight": shards[1], "layers.2.weight": shards[0]}
    index.write_text(json.dumps({"weight_map": swapped}))
    assert isinstance(climb(cached, record(checkpoint))[0], Different)
    index.unlink()
    assert isinstance(climb(cached, record(checkpoint))[0], Different)


def test_index_that_appears_is_another_checkpoint(checkpoint: Path) -> None:
    cached = loaded(checkpoint)
    shards = {path.name: path.name for path in checkpoint.iterdir()}
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    assert isinstance(identity.decide(cached, record(checkpoint)), Different)


def test_chosen_file_that_the_load_did_not_read_does_not_count(
    checkpoint: Path, tmp_path: Path
) -> None:
    save_file({"unused": np.zeros(64, np.uint8)}, checkpoint / "z.safetensors")
    cached = loaded(checkpoint, unread=("z.safetensors",))
    flip(checkpoint / "z.safetensors", 90)
    assert identity.decide(cached, record(checkpoint)) == Equal("files")
    shutil.copytree(checkpoint, tmp_path / "copy")
    assert climb(cached, record(tmp_path / "copy"))[0] == Equal("full")
    # A file that is chosen now, but was not there at the load, does.
    save_file({"new": np.zeros(64, np.uint8)}, checkpoint / "new.safetensors")
    assert identity.decide(cached, record(checkpoint)) == Different(
        "the cached checkpoint has 2 weight files, the requested one 3"
    )


def test_hard_link_replaced_by_other_bytes_is_different(checkpoint: Path, tmp_path: Path) -> None:
    """`cp -al`, then one name is written anew, with the old size and times."""
    cached = loaded(checkpoint)
    (tmp_path / "linked").mkdir()
    for path in checkpoint.iterdir():
        os.link(path, tmp_path / "linked" / path.name)
    assert climb(cached, record(checkpoint))[0] == Equal("full")
    assert climb(cached, record(tmp_path / "linked"))[0] == Equal("full")
    path = tmp_path / "linked/model-00001-of-00002.safetensors"
    before = path.stat()
    shutil.copy(path, tmp_path / "new")
    flip(tmp_path / "new", before.st_size - SAMPLED_BYTES - 1)
    os.utime(tmp_path / "new", ns=(before.st_atime_ns, before.st_mtime_ns))
    os.rename(tmp_path / "new", path)
    assert isinstance(climb(cached, record(tmp_path / "linked"))[0], Different)
    assert climb(cached, record(checkpoint))[0] == Equal("full")


def test_chmod_together_with_changed_bytes_is_different(checkpoint: Path) -> None:
    cached = loaded(checkpoint)
    path = checkpoint / "model-00002-of-00002.safetensors"
    before = path.stat()
    flip(path, before.st_size - SAMPLED_BYTES - 1)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    path.chmod(0o400)
    assert isinstance(climb(cached, record(checkpoint))[0], Different)
    assert climb(cached, record(checkpoint), "sampled")[0] == Equal("sample")


def test_digests_of_other_files_say_nothing() -> None:
    """An engine made them for the generation before; the next one read another file."""
    cached = msgspec.structs.replace(made(1, full="a"), extra=made(2).files)
    asked = msgspec.structs.replace(made(9, full="b"), extra=made(3, 2).files)
    assert identity.decide(cached, asked) == Need("sample", ("cached", "asked"))


# ---- decide(), without files


def made(*stats: int, **digests: Any) -> CheckpointIdentity:
    return CheckpointIdentity(
        root="/m", files=[FileRecord(f"{s}.bin", 1, s, 8, 0, 0) for s in stats], **digests
    )


def test_an_empty_list_of_files_equals_nothing() -> None:
    empty = made(sample="5a", full="f0")
    for cached, asked in ((empty, empty), (empty, made(1)), (made(1), empty)):
        assert identity.decide(cached, asked) == Different(
            "a checkpoint without weight files equals no other"
        )


def test_differing_digests_count_before_equal_status() -> None:
    assert isinstance(identity.decide(made(1, full="a"), made(1, full="b")), Different)
    assert isinstance(identity.decide(made(1, sample="a"), made(1, sample="b")), Different)


def test_a_met_need_never_comes_back_and_values_alone_decide() -> None:
    digests = ("", "a", "b")
    for mode, cached_true, asked_true in itertools.product(("full", "sampled"), "ab", "ab"):
        for known in itertools.product((False, True), repeat=4):
            cached = made(1, sample=known[0] * cached_true, full=known[1] * cached_true)
            asked = made(2, sample=known[2] * asked_true, full=known[3] * asked_true)
            for _ in digests:
                decision = identity.decide(cached, asked, mode=mode)  # type: ignore[arg-type]
                if not isinstance(decision, Need):
                    break
                for side in decision.sides:
                    if side == "cached":
                        cached = msgspec.structs.replace(cached, **{decision.rung: cached_true})
                    else:
                        asked = msgspec.structs.replace(asked, **{decision.rung: asked_true})
            assert isinstance(decision, Equal if cached_true == asked_true else Different)


def test_the_wire_shape_is_an_array_per_file() -> None:
    data = msgspec.json.encode(made(7))
    assert data == (
        b'{"root":"/m","files":[["7.bin",1,7,8,0,0,""]],"sample":"","full":"","extra":[],"absent":[],"unread":[]}'
    )
    assert msgspec.json.decode(data, type=CheckpointIdentity) == made(7)


# ---- the child


def run_child(stdin: bytes, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-W", "error", "-m", "weightcached.checkpoint.identity", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=BOUND_S, check=False)


def test_the_child_fills_in_the_full_digest(checkpoint: Path) -> None:
    asked = record(checkpoint)
    done = run_child(msgspec.json.encode(asked), "full")
    assert (done.returncode, done.stderr) == (0, b"")
    assert msgspec.json.decode(done.stdout, type=CheckpointIdentity) == identity.with_full(asked)


def test_the_child_says_in_one_line_why_it_failed(checkpoint: Path) -> None:
    asked = record(checkpoint)
    shutil.rmtree(checkpoint)
    done = run_child(msgspec.json.encode(asked), "full")
    assert (done.returncode, done.stdout) == (1, b"")
    path = checkpoint / "model-00001-of-00002.safetensors"
    assert (
        done.stderr.decode()
        == f"weight file {path} is gone since it was recorded: No such file or directory\n"
    )


def test_the_child_refuses_what_is_no_identity() -> None:
    done = run_child(b'{"root": 7}', "full")
    assert (done.returncode, done.stdout) == (1, b"")
    assert (
        done.stderr
        == b"the identity on standard input does not decode: Expected `str`, got `int` - at `$.root`\n"
    )
    usage = run_child(b"")
    assert (usage.returncode, usage.stderr) == (
        2,
        b"usage: python -m weightcached.checkpoint.identity full [--idle] < identity.json\n",
    )


def test_the_child_runs_at_the_lowest_priority_if_nobody_waits_for_it(checkpoint: Path) -> None:
    command = [sys.executable, "-m", "weightcached.checkpoint.identity", "full", "--idle"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        # It waits for its input, so its niceness can be looked at for as long as it takes to start.
        process = psutil.Process(child.pid)
        deadline = time.monotonic() + 30
        while os.sched_getscheduler(child.pid) != os.SCHED_IDLE and time.monotonic() < deadline:
            os.sched_yield()
        assert process.nice() == 19
        assert os.sched_getscheduler(child.pid) == os.SCHED_IDLE
        child.communicate(msgspec.json.encode(record(checkpoint)))
    assert child.returncode == 0


def test_the_child_ends_with_the_daemon_that_started_it() -> None:
    code = (
        "import subprocess, sys, time\n"
        "command = [sys.executable, '-m', 'weightcached.checkpoint.identity', 'full', '--idle']\n"
        "print(subprocess.Popen(command, stdin=0).pid, flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as daemon:
        assert daemon.stdout
        child = psutil.Process(int(daemon.stdout.readline()))
        # It has its input's other end in us, so it waits until it is killed.
        while child.nice() != 19:
            time.sleep(0.01)
        daemon.kill()
        daemon.wait()
        child.wait(30)


def test_importing_identity_brings_no_heavy_module() -> None:
    code = "import sys, weightcached.checkpoint.identity; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {"weightcached.checkpoint.identity"} <= set(loaded)
    assert not {
        "torch",
        "vllm",
        "numpy",
        "safetensors",
        "hashlib",
        "concurrent.futures",
        "asyncio",
    } & set(loaded)
