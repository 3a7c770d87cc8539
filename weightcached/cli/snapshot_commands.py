"""`weightcachectl snapshot`: parse, call, print, exit. snapshot.py does the work."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from weightcached.cli.common import (
    Group,
    ask,
    complain,
    json_option,
    on_devices,
    print_json,
    progress_display,
    socket_dir,
)
from weightcached.errors import EXIT_FAILURE, EXIT_NO_DAEMON, WeightcachedError

if TYPE_CHECKING:
    from weightcached.cli.status import Answers


class _SnapshotGroup(Group):
    """A word that is no command is a cache to write: `snapshot llama-8b` is `snapshot write llama-8b`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["write", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_SnapshotGroup, subcommand_metavar="CACHE... | --all | COMMAND [ARGS]...")
def snapshot() -> None:
    """Write, list, verify or remove snapshots.

    Snapshots bring the weights back without vLLM. If the manifest has the key snapshots, they are
    written after each load. 'snapshot CACHE' writes one now.
    """


_snapshot_cache = click.argument("cache", required=False)


@snapshot.command("write")
@socket_dir
@click.argument("caches", metavar="[CACHE]...", nargs=-1)
@click.option("--all", "each", is_flag=True, help="Of every cache that is served.")
@on_devices
def snapshot_write(caches: Sequence[str], each: bool, devices: Sequence[str]) -> None:
    """Write snapshots of what is served now, and wait.

    CACHE is a model's name or MODEL/ROLE. One that is there already is not written again. Also
    without the manifest's key, into its default directory.

    Exit status: 0 they are there, 1 one is not, 3 no daemon answered.
    """
    from weightcached.cli import snapshot

    if bool(caches) == each:
        raise click.UsageError("name caches, or say --all")
    answers = ask(devices)
    if not answers.replies:
        sys.exit(EXIT_NO_DAEMON)
    display, failed = progress_display(), False
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
    sys.exit(EXIT_FAILURE if failed else 0)


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
@json_option
def snapshot_list(cache: str | None, as_json: bool) -> None:
    """List all snapshots, or those of CACHE, a cache or a model."""
    from weightcached.cli import snapshot

    rows = snapshot.rows(snapshot.directory(), cache)
    if as_json:
        print_json([row._asdict() for row in rows])
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
    sys.exit(status)


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
        sys.exit(EXIT_FAILURE)
    for row in rows:
        snapshot.remove(row)
        click.echo(f"removed {row.path}")
