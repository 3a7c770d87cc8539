"""The cost of each rung of the checkpoint identity on this machine: figures of docs/identity.md.

    python bench/identity.py [--directory DIR] [--gib 2] [--shards 200] [--json FILE]

Makes its own checkpoints below DIR (default: a temporary directory; needs --gib of space) and
removes them. "cold" drops the file's own pages from the page cache first; everything else is served
by it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weightcached.checkpoint import digests, identity

_REPEATS = 5


def write_checkpoint(path: Path, *, tensors: int, nbytes: int) -> None:
    """One safetensors file of U8 tensors of equal size with pseudo-random bytes."""
    each = nbytes // tensors
    header = {
        f"model.layers.{i}.weight": {
            "dtype": "U8",
            "shape": [each],
            "data_offsets": [i * each, (i + 1) * each],
        }
        for i in range(tensors)
    }
    raw = json.dumps(header).encode()
    block = random.Random(20261129).randbytes(1 << 20)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        left = each * tensors
        while left:
            left -= file.write(block[: min(left, len(block))])
        file.flush()
        os.fsync(file.fileno())


def median_s(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Median wall-clock seconds of a few runs."""
    times = []
    for _ in range(_REPEATS):
        before()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def drop_pages(path: Path) -> None:
    """Forget this file's pages, so that the next read comes from the disk."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def measure_rungs(directory: Path, *, gib: float) -> dict[str, Any]:
    """The rungs on one file of 300 tensors."""
    path = directory / "model.safetensors"
    write_checkpoint(path, tensors=300, nbytes=int(gib * (1 << 30)))
    record = identity.record_checkpoint(str(directory))
    nbytes = record.files[0].size

    def forget() -> None:
        # The digest cache would answer the second run.
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(dir=directory)

    def digest(workers: int | None) -> float:
        return (
            nbytes / median_s(lambda: identity.full_digest(record, workers=workers), forget) / 1e9
        )

    identity.full_digest(record)
    figures = {
        "bytes": nbytes,
        "headers_ms": 1e3 * median_s(lambda: identity.check_headers(record)),
        "sample_ms": 1e3 * median_s(lambda: identity.sample_digest(record)),
        "sample_cold_ms": 1e3
        * median_s(lambda: identity.sample_digest(record), lambda: drop_pages(path)),
        "full_one_core_gb_per_s": digest(1),
        "full_all_cores_gb_per_s": digest(None),
        "full_cached_ms": 1e3 * median_s(lambda: identity.full_digest(record)),
    }
    path.unlink()
    return figures


def measure_shards(directory: Path, *, shards: int) -> dict[str, Any]:
    """The first rung on a checkpoint of many shards with an index."""
    names = [f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)]
    for name in names:
        write_checkpoint(directory / name, tensors=10, nbytes=10_000)
    index = {"weight_map": {f"model.layers.{i}.weight": name for i, name in enumerate(names)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    cached = identity.record_checkpoint(str(directory))

    def first_rung() -> None:
        asked = identity.record_checkpoint(str(directory))
        if identity.decide(cached, asked) != identity.Equal("files"):
            raise SystemExit("the first rung did not decide: something writes to the checkpoint")

    return {
        "shards": shards,
        "record_and_decide_ms": 1e3 * median_s(first_rung),
        "changed_files_ms": 1e3 * median_s(lambda: identity.changed_files(cached)),
        "headers_ms": 1e3 * median_s(lambda: identity.check_headers(cached)),
        "sample_ms": 1e3 * median_s(lambda: identity.sample_digest(cached)),
    }


def main() -> None:
    """Measure, print a table, and write the figures as JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, help="where to make the checkpoints")
    parser.add_argument(
        "--gib", type=float, default=2.0, help="size of the large file (default: %(default)s)"
    )
    parser.add_argument(
        "--shards", type=int, default=200, help="shards of the many-file one (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as made:
        os.environ["XDG_CACHE_HOME"] = str(Path(made, "cache"))
        large, many = Path(made, "large"), Path(made, "many")
        large.mkdir()
        many.mkdir()
        figures: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{platform.machine()}, {digests.usable_cores()} cores, Linux {platform.release()}",
            "python": platform.python_version(),
            "large_file": measure_rungs(large, gib=arguments.gib),
            "many_shards": measure_shards(many, shards=arguments.shards),
        }
    for part in ("large_file", "many_shards"):
        for name, value in figures[part].items():
            print(
                f"{part:12} {name:26} {value:14,.2f}"
                if isinstance(value, float)
                else f"{part:12} {name:26} {value:14,}"
            )
    text = json.dumps(figures, indent=2)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
