"""Checkpoints that `weightcachectl publish` has put in place of those that the manifest names.

    manifest.yaml  →  manifest.published.json      beside it, replaced as a whole

One belongs to the `model` that the manifest named then: another one there is the operator's newer
word, and counts. Nobody writes into the manifest itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from weightcached.errors import ManifestError

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tekken.json")


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """One model's checkpoint directory, its label, and the `model` of the manifest that it replaces."""

    path: str
    instead_of: str
    label: str = ""


def path_of(manifest: Path) -> Path:
    """The file beside this manifest."""
    return manifest.with_name(f"{manifest.stem}.published.json")


def read_published(manifest: Path) -> dict[str, Published]:
    """By model; empty without the file. Raises ManifestError."""
    path = path_of(manifest)
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Published])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ManifestError(
            f"{path}: {e}: it holds what was published; without it the manifest's own checkpoints count"
        ) from e


@contextlib.contextmanager
def changing(manifest: Path) -> Iterator[None]:
    """One command at a time changes the manifest, or what is published beside it. Raises ManifestError."""
    try:
        fd = os.open(manifest.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise ManifestError(f"{manifest.parent}: {e.strerror}") from e
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def write_published(manifest: Path, published: Mapping[str, Published]) -> None:
    """Replace the file. Raises ManifestError."""
    path = path_of(manifest)
    part = path.with_suffix(".part")
    try:
        if not published:
            path.unlink(missing_ok=True)
            return
        with part.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(published), indent=2))
            file.flush()
            # Else a machine that crashes now may have an empty file under the name, and no manifest.
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as e:
        raise ManifestError(f"{path} cannot be written: {e.strerror}") from e


def counts(published: Published, engine: dict[str, Any]) -> bool:
    """Whether it replaces what the manifest names now."""
    return bool(published.instead_of == engine["model"])


def with_published(engine: dict[str, Any], published: Published | None) -> dict[str, Any]:
    """Engine arguments with the published checkpoint, and what they had by the manifest's: the name
    that clients use, and the tokenizer if the checkpoint has none.
    """
    named = engine["model"]
    if published is None or not counts(published, engine) or published.path == named:
        return engine
    arguments = {**engine, "model": published.path}
    arguments.setdefault("served_model_name", [named])
    if not any(Path(published.path, name).is_file() for name in _TOKENIZERS):
        arguments.setdefault("tokenizer", named)
    return arguments
