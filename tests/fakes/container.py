"""Containers made by hand: namespaces of unshare(1), and a root of their own with bind mounts.

In the root are /usr and what belongs to it, this interpreter with its packages, and this tree, all
read-only; an empty /tmp, /run and /home; and the volumes of the test. Needs root.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.fakes.daemon import ROOT, environment

# Arguments: the empty directory for the root; triples SOURCE TARGET MODE; "--"; the program.
_SCRIPT = r"""
set -eu
root=$1; shift
mount -t tmpfs -o mode=0755 none "$root"
for name in bin sbin lib lib32 lib64 libx32; do
  if [ -L /$name ]; then cp -P /$name "$root/$name"; fi
done
while [ "$1" != -- ]; do
  mkdir -p "$root$2"; mount --rbind "$1" "$root$2"; mount -o remount,bind,$3 "$root$2"; shift 3
done
shift
mkdir -p "$root"/{proc,dev,tmp,run,home,old}
chmod 1777 "$root/tmp" "$root/home"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
cd "$root"
pivot_root . old
umount -l old
cd /home
export HOME=/home TMPDIR=/tmp
exec "$@"
"""
# Enters a user namespace, and goes on when its maps have been written.
_WAIT = ["unshare", "--user", "bash", "-c", 'echo; read -r _; exec "$@"', "user"]


class Volume(NamedTuple):
    """A directory, and its place in the container; read-only if `mode` does not say otherwise."""

    source: Path
    target: Path
    mode: str = "ro"


class Container:
    """What a container runtime would be told.

    root: a directory for its root, empty or missing. uid: of the program, outside. inner: the
    container has a user namespace with that uid alone, under this number.
    """

    def __init__(
        self,
        root: Path,
        volumes: Iterable[Volume],
        *,
        namespaces: Sequence[str] = ("--net", "--uts", "--ipc"),
        uid: int = 0,
        inner: int | None = None,
    ) -> None:
        root.mkdir(exist_ok=True)
        mounts = [Volume(directory, directory) for directory in _own_root()] + list(volumes)
        self._uid, self._inner = uid, inner
        # To be put before a command.
        self.prefix = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *namespaces]
        self.prefix += ["bash", "-c", _SCRIPT, "container", str(root)]
        self.prefix += [str(word) for mount in mounts for word in mount] + ["--"]
        self._become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]

    def python(
        self, *arguments: str, meanwhile: Callable[[], object] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `python ARGUMENTS…` inside, to its end, with one empty line on its standard input.

        meanwhile: done before that line, when the program has written one.
        """
        waits = [] if self._inner is None else _WAIT
        command = [*self.prefix, *self._become, *waits, sys.executable, *arguments]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=environment(),
        ) as process:  # fmt: skip
            if waits:
                self._write_maps(process)
            if meanwhile:
                assert process.stdout
                process.stdout.readline()
                meanwhile()
            out, err = process.communicate("\n", timeout=120)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def _write_maps(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "\n"
        # The child of `unshare --fork`, which has become each program after it.
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        for kind in ("uid", "gid"):
            maps = Path(f"/proc/{children.split()[0]}/{kind}_map")
            maps.write_text(f"{self._inner} {self._uid} 1\n")
        process.stdin.write("\n")
        process.stdin.flush()


def _own_root() -> list[Path]:
    """What every program here needs, each at its own place."""
    # Packages may lie in another environment, which a .pth file names.
    wanted = ["/usr", "/etc", sys.base_prefix, sys.prefix, str(ROOT), *sys.path]
    there = [path for path in dict.fromkeys(wanted) if path and Path(path).is_dir()]
    return [Path(d) for d in there if not any(d.startswith(f"{other}/") for other in there)]
