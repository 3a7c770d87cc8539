"""`weightcachectl`: parse, call, print, exit. The modules beside this one do the work.

Machines run `status` often, so each command imports its modules when it runs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from weightcached import __version__
from weightcached.cli import engine_commands, reload_commands, snapshot_commands, unit_commands
from weightcached.cli.common import (
    Group,
    ask,
    check_devices,
    complain,
    complete_devices,
    complete_models,
    failed_units,
    json_option,
    on_devices,
    print_json,
    socket_dir,
)
from weightcached.cli.reload_commands import reload_caches
from weightcached.cli.unit_commands import run_unit_job
from weightcached.errors import EXIT_FAILURE, EXIT_NO_DAEMON

if TYPE_CHECKING:
    from weightcached.cli.status import Answers

WATCH_PERIOD_S = 1.0

_optional_devices = click.argument(
    "devices", metavar="[DEVICE]...", nargs=-1, callback=check_devices, shell_complete=complete_devices,
)  # fmt: skip


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="weightcachectl", message="%(prog)s %(version)s")
def main() -> None:
    """Show and control the weightcached daemons of this user.

    DEVICE is GPU-<uuid>, MIG-<uuid> or cpuN.

    Exit status: 0 done, 1 failed, 2 bad usage, 3 no daemon answered, 78 wrong configuration.
    """


for _command in (
    reload_commands.reload,
    reload_commands.publish,
    reload_commands.rollback,
    reload_commands.drop,
    reload_commands.evict,
    unit_commands.start,
    unit_commands.stop,
    unit_commands.restart,
    unit_commands.install,
    unit_commands.uninstall,
    snapshot_commands.snapshot,
    engine_commands.engine,
):
    main.add_command(_command)


@main.command()
@socket_dir
@_optional_devices
@json_option
@click.option("--watch", is_flag=True, help="Show changes until interrupted.")
def status(devices: Sequence[str], as_json: bool, watch: bool) -> None:
    """Show the caches of all daemons.

    Limit the output to the given devices. Exit status: 0 shown, 3 no daemon answered.
    """
    if not watch:
        sys.exit(_show_status(devices, as_json))
    _watch_status(devices, as_json)


def _show_status(devices: Sequence[str], as_json: bool) -> int:
    from weightcached.cli import engine as engines
    from weightcached.cli import status
    from weightcached.wire.services import Services

    answers = ask(devices)
    services = Services([], {}) if devices else engines.ask_all()
    for name, error in services.errors.items():
        complain(f"{name}: {error}")
    if as_json:
        document = status.as_json(answers.replies)
        print_json(document | {"engines": engines.as_json(services.replies)})
    else:
        tables = [status.as_table(answers.replies)] if answers.replies else []
        tables += [engines.as_table(services.replies)] if services.replies else []
        click.echo("\n\n".join("\n".join(table) for table in tables), nl=bool(tables))
    return 0 if answers.replies else EXIT_NO_DAEMON


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
        sys.exit(0)


def _watch_lines(answers: Answers) -> list[str]:
    from weightcached.cli import status

    table = status.as_table(answers.replies) if answers.replies else ["no daemon answers"]
    return table + [f"{device}: {error}" for device, error in answers.errors.items()]


@main.command()
@socket_dir
@json_option
def devices(as_json: bool) -> None:
    """List devices, with their models and daemons.

    The GPUs of this machine, and other devices that the manifest or a socket names.
    """
    from weightcached.cli import devices

    found, problems = devices.all_devices()
    for problem in problems:
        complain(problem)
    if as_json:
        print_json(devices.as_json(found))
    else:
        click.echo("\n".join(devices.as_table(found)))


@main.command()
@json_option
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
        print_json(plan.as_json(rows))
    else:
        click.echo("\n".join(plan.as_table(rows)))


def _check_placed(
    ctx: click.Context, param: click.Parameter, devices: Sequence[str]
) -> tuple[str, ...]:
    return ("all",) if tuple(devices) == ("all",) else check_devices(ctx, param, devices)


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
    shell_complete=complete_devices,
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
    status = reload_caches(answering, [entry["name"]]) if answering else 0
    if start and silent:
        status = max(status, run_unit_job("start", silent))
        silent = []
    if status:
        sys.exit(status)
    click.echo("an engine that attaches:" if not silent else "next:")
    if silent:
        click.echo(f"  weightcachectl start {' '.join(silent)}")
    click.echo(f"  {command}")


@main.command()
@click.argument("name", shell_complete=complete_models)
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
    sys.exit(reload_caches(holding, [name]) if holding else 0)


@main.command()
@socket_dir
@json_option
def doctor(as_json: bool) -> None:
    """Check what daemons and engines need.

    Each finding is one line, with the command that fixes it. Exit status: 0 nothing failed (there
    may be warnings), 1 something failed.
    """
    from weightcached.cli import doctor

    findings = doctor.examine()
    if as_json:
        print_json({"findings": [finding._asdict() for finding in findings]})
    else:
        click.echo("\n".join(doctor.as_line(finding) for finding in findings))
    sys.exit(EXIT_FAILURE if any(finding.level == "fail" for finding in findings) else 0)


@main.command()
@socket_dir
@click.argument("cache", metavar="[CACHE]", required=False)
@on_devices
def verify(cache: str | None, devices: Sequence[str]) -> None:
    """Compare resident bytes with their digests.

    The loader made the digests. CACHE is a model's name or MODEL/ROLE; without it, all ready caches
    are compared. Exit status: 0 all equal, 1 something differs or could not be read, 3 no daemon
    answered.
    """
    from weightcached.cli import verify

    answers = ask(devices)
    if not answers.replies:
        sys.exit(EXIT_NO_DAEMON)
    failed = False
    for device, name in verify.ready_caches(answers.replies, cache):
        equal, text = verify.verify(device, name)
        if equal:
            click.echo(text)
        else:
            complain(text)
        failed = failed or not equal
    sys.exit(EXIT_FAILURE if failed else 0)


@main.command()
@socket_dir
@click.argument("cache", metavar="CACHE", shell_complete=complete_models)
@on_devices
@json_option
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

    answers = ask(devices, units=False)
    if not answers.replies:
        sys.exit(_explain_failed_units(devices))
    found = explain.reports(answers.replies, holders(answers.replies, cache))
    if as_json:
        print_json(explain.as_json(found))
    else:
        click.echo("\n".join(explain.as_lines(found, each=each)))
    sys.exit(EXIT_FAILURE if any(report.index is None for report in found) else 0)


def _explain_failed_units(devices: Sequence[str]) -> int:
    """A daemon that could load no model has ended; systemd keeps its last words."""
    ended = failed_units(devices, devices)
    for device, error in ended.items():
        click.echo(f"{device}: {error}")
    return EXIT_FAILURE if ended else EXIT_NO_DAEMON


if __name__ == "__main__":
    main()
