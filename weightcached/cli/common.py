"""What commands of `weightcachectl` share: options, asking daemons, and words on stderr.

Machines run `status` often, so this imports little before it is needed, as the commands do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weightcached.errors import DeviceError, WeightcachedError

if TYPE_CHECKING:
    from weightcached.cli.progress import ProgressDisplay
    from weightcached.cli.status import Answers


class Group(click.Group):
    """An error of ours is one line on stderr, and its own exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except WeightcachedError as e:
            complain(str(e))
            sys.exit(e.exit_status)


def check_devices(
    ctx: click.Context, param: click.Parameter, devices: Sequence[str]
) -> tuple[str, ...]:
    from weightcached.system.paths import check_device

    try:
        return tuple(dict.fromkeys(check_device(device) for device in devices))
    except DeviceError as e:
        raise click.BadParameter(str(e), ctx, param) from e


def complete_devices(ctx: click.Context, param: click.Parameter, begun: str) -> list[str]:
    from weightcached.cli.devices import all_devices

    return [row.device for row in all_devices()[0] if row.device.startswith(begun)]


def complete_models(ctx: click.Context, param: click.Parameter, begun: str) -> list[str]:
    from weightcached.config.manifest import load_manifest
    from weightcached.system.paths import manifest_path

    try:
        models = load_manifest(manifest_path()).models
    except WeightcachedError:
        return []
    return [model.name for model in models if model.name.startswith(begun)]


on_devices = click.option(
    "--device",
    "devices",
    metavar="DEVICE",
    multiple=True,
    callback=check_devices,
    shell_complete=complete_devices,
    help="Only on this device; repeatable.",
)


def _choose_socket_dir(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    from weightcached.system.paths import choose_runtime_dir

    choose_runtime_dir(value)
    # Another command in the same process is about the default again.
    ctx.call_on_close(lambda: choose_runtime_dir(None))


socket_dir = click.option(
    "--socket-dir",
    # Of another user's directory, check_private_dir() says more than click would.
    type=click.Path(path_type=Path, readable=False),
    metavar="DIR",
    show_default="$XDG_RUNTIME_DIR/weightcached",
    expose_value=False,
    callback=_choose_socket_dir,
    help="Directory of the daemons' sockets.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for other programs.")


def complain(text: str) -> None:
    """One line on stderr."""
    click.echo(f"weightcachectl: {text}", err=True)


def print_json(document: Any) -> None:
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


def progress_display() -> ProgressDisplay:
    from weightcached.cli.progress import ProgressDisplay

    return ProgressDisplay(sys.stderr)


def ask(devices: Sequence[str], *, units: bool = True) -> Answers:
    """Ask the named daemons, or all that have a socket. Errors go to stderr.

    units: also systemd's last words of daemons that have ended.
    """
    from weightcached.cli import status
    from weightcached.system.paths import devices_with_socket

    asked = list(devices) or devices_with_socket()
    answers = status.ask_all(asked)
    silent = {device: str(error) for device, error in answers.errors.items()}
    if units and (silent or not asked):
        silent |= failed_units(devices, silent)
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


def failed_units(devices: Sequence[str], silent: Collection[str]) -> dict[str, str]:
    """systemd keeps the last words of a daemon that has ended, and whether it starts it again."""
    from weightcached.cli.units import failures

    return {
        device: str(error)
        for device, error in failures().items()
        if device in silent or not devices
    }
