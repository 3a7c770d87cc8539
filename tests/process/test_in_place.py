"""New weights for engines on a device with room for one generation: a real daemon and a real service,
whose engines map what the daemon has.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.checkpoints import MIB, key_of, write_checkpoint
from tests.fakes.daemon import (
    BOUND_S,
    ROOT,
    DaemonProcess,
    environment,
    loaders_of,
    model,
    print_log,
    until,
)
from tests.fakes.mapped_weights import digest_of
from tests.fakes.service import ClientLoop, ServiceProcess
from weightcached.errors import EXIT_FAILURE

pytestmark = pytest.mark.slow
SIZE = 3 * MIB


class Command(threading.Thread):
    """`weightcachectl` in the background."""

    def __init__(self, scene: Scene, *arguments: str) -> None:
        super().__init__(daemon=True)
        self._command = [
            sys.executable, "-m", "weightcached.cli.weightcachectl", arguments[0],
            "--socket-dir", str(scene.daemon.runtime), *arguments[1:],
        ]  # fmt: skip
        self.status: int | None = None
        self.output = ""
        self.start()

    def run(self) -> None:
        done = subprocess.run(
            self._command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
            timeout=4 * BOUND_S,
        )  # fmt: skip
        self.output = done.stdout + done.stderr
        self.status = done.returncode

    def end(self) -> str:
        self.join(4 * BOUND_S)
        assert self.status is not None, "the command does not end"
        return self.output


class Scene:
    """A model of 3 MiB on a device with a budget for one generation, and a service of it."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self.directory = directory
        self.daemon = DaemonProcess(directory)
        self.daemon.env["XDG_CACHE_HOME"] = str(directory / "cache")
        self.service = ServiceProcess(directory, arguments={"x_maps": str(self.daemon.socket)})
        stack.callback(self.daemon.close)
        stack.callback(self.service.close)
        stack.callback(print_log, self.service.log_path)
        stack.callback(print_log, self.daemon.log_path)
        self.old = write_checkpoint(directory / "old", seed=1)
        self.new = write_checkpoint(directory / "new", seed=2)
        # Opened by a loader that got so far, and by the test that lets it go on.
        self.gate = directory / "gate"
        os.mkfifo(self.gate)
        self.keys: dict[str, Any] = {
            "budget": SIZE + MIB,
            "snapshots": {"dir": str(directory / "snapshots"), "keep": 2},
        }
        self.write()

    def write(self, checkpoint: Path | None = None, *, live: bool = True, **engine: Any) -> None:
        entry = model("tiny", checkpoint or self.old, **engine) | {"live": live}
        document = {"version": 1, "models": [entry], "engines": [self.service.entry], **self.keys}
        part = self.daemon.manifest.with_suffix(".part")
        part.write_text(yaml.safe_dump(document))
        part.replace(self.daemon.manifest)

    def start(self) -> dict[str, Any]:
        """The daemon, then as start_service()."""
        self.daemon.start()
        return self.start_service()

    def start_service(self, *, snapshot: bool = True) -> dict[str, Any]:
        """Until one engine serves, one is parked, and the weights have a snapshot."""
        if snapshot:
            self.daemon.until(lambda s: s.caches[0].snapshot == "written", "a snapshot")
        self.service.start()
        if not self.service.entry.get("standby", 1):
            return self.service.status()
        return self.service.until_standby()

    def publish(self, checkpoint: Path) -> Command:
        return Command(self, "publish", "tiny", str(checkpoint))

    def weights(self) -> str:
        return str(self.service.get()["weights"])

    def until_asleep(self) -> None:
        self.service.until(lambda s: s["state"] == "asleep", "the engines sleep")

    def pass_gate(self) -> None:
        """Let one loader go on; waits until it is there."""
        self.gate.write_bytes(b"")

    def until_loading_in_place(self) -> None:
        """The first loader finds no room beside the old weights, the next has the device to itself."""
        self.pass_gate()
        self.until_asleep()
        self.daemon.until(
            lambda s: (c := s.caches[0]).generation == 0 and c.phase == "weights",
            "the old weights are gone, and the new ones on their way",
        )


@pytest.fixture
def scene(short_tmp: Path) -> Iterator[Scene]:
    with contextlib.ExitStack() as stack:
        yield Scene(short_tmp, stack)


def test_engines_sleep_while_the_new_weights_take_the_place_of_the_old(scene: Scene) -> None:
    before = scene.start()
    old, new = digest_of(scene.old), digest_of(scene.new)
    with ClientLoop(scene.service, timeout_s=4 * BOUND_S) as clients:
        output = scene.publish(scene.new).end()
        until(lambda: clients.weights[-1] == new, "an answer of the new weights")
        assert "tiny/target: loaded, generation 2 in" in output
        assert "tiny: chat/1 swapped to generation 2 in" in output
        assert "tiny: chat/2 swapped to generation 2 in" in output
        # And back, from the snapshot.
        scene.daemon.until(lambda s: s.caches[0].snapshot == "written", "a snapshot")
        output = scene.publish(scene.old).end()
        assert "tiny: chat/1 swapped to generation 3 in" in output
        until(lambda: clients.weights[-1] == old, "an answer of the old weights")
    assert {*clients.weights} == {old, new}
    assert (clients.refused, clients.failed) == ([], [])
    status = scene.daemon.status()
    assert (status.caches[0].source, status.old_generations) == ("restored", [])
    assert scene.daemon.log.count("makes room for its next generation") == 2
    # The parked engine has them, too.
    after = scene.service.until_standby()
    assert after["pid"] == before["pid"], "no engine was replaced"
    os.kill(after["pid"], signal.SIGKILL)
    scene.service.until(lambda s: s["generation"] == 2, "the parked engine serves")
    assert scene.weights() == old


def test_also_where_no_budget_but_the_device_has_no_room_and_on_a_signal(scene: Scene) -> None:
    scene.keys.pop("budget")
    scene.write()
    scene.start()
    scene.write(scene.new, x_fault="no-room-in-packing", x_once=str(scene.directory / "once"))
    scene.daemon.signal(signal.SIGHUP)
    until(lambda: scene.weights() == digest_of(scene.new), "an answer of the new weights")
    scene.service.until_standby()
    assert "makes room for its next generation" in scene.daemon.log


def test_model_that_is_not_live_makes_room_only_if_the_reload_is(scene: Scene) -> None:
    scene.write(live=False)
    scene.start()
    scene.write(scene.new, live=False)
    output = Command(scene, "reload").end()
    assert "no room for tiny/target" in output
    assert scene.weights() == digest_of(scene.old)
    output = Command(scene, "reload", "--live", "tiny").end()
    assert "tiny: chat/1 swapped to generation 2 in" in output
    assert scene.weights() == digest_of(scene.new)


@pytest.mark.parametrize("on_swap", ["drain", "abort"])
def test_requests_end_before_the_engines_sleep_or_are_aborted(scene: Scene, on_swap: str) -> None:
    # With `drain` it is waited for, for as long as that.
    scene.service.entry["drain_s"] = 1000
    scene.write()
    scene.start()
    answers: list[Any] = []
    answer_now = scene.directory / "answer"

    def ask() -> None:
        try:
            answers.append(
                scene.service.get(f"/until?{answer_now}", timeout_s=4 * BOUND_S)["weights"]
            )
        except (OSError, http.client.HTTPException):
            answers.append("aborted")

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    until(lambda: any(e["requests"] for e in scene.service.status()["engines"]), "the request")
    scene.write(scene.new)
    manifest = yaml.safe_load(scene.daemon.manifest.read_text())
    manifest["models"][0]["on_swap"] = on_swap
    scene.daemon.manifest.write_text(yaml.safe_dump(manifest))
    reload = Command(scene, "reload")
    if on_swap == "drain":
        scene.service.until(lambda s: s["state"] == "draining", "the request is waited for")
        answer_now.touch()
    assert "tiny: chat/1 swapped" in reload.end()
    asking.join(BOUND_S)
    assert answers == [digest_of(scene.old) if on_swap == "drain" else "aborted"]
    assert scene.weights() == digest_of(scene.new)


def test_load_that_fails_in_their_place_brings_the_old_weights_back(scene: Scene) -> None:
    # The tool's second reload, of what was the model's before, must find the same entry.
    scene.write(x_gate=str(scene.gate))
    scene.daemon.launch()
    scene.pass_gate()
    scene.daemon.notified("READY=1")
    before = scene.start_service()
    publish = scene.publish(scene.new)
    scene.until_loading_in_place()
    for loader in loaders_of(scene.daemon.pid):
        os.kill(loader, signal.SIGKILL)
    output = publish.end()
    assert publish.status == EXIT_FAILURE
    assert "died of SIGKILL" in output
    assert f"{scene.new} was not published: tiny stays as it was" in output
    assert scene.weights() == digest_of(scene.old)
    after = scene.service.until_standby()
    assert after["pid"] == before["pid"]
    cache = scene.daemon.status().caches[0]
    assert (cache.state, cache.source, cache.retry_at) == ("ready", "restored", None)


def test_checkpoint_that_cannot_be_loaded_lets_no_engine_sleep(scene: Scene) -> None:
    scene.start()
    scene.write(scene.new, x_fault="refuse-in-packing")
    output = Command(scene, "reload").end()
    assert "config.json names no architecture" in output
    assert scene.weights() == digest_of(scene.old)
    assert "draining" not in scene.service.log


def test_old_weights_stay_if_they_could_not_come_back_or_another_engine_maps_them(
    scene: Scene,
) -> None:
    scene.keys.pop("snapshots")
    scene.write()
    scene.daemon.start()
    scene.start_service(snapshot=False)
    publish = scene.publish(scene.new)
    output = publish.end()
    assert publish.status == EXIT_FAILURE
    assert (
        "the present weights are served on, and do not make room for the new ones: tiny/target has no snapshot that "
        "would bring it back if they fail: run 'weightcachectl snapshot tiny' first. By hand: 'weightcachectl engine "
        "sleep' its service, 'weightcachectl drop tiny', reload or publish again, and wake the service"
    ) in output
    snapshot = Command(scene, "snapshot", "tiny")
    snapshot.end()
    assert snapshot.status == 0, snapshot.output
    with scene.daemon.client() as own:
        own.attach(key_of({"model": str(scene.old)})).close()
        output = scene.publish(scene.new).end()
        assert (
            f"do not make room for the new ones: they are mapped by pid {os.getpid()}, of no engine service that "
            "could let it sleep: end it, or let it sleep"
        ) in output
    assert "draining" not in scene.service.log
    assert scene.weights() == digest_of(scene.old)
    scene.daemon.until(lambda s: len(s.caches[0].engines) == 2, "the service's engines")
    assert "tiny: chat/1 swapped to generation" in scene.publish(scene.new).end()
    assert scene.weights() == digest_of(scene.new)


def test_engine_that_would_keep_them_mapped_in_its_sleep_is_named(scene: Scene) -> None:
    scene.service.entry["arguments"]["x_keeps"] = "openly"
    scene.write()
    scene.start()
    output = scene.publish(scene.new).end()
    assert "do not make room for the new ones: chat/1 would keep them mapped while asleep" in output
    assert "draining" not in scene.service.log
    assert scene.weights() == digest_of(scene.old)


def test_engine_that_does_not_unmap_them_wakes_with_them(scene: Scene) -> None:
    scene.service.entry["arguments"]["x_keeps"] = "secretly"
    scene.write()
    before = scene.start()
    output = scene.publish(scene.new).end()
    assert "keeps them mapped" in output
    assert scene.weights() == digest_of(scene.old)
    assert scene.service.until_standby()["pid"] == before["pid"]
    cache = scene.daemon.status().caches[0]
    # Engines are not sent to sleep again and again.
    assert (cache.state, cache.generation, cache.retry_at) == ("ready", 1, None)


def test_killed_daemon_leaves_engines_that_wake_with_what_the_next_one_serves(
    scene: Scene,
) -> None:
    before = scene.start()
    old, new = digest_of(scene.old), digest_of(scene.new)
    scene.write(scene.new, x_gate=str(scene.gate))
    with ClientLoop(scene.service, timeout_s=4 * BOUND_S) as clients:
        scene.daemon.signal(signal.SIGHUP)
        scene.until_loading_in_place()
        scene.daemon.signal(signal.SIGKILL)
        scene.daemon.wait()
        scene.write(scene.new)
        scene.daemon.launch(keep_store=True).notified("READY=1")
        until(lambda: clients.weights[-1] == new, "an answer of the new weights")
    assert {*clients.weights} == {old, new}
    assert scene.service.until_standby()["pid"] == before["pid"]
    assert scene.daemon.status().old_generations == []


def test_engine_killed_meanwhile_leaves_the_new_weights_to_the_other(scene: Scene) -> None:
    before = scene.start()
    scene.write(scene.new, x_gate=str(scene.gate))
    reload = Command(scene, "reload")
    scene.until_loading_in_place()
    os.kill(before["pid"], signal.SIGKILL)
    scene.service.until(
        lambda s: [e["number"] for e in s["engines"]] == [2], "engine 1 is gone, none is started"
    )
    scene.pass_gate()
    assert "tiny: chat/2 swapped to generation 2 in" in reload.end()
    assert scene.weights() == digest_of(scene.new)
    scene.service.until_standby()


def test_service_whose_engines_are_all_killed_starts_one_with_the_new_weights(
    scene: Scene,
) -> None:
    scene.service.entry["standby"] = 0
    scene.write()
    before = scene.start()
    scene.write(scene.new, x_gate=str(scene.gate))
    reload = Command(scene, "reload")
    scene.until_loading_in_place()
    os.kill(before["pid"], signal.SIGKILL)
    scene.service.until(lambda s: not s["engines"], "engine 1 is gone, none is started")
    scene.pass_gate()
    output = reload.end()
    assert "tiny/target: loaded, generation 2 in" in output
    scene.service.until(lambda s: s["state"] == "serving", "an engine serves")
    answer = scene.service.get()
    assert (answer["weights"], answer["arguments"]["model"]) == (
        digest_of(scene.new),
        str(scene.new),
    )


def test_killed_supervisor_leaves_engines_that_end_up_with_the_new_weights(scene: Scene) -> None:
    scene.start()
    scene.write(scene.new, x_gate=str(scene.gate))
    reload = Command(scene, "reload")
    scene.until_loading_in_place()
    scene.service.kill_supervisor()
    scene.pass_gate()
    reload.end()
    scene.service.start()
    scene.service.until(lambda s: s["state"] == "serving", "an engine serves")
    Command(scene, "reload", "--live", "tiny").end()
    until(lambda: scene.weights() == digest_of(scene.new), "an answer of the new weights")


def test_engines_that_cannot_take_the_new_weights_while_they_run_are_replaced(
    scene: Scene,
) -> None:
    answers = scene.directory / "swaps"
    cannot = {"outcome": "left", "reason": "its layers differ", "code": "not-live"}
    answers.write_text(json.dumps({"1": cannot, "2": cannot}))
    scene.service.entry["arguments"]["x_swaps"] = str(answers)
    scene.write()
    scene.start()
    publish = scene.publish(scene.new)
    output = publish.end()
    assert (
        "chat/1 cannot take it while it runs, its service starts another engine: its layers differ"
        in output
    )
    assert publish.status == 0, output
    # Its old engines have no weights any more: none of them is woken first.
    answer = scene.service.get(timeout_s=4 * BOUND_S)
    assert (answer["weights"], answer["arguments"]["model"]) == (
        digest_of(scene.new),
        str(scene.new),
    )
    assert "cannot take over" not in scene.service.log


def test_service_that_slept_before_sleeps_on(scene: Scene) -> None:
    scene.start()
    scene.service.ask("sleep")
    assert "tiny/target: loaded, generation 2 in" in scene.publish(scene.new).end()
    assert scene.service.status()["state"] == "asleep"
    assert scene.weights() == digest_of(scene.new)


def test_engines_of_a_service_that_stays_are_listed_once_and_one_of_nobody_beside_them(
    scene: Scene,
) -> None:
    """With room for both generations."""
    answers = scene.directory / "swaps"
    left = {"outcome": "left", "reason": "a rank has no newer weights", "code": "timeout"}
    answers.write_text(json.dumps({"1": left}))
    # A standby that kept nothing mapped would have no row either.
    scene.service.entry["arguments"] |= {"x_swaps": str(answers), "x_keeps": "yes"}
    scene.keys = {}
    scene.write()
    scene.daemon.start()
    scene.start_service(snapshot=False)
    with scene.daemon.client() as stranger:
        stranger.attach(key_of({"model": str(scene.old)})).close()
        output = scene.publish(scene.new).end()
        (old,) = scene.daemon.status().old_generations
    assert len(old.engines) == 3, "the serving engine, its standby, and the one of nobody"
    rows = [line[line.index("cpu0 ") :] for line in output.splitlines() if "cpu0 tiny: " in line]
    assert sorted(rows) == [
        "cpu0 tiny: chat/1 stays: a rank has no newer weights",
        f"cpu0 tiny: pid {os.getpid()} stays on generation 1: llm.collective_rpc('weightcached_swap') in its program "
        "brings the newest, or restart the engine",
    ]


def test_reload_says_for_what_an_engine_waits(scene: Scene) -> None:
    """As one whose other ranks have no newer weights yet; for two minutes nothing else would come."""
    answers, loaded = scene.directory / "swaps", scene.directory / "loaded"
    answer = {"outcome": "swapped", "generation": 2, "after": str(loaded)}
    answers.write_text(json.dumps({"newest": "", "1": answer}))
    scene.service.entry["arguments"]["x_swaps"] = str(answers)
    scene.keys = {}
    scene.write(live=False)
    scene.daemon.start()
    scene.start_service(snapshot=False)
    command = [
        sys.executable, "-m", "weightcached.cli.weightcachectl", "reload", "--live",
        "--socket-dir", str(scene.daemon.runtime), "tiny",
    ]  # fmt: skip
    with subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as reload:  # fmt: skip
        assert reload.stdout
        assert reload.stderr
        said = False
        for line in reload.stderr:
            said = said or line == "engine chat/1 waits: not yet\n"
            if said:
                loaded.touch()
        output = reload.stdout.read()
    assert said, "the command ended without the line"
    assert "cpu0 tiny: chat/1 swapped to generation 2 in 10 ms" in output
