"""`weightcachectl rollback` over several devices: all go back, or none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.fakes.stub_daemon import StubDaemon, cache, status
from weightcached.cli.weightcachectl import main
from weightcached.system.paths import runtime_dir
from weightcached.wire.messages import (
    CacheOutcome,
    Message,
    Refused,
    ReloadReply,
    Request,
    Rollback,
    RollbackReply,
)

NONE = Refused(code="snapshot", message="tiny/target has no generation to go back to: none")


@contextmanager
def daemons(
    run: Path, before: Mapping[tuple[str, str], Message], *caches: str
) -> Iterator[dict[str, StubDaemon]]:
    """Daemons of cpu0 and cpu1. before: the answer to the question, by device and cache."""

    def daemon(device: str) -> StubDaemon:
        def script(request: Request) -> list[Message]:
            if not isinstance(request, Rollback):
                return [status(device, *map(cache, caches or ["tiny/target"]))]
            if not request.snapshot:
                return [before[device, request.cache]]
            done = CacheOutcome(cache=request.cache, outcome="loaded", generation=3, seconds=1.25)
            return [ReloadReply(outcomes=[done])]

        return StubDaemon(run / f"{device}.sock", script)

    with ExitStack() as stack:
        yield {device: stack.enter_context(daemon(device)) for device in ("cpu0", "cpu1")}


def rollback(run: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["rollback", "tiny", *arguments, "--socket-dir", str(run)])


def commanded(daemon: StubDaemon) -> list[str]:
    """The snapshots to which a daemon was told to go back."""
    return [x.snapshot for x in daemon.requests if isinstance(x, Rollback) and x.snapshot]


def test_every_device_goes_back_to_its_own_snapshot(tmp_path: Path) -> None:
    found = {
        (device, "tiny/target"): RollbackReply(snapshot=f"on{device}", created_at=0.0)
        for device in ("cpu0", "cpu1")
    }
    with daemons(tmp_path / "run", found) as both:
        result = rollback(tmp_path / "run")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("cpu0 tiny/target: goes back to the generation whose snapshot was ")
    assert lines[2:] == [
        "cpu0 tiny/target: loaded, generation 3 in 1.2 s",
        "cpu1 tiny/target: loaded, generation 3 in 1.2 s",
    ]
    assert [commanded(daemon) for daemon in both.values()] == [["oncpu0"], ["oncpu1"]]


def test_nothing_is_done_unless_every_device_can_go_back(tmp_path: Path) -> None:
    found: dict[tuple[str, str], Message] = {
        ("cpu0", "tiny/target"): RollbackReply(snapshot="0", created_at=0.0),
        ("cpu1", "tiny/target"): NONE,
    }
    with daemons(tmp_path / "run", found) as both:
        result = rollback(tmp_path / "run")
        assert result.exit_code == 1
        assert result.stderr == (
            "weightcachectl: cpu1: tiny/target has no generation to go back to: none\n"
            "weightcachectl: tiny/target: nothing was done, because not every device can go back\n"
        )
        assert [commanded(daemon) for daemon in both.values()] == [[], []]
        # It can be said that only one is meant.
        assert rollback(tmp_path / "run", "--device", "cpu0").exit_code == 0
        assert [commanded(daemon) for daemon in both.values()] == [["0"], []]


def test_a_draft_that_never_changed_stays(tmp_path: Path) -> None:
    found: dict[tuple[str, str], Message] = {}
    for device in ("cpu0", "cpu1"):
        found[device, "tiny/target"] = RollbackReply(snapshot="0", created_at=0.0)
        found[device, "tiny/draft"] = NONE
    with daemons(tmp_path / "run", found, "tiny/target", "tiny/draft"):
        result = rollback(tmp_path / "run")
    assert result.exit_code == 0
    assert "cpu1 tiny/target: loaded, generation 3" in result.stdout
    assert result.stderr.count("no generation to go back to") == 2


def test_none_anywhere_fails(tmp_path: Path) -> None:
    found: dict[tuple[str, str], Message] = {
        (device, "tiny/target"): NONE for device in ("cpu0", "cpu1")
    }
    with daemons(tmp_path / "run", found):
        assert rollback(tmp_path / "run").exit_code == 1


def test_directory_that_one_command_names_is_not_the_next_one_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    rollback(tmp_path / "elsewhere")
    assert runtime_dir() == tmp_path / "weightcached"
