"""Digests: none of a file that changes, all cores for one file, a cache that costs only time."""

from __future__ import annotations

import os
import random
import resource
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import limits
from tests.fakes.daemon import BOUND_S
from weightcached.checkpoint import digests, files, identity
from weightcached.checkpoint.digests import CHUNK_BYTES, SAMPLE_BYTES, DigestCache, sample_ranges
from weightcached.checkpoint.identity import CheckpointIdentity
from weightcached.errors import CheckpointError

KEY = (1, 2, 3, 4, 5)
DIGEST = bytes(range(16))


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    return directory


def write(directory: Path, **contents: bytes) -> CheckpointIdentity:
    for name, content in contents.items():
        (directory / f"{name}.bin").write_bytes(content)
    return identity.record_checkpoint(str(directory), load_format="npcache")


def sparse(directory: Path, nbytes: int) -> CheckpointIdentity:
    (directory / "m.bin").touch()
    os.truncate(directory / "m.bin", nbytes)
    return identity.record_checkpoint(str(directory), load_format="npcache")


def entries(cache_home: Path) -> list[Path]:
    return sorted((cache_home / "weightcached/digests").iterdir())


# ---- samples


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.integers(0, 3 * SAMPLE_BYTES), st.integers(0, 5 * SAMPLE_BYTES)), max_size=8
    )
)
def test_ranges_cover_start_middle_and_end_of_every_tensor_once(
    lengths: list[tuple[int, int]],
) -> None:
    spans, position = [], 8
    for gap, nbytes in lengths:
        spans.append((position + gap, position + gap + nbytes))
        position += gap + nbytes
    ranges = sample_ranges(spans)
    covered = {byte for begin, end in ranges for byte in range(begin, end)}
    assert len(covered) == sum(end - begin for begin, end in ranges)
    assert ranges == sorted(ranges)
    for begin, end in spans:
        middle = max(begin, (begin + end - SAMPLE_BYTES) // 2)
        for start in (begin, middle, max(begin, end - SAMPLE_BYTES)):
            assert set(range(start, min(start + SAMPLE_BYTES, end))) <= covered
    assert len(covered) <= sum(min(end - begin, 3 * SAMPLE_BYTES) for begin, end in spans)


def test_a_sample_reads_little_of_a_large_file(model: Path) -> None:
    header = b'{"w": {"dtype": "U8", "shape": [1073741824], "data_offsets": [0, 1073741824]}}'
    (model / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(model / "m.safetensors", 8 + len(header) + (1 << 30))
    record = identity.record_checkpoint(str(model))
    before = int(Path("/proc/self/io").read_text().split()[1])
    identity.sample_digest(record)
    assert int(Path("/proc/self/io").read_text().split()[1]) - before < 32 * 1024


def test_a_file_without_tensors_of_its_own_is_sampled_over_its_length(model: Path) -> None:
    content = random.Random(1).randbytes(4 << 20)
    digests_of = {identity.sample_digest(write(model, m=content))}
    for offset in (0, 2 << 20, (4 << 20) - 1):
        changed = bytearray(content)
        changed[offset] ^= 1
        digests_of.add(identity.sample_digest(write(model, m=bytes(changed))))
    assert len(digests_of) == 4


# ---- full digests


def test_the_digest_depends_on_content_and_split_but_not_on_names_and_threads(model: Path) -> None:
    first = identity.full_digest(write(model, a=b"one", b=b"two"), workers=1)
    assert len(first) == 32
    os.rename(model / "a.bin", model / "aa.bin")
    assert identity.full_digest(write(model), workers=3) == first
    assert identity.full_digest(write(model, aa=b"onet", b=b"wo")) != first
    assert identity.full_digest(write(model, aa=b"", b=b"onetwo")) != first


def test_sample_and_full_digests_never_meet(model: Path) -> None:
    record = write(model, a=b"small enough for the sample to be everything")
    assert identity.sample_digest(record) != identity.full_digest(record)


def test_a_change_in_any_chunk_of_a_large_file_changes_the_digest(model: Path) -> None:
    nbytes = 2 * CHUNK_BYTES + 5
    seen = {identity.full_digest(sparse(model, nbytes))}
    for offset in (0, CHUNK_BYTES - 1, CHUNK_BYTES, 2 * CHUNK_BYTES, nbytes - 1):
        with (model / "m.bin").open("r+b") as file:
            file.seek(offset)
            file.write(b"x")
        seen.add(identity.full_digest(sparse(model, nbytes)))
    assert len(seen) == 6


def test_progress_counts_all_bytes_in_the_callers_thread(model: Path) -> None:
    record = sparse(model, 2 * CHUNK_BYTES + 5)
    calls: list[tuple[int, int, int]] = []

    def progress(done: int, total: int) -> None:
        calls.append((done, total, threading.get_ident()))

    identity.full_digest(record, progress=progress)
    total = 2 * CHUNK_BYTES + 5
    assert [calls[0][0], calls[-1][0], len(calls)] == [0, total, 4]
    assert {call[1:] for call in calls} == {(total, threading.get_ident())}
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)

    calls.clear()
    identity.full_digest(record, progress=progress)
    assert calls == [(total, total, threading.get_ident())]


@pytest.mark.timed
def test_a_file_that_changes_while_it_is_read_is_an_error_within_two_seconds(
    model: Path, cache_home: Path
) -> None:
    record = sparse(model, 128 * CHUNK_BYTES)
    changed_at: list[float] = []

    def change(done: int, total: int) -> None:
        if done and not changed_at:
            with (model / "m.bin").open("r+b") as file:
                file.write(b"x")
            changed_at.append(time.monotonic())

    with pytest.raises(CheckpointError) as raised:
        identity.full_digest(record, progress=change)
    limits.hold("the change is seen", time.monotonic() - changed_at[0], 2)
    assert str(raised.value) == (
        f"weight file {model}/m.bin changed since it was recorded: mtime_ns was {record.files[0].mtime_ns}, "
        f"is {(model / 'm.bin').stat().st_mtime_ns}; "
        "wait until nothing writes to the checkpoint, then: weightcachectl reload"
    )
    assert entries(cache_home) == []


def test_a_change_behind_the_readers_back_is_seen_at_the_end(model: Path) -> None:
    record = write(model, m=b"content")
    source = digests.Source(str(model / "m.bin"), record.files[0].stat)
    reading = files.open_recorded(*source)
    assert os.read(reading.__enter__(), 7) == b"content"
    (model / "m.bin").write_bytes(b"CONTENT")
    # Its clock may go on in steps of some milliseconds.
    os.utime(model / "m.bin", ns=(1, 1))
    with pytest.raises(CheckpointError, match="mtime_ns was"):
        reading.__exit__(None, None, None)


def test_a_file_cut_short_while_it_is_read_is_an_error(model: Path) -> None:
    record = write(model, m=b"content")
    source = digests.Source(str(model / "m.bin"), record.files[0].stat)
    fd = os.open(source.path, os.O_RDONLY)
    os.truncate(source.path, 3)
    with pytest.raises(CheckpointError) as raised:
        files.read_at(fd, source.path, memoryview(bytearray(7)), 0)
    os.close(fd)
    assert (
        str(raised.value)
        == f"weight file {model}/m.bin ends at byte 3, expected 7: it was cut short"
    )


@pytest.mark.timed
def test_a_failing_progress_callback_ends_the_work(model: Path) -> None:
    record = sparse(model, 128 * CHUNK_BYTES)

    def refuse(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        identity.full_digest(record, progress=refuse)
    # Reading all of it would take many times as long.
    limits.hold("the work ends", time.monotonic() - start, 2)
    assert [t.name for t in threading.enumerate() if t.name.startswith("weight-digest")] == []


def test_memory_and_descriptors_stay_bounded(model: Path) -> None:
    record = sparse(model, 8 * CHUNK_BYTES)
    fds = len(os.listdir("/proc/self/fd"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    identity.full_digest(record)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB
    assert len(os.listdir("/proc/self/fd")) == fds


@pytest.mark.timed
def test_one_core_digests_at_least_one_and_a_half_gb_a_second(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The published figures come from bench/identity.py; this notices a slow path only.
    record = sparse(model, 4 * CHUNK_BYTES)
    times_s = []
    for i in range(3):
        monkeypatch.setenv("XDG_CACHE_HOME", str(model / f"cache{i}"))
        start = time.process_time()  # of all threads: other work on this machine does not count
        identity.full_digest(record, workers=1)
        times_s.append(time.process_time() - start)
    limits.hold("a GB on one core", min(times_s) * 1e9 / (4 * CHUNK_BYTES), 1 / 1.5)


# ---- the cache


def test_an_entry_is_private_and_found_by_exactly_its_status(cache_home: Path) -> None:
    cache = DigestCache.of_user()
    cache.put(KEY, DIGEST)
    assert cache.get(KEY) == DIGEST
    for i in range(5):
        assert cache.get(cast(Any, (*KEY[:i], 99, *KEY[i + 1 :]))) is None
    (entry,) = entries(cache_home)
    assert entry.name == "1-2.json"
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (entry, entry.parent, entry.parent.parent)]
    assert modes == [0o600, 0o700, 0o700]


def test_an_entry_has_the_last_few_states_of_its_file(cache_home: Path) -> None:
    # chmod and a new link keep the inode: the loaded state is compared with the present one.
    cache = DigestCache.of_user()
    states = [(1, 2, 3, 4, ctime) for ctime in range(5)]
    for number, state in enumerate(states):
        cache.put(state, bytes([number] * 16))
    cache.put(states[4], bytes([4] * 16))
    assert [cache.get(state) for state in states] == [None, *(bytes([n] * 16) for n in range(1, 5))]
    assert len(entries(cache_home)) == 1


def test_a_digest_that_was_made_outlives_its_file(model: Path) -> None:
    record = write(model, m=b"content")
    made = identity.full_digest(record)
    (model / "m.bin").chmod(0o400)
    assert identity.full_digest(record) == made
    (model / "m.bin").unlink()
    assert identity.full_digest(record) == made


def test_no_damaged_entry_gives_a_digest(cache_home: Path) -> None:
    cache = DigestCache.of_user()
    cache.put(KEY, DIGEST)
    (entry,) = entries(cache_home)
    intact = entry.read_bytes()
    for position in range(len(intact)):
        damaged = bytearray(intact)
        damaged[position] ^= 1
        entry.write_bytes(damaged)
        assert cache.get(KEY) is None, position
        entry.write_bytes(intact[:position])
        assert cache.get(KEY) is None, position
    entry.write_bytes(intact)
    assert cache.get(KEY) == DIGEST


def test_what_others_can_write_to_is_not_trusted(cache_home: Path) -> None:
    cache = DigestCache.of_user()
    cache.put(KEY, DIGEST)
    (entry,) = entries(cache_home)
    entry.chmod(0o666)
    assert cache.get(KEY) is None
    entry.chmod(0o600)
    entry.parent.chmod(0o777)
    assert DigestCache.of_user().get(KEY) is None
    entry.parent.chmod(0o700)
    assert DigestCache.of_user().get(KEY) == DIGEST


def test_a_link_or_fifo_in_place_of_an_entry_is_a_miss(cache_home: Path, tmp_path: Path) -> None:
    cache = DigestCache.of_user()
    cache.put(KEY, DIGEST)
    (entry,) = entries(cache_home)
    os.rename(entry, tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    assert cache.get(KEY) is None
    entry.unlink()
    os.mkfifo(entry)
    assert cache.get(KEY) is None
    cache.put(KEY, DIGEST)
    assert cache.get(KEY) == DIGEST


@pytest.mark.parametrize("base", ["relative/cache", "/proc/nowhere", "/dev/null"])
def test_without_a_usable_directory_digests_are_made_and_not_kept(
    model: Path, monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    monkeypatch.chdir(model)
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    record = write(model, m=b"content")
    assert identity.full_digest(record) == identity.full_digest(record)
    assert os.listdir(model) == ["m.bin"]


def test_many_processes_writing_one_entry_leave_it_whole(cache_home: Path) -> None:
    code = (
        "import sys; from weightcached.checkpoint.digests import DigestCache\n"
        f"cache, key, digest = DigestCache.of_user(), {KEY}, {DIGEST!r}\n"
        "sys.stdin.read()\n"
        "for _ in range(300):\n"
        "    cache.put(key, digest)\n"
        "    assert cache.get(key) == digest\n"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) for _ in range(3)
    ]
    for child in children:  # all at once
        assert child.stdin is not None
        child.stdin.close()
    assert [child.wait(timeout=BOUND_S) for child in children] == [0, 0, 0]
    assert [entry.name for entry in entries(cache_home)] == ["1-2.json"]
    assert DigestCache.of_user().get(KEY) == DIGEST
