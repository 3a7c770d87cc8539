"""`weightcachectl engine`: parse, call, print, exit. engine.py does the work."""

from __future__ import annotations

import sys

import click

from weightcached.cli.common import complain, json_option, print_json, socket_dir
from weightcached.errors import EXIT_FAILURE


@click.group()
def engine() -> None:
    """Show and control engine services.

    NAME is an entry under engines: in the manifest.
    """


_name = click.argument("name")


@engine.command("status")
@socket_dir
@click.argument("name", required=False)
@json_option
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
        print_json({"engines": found.replies})
    elif found.replies:
        click.echo("\n".join(engines.as_table(found.replies)))
    sys.exit(0 if found.replies or not found.errors else EXIT_FAILURE)


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
@socket_dir
@_name
def engine_restart(name: str) -> None:
    """Replace the engines by those of the manifest as it is now.

    The new engine starts beside the old one, which serves until then; no connection is refused. If
    the new one cannot be started, the old one serves on. If packages have been installed since, the
    supervisor is replaced first.

    Exit status: 0 the new engine serves, 1 it could not be started.
    """
    from weightcached.cli import engine as engines

    engines.renew(name)
    _tell_engine(name, "restart")


@engine.command("sleep")
@socket_dir
@_name
def engine_sleep(name: str) -> None:
    """Send the engine to sleep, until somebody connects."""
    _tell_engine(name, "sleep")


@engine.command("wake")
@socket_dir
@_name
def engine_wake(name: str) -> None:
    """Wake the engine without waiting for a connection."""
    _tell_engine(name, "wake")


def _tell_engine(name: str, command: str) -> None:
    from weightcached.cli import engine as engines

    reply = engines.ask(name, command, timeout_s=engines.LONGEST_S)
    click.echo(f"{name}: {reply['state']}")
