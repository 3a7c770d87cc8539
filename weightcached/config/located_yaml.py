"""YAML values that know their file, line and key, so that an error can name all three.

Reads only values that JSON can hold: mappings with string keys, lists, strings, integers, floats,
booleans, null. The caller gives the keys their meaning (manifest.py).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from weightcached.errors import ManifestError

MAX_FILE_BYTES = 1 << 20
# Aliases let a small file describe a huge or endless value; these limits stop that.
MAX_VALUES = 100_000
MAX_DEPTH = 32
_INT64 = range(-(2**63), 2**63)
_SCALARS = {"null", "bool", "int", "float", "str"}
_TAG = "tag:yaml.org,2002:"


def read(path: Path) -> Value:
    """The document in the file `path`. Raises ManifestError unless it is one readable document."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as e:
        raise ManifestError(f"{path}: cannot be read: {e.strerror}") from e
    if len(data) > MAX_FILE_BYTES:
        raise ManifestError(f"{path}: larger than {MAX_FILE_BYTES} bytes: a manifest is smaller")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise ManifestError(f"{path}:{line}: not UTF-8: byte 0x{data[e.start]:02x}") from e
    node = _compose(path, text)
    if node is None:
        raise ManifestError(
            f"{path}: the file holds no value: expected the keys version and models"
        )
    return Value(_Document(path), node, "", 0)


def _compose(path: Path, text: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        line = mark.line + 1 if mark else 1
        reason = ", ".join(part for part in (e.context, e.problem) if part)
        raise ManifestError(f"{path}:{line}: not valid YAML: {reason}") from e
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        raise ManifestError(
            f"{path}:{line}: not valid YAML: character U+{ord(text[e.position]):04X}: {e.reason}"
        ) from e
    except RecursionError as e:
        raise ManifestError(
            f"{path}: nested too deeply: at most {MAX_DEPTH} levels are allowed"
        ) from e


def listed(values: Iterable[str]) -> str:
    """Names for a message: `a, b, c`."""
    return ", ".join(values)


def near_miss(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or "" if no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f" (did you mean {close[0]!r}?)" if close else ""


@dataclass
class _Document:
    path: Path
    values: int = field(default=0)


@dataclass(frozen=True)
class Value:
    """One value of a document. key: its path, e.g. `models[0].devices[1]`; "" for the document."""

    document: _Document
    node: yaml.Node
    key: str
    depth: int

    @property
    def line(self) -> int:
        """Counted from 1."""
        return int(self.node.start_mark.line) + 1

    @property
    def kind(self) -> str:
        """null, bool, int, float, str, map, seq, or another tag as written."""
        return self.node.tag.removeprefix(_TAG)

    def fail(self, text: str, *, line: int | None = None) -> NoReturn:
        """Raise ManifestError with file, line and key in front of `text`."""
        key = f" {self.key}:" if self.key else ""
        raise ManifestError(f"{self.document.path}:{line or self.line}:{key} {text}")

    def described(self) -> str:
        """The value for a message, with its type unless it is a string."""
        if isinstance(self.node, yaml.MappingNode):
            return "a mapping"
        if isinstance(self.node, yaml.SequenceNode):
            return "a list"
        if self.kind == "null":
            return "nothing"
        names = {
            "int": "the integer ",
            "float": "the float ",
            "bool": "the boolean ",
            "timestamp": "the date ",
        }
        return names.get(self.kind, "") + (
            self.node.value if self.kind in names else repr(self.node.value)
        )

    def mapping(self, known: Iterable[str] | None = None) -> dict[str, Value]:
        """The entries by key. Raises ManifestError for a duplicate key, and for one not in `known`."""
        if not isinstance(self.node, yaml.MappingNode):
            self.fail(f"expected a mapping, got {self.described()}")
        entries: dict[str, Value] = {}
        for key_node, value_node in self.node.value:
            key = self._key_of(key_node)
            entry = self._child(value_node, f"{self.key}.{key}" if self.key else key)
            line = int(key_node.start_mark.line) + 1
            if key in entries:
                entry.fail(
                    f"the key stands here twice, first on line {entries[key].line}: remove one",
                    line=line,
                )
            if known is not None and key not in known:
                entry.fail(
                    f"unknown key{near_miss(key, known)}; known keys: {listed(known)}", line=line
                )
            entries[key] = entry
        return entries

    def _key_of(self, node: yaml.Node) -> str:
        key = Value(self.document, node, self.key, self.depth)
        if key.kind == "merge":
            key.fail("merge keys (<<) are not supported: write the keys out")
        if key.kind != "str" or not isinstance(node, yaml.ScalarNode):
            key.fail(f"expected a string as key, got {key.described()}: quote it")
        return key.string()

    def items(self) -> list[Value]:
        """The elements of a list."""
        if not isinstance(self.node, yaml.SequenceNode):
            self.fail(f"expected a list, got {self.described()}")
        return [self._child(node, f"{self.key}[{n}]") for n, node in enumerate(self.node.value)]

    def _child(self, node: yaml.Node, key: str) -> Value:
        child = Value(self.document, node, key, self.depth + 1)
        self.document.values += 1
        if child.depth > MAX_DEPTH:
            child.fail(f"nested too deeply: at most {MAX_DEPTH} levels are allowed")
        if self.document.values > MAX_VALUES:
            child.fail(
                f"more than {MAX_VALUES} values, aliases counted each time: a manifest has fewer"
            )
        return child

    def string(self) -> str:
        """A string that is not empty."""
        if self.kind != "str":
            quote = ": quote it" if self.kind in ("int", "float", "bool", "timestamp") else ""
            self.fail(f"expected a string, got {self.described()}{quote}")
        text = str(self.node.value)
        if not text:
            self.fail("expected a string that is not empty, got ''")
        return self._checked_text(text)

    def _checked_text(self, text: str) -> str:
        if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
            self.fail(f"expected text, got {text!r}: NUL and lone surrogates are not allowed")
        return text

    def one_of(self, allowed: Iterable[str]) -> str:
        """One of the allowed strings."""
        if self.kind != "str" or self.node.value not in allowed:
            miss = near_miss(str(self.node.value), allowed) if self.kind == "str" else ""
            self.fail(f"expected one of {listed(allowed)}, got {self.described()}{miss}")
        return str(self.node.value)

    def integer(self, minimum: int) -> int:
        """An integer of at least `minimum`."""
        number = self.plain() if self.kind == "int" else None
        if not isinstance(number, int) or number < minimum:
            self.fail(f"expected an integer of at least {minimum}, got {self.described()}")
        return number

    def plain(self) -> Any:
        """The value as Python objects that JSON can hold."""
        if isinstance(self.node, yaml.MappingNode) and self.kind == "map":
            return {key: value.plain() for key, value in self.mapping().items()}
        if isinstance(self.node, yaml.SequenceNode) and self.kind == "seq":
            return [value.plain() for value in self.items()]
        if self.kind not in _SCALARS:
            self.fail(
                f"values of the YAML type {self.kind} are not supported: quote it if a string is meant"
            )
        try:
            value = yaml.constructor.SafeConstructor().construct_object(self.node)
        except (yaml.YAMLError, ValueError, KeyError) as e:
            raise self._error(f"{self.node.value!r} is not of type {self.kind}") from e
        if isinstance(value, float) and not math.isfinite(value):
            self.fail(f"expected a finite number, got {self.described()}")
        if isinstance(value, int) and value not in _INT64:
            self.fail(f"expected an integer of at most 64 bits, got {self.described()}")
        return self._checked_text(value) if isinstance(value, str) else value

    def _error(self, text: str) -> ManifestError:
        try:
            self.fail(text)
        except ManifestError as e:
            return e
