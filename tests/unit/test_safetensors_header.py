"""Malformed safetensors headers: one error naming file, tensor and value, in bounded memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from tests import limits
from weightcached.checkpoint import safetensors_header
from weightcached.checkpoint.identity import check_headers, record_checkpoint, sample_digest
from weightcached.errors import CheckpointError

pytestmark = pytest.mark.timed


def write(path: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def tensor(
    begin: int, end: int, dtype: str = "U8", shape: list[Any] | None = None
) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [end - begin] if shape is None else shape,
        "data_offsets": [begin, end],
    }


def refusal(path: Path) -> str:
    record = record_checkpoint(str(path.parent))
    start = time.monotonic()
    with pytest.raises(CheckpointError) as raised:
        check_headers(record)
    limits.hold("a header refused", time.monotonic() - start, 2)
    with pytest.raises(CheckpointError) as again:
        sample_digest(record)
    assert str(again.value) == str(raised.value)
    prefix = f"weight file {path}"
    assert str(raised.value).startswith(prefix)
    return str(raised.value).removeprefix(prefix)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_the_tensors_of_all_files_are_counted(tmp_path: Path) -> None:
    save_file(
        {"a": np.zeros((3, 5), np.float32), "b": np.zeros(0, np.int8)},
        tmp_path / "1.safetensors",
        {"k": "v"},
    )
    save_file({"c": np.zeros((), np.float16)}, tmp_path / "2.safetensors")
    assert check_headers(record_checkpoint(str(tmp_path))) == 60 + 2


def test_files_of_other_kinds_count_with_their_size(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    assert check_headers(record_checkpoint(str(tmp_path))) == 6
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError) as raised:
        check_headers(record_checkpoint(str(tmp_path)))
    assert (
        str(raised.value)
        == f"weight file {tmp_path}/pytorch_model.bin has 0 bytes: download it again"
    )


def test_sub_byte_types_take_whole_bytes(path: Path) -> None:
    write(path, {"a": tensor(0, 3, "F4", [2, 3]), "b": tensor(3, 6, "F6_E2M3", [4])}, bytes(6))
    assert check_headers(record_checkpoint(str(path.parent))) == 6


@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_file_shorter_than_its_length_field_is_refused(path: Path, length: int) -> None:
    path.write_bytes(bytes(length))
    assert (
        refusal(path)
        == f" has {length} bytes: a safetensors file has at least 8; download it again"
    )


@pytest.mark.parametrize("length", [100_000_001, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
def test_a_huge_header_length_is_refused_without_allocating_it(path: Path, length: int) -> None:
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert refusal(path) == (
        f": its header says it has {length} bytes, at most 100000000 are allowed; download it again"
    )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000  # KiB


def test_a_header_past_the_end_of_the_file_is_refused(path: Path) -> None:
    path.write_bytes((100).to_bytes(8, "little") + b"{}")
    assert (
        refusal(path)
        == ": its header says it has 100 bytes, but the file ends at 10; download it again"
    )


def test_a_file_that_was_replaced_by_garbage_is_called_changed_not_malformed(path: Path) -> None:
    save_file({"a": np.zeros(4, np.uint8)}, path)
    record = record_checkpoint(str(path.parent))
    path.write_bytes(b"garbage")
    with pytest.raises(
        CheckpointError, match=rf"^weight file {path} changed since it was recorded: size was "
    ):
        check_headers(record)


def test_a_git_lfs_pointer_is_recognised(path: Path) -> None:
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert refusal(path) == " is a Git LFS pointer, not the weights: git lfs pull"


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b"", "Input data was truncated"),
        (b"{", "Input data was truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b"\xff\xfe", "JSON is malformed: invalid character (byte 0)"),
        (b'{"__metadata__": {"a": 1}}', "Expected `str`, got `int` - at `$[...]`"),
        (b'{"a": {}} x', "JSON is malformed: trailing characters (byte 11)"),
    ],
)
def test_what_is_no_json_object_is_refused(path: Path, raw: bytes, fault: str) -> None:
    assert refusal(write(path, raw)) == f": its header is not a safetensors header: {fault}"


def test_deep_nesting_is_refused(path: Path) -> None:
    assert refusal(write(path, b'{"a":' + b"[" * 1_000_000)).startswith(
        ": its header is not a safetensors header: "
    )


U63 = (1 << 63) - 1


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        (7, "is malformed: Expected `object`, got `int`"),
        (
            {"dtype": "U8", "shape": [1]},
            "is malformed: Object missing required field `data_offsets`",
        ),
        (tensor(0, 4, shape=["4"]), "is malformed: Expected `int`, got `str` - at `$.shape[0]`"),
        (
            {**tensor(0, 4), "data_offsets": [0]},
            "is malformed: Expected `array` of length 2 - at `$.data_offsets`",
        ),
        (tensor(0, 4, "Q7"), f"has dtype 'Q7': expected {', '.join(safetensors_header._BITS)}"),
        (tensor(0, 4, shape=[-4]), "has shape [-4]: expected lengths from 0 to 2^63 - 1"),
        (
            tensor(0, 4, shape=[1 << 63]),
            f"has shape [{1 << 63}]: expected lengths from 0 to 2^63 - 1",
        ),
        (tensor(0, 4, shape=[1] * 65), "has 65 dimensions: expected at most 64"),
        (tensor(4, 0, shape=[4]), "has data_offsets [4, 0]: expected 0 <= begin <= end < 2^63"),
        (tensor(-4, 0), "has data_offsets [-4, 0]: expected 0 <= begin <= end < 2^63"),
        (
            tensor(0, 1 << 64, shape=[4]),
            f"has data_offsets [0, {1 << 64}]: expected 0 <= begin <= end < 2^63",
        ),
        (
            tensor(0, 4, "F32", [2]),
            "of dtype F32 and shape [2] does not fit its data_offsets [0, 4], which give it 4 bytes",
        ),
        (
            tensor(0, 4, "F32", [U63, U63]),
            f"of dtype F32 and shape [{U63}, {U63}] does not fit its data_offsets [0, 4], which give it 4 bytes",
        ),
    ],
)
def test_a_malformed_tensor_is_named(path: Path, entry: Any, fault: str) -> None:
    assert refusal(write(path, {"w": entry}, bytes(4))) == f": tensor 'w' {fault}"


@pytest.mark.parametrize("end", [5, 1 << 31, 1 << 40, U63])
def test_offsets_past_the_end_are_refused(path: Path, end: int) -> None:
    write(path, {"w": tensor(0, end)}, bytes(4))
    size = path.stat().st_size
    assert refusal(path) == (
        f": tensor 'w' ends at byte {size - 4 + end}, the file at {size}: it was cut short; download it again"
    )


def test_overlaps_gaps_and_rests_are_refused(path: Path) -> None:
    start = write(path, {"a": tensor(0, 4), "b": tensor(2, 6)}, bytes(6)).stat().st_size - 6
    assert refusal(path) == (
        f": tensor 'b' overlaps the tensor before it: it begins at byte {start + 2}, expected {start + 4}"
    )
    start = write(path, {"a": tensor(0, 4), "b": tensor(5, 6)}, bytes(6)).stat().st_size - 6
    assert (
        refusal(path)
        == f": tensor 'b' leaves a gap before it: it begins at byte {start + 5}, expected {start + 4}"
    )
    size = write(path, {"a": tensor(0, 4)}, bytes(6)).stat().st_size
    assert refusal(path) == (
        f": its tensors end at byte {size - 2}, but the file at {size}: 2 bytes belong to none; download it again"
    )


def test_more_tensors_than_the_limit_are_refused_before_they_take_memory(path: Path) -> None:
    write(path, b"{" + b",".join(b'"%d":0' % i for i in range(2_000_001)) + b"}")
    code = (
        "import resource, sys; from weightcached.errors import CheckpointError\n"
        "from weightcached.checkpoint.identity import check_headers, record_checkpoint\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: check_headers(record_checkpoint(sys.argv[1]))\n"
        "except CheckpointError as e: print(e)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    command = [sys.executable, "-c", code, str(path.parent)]
    text, grown_kib = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert text == f"weight file {path}: its header describes more than 500000 tensors"
    assert int(grown_kib) * 1024 < 4 * path.stat().st_size


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.integers(0, 40),
)
def test_what_we_accept_the_formats_own_library_accepts_too(
    path: Path, changes: list[tuple[int, int]], cut: int
) -> None:
    save_file(
        {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.zeros(7, np.int16)},
        path,
        {"format": "pt"},
    )
    data = bytearray(path.read_bytes())
    for offset, value in changes:
        data[offset % len(data)] = value
    path.write_bytes(data[: len(data) - cut % len(data)] if cut > 30 else data)
    try:
        check_headers(record_checkpoint(str(path.parent)))
    except CheckpointError:
        return
    try:
        with safe_open(path, framework="np") as file:
            file.keys()
    except SafetensorError as e:
        pytest.fail(f"{bytes(data)!r} was accepted, but: {e}")
