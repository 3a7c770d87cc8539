"""Whether a load would make the served generation again: then `reload` keeps it.

Compares everything that engines are refused for and that needs no vLLM: the versions of the model's
interpreter, the environment in the key, and the checkpoint, by its content if its status has
changed. The reconciler compares the manifest's entry.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from weightcached.checkpoint.identity import (
    CheckpointIdentity,
    Different,
    Need,
    decide,
    names_to_compare,
    record_checkpoint,
    with_files,
    with_sample,
)
from weightcached.config.drafts import checkpoint_arguments
from weightcached.config.wanted import Wanted
from weightcached.daemon.caches import Generation
from weightcached.daemon.children import Child
from weightcached.daemon.matching import DigestChild
from weightcached.errors import CheckpointError

log = logging.getLogger(__name__)

FullDigest = Callable[[Generation], Awaitable[str]]
Versions = dict[str, str]

_VERSIONS_TIMEOUT_S = 60.0


class Staleness:
    """One look at everything; each interpreter is asked once.

    full_digest: that of a generation as it was loaded; digest_child: makes that of the present
    files.
    """

    def __init__(self, full_digest: FullDigest, digest_child: DigestChild) -> None:
        self._full_digest = full_digest
        self._digest_child = digest_child
        self._versions: dict[str, Versions | None] = {}

    async def reason(self, generation: Generation, want: Wanted) -> str:
        """Why a load would make another generation now, or ""."""
        return await self.other_software(generation, want) or await self._other_checkpoint(
            generation, want
        )

    async def other_software(self, generation: Generation, want: Wanted) -> str:
        """Why engines of now would be refused the generation whatever its checkpoint, or ""."""
        python = want.spec.python or sys.executable
        return await self._other_versions(generation, python) or _other_environment(
            generation, want.spec.env
        )

    async def _other_versions(self, generation: Generation, python: str) -> str:
        if python not in self._versions:
            self._versions[python] = await installed_versions(python)
        then, now = generation.versions, self._versions[python]
        # If they cannot be asked for, a load would fail as well.
        return _difference(then, now) if then and now else ""

    async def _other_checkpoint(self, generation: Generation, want: Wanted) -> str:
        try:
            now = await asyncio.to_thread(
                lambda: record_checkpoint(**checkpoint_arguments(want.spec.engine, want.role))
            )
            return await self._compare(generation, now, want)
        except CheckpointError as e:
            return str(e)

    async def _compare(self, generation: Generation, now: CheckpointIdentity, want: Wanted) -> str:
        while True:
            decision = decide(generation.checkpoint, now, mode=want.spec.identity)
            if isinstance(decision, Different):
                return decision.reason
            if not isinstance(decision, Need):
                return ""
            if "cached" in decision.sides:
                if decision.rung != "full":
                    return f"it was loaded without its {decision.rung} digest"
                await self._full_digest(generation)
                continue
            now = await asyncio.to_thread(
                with_files, now, names_to_compare(generation.checkpoint, now)
            )
            if decision.rung == "sample":
                now = await asyncio.to_thread(with_sample, now)
            elif decision.rung == "full":
                now = msgspec.structs.replace(now, full=await self._digest_child(now))


def _other_environment(generation: Generation, env: Mapping[str, str]) -> str:
    names = generation.key.environment
    ours = os.environ | env
    now = {name: ours[name] for name in names if name in ours}
    return _difference(generation.environment, now)


def _difference(then: dict[str, str], now: dict[str, str]) -> str:
    return "; ".join(
        f"{name} was {then.get(name, 'absent')}, is {now.get(name, 'absent')}"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    )


async def installed_versions(python: str) -> Versions | None:
    """The answer of weightcached.system.versions in that interpreter; None without one."""
    command = [python, "-m", "weightcached.system.versions"]
    with contextlib.suppress(OSError, TimeoutError, msgspec.DecodeError):
        async with (
            asyncio.timeout(_VERSIONS_TIMEOUT_S),
            Child(command, "versions", stdin=b"", capture=True) as child,
        ):
            await asyncio.shield(child.exit)
        return msgspec.json.decode(bytes(child.output or b""), type=Versions)
    log.warning("the versions of an interpreter are not known python=%s", python)
    return None
