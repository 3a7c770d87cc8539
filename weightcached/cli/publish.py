"""`weightcachectl publish`: another checkpoint directory becomes the next generation of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from weightcached.config.manifest import check_checkpoint, load_manifest
from weightcached.config.published import (
    Published,
    changing,
    read_published,
    write_published,
)
from weightcached.errors import ManifestError, UnknownCacheError
from weightcached.system.paths import manifest_path
from weightcached.wire.messages import StatusReply


def manifest_of(replies: Sequence[StatusReply], model: str) -> tuple[Path, list[str]]:
    """The manifest that names the model, and the devices that have it.

    Raises UnknownCacheError if no daemon has it, ManifestError if they read several manifests.
    """
    having = [r for r in replies if any(c.name.rpartition("/")[0] == model for c in r.caches)]
    if not having:
        known = {c.name.rpartition("/")[0] for reply in replies for c in reply.caches}
        raise UnknownCacheError(
            f"no daemon has a model {model!r}; models: {', '.join(sorted(known)) or 'none'}"
        )
    manifests = sorted({reply.manifest for reply in having})
    if len(manifests) > 1:
        raise ManifestError(
            f"the daemons of {model} read several manifests, {' and '.join(manifests)}: give them one"
        )
    return Path(manifests[0]) if manifests[0] else manifest_path(None), [r.device for r in having]


@contextmanager
def published(manifest: Path, model: str, directory: Path, label: str) -> Iterator[list[bool]]:
    """The checkpoint is the model's within the block, and after it unless the block sets the list's
    element to false. Publishing the manifest's own checkpoint removes what was published.

    An interrupted block keeps it: the daemons that were asked go on loading it.
    Raises ManifestError, CheckpointMissingError.
    """
    check_checkpoint({"model": str(directory)})
    with changing(manifest):
        before = read_published(manifest)
        # Without what is published.
        own = _own_checkpoint(manifest, model, before)
        after = {name: entry for name, entry in before.items() if name != model}
        if str(directory) != own or label:
            after[model] = Published(path=str(directory), instead_of=own, label=label)
        kept = [True]
        write_published(manifest, after)
        try:
            yield kept
        finally:
            if not kept[0]:
                write_published(manifest, before)


def _own_checkpoint(manifest: Path, model: str, before: dict[str, Published]) -> str:
    found = next((m for m in load_manifest(manifest).models if m.name == model), None)
    if found is None:
        raise ManifestError(f"{manifest} has no model {model!r}: weightcachectl reload")
    entry = before.get(model)
    if entry is not None and found.engine["model"] == entry.path:
        return entry.instead_of
    return str(found.engine["model"])
