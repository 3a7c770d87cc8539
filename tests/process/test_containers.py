"""docs/containers.md: a daemon and engines that share a directory of sockets and the kernel, and
nothing else. Real namespaces, another root, other mounts.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.container import Container, Volume
from tests.fakes.daemon import DaemonProcess, model
from tests.process.conftest import Engine

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root makes these namespaces")

Launcher = Callable[..., DaemonProcess]
SOCKETS = Path("/run/weightcached")
MODELS = Path("/models/tiny")
OTHER_UID = 4711
# Attaches, maps, and prints the digest of what it reads. Or prints why it cannot.
ENGINE = f"""
import sys
from pathlib import Path
from tests.fakes import engine
from weightcached.errors import WeightcachedError
from weightcached.wire.connection import Connection
path = Path("{SOCKETS}/cpu0.sock")
try:
    Connection.connect(path, timeout_s=20.0, purpose="engine").close()
except WeightcachedError as e:
    print(e.code, e, sep=": ")
    sys.exit(3)
sys.argv[1:] = [str(path), "{MODELS}"]
engine.main()
"""


@pytest.fixture
def daemon(make_daemon: Launcher, checkpoint: Path, short_tmp: Path) -> DaemonProcess:
    """A daemon in a container of its own."""
    daemon = make_daemon([model("tiny", checkpoint)])
    # The stand-in of its manager listens on an abstract socket, which belongs to the network.
    box = Container(
        short_tmp / "daemon-root",
        [Volume(short_tmp, short_tmp, "rw")],
        namespaces=("--uts", "--ipc"),
    )
    daemon.prefix = box.prefix
    return daemon.start()


@pytest.fixture
def box(daemon: DaemonProcess, checkpoint: Path, short_tmp: Path) -> Callable[..., Container]:
    """Makes containers of engines: sockets and checkpoint lie elsewhere than the daemon's."""

    def make(*, sockets: Path | None = daemon.runtime, **options: Any) -> Container:
        volumes = [Volume(checkpoint, MODELS)]
        if sockets:
            volumes.append(Volume(sockets, SOCKETS))
        return Container(short_tmp / "engine-root", volumes, **options)

    return make


def refusal(box: Container) -> str:
    """Why an engine in there does not map."""
    done = box.python("-c", ENGINE)
    assert done.returncode == 3, done
    return done.stdout.strip()


def doctor(box: Container, check: str) -> str:
    """The line of doctor in there about `check`."""
    command = ("-m", "weightcached.cli.weightcachectl", "doctor", "--socket-dir", str(SOCKETS))
    done = box.python(*command)
    assert done.returncode in (0, 1), done
    (line,) = [x for x in done.stdout.splitlines() if x[6:].startswith(f"{check}: ")]
    return " ".join(line.split())


def test_engine_in_another_container_maps_the_daemons_bytes(
    daemon: DaemonProcess,
    box: Callable[..., Container],
    checkpoint: Path,
    make_engine: Callable[..., Engine],
) -> None:
    beside = make_engine(daemon, checkpoint)
    nbytes = beside.attached()
    done = box().python("-c", ENGINE)
    assert done.stdout == f"attached {nbytes}\n{beside.digest().decode()}\n", done
    sound = doctor(box(), "socket")
    assert sound.startswith(f"ok socket: {SOCKETS}/cpu0.sock: pid ")
    assert sound.endswith(", ready")
    assert doctor(box(), "runtime directory") == f"ok runtime directory: {SOCKETS}"
    assert doctor(box(), "container").startswith("ok container: has pids of its own, ")
    assert doctor(box(), "user") == "ok user: uid 0, which must be the daemon's"
    assert doctor(box(), "manifest").startswith("ok manifest: none here")


def test_container_whose_user_namespace_has_the_daemons_user_under_another_number_maps(
    box: Callable[..., Container],
) -> None:
    """As rootless Podman does: uid 0 inside is the user outside. Here, the other way round."""
    inside = box(uid=0, inner=OTHER_UID)
    done = inside.python("-c", ENGINE)
    assert done.stdout.startswith("attached "), done
    assert doctor(inside, "user") == (
        f"ok user: uid {OTHER_UID} here is 0 outside, which must be the daemon's"
    )


def test_container_of_another_user_is_refused_with_the_way_out(
    box: Callable[..., Container],
) -> None:
    other = box(uid=OTHER_UID)
    text = f"runtime directory {SOCKETS} belongs to uid 0, expected {OTHER_UID}: run as that user, or remove it"
    assert refusal(other) == f"runtime-path: {text}"
    assert doctor(other, "runtime directory") == (
        f"fail runtime directory: {text}; fix: start the container with --user 0, rootless Podman "
        "with --userns=keep-id (docs/containers.md)"
    )


def test_container_whose_user_namespace_lacks_the_daemons_user_is_refused_with_the_way_out(
    box: Callable[..., Container],
) -> None:
    lacks = box(uid=OTHER_UID, inner=0)
    text = (
        f"runtime directory {SOCKETS} belongs to a user that this user namespace does not have (shown as uid 65534), "
        "expected uid 0: start the container with that user in it, as 'podman run --userns=keep-id' does "
        "(docs/containers.md)"
    )
    assert refusal(lacks) == f"runtime-path: {text}"
    assert "fix: start the container with --userns=keep-id (Podman)" in doctor(
        lacks, "runtime directory"
    )


def test_container_without_the_sockets_is_told_what_to_mount(
    box: Callable[..., Container],
) -> None:
    assert refusal(box(sockets=None)) == (
        f"no-daemon: no weightcached daemon listens on {SOCKETS}/cpu0.sock: in this container, mount "
        f"the directory of the daemon's socket at {SOCKETS} (docs/containers.md)"
    )
    assert doctor(box(sockets=None), "runtime directory") == (
        f"fail runtime directory: {SOCKETS} is not there, so no engine here finds a daemon outside; fix: start the "
        f"container with --volume /run/user/UID/weightcached:{SOCKETS}, UID being the daemon's "
        "(docs/containers.md)"
    )


def test_container_with_another_directory_is_told_that_it_has_no_socket(
    box: Callable[..., Container], short_tmp: Path
) -> None:
    (short_tmp / "another").mkdir(mode=0o700)
    line = doctor(box(sockets=short_tmp / "another"), "runtime directory")
    assert line.startswith(f"fail runtime directory: {SOCKETS} has no socket: no daemon runs, or")


def test_mount_of_a_directory_that_was_removed_outside_is_named(
    box: Callable[..., Container], short_tmp: Path
) -> None:
    """As /run/user/UID is at the last logout without lingering, and made again at the next login."""
    gone = short_tmp / "gone"
    gone.mkdir(mode=0o700)
    program = (
        "import sys, runpy; print('up', flush=True); sys.stdin.readline(); "
        f"sys.argv[1:] = ['doctor', '--socket-dir', '{SOCKETS}']; "
        "runpy.run_module('weightcached.cli.weightcachectl', run_name='__main__')"
    )
    done = box(sockets=gone).python("-c", program, meanwhile=lambda: shutil.rmtree(gone))
    assert f"{SOCKETS} was removed outside since this container started" in done.stdout, done
    assert "fix: loginctl enable-linger there, then start the container again\n" in done.stdout


def test_empty_directory_of_the_image_is_told_what_to_mount(
    box: Callable[..., Container], short_tmp: Path
) -> None:
    """Images have such directories, and a forgotten mount leaves one."""
    (short_tmp / "image").mkdir(mode=0o755)
    line = doctor(box(sockets=short_tmp / "image"), "runtime directory")
    assert f"{SOCKETS} has mode 0755, expected 0700" in line
    assert f"fix: start the container with --volume /run/user/UID/weightcached:{SOCKETS}, " in line
