"""Small real checkpoints on disk, and a loader's identity and key of one. Torch-free."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from weightcached.checkpoint.identity import (
    CheckpointIdentity,
    record_checkpoint,
    with_sample,
)
from weightcached.index.key import WeightCacheKey

WEIGHTS = "model.safetensors"
MIB = 1 << 20


def write_checkpoint(directory: Path, *, seed: int = 1, nbytes: int = 3 * MIB) -> Path:
    """A checkpoint of `nbytes` of reproducible weights. Returns its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"architectures": ["TinyForCausalLM"]}')
    block = hashlib.shake_256(b"weights %d" % seed).digest(64 * 1024)
    header = _header(nbytes)
    data = (block * (nbytes // len(block) + 1))[: nbytes - len(header)]
    (directory / WEIGHTS).write_bytes(header + data)
    return directory


def _header(nbytes: int) -> bytes:
    """A safetensors header of 128 bytes, of one tensor that fills the rest of the file."""
    end = nbytes - 128
    entry = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (end, end)
    return (120).to_bytes(8, "little") + entry.ljust(120)


def identity_of(directory: Path) -> CheckpointIdentity:
    """The record of the weight files, with its sample digest."""
    return with_sample(record_checkpoint(str(directory)))


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


def with_checkpoint(key: WeightCacheKey, **changes: Any) -> WeightCacheKey:
    """The key with digests of its checkpoint set or removed."""
    return msgspec.structs.replace(
        key, checkpoint=msgspec.structs.replace(key.checkpoint, **changes)
    )
