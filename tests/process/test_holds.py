"""Loads, drops and releases beside engines that measure the device's memory: a real daemon, engines as connections."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.fakes.checkpoints import key_of, write_checkpoint
from tests.fakes.client import Client
from tests.fakes.daemon import ROOT, DaemonProcess, environment, model, write_manifest
from weightcached.wire.messages import Done, Drop, HoldLoads, Loading, Release, StatusReply

Launcher = Callable[..., DaemonProcess]


def states(status: StatusReply) -> dict[str, str]:
    return {cache.name: cache.state for cache in status.caches}


def two_models(daemon: DaemonProcess, checkpoint: Path, **second: str) -> None:
    """Give the daemon a second model, and let it load that as soon as it may."""
    other = write_checkpoint(checkpoint.parent / "other", nbytes=1 << 20)
    write_manifest(daemon.manifest, [model("tiny", checkpoint), model("other", other, **second)])
    daemon.signal(signal.SIGHUP)


def test_load_waits_while_an_engine_measures_memory(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    with daemon.client() as engine:
        engine.expect(HoldLoads(), Done)
        two_models(daemon, checkpoint)
        daemon.until(lambda _: "load waits for engines" in daemon.log, "it waits")
        assert states(daemon.status()) == {"tiny/target": "ready", "other/target": "loading"}
        assert "loader started cache=other/target" not in daemon.log
        # Others may attach, and measure too.
        with daemon.client() as second:
            second.attach(key_of({"model": str(checkpoint)})).close()
            second.expect(HoldLoads(), Done)
    daemon.until(lambda status: states(status)["other/target"] == "ready", "it is loaded")
    assert (
        f"load waits for engines that measure memory cache=other/target engines=['pid {os.getpid()}']"
        in daemon.log
    )


def test_engine_that_dies_while_it_measures_is_in_nobodys_way(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.fakes.client import Client; "
        "from weightcached.wire.messages import Done, HoldLoads; "
        "client = Client.welcome(Path(sys.argv[1])); client.expect(HoldLoads(), Done); "
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(daemon.socket)], cwd=ROOT, env=environment(),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as engine:  # fmt: skip
        assert engine.stdout
        assert engine.stdout.readline() == b"held\n"
        two_models(daemon, checkpoint)
        daemon.until(lambda _: "load waits for engines" in daemon.log, "it waits")
        engine.kill()
    daemon.until(lambda status: states(status)["other/target"] == "ready", "it is loaded")


def test_engine_that_comes_during_a_load_measures_after_it(
    daemon: DaemonProcess, checkpoint: Path, gate: Path
) -> None:
    two_models(daemon, checkpoint, x_gate=str(gate))
    daemon.until(lambda _: "loader started cache=other/target" in daemon.log, "it loads")
    with daemon.client() as engine, daemon.client() as hasty:
        reply = engine.ask(HoldLoads())
        assert isinstance(reply, Loading)
        assert reply.cache == "other/target"
        # Sleeping and waking wait for nobody.
        assert isinstance(hasty.ask(HoldLoads(wait=False)), Loading)
        with gate.open("w") as file:
            file.write("go")
        while isinstance(reply, Loading):
            reply = engine.receive()
        assert isinstance(reply, Done)
        assert states(daemon.status())["other/target"] == "ready"
        hasty.expect(HoldLoads(wait=False), Done)


def test_what_is_dropped_while_an_engine_measures_is_freed_after_it(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    assert daemon.manager
    with daemon.client() as engine, daemon.client("ctl") as tool:
        engine.expect(HoldLoads(), Done)
        tool.expect(Drop(cache="tiny/target"), Done)
        assert states(daemon.status()) == {"tiny/target": "released"}
        assert [fd for fd in daemon.descriptors() if "segment" in fd]
        assert "freed once engines have measured memory cache=tiny/target" in daemon.log
    daemon.until(
        lambda _: not [fd for fd in daemon.descriptors() if "segment" in fd], "it is freed"
    )


def test_what_an_engine_releases_itself_is_freed_while_it_measures(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    with daemon.client() as hold, daemon.client() as engine:
        engine.attach(key_of({"model": str(checkpoint)})).close()
        hold.expect(HoldLoads(), Done)
        engine.expect(Release(), Done)
        assert not [fd for fd in daemon.descriptors() if "segment" in fd]


def test_release_is_not_forgotten_though_another_lease_outlasts_the_engine(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    key = key_of({"model": str(checkpoint)})
    with daemon.client() as other:
        other.attach(key).close()
        with daemon.client() as engine:
            engine.attach(key).close()
            engine.expect(Release(), Done)
        assert states(daemon.status()) == {"tiny/target": "ready"}
        # A third may still come, and is waited for as well.
        third = Client.welcome(daemon.socket)
        third.attach(key).close()
    assert states(daemon.status()) == {"tiny/target": "ready"}
    third.close()
    daemon.until(lambda status: states(status) == {"tiny/target": "released"}, "it is released")
    daemon.until(
        lambda _: not [fd for fd in daemon.descriptors() if "segment" in fd], "it is freed"
    )


def test_what_an_engine_released_stays_released_across_a_crash(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    with daemon.client() as engine:
        engine.attach(key_of({"model": str(checkpoint)})).close()
        engine.expect(Release(), Done)
    daemon.signal(signal.SIGKILL)
    daemon.wait()
    before = daemon.log.count("loader started")
    daemon.launch(keep_store=True).notified("READY=1")
    assert states(daemon.status()) == {"tiny/target": "released"}
    assert daemon.log.count("loader started") == before
