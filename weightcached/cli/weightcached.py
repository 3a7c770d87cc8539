"""`weightcached`: parse the command line, call, print, exit."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import click

from weightcached import __version__
from weightcached.daemon import logs
from weightcached.daemon.loading import DEFAULT_STALL_TIMEOUT_S
from weightcached.daemon.main import ServeOptions, run
from weightcached.daemon.session import IDLE_TIMEOUT_S
from weightcached.errors import WeightcachedError

log = logging.getLogger(__name__)

_PORT = click.IntRange(1, 65535)
_EXPORTER_PORT = 9838


def _manifest(text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--manifest",
        type=click.Path(path_type=Path),
        metavar="PATH",
        show_default="~/.config/weightcached/manifest.yaml, else /etc/weightcached/manifest.yaml",
        help=text,
    )


def _socket_dir(text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--socket-dir",
        # Of another user's directory, check_private_dir() says more than click would.
        type=click.Path(path_type=Path, readable=False),
        metavar="DIR",
        show_default="$XDG_RUNTIME_DIR/weightcached",
        help=text,
    )


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="weightcached")
def main() -> None:
    """Keep model weights resident, one daemon per device, for engines that map them."""


@main.command()
@click.argument("device")
@_manifest("The model manifest.")
@_socket_dir("Directory of the socket and the lock; made with mode 0700 if it is missing.")
@click.option(
    "--log-level", type=click.Choice(logs.LEVELS), default="info", help="Lowest level to log."
)
@click.option(
    "--loaders-ahead",
    type=click.IntRange(min=0),
    show_default="one for every 4 cores, at most 3",
    help="How many waiting loaders import vLLM ahead, each in 1 to 2 GB of host memory.",
)
@click.option(
    "--no-retry",
    is_flag=True,
    help="End with status 1 if nothing could be loaded, instead of trying again.",
)
# For tests and for emergencies; the defaults are part of what the unit's timeouts assume.
@click.option(
    "--loader-command", hidden=True, metavar="COMMAND", help="Run this instead of the loader."
)
@click.option(
    "--stall-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=DEFAULT_STALL_TIMEOUT_S,
    hidden=True,
)
@click.option(
    "--idle-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=IDLE_TIMEOUT_S,
    hidden=True,
)
def serve(
    *,
    device: str,
    manifest: Path | None,
    socket_dir: Path | None,
    log_level: str,
    loaders_ahead: int | None,
    no_retry: bool,
    loader_command: str | None,
    stall_timeout: float,
    idle_timeout: float,
) -> None:
    """Serve the weights of DEVICE until told to stop.

    DEVICE is GPU-<uuid>, MIG-<uuid>, or cpuN for host memory. SIGHUP reads the manifest again;
    SIGTERM stops. A load that failed for a passing reason is tried again after 1 s to 5 min.

    Exit status: 0 stopped, 1 a fault, 2 bad usage, 75 another daemon serves DEVICE, 78 the
    configuration must be changed first.
    """
    logs.configure(log_level)
    _end(
        lambda: run(
            ServeOptions(
                device=device,
                manifest=manifest.absolute() if manifest else None,
                socket_dir=socket_dir.absolute() if socket_dir else None,
                loaders_ahead=loaders_ahead,
                retry=not no_retry,
                loader_command=shlex.split(loader_command) if loader_command else None,
                stall_timeout_s=stall_timeout,
                idle_timeout_s=idle_timeout,
            )
        )
    )


@main.command(
    context_settings={
        "allow_extra_args": True,
        # A short option here would match inside of vLLM's, such as -dph.
        "help_option_names": ["--help"],
        "ignore_unknown_options": True,
        "token_normalize_func": lambda name: name.replace("_", "-"),
    }
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ENGINE ARGUMENTS]...")
@click.option(
    "--weight-cache-socket-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    show_default="$XDG_RUNTIME_DIR/weightcached",
    help="Directory of the sockets; made with mode 0700 if it is missing.",
)
@click.option(
    "--weight-cache-master-port",
    type=_PORT,
    metavar="PORT",
    help="Accepted but not used: ranks load alone.",
)
@click.option(
    "--weight-cache-draft-master-port",
    type=_PORT,
    metavar="PORT",
    help="As --weight-cache-master-port, for the draft model.",
)
@click.option(
    "--weight-cache-health-port",
    type=_PORT,
    metavar="PORT",
    show_default="none",
    help="Serve /health and /metrics on this port.",
)
@click.option(
    "--weight-cache-health-host",
    default="127.0.0.1",
    metavar="HOST",
    help="Address for --weight-cache-health-port.",
)
@click.option(
    "--weight-cache-snapshots",
    type=click.Path(path_type=Path),
    metavar="DIR",
    show_default="none",
    help="Write each rank to a snapshot here after it was loaded, and start from that the next time.",
)
@click.option(
    "--loader-command", hidden=True, metavar="COMMAND", help="Run this instead of the loader."
)
@click.option(
    "--parser-command", hidden=True, metavar="COMMAND", help="Run this instead of vLLM's parser."
)
def preload(
    *,
    arguments: tuple[str, ...],
    weight_cache_socket_dir: Path | None,
    weight_cache_master_port: int | None,
    weight_cache_draft_master_port: int | None,
    weight_cache_health_port: int | None,
    weight_cache_health_host: str,
    weight_cache_snapshots: Path | None,
    loader_command: str | None,
    parser_command: str | None,
) -> None:
    """Keep one model resident without systemd, until SIGINT or SIGTERM.

    ENGINE ARGUMENTS are those of 'vllm serve': --model, --tensor-parallel-size, … Each rank of this
    node gets a daemon. One READY line is printed when all of them serve. A daemon that dies later
    is started again and takes its weights back; all end with this command, even if it is killed.

    Exit status: 0 stopped, 2 bad usage, else that of the rank that died.
    """
    from weightcached.preload import launcher

    logs.configure("info")
    options = launcher.PreloadOptions(
        arguments=arguments,
        socket_dir=weight_cache_socket_dir,
        master_port=weight_cache_master_port,
        draft_master_port=weight_cache_draft_master_port,
        health_port=weight_cache_health_port,
        health_host=weight_cache_health_host,
        snapshots=weight_cache_snapshots,
        loader_command=loader_command,
        parser_command=shlex.split(parser_command) if parser_command else None,
    )
    _end(lambda: launcher.run(options))


@main.command()
@_manifest("The model manifest, which names the caches that must be ready.")
@_socket_dir("Directory of the daemons' sockets.")
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=_EXPORTER_PORT,
    help="Port to listen on; 0 takes a free one.",
)
def exporter(*, manifest: Path | None, socket_dir: Path | None, host: str, port: int) -> None:
    """Serve a page, /health and /metrics of this node over HTTP until told to stop.

    / is a page for people: devices, caches, engine services, the last errors.
    /health answers 200 if every cache in the manifest is ready, else 503 with one line for each
    that is not. /metrics is in Prometheus's text format and needs the package prometheus_client.

    Exit status: 0 stopped, 1 cannot listen there, 2 bad usage.
    """
    # The daemon must not hold an HTTP server in its memory.
    from weightcached.exporter.health import Node
    from weightcached.exporter.server import serve_http

    logs.configure("info")
    _end(lambda: serve_http(Node(manifest, socket_dir), host=host, port=port))


@main.command()
@click.argument("name")
@_manifest("The model manifest, which has NAME under engines:.")
@_socket_dir("Directory of the sockets; made with mode 0700 if it is missing.")
@click.option(
    "--log-level", type=click.Choice(logs.LEVELS), default="info", help="Lowest level to log."
)
@click.option("--engine-module", hidden=True, default="weightcached.vllm_compat.server")
def engine(
    *, name: str, manifest: Path | None, socket_dir: Path | None, log_level: str, engine_module: str
) -> None:
    """Keep the engine service NAME of the manifest served until told to stop.

    One vLLM engine serves, another is parked and takes over when the first dies or hangs. The
    socket stays open meanwhile. SIGTERM lets requests end and stops; engines outlive a supervisor
    that is killed, and its successor takes them back.

    Exit status: 0 stopped, 1 no engine can be started, 2 bad usage, 75 NAME has a supervisor
    already, 78 the configuration must be changed first.
    """
    from weightcached.engine import supervisor

    logs.configure(log_level)
    _end(
        lambda: supervisor.run(
            supervisor.Options(
                name=name,
                manifest=manifest.absolute() if manifest else None,
                socket_dir=socket_dir.absolute() if socket_dir else None,
                module=engine_module,
            )
        )
    )


def _end(serve: Callable[[], int]) -> NoReturn:
    try:
        status = serve()
    except WeightcachedError as e:
        log.error("%s", e)
        raise SystemExit(e.exit_status) from e
    raise SystemExit(status)


if __name__ == "__main__":
    main()
