"""The file beside the socket: memory that a daemon held, for engines that ask while it is away."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fakes.stub_daemon import cache, status
from weightcached.wire import resident
from weightcached.wire.messages import OldGeneration
from weightcached.wire.resident import NEXT, Resident, held, path_of, read, write


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    directory = tmp_path / "weightcached"
    directory.mkdir(mode=0o700)
    return directory / "cpu0.sock"


def holding(**changed: Any) -> Resident:
    fields: dict[str, Any] = {
        "device": "cpu0",
        "boot_id": resident.boot_id(),
        "generations": held(status("cpu0", cache("a/target", bytes=5), cache("b/target", bytes=0))),
    }
    return Resident(**(fields | changed))


def test_what_is_written_is_read_by_this_user_alone(socket: Path) -> None:
    write(socket, holding())
    assert read(socket) == holding()
    assert [h.cache for h in holding().generations] == ["a/target"]
    assert stat.S_IMODE(path_of(socket).stat().st_mode) == 0o600
    assert [path.name for path in socket.parent.iterdir()] == ["cpu0.resident"]


def test_a_half_written_file_is_never_seen(socket: Path) -> None:
    write(socket, holding())
    path_of(socket).with_suffix(".resident.part").write_text("left by a crash")
    write(socket, holding(stopped=True))
    assert read(socket) == holding(stopped=True)


@pytest.mark.parametrize("changed", [{"boot_id": "another"}, {"device": "cpu7"}])
def test_another_boot_or_device_is_not_believed(socket: Path, changed: dict[str, str]) -> None:
    write(socket, holding(**changed))
    assert read(socket) is None


def test_nothing_that_cannot_be_trusted_is_believed(socket: Path) -> None:
    path = path_of(socket)
    assert read(socket) is None
    for content in (b"", b"[]", b"{", b"\xff", b'{"device": "cpu0"}'):
        path.write_bytes(content)
        assert read(socket) is None
    path.unlink()
    os.mkfifo(path)
    assert read(socket) is None
    path.unlink()
    elsewhere = socket.with_name("other.sock")
    write(elsewhere, holding())
    path.symlink_to(path_of(elsewhere))
    assert read(socket) is None
    path.unlink()
    write(socket, holding())
    socket.parent.chmod(0o755)
    assert read(socket) is None


@pytest.mark.parametrize(
    ("budget", "known", "kept"), [(20, 0, 12), (20, 4, 4), (10, 4, 2), (8, 4, 0), (0, 4, 0)]
)
def test_the_rest_of_the_budget_is_kept_for_models_on_demand(
    budget: int, known: int, kept: int
) -> None:
    away = {"resident": "on-demand", "state": "evicted", "bytes": 0}
    caches = [
        cache("a/target", bytes=5),
        cache("b/target", bytes=3, resident="on-demand"),
        cache("c/target", snapshot_bytes=known, **away),
    ]
    found = held(status("cpu0", *caches, budget=budget))
    assert sum(h.nbytes for h in found if h.reserved) == kept
    assert [h.cache for h in found if not h.reserved] == ["a/target", "b/target"]
    # All of them are there: nothing more will come.
    found = held(status("cpu0", *caches[:2], budget=budget))
    assert not any(h.reserved for h in found)


def test_room_is_kept_for_the_next_weights_of_the_largest_live_model() -> None:
    caches = [
        cache("a/target", bytes=15, live=True), cache("a/draft", bytes=2, live=True),
        cache("b/target", bytes=5, live=True), cache("c/target", bytes=40),
    ]  # fmt: skip

    def kept(**changed: Any) -> list[tuple[str, int, bool]]:
        found = held(msgspec.structs.replace(status("cpu0", *caches), **changed))
        return [(h.cache, h.nbytes, h.reserved) for h in found if h.reserved]

    assert kept() == [(NEXT, 17, True)]
    # An engine still maps the generation before: the next one is there already.
    old = OldGeneration(cache="a/target", generation=1, bytes=15, engines=[])
    assert kept(old_generations=[old]) == [(NEXT, 5, True)]
    assert kept(caches=caches[3:]) == []
