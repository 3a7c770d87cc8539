"""New weights for a service's engines while they run: real processes, fake engines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fakes.daemon import BOUND_S, print_log, until
from tests.fakes.service import ServiceProcess
from weightcached.wire.framing import recv_packet, send_packet
from weightcached.wire.services import Reply, Request, ask_service


class Scene:
    """A service whose model gets another checkpoint."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self.answers = directory / "swaps"
        self.service = ServiceProcess(directory, arguments={"x_swaps": str(self.answers)})
        stack.callback(self.service.close)
        stack.callback(print_log, self.service.log_path)
        self.old = str(directory / "checkpoint")
        self.new = str(directory / "new")
        Path(self.new).mkdir()
        (Path(self.new) / "config.json").write_text("{}")
        self.say()

    def say(self, **answers: Any) -> None:
        self.answers.write_text(json.dumps({"newest": self.new, **answers}))

    def publish(self) -> None:
        self.service.model["engine"] = {"model": self.new}
        self.service.write_manifest()

    def swap(self, model: str = "tiny", on_swap: str = "drain") -> list[dict[str, Any]]:
        said = ask_service(
            self.service.home / "service.sock", "swap", timeout_s=BOUND_S,
            arguments={"model": model, "on_swap": on_swap},
        )  # fmt: skip
        found: list[dict[str, Any]] = said["engines"]
        return found

    def weights(self) -> str:
        return str(self.service.get()["weights"])


@pytest.fixture
def scene(short_tmp: Path) -> Iterator[Scene]:
    with contextlib.ExitStack() as stack:
        yield Scene(short_tmp, stack)


def outcomes(said: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(each["engine"], each["outcome"]) for each in said]


def kill_and_wait(scene: Scene, pid: int, number: int) -> None:
    os.kill(pid, signal.SIGKILL)
    scene.service.until(lambda s: s["generation"] == number, f"engine {number} serves")


def test_serving_and_parked_engine_get_the_weights_and_so_does_each_that_follows(
    scene: Scene,
) -> None:
    scene.service.start()
    before = scene.service.until_standby()
    scene.publish()
    said = scene.swap()
    assert outcomes(said) == [("chat/1", "swapped"), ("chat/2", "swapped")]
    assert said[0] == {
        "engine": "chat/1", "outcome": "swapped", "generation": 2, "pause_s": 0.01,
    }  # fmt: skip
    assert scene.weights() == scene.new
    # Takeover, and the engine that is started after it.
    kill_and_wait(scene, before["pid"], 2)
    assert scene.weights() == scene.new
    after = scene.service.until_standby()
    kill_and_wait(scene, after["pid"], 3)
    assert scene.service.get()["arguments"]["model"] == scene.new


def test_new_supervisor_takes_swapped_engines_as_those_of_the_manifest(scene: Scene) -> None:
    scene.service.start()
    before = scene.service.until_standby()
    scene.publish()
    scene.swap()
    assert scene.service.process
    scene.service.process.kill()
    scene.service.process.wait()
    scene.service.start()
    after = scene.service.until_standby()
    assert after["pid"] == before["pid"], "it was not replaced"
    assert [e["version"] for e in after["engines"]] == [1, 1]


def test_another_model_is_nothing_to_the_service(scene: Scene) -> None:
    scene.service.start()
    assert scene.swap(model="other") == []


def test_engine_that_cannot_take_them_while_it_runs_is_replaced(scene: Scene) -> None:
    scene.service.start()
    scene.service.until_standby()
    scene.say(**{"1": {"outcome": "left", "reason": "its layers differ", "code": "not-live"}})
    scene.publish()
    said = scene.swap()
    assert outcomes(said) == [("chat/1", "restarting")]
    assert said[0]["reason"] == "its layers differ"
    scene.service.until(lambda s: s["generation"] > 2, "an engine with the new weights serves")
    assert scene.service.get()["arguments"]["model"] == scene.new


def test_all_stay_on_the_old_weights_if_the_serving_engine_does(scene: Scene) -> None:
    scene.service.start()
    before = scene.service.until_standby()
    reason = "its requests did not end within 30 s (drain_s)"
    scene.say(**{"1": {"outcome": "left", "reason": reason, "code": "timeout"}})
    scene.publish()
    said = scene.swap()
    assert outcomes(said) == [("chat/1", "left")]
    assert scene.weights() == scene.old
    kill_and_wait(scene, before["pid"], 2)
    assert scene.weights() == scene.old
    # Tried again.
    scene.service.until_standby()
    scene.say()
    assert [outcome for _, outcome in outcomes(scene.swap())] == ["swapped", "swapped"]
    assert scene.weights() == scene.new


def test_parked_engine_that_does_not_take_them_is_replaced(scene: Scene) -> None:
    scene.service.start()
    scene.service.until_standby()
    scene.say(**{"2": {"outcome": "left", "reason": "no daemon", "code": "no-daemon"}})
    scene.publish()
    assert outcomes(scene.swap()) == [("chat/1", "swapped"), ("chat/2", "restarting")]
    after = scene.service.until(
        lambda s: (
            sorted(e["state"] for e in s["engines"]) == ["parked", "serving"]
            and all(e["number"] != 2 for e in s["engines"])
        ),
        "another engine is parked",
    )
    kill_and_wait(scene, after["pid"], 3)
    assert scene.service.get()["arguments"]["model"] == scene.new


@pytest.mark.parametrize("how", ["killed", "dies"])
def test_engine_that_is_killed_in_a_swap_leaves_it_to_its_successor(scene: Scene, how: str) -> None:
    scene.service.start()
    scene.service.until_standby()
    scene.say(**{"1": {"outcome": how}})
    scene.publish()
    assert ("chat/2", "swapped") in outcomes(scene.swap())
    scene.service.until(lambda s: s["generation"] == 2, "the parked engine serves")
    assert scene.weights() == scene.new
    # And so has the one that follows.
    after = scene.service.until_standby()
    kill_and_wait(scene, after["pid"], 3)
    assert scene.weights() == scene.new


def test_sleeping_service_wakes_with_the_new_weights(scene: Scene) -> None:
    scene.service.start()
    scene.service.until_standby()
    scene.service.ask("sleep")
    scene.publish()
    said = scene.swap()
    assert said
    assert {outcome for _, outcome in outcomes(said)} == {"swapped"}
    scene.service.ask("wake")
    assert scene.weights() == scene.new


def test_swap_waits_for_ranks_whose_daemon_still_loads(scene: Scene, short_tmp: Path) -> None:
    scene.service.start()
    scene.service.until_standby()
    loaded = short_tmp / "loaded"
    answer = {"outcome": "swapped", "generation": 2, "after": str(loaded)}
    scene.say(**{"1": answer})
    scene.publish()
    said: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: said.extend(scene.swap()))
    thread.start()
    status = scene.service.until(lambda s: bool(s["waits"]), "it says that it waits")
    assert status["waits"] == {"chat/1": "not yet"}
    assert (said, scene.weights()) == ([], scene.old)
    loaded.touch()
    thread.join(BOUND_S)
    assert outcomes(said) == [("chat/1", "swapped"), ("chat/2", "swapped")]
    assert scene.service.status()["waits"] == {}


def test_engine_that_starts_meanwhile_is_swapped_before_it_is_used(
    scene: Scene, short_tmp: Path
) -> None:
    scene.service.entry["arguments"]["x_delay_file"] = str(short_tmp / "delay")
    scene.service.write_manifest()
    (short_tmp / "delay").write_text("2")
    scene.service.start()
    # The standby begins to start with the old checkpoint, and waits.
    until(lambda: "engine=2 starting" in scene.service.log, "the standby starts")
    scene.publish()
    assert outcomes(scene.swap()) == [("chat/1", "swapped")]
    (short_tmp / "delay").unlink()
    status = scene.service.until_standby()
    kill_and_wait(scene, status["pid"], 2)
    answer = scene.service.get()
    assert (answer["arguments"]["model"], answer["weights"]) == (scene.old, scene.new)


class Way:
    """A daemon's connection, for whose room the service sleeps."""

    def __init__(self, service: ServiceProcess) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(BOUND_S)
        self._sock.connect(str(service.home / "service.sock"))

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        request = Request(number=1, command=command, arguments=arguments)
        send_packet(self._sock, msgspec.json.encode(request), [])
        reply = msgspec.json.decode(recv_packet(self._sock, max_fds=0).data, type=Reply)
        assert not reply.error, reply.error
        return reply.result

    def close(self) -> None:
        self._sock.close()


@pytest.fixture
def way(scene: Scene) -> Iterator[Way]:
    scene.service.start()
    scene.service.until_standby()
    way = Way(scene.service)
    yield way
    way.close()


@pytest.mark.parametrize("how", ["resumes", "leaves"])
def test_client_of_a_service_that_gives_way_waits_until_the_daemon_has_what_it_wants(
    scene: Scene, way: Way, how: str
) -> None:
    assert way.ask("give_way", device="cpu0", on_swap="drain")["drain_s"] >= 0
    assert scene.service.status()["state"] == "asleep"
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(scene.weights()))
    thread.start()
    thread.join(1.0)
    assert (answers, scene.service.status()["state"]) == ([], "asleep")
    if how == "resumes":
        assert way.ask("resume")["serving"]
        assert scene.service.status()["state"] == "serving"
        swapped = scene.old
    else:
        # As a daemon that has died: what the next one serves comes first.
        way.close()
        swapped = scene.new
    thread.join(BOUND_S)
    assert answers == [swapped]


def test_service_that_is_sent_to_sleep_while_it_gives_way_has_no_share_of_the_device(
    scene: Scene, way: Way
) -> None:
    way.ask("give_way", device="cpu0", on_swap="drain")
    assert scene.service.status()["awake"]
    assert not scene.service.ask("sleep")["awake"]
    assert not way.ask("resume")["serving"]
    assert scene.service.status()["state"] == "asleep"
    assert scene.weights() == scene.old
