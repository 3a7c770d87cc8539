"""weightcachectl against real sockets: what it prints, what it asks, how it exits."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests import limits
from tests.fakes.daemon import BOUND_S
from tests.fakes.stub_daemon import Answer, Packet, StubDaemon, cache, status
from weightcached import __version__
from weightcached.cli import reload
from weightcached.cli.weightcachectl import main
from weightcached.daemon import fdstore, leases
from weightcached.errors import SegmentError
from weightcached.wire.messages import (
    CacheOutcome,
    Counters,
    Done,
    Drop,
    Evict,
    Progress,
    Refused,
    Reload,
    ReloadReply,
    Request,
    Status,
)

GPU = "GPU-0e3f0000-0000-4000-8000-00000000000a"
GIB = 1 << 30
READY = cache()


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private runtime and configuration directory; gives the directory of the sockets."""
    # Not in tmp_path, whose length and a GPU's name exceed what a socket path may have.
    with tempfile.TemporaryDirectory(prefix="wc-") as base:
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        # Also where the tests run in one.
        monkeypatch.setattr("weightcached.system.paths.in_container", lambda: False)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        yield Path(base, "weightcached")


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(main, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def said(result: Result, runtime: Path) -> tuple[int, str, str]:
    """(exit status, stdout, stderr)."""
    return result.exit_code, result.stdout, result.stderr.replace(str(runtime), "RUN")


def answering(
    *answers: Answer, caches: Any = (READY,), device: str = "cpu0"
) -> Callable[[Request], Iterable[Answer]]:
    """Answer Status with `caches` and everything else with `answers`."""
    return lambda request: [status(device, *caches)] if isinstance(request, Status) else answers


def dead_socket(path: Path) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))


# ---- status


def test_status_json_has_the_names_that_other_tools_read(runtime: Path) -> None:
    counters = Counters(
        phase_seconds={"tiny/target": {"weights": 1.5, "proving": 0.25}, "other/target": {}}
    )
    with StubDaemon(
        runtime / "cpu0.sock", lambda request: [status("cpu0", READY, counters=counters)]
    ):
        result = run("status", "--json")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert json.loads(result.stdout) == {
        "devices": [
            {
                "device": "cpu0",
                "pid": 77,
                "state": "ready",
                "since": 1700000000.25,
                "budget": 0,
                "caches": [
                    {
                        "name": "tiny/target",
                        "role": "target",
                        "state": "ready",
                        "generation": 1,
                        "source": "loaded",
                        "bytes": 3 * GIB,
                        "segments": 3,
                        "tensors": 40,
                        "load_seconds": 12.34,
                        "phase": "",
                        "done_bytes": 0,
                        "total_bytes": 0,
                        "error": "",
                        "retry_at": None,
                        "warning": "",
                        "snapshot": "",
                        "snapshot_bytes": 0,
                        "resident": "always",
                        "label": "",
                        "live": False,
                        "rolled_back_at": None,
                        "engines": [
                            {
                                "pid": 4242,
                                "since": 1700000100.5,
                                "parked": False,
                                "generation": 0,
                                "bytes": 0,
                                "label": "",
                            }
                        ],
                        "load_phases": {"weights": 1.5, "proving": 0.25},
                    }
                ],
                "old_generations": [],
            }
        ],
        "engines": [],
    }


def test_status_table_tells_every_state(runtime: Path) -> None:
    caches = [
        cache(),
        cache("old/target", source="adopted", generation=3, bytes=200 << 20, engines=[]),
        cache(
            "new/target", state="loading", generation=0, bytes=0, engines=[],
            phase="read weights", done_bytes=GIB, total_bytes=15 * GIB, eta_s=12.0,
        ),
        cache("bad/draft", role="draft", state="failed", generation=0, bytes=0, engines=[], error="two\nlines"),
        cache("big/target", phase="read weights", done_bytes=GIB, total_bytes=2 * GIB, bytes=1000),
        cache("gone/target", state="released", generation=2, bytes=0, engines=[]),
    ]  # fmt: skip
    with StubDaemon(runtime / "cpu0.sock", answering(caches=caches)):
        result = run("status")
    assert said(result, runtime) == (
        0,
        "DEVICE  CACHE        STATE     GEN  SIZE       ENGINES  DETAIL\n"
        "cpu0    tiny/target  ready     1    3.0 GiB    1        loaded in 12 s\n"
        "cpu0    old/target   ready     3    200.0 MiB  0        adopted\n"
        "cpu0    new/target   loading   -    -          0        read weights, 1.0 of 15.0 GiB, 12 s left\n"
        "cpu0    bad/draft    failed    -    -          0        two lines\n"
        "cpu0    big/target   ready     1    1 KiB      1        loaded in 12 s, read weights, 1.0 of 2.0 GiB\n"
        "cpu0    gone/target  released  2    -          0\n",
        "",
    )


def test_status_tells_what_is_evicted_and_the_sums(runtime: Path) -> None:
    gone: dict[str, Any] = {"state": "evicted", "generation": 0, "bytes": 0, "engines": []}
    caches = [
        cache(snapshot="written", snapshot_bytes=3 * GIB),
        cache("kept/target", snapshot="written", snapshot_bytes=2 * GIB, **gone),
        cache("new/target", error="no room\nfor it", **gone),
    ]
    with StubDaemon(
        runtime / "cpu0.sock", lambda request: [status("cpu0", *caches, budget=4 * GIB)]
    ):
        result = run("status")
    assert said(result, runtime) == (
        0,
        "DEVICE  CACHE        STATE    GEN  SIZE     ENGINES  DETAIL\n"
        "cpu0    tiny/target  ready    1    3.0 GiB  1        loaded in 12 s, snapshot: written\n"
        "cpu0    kept/target  evicted  -    -        0        comes back from a snapshot of 2.0 GiB\n"
        "cpu0    new/target   evicted  -    -        0        loaded when an engine asks for it, no room for it\n"
        "cpu0: 3.0 GiB of a budget of 4.0 GiB resident, 5.0 GiB in snapshots, 2 evicted\n",
        "",
    )


def test_status_shows_a_daemon_without_caches_and_a_refused_manifest(runtime: Path) -> None:
    reply = status("cpu0", since=time.time() - 600.5, manifest_error="m.yaml:3: models: wrong")
    with StubDaemon(runtime / "cpu0.sock", lambda request: [reply]):
        result = run("status")
    assert said(result, runtime) == (
        0,
        "DEVICE  CACHE  STATE  GEN  SIZE  ENGINES  DETAIL\n"
        "cpu0    -      ready  -    -     -        no caches, daemon pid 77, up 10 min\n",
        "weightcachectl: cpu0: the manifest was refused, the one before stays in force: m.yaml:3: models: wrong\n",
    )


def test_status_asks_all_sockets_or_those_named(runtime: Path) -> None:
    with (
        StubDaemon(runtime / "cpu0.sock", answering(device="cpu0")),
        StubDaemon(runtime / f"{GPU}.sock", answering(device=GPU)),
    ):
        every = json.loads(run("status", "--json").stdout)
        named = json.loads(run("status", "--json", "cpu0", "cpu0").stdout)
    assert [device["device"] for device in every["devices"]] == [GPU, "cpu0"]
    assert [device["device"] for device in named["devices"]] == ["cpu0"]


def test_status_without_any_daemon_exits_3(runtime: Path) -> None:
    text = (
        "weightcachectl: no weightcached daemon has a socket in RUN: weightcachectl start DEVICE\n"
    )
    assert said(run("status"), runtime) == (3, "", text)
    assert said(run("status", "--json"), runtime) == (
        3,
        '{\n  "devices": [],\n  "engines": []\n}\n',
        text,
    )


DEAD = (
    "weightcachectl: cpu1: no weightcached daemon listens on RUN/cpu1.sock, which a dead one left behind: "
    "systemctl --user start weightcached@cpu1.service\n"
)


def test_dead_socket_is_told_and_exits_3_where_nobody_answers(runtime: Path) -> None:
    dead_socket(runtime / "cpu1.sock")
    assert said(run("status"), runtime) == (3, "", DEAD)


def test_dead_socket_beside_a_live_daemon_is_told(runtime: Path) -> None:
    dead_socket(runtime / "cpu1.sock")
    with StubDaemon(runtime / "cpu0.sock", answering()):
        code, out, err = said(run("status"), runtime)
    assert (code, err) == (0, DEAD)
    assert "cpu0    tiny/target" in out


def test_malformed_device_is_bad_usage(runtime: Path) -> None:
    code, out, err = said(run("status", "gpu0"), runtime)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == (
        "Error: Invalid value for '[DEVICE]...': 'gpu0' is not a device name: expected GPU-<uuid> or MIG-<uuid> as "
        "nvidia-smi -L prints it, or cpu0 … cpu999 for host memory; 'weightcachectl devices' lists the devices of this "
        "machine"
    )


def test_missing_runtime_directory_exits_78(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nonexistent")
    assert said(run("status"), runtime) == (
        78,
        "",
        "weightcachectl: the runtime directory /nonexistent does not exist: log in through a session that "
        f"systemd-logind opens, or run 'loginctl enable-linger {os.getuid()}', or set XDG_RUNTIME_DIR, "
        "or name the directory of the sockets: --socket-dir\n",
    )


def ctl(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "weightcached.cli.weightcachectl", *arguments]


@pytest.mark.timed
def test_status_answers_within_300_ms_of_processor_time(runtime: Path) -> None:
    """The best of three, with the interpreter's start: wall time depends on who else uses the
    machine.
    """
    with StubDaemon(runtime / "cpu0.sock", answering()):
        taken_s = []
        for _ in range(3):
            before = os.times()
            subprocess.run(
                ctl("status", "--json"), check=True, capture_output=True, timeout=BOUND_S
            )
            after = os.times()
            taken_s.append(
                after.children_user
                + after.children_system
                - before.children_user
                - before.children_system
            )
    limits.hold("processor time of status", min(taken_s), 0.3)


def test_status_imports_only_what_a_socket_needs(runtime: Path) -> None:
    code = (
        "import sys\nfrom weightcached.cli.weightcachectl import main\n"
        "try: main(['status'])\nexcept SystemExit: pass\n"
        "print(sorted(set(sys.modules) & {'asyncio', 'yaml', 'difflib', 'torch', 'vllm', 'subprocess'}))"
    )
    with StubDaemon(runtime / "cpu0.sock", answering()):
        done = subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            timeout=BOUND_S,
        )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.fixture
def watching(runtime: Path) -> Iterator[tuple[list[Any], subprocess.Popen[str]]]:
    """`status --watch --json` running; the list holds the caches that the daemon tells from now
    on.
    """
    told: list[Any] = [[cache(state="loading")]]
    with StubDaemon(runtime / "cpu0.sock", lambda request: [status("cpu0", *told[-1])]):
        command = ctl("status", "--watch", "--json")
        # A shell's background job has SIGINT ignored, and its children with it: this one is to be
        # interrupted.
        reset = (
            "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
            "os.execv(sys.argv[1], sys.argv[1:])"
        )
        with subprocess.Popen(
            [sys.executable, "-c", reset, *command],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        ) as process:
            yield told, process
            process.kill()


def test_watch_prints_changes_until_interrupted(
    watching: tuple[list[Any], subprocess.Popen[str]],
) -> None:
    told, process = watching
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["devices"][0]["caches"][0]["state"] == "loading"
    told.append([cache(state="ready")])
    assert json.loads(process.stdout.readline())["devices"][0]["caches"][0]["state"] == "ready"
    process.send_signal(signal.SIGINT)
    assert process.wait(BOUND_S) == 0
    assert process.stdout.read() == ""


# ---- reload


def test_reload_reports_each_cache(runtime: Path) -> None:
    outcomes = [
        CacheOutcome(cache="a/target", outcome="loaded", generation=2, seconds=3.21),
        CacheOutcome(cache="b/target", outcome="unchanged", generation=1),
        CacheOutcome(cache="c/target", outcome="dropped"),
    ]
    progress = [
        Progress(cache="a/target", phase="import vLLM"),
        Progress(
            cache="a/target", phase="read weights", done_bytes=GIB, total_bytes=2 * GIB, eta_s=4.0
        ),
        Progress(
            cache="a/target",
            phase="read weights",
            done_bytes=2 * GIB,
            total_bytes=2 * GIB,
            eta_s=0.0,
        ),
    ]
    with StubDaemon(
        runtime / "cpu0.sock", answering(*progress, ReloadReply(outcomes=outcomes))
    ) as daemon:
        result = run("reload", "--force", "--cache", "a/target", "--cache", "b/target")
    assert said(result, runtime) == (
        0,
        "cpu0 a/target: loaded, generation 2 in 3.2 s\n"
        "cpu0 b/target: unchanged, generation 1\n"
        "cpu0 c/target: dropped\n",
        "cpu0 a/target: import vLLM\ncpu0 a/target: read weights, 1.0 of 2.0 GiB, 4.0 s left\n",
    )
    assert daemon.requests[-1] == Reload(caches=["a/target", "b/target"], force=True)


def test_reload_with_a_failed_cache_exits_1(runtime: Path) -> None:
    failed = CacheOutcome(cache="a/target", outcome="failed", error="no such file: x.safetensors")
    with StubDaemon(runtime / "cpu0.sock", answering(ReloadReply(outcomes=[failed]))):
        result = run("reload", "cpu0")
    assert said(result, runtime) == (1, "cpu0 a/target: failed: no such file: x.safetensors\n", "")


def test_reload_with_a_refused_manifest_exits_1(runtime: Path) -> None:
    with StubDaemon(runtime / "cpu0.sock", answering(ReloadReply(error="m.yaml:1: wrong"))):
        result = run("reload")
    text = "weightcachectl: cpu0: the manifest was refused, nothing was changed: m.yaml:1: wrong\n"
    assert said(result, runtime) == (1, "", text)


def test_refused_reload_exits_1(runtime: Path) -> None:
    with StubDaemon(
        runtime / "cpu0.sock", answering(Refused(code="error", message="no cache 'x'"))
    ):
        result = run("reload", "--cache", "x")
    assert said(result, runtime) == (1, "", "weightcachectl: cpu0: no cache 'x'\n")


def test_daemon_that_dies_during_a_reload_exits_3(runtime: Path) -> None:
    with StubDaemon(runtime / "cpu0.sock", answering(Packet(b"", then_close=True))):
        result = run("reload", "cpu0")
    assert said(result, runtime) == (
        3,
        "",
        "weightcachectl: cpu0: the daemon on RUN/cpu0.sock closed the connection\n",
    )


def test_reload_that_takes_too_long_is_told_and_goes_on(runtime: Path) -> None:
    with StubDaemon(
        runtime / "cpu0.sock", answering(Progress(cache="a/target", phase="read weights"))
    ):
        # Long enough for its first answer, on a busy machine too.
        result = run("reload", "cpu0", "--timeout", "5")
    assert said(result, runtime) == (
        3,
        "",
        "cpu0 a/target: read weights\n"
        "weightcachectl: cpu0: the reload is not over after 5.0 s and goes on: weightcachectl status\n",
    )


def test_reload_waits_for_all_devices_at_once(runtime: Path) -> None:
    done = ReloadReply(outcomes=[CacheOutcome(cache="a/target", outcome="unchanged", generation=1)])
    with (
        StubDaemon(runtime / "cpu0.sock", answering(done)),
        StubDaemon(runtime / "cpu1.sock", answering(ReloadReply(error="wrong"))),
    ):
        result = run("reload")
    assert said(result, runtime) == (
        1,
        "cpu0 a/target: unchanged, generation 1\n",
        "weightcachectl: cpu1: the manifest was refused, nothing was changed: wrong\n",
    )


def test_reload_without_a_daemon_exits_3(runtime: Path) -> None:
    text = (
        "weightcachectl: no weightcached daemon has a socket in RUN: weightcachectl start DEVICE\n"
    )
    assert said(run("reload"), runtime) == (3, "", text)
    assert said(run("reload", "cpu0"), runtime) == (
        3,
        "",
        "weightcachectl: cpu0: no weightcached daemon listens on RUN/cpu0.sock: "
        "systemctl --user start weightcached@cpu0.service\n",
    )


# ---- drop


def test_drop_takes_a_model_or_one_role(runtime: Path) -> None:
    caches = [cache("a/target"), cache("a/draft", role="draft"), cache("b/target")]
    with StubDaemon(runtime / "cpu0.sock", answering(Done(), caches=caches)) as daemon:
        assert said(run("drop", "a"), runtime) == (
            0,
            "cpu0 a/target: dropped\ncpu0 a/draft: dropped\n",
            "",
        )
        assert said(run("drop", "b/target", "--force"), runtime) == (
            0,
            "cpu0 b/target: dropped\n",
            "",
        )
        drops = [request for request in daemon.requests if isinstance(request, Drop)]
    assert drops == [
        Drop(cache="a/target"),
        Drop(cache="a/draft"),
        Drop(cache="b/target", force=True),
    ]


def test_refused_drop_exits_1(runtime: Path) -> None:
    no = Refused(code="error", message="2 engines map it")
    with StubDaemon(runtime / "cpu0.sock", answering(no)):
        result = run("drop", "tiny")
    assert said(result, runtime) == (1, "", "weightcachectl: cpu0 tiny/target: 2 engines map it\n")


def test_drop_of_an_unknown_cache_lists_the_known_ones(runtime: Path) -> None:
    with StubDaemon(runtime / "cpu0.sock", answering(Done())) as daemon:
        result = run("drop", "tin")
        assert not any(isinstance(request, Drop) for request in daemon.requests)
    text = "weightcachectl: no daemon has a cache 'tin'; caches: tiny/target on cpu0\n"
    assert said(result, runtime) == (1, "", text)


def test_evict_takes_a_model_or_one_role(runtime: Path) -> None:
    caches = [cache("a/target"), cache("a/draft", role="draft"), cache("b/target")]
    with StubDaemon(runtime / "cpu0.sock", answering(Done(), caches=caches)) as daemon:
        assert said(run("evict", "a"), runtime) == (
            0,
            "cpu0 a/target: evicted\ncpu0 a/draft: evicted\n",
            "",
        )
        sent = [request for request in daemon.requests if isinstance(request, Evict)]
    assert sent == [Evict(cache="a/target"), Evict(cache="a/draft")]


def test_refused_evict_exits_1(runtime: Path) -> None:
    no = Refused(code="in-use", message="tiny/target is in use by pid 7")
    with StubDaemon(runtime / "cpu0.sock", answering(no)):
        result = run("evict", "tiny")
    text = "weightcachectl: cpu0 tiny/target: tiny/target is in use by pid 7\n"
    assert said(result, runtime) == (1, "", text)


# ---- verify


@pytest.fixture
def verifier(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands for weightcached.cli.verify_cache, which needs segments: gives back or raises what the
    list holds.
    """
    results: list[Any] = []

    def verify_cache(device: str, name: str) -> Any:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr("weightcached.cli.verify.verify_cache", verify_cache)
    return results


def test_verify_takes_all_ready_caches(runtime: Path, verifier: list[Any]) -> None:
    caches = [cache("a/target"), cache("b/target", state="loading"), cache("c/target")]
    verifier += [SimpleNamespace(tensors=40, nbytes=3 * GIB, mismatched=[], label="")] * 2
    with StubDaemon(runtime / "cpu0.sock", answering(caches=caches)):
        result = run("verify")
    assert said(result, runtime) == (
        0,
        "cpu0 a/target: 40 tensors, 3.0 GiB, all digests equal\n"
        "cpu0 c/target: 40 tensors, 3.0 GiB, all digests equal\n",
        "",
    )


def test_verify_names_what_differs_and_the_way_back(runtime: Path, verifier: list[Any]) -> None:
    verifier.append(
        SimpleNamespace(tensors=40, nbytes=GIB, mismatched=[f"l{n}" for n in range(7)], label="")
    )
    with StubDaemon(runtime / "cpu0.sock", answering()):
        result = run("verify", "tiny/target")
    assert said(result, runtime) == (
        1,
        "",
        "weightcachectl: cpu0 tiny/target: 7 of 40 tensors differ: l0, l1, l2, l3, l4 and 2 more; "
        "weightcachectl reload cpu0 --force --cache tiny/target\n",
    )


def test_verify_that_cannot_read_exits_1(runtime: Path, verifier: list[Any]) -> None:
    verifier.append(SegmentError("no driver"))
    with StubDaemon(runtime / "cpu0.sock", answering()):
        result = run("verify")
    assert said(result, runtime) == (
        1,
        "",
        "weightcachectl: cpu0 tiny/target: cannot verify: no driver\n",
    )


# ---- devices


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr("weightcached.cli.devices.list_gpus", lambda: found)
    return found


def test_devices_come_from_driver_manifest_and_sockets(
    runtime: Path, tmp_path: Path, gpus: list[Any]
) -> None:
    gpus.append(SimpleNamespace(uuid=GPU, name="NVIDIA H200", total_bytes=140 * GIB))
    manifest = tmp_path / "config/weightcached/manifest.yaml"
    manifest.parent.mkdir(parents=True)
    gone = GPU.replace("0e3f", "ffff")
    manifest.write_text(
        "version: 1\nmodels:\n"
        "  - {name: every, devices: all, engine: {model: org/a}}\n"
        f"  - {{name: lost, devices: [{gone}], engine: {{model: org/b}}}}\n"
        "  - {name: host, devices: [cpu1], engine: {model: org/c}}\n"
    )
    with StubDaemon(runtime / "cpu0.sock"):
        table = run("devices")
        document = json.loads(run("devices", "--json").stdout)
    assert said(table, runtime) == (
        0,
        "DEVICE                                    NAME                 MEMORY     SOCKET  MODELS\n"
        f"{GPU}  NVIDIA H200          140.0 GiB  no      every\n"
        "cpu0                                      host memory          -          yes     every\n"
        "cpu1                                      host memory          -          no      every, host\n"
        f"{gone}  not in this machine  -          no      every, lost\n",
        "",
    )
    assert document["devices"][0] == {
        "device": GPU, "name": "NVIDIA H200", "total_bytes": 140 * GIB, "socket": False, "models": ["every"],
    }  # fmt: skip


def test_devices_without_a_manifest_still_lists(
    runtime: Path, tmp_path: Path, gpus: list[Any]
) -> None:
    code, out, err = said(run("devices"), runtime)
    assert (code, out) == (0, "DEVICE  NAME  MEMORY  SOCKET  MODELS\n")
    assert err == (
        f"weightcachectl: no model manifest at {tmp_path}/config/weightcached/manifest.yaml or "
        "/etc/weightcached/manifest.yaml: 'weightcachectl install' writes an example to edit\n"
    )


# ---- help


def test_version_and_every_help_text_print() -> None:
    assert said(run("--version"), Path("-")) == (0, f"weightcachectl {__version__}\n", "")
    for name in main.commands:
        result = run(name, "--help")
        assert result.exit_code == 0
        summary = next(
            line for line in run("--help").stdout.splitlines() if line.startswith(f"  {name} ")
        )
        assert summary.endswith("."), "the summary is cut off"
        assert not summary.endswith("..."), "the summary is cut off"


def test_who_frees_waits_longer_than_the_daemon_for_others() -> None:
    """Its manager takes a note and gives descriptors back; engines that sleep unmap."""
    waits_s = 2 * fdstore._MANAGER_TIMEOUT_S + leases.UNMAP_TIMEOUT_S
    assert waits_s < reload._FREE_TIMEOUT_S
