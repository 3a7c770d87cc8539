"""Small real checkpoints on disk, and a loader's identity and key of one. Torch-free."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from weightcached.checkpoint.identity import CheckpointIdentity, FileRecord
from weightcached.index.key import WeightCacheKey

WEIGHTS = "model.safetensors"
MIB = 1 << 20


def write_checkpoint(directory: Path, *, seed: int = 1, nbytes: int = 3 * MIB) -> Path:
    """A checkpoint of `nbytes` of reproducible weights. Returns its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"architectures": ["TinyForCausalLM"]}')
    block = hashlib.shake_256(b"weights %d" % seed).digest(64 * 1024)
    (directory / WEIGHTS).write_bytes((block * (nbytes // len(block) + 1))[:nbytes])
    return directory


def identity_of(directory: Path) -> CheckpointIdentity:
    """The record of the weight files; its sample digest covers the first 4 KiB."""
    path = directory / WEIGHTS
    info = path.stat()
    record = FileRecord(
        name=WEIGHTS,
        device=info.st_dev,
        inode=info.st_ino,
        size=info.st_size,
        mtime_ns=info.st_mtime_ns,
        ctime_ns=info.st_ctime_ns,
    )
    with open(path, "rb") as f:
        sample = hashlib.sha256(f.read(4096)).hexdigest()
    return CheckpointIdentity(root=str(directory), files=[record], sample=sample)


def key_of(engine: dict[str, Any], *, role: str = "target", rank: int = 0) -> WeightCacheKey:
    """The key of an engine with these arguments."""
    return WeightCacheKey(
        checkpoint=identity_of(Path(engine["model"])),
        role=role,
        architecture="TinyForCausalLM",
        dtype=engine.get("dtype", "bfloat16"),
        tp_size=engine.get("tensor_parallel_size", 1),
        tp_rank=rank,
        stage="loaded",
        versions={"vllm": engine.get("x_vllm", "0.32.0"), "torch": "2.13.0"},
    )


def with_checkpoint(key: WeightCacheKey, **changes: str) -> WeightCacheKey:
    """The key with digests of its checkpoint set or removed."""
    return msgspec.structs.replace(
        key, checkpoint=msgspec.structs.replace(key.checkpoint, **changes)
    )
