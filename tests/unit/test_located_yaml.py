"""YAML values as typed objects: one error with file, line, key, expected and present value."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from weightcached.config.located_yaml import Name, Text, read
from weightcached.errors import ManifestError


class Part(msgspec.Struct, forbid_unknown_fields=True):
    name: Name
    size: Annotated[int, Meta(ge=1)] = 1
    share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    kind: Literal["thick", "thin"] = "thin"
    live: bool = True
    text: Text | None = None
    place: Annotated[list[Text] | Text, Meta(description="one place or several")] = "here"
    rest: dict[str, Any] = {}
    inner: Part | None = None


class Whole(msgspec.Struct, forbid_unknown_fields=True):
    parts: Annotated[list[Part], Meta(min_length=1)]


def fault(tmp_path: Path, text: str) -> str:
    path = tmp_path / "f.yaml"
    path.write_text(text)
    with pytest.raises(ManifestError) as e:
        read(path).convert(Whole)
    return str(e.value).replace(str(path), "F")


def test_values_become_typed_objects(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("parts:\n- {name: a, share: 1, place: [x], inner: {name: b, kind: thick}}\n")
    assert read(path).convert(Whole) == Whole(
        [Part("a", share=1.0, place=["x"], inner=Part("b", kind="thick"))]
    )


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{}", "parts[0]: the key name is missing: expected 1 to 100 letters, digits, dots, dashes or underscores"),
        ("{name: a, sise: 2}", "parts[0].sise: unknown key (did you mean 'size'?); known keys: name, size, share, "
         "kind, live, text, place, rest, inner"),
        ("{name: a, size: 0}", "parts[0].size: expected an integer of at least 1, got the integer 0"),
        ("{name: a, size: true}", "parts[0].size: expected an integer of at least 1, got the boolean true"),
        ("{name: a, share: 1.5}", "parts[0].share: expected a number of 0 to 1, got the float 1.5"),
        ("{name: a, kind: thik}", "parts[0].kind: expected one of thick, thin, got 'thik' (did you mean 'thick'?)"),
        ("{name: a, live: 1}", "parts[0].live: expected true or false, got the integer 1"),
        ("{name: a, text: ''}", "parts[0].text: expected a string that is not empty, got ''"),
        ("{name: a, text: 3}", "parts[0].text: expected a string, got the integer 3: quote it"),
        ("{name: a, place: {}}", "parts[0].place: expected one place or several, got a mapping"),
        ("{name: a, rest: [1]}", "parts[0].rest: expected a mapping, got a list"),
        ("{name: a, inner: {name: b, size: x}}", "parts[0].inner.size: expected an integer of at least 1, got 'x'"),
        ("{name: a, place: [b, 3]}", "parts[0].place[1]: expected a string, got the integer 3: quote it"),
    ],
    ids=lambda value: value if "{" in value else "",
)  # fmt: skip
def test_what_does_not_fit_is_named_with_its_place(tmp_path: Path, entry: str, said: str) -> None:
    assert fault(tmp_path, f"parts:\n- {entry}\n") == f"F:2: {said}"


def test_empty_list_is_told(tmp_path: Path) -> None:
    told = "F:1: parts: the list is empty: expected at least one entry"
    assert fault(tmp_path, "parts: []") == told


def test_line_is_that_of_the_value(tmp_path: Path) -> None:
    text = "parts:\n- name: a\n- name: b\n  inner:\n    name: c\n    size: -1\n"
    told = "F:6: parts[1].inner.size: expected an integer of at least 1, got the integer -1"
    assert fault(tmp_path, text) == told
