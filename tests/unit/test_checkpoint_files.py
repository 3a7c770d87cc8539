"""weightcached.checkpoint.files: the files that an engine reads; bad ones are refused at once."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests import limits
from tests.fakes.daemon import BOUND_S
from weightcached.checkpoint import files as checkpoint
from weightcached.checkpoint.identity import record_checkpoint
from weightcached.errors import CheckpointError

pytestmark = pytest.mark.timed


def make(directory: Path, *names: str) -> Path:
    for name in names:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"content")
    return directory


def index(directory: Path, *shards: str, name: str = "model.safetensors.index.json") -> Path:
    (directory / name).write_text(
        json.dumps({"weight_map": {f"t{i}": shard for i, shard in enumerate(shards)}})
    )
    return directory


def names(model: Path | str, load_format: str = "auto", revision: str | None = None) -> list[str]:
    return [
        f.name
        for f in record_checkpoint(str(model), load_format=load_format, revision=revision).files
    ]


def refusal(model: Path | str, load_format: str = "auto", revision: str | None = None) -> str:
    start = time.monotonic()
    with pytest.raises(CheckpointError) as raised:
        names(model, load_format, revision)
    limits.hold("a checkpoint refused", time.monotonic() - start, 2)
    return str(raised.value)


# ---- which files


@pytest.mark.parametrize(
    ("present", "load_format", "read"),
    [
        (
            ["model.safetensors", "model.bin", "x.pt", "config.json", ".hidden.safetensors"],
            "auto",
            ["model.safetensors"],
        ),
        (
            ["pytorch_model.bin", "training_args.bin", "optimizer.bin", "x.pt"],
            "auto",
            ["pytorch_model.bin"],
        ),
        (["x.pt", "optimizer.pt", "scheduler.pt", "scaler.pt"], "auto", ["x.pt"]),
        (["model.safetensors", "model.bin", "x.pt"], "pt", ["x.pt"]),
        (["model.safetensors", "model.bin", "x.pt"], "npcache", ["model.bin"]),
        (["consolidated.safetensors", "model.safetensors"], "auto", ["consolidated.safetensors"]),
        (
            ["consolidated.safetensors", "model.safetensors"],
            "mistral",
            ["consolidated.safetensors"],
        ),
        (
            ["consolidated.safetensors", "z.safetensors"],
            "hf",
            ["consolidated.safetensors", "z.safetensors"],
        ),
        (["m-q4.gguf", "config.json"], "gguf", ["m-q4.gguf"]),
        (
            ["p10.safetensors", "p9.safetensors", "p1.safetensors"],
            "auto",
            [f"p{i}.safetensors" for i in (1, 9, 10)],
        ),
    ],
)
def test_the_files_of_a_load_format_are_chosen(
    tmp_path: Path, present: list[str], load_format: str, read: list[str]
) -> None:
    assert names(make(tmp_path, *present), load_format) == read


def test_files_that_the_index_does_not_name_are_left_out(tmp_path: Path) -> None:
    make(tmp_path, "model-1.safetensors", "model-2.safetensors", "consolidated_old.safetensors")
    assert names(
        index(tmp_path, "model-1.safetensors", "model-2.safetensors", "model-2.safetensors"), "hf"
    ) == [
        "model-1.safetensors",
        "model-2.safetensors",
    ]


def test_the_index_names_shards_in_subfolders(tmp_path: Path) -> None:
    make(tmp_path, "shards/model-1.safetensors", "shards/model-2.safetensors")
    assert names(index(tmp_path, "shards/model-1.safetensors", "./shards/model-2.safetensors")) == [
        "shards/model-1.safetensors",
        "shards/model-2.safetensors",
    ]


def test_weights_in_subfolders_are_left_to_the_load_that_reads_them(tmp_path: Path) -> None:
    make(
        tmp_path,
        "model.safetensors",
        "2_Dense/model.safetensors",
        ".cache/x.safetensors",
        "run/optimizer.pt",
    )
    assert names(tmp_path) == ["model.safetensors"]


def test_missing_shards_are_named(tmp_path: Path) -> None:
    make(tmp_path, "a.safetensors")
    index(tmp_path, "a.safetensors", "c.safetensors", "b.safetensors")
    assert refusal(tmp_path) == (
        f"checkpoint index {tmp_path}/model.safetensors.index.json names shards that are missing: "
        "b.safetensors, c.safetensors; download them again"
    )


def test_missing_shards_of_a_bin_index_are_named(tmp_path: Path) -> None:
    make(tmp_path, "pytorch_model-1.bin")
    index(
        tmp_path, "pytorch_model-1.bin", "pytorch_model-2.bin", name="pytorch_model.bin.index.json"
    )
    assert refusal(tmp_path) == (
        f"checkpoint index {tmp_path}/pytorch_model.bin.index.json names shards that are missing: "
        "pytorch_model-2.bin; download them again"
    )


def test_an_index_pointing_out_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "m", "a.safetensors")
    make(tmp_path, "secret.safetensors")
    for shard in ("../secret.safetensors", str(tmp_path / "secret.safetensors")):
        index(tmp_path / "m", shard)
        assert refusal(tmp_path / "m") == (
            f"checkpoint index {tmp_path}/m/model.safetensors.index.json names {shard!r}, outside the checkpoint: "
            "edit the index"
        )


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"weight_map": {"a": 1}}', "[" * 100_000, '{"weight_map": "\ud800"}']
)
def test_a_malformed_index_is_refused(tmp_path: Path, text: str) -> None:
    make(tmp_path, "a.safetensors")
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    pattern = (
        rf"checkpoint index {re.escape(str(path))} is malformed: .+; download the checkpoint again"
    )
    assert re.fullmatch(pattern, refusal(tmp_path))


def test_a_gguf_file_is_a_checkpoint_and_its_shards_belong_together(tmp_path: Path) -> None:
    make(tmp_path, "m-q4.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf")
    assert names(tmp_path / "m-q4.gguf") == ["m-q4.gguf"]
    assert names(tmp_path / "big-00001-of-00002.gguf") == [
        "big-00001-of-00002.gguf",
        "big-00002-of-00002.gguf",
    ]
    (tmp_path / "big-00002-of-00002.gguf").unlink()
    assert refusal(tmp_path / "big-00001-of-00002.gguf") == (
        f"weight file {tmp_path}/big-00002-of-00002.gguf cannot be read: No such file or directory; "
        "download the checkpoint again"
    )


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "config.json", "m.safetensors")
    assert refusal(tmp_path / "m.safetensors") == (
        f"model {tmp_path}/m.safetensors is a file: expected a directory, a .gguf file or a Hub repository"
    )
    assert refusal(tmp_path, "npcache") == (
        f"checkpoint {tmp_path} has no weight files that load format 'npcache' reads: expected *.bin or *.pt; "
        "name another model or load format"
    )
    assert refusal(tmp_path, "dummy") == (
        "load format 'dummy' reads no weight files that can be compared: expected auto, hf, safetensors, "
        "fastsafetensors, instanttensor, runai_streamer, sharded_state, runai_streamer_sharded, mistral, pt, npcache, "
        "gguf"
    )
    assert refusal("s3://bucket/model") == (
        "model 's3://bucket/model' is neither a directory nor a .gguf file nor a Hub repository: "
        "name one of these that this machine can read"
    )


# ---- the Hub cache


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repo = tmp_path / "hub/models--org--name"
    make(repo, "snapshots/c0/model.safetensors", "snapshots/c1/pytorch_model.bin")
    (repo / "refs/pr").mkdir(parents=True)
    (repo / "refs/main").write_text("c0\n")
    (repo / "refs/pr/1").write_text("c1")
    return repo


def test_a_hub_repository_is_its_snapshot_in_the_local_cache(hub: Path) -> None:
    assert record_checkpoint("org/name").root == str(hub / "snapshots/c0")
    assert names("org/name") == ["model.safetensors"]
    assert names("org/name", revision="pr/1") == ["pytorch_model.bin"]
    assert names("org/name", revision="c1") == ["pytorch_model.bin"]


def test_a_download_directory_takes_the_place_of_the_hub_cache(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "/nonexistent")
    found = record_checkpoint("org/name", download_dir=str(hub.parent))
    assert found.root == str(hub / "snapshots/c0")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HF_HUB_CACHE": "/x/hub", "HF_HOME": "/y"}, "/x/hub"),
        ({"HF_HOME": "/y"}, "/y/hub"),
        ({"XDG_CACHE_HOME": "/z"}, "/z/huggingface/hub"),
        ({"HOME": "/h"}, "/h/.cache/huggingface/hub"),
        ({"HOME": "/h", "HF_HOME": "~/hf"}, "/h/hf/hub"),
    ],
)
def test_the_hub_cache_is_where_huggingface_hub_looks(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert checkpoint.hub_cache_dir() == expected


def test_a_repository_that_is_not_in_the_cache_is_refused_with_the_command_to_run(
    hub: Path,
) -> None:
    assert refusal("org/other") == (
        f"model org/other at revision main is neither a directory nor in the Hub cache {hub.parent} "
        f"(HF_HUB_CACHE is {hub.parent}): hf download org/other"
    )
    assert refusal("org/name", revision="v2") == (
        f"model org/name at revision v2 is neither a directory nor in the Hub cache {hub.parent} "
        f"(HF_HUB_CACHE is {hub.parent}): hf download org/name --revision v2"
    )
    assert refusal("org/name", revision="../x") == (
        "revision '../x' of model org/name is malformed: expected a branch, tag or commit"
    )


def test_a_hub_model_in_both_formats_counts_with_both(hub: Path) -> None:
    # Which one the engine reads depends on whether the Hub answers it.
    make(hub, "snapshots/c0/consolidated.safetensors")
    index(hub / "snapshots/c0", "model.safetensors")
    assert names("org/name") == ["consolidated.safetensors", "model.safetensors"]


def test_without_a_network_vllm_takes_the_snapshot_for_a_directory(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(hub / "snapshots/c0", "consolidated.safetensors", "model.safetensors")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert names("org/name") == ["consolidated.safetensors"]


def test_revision_without_weights_names_the_revisions_that_have_them(hub: Path) -> None:
    shutil.rmtree(hub / "snapshots/c1")
    (hub / "snapshots/c2").mkdir()
    (hub / "snapshots/c2/config.json").write_text("{}")
    (hub / "refs/main").write_text("c2")
    for model in ("org/name", hub / "snapshots/c2"):
        assert refusal(model) == (
            f"checkpoint {hub}/snapshots/c2 has no weight files that load format 'auto' reads: only a part of this "
            "revision was downloaded; complete is revision c0: download this one, or pin that one with 'revision: c0' "
            "beside 'model:'"
        )


def test_only_links_to_blobs_named_by_their_content_give_a_blob(tmp_path: Path) -> None:
    make(tmp_path, f"blobs/{'a' * 64}", f"blobs/{'b' * 40}", f"other/{'c' * 64}", "blobs/d")
    root = make(tmp_path / "m", "4.safetensors")
    (root / "1.safetensors").symlink_to(f"../blobs/{'a' * 64}")
    (root / "2.safetensors").symlink_to(f"../blobs/{'b' * 40}")
    (root / "3.safetensors").symlink_to(f"../other/{'c' * 64}")
    assert [f.blob for f in record_checkpoint(str(root)).files] == ["a" * 64, "b" * 40, "", ""]


# ---- bad files


def test_a_fifo_in_place_of_a_shard_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    assert (
        refusal(tmp_path)
        == f"weight file {tmp_path}/model.safetensors is a FIFO: expected a regular file"
    )


def test_a_directory_in_place_of_a_shard_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    assert (
        refusal(tmp_path)
        == f"weight file {tmp_path}/model.safetensors is a directory: expected a regular file"
    )


def test_a_broken_link_in_place_of_a_shard_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("gone")
    assert refusal(tmp_path) == (
        f"weight file {tmp_path}/model.safetensors cannot be read: No such file or directory; "
        "download the checkpoint again"
    )


def test_a_fifo_in_place_of_the_index_is_refused_at_once(tmp_path: Path) -> None:
    make(tmp_path, "model.safetensors")
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    assert (
        refusal(tmp_path)
        == f"file {tmp_path}/model.safetensors.index.json is a FIFO: expected a regular file"
    )


def test_a_fifo_put_in_place_after_recording_does_not_hold_up_the_reader(tmp_path: Path) -> None:
    make(tmp_path, "model.safetensors")
    recorded = record_checkpoint(str(tmp_path)).files[0].stat
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")
    path = str(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as raised, checkpoint.open_recorded(path, recorded):
        pass
    assert str(raised.value) == f"weight file {path} is a FIFO: expected a regular file"


def test_an_unreadable_file_is_refused() -> None:
    # Permission bits do not bind root, so a child of another user looks.
    with tempfile.TemporaryDirectory() as made:
        directory = make(Path(made), "model.safetensors")
        directory.chmod(0o755)
        (directory / "model.safetensors").chmod(0)
        code = (
            "import os, sys; from weightcached.errors import CheckpointError\n"
            "from weightcached.checkpoint.identity import record_checkpoint\n"
            "if os.geteuid() == 0: os.setuid(65534)\n"
            "try: record_checkpoint(sys.argv[1])\n"
            "except CheckpointError as e: print(e, end='')"
        )
        command = [sys.executable, "-c", code, made]
        done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)
        assert done.stderr == ""
        assert done.stdout == (
            f"weight file {made}/model.safetensors cannot be read: Permission denied; chmod u+r it or run as its owner"
        )


def test_a_file_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/m\xff.safetensors", "wb"):
        pass
    assert (
        refusal(tmp_path)
        == "path 'm\\udcff.safetensors' is longer than 1000 characters or not UTF-8: rename it"
    )


def test_a_record_is_older_than_the_clock_tick_of_its_files(tmp_path: Path) -> None:
    # Otherwise a second change within the tick would leave all recorded numbers as they are.
    make(tmp_path, "model.safetensors")
    record = record_checkpoint(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"CONTENT")
    assert (tmp_path / "model.safetensors").stat().st_ctime_ns != record.files[0].ctime_ns


class ClockOfABusyWriter:
    """A clock that writes to the file again whenever somebody waits, 1 ms before each look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.waited_s = 0.0

    def time_ns(self) -> int:
        return self._path.stat().st_ctime_ns + 1_000_000

    def monotonic(self) -> float:
        return self.waited_s

    def sleep(self, seconds: float) -> None:
        self.waited_s += seconds
        self._path.write_bytes(b"content")


def test_a_checkpoint_that_is_being_written_is_refused_within_two_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "model.safetensors")
    clock = ClockOfABusyWriter(tmp_path / "model.safetensors")
    monkeypatch.setattr(checkpoint, "time", clock)
    assert refusal(tmp_path) == (
        f"weight file {tmp_path}/model.safetensors is being written: start again when the checkpoint is complete"
    )
    assert 1 <= clock.waited_s < 2
