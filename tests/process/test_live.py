"""New weights for engines that run: a real daemon tells services and names other engines."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from tests.fakes.checkpoints import key_of, write_checkpoint
from tests.fakes.client import Client
from tests.fakes.daemon import DaemonProcess, model, print_log, until, write_manifest
from weightcached.cli.weightcachectl import main as weightcachectl
from weightcached.config.published import path_of, read_published
from weightcached.errors import EXIT_FAILURE
from weightcached.wire.framing import recv_packet, send_packet
from weightcached.wire.messages import (
    Attach,
    Mismatch,
    Progress,
    Ready,
    Reload,
    ReloadReply,
    SwapOutcome,
)
from weightcached.wire.services import Reply, Request


class FakeService:
    """A supervisor's socket that answers `swap`, and keeps the questions; and `processes`, if it has
    any.
    """

    def __init__(self, runtime: Path, name: str = "chat") -> None:
        self.asked: list[dict[str, Any]] = []
        self.answer: Any = [
            {"engine": f"{name}/1", "outcome": "swapped", "generation": 2, "drain_s": 1.5, "pause_s": 0.031}
        ]  # fmt: skip
        self.error = ""
        self.processes: list[int] = []
        directory = runtime / "engines" / name
        directory.mkdir(parents=True, mode=0o700, exist_ok=True)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.bind(str(directory / "service.sock"))
        self._sock.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._sock.accept()
                # One that asks and does not wait for its answer ends nobody else's.
                with peer, contextlib.suppress(OSError, EOFError):
                    request = msgspec.json.decode(recv_packet(peer, max_fds=0).data, type=Request)
                    error = self.error
                    result = {"engines": self.answer}
                    if request.command == "swap":
                        self.asked.append(request.arguments)
                    elif request.command == "processes" and self.processes:
                        error = ""
                        engine = {"engine": "chat/1", "unmaps": True, "processes": self.processes}
                        result = {"engines": [engine]}
                    else:
                        # As `status` asks it.
                        error = "not now"
                    reply = Reply(number=request.number, error=error, result=result)
                    send_packet(peer, msgspec.json.encode(reply), [])

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class Scene:
    """A daemon with a live model, and a service of it."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self.old = write_checkpoint(directory / "old", seed=1)
        self.new = write_checkpoint(directory / "step-2", seed=2)
        self.daemon = DaemonProcess(directory)
        self.write(live=True)
        self.daemon.runtime.mkdir(mode=0o700)
        self.service = FakeService(self.daemon.runtime)
        stack.callback(self.service.close)
        stack.callback(self.daemon.close)
        stack.callback(print_log, self.daemon.log_path)

    def write(self, checkpoint: Path | None = None, **keys: Any) -> None:
        write_manifest(self.daemon.manifest, [model("tiny", checkpoint or self.old) | keys])

    def start(self) -> None:
        """Start the daemon, which tells the service of what is live."""
        asked = len(self.service.asked)
        self.daemon.start()
        if "live: true" in self.daemon.manifest.read_text():
            until(lambda: len(self.service.asked) > asked, "the service is told")

    def reload(self, **options: Any) -> ReloadReply:
        with self.daemon.client("ctl") as client:
            reply = client.ask(Reload(**options))
            while isinstance(reply, Progress):
                reply = client.receive()
        assert isinstance(reply, ReloadReply), reply
        return reply

    def run(self, *arguments: str) -> Result:
        command = [arguments[0], "--socket-dir", str(self.daemon.runtime), *arguments[1:]]
        return CliRunner().invoke(weightcachectl, command)

    def attach(self, engine: Client, checkpoint: Path) -> None:
        engine.attach(key_of({"model": str(checkpoint)})).close()


@pytest.fixture
def scene(short_tmp: Path) -> Iterator[Scene]:
    with contextlib.ExitStack() as stack:
        yield Scene(short_tmp, stack)


def test_services_of_a_live_model_are_told_after_a_reload_and_after_a_start(scene: Scene) -> None:
    scene.start()
    said = scene.reload()
    # A daemon before this one may have loaded the weights and told nobody.
    assert scene.service.asked == [{"model": "tiny", "on_swap": "drain"}] * 2
    assert said.swaps == [
        SwapOutcome(
            model="tiny", engine="chat/1", outcome="swapped", generation=2, drain_s=1.5, pause_s=0.031
        )
    ]  # fmt: skip
    scene.write(scene.new, live=True, on_swap="abort")
    said = scene.reload()
    assert [outcome.outcome for outcome in said.outcomes] == ["loaded"]
    assert scene.service.asked[-1] == {"model": "tiny", "on_swap": "abort"}


def test_nobody_is_told_of_a_model_that_is_not_live_unless_the_reload_is(scene: Scene) -> None:
    scene.write(live=False)
    scene.start()
    scene.write(scene.new, live=False)
    assert scene.reload().swaps == []
    assert scene.service.asked == []
    assert [swap.engine for swap in scene.reload(live=True, caches=["tiny"]).swaps] == ["chat/1"]
    assert scene.service.asked == [{"model": "tiny", "on_swap": "drain"}]


def test_nobody_is_told_of_weights_that_could_not_be_loaded(scene: Scene) -> None:
    scene.start()
    asked = len(scene.service.asked)
    scene.write(scene.daemon.directory / "nowhere", live=True)
    said = scene.reload()
    assert ([o.outcome for o in said.outcomes], said.swaps) == (["failed"], [])
    assert len(scene.service.asked) == asked
    assert scene.daemon.status().caches[0].generation == 1


def test_load_without_room_names_what_keeps_the_present_weights_from_making_room(
    scene: Scene,
) -> None:
    scene.start()
    write_manifest(
        scene.daemon.manifest,
        [model("tiny", scene.new, x_fault="no-room-in-packing") | {"live": True}],
    )
    (outcome,) = scene.reload().outcomes
    assert outcome.error == (
        "it needs 15.0 GiB, 2.0 GiB are free; the present weights are served on, and do not make room for the new "
        "ones: tiny/target has no snapshot that would bring it back if they fail: run 'weightcachectl snapshot tiny' "
        "first. By hand: 'weightcachectl engine sleep' its service, 'weightcachectl drop tiny', reload or publish "
        "again, and wake the service"
    )
    with scene.daemon.client() as engine:
        scene.attach(engine, scene.old)


@pytest.mark.parametrize("fault", ["error", "answer"])
def test_service_that_does_not_answer_rightly_is_named(scene: Scene, fault: str) -> None:
    scene.start()
    if fault == "error":
        # As one of an older weightcached says it.
        scene.service.error = "no command 'swap'"
    else:
        scene.service.answer = [{"engine": "chat/1", "outcome": "unknown"}]
    (swap,) = scene.reload().swaps
    assert (swap.engine, swap.outcome) == ("chat", "left")
    assert swap.reason
    result = scene.run("reload")
    assert result.exit_code == EXIT_FAILURE
    assert f"cpu0 tiny: chat stays: {swap.reason}" in result.output


def test_engine_of_its_own_is_named_and_may_attach_to_the_newest_generation(scene: Scene) -> None:
    scene.start()
    with scene.daemon.client() as engine:
        scene.attach(engine, scene.old)
        scene.write(scene.new, live=True)
        swap = scene.reload().swaps[-1]
        assert (swap.outcome, swap.generation) == ("unasked", 1)
        assert swap.engine.startswith("pid ")
        status = scene.daemon.status()
        assert [(o.generation, len(o.engines)) for o in status.old_generations] == [(1, 1)]
        key = key_of({"model": str(scene.old)})
        with scene.daemon.client() as other:
            assert isinstance(other.ask(Attach(key=key)), Mismatch)
            ready = other.expect(Attach(key=key, cache="tiny/target"), Ready)
            assert ready.generation == 2
            other.take(ready).close()
            engine.close()
            # The acknowledgement: the old generation's last lease has ended.
            status = scene.daemon.until(lambda s: not s.old_generations, "the old one is freed")
            assert [e.generation for e in status.caches[0].engines] == [2]


@pytest.mark.parametrize("answers", ["both", "swap", "processes"])
def test_engine_of_a_service_is_unasked_unless_the_service_answers_for_it(
    scene: Scene, answers: str
) -> None:
    scene.start()
    scene.service.error = "not now" if answers == "processes" else ""
    scene.service.processes = [] if answers == "swap" else [os.getpid()]
    with scene.daemon.client() as engine:
        scene.attach(engine, scene.old)
        scene.write(scene.new, live=True)
        first, *others = scene.reload().swaps
    assert first.engine.startswith("chat")
    assert [swap.outcome for swap in others] == ([] if answers == "both" else ["unasked"])


def test_published_checkpoint_is_the_models_also_for_the_next_daemon(scene: Scene) -> None:
    scene.start()
    result = scene.run("publish", "tiny", str(scene.new), "--label", "step 2")
    # Before them there may be lines of its progress.
    *_, loaded, swapped = result.output.splitlines()
    assert loaded.startswith("cpu0 tiny/target: loaded, generation 2 in ")
    assert swapped == "cpu0 tiny: chat/1 swapped to generation 2 in 31 ms after 1.5 s of requests"
    assert result.exit_code == 0
    assert "'step 2', loaded" in scene.run("status").output
    document = scene.run("status", "--json").output
    (cache,) = json.loads(document[document.index("{") :])["devices"][0]["caches"]
    assert (cache["label"], cache["live"], cache["generation"]) == ("step 2", True, 2)
    assert (
        "cpu0 tiny/target 'step 2': 2 tensors, 3.0 MiB, all digests equal"
        in scene.run("verify").output
    )
    with scene.daemon.client() as engine:
        scene.attach(engine, scene.new)

    scene.daemon.stop()
    scene.start()
    assert scene.daemon.status().caches[0].label == "step 2"
    with scene.daemon.client() as engine:
        scene.attach(engine, scene.new)
    # Its own again.
    result = scene.run("publish", "tiny", str(scene.old), "--label", "")
    assert result.exit_code == 0
    assert not path_of(scene.daemon.manifest).exists()
    with scene.daemon.client() as engine:
        scene.attach(engine, scene.old)


def test_checkpoint_that_does_not_load_is_not_published(scene: Scene) -> None:
    scene.start()
    scene.run("publish", "tiny", str(scene.new))
    assert read_published(scene.daemon.manifest)["tiny"].label == "step-2"
    bad = scene.daemon.directory / "bad"
    bad.mkdir()
    (bad / "config.json").write_text("{}")
    result = scene.run("publish", "tiny", str(bad))
    assert result.exit_code == EXIT_FAILURE
    assert f"{bad} was not published: tiny stays as it was" in result.output
    assert read_published(scene.daemon.manifest)["tiny"].path == str(scene.new)
    status = scene.daemon.status()
    assert [(c.generation, c.error, c.label) for c in status.caches] == [(2, "", "step-2")]


def test_unknown_model_and_directory_without_a_checkpoint_are_refused(scene: Scene) -> None:
    scene.start()
    result = scene.run("publish", "none", str(scene.new))
    assert (result.exit_code, result.output) == (
        EXIT_FAILURE,
        "weightcachectl: no daemon has a model 'none'; models: tiny\n",
    )
    empty = scene.daemon.directory / "empty"
    empty.mkdir()
    result = scene.run("publish", "tiny", str(empty))
    assert "has no config.json" in result.output
    assert result.exit_code
    assert not path_of(scene.daemon.manifest).exists()


def test_reload_takes_devices_and_models(scene: Scene) -> None:
    scene.start()
    assert scene.run("reload", "cpu0", "tiny").output.startswith("cpu0 tiny/target: unchanged")
    result = scene.run("reload", "other")
    assert "no cache 'other' on cpu0" in result.output
    assert scene.run("reload", "cpu1000").exit_code == 2


def test_question_by_reload_is_the_daemons_own(scene: Scene) -> None:
    """It goes on if the tool leaves."""
    scene.start()
    asked = len(scene.service.asked)
    scene.write(scene.new, live=True)
    with scene.daemon.client("ctl") as client:
        client.send(Reload())
    scene.daemon.until(lambda s: s.caches[0].generation == 2, "the new generation")
    until(lambda: len(scene.service.asked) == asked + 1, "the service is told")
