"""The watch sees each file that a load reads, by whatever reader, and nothing that it does not read.

tests/engine/test_watch.py compares it with what the kernel sees, for vLLM's own loaders.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from safetensors import safe_open

from tests.fakes.daemon import BOUND_S
from weightcached.checkpoint.identity import CheckpointIdentity, record_checkpoint
from weightcached.errors import LoadError
from weightcached.loader.watch import Watch

INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two weight files, and one of each other kind in a sub-folder."""
    root = tmp_path / "model"
    (root / "sub").mkdir(parents=True)
    weights = {"w": torch.ones(4)}
    for name in ("a.safetensors", "b.safetensors", "sub/c.safetensors"):
        safetensors.torch.save_file(weights, root / name)
    torch.save(weights, root / "sub/d.bin")
    np.save(root / "sub/e.npy", np.ones(4))
    (root / "sub/modules.json").write_text("{}")
    return root


def watched(
    model: Path, read: Callable[[], object], load_format: str = "auto"
) -> CheckpointIdentity:
    watch = Watch(record_checkpoint(str(model)))
    with watch.watching():
        read()
    return watch.read(load_format)


def open_with_safetensors(path: Path) -> None:
    # By the name that this module imported.
    with safe_open(path, framework="pt") as f:
        f.get_tensor("w")


READERS: dict[str, Callable[[Path], object]] = {
    "sub/c.safetensors": safetensors.torch.load_file,
    "sub/d.bin": lambda path: torch.load(path, weights_only=True),
    "sub/e.npy": lambda path: np.load(path, mmap_mode="r"),
    "sub/modules.json": lambda path: path.read_text(),
}


@pytest.mark.parametrize("name", READERS)
def test_every_reader_is_seen_below_the_root(model: Path, name: str) -> None:
    def read() -> None:
        for file in ("a.safetensors", "b.safetensors"):
            open_with_safetensors(model / file)
        READERS[name](model / name)

    found = watched(model, read)
    assert found.names == ["a.safetensors", "b.safetensors", name]
    assert (found.unread, found.sample) == ([], "")


def test_chosen_file_that_is_not_read_is_unread(model: Path) -> None:
    found = watched(model, lambda: open_with_safetensors(model / "b.safetensors"))
    assert ([file.name for file in found.files], found.unread) == (
        ["b.safetensors"],
        ["a.safetensors"],
    )


@pytest.mark.parametrize("load_format", ["runai_streamer", "fastsafetensors", "instanttensor"])
def test_readers_in_native_code_read_all_that_was_chosen(model: Path, load_format: str) -> None:
    found = watched(model, lambda: None, load_format)
    assert found.names == ["a.safetensors", "b.safetensors"]


def test_a_load_that_reads_nothing_that_was_chosen_is_refused(model: Path, tmp_path: Path) -> None:
    """As when the Hub moves between the record and the load."""
    (tmp_path / "other").mkdir()
    safetensors.torch.save_file({"w": torch.ones(4)}, tmp_path / "other/a.safetensors")
    with pytest.raises(LoadError, match="read none of the weight files"):
        watched(model, lambda: open_with_safetensors(tmp_path / "other/a.safetensors"))


def test_elsewhere_what_is_called_as_weights_are_counts(model: Path, tmp_path: Path) -> None:
    safetensors.torch.save_file({"w": torch.ones(4)}, tmp_path / "encoder.safetensors")
    (tmp_path / "cache.json").write_text("{}")

    def read() -> None:
        open_with_safetensors(model / "a.safetensors")
        open_with_safetensors(tmp_path / "encoder.safetensors")
        (tmp_path / "cache.json").read_text()

    assert watched(model, read).names == ["a.safetensors", str(tmp_path / "encoder.safetensors")]


def test_elsewhere_the_caches_of_libraries_do_not_count_and_that_of_the_hub_does(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    files = [
        tmp_path / "cache" / name
        for name in ("flashinfer/kernel.bin", "huggingface/hub/models--a--b/snapshots/c/w.bin")
    ]
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_bytes(b"w")

    def read() -> None:
        open_with_safetensors(model / "a.safetensors")
        for file in files:
            file.read_bytes()

    assert watched(model, read).names == ["a.safetensors", str(files[1])]


def test_other_ways_to_a_file_are_ways_to_it(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "blob").write_bytes((model / "a.safetensors").read_bytes())
    (model / "a.safetensors").unlink()
    (model / "a.safetensors").symlink_to(tmp_path / "blob")

    def read() -> None:
        (tmp_path / "blob").read_bytes()
        open_with_safetensors(model / "b.safetensors")

    found = watched(tmp_path / "link", read)
    assert (found.names, found.unread) == (["a.safetensors", "b.safetensors"], [])


def test_threads_are_seen(model: Path) -> None:
    def read() -> None:
        threads = [
            threading.Thread(target=open_with_safetensors, args=(model / f"{name}.safetensors",))
            for name in "ab"
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert watched(model, read).names == ["a.safetensors", "b.safetensors"]


def test_names_looked_for_in_vain_are_absent_unless_the_load_makes_them(model: Path) -> None:
    def read() -> None:
        open_with_safetensors(model / "a.safetensors")
        assert not (model / "sub/model.safetensors").is_file()
        with pytest.raises(FileNotFoundError):
            (model / "sub/adapter.json").read_bytes()
        made = model / "sub/made.npy"
        assert not made.exists()
        np.save(made, np.ones(2))
        np.load(made)

    found = watched(model, read)
    assert found.absent == ["sub/adapter.json", "sub/model.safetensors"]
    assert found.names == ["a.safetensors", "sub/made.npy"]


def test_what_is_read_before_and_after_does_not_count(model: Path) -> None:
    watch = Watch(record_checkpoint(str(model)))
    (model / "sub/modules.json").read_text()
    with watch.watching():
        open_with_safetensors(model / "a.safetensors")
    open_with_safetensors(model / "b.safetensors")
    assert not (model / "sub/never").exists()
    found = watch.read("auto")
    assert (found.names, found.absent) == (["a.safetensors"], [])


def test_all_that_was_chosen_read_and_nothing_else_keeps_the_sample(model: Path) -> None:
    import msgspec

    record = msgspec.structs.replace(record_checkpoint(str(model)), sample="5a")
    watch = Watch(record)
    with watch.watching():
        for name in "ab":
            open_with_safetensors(model / f"{name}.safetensors")
        assert not (model / INDEX).exists()
    assert watch.read("auto") == record


def test_without_a_watch_opening_costs_no_error() -> None:
    """The hook stays for good; a descriptor, a name with a NUL and an odd object go through it."""
    code = (
        "import os\n"
        "from weightcached.checkpoint.identity import CheckpointIdentity\n"
        "from weightcached.loader.watch import Watch\n"
        "with Watch(CheckpointIdentity(root='/')).watching():\n"
        "    open(os.dup(1), 'w').close()\n"
        "    for name in ('a\\0b', b'\\xff'):\n"
        "        try: open(name)\n"
        "        except (OSError, ValueError): pass\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=BOUND_S)
