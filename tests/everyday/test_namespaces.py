"""Engines in another pid namespace than the daemon's, as in another container: real namespaces."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.fakes.checkpoints import key_of
from tests.fakes.client import ANSWER_TIMEOUT_S, Client
from tests.fakes.daemon import ROOT, DaemonProcess, environment, model
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Attach, Drop, Ready, Refused

Launcher = Callable[..., DaemonProcess]
ALONE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]


def test_engines_that_the_daemon_cannot_see_are_told_apart(
    make_daemon: Launcher, checkpoint: Path
) -> None:
    daemon = make_daemon([model("tiny", checkpoint)])
    daemon.prefix = ALONE
    daemon.start()
    key = key_of({"model": str(checkpoint)})
    engines = [
        Connection.connect(daemon.socket, timeout_s=ANSWER_TIMEOUT_S, purpose="engine")
        for _ in range(2)
    ]
    for engine in engines:
        assert isinstance(engine.request(Attach(key=key), ANSWER_TIMEOUT_S), Ready)
    (cache,) = daemon.status().caches
    assert [engine.pid for engine in cache.engines] == [0, 0]
    label = cache.engines[0].label
    assert label.startswith("pid ")
    assert " on " in label
    with daemon.client("ctl") as tool:
        refused = tool.expect(Drop(cache="tiny/target"), Refused)
    assert f"tiny/target is in use by {label}, {label}: stop the engine" in refused.message
    for engine in engines:
        engine.close()
    daemon.until(lambda status: not status.caches[0].engines, "both have left")


def test_peers_that_cannot_be_seen_have_accounts_of_their_own(short_tmp: Path) -> None:
    """What tells the processes of two namespaces apart, seen from a third."""
    path = short_tmp / "socket"
    program = (
        "import socket, sys; from weightcached.daemon.peers import identify; "
        "listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); listener.bind(sys.argv[1]); "
        "listener.listen(8); print('up', flush=True); "
        "peers = [identify(listener.accept()[0]) for _ in range(3)]; "
        "print(*(f'{p.pid} {p.process}' for p in peers), sep=',', flush=True)"
    )
    with subprocess.Popen(
        [*ALONE, sys.executable, "-c", program, str(path)], cwd=ROOT, env=environment(), stdout=subprocess.PIPE,
        text=True,
    ) as seer:  # fmt: skip
        assert seer.stdout
        assert seer.stdout.readline() == "up\n"
        with Client(path), Client(path):
            other = (
                "import sys; from pathlib import Path; from tests.fakes.client import Client; "
                "client = Client(Path(sys.argv[1])); sys.stdin.read()"
            )
            with subprocess.Popen(
                [sys.executable, "-c", other, str(path)], cwd=ROOT, env=environment(), stdin=subprocess.PIPE
            ) as another:  # fmt: skip
                seen = [line.split() for line in seer.stdout.readline().split(",")]
                assert another.stdin
                another.stdin.close()
    assert [pid for pid, _ in seen] == ["0", "0", "0"]
    first, second, third = (int(process) for _, process in seen)
    assert first < 0
    # The same process on two connections, if the kernel numbers processes; never another one's.
    assert third not in (first, second)
