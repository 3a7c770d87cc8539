"""`weightcachectl rollback`: back to the generation before, and how long that holds."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.checkpoints import WEIGHTS, key_of, write_checkpoint
from tests.fakes.daemon import DaemonProcess, model, until, write_manifest
from tests.process.conftest import Engine
from tests.process.test_snapshots import Machine

pytestmark = pytest.mark.slow
NOTE = "rolled back: 'weightcachectl reload --force' loads what the manifest names"


class Two(Machine):
    """A daemon that keeps two snapshots of a model; `old` and `new` are checkpoints."""

    def __init__(self, daemon: DaemonProcess, directory: Path, old: Path, new: Path) -> None:
        super().__init__(daemon, directory, old)
        self.old, self.new = old, new
        self.name(old)

    def name(self, checkpoint: Path, *, keep: int = 2) -> None:
        """Have the manifest name this checkpoint."""
        self.checkpoint = checkpoint
        self.manifest(keys={"dir": str(self.snapshots), "keep": keep})

    def is_served(self, checkpoint: Path) -> bool:
        with self.daemon.client() as engine:
            handout = engine.attach(key_of({"model": str(checkpoint)}))
            with handout.segment_fds[0].dup() as fd:
                found = Path(f"/proc/self/fd/{fd.fileno()}").read_bytes()
            handout.close()
        return found == (checkpoint / WEIGHTS).read_bytes()[: len(found)]

    def reload(self, *arguments: str) -> str:
        done = self.call("reload", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def until_written(self) -> None:
        until(lambda: self.cache.snapshot == "written", "a snapshot")


@pytest.fixture
def two(make_daemon: Callable[..., DaemonProcess], short_tmp: Path, checkpoint: Path) -> Two:
    """Serves `new`, and served `old` before; both have a snapshot."""
    new = write_checkpoint(short_tmp / "new", seed=2)
    two = Two(make_daemon([]), short_tmp, checkpoint, new)
    two.start()
    two.until_written()
    two.name(new)
    two.reload()
    two.until_written()
    assert two.is_served(new)
    assert two.loads == 2
    return two


def test_the_generation_before_is_served_again(
    two: Two, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(two.daemon, two.new)
    engine.attached()
    before = engine.digest()
    done = two.call("rollback", "tiny")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith(
        "cpu0 tiny/target: goes back to the generation whose snapshot was written 20"
    )
    assert second.startswith("cpu0 tiny/target: loaded, generation 3 in ")
    assert two.is_served(two.old)
    assert two.loads == 2
    assert (two.cache.source, two.cache.generation) == ("restored", 3)
    assert two.cache.rolled_back_at is not None
    assert "restored in" in two.call("status").stdout
    assert "rolled back" in two.call("status").stdout
    # Engines keep what they map.
    assert engine.digest() == before


def test_a_reload_of_the_same_manifest_keeps_it_and_says_so(two: Two) -> None:
    two.call("rollback", "tiny")
    assert two.reload() == f"cpu0 tiny/target: unchanged, generation 3; {NOTE}\n"
    assert two.is_served(two.old)
    # Nor is it written again under the new entry.
    assert len(two.kept()) == 2


def test_it_holds_across_a_crash_and_a_reboot(two: Two) -> None:
    two.call("rollback", "tiny")
    at = two.cache.rolled_back_at
    two.daemon.signal(signal.SIGKILL)
    two.daemon.wait()
    two.daemon.launch(keep_store=True).notified("READY=1")
    assert (two.cache.source, two.cache.rolled_back_at) == ("adopted", at)
    assert two.is_served(two.old)
    two.reboot()
    assert (two.cache.source, two.cache.rolled_back_at) == ("restored", at)
    assert two.is_served(two.old)
    assert NOTE in two.call("explain", "tiny").stdout
    assert (two.loads, len(two.kept())) == (2, 2)


def test_a_forced_reload_ends_it(two: Two) -> None:
    two.call("rollback", "tiny")
    two.reload("--force")
    assert (two.cache.source, two.cache.rolled_back_at, two.loads) == ("loaded", None, 3)
    assert two.is_served(two.new)
    two.until_written()
    two.reboot()
    assert (two.cache.source, two.cache.rolled_back_at) == ("restored", None)
    assert two.is_served(two.new)


@pytest.mark.parametrize("change", ["entry", "checkpoint"])
def test_other_weights_than_those_gone_away_from_end_it(
    two: Two, short_tmp: Path, change: str
) -> None:
    two.call("rollback", "tiny")
    third = two.new
    if change == "entry":
        third = short_tmp / "third"
        two.name(third)
    write_checkpoint(third, seed=3)
    two.reload()
    assert (two.cache.source, two.cache.rolled_back_at, two.loads) == ("loaded", None, 3)
    assert two.is_served(third)
    two.until_written()
    # Before the third were the weights gone back to, not those gone away from.
    assert two.call("rollback", "tiny").returncode == 0
    assert two.is_served(two.old)


def test_what_a_load_would_make_anyway_is_no_rollback_any_more(two: Two) -> None:
    two.call("rollback", "tiny")
    two.name(two.old)
    assert "unchanged" not in two.reload()
    assert (two.cache.source, two.cache.rolled_back_at) == ("restored", None)
    assert two.is_served(two.old)


def test_a_snapshot_that_is_damaged_leaves_what_is_served(two: Two) -> None:
    (old,) = two.kept() - {newest(two).name}
    data = two.snapshots / "cpu0" / "tiny.target" / old / "data"
    data.write_bytes(b"x" * data.stat().st_size)
    done = two.call("rollback", "tiny")
    assert done.returncode == 1
    assert "cannot go back to" in done.stdout
    assert "do not have the digest in the header" in done.stdout
    assert "the served generation stays" in done.stdout
    assert two.is_served(two.new)
    assert (two.cache.state, two.cache.generation, two.cache.rolled_back_at) == ("ready", 2, None)
    assert two.reload() == "cpu0 tiny/target: unchanged, generation 2\n"
    two.reboot()
    assert two.is_served(two.new)


def newest(two: Two) -> Path:
    return max(
        (two.snapshots / "cpu0/tiny.target").glob("[0-9a-f]*"), key=lambda p: p.stat().st_mtime
    )


def test_a_second_rollback_goes_further_back_or_says_that_there_is_none(two: Two) -> None:
    assert two.call("rollback", "tiny").returncode == 0
    done = two.call("rollback", "tiny")
    assert done.returncode == 1
    assert (
        "cpu0: tiny/target has no generation to go back to: none in "
        f"{two.snapshots}/cpu0/tiny.target is older; snapshots: keep is 2, keep: 2 keeps more"
    ) in done.stderr
    assert two.is_served(two.old)


def test_without_room_for_both_the_served_one_goes_first_and_comes_back_if_need_be(
    two: Two,
) -> None:
    entry = model("tiny", two.new, x_spawns=str(two.spawns))
    spec = {"dir": str(two.snapshots), "keep": 2}
    write_manifest(two.daemon.manifest, [entry], snapshots=spec, budget=4 << 20)
    two.reload()
    (old,) = two.kept() - {newest(two).name}
    data = two.snapshots / "cpu0" / "tiny.target" / old / "data"
    good = data.read_bytes()
    data.write_bytes(b"x" * len(good))
    assert two.call("rollback", "tiny").returncode == 1
    assert two.is_served(two.new)
    data.write_bytes(good)
    assert two.call("rollback", "tiny").returncode == 0
    assert two.is_served(two.old)
    assert two.loads == 2


def test_without_room_beside_an_engine_it_is_refused_by_name(
    two: Two, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(two.daemon, two.new)
    engine.attached()
    entry = model("tiny", two.new, x_spawns=str(two.spawns))
    spec = {"dir": str(two.snapshots), "keep": 2}
    write_manifest(two.daemon.manifest, [entry], snapshots=spec, budget=4 << 20)
    two.reload()
    done = two.call("rollback", "tiny")
    assert done.returncode == 1
    assert "no room for tiny/target: it needs 3.0 MiB, the budget of cpu0 is 4.0 MiB" in done.stdout
    assert f"mapped by pid {engine.process.pid}" in done.stdout
    assert two.is_served(two.new)
    assert (two.cache.state, two.cache.rolled_back_at) == ("ready", None)


def test_what_is_not_served_cannot_go_back(two: Two) -> None:
    assert two.call("drop", "tiny").returncode == 0
    done = two.call("rollback", "tiny")
    assert done.returncode == 1
    assert "tiny/target is not served: its state is released" in done.stderr
    done = two.call("rollback", "nothing")
    assert (done.returncode, "no daemon has a cache 'nothing'" in done.stderr) == (1, True)
