"""`weightcachectl add` and `remove`: the manifest changed in place, its comments and order kept.

PyYAML, which reads the manifest, says where an entry begins and ends; lines are put in or taken out
there, and no other byte changes. A library that writes YAML with its comments (ruamel.yaml) would
indent anew, read words by another version of YAML than the daemon, and drop comments behind an entry.

Every change is made beside the file, read again as a daemon reads it, compared with what was meant,
and renamed into place. So whatever was wrong with the change, the manifest in force is whole.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import yaml

from weightcached.config.manifest import VERSION, Manifest, ModelSpec, load_manifest
from weightcached.config.published import changing
from weightcached.errors import ManifestError
from weightcached.system.paths import manifest_path
from weightcached.system.units import is_unmodified, user_manifest

_NEW = f"""\
# Model manifest of weightcached: which models stay resident on which devices. 'man weightcached-manifest' tells every
# key. After an edit:
#   weightcachectl reload

version: {VERSION}
models:
"""
# Lines are left as long as they are.
_WIDTH = 1 << 20


def path_to_change() -> Path:
    """The manifest in force, else the user's own, which may not be there. Raises HomeError."""
    try:
        return manifest_path()
    except ManifestError:
        return user_manifest()


def current(path: Path) -> Manifest | None:
    """The manifest as it is; None if there is none, or only the example of `install`.

    Raises ManifestError if it is wrong: nothing is added to a manifest that no daemon would read.
    """
    with _names_file(path):
        if not os.path.lexists(path) or is_unmodified(path.read_text(encoding="utf-8")):
            return None
    return load_manifest(path)


def add_model(path: Path, entry: Mapping[str, Any]) -> Manifest:
    """Append an entry of `models:`. The new manifest. Raises ManifestError; then nothing changed."""

    def expect(before: list[ModelSpec], after: list[ModelSpec]) -> bool:
        added = after[-1]
        return (
            after[:-1] == before and added.name == entry["name"] and added.engine == entry["engine"]
        )

    return _changed(path, lambda text: _with_entry(path, text, entry), expect)


def remove_model(path: Path, name: str) -> Manifest:
    """Remove the entry called `name`. The new manifest. Raises ManifestError; then nothing changed."""
    manifest = current(path)
    names = [model.name for model in manifest.models] if manifest else []
    if name not in names:
        raise ManifestError(f"{path}: no model {name!r}; models: {', '.join(names) or 'none'}")
    if len(names) == 1:
        raise ManifestError(
            f"{path}: {name} is its only model, and a manifest has at least one: "
            f"'weightcachectl stop DEVICE' frees its memory"
        )

    def expect(before: list[ModelSpec], after: list[ModelSpec]) -> bool:
        return after == [model for model in before if model.name != name]

    index = names.index(name)
    return _changed(path, lambda text: _without_entry(path, text, index), expect)


def _changed(
    path: Path,
    change: Callable[[str], str],
    expect: Callable[[list[ModelSpec], list[ModelSpec]], bool],
) -> Manifest:
    # A link stays a link.
    real = Path(os.path.realpath(path))
    partial = real.with_name(f".{real.name}.{os.getpid()}")
    with _names_file(path):
        real.parent.mkdir(parents=True, exist_ok=True)
        with changing(real), contextlib.ExitStack() as stack:
            before = current(path)
            # Not as text: line ends stay what they are.
            text = change(real.read_bytes().decode() if before else "")
            stack.callback(partial.unlink, missing_ok=True)
            with partial.open("wb") as file:
                file.write(text.encode())
                file.flush()
                # Else a machine that crashes now may have an empty file under the name.
                os.fsync(file.fileno())
            if before:
                shutil.copymode(real, partial)
            after = _read_again(partial)
            if not _is_meant(before, after, expect):
                _refuse(path, "it would have been read otherwise")
            partial.replace(real)
    return load_manifest(path)


def _is_meant(
    before: Manifest | None,
    after: Manifest,
    expect: Callable[[list[ModelSpec], list[ModelSpec]], bool],
) -> bool:
    """Whether the models are as expected, and all else is what it was."""
    if before is None:
        return expect([], after.models)
    rest = msgspec.structs.replace(after, path=before.path, models=before.models)
    return rest == before and expect(before.models, after.models)


def _with_entry(path: Path, text: str, entry: Mapping[str, Any]) -> str:
    """The text with an entry behind the last one. Every other line stays as it is."""
    if not text:
        return _NEW + "".join(_entry_lines(entry, 2, "\n"))
    models, lines = _models(path, text)
    at = _last_line(models.value[-1]) + 1
    newline = "\r\n" if lines[0].endswith("\r\n") else "\n"
    if not lines[at - 1].endswith("\n"):
        lines[at - 1] += newline
    lines[at:at] = _entry_lines(entry, models.start_mark.column, newline)
    return "".join(lines)


def _without_entry(path: Path, text: str, index: int) -> str:
    """The text without the lines of one entry, and without comments directly above it."""
    models, lines = _models(path, text)
    entry = models.value[index]
    first = entry.start_mark.line
    while lines[first - 1].lstrip().startswith("#"):
        first -= 1
    del lines[first : _last_line(entry) + 1]
    return "".join(lines)


def _models(path: Path, text: str) -> tuple[yaml.SequenceNode, list[str]]:
    """The list of models with its place in the text, and the text's lines."""
    document: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    models: yaml.SequenceNode = next(
        value for key, value in document.value if key.value == "models"
    )
    if models.flow_style:
        _refuse(path, "its models are written in brackets")
    # As PyYAML counts them.
    return models, re.split(r"(?<=[\n\x85\u2028\u2029])", text)


def _last_line(node: yaml.Node) -> int:
    """The line on which the last value of a node ends; that of a block ends before the next word."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        last = node.value[-1]
        return _last_line(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.line) - (1 if node.end_mark.column == 0 else 0)


def _entry_lines(entry: Mapping[str, Any], indent: int, newline: str) -> list[str]:
    lines = [line for key, value in entry.items() for line in _pair(key, value)]
    marks = ["- ", *["  "] * (len(lines) - 1)]
    return [f"{' ' * indent}{m}{line}{newline}" for m, line in zip(marks, lines, strict=True)]


def _pair(key: str, value: Any) -> list[str]:
    """Lines of `key: value`; lists and mappings that hold no others in brackets, but not engine."""
    if key == "engine":
        return [f"{key}:", *(f"  {line}" for k, v in value.items() for line in _pair(str(k), v))]
    style = None if isinstance(value, dict | list) else False
    text: str = yaml.safe_dump(
        {key: value}, default_flow_style=style, sort_keys=False, allow_unicode=True, width=_WIDTH
    )
    return text.rstrip("\n").split("\n")


def _read_again(partial: Path) -> Manifest:
    try:
        return load_manifest(partial)
    except ManifestError as e:
        # Its lines are those of a file that nobody will see.
        said = re.sub(rf"^{re.escape(str(partial))}(:\d+)?: ?", "", str(e))
        raise ManifestError(f"the manifest would be wrong, nothing was changed: {said}") from e


def _refuse(path: Path, why: str) -> NoReturn:
    raise ManifestError(f"{path} cannot be changed by this command: {why}: edit it")


@contextlib.contextmanager
def _names_file(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "not UTF-8"
        raise ManifestError(f"{path}: {reason}") from e
