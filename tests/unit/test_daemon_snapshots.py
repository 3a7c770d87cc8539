"""The daemon's side of snapshots: writers begin, are replaced, and end with it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.fakes.checkpoints import write_checkpoint
from tests.unit.test_daemon_caches import generation
from weightcached.config.snapshots import SnapshotSpec
from weightcached.daemon.snapshots import Snapshots


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
    async with asyncio.timeout(30):
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
