"""YAML values that know their file, line and key, so that an error can name all three.

Reads only values that JSON can hold: mappings with string keys, lists, strings, integers, floats,
booleans, null. The caller gives the keys their meaning (manifest.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
import yaml
from msgspec import Meta, inspect

from weightcached.errors import ManifestError
from weightcached.system.text import near_miss

MAX_FILE_BYTES = 1 << 20
# Aliases let a small file describe a huge or endless value; these limits stop that.
MAX_VALUES = 100_000
MAX_DEPTH = 32
_INT64 = range(-(2**63), 2**63)
# `.name` or `[0]` in the paths of msgspec's errors.
_PATH_STEP = re.compile(r"\.([A-Za-z_]\w*)|\[(\d+)\]")
_T = TypeVar("_T")
# A name of a model or an engine, which stands in file names and unit names.
Name = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9._-]{1,100}\Z",
        description="1 to 100 letters, digits, dots, dashes or underscores",
    ),
]
Text = Annotated[str, Meta(min_length=1)]
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
        if not node.value:
            key.fail("expected a string that is not empty as key, got ''")
        return key._checked_text(str(node.value))

    def items(self) -> list[Value]:
        """The elements of a list."""
        if not isinstance(self.node, yaml.SequenceNode):
            self.fail(f"expected a list, got {self.described()}")
        return [self._child(node, f"{self.key}[{n}]") for n, node in enumerate(self.node.value)]

    def _checked_text(self, text: str) -> str:
        if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
            self.fail(f"expected text, got {text!r}: NUL and lone surrogates are not allowed")
        return text

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

    def __getitem__(self, step: str | int) -> Value:
        """One entry of a mapping, or one element of a list. Raises LookupError."""
        return self.items()[step] if isinstance(step, int) else self.mapping()[step]

    def get(self, key: str) -> Value:
        """The entry of that key, or the mapping itself if it has none: for messages."""
        return self.mapping().get(key, self)

    def convert(self, to: type[_T]) -> _T:
        """The value as `to`, a msgspec type.

        Raises ManifestError for the first place that does not fit, with the expected type, or with
        the description in the type's Meta().
        """
        data = self.plain()
        try:
            return msgspec.convert(data, to)
        except msgspec.ValidationError as e:
            self._explain(str(e), inspect.type_info(to))

    def _explain(self, text: str, kind: inspect.Type) -> NoReturn:
        """Report msgspec's error at the place that it names."""
        what, _, path = text.removesuffix("`").partition(" - at `$")
        at = self
        for name, index in _PATH_STEP.findall(path):
            at, kind = at[name or int(index)], _inside(kind, name)
        field = what.partition("`")[2].removesuffix("`")
        if what.startswith("Object contains unknown field"):
            known = [known.encode_name for known in _as_struct(kind).fields]
            at[field].fail(
                f"unknown key{near_miss(field, known)}; known keys: {listed(known)}",
                line=at._line_of_key(field),
            )
        if what.startswith("Object missing required field"):
            wanted = _description(_inside(kind, field))
            at.fail(f"the key {field} is missing" + (f": expected {wanted}" if wanted else ""))
        if isinstance(at.node, yaml.SequenceNode) and not at.node.value and "length" in what:
            at.fail("the list is empty: expected at least one entry")
        wanted, choices = expected(kind), _choices(kind)
        hint = near_miss(str(at.node.value), choices) if choices and at.kind == "str" else ""
        if at.kind == "str" and not at.node.value:
            wanted = "a string that is not empty"
        if _takes_text(kind) and at.kind in _to_quote(kind):
            hint = ": quote it"
        at.fail(f"expected {wanted}, got {at.described()}{hint}")

    def _line_of_key(self, key: str) -> int:
        keys = (node for node, _ in self.node.value if node.value == key)
        return int(next(keys).start_mark.line) + 1

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


def expected(kind: inspect.Type) -> str:
    """Words for the values that a type takes: `a list of devices or all`, `true or false`."""
    return _description(kind) or _describe_type(kind)


def _plain_type(kind: inspect.Type) -> inspect.Type:
    return kind.type if isinstance(kind, inspect.Metadata) else kind


def _alternatives(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    """The types that a value may have, without None, which stands for a missing key."""
    kind = _plain_type(kind)
    kinds = tuple(kind.types) if isinstance(kind, inspect.UnionType) else (kind,)
    return tuple(k for k in kinds if not isinstance(k, inspect.NoneType))


def _as_struct(kind: inspect.Type) -> inspect.StructType:
    found = (k for k in map(_plain_type, _alternatives(kind)) if isinstance(k, inspect.StructType))
    return next(found)


def _inside(kind: inspect.Type, name: str) -> inspect.Type:
    """The type of a structure's field, or of a list's elements if there is no name."""
    if name:
        return next(f.type for f in _as_struct(kind).fields if f.encode_name == name)
    kinds = map(_plain_type, _alternatives(kind))
    return next(k.item_type for k in kinds if isinstance(k, inspect.ListType))


def _description(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.Metadata):
        return str((kind.extra_json_schema or {}).get("description", ""))
    return ""


def _takes_text(kind: inspect.Type) -> bool:
    return any(isinstance(_plain_type(k), inspect.StrType) for k in _alternatives(kind))


def _to_quote(kind: inspect.Type) -> tuple[str, ...]:
    """Kinds that become the text that is expected, once they are quoted."""
    takes_numbers = any(isinstance(_plain_type(k), inspect.IntType) for k in _alternatives(kind))
    return () if takes_numbers else ("int", "float", "bool", "timestamp")


def _choices(kind: inspect.Type) -> list[str]:
    kinds = (k for k in _alternatives(kind) if isinstance(k, inspect.LiteralType))
    return [str(value) for k in kinds for value in k.values]


_TYPES: dict[type[inspect.Type], str] = {
    inspect.BoolType: "true or false",
    inspect.DictType: "a mapping",
    inspect.FloatType: "a number",
    inspect.IntType: "an integer",
    inspect.ListType: "a list",
    inspect.StructType: "a mapping",
}


def _describe_type(kind: inspect.Type) -> str:
    return " or ".join(_describe_one_type(_plain_type(k)) for k in _alternatives(kind))


def _describe_one_type(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.LiteralType):
        return f"one of {listed(map(str, kind.values))}"
    if isinstance(kind, inspect.StrType):
        return "a string"
    text = _TYPES.get(type(kind), "another value")
    if isinstance(kind, inspect.IntType | inspect.FloatType) and kind.ge is not None:
        text += (
            f" of at least {kind.ge:g}" if kind.le is None else f" of {kind.ge:g} to {kind.le:g}"
        )
    return text
