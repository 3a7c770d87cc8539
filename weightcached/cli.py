"""`weightcached`: parse the command line, call, print, exit."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path

import click

from weightcached import __version__
from weightcached.daemon import logs
from weightcached.daemon.loading import DEFAULT_STALL_TIMEOUT_S
from weightcached.daemon.main import Options, run
from weightcached.daemon.session import IDLE_TIMEOUT_S
from weightcached.errors import WeightcachedError

log = logging.getLogger(__name__)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="weightcached")
def main() -> None:
    """Keep model weights resident, one daemon per device, for engines that map them."""


@main.command()
@click.argument("device")
@click.option(
    "--manifest",
    type=click.Path(path_type=Path),
    metavar="PATH",
    show_default="~/.config/weightcached/manifest.yaml, else /etc/weightcached/manifest.yaml",
    help="The model manifest.",
)
@click.option(
    "--socket-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    show_default="$XDG_RUNTIME_DIR/weightcached",
    help="Directory of the socket and the lock; made with mode 0700 if it is missing.",
)
@click.option("--log-level", type=click.Choice(logs.LEVELS), default="info", help="The least that is logged.")
# For tests and for emergencies; the defaults are part of what the unit's timeouts assume.
@click.option("--loader-command", hidden=True, metavar="COMMAND", help="Run this instead of the loader.")
@click.option(
    "--stall-timeout", type=click.FloatRange(min=0, min_open=True), default=DEFAULT_STALL_TIMEOUT_S, hidden=True
)
@click.option("--idle-timeout", type=click.FloatRange(min=0, min_open=True), default=IDLE_TIMEOUT_S, hidden=True)
def serve(
    *,
    device: str,
    manifest: Path | None,
    socket_dir: Path | None,
    log_level: str,
    loader_command: str | None,
    stall_timeout: float,
    idle_timeout: float,
) -> None:
    """Serve the weights of DEVICE until told to stop.

    DEVICE is GPU-<uuid>, MIG-<uuid>, or cpuN for host memory. SIGHUP reads the manifest again; SIGTERM stops.

    Exit status: 0 stopped, 1 nothing could be loaded, 2 bad usage, 75 another daemon serves DEVICE,
    78 the configuration must be changed first.
    """
    logs.configure(log_level)
    try:
        status = run(
            Options(
                device=device,
                manifest=manifest.absolute() if manifest else None,
                socket_dir=socket_dir.absolute() if socket_dir else None,
                loader_command=shlex.split(loader_command) if loader_command else None,
                stall_timeout_s=stall_timeout,
                idle_timeout_s=idle_timeout,
            )
        )
    except WeightcachedError as e:
        log.error("%s", e)
        raise SystemExit(e.exit_status) from e
    raise SystemExit(status)


if __name__ == "__main__":
    main()
