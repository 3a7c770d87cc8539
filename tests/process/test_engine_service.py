"""The engine service with fake engines: real processes, real signals, a real listening socket."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.fakes.daemon import BOUND_S, print_log, until
from tests.fakes.service import ClientLoop, Packages, ServiceProcess
from weightcached.cli import engine as cli_engine
from weightcached.cli.engine import as_json, as_table
from weightcached.cli.weightcachectl import main as weightcachectl
from weightcached.errors import EXIT_BUSY, EXIT_CONFIG, EXIT_FAILURE, EngineError
from weightcached.exporter.health import Node
from weightcached.exporter.metrics import text_of
from weightcached.wire.services import ask_service

Make = Callable[..., ServiceProcess]
# Longer than an engine that does not hang is silent on a busy machine.
HANG_S = 10


@pytest.fixture
def make(short_tmp: Path) -> Iterator[Make]:
    """Makes services that are ended with the test, whatever happened to them."""
    with contextlib.ExitStack() as stack:

        def make(**entry: Any) -> ServiceProcess:
            service = ServiceProcess(short_tmp, **entry)
            stack.callback(service.close)
            stack.callback(print_log, service.log_path)
            return service

        yield make


def packages_of(service: ServiceProcess) -> Packages:
    """A package that its processes find, from its start on."""
    packages = Packages(service.directory)
    service.env["PYTHONPATH"] = packages.path
    return packages


def pair(
    make: Make, shares: tuple[float, float] = (0.85, 0.85), **arguments: Any
) -> tuple[ServiceProcess, ServiceProcess]:
    """Two services on one device, not started. arguments: the first one's."""
    one_share, other_share = ({"gpu_memory_utilization": share} for share in shares)
    one = make(arguments={**one_share, **arguments}, standby=0)
    return one, make(name="code", others=[one], arguments=other_share, standby=0)


def started_pair(
    make: Make, shares: tuple[float, float] = (0.85, 0.85), **arguments: Any
) -> tuple[ServiceProcess, ServiceProcess]:
    """The same, started. If they do not fit together, the first one sleeps."""
    one, other = pair(make, shares, **arguments)
    one.start()
    other.start()
    return one, other


@contextlib.contextmanager
def request_under_way(service: ServiceProcess, end: Path) -> Iterator[None]:
    """It ends once that file is there; then the service's engine has answered."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=BOUND_S) as slow:
        slow.sendall(f"GET /until?{end} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        service.until(lambda s: any(e["requests"] > 0 for e in s["engines"]), "it is there")
        yield
        end.touch()
        assert b"200 OK" in slow.recv(65536)


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid, number)


@pytest.mark.parametrize("refusal", ["", "a test wants no fork"])
def test_engines_are_forked_and_executed_where_that_is_refused(make: Make, refusal: str) -> None:
    service = make()
    service.env["FAKE_ENGINE_REFUSAL"] = refusal
    service.start()
    assert service.get()["engine"] == 1
    service.until_standby()
    assert ("executed" in service.log) == bool(refusal)
    assert service.log.count(f"engines are executed, not forked: {refusal}\n") == bool(refusal)


def test_nursery_in_which_a_fork_does_not_work_is_not_used(make: Make) -> None:
    service = make()
    service.env["FAKE_ENGINE_TRIAL"] = "crash"
    service.start()
    assert "executed, not forked: a fork that was tried ended with status 7\n" in service.log


def test_engine_that_fails_after_a_fork_is_executed_the_next_time(make: Make) -> None:
    service = make(arguments={"x_no_fork": True}).start()
    assert service.get()["engine"] == 2
    service.until_standby()
    assert "starting: it does not start after a fork" in service.log
    assert service.log.count(" executed") == 2, "also the standby"


@pytest.mark.parametrize("victim", ["pid", "core"])
def test_death_of_any_process_brings_the_parked_engine(make: Make, victim: str) -> None:
    service = make().start()
    service.until_standby()
    before = service.get()
    with ClientLoop(service) as clients:
        kill(before[victim])
        clients.until_answers(2)
    assert clients.refused == []
    assert len(clients.failed) <= 4, "only requests under way are lost"
    after = service.until_standby()
    assert (after["generation"], after["takeovers"]) == (2, 1)
    assert 0 < after["last_takeover_s"] < BOUND_S
    assert not any(os.path.exists(f"/proc/{before[v]}/exe") for v in ("pid", "core"))
    assert not (service.home / "1").exists()


@pytest.mark.parametrize(("failures", "takes_over"), [(2, True), (3, False)])
def test_parked_engine_that_cannot_wake_is_asked_again(
    make: Make, short_tmp: Path, failures: int, takes_over: bool
) -> None:
    service = make(arguments={"x_wake_fails": str(short_tmp / "fails")}).start()
    status = service.until_standby()
    (short_tmp / "fails").write_text(str(failures))
    kill(status["pid"])
    assert (service.get()["engine"] == 2) == takes_over
    assert "cannot take over yet: RuntimeError: no memory" in service.log


def test_two_engines_never_serve_at_once_as_long_as_the_fence_is_held(make: Make) -> None:
    service = make().start()
    status = service.until_standby()
    with contextlib.ExitStack() as held:
        # Its core ends with it; the successor must not be quicker than we are.
        with service.supervisor_stopped():
            kill(status["pid"])
            held.enter_context(service.fence_held())
        connection = socket.create_connection(("127.0.0.1", service.port), timeout=BOUND_S)
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        service.until(lambda s: s["state"] == "taking-over", "the successor wants the fence")
        connection.settimeout(1.0)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        assert service.status()["state"] == "taking-over"
    connection.settimeout(BOUND_S)
    assert b'"engine": 2' in connection.recv(65536), "who waited is answered"
    connection.close()


def test_process_of_a_dead_engine_that_stays_keeps_the_fence(make: Make) -> None:
    """The fence is the whole tree's: it is free only when the last process is gone."""
    service = make(standby=0).start()
    answer = service.get()
    service.kill_supervisor()
    # It would end with its pipe.
    kill(answer["core"], signal.SIGSTOP)
    kill(answer["pid"])
    until(lambda: answer["pid"] not in service.processes(), "the first process is gone")
    assert service.processes() == [answer["core"]]
    assert not service.fence_is_free()
    service.start()
    assert answer["core"] not in service.processes(), "the next supervisor ends what is left"
    assert service.get()["pid"] != answer["pid"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["pid", "core"])
def test_hung_engine_is_a_dead_engine(make: Make, victim: str) -> None:
    service = make(hang_s=HANG_S).start()
    service.until_standby()
    before = service.get()
    kill(before[victim], signal.SIGSTOP)
    if victim == "pid":
        assert service.get()["engine"] == 2, "who connects meanwhile waits"
    until(lambda: before["pid"] not in service.processes(), "the hung engine is gone")
    assert f"it hangs: it did not answer 'ping' within {HANG_S} s" in service.log


@pytest.mark.slow
def test_parked_engine_that_dies_or_hangs_is_replaced(make: Make) -> None:
    service = make(hang_s=HANG_S).start()
    for number, how in ((2, signal.SIGKILL), (3, signal.SIGSTOP)):
        service.until_standby()
        kill(service.record(number)["pid"], how)
        service.until(
            lambda s, number=number: any(e["number"] == number + 1 for e in s["engines"]),  # type: ignore[misc]
            "another standby",
        )
    assert service.until_standby()["generation"] == 1, "nobody took over"


def test_supervisor_that_is_killed_costs_no_request(make: Make) -> None:
    service = make().start()
    service.until_standby()
    with ClientLoop(service) as clients:
        service.kill_supervisor()
        seen = len(clients.answers)
        until(lambda: len(clients.answers) > seen + 50, "engines go on")
        service.start()
        after = service.until_standby()
        assert [e["number"] for e in after["engines"]] == [1, 2], "nothing was started anew"
        kill(after["pid"])
        clients.until_answers(2)
    assert clients.refused == []
    assert len(clients.failed) <= 4
    assert {e for _, e in clients.answers} == {1, 2}


def test_supervisor_and_engine_killed_together(make: Make) -> None:
    service = make().start()
    status = service.until_standby()
    with ClientLoop(service) as clients:
        service.kill_supervisor()
        kill(status["pid"])
        service.start()
        clients.until_answers(2)
    assert clients.refused == []


def test_engine_without_a_record_is_ended_by_the_next_supervisor(make: Make) -> None:
    """As one whose supervisor was killed right after the fork."""
    service = make(standby=0).start()
    before = service.get()
    service.kill_supervisor()
    (service.home / "1/record.json").unlink()
    service.start()
    assert service.get()["pid"] != before["pid"]
    assert not {before["pid"], before["core"]} & set(service.processes())
    assert "is an engine without a record, ending it" in service.log


def test_without_a_manager_the_socket_comes_back_from_an_engine(make: Make) -> None:
    service = make().start()
    service.until_standby()
    service.kill_supervisor()
    service.start(keep_store=False)
    assert "taken back" in service.log
    assert service.get()["engine"] == 1


def test_service_that_sleeps_sleeps_on_under_the_next_supervisor(make: Make) -> None:
    service = make().start()
    service.until_standby()
    service.ask("sleep")
    service.kill_supervisor()
    service.launch()
    status = service.until(lambda s: len(s["engines"]) == 2, "it has the engines back")
    assert (status["state"], status["awake"]) == ("asleep", False)
    assert not service.get()["asleep"], "a connection wakes it"
    service.kill_supervisor()
    service.launch()
    service.until(lambda s: s["state"] == "serving", "it serves")


def test_service_that_sleeps_goes_back_to_arguments_that_work(make: Make) -> None:
    """Also under the next supervisor, which has seen no engine of it serve."""
    service = make(arguments={"seed": 1}).start()
    service.until_standby()
    service.ask("sleep")
    service.kill_supervisor()
    # The manager waits for READY=1.
    service.start()
    service.write_manifest(arguments={"x_fail": "no such quantization"})
    with pytest.raises(EngineError, match="the old one serves on: no such quantization"):
        service.ask("restart")
    assert service.get()["arguments"]["seed"] == 1


@pytest.mark.slow
def test_watchdog_is_fed_while_a_hung_engine_is_taken_back(make: Make) -> None:
    """The manager watches on if one supervisor has become another."""
    service = make(hang_s=HANG_S)
    service.env["WATCHDOG_USEC"] = "1000000"
    service.start()
    service.until_standby()
    kill(service.record(2)["pid"], signal.SIGSTOP)
    service.kill_supervisor()
    service.start()
    assert service.manager
    states = service.manager.states
    assert "WATCHDOG=1" in states[: states.index("READY=1")]


def test_engine_is_not_forked_from_imports_of_before_an_upgrade(make: Make) -> None:
    service = make()
    packages = packages_of(service)
    service.start()
    service.until_standby()
    packages.upgrade()
    take_over(service, takeovers=1)
    assert service.log.count(" executed parked") == 1
    take_over(service, takeovers=2)
    assert service.log.count(" executed parked") == 1, "the next is forked again"
    changed = "packages have changed: package-1.0.dist-info, package-2.0.dist-info"
    assert service.log.count(f"imports anew: {changed}") == 1


def test_imports_that_lengthen_the_path_install_nothing(make: Make) -> None:
    """As setuptools does by its own packages, once an engine's imports need it."""
    service = make()
    packages = packages_of(service)
    (packages.directory / "more/package-1.0.dist-info").mkdir(parents=True)
    (packages.directory / "lengthens.py").write_text(
        "import sys\n"
        "from tests.fakes.engine_service import run, start, try_in_fork\n"
        f"def prepare(): sys.path.append({str(packages.directory / 'more')!r}); return ''\n"
    )
    service.module = "lengthens"
    service.start()
    service.until_standby()
    assert " executed" not in service.log


def take_over(service: ServiceProcess, *, takeovers: int) -> None:
    kill(service.status()["pid"])
    service.until(lambda s: s["takeovers"] == takeovers, "a takeover")
    service.until_standby()


def restart_by_hand(service: ServiceProcess) -> str:
    """What `weightcachectl engine restart` prints."""
    done = CliRunner().invoke(
        weightcachectl, ["engine", "restart", service.name, "--socket-dir", str(service.runtime)]
    )
    return done.output


def test_restart_after_an_upgrade_replaces_the_supervisor_and_loses_no_request(make: Make) -> None:
    service = make(arguments={"seed": 1})
    packages = packages_of(service)
    service.start()
    before = service.until_standby()
    with ClientLoop(service, 8) as clients:
        packages.upgrade()
        service.write_manifest(arguments={"seed": 2})
        assert restart_by_hand(service) == "chat: serving\n"
        after = service.status()
        clients.until_answers(after["generation"])
    assert clients.refused == clients.failed == []
    assert after["supervisor_pid"] == before["supervisor_pid"], "for the manager it is the same"
    assert after["supervisor_since"] > before["supervisor_since"]
    assert service.log.count("supervisor begins anew") == 1
    assert service.get()["arguments"]["seed"] == 2
    service.until_standby()
    take_over(service, takeovers=1)
    restart_by_hand(service)
    assert service.log.count("supervisor begins anew") == 1
    assert service.stop() == 0
    assert service.processes() == []


def test_restart_goes_on_if_another_has_the_supervisor_replaced(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make()
    packages = packages_of(service)
    service.start()
    service.until_standby()
    packages.upgrade()
    ask = cli_engine.ask

    def overtaken(name: str, command: str, **options: Any) -> dict[str, Any]:
        if command == "renew":
            # As another restart asks.
            assert ask(name, command, **options)["renews"]
            raise EngineError("no answer: the connection was closed")
        return ask(name, command, **options)

    monkeypatch.setattr(cli_engine, "ask", overtaken)
    assert restart_by_hand(service) == "chat: serving\n"
    assert service.log.count("supervisor begins anew") == 1


def test_supervisor_stays_if_what_was_installed_does_not_work(make: Make) -> None:
    service = make()
    packages = packages_of(service)
    service.start()
    before = service.until_standby()
    packages.upgrade()
    (packages.directory / "msgspec.py").write_text("raise ImportError('half installed')")
    assert restart_by_hand(service).endswith(
        "the software that is installed now cannot keep the service: ImportError: half installed; mend that, "
        "then run weightcachectl engine restart chat\n"
    )
    assert service.status()["supervisor_since"] == before["supervisor_since"]
    assert service.get()["engine"] == before["generation"]


def test_supervisor_stays_if_its_command_does_not_start(make: Make) -> None:
    service = make()
    packages = packages_of(service)
    service.start()
    before = service.until_standby()
    packages.upgrade()
    # Of the supervisor's modules, none needs it.
    (packages.directory / "click.py").write_text("raise ImportError('half installed')")
    assert "ImportError: half installed; mend that" in restart_by_hand(service)
    assert service.status()["supervisor_since"] == before["supervisor_since"]


def test_supervisor_stays_if_the_socket_would_have_to_move(make: Make) -> None:
    service = make()
    packages = packages_of(service)
    service.start()
    before = service.until_standby()
    packages.upgrade()
    service.write_manifest(listen="127.0.0.1:1")
    with ClientLoop(service) as clients:
        assert "a socket cannot move, so stop the service" in restart_by_hand(service)
    assert clients.refused == clients.failed == []
    assert service.status()["supervisor_since"] == before["supervisor_since"]


def test_supervisor_is_replaced_once_its_neighbour_is_answered(make: Make, short_tmp: Path) -> None:
    one, other = pair(make)
    packages = packages_of(one)
    one.start()
    other.start()
    with request_under_way(one, short_tmp / "end"):
        waking = threading.Thread(target=other.get)
        waking.start()
        one.until(lambda s: s["state"] == "draining", "it is to sleep")
        since = one.status()["supervisor_since"]
        packages.upgrade()
        renewing = threading.Thread(target=lambda: one.ask("renew"))
        renewing.start()
        # Time to begin anew too early.
        renewing.join(2.0)
        assert one.status()["supervisor_since"] == since
    for thread in (waking, renewing):
        thread.join(BOUND_S)
    one.until(lambda s: s["supervisor_since"] != since, "another supervisor")
    assert (one.status()["state"], one.status()["awake"]) == ("asleep", False)
    assert "cannot take over" not in other.log


# A signal at the worst moment: noted, but not handled yet; or while signals are held.
_STOPPED_IN_BETWEEN = """
import os, signal, sys, threading
if "engine" in sys.argv or "engine" in sys.orig_argv:
    real = signal.pthread_sigmask
    def mask(how, what):
        when = os.path.join(os.path.dirname(__file__), "when")
        is_main = threading.current_thread() is threading.main_thread()
        if how != signal.SIG_BLOCK or not is_main or not os.path.exists(when):
            return real(how, what)
        held = [] if open(when).read() == "noted" else [real(how, what)]
        os.unlink(when)
        os.kill(os.getpid(), signal.SIGTERM)
        return held[0] if held else real(how, what)
    signal.pthread_sigmask = mask
"""


@pytest.mark.parametrize("when", ["noted", "held"])
def test_stop_is_not_lost_between_two_supervisors(make: Make, when: str) -> None:
    service = make()
    packages = packages_of(service)
    (packages.directory / "sitecustomize.py").write_text(_STOPPED_IN_BETWEEN)
    service.start()
    service.until_standby()
    packages.upgrade()
    (packages.directory / "when").write_text(when)
    with contextlib.suppress(EngineError):
        service.ask("renew")
    assert service.process
    assert service.process.wait(BOUND_S) == 0
    assert service.processes() == []


def test_renewals_leave_nothing_behind(make: Make) -> None:
    service = make()
    packages = packages_of(service)
    service.start()
    assert service.process
    proc = Path(f"/proc/{service.process.pid}")

    def rests() -> float:
        """Two engines of two processes are watched; only one that is started needs a nursery."""
        since: float = service.until_standby()["supervisor_since"]
        until(lambda: _pidfds(int(proc.name)) >= 8, "all are watched")
        return since

    def renew(number: int) -> None:
        since = rests()
        (packages.directory / f"more-{number}.0.dist-info").mkdir()
        assert service.ask("renew")["renews"]
        service.until(lambda s: s["supervisor_since"] != since, "another supervisor")
        rests()

    renew(1)
    renew(2)
    fds, environment = len(list((proc / "fd").iterdir())), (proc / "environ").read_bytes()
    renew(3)
    # A connection that has ended may be open yet.
    until(lambda: len(list((proc / "fd").iterdir())) <= fds, "no descriptor more")
    assert len((proc / "environ").read_bytes()) == len(environment)


def test_stop_lets_requests_end_and_leaves_nothing(make: Make) -> None:
    service = make().start()
    service.until_standby()
    with socket.create_connection(("127.0.0.1", service.port), timeout=BOUND_S) as slow:
        slow.sendall(b"GET /closing HTTP/1.1\r\nHost: x\r\n\r\n")
        service.until(lambda s: s["engines"][0]["requests"] > 0, "the request is there")
        assert service.stop() == 0
        head = slow.recv(65536)
    assert b"200 OK" in head
    assert b"Connection: close" in head
    assert service.processes() == []
    assert sorted(path.name for path in service.home.iterdir()) == ["fence", "lock"]


def test_stop_cuts_off_what_lasts_longer_than_drain_s(make: Make) -> None:
    service = make(drain_s=0.2).start()
    with socket.create_connection(("127.0.0.1", service.port), timeout=BOUND_S) as slow:
        slow.sendall(b"GET /until?/nonexistent HTTP/1.1\r\nHost: x\r\n\r\n")
        service.until(lambda s: s["engines"][0]["requests"] > 0, "the request is there")
        assert service.stop() == 0
    assert "cut=1" in service.log


def test_rolling_restart_loses_no_request(make: Make) -> None:
    service = make(arguments={"seed": 1}).start()
    service.until_standby()
    with ClientLoop(service, 8) as clients:
        service.write_manifest(arguments={"seed": 2})
        service.ask("restart")
        number = service.status()["generation"]
        clients.until_answers(number)
    assert clients.refused == clients.failed == []
    assert service.get()["arguments"]["seed"] == 2
    after = service.until_standby()
    assert {e["version"] for e in after["engines"]} == {2}, "the old standby has gone"
    # By their own clock: a client may be held up between an answer and its note of it.
    served = [engine for _, engine in sorted(clients.answers)]
    assert served == sorted(served), "answers of old and new engine do not mix"


def test_restart_with_bad_arguments_leaves_the_old_engine_serving(make: Make) -> None:
    service = make().start()
    service.until_standby()
    service.write_manifest(arguments={"x_fail": "no such quantization"})
    with ClientLoop(service) as clients, pytest.raises(EngineError) as caught:
        service.ask("restart")
    assert str(caught.value) == (
        "the new engine cannot be started, the old one serves on: no such quantization"
    )
    assert clients.refused == clients.failed == []
    after = service.until_standby()
    assert (after["generation"], after["error"]) == (1, "no such quantization")
    service.write_manifest(arguments={"seed": 3})
    service.ask("restart")
    assert service.status()["error"] == ""
    assert service.get()["arguments"]["seed"] == 3


def test_restart_ends_with_the_next_one_that_overtakes_it(make: Make, short_tmp: Path) -> None:
    service = make(arguments={"seed": 1}).start()
    service.until_standby()
    delay = short_tmp / "delay"
    delay.write_text("3")
    service.write_manifest(arguments={"seed": 2, "x_delay_file": str(delay)})
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(service.ask, "restart")
        service.until(lambda s: any(e["version"] == 2 for e in s["engines"]), "the first is begun")
        service.write_manifest(arguments={"seed": 3})
        assert service.ask("restart")["error"] == ""
        assert first.result(BOUND_S)["error"] == ""
    assert service.get()["arguments"]["seed"] == 3


def test_bad_arguments_after_a_crash_leave_the_old_engines_in_use(make: Make) -> None:
    """The supervisor that takes them back knows what they were started with, and starts such."""
    service = make(arguments={"seed": 1}).start()
    service.until_standby()
    service.kill_supervisor()
    service.write_manifest(arguments={"seed": 2, "x_fail": "no such quantization"})
    service.start()
    service.until(lambda s: s["error"] == "no such quantization", "the new engine fails")
    kill(service.until_standby()["pid"])
    service.until(lambda s: s["takeovers"] == 1, "the parked one takes over")
    service.until_standby()
    assert service.get()["arguments"]["seed"] == 1


def test_restarted_unit_listens_where_the_manifest_says_by_now(make: Make) -> None:
    """`systemctl restart` keeps the descriptor store."""
    service = make(standby=0).start()
    service.get()
    assert service.stop() == 0
    service.write_manifest(listen=f"0.0.0.0:{service.port}")
    service.start()
    with socket.create_connection(("127.0.0.2", service.port), timeout=BOUND_S):
        pass
    assert service.get()["engine"] == 1


def test_restart_refuses_to_move_the_socket(make: Make) -> None:
    service = make().start()
    service.write_manifest(listen="127.0.0.1:1")
    with pytest.raises(EngineError, match="a socket cannot move, so stop the service"):
        service.ask("restart")
    assert service.get()["engine"] == 1


def test_standby_that_cannot_start_is_tried_again_with_growing_pauses(
    make: Make, short_tmp: Path
) -> None:
    starts = short_tmp / "starts"
    service = make(
        standby=1, arguments={"x_starts": str(starts), "x_fail_file": str(short_tmp / "fail")}
    )
    service.start()
    service.until_standby()
    (short_tmp / "fail").write_text("no room")
    kill(service.record(2)["pid"])
    service.until(lambda s: s["error"] == "no room", "the failure is told")
    assert service.get()["engine"] == 1, "it serves without standby"
    until(lambda: len(starts.read_text().splitlines()) >= 5, "it is tried again")
    (short_tmp / "fail").unlink()
    service.until_standby()


def test_engine_whose_end_is_reported_late_is_told_in_its_own_words(make: Make) -> None:
    service = make().start()
    service.until_standby()
    service.write_manifest(arguments={"x_fail_late": "no such quantization"})
    with pytest.raises(EngineError, match="the old one serves on: no such quantization"):
        service.ask("restart")


def test_service_that_never_served_ends_after_three_failures(make: Make) -> None:
    service = make(arguments={"x_fail": "wrong"}).launch()
    assert service.process
    assert service.process.wait(BOUND_S) == EXIT_FAILURE
    assert "no engine can be started: wrong" in service.log
    assert service.processes() == []


def test_address_that_is_taken_is_told_with_who_may_have_it(make: Make) -> None:
    service = make()
    with socket.create_server(("127.0.0.1", service.port)):
        service.launch()
        assert service.process
        assert service.process.wait(BOUND_S) == EXIT_CONFIG
    assert f"cannot listen on 127.0.0.1:{service.port}: Address already in use" in service.log


def test_second_supervisor_is_refused(make: Make) -> None:
    service = make().start()
    first, service.process = service.process, None
    service.launch(keep_store=False)
    assert service.process
    assert service.process.wait(BOUND_S) == EXIT_BUSY
    assert "has a supervisor already" in service.log
    service.process = first
    assert service.get()["engine"] == 1


def test_descriptors_and_processes_do_not_grow(make: Make) -> None:
    service = make().start()
    service.until_standby()
    assert service.process
    supervisor = service.process.pid

    def held() -> tuple[int, int]:
        return len(os.listdir(f"/proc/{supervisor}/fd")), len(service.processes())

    # Two engines of two processes, each in its tree and watched: from their second look on. And the
    # nursery.
    watched = 2 * 4 + 1
    until(lambda: _pidfds(supervisor) == watched, "all are watched")
    before = held()
    for _ in range(6):
        status = service.until_standby()
        kill(status["pid"])
        others = {0, status["generation"]}
        service.until(partial(_serves_another, others), "the next")
    service.until_standby()
    # A connection of our own questions may have been among those before.
    until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)), "as before")


def _serves_another(others: set[int], status: dict[str, Any]) -> bool:
    return status["generation"] not in others


def _pidfds(pid: int) -> int:
    links: list[str] = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return sum("pidfd" in link for link in links)


# ---- memory that the serving engine lends its standby


@pytest.fixture
def notes(short_tmp: Path) -> Callable[[], list[str]]:
    """What the engines said of lent memory, with the engine that says it first."""
    path = short_tmp / "lends"

    def read() -> list[str]:
        return path.read_text().splitlines() if path.exists() else []

    return read


def lending(short_tmp: Path, **more: Any) -> dict[str, Any]:
    return {"x_lends": str(short_tmp / "lends"), **more}


def test_standby_holds_the_serving_engines_memory(
    make: Make, short_tmp: Path, notes: Callable[[], list[str]]
) -> None:
    service = make(arguments=lending(short_tmp)).start()
    first = service.until_standby()
    until(lambda: len(notes()) >= 2, "the first lends")
    kill(first["pid"])
    service.until_standby()
    until(lambda: len(notes()) >= 4, "the second lends too")
    assert notes() == ["2 expects", "1 lends to 2", "3 expects", "2 lends to 3"]
    service.kill_supervisor()
    service.start()
    until(lambda: len(notes()) >= 6, "a new supervisor does not know, and has it done again")
    assert notes()[4:] == ["3 expects", "2 lends to 3"]


def test_service_that_sleeps_holds_no_memory(
    make: Make, short_tmp: Path, notes: Callable[[], list[str]]
) -> None:
    service = make(arguments=lending(short_tmp)).start()
    service.until_standby()
    until(lambda: len(notes()) == 2, "it is lent")
    service.ask("sleep")
    assert notes()[2:] == ["2 forgets"], "once weightcachectl says that it sleeps"
    service.ask("wake")
    until(lambda: len(notes()) >= 5, "it is lent again")
    serving = service.status()["generation"]
    assert notes()[3:] == [f"{3 - serving} expects", f"{serving} lends to {3 - serving}"]


def test_standby_that_does_not_give_memory_back_is_ended(
    make: Make, short_tmp: Path, notes: Callable[[], list[str]]
) -> None:
    service = make(arguments=lending(short_tmp, x_keeps_lent=True)).start()
    service.until_standby()
    until(lambda: len(notes()) == 2, "it is lent")
    asleep = service.ask("sleep")
    assert "engine=2 parked: it does not give memory back: not this one" in service.log
    assert 2 not in [engine["number"] for engine in asleep["engines"]], "it is gone by then"


def test_engine_killed_on_its_way_to_sleep_leaves_no_memory_with_its_standby(
    make: Make, short_tmp: Path, notes: Callable[[], list[str]]
) -> None:
    service = make(arguments=lending(short_tmp)).start()
    pid = service.until_standby()["pid"]
    until(lambda: len(notes()) == 2, "it is lent")
    with socket.create_connection(("127.0.0.1", service.port), timeout=BOUND_S) as slow:
        slow.sendall(b"GET /until?/nonexistent HTTP/1.1\r\nHost: x\r\n\r\n")
        service.until(lambda s: s["engines"][0]["requests"] > 0, "the request is there")
        asking = threading.Thread(target=service.ask, args=["sleep"])
        asking.start()
        service.until(lambda s: s["state"] == "draining", "it is to sleep")
        kill(pid)
        asking.join(BOUND_S)
    assert notes()[2:] == ["2 forgets"]
    assert not service.status()["awake"], "another service may have the device"


def test_restarted_service_lends_to_the_engine_of_the_new_version_alone(
    make: Make, short_tmp: Path, notes: Callable[[], list[str]]
) -> None:
    service = make(arguments=lending(short_tmp)).start()
    service.until_standby()
    until(lambda: len(notes()) == 2, "it is lent to the old standby")
    service.write_manifest(arguments=lending(short_tmp, x_new=True))
    service.ask("restart")
    status = service.until_standby()
    serving = status["generation"]
    (standby,) = (e["number"] for e in status["engines"] if e["number"] != serving)
    wanted = [f"{standby} expects", f"{serving} lends to {standby}"]
    until(lambda: notes()[-2:] == wanted, "the new engine lends")
    assert 2 < serving < standby, "engine 2 has ended, with all that it held"


def test_idle_service_sleeps_and_the_next_connection_wakes_it(make: Make) -> None:
    service = make(idle_sleep_s=0.5).start()
    service.until(lambda s: s["state"] == "asleep", "it sleeps")
    answer = service.get()
    assert not answer["asleep"]
    assert "somebody connects, waking" in service.log


def test_sleep_and_wake_by_hand(make: Make) -> None:
    service = make().start()
    service.until_standby()
    assert service.ask("sleep")["state"] == "asleep"
    assert {e["state"] for e in service.status()["engines"]} == {"parked"}
    assert service.ask("wake")["state"] == "serving"


def test_services_that_do_not_fit_together_take_turns(make: Make) -> None:
    one, other = pair(make)
    one.start()
    assert one.get()["engine"] == 1
    other.start()
    one.until(lambda s: s["state"] == "asleep", "it makes room for the other")
    assert "asking service=chat to sleep" in other.log
    for service, sleeper in ((one, other), (other, one)):
        assert not service.get()["asleep"]
        # The engine answers its clients before its supervisor knows that it does.
        service.until(lambda s: (s["state"], s["awake"]) == ("serving", True), "it serves")
        sleeper.until(lambda s: (s["state"], s["awake"]) == ("asleep", False), "the other sleeps")


def test_services_that_fit_together_are_awake_together(make: Make) -> None:
    one, other = started_pair(make, (0.5, 0.5))
    assert [s.get()["asleep"] for s in (one, other)] == [False, False]
    assert [s.status()["state"] for s in (one, other)] == ["serving", "serving"]


def test_request_under_way_ends_before_its_service_sleeps_for_another(
    make: Make, short_tmp: Path
) -> None:
    one, other = started_pair(make)
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(other.get()))
    with request_under_way(one, short_tmp / "end"):
        asking.start()
        one.until(lambda s: s["state"] == "draining", "it is to sleep")
        assert answers == []
    asking.join(BOUND_S)
    assert not answers[0]["asleep"]


def test_restart_with_a_larger_share_waits_for_its_neighbour_and_serves_meanwhile(
    make: Make, short_tmp: Path
) -> None:
    one, other = started_pair(make, (0.5, 0.4))
    one.entry["arguments"] = {"gpu_memory_utilization": 0.7}
    other.write_manifest()
    restarting = threading.Thread(target=lambda: one.ask("restart"))
    with ClientLoop(one) as clients:
        with request_under_way(other, short_tmp / "end"):
            restarting.start()
            other.until(lambda s: s["state"] == "draining", "it is to sleep")
            assert one.status()["share"] == 0.5
            seen = len(clients.answers)
            until(lambda: len(clients.answers) > seen, "it serves meanwhile")
        restarting.join(BOUND_S)
        clients.until_answers(2)
    assert clients.refused == clients.failed == []
    assert [(s.status()["share"], s.status()["awake"]) for s in (one, other)] == [
        (0.7, True),
        (0.4, False),
    ]


def test_restart_that_fails_changes_no_share(make: Make) -> None:
    one = make(arguments={"gpu_memory_utilization": 0.5}, standby=0).start()
    one.write_manifest(arguments={"gpu_memory_utilization": 0.2, "x_fail": "no such quantization"})
    with pytest.raises(EngineError):
        one.ask("restart")
    assert one.status()["share"] == 0.5
    one.write_manifest(arguments={"gpu_memory_utilization": 0.2})
    one.ask("restart")
    assert one.status()["share"] == 0.2


@contextlib.contextmanager
def restart_that_makes_room(
    make: Make, end: Path, **arguments: Any
) -> Iterator[tuple[ServiceProcess, ServiceProcess]]:
    """A service whose new engine is up, and waits for a neighbour to sleep."""
    one, other = started_pair(make, (0.5, 0.4), **arguments)
    one.entry["arguments"] = {"gpu_memory_utilization": 0.7, **arguments}
    other.write_manifest()

    def restart() -> None:
        with contextlib.suppress(EngineError):
            one.ask("restart")

    restarting = threading.Thread(target=restart)
    with request_under_way(other, end):
        restarting.start()
        other.until(lambda s: s["state"] == "draining", "it is to sleep")
        yield one, other
    restarting.join(BOUND_S)
    other.until(lambda s: s["state"] == "asleep", "it sleeps")


def test_engine_that_dies_while_room_is_made_for_it_changes_no_share(
    make: Make, short_tmp: Path
) -> None:
    with restart_that_makes_room(make, short_tmp / "end") as (one, _):
        kill(one.record(2)["pid"])
        one.until(lambda s: len(s["engines"]) == 1, "it is gone")
    # The next question of its supervisor would be too early to see what became of the room.
    with contextlib.suppress(AssertionError):
        until(lambda: one.status()["share"] != 0.5, "another share", bound_s=0.5)
    assert (one.status()["generation"], one.status()["share"]) == (1, 0.5)


def test_weights_that_come_while_room_is_made_are_in_the_new_engine(
    make: Make, short_tmp: Path
) -> None:
    swaps = short_tmp / "swaps"
    swaps.write_text(json.dumps({"newest": "newest"}))
    with restart_that_makes_room(make, short_tmp / "end", x_swaps=str(swaps)) as (one, _):
        ask_service(
            one.home / "service.sock", "swap", timeout_s=BOUND_S,
            arguments={"model": "tiny", "on_swap": "drain"},
        )  # fmt: skip
    answer = one.get()
    assert (answer["engine"], answer["weights"]) == (2, "newest")


@contextlib.contextmanager
def turn_in_other_hands(service: ServiceProcess) -> Iterator[None]:
    with open(service.runtime / "cpu0.turn", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_service_that_waits_for_the_turn_can_be_sent_to_sleep(make: Make) -> None:
    """By who has the turn: it saw us awake, and we slept and woke before it asked."""
    one, _ = started_pair(make)
    with contextlib.ExitStack() as stack:
        with turn_in_other_hands(one):
            stack.enter_context(socket.create_connection(("127.0.0.1", one.port), BOUND_S))
            one.until(lambda s: s["engines"][0]["state"] == "promoting", "it waits for the turn")
            one.ask("sleep")
        assert not one.get()["asleep"], "somebody is connected, who wakes it"


@pytest.mark.parametrize("how", ["promoting", "starting"])
def test_service_that_waits_for_the_turn_can_be_stopped(make: Make, how: str) -> None:
    one, _ = started_pair(make)
    with contextlib.ExitStack() as stack:
        if how == "starting":
            one.stop()
        stack.enter_context(turn_in_other_hands(one))
        if how == "starting":
            one.launch()
        else:
            stack.enter_context(socket.create_connection(("127.0.0.1", one.port), BOUND_S))
        one.until(lambda s: [e["state"] for e in s["engines"]] == [how], "it waits for the turn")
        assert one.stop() == 0


def test_service_sent_to_sleep_while_its_only_engine_starts_has_no_share(
    make: Make, short_tmp: Path
) -> None:
    delay = short_tmp / "delay"
    one, other = pair(make, (0.5, 0.4), x_delay_file=str(delay))
    other.start()
    one.others = [other]
    one.start()
    delay.write_text("2")
    kill(one.status()["pid"])
    one.until(lambda s: [e["number"] for e in s["engines"]] == [2], "its successor starts")
    one.ask("sleep")
    assert not one.status()["awake"], "else it would wake without asking its neighbours"
    delay.unlink()
    one.until(lambda s: s["engines"][0]["state"] == "parked", "it is up")
    assert not one.status()["awake"]


def test_neighbour_whose_supervisor_is_being_replaced_counts_as_awake(make: Make) -> None:
    one, other = started_pair(make)
    one.get()
    one.until(lambda s: (s["state"], s["awake"]) == ("serving", True), "it serves")
    one.kill_supervisor()
    with socket.create_connection(("127.0.0.1", other.port), timeout=BOUND_S):
        other.until(lambda s: s["engines"][0]["state"] == "promoting", "it is to wake")
        one.launch()
        other.until(lambda s: s["state"] == "serving", "it serves")
    assert (one.status()["state"], one.status()["awake"]) == ("asleep", False)


def test_takeover_asks_no_neighbour(make: Make) -> None:
    share = {"gpu_memory_utilization": 0.85}
    one = make(arguments=share)
    other = make(name="code", others=[one], arguments=share, standby=0)
    one.start()
    other.start()
    one.get()
    status = one.until_standby()
    other.kill_supervisor()
    kill(status["pid"])
    assert one.get()["engine"] != status["generation"]


def test_metrics_and_table_show_the_service(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightcached.exporter.health.ANSWER_TIMEOUT_S", BOUND_S)
    service = make().start()
    kill(service.until_standby()["pid"])
    service.until(lambda s: s["takeovers"] == 1, "a takeover")
    status = service.until_standby()
    text = text_of(Node(service.manifest, service.runtime))
    for line in (
        'weightcached_engine_up{engine="chat"} 1.0',
        'weightcached_engine_state{engine="chat",state="serving"} 1.0',
        'weightcached_engine_state{engine="chat",state="asleep"} 0.0',
        'weightcached_engine_parked{engine="chat"} 1.0',
        'weightcached_engine_takeovers_total{engine="chat"} 1.0',
    ):
        assert line in text.splitlines()
    (takeover,) = re.findall(r'_last_takeover_seconds\{engine="chat"\} (\S+)', text)
    assert float(takeover) == status["last_takeover_s"]
    head, row = as_table([status], now=status["since"] + 75)
    assert head.split() == [
        "ENGINE",
        "STATE",
        "LISTEN",
        "SERVING",
        "STANDBY",
        "TAKEOVERS",
        "DETAIL",
    ]
    assert row == (
        f"chat    serving  127.0.0.1:{service.port}  engine 2, pid {status['pid']}  engine 3 parked  "
        f"1, last in {status['last_takeover_s']:.2f} s  for 75 s"
    )
    options = ["--socket-dir", str(service.runtime)]
    shown = CliRunner().invoke(weightcachectl, ["status", "--json", *options])
    document = json.loads(shown.stdout)
    assert document["devices"] == []
    assert document["engines"][0]["pid"] == status["pid"]
    assert (
        row.split()[:5]
        == CliRunner()
        .invoke(weightcachectl, ["status", *options])
        .stdout.splitlines()[1]
        .split()[:5]
    )
    woken = CliRunner().invoke(weightcachectl, ["engine", "sleep", "chat", *options])
    assert woken.stdout == "chat: asleep\n"
    assert list(as_json([status])[0]) == [
        "name", "state", "pid", "generation", "since", "takeovers", "last_takeover_s",
    ]  # fmt: skip


def test_unix_socket(make: Make, short_tmp: Path) -> None:
    path = short_tmp / "public.sock"
    service = make(listen=f"unix:{path}").start()
    service.until_standby()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b'"engine": 1' in sock.recv(65536)
    assert service.stop() == 0
    assert not path.exists()


@pytest.mark.slow
def test_random_kills(make: Make) -> None:
    """Kill any process in any state: clients are never refused, and nothing is left over.

    WEIGHTCACHED_KILLS: how many.
    """
    kills = int(os.environ.get("WEIGHTCACHED_KILLS", "25"))
    seed = int(os.environ.get("WEIGHTCACHED_SEED", time.time_ns() % 10**6))
    print(f"seed {seed}")
    chance = random.Random(seed)
    service = make(hang_s=2).start()
    with ClientLoop(service, 3) as clients:
        for n in range(kills):
            time.sleep(chance.uniform(0, 0.4))
            victims = service.processes()
            if chance.random() < 0.15:
                service.kill_supervisor()
                time.sleep(chance.uniform(0, 0.1))
                service.launch()
            elif victims:
                number = signal.SIGSTOP if chance.random() < 0.1 else signal.SIGKILL
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(victims), number)
            seen = len(clients.answers)
            if n % 5 == 4:
                until(
                    lambda seen=seen: len(clients.answers) > seen,  # type: ignore[misc]
                    f"answers after kill {n}",
                )
        # An engine whose core died unseen is parked until it is asked.
        until(lambda: len(service.processes()) == 4, "two engines of two processes")
        service.until_standby()
    assert clients.refused == []
    assert service.stop() == 0
    assert service.processes() == []
