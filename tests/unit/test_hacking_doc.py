"""HACKING.md is true: every room is on the map, and every file and target that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "HACKING.md").read_text(encoding="utf-8")
ROOMS = re.findall(r"^\| `((?:weightcached|weightcache_loader)/[^`]*)` \|", PAGE, re.M)


def rooms_of_the_tree() -> set[str]:
    found = {f"weightcached/{p.parent.name}/" for p in ROOT.glob("weightcached/*/__init__.py")}
    return found | {"weightcached/errors.py", "weightcache_loader/"}


def test_every_room_is_on_the_map_once() -> None:
    assert sorted(ROOMS) == sorted(rooms_of_the_tree())


def test_files_and_make_targets_that_the_page_names_are_there() -> None:
    for name in re.findall(r"`((?:weightcached|tests|requirements|etc|docs|bench)/[^`*]*)`", PAGE):
        assert (ROOT / name).exists(), name
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"^make (\w+)", PAGE, re.M)) <= targets
