"""`weightcached exporter` over real HTTP, with real daemons and Prometheus's own parser."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import limits
from tests.fakes.checkpoints import key_of
from tests.fakes.daemon import (
    BOUND_S,
    ROOT,
    DaemonProcess,
    ManagerSocket,
    environment,
    free_port,
    model,
    until,
    write_manifest,
)
from tests.process.test_preload import Launcher as PreloadLauncher
from tests.process.test_preload import launch
from weightcached.wire.messages import (
    Attach,
    Done,
    Evict,
    Fallback,
    Mismatch,
    Release,
    Reload,
    ReloadReply,
)

Launcher = Callable[..., DaemonProcess]
ALARM_S = 2.0

__all__ = ["launch"]


class Exporter:
    """The command in its own process, on a free port."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.manager = ManagerSocket(f"@weightcached-exporter-{os.getpid()}-{time.monotonic_ns()}")
        self.log_path = directory / "exporter.log"
        command = [sys.executable, "-m", "weightcached", "exporter", "--port", "0"]
        command += [
            "--manifest",
            str(directory / "manifest.yaml"),
            "--socket-dir",
            str(directory / "run"),
            *arguments,
        ]
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(
                command, stderr=log, cwd=ROOT, env=environment(NOTIFY_SOCKET=self.manager.address)
            )
        assert self.manager.wait_for("READY=1", ended=lambda: self.process.poll() is not None), (
            self.log_path.read_text()
        )
        listens = re.search(r"exporter listens address=(\S+) port=(\d+)", self.log_path.read_text())
        assert listens
        self.address, self.port = listens[1], int(listens[2])

    def get(self, path: str) -> tuple[int, str]:
        return get(self.port, path)

    def says(self, status: int, text: str) -> None:
        """Wait for this answer of /health: on a busy machine a daemon may miss a deadline of it."""
        seen: list[tuple[int, str]] = [(0, "")]

        def answers() -> bool:
            seen[0] = self.get("/health")
            return seen[0] == (status, text)

        until(answers, lambda: f"{(status, text)} instead of {seen[0]}")

    def samples(self) -> dict[tuple[str, ...], float]:
        """Every sample by (name, label values…), labels in the order of their names, once the daemon
        of cpu0 answers in time.
        """
        found: dict[tuple[str, ...], float] = {}

        def up() -> bool:
            found.clear()
            found.update(self.samples_now())
            return found.get(("weightcached_up", "cpu0")) == 1

        until(up, "the daemon is asked in time")
        return found

    def samples_now(self) -> dict[tuple[str, ...], float]:
        status, text = self.get("/metrics")
        assert status == 200
        return {
            (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def until(self, status: int) -> tuple[float, str]:
        """Wait for this answer of /health. Returns the seconds that it took, and the text."""
        began_s = time.monotonic()
        while True:
            seen, text = self.get("/health")
            took_s = time.monotonic() - began_s
            if seen == status:
                return took_s, text
            assert took_s < BOUND_S, text
            time.sleep(0.02)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.manager.close()


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=BOUND_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.read().decode()


@pytest.fixture
def exporter(short_tmp: Path) -> Iterator[Callable[..., Exporter]]:
    with contextlib.ExitStack() as stack:

        def make(*arguments: str) -> Exporter:
            made = Exporter(short_tmp, *arguments)
            stack.callback(made.close)
            return made

        yield make


@pytest.mark.timed
def test_health_is_lost_within_two_seconds_of_a_daemons_death_and_comes_back(
    daemon: DaemonProcess, exporter: Callable[..., Exporter]
) -> None:
    node = exporter()
    node.says(200, "ready: 1 cache\n")
    assert node.address == "127.0.0.1"
    daemon.signal(signal.SIGKILL)
    took_s, text = node.until(503)
    limits.hold("/health changes", took_s, ALARM_S)
    assert text.startswith("cpu0 tiny/target: ")
    daemon.wait()
    daemon.start()
    took_s, _ = node.until(200)
    limits.hold("/health changes", took_s, ALARM_S)


@pytest.mark.timed
def test_health_of_a_daemon_that_hangs_is_lost_within_two_seconds(
    daemon: DaemonProcess, exporter: Callable[..., Exporter]
) -> None:
    node = exporter()
    node.until(200)
    daemon.signal(signal.SIGSTOP)
    try:
        took_s, _ = node.until(503)
    finally:
        daemon.signal(signal.SIGCONT)
    limits.hold("/health changes", took_s, ALARM_S)
    node.until(200)


def test_health_names_each_cache_that_is_not_ready_and_why(
    make_daemon: Launcher, checkpoint: Path, exporter: Callable[..., Exporter]
) -> None:
    bad = model("bad", checkpoint, x_fault="refuse-in-packing")
    daemon = make_daemon(
        [model("good", checkpoint), bad, model("elsewhere", checkpoint, "cpu1")]
    ).start()
    (error,) = [cache.error for cache in daemon.status().caches if cache.name == "bad/target"]
    socket_path = daemon.runtime / "cpu1.sock"
    exporter().says(
        503,
        f"cpu0 bad/target: failed: {error}\n"
        f"cpu1 elsewhere/target: no weightcached daemon listens on {socket_path}: "
        "systemctl --user start weightcached@cpu1.service\n",
    )


def test_health_is_good_while_an_engine_has_a_copy_of_its_own(
    daemon: DaemonProcess, checkpoint: Path, exporter: Callable[..., Exporter]
) -> None:
    with daemon.client() as engine:
        engine.attach(key_of({"model": str(checkpoint)})).close()
        engine.expect(Release(), Done)
    exporter().says(200, "ready: 0 caches\n")


def test_health_is_good_while_models_on_demand_are_not_resident(
    make_daemon: Launcher, checkpoint: Path, exporter: Callable[..., Exporter]
) -> None:
    entries = [model("tiny", checkpoint), {**model("rare", checkpoint), "resident": "on-demand"}]
    daemon = make_daemon(entries).start()
    node = exporter()
    node.says(200, "ready: 1 cache\n")
    samples = node.samples()
    assert samples["weightcached_cache_state", "cpu0", "rare", "target", "evicted"] == 1
    assert daemon.status().state == "ready"


@pytest.mark.timed
def test_health_is_lost_within_two_seconds_of_a_cache_failing_and_comes_back(
    daemon: DaemonProcess, checkpoint: Path, exporter: Callable[..., Exporter]
) -> None:
    node = exporter()
    node.until(200)
    tiny = model("tiny", checkpoint)
    for state, fault, expected in (("failed", "refuse-in-packing", 503), ("loaded", "", 200)):
        write_manifest(
            daemon.manifest,
            [tiny, model("second", checkpoint, **({"x_fault": fault} if fault else {}))],
        )
        outcome = reload(daemon)["second/target"]
        took_s, text = node.until(expected)
        assert outcome == state
        limits.hold("/health changes", took_s, ALARM_S)
        assert text.startswith("cpu0 second/target: failed: " if fault else "ready: 2 caches")


def reload(daemon: DaemonProcess) -> dict[str, str]:
    """Have the manifest read again. Returns the outcome of each cache."""
    with daemon.client("ctl") as tool:
        tool.send(Reload())
        while not isinstance(reply := tool.receive(), ReloadReply):
            pass
        return {outcome.cache: outcome.outcome for outcome in reply.outcomes}


def test_health_follows_the_manifest(
    daemon: DaemonProcess, checkpoint: Path, exporter: Callable[..., Exporter]
) -> None:
    node = exporter()
    write_manifest(daemon.manifest, [model("tiny", checkpoint), model("new", checkpoint)])
    node.says(
        503,
        "cpu0 new/target: the daemon does not know it: weightcachectl reload\n",
    )
    daemon.manifest.write_text("version: 2\n")
    status, text = node.get("/health")
    assert status == 503
    assert "expected 1, the only manifest version" in text


def test_all_stands_for_every_device_with_a_daemon(
    make_daemon: Launcher, checkpoint: Path, exporter: Callable[..., Exporter]
) -> None:
    everywhere = {**model("tiny", checkpoint), "devices": "all"}
    daemon = make_daemon([everywhere])
    node = exporter()
    node.says(503, "no daemon runs here, and the manifest names no device\n")
    daemon.start()
    node.says(200, "ready: 1 cache\n")


def test_metrics_count_what_was_done(
    daemon: DaemonProcess, checkpoint: Path, short_tmp: Path, exporter: Callable[..., Exporter]
) -> None:
    node = exporter()
    key = key_of({"model": str(checkpoint)})
    other = key_of({"model": str(checkpoint), "dtype": "float16", "tensor_parallel_size": 2})
    with daemon.client() as engine, daemon.client() as stranger:
        engine.attach(key).close()
        for _ in range(3):
            assert isinstance(stranger.ask(Attach(key=other)), Mismatch)
        with daemon.client("ctl") as falling_back:
            for reason in ("key-mismatch", "key-mismatch", "no-room"):
                assert falling_back.ask(Fallback(reason=reason)) == Done()
        samples = node.samples()
    tiny = ("cpu0", "tiny", "target")
    assert samples["weightcached_up", "cpu0"] == 1
    assert samples["weightcached_cache_bytes", "cpu0", "1", "tiny", "target"] == 3 << 20
    assert samples["weightcached_leases", *tiny] == 1
    assert samples["weightcached_cache_state", "cpu0", "tiny", "target", "ready"] == 1
    assert samples["weightcached_cache_state", "cpu0", "tiny", "target", "failed"] == 0
    assert samples["weightcached_attach_seconds_count", *tiny] == 1
    assert 0 < samples["weightcached_attach_seconds_sum", *tiny] < BOUND_S
    assert samples["weightcached_load_seconds", "cpu0", "tiny", "weights", "target"] == 1.5
    assert samples["weightcached_mismatches_total", "cpu0", "dtype"] == 3
    assert samples["weightcached_mismatches_total", "cpu0", "tp_size"] == 3
    assert samples["weightcached_attach_refusals_total", "Mismatch", "cpu0"] == 3
    assert samples["weightcached_fallbacks_total", "cpu0", "key-mismatch"] == 2
    assert samples["weightcached_fallbacks_total", "cpu0", "no-room"] == 1
    assert samples["weightcached_adoptions_total", "cpu0"] == 0
    assert samples["weightcached_digest_failures_total", "cpu0"] == 0
    assert samples["weightcached_daemon_restarts_total", "cpu0"] == 0


def test_metrics_count_restarts_adoptions_and_daemons_that_are_gone(
    launch: PreloadLauncher, checkpoint: Path, short_tmp: Path, exporter: Callable[..., Exporter]
) -> None:
    preload = launch("--model", str(checkpoint)).start()
    write_manifest(short_tmp / "manifest.yaml", [model("checkpoint", checkpoint)])
    node = exporter()
    node.until(200)
    os.kill(preload.pid("cpu0"), signal.SIGKILL)
    # It may be back before anybody has missed it.
    until(
        lambda: node.samples()["weightcached_daemon_restarts_total", "cpu0"] == 1, "another daemon"
    )
    node.until(200)
    assert node.samples()["weightcached_adoptions_total", "cpu0"] == 1
    assert preload.stop() == 0
    assert node.samples_now()["weightcached_up", "cpu0"] == 0


def test_preloads_health_port_is_the_exporter(
    launch: PreloadLauncher, checkpoint: Path, gate: Path
) -> None:
    port = free_port()
    preload = launch(
        "--model", str(checkpoint), "--weight-cache-health-port", str(port), "--x-gate", str(gate)
    )
    preload.loads()
    status: list[int] = []

    def answers() -> bool:
        with contextlib.suppress(urllib.error.URLError):
            status.append(get(port, "/health")[0])
        return bool(status)

    until(answers, "the exporter is up")
    assert status == [503], "not before the rank serves"
    gate.write_bytes(b"")
    preload.start()
    until(lambda: get(port, "/health") == (200, "ready: 1 cache\n"), "the rank serves")
    assert "weightcached_up" in get(port, "/metrics")[1]
    assert preload.stop() == 0


def test_preloads_health_host_is_the_only_address(
    launch: PreloadLauncher, checkpoint: Path
) -> None:
    """By default 127.0.0.1 alone: another address of 127.0.0.0/8 must not answer."""
    for options, listens, refuses in (
        ([], "127.0.0.1", "127.0.0.2"),
        (["--weight-cache-health-host", "127.0.0.2"], "127.0.0.2", "127.0.0.1"),
    ):
        port = free_port()
        preload = launch(
            "--model", str(checkpoint), "--weight-cache-health-port", str(port), *options
        ).start()
        socket.create_connection((listens, port), timeout=BOUND_S).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((refuses, port), timeout=BOUND_S)
        assert preload.stop() == 0


def test_preload_with_a_port_in_use_ends_with_the_exporters_status(
    launch: PreloadLauncher, checkpoint: Path
) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        preload = launch("--model", str(checkpoint), "--weight-cache-health-port", str(port))
        assert preload.wait() == 1
    assert (
        f"cannot listen on 127.0.0.1 port {port}: Address already in use; choose another --port"
        in preload.log
    )


def test_page_shows_what_a_real_daemon_serves_and_then_that_it_is_gone(
    make_daemon: Launcher, checkpoint: Path, exporter: Callable[..., Exporter]
) -> None:
    bad = model("bad", checkpoint, x_fault="refuse-in-packing")
    daemon = make_daemon([model("good", checkpoint), bad]).start()
    node = exporter()
    pages: list[tuple[int, str]] = []

    def asked() -> bool:
        pages.append(node.get("/"))
        return f"daemon pid {daemon.pid}" in pages[-1][1]

    until(asked, "the daemon is asked in time")
    status, text = pages[-1]
    assert status == 200
    (error,) = [cache.error for cache in daemon.status().caches if cache.name == "bad/target"]
    for shown in ("good/target", "3.0 MiB", f"daemon pid {daemon.pid}", " ".join(error.split())):
        assert html.escape(shown, quote=False) in text, shown
    daemon.stop()
    until(lambda: "no weightcached daemon listens on" in node.get("/")[1], "the page says so")


def test_exporter_ends_in_order_and_knows_three_paths(
    daemon: DaemonProcess, exporter: Callable[..., Exporter]
) -> None:
    node = exporter()
    assert node.get("/x") == (404, "unknown path: try /, /health or /metrics\n")
    node.process.send_signal(signal.SIGTERM)
    assert node.process.wait(BOUND_S) == 0


def test_metrics_count_hits_evictions_and_restores(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path, exporter: Callable[..., Exporter]
) -> None:
    daemon = make_daemon([])
    snapshots = {"dir": str(short_tmp / "snapshots")}
    write_manifest(daemon.manifest, [model("tiny", checkpoint)], snapshots=snapshots)
    daemon.start()
    node = exporter()
    daemon.until(lambda status: status.caches[0].snapshot == "written", "a snapshot")
    with daemon.client("ctl") as tool:
        tool.expect(Evict(cache="tiny/target"), Done)
    with daemon.client() as engine:
        # Restored for the first, there for the second.
        for _ in range(2):
            engine.attach(key_of({"model": str(checkpoint)})).close()
    samples = node.samples()
    tiny = ("cpu0", "tiny", "target")
    assert samples["weightcached_evictions_total", *tiny] == 1
    assert samples["weightcached_restore_seconds_count", *tiny] == 1
    assert samples["weightcached_attach_hits_total", *tiny] == 1


def test_dashboard_asks_for_every_metric_and_for_no_other(
    exporter: Callable[..., Exporter],
) -> None:
    # Each is described, also without a value.
    suffixes = {"counter": ["_total"], "summary": ["_count", "_sum"], "gauge": [""]}
    known = {
        family.name + suffix
        for family in text_string_to_metric_families(exporter().get("/metrics")[1])
        for suffix in suffixes[family.type]
    }
    dashboard = json.loads((ROOT / "docs/grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {
        name for expression in expressions for name in re.findall(r"weightcached_\w+", expression)
    }
    assert asked == known
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in dashboard["panels"]})


def test_page_of_operations_lists_every_metric(exporter: Callable[..., Exporter]) -> None:
    page = (ROOT / "docs/operations.md").read_text()
    rows = re.findall(r"^\| `(weightcached_\w+)`", page, re.M)
    families = text_string_to_metric_families(exporter().get("/metrics")[1])
    suffixes = {"counter": "_total", "summary": "_count", "gauge": ""}
    assert sorted(rows) == sorted(family.name + suffixes[family.type] for family in families)
