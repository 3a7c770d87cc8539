"""`weightcachectl`: parse, call, print, exit. The modules beside this one do the work.

Machines run `status` often, so each command imports its modules when it runs.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from weightcached import __version__
from weightcached.errors import EXIT_FAILURE, EXIT_NO_DAEMON, DeviceError, WeightcachedError

if TYPE_CHECKING:
    from weightcached.cli.progress import ProgressDisplay
    from weightcached.cli.status import Answers
    from weightcached.cli.units import Verb
    from weightcached.system.units import Outcome
    from weightcached.wire.messages import Drop, Evict

WATCH_PERIOD_S = 1.0
_RELOAD_TIMEOUT_S = 3600.0
# A daemon's refusal if it has none of the named caches.
UNKNOWN_CACHE = "unknown-cache"


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except WeightcachedError as e:
            complain(str(e))
            sys.exit(e.exit_status)


def _check_devices(
    ctx: click.Context, param: click.Parameter, devices: Sequence[str]
) -> tuple[str, ...]:
    from weightcached.system.paths import check_device

    try:
        return tuple(dict.fromkeys(check_device(device) for device in devices))
    except DeviceError as e:
        raise click.BadParameter(str(e), ctx, param) from e


def _is_device(name: str) -> bool:
    return re.match(r"(gpu-|mig-|cpu\d)", name, re.IGNORECASE) is not None


def _check_names(
    ctx: click.Context, param: click.Parameter, names: Sequence[str]
) -> tuple[str, ...]:
    """Devices, and names of models."""
    _check_devices(ctx, param, [name for name in names if _is_device(name)])
    return tuple(dict.fromkeys(names))


def _complete_devices(ctx: click.Context, param: click.Parameter, begun: str) -> list[str]:
    from weightcached.cli.devices import all_devices

    return [row.device for row in all_devices()[0] if row.device.startswith(begun)]


def _complete_models(ctx: click.Context, param: click.Parameter, begun: str) -> list[str]:
    from weightcached.config.manifest import load_manifest
    from weightcached.system.paths import manifest_path

    try:
        models = load_manifest(manifest_path()).models
    except WeightcachedError:
        return []
    return [model.name for model in models if model.name.startswith(begun)]


_optional_devices = click.argument(
    "devices", metavar="[DEVICE]...", nargs=-1, callback=_check_devices, shell_complete=_complete_devices,
)  # fmt: skip
_devices = click.argument(
    "devices", metavar="DEVICE...", nargs=-1, required=True, callback=_check_devices, shell_complete=_complete_devices,
)  # fmt: skip
_on_devices = click.option(
    "--device",
    "devices",
    metavar="DEVICE",
    multiple=True,
    callback=_check_devices,
    shell_complete=_complete_devices,
    help="Only on this device; repeatable.",
)


def _choose_socket_dir(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    from weightcached.system.paths import choose_runtime_dir

    choose_runtime_dir(value)


_socket_dir = click.option(
    "--socket-dir",
    # Of another user's directory, check_private_dir() says more than click would.
    type=click.Path(path_type=Path, readable=False),
    metavar="DIR",
    show_default="$XDG_RUNTIME_DIR/weightcached",
    expose_value=False,
    callback=_choose_socket_dir,
    help="Directory of the daemons' sockets.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for other programs.")


def complain(text: str) -> None:
    """One line on stderr."""
    click.echo(f"weightcachectl: {text}", err=True)


def _exit(status: int) -> NoReturn:
    sys.exit(status)


def _print_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="weightcachectl", message="%(prog)s %(version)s")
def main() -> None:
    """Show and control the weightcached daemons of this user.

    DEVICE is GPU-<uuid>, MIG-<uuid> or cpuN.

    Exit status: 0 done, 1 failed, 2 bad usage, 3 no daemon answered, 78 wrong configuration.
    """


@main.command()
@_socket_dir
@_optional_devices
@_json
@click.option("--watch", is_flag=True, help="Show changes until interrupted.")
def status(devices: Sequence[str], as_json: bool, watch: bool) -> None:
    """Show the caches of all daemons.

    Limit the output to the given devices. Exit status: 0 shown, 3 no daemon answered.
    """
    if not watch:
        _exit(_show_status(devices, as_json))
    _watch_status(devices, as_json)


def _show_status(devices: Sequence[str], as_json: bool) -> int:
    from weightcached.cli import engine as engines
    from weightcached.cli import status
    from weightcached.wire.services import Services

    answers = _ask(devices)
    services = Services([], {}) if devices else engines.ask_all()
    for name, error in services.errors.items():
        complain(f"{name}: {error}")
    if as_json:
        document = status.as_json(answers.replies)
        _print_json(document | {"engines": engines.as_json(services.replies)})
    else:
        tables = [status.as_table(answers.replies)] if answers.replies else []
        tables += [engines.as_table(services.replies)] if services.replies else []
        click.echo("\n\n".join("\n".join(table) for table in tables), nl=bool(tables))
    return 0 if answers.replies else EXIT_NO_DAEMON


def _ask(devices: Sequence[str], *, units: bool = True) -> Answers:
    """Ask the named daemons, or all that have a socket. Errors go to stderr.

    units: also systemd's last words of daemons that have ended.
    """
    from weightcached.cli import status
    from weightcached.system.paths import devices_with_socket

    asked = list(devices) or devices_with_socket()
    answers = status.ask_all(asked)
    silent = {device: str(error) for device, error in answers.errors.items()}
    if units and (silent or not asked):
        silent |= _failed_units(devices, silent)
    for device, error in silent.items():
        complain(f"{device}: {error}")
    for reply in answers.replies:
        if reply.manifest_error:
            complain(
                f"{reply.device}: the manifest was refused, the one before stays in force: {reply.manifest_error}"
            )
    if not asked and not silent:
        from weightcached.system.paths import runtime_dir

        complain(str(status.no_daemon(runtime_dir())))
    return answers


def _failed_units(devices: Sequence[str], silent: Collection[str]) -> dict[str, str]:
    """systemd keeps the last words of a daemon that has ended, and whether it starts it again."""
    from weightcached.cli.units import failures

    return {
        device: str(error)
        for device, error in failures().items()
        if device in silent or not devices
    }


def _watch_status(devices: Sequence[str], as_json: bool) -> NoReturn:
    from weightcached.cli import status
    from weightcached.system.paths import devices_with_socket

    clears = sys.stdout.isatty() and not as_json
    shown = ""
    try:
        while True:
            answers = status.ask_all(list(devices) or devices_with_socket())
            lines = (
                [json.dumps(status.as_json(answers.replies))] if as_json else _watch_lines(answers)
            )
            text = "\n".join(lines)
            if text != shown:
                click.echo(("\x1b[H\x1b[2J" if clears else "") + text)
                shown = text
            time.sleep(WATCH_PERIOD_S)
    except KeyboardInterrupt:
        _exit(0)


def _watch_lines(answers: Answers) -> list[str]:
    from weightcached.cli import status

    table = status.as_table(answers.replies) if answers.replies else ["no daemon answers"]
    return table + [f"{device}: {error}" for device, error in answers.errors.items()]


@main.command()
@_socket_dir
@click.argument("names", metavar="[DEVICE|MODEL]...", nargs=-1, callback=_check_names)
@click.option(
    "--cache",
    "caches",
    metavar="NAME",
    multiple=True,
    help="Only this cache, e.g. llama-8b/target, or all caches of a model; repeatable.",
)
@click.option("--force", is_flag=True, help="Also reload caches that have not changed.")
@click.option(
    "--live",
    is_flag=True,
    help="Engines that run map the new weights, also of models that are not 'live' in the manifest.",
)
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0), default=_RELOAD_TIMEOUT_S, metavar="SECONDS",
    show_default=True, help="Wait at most this long. The reload itself goes on.",
)  # fmt: skip
def reload(
    names: Sequence[str], caches: Sequence[str], force: bool, live: bool, timeout_s: float
) -> None:
    """Read the manifest again and apply it.

    Loads caches that changed, failed or were released, of the named devices and models. Waits for
    the end and reports each cache. A cache is served until its successor is complete. Engines of
    live models map the new weights while they run. Exit status: 0 done, 1 a cache failed, the
    manifest was refused or an engine of a service stays on old weights, 3 no daemon answered.
    """
    devices = [name for name in names if _is_device(name)]
    caches = [*caches, *(name for name in names if not _is_device(name))]
    from weightcached.cli.status import no_daemon
    from weightcached.system.paths import devices_with_socket

    asked = list(devices) or devices_with_socket()
    if not asked:
        from weightcached.system.paths import runtime_dir

        raise no_daemon(runtime_dir())
    _exit(_reload(asked, caches, force=force, live=live, timeout_s=timeout_s))


def _reload(
    devices: Sequence[str], caches: Sequence[str], *, force: bool = False, live: bool = False,
    timeout_s: float = _RELOAD_TIMEOUT_S,
) -> int:  # fmt: skip
    ended = _run_reload(devices, caches, force=force, live=live, timeout_s=timeout_s)
    return _report_reloads(ended, caches)


def _run_reload(
    devices: Sequence[str], caches: Sequence[str], *, force: bool = False, live: bool = False,
    timeout_s: float,
) -> Mapping[str, Any]:  # fmt: skip
    from weightcached.cli.reload import reload_all

    display = _display()
    try:
        return reload_all(
            devices, caches=caches, force=force, timeout_s=timeout_s, display=display, live=live
        )
    finally:
        display.clear()


def _report_reloads(ended: Mapping[str, Any], caches: Sequence[str]) -> int:
    """Print the result of each device's reload.

    A device without the named caches has nothing to do, as long as another device has them.
    """
    lacking = [device for device, end in ended.items() if getattr(end, "code", "") == UNKNOWN_CACHE]
    if len(lacking) == len(ended):
        lacking = []
    for device in lacking:
        click.echo(f"{device}: has no {', '.join(caches)}, nothing to do")
    statuses = [_report_reload(device, ended[device]) for device in ended if device not in lacking]
    if not any(statuses):
        statuses += _report_misnamed(ended.values(), caches)
    return max(statuses)


def _report_misnamed(ends: Iterable[Any], caches: Sequence[str]) -> list[int]:
    """Complain of each name that is neither a cache nor a model on any device."""
    found = {outcome.cache for end in ends for outcome in getattr(end, "outcomes", ())}
    names = found | {cache.rpartition("/")[0] for cache in found}
    wrong = [cache for cache in caches if cache not in names]
    for cache in wrong:
        complain(f"no daemon has a cache {cache!r}")
    return [EXIT_FAILURE for _ in wrong]


def _report_reload(device: str, end: Any) -> int:
    """Print one device's result. Its exit status: a lost daemon outranks a failed cache."""
    from weightcached.cli.reload import outcome_text, swap_text

    if isinstance(end, WeightcachedError):
        complain(f"{device}: {end}")
        return EXIT_NO_DAEMON if end.exit_status == EXIT_NO_DAEMON else EXIT_FAILURE
    if end.error:
        complain(f"{device}: the manifest was refused, nothing was changed: {end.error}")
        return EXIT_FAILURE
    for outcome in end.outcomes:
        click.echo(outcome_text(device, outcome))
    for swap in end.swaps:
        (complain if swap.outcome == "left" else click.echo)(swap_text(device, swap))
    failed = any(outcome.outcome == "failed" for outcome in end.outcomes)
    return EXIT_FAILURE if failed or any(swap.outcome == "left" for swap in end.swaps) else 0


@main.command()
@_socket_dir
@click.argument("model", metavar="MODEL")
@click.argument(
    "directory",
    metavar="DIR",
    type=click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True),
)
@click.option(
    "--label",
    metavar="TEXT",
    show_default="DIR's last part",
    help="A name for these weights, in status, metrics and vLLM's answers.",
)
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0), default=_RELOAD_TIMEOUT_S, metavar="SECONDS",
    show_default=True, help="Wait at most this long. The load itself goes on.",
)  # fmt: skip
def publish(model: str, directory: Path, label: str | None, timeout_s: float) -> None:
    """Make the checkpoint in DIR the next generation of MODEL.

    Loads it beside the present one; then engines that run map it. Without room for both, engines of
    services sleep until it has taken the place of the present one. It stays MODEL's checkpoint,
    also for engines and daemons that start later, until another is published or the manifest names
    another. If it cannot be loaded, all stays as it was. Exit status: 0 done, 1 it failed or an
    engine of a service stays on old weights, 3 no daemon answered, 78 there is no checkpoint.
    """
    from weightcached.cli import publish

    answers = _ask([])
    if not answers.replies:
        _exit(EXIT_NO_DAEMON)
    manifest, devices = publish.manifest_of(answers.replies, model)
    label = directory.name if label is None else label
    with publish.published(manifest, model, directory, label) as kept:
        ended = _run_reload(devices, [model], live=True, timeout_s=timeout_s)
        # A device whose daemon is gone will load it when it is back.
        kept[0] = not any(
            outcome.outcome == "failed"
            for end in ended.values()
            for outcome in getattr(end, "outcomes", ())
        ) and not any(getattr(end, "error", "") for end in ended.values())
    status = _report_reloads(ended, [model])
    if not kept[0]:
        complain(f"{directory} was not published: {model} stays as it was")
        _run_reload(devices, [model], timeout_s=timeout_s)
    _exit(status)


def _display() -> ProgressDisplay:
    from weightcached.cli.progress import ProgressDisplay

    return ProgressDisplay(sys.stderr)


@main.command()
@_socket_dir
@click.argument("cache", metavar="CACHE", shell_complete=_complete_models)
@_on_devices
@click.option(
    "--force", is_flag=True, help="Also if engines map it. Their memory stays until they end."
)
def drop(cache: str, devices: Sequence[str], force: bool) -> None:
    """Free CACHE on every device that has it.

    CACHE is a model's name or MODEL/ROLE. Refuses while an engine maps it, unless --force is given.
    'weightcachectl reload' brings it back.
    Exit status: 0 freed, 1 refused or no such cache, 3 no daemon answered.
    """
    from weightcached.wire.messages import Drop

    _free(devices, cache, lambda name: Drop(cache=name, force=force), "dropped")


@main.command()
@_socket_dir
@click.argument("cache", metavar="CACHE", shell_complete=_complete_models)
@_on_devices
def evict(cache: str, devices: Sequence[str]) -> None:
    """Free CACHE until an engine asks for it.

    CACHE is a model's name or MODEL/ROLE. It comes back from its snapshot, or is loaded again.
    Refuses while an engine that is awake maps it. Exit status: 0 freed, 1 refused or no such cache,
    3 no daemon answered.
    """
    from weightcached.wire.messages import Evict

    _free(devices, cache, lambda name: Evict(cache=name), "evicted")


def _free(
    devices: Sequence[str], cache: str, request: Callable[[str], Drop | Evict], done: str
) -> NoReturn:
    from weightcached.cli import reload

    answers = _ask(devices)
    if not answers.replies:
        _exit(EXIT_NO_DAEMON)
    failed = False
    for device, name in reload.holders(answers.replies, cache):
        try:
            reload.free(device, request(name))
            click.echo(f"{device} {name}: {done}")
        except WeightcachedError as e:
            complain(f"{device} {name}: {e}")
            failed = True
    _exit(EXIT_FAILURE if failed else 0)


@main.command()
@_socket_dir
@click.argument("cache", metavar="CACHE", shell_complete=_complete_models)
@_on_devices
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0), default=3600, metavar="SECONDS", show_default=True,
    help="Wait at most this long. The rollback itself goes on.",
)  # fmt: skip
def rollback(cache: str, devices: Sequence[str], timeout_s: float) -> None:
    """Go back to the generation of CACHE before, from its snapshot.

    CACHE is a model's name or MODEL/ROLE. Nothing is done unless every device that has it can go
    back. The served generation stays until the one before is there; engines that map it keep it.

    A 'reload' keeps what the rollback restored, and so does a reboot, until the manifest's entry,
    the checkpoint or the software changes; 'reload --force' ends it.

    Exit status: 0 done, 1 there is none before, or it could not be restored, 3 no daemon answered.
    """
    from weightcached.cli.reload import holders

    answers = _ask(devices)
    if not answers.replies:
        _exit(EXIT_NO_DAEMON)
    caches: dict[str, list[str]] = {}
    for device, name in holders(answers.replies, cache):
        caches.setdefault(name, []).append(device)
    statuses = [_roll_back(name, on, timeout_s) for name, on in caches.items()]
    # A model's draft may have had no other weights.
    found = [status for status in statuses if status is not None]
    _exit(max(found) if found else EXIT_FAILURE)


def _roll_back(cache: str, devices: Sequence[str], timeout_s: float) -> int | None:
    """Roll back one cache; its exit status, or None if it has no generation before anywhere."""
    from weightcached.cli.reload import generations_before, rollback_all
    from weightcached.cli.snapshot import when

    found = generations_before(devices, cache)
    snapshots: dict[str, str] = {}
    for device, reply in found.items():
        if isinstance(reply, WeightcachedError):
            complain(f"{device}: {reply}")
        else:
            snapshots[device] = reply.snapshot
            click.echo(
                f"{device} {cache}: goes back to the generation whose snapshot was written {when(reply.created_at)}"
            )
    if len(snapshots) < len(found):
        if snapshots:
            complain(f"{cache}: nothing was done, because not every device can go back")
        return EXIT_FAILURE if snapshots else None
    display = _display()
    ended = rollback_all(snapshots, cache, timeout_s=timeout_s, display=display)
    display.clear()
    return max(_report_reload(device, end) for device, end in ended.items())


@main.command()
@_socket_dir
@_json
def devices(as_json: bool) -> None:
    """List devices, with their models and daemons.

    The GPUs of this machine, and other devices that the manifest or a socket names.
    """
    from weightcached.cli import devices

    found, problems = devices.all_devices()
    for problem in problems:
        complain(problem)
    if as_json:
        _print_json(devices.as_json(found))
    else:
        click.echo("\n".join(devices.as_table(found)))


@main.command()
@_json
@click.option(
    "--manifest",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Read this manifest instead of the one in force.",
)
def plan(as_json: bool, manifest: Path | None) -> None:
    """Show which rank of which model each device serves.

    Read from the manifest, with approximate sizes, before anything loads. Exit status: 0 shown, 78
    the manifest is wrong.
    """
    from weightcached.cli import plan
    from weightcached.config.manifest import load_manifest
    from weightcached.system.paths import manifest_path

    rows, problems = plan.rows_of(load_manifest(manifest_path(manifest)))
    for problem in problems:
        complain(problem)
    if as_json:
        _print_json(plan.as_json(rows))
    else:
        click.echo("\n".join(plan.as_table(rows)))


def _check_placed(
    ctx: click.Context, param: click.Parameter, devices: Sequence[str]
) -> tuple[str, ...]:
    return ("all",) if tuple(devices) == ("all",) else _check_devices(ctx, param, devices)


@main.command(
    context_settings={
        # As for 'weightcached preload': vLLM has short options, such as -tp.
        "help_option_names": ["--help"],
        "ignore_unknown_options": True,
    }
)
@click.argument("model", type=click.Path())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ENGINE ARGUMENTS]...")
@click.option("--name", help="Name of the entry.", show_default="the last part of MODEL")
@click.option(
    "--device",
    "devices",
    metavar="DEVICE",
    multiple=True,
    callback=_check_placed,
    shell_complete=_complete_devices,
    show_default="the first GPUs, else cpu0 …",
    help="A device, or all; repeatable, in rank order.",
)
@click.option(
    "--python",
    metavar="PATH",
    show_default="the one that runs weightcached",
    help="Interpreter that runs the engine.",
)
@click.option("--start", is_flag=True, help="Start the units of devices that no daemon serves yet.")
def add(
    model: str,
    arguments: Sequence[str],
    name: str | None,
    devices: Sequence[str],
    python: str | None,
    start: bool,
) -> None:
    """Add MODEL to the manifest, and serve it.

    MODEL is a directory or a Hub id and comes first; ENGINE ARGUMENTS are those of 'vllm serve':
    --tensor-parallel-size 2, … The manifest keeps its comments and its order; the example that
    'install' wrote is replaced. Shows the plan, has running daemons reload, waits for the end, and
    prints the 'vllm serve' line of an engine that attaches.

    Exit status: 0 done, 1 the entry is there but the model is not served, 78 wrong arguments or
    manifest: nothing was changed.
    """
    from weightcached.cli import add, edit, plan

    if model.startswith("-"):
        raise click.UsageError(f"MODEL comes first, got {model}")
    path = edit.path_to_change()
    add.check_new(path, name or add.name_of(model))
    entry = add.entry_of(model, arguments, name=name, devices=devices, python=python)
    command = add.serve_command(entry, arguments)
    manifest = edit.add_model(path, entry)
    click.echo(f"added {entry['name']} to {path}")
    rows, problems = plan.rows_of(manifest, only=entry["name"])
    for problem in problems:
        complain(problem)
    click.echo("\n".join(plan.as_table(rows)))
    answering, silent = add.daemons(entry["devices"], entry["engine"])
    status = _reload(answering, [entry["name"]]) if answering else 0
    if start and silent:
        status = max(status, _run_job("start", silent))
        silent = []
    if status:
        _exit(status)
    click.echo("an engine that attaches:" if not silent else "next:")
    if silent:
        click.echo(f"  weightcachectl start {' '.join(silent)}")
    click.echo(f"  {command}")


@main.command()
@click.argument("name", shell_complete=_complete_models)
def remove(name: str) -> None:
    """Remove the model NAME from the manifest, and free it.

    The manifest keeps its comments and its order. Running daemons reload; engines that map the
    weights keep them until they end.

    Exit status: 0 done, 1 a daemon failed, 78 the manifest was not changed.
    """
    from weightcached.cli import add, edit

    path = edit.path_to_change()
    edit.remove_model(path, name)
    click.echo(f"removed {name} from {path}")
    holding = add.holders(name)
    _exit(_reload(holding, [name]) if holding else 0)


@main.command()
@_socket_dir
@_devices
def start(devices: Sequence[str]) -> None:
    """Start units and wait until they serve.

    Exit status: 0 all serve, 1 a unit failed, or serves none of its caches.
    """
    _exit(_run_job("start", devices))


@main.command()
@_socket_dir
@_devices
def stop(devices: Sequence[str]) -> None:
    """Stop units, which frees their memory.

    Memory that an engine maps is freed when it ends. Exit status: 0 all stopped, 1 a unit ended
    otherwise.
    """
    _exit(_run_job("stop", devices))


@main.command()
@_socket_dir
@_devices
def restart(devices: Sequence[str]) -> None:
    """Restart units; resident weights stay.

    Loads nothing that is resident and still in the manifest. Exit status: 0 all serve, 1 a unit
    failed, or serves none of its caches.
    """
    _exit(_run_job("restart", devices))


def _run_job(verb: Verb, devices: Sequence[str]) -> int:
    from weightcached.cli.units import run_job

    display = _display()
    try:
        ended = run_job(verb, list(devices), display)
    finally:
        display.clear()
    past = {"start": "started", "stop": "stopped", "restart": "restarted"}[verb]
    failed = False
    for device, error in ended.items():
        if error:
            complain(f"{device}: {error}")
            failed = True
        else:
            click.echo(f"{device}: {past}")
            failed |= verb != "stop" and not _serves(device)
    return EXIT_FAILURE if failed else 0


def _serves(device: str) -> bool:
    """Report failed caches of a daemon that has started. False if it serves none of its caches."""
    from weightcached.cli.status import ask_device

    try:
        caches = ask_device(device).caches
    except WeightcachedError:
        # This session does not see its socket: doctor says so.
        return True
    # While it is tried again, it has its error still.
    failed = [x for x in caches if x.state == "failed" or (x.state == "loading" and x.error)]
    for cache in failed:
        trying = cache.retry_at is not None or cache.state == "loading"
        again = "; it is tried again" if trying else ""
        complain(f"{device} {cache.name} failed: {' '.join(cache.error.split())}{again}")
    return not failed or any(cache.state in ("ready", "evicted") for cache in caches)


@main.command()
def install() -> None:
    """Write unit files, an example manifest and man pages.

    Also completion for bash, zsh and fish. Files that you have edited stay. Exit status: 0 written
    or there already, 1 something is in the way.
    """
    from weightcached.cli import install
    from weightcached.cli.units import reload_manager
    from weightcached.system import units

    others = install.other_files()
    _report_files(units.install(others=others), others)
    if not reload_manager():
        click.echo(
            "no systemd user manager answers: once it runs, run 'systemctl --user daemon-reload'"
        )
    for hint in install.hints() if others else []:
        click.echo(hint)
    click.echo(
        "next:\n  weightcachectl doctor\n  weightcachectl add MODEL --start\n"
        "and for units that run from boot on, without a login:\n"
        f"  loginctl enable-linger {os.getuid()}\n  systemctl --user enable weightcached@DEVICE.service"
    )


@main.command()
def uninstall() -> None:
    """Remove the files that 'install' wrote.

    Files that you have edited stay. Refused while a unit runs: without its file systemd would
    forget it, and free its memory.

    Exit status: 0 removed (edited files stay and are named), 1 a unit runs.
    """
    from weightcached.cli import install
    from weightcached.cli.units import reload_manager, running_units
    from weightcached.system import units

    ours = {str(path) for path in units.destinations()}
    running = [name for name, path in running_units().items() if path in ours]
    if running:
        complain(
            f"{', '.join(running)} {'runs' if len(running) == 1 else 'run'}, and would lose resident weights: "
            f"systemctl --user disable --now {' '.join(running)}, then uninstall"
        )
        _exit(EXIT_FAILURE)
    others = install.other_files()
    _report_files(units.uninstall(others), others)
    reload_manager()


def _report_files(outcomes: Sequence[Outcome], others: Collection[Path]) -> None:
    """A line for each file; one for all pages and scripts that ended alike."""
    from weightcached.system.paths import data_home

    alike: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.path in others and outcome.action != "kept":
            alike[outcome.action] = alike.get(outcome.action, 0) + 1
        else:
            why = ", which was edited" if outcome.action == "kept" else ""
            click.echo(f"{outcome.action} {outcome.path}{why}")
    for action, count in alike.items():
        click.echo(f"{action} manual pages and shell completion, {count} files in {data_home()}")


@main.command()
@_socket_dir
@_json
def doctor(as_json: bool) -> None:
    """Check what daemons and engines need.

    Each finding is one line, with the command that fixes it. Exit status: 0 nothing failed (there
    may be warnings), 1 something failed.
    """
    from weightcached.cli import doctor

    findings = doctor.examine()
    if as_json:
        _print_json({"findings": [finding._asdict() for finding in findings]})
    else:
        click.echo("\n".join(doctor.as_line(finding) for finding in findings))
    _exit(EXIT_FAILURE if any(finding.level == "fail" for finding in findings) else 0)


@main.command()
@_socket_dir
@click.argument("cache", metavar="[CACHE]", required=False)
@_on_devices
def verify(cache: str | None, devices: Sequence[str]) -> None:
    """Compare resident bytes with their digests.

    The loader made the digests. CACHE is a model's name or MODEL/ROLE; without it, all ready caches
    are compared. Exit status: 0 all equal, 1 something differs or could not be read, 3 no daemon
    answered.
    """
    from weightcached.cli import verify

    answers = _ask(devices)
    if not answers.replies:
        _exit(EXIT_NO_DAEMON)
    failed = False
    for device, name in verify.ready_caches(answers.replies, cache):
        equal, text = verify.verify(device, name)
        if equal:
            click.echo(text)
        else:
            complain(text)
        failed = failed or not equal
    _exit(EXIT_FAILURE if failed else 0)


class _SnapshotGroup(_Group):
    """A word that is no command is a cache to write: `snapshot llama-8b` is `snapshot write llama-8b`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["write", *args]
        return super().parse_args(ctx, args)


@main.group(cls=_SnapshotGroup, subcommand_metavar="CACHE... | --all | COMMAND [ARGS]...")
def snapshot() -> None:
    """Write, list, verify or remove snapshots.

    Snapshots bring the weights back without vLLM. If the manifest has the key snapshots, they are
    written after each load. 'snapshot CACHE' writes one now.
    """


_snapshot_cache = click.argument("cache", required=False)


@snapshot.command("write")
@_socket_dir
@click.argument("caches", metavar="[CACHE]...", nargs=-1)
@click.option("--all", "each", is_flag=True, help="Of every cache that is served.")
@_on_devices
def snapshot_write(caches: Sequence[str], each: bool, devices: Sequence[str]) -> None:
    """Write snapshots of what is served now, and wait.

    CACHE is a model's name or MODEL/ROLE. One that is there already is not written again. Also
    without the manifest's key, into its default directory.

    Exit status: 0 they are there, 1 one is not, 3 no daemon answered.
    """
    from weightcached.cli import snapshot

    if bool(caches) == each:
        raise click.UsageError("name caches, or say --all")
    answers = _ask(devices)
    if not answers.replies:
        _exit(EXIT_NO_DAEMON)
    display, failed = _display(), False
    for device, name in _served(answers, caches):
        try:
            snapshot.write(device, name, display)
        except WeightcachedError as e:
            display.clear()
            complain(f"{device} {name}: {e}")
            failed = True
        else:
            display.clear()
            click.echo(f"{device} {name}: the snapshot is there")
    if not failed and not all(snapshot.is_used(reply.manifest) for reply in answers.replies):
        click.echo(snapshot.NO_KEY)
    _exit(EXIT_FAILURE if failed else 0)


def _served(answers: Answers, caches: Sequence[str]) -> list[tuple[str, str]]:
    """(device, cache) of all that is served, or of the named ones. Raises UnknownCacheError."""
    from weightcached.cli.reload import holders

    if not caches:
        return [
            (reply.device, cache.name)
            for reply in answers.replies
            for cache in reply.caches
            if cache.generation
        ]
    found = [each for cache in caches for each in holders(answers.replies, cache)]
    return list(dict.fromkeys(found))


@snapshot.command("list")
@_snapshot_cache
@_json
def snapshot_list(cache: str | None, as_json: bool) -> None:
    """List all snapshots, or those of CACHE, a cache or a model."""
    from weightcached.cli import snapshot

    rows = snapshot.rows(snapshot.directory(), cache)
    if as_json:
        _print_json([row._asdict() for row in rows])
    else:
        click.echo("\n".join(snapshot.table(rows)))


@snapshot.command("verify")
@_snapshot_cache
def snapshot_verify(cache: str | None) -> None:
    """Read every byte and compare its digest.

    Exit status: 0 all are as written, 1 one is not.
    """
    from weightcached.cli import snapshot

    status = 0
    for row in snapshot.rows(snapshot.directory(), cache):
        error = snapshot.verify(row)
        status = EXIT_FAILURE if error else status
        click.echo(f"{row.device} {row.cache}: {error or 'all digests equal'}")
    _exit(status)


@snapshot.command("rm")
@click.argument("cache")
def snapshot_rm(cache: str) -> None:
    """Remove the snapshots of CACHE, a cache or a model.

    Exit status: 0 removed, 1 there is none.
    """
    from weightcached.cli import snapshot

    root = snapshot.directory()
    rows = snapshot.rows(root, cache)
    if not rows:
        complain(f"{root} has no snapshot of {cache}: see 'weightcachectl snapshot list'")
        _exit(EXIT_FAILURE)
    for row in rows:
        snapshot.remove(row)
        click.echo(f"removed {row.path}")


@main.command()
@_socket_dir
@click.argument("cache", metavar="CACHE", shell_complete=_complete_models)
@_on_devices
@_json
@click.option(
    "--all",
    "each",
    is_flag=True,
    help="Show every module and every name, even if layers are alike.",
)
def explain(cache: str, devices: Sequence[str], as_json: bool, each: bool) -> None:
    """Show how CACHE is attached, or why it is not.

    CACHE is a model's name or MODEL/ROLE. Shows the plan of each module's post-processing, which
    tensors each engine copies and by which rule, and where the loader's proof refused the model.
    Exit status: 0 shown, 1 it is not served, 3 no daemon answered.
    """
    from weightcached.cli import explain
    from weightcached.cli.reload import holders

    answers = _ask(devices, units=False)
    if not answers.replies:
        _exit(_explain_failed_units(devices))
    found = explain.reports(answers.replies, holders(answers.replies, cache))
    if as_json:
        _print_json(explain.as_json(found))
    else:
        click.echo("\n".join(explain.as_lines(found, each=each)))
    _exit(EXIT_FAILURE if any(report.index is None for report in found) else 0)


def _explain_failed_units(devices: Sequence[str]) -> int:
    """A daemon that could load no model has ended; systemd keeps its last words."""
    ended = _failed_units(devices, devices)
    for device, error in ended.items():
        click.echo(f"{device}: {error}")
    return EXIT_FAILURE if ended else EXIT_NO_DAEMON


@main.group()
def engine() -> None:
    """Show and control engine services.

    NAME is an entry under engines: in the manifest.
    """


_name = click.argument("name")


@engine.command("status")
@_socket_dir
@click.argument("name", required=False)
@_json
def engine_status(name: str | None, as_json: bool) -> None:
    """Show engine services, or one.

    Exit status: 0 shown, 1 it is not running.
    """
    from weightcached.cli import engine as engines
    from weightcached.wire.services import Services

    found = Services([engines.ask(name, "status")], {}) if name else engines.ask_all()
    for service, error in found.errors.items():
        complain(f"{service}: {error}")
    if as_json:
        _print_json({"engines": found.replies})
    elif found.replies:
        click.echo("\n".join(engines.as_table(found.replies)))
    _exit(0 if found.replies or not found.errors else EXIT_FAILURE)


@engine.command("start")
@_name
def engine_start(name: str) -> None:
    """Start the unit, and wait until an engine serves.

    Exit status: 0 it serves, 1 it failed.
    """
    _engine_job("start", name)


@engine.command("stop")
@_name
def engine_stop(name: str) -> None:
    """Let requests end, and stop the service.

    Exit status: 0 stopped, 1 it failed.
    """
    _engine_job("stop", name)


def _engine_job(verb: str, name: str) -> None:
    from weightcached.cli.engine import forget_words, last_words, unit_of
    from weightcached.cli.units import systemctl
    from weightcached.errors import UnitError

    unit = unit_of(name)
    forget_words(name)
    try:
        systemctl(verb, unit, timeout_s=None)
    except UnitError as e:
        # The supervisor's last words tell more than systemctl; the next one's status has them no more.
        status = systemctl("show", "--value", "--property=StatusText", unit).strip()
        words = last_words(name) or status
        raise UnitError(f"{name}: {words}; journalctl --user -u {unit}" if words else str(e)) from e
    click.echo(f"{name}: {'started' if verb == 'start' else 'stopped'}")


@engine.command("restart")
@_socket_dir
@_name
def engine_restart(name: str) -> None:
    """Replace the engines by those of the manifest as it is now.

    The new engine starts beside the old one, which serves until then; no connection is refused. If
    the new one cannot be started, the old one serves on.

    Exit status: 0 the new engine serves, 1 it could not be started.
    """
    _tell_engine(name, "restart")


@engine.command("sleep")
@_socket_dir
@_name
def engine_sleep(name: str) -> None:
    """Send the engine to sleep, until somebody connects."""
    _tell_engine(name, "sleep")


@engine.command("wake")
@_socket_dir
@_name
def engine_wake(name: str) -> None:
    """Wake the engine without waiting for a connection."""
    _tell_engine(name, "wake")


def _tell_engine(name: str, command: str) -> None:
    from weightcached.cli import engine as engines

    reply = engines.ask(name, command, timeout_s=engines.LONGEST_S)
    click.echo(f"{name}: {reply['state']}")


if __name__ == "__main__":
    main()
