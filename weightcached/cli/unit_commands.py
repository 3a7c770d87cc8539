"""`weightcachectl start`, `stop`, `restart`, `install` and `uninstall`. units.py and install.py do the work."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from weightcached.cli.common import (
    check_devices,
    complain,
    complete_devices,
    progress_display,
    socket_dir,
)
from weightcached.errors import EXIT_FAILURE, WeightcachedError

if TYPE_CHECKING:
    from weightcached.cli.units import Verb
    from weightcached.system.units import Outcome

_devices = click.argument(
    "devices", metavar="DEVICE...", nargs=-1, required=True, callback=check_devices, shell_complete=complete_devices,
)  # fmt: skip


@click.command()
@socket_dir
@_devices
def start(devices: Sequence[str]) -> None:
    """Start units and wait until they serve.

    Exit status: 0 all serve, 1 a unit failed, or serves none of its caches.
    """
    sys.exit(run_unit_job("start", devices))


@click.command()
@socket_dir
@_devices
def stop(devices: Sequence[str]) -> None:
    """Stop units, which frees their memory.

    Memory that an engine maps is freed when it ends. Exit status: 0 all stopped, 1 a unit ended
    otherwise.
    """
    sys.exit(run_unit_job("stop", devices))


@click.command()
@socket_dir
@_devices
def restart(devices: Sequence[str]) -> None:
    """Restart units; resident weights stay.

    Loads nothing that is resident and still in the manifest. Exit status: 0 all serve, 1 a unit
    failed, or serves none of its caches.
    """
    sys.exit(run_unit_job("restart", devices))


def run_unit_job(verb: Verb, devices: Sequence[str]) -> int:
    from weightcached.cli.units import run_job

    display = progress_display()
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


@click.command()
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


@click.command()
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
        sys.exit(EXIT_FAILURE)
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
