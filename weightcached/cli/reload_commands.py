"""`weightcachectl reload`, `publish`, `rollback`, `drop` and `evict`. reload.py and publish.py do the work."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from weightcached.cli.common import (
    ask,
    check_devices,
    complain,
    complete_models,
    on_devices,
    progress_display,
    socket_dir,
)
from weightcached.errors import (
    EXIT_FAILURE,
    EXIT_NO_DAEMON,
    UnknownCacheError,
    WeightcachedError,
)

if TYPE_CHECKING:
    from weightcached.wire.messages import Drop, Evict

_RELOAD_TIMEOUT_S = 3600.0


def _is_device(name: str) -> bool:
    return re.match(r"(gpu-|mig-|cpu\d)", name, re.IGNORECASE) is not None


def _check_names(
    ctx: click.Context, param: click.Parameter, names: Sequence[str]
) -> tuple[str, ...]:
    """Devices, and names of models."""
    check_devices(ctx, param, [name for name in names if _is_device(name)])
    return tuple(dict.fromkeys(names))


@click.command()
@socket_dir
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
    sys.exit(reload_caches(asked, caches, force=force, live=live, timeout_s=timeout_s))


def reload_caches(
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

    display = progress_display()
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
    refusal = UnknownCacheError.code
    lacking = [device for device, end in ended.items() if getattr(end, "code", "") == refusal]
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


@click.command()
@socket_dir
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

    answers = ask([])
    if not answers.replies:
        sys.exit(EXIT_NO_DAEMON)
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
    sys.exit(status)


@click.command()
@socket_dir
@click.argument("cache", metavar="CACHE", shell_complete=complete_models)
@on_devices
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


@click.command()
@socket_dir
@click.argument("cache", metavar="CACHE", shell_complete=complete_models)
@on_devices
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

    answers = ask(devices)
    if not answers.replies:
        sys.exit(EXIT_NO_DAEMON)
    failed = False
    for device, name in reload.holders(answers.replies, cache):
        try:
            reload.free(device, request(name))
            click.echo(f"{device} {name}: {done}")
        except WeightcachedError as e:
            complain(f"{device} {name}: {e}")
            failed = True
    sys.exit(EXIT_FAILURE if failed else 0)


@click.command()
@socket_dir
@click.argument("cache", metavar="CACHE", shell_complete=complete_models)
@on_devices
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

    answers = ask(devices)
    if not answers.replies:
        sys.exit(EXIT_NO_DAEMON)
    caches: dict[str, list[str]] = {}
    for device, name in holders(answers.replies, cache):
        caches.setdefault(name, []).append(device)
    statuses = [_roll_back(name, on, timeout_s) for name, on in caches.items()]
    # A model's draft may have had no other weights.
    found = [status for status in statuses if status is not None]
    sys.exit(max(found) if found else EXIT_FAILURE)


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
    display = progress_display()
    ended = rollback_all(snapshots, cache, timeout_s=timeout_s, display=display)
    display.clear()
    return max(_report_reload(device, end) for device, end in ended.items())
