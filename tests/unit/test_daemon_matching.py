"""Answers that depend on the time of the daemon's digest; others: tests/process/test_attach.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from tests.fakes.checkpoints import identity_of, key_of, with_checkpoint, write_checkpoint
from tests.unit.test_fdstore import EXPECTED, Set
from weightcached.checkpoint.identity import CheckpointIdentity, with_files
from weightcached.daemon.caches import Caches
from weightcached.daemon.children import make_full_digest
from weightcached.daemon.fdstore import adopt
from weightcached.daemon.matching import CHANGED, Evicted, Matcher
from weightcached.errors import CheckpointError
from weightcached.index.key import WeightCacheKey
from weightcached.wire.messages import Absent, Failed, Loading, Mismatch, NeedDigest, Released

DIGEST = "ab" * 32


class Scene:
    """A served cache, and the key of an engine with a copy of its checkpoint and a full digest."""

    def __init__(self, tmp_path: Path) -> None:
        checkpoint = write_checkpoint(tmp_path / "checkpoint", nbytes=4096)
        copy = write_checkpoint(tmp_path / "copy", nbytes=4096)
        (self.generation,) = adopt(Set(checkpoint).stored, EXPECTED, lambda names: None)
        self.caches = Caches()
        self.caches.adopt(self.generation)
        self.asked: WeightCacheKey = with_checkpoint(key_of({"model": str(copy)}), full=DIGEST)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_digest_is_made_unasked_and_engines_wait_for_it(scene: Scene) -> None:
    async def main() -> None:
        begun, made = asyncio.Event(), asyncio.Event()

        async def child(identity: CheckpointIdentity) -> str:
            assert identity == scene.generation.key.checkpoint
            begun.set()
            await made.wait()
            return DIGEST

        matcher = Matcher(scene.caches, "cpu0", child)
        matcher.make_digests()
        await begun.wait()
        assert await matcher.match(scene.asked) == Loading(cache="tiny/target", phase="digest")
        made.set()
        await scene.caches.changed.wait(timeout_s=60)
        assert await matcher.match(scene.asked) is scene.generation
        assert scene.generation.checkpoint.full == DIGEST
        await matcher.close()

    asyncio.run(main())
    scene.generation.retire()


def test_checkpoint_that_changed_before_its_digest_was_made_is_a_mismatch(
    scene: Scene, tmp_path: Path
) -> None:
    """Nobody can tell the loaded content any more."""
    (tmp_path / "checkpoint/model.safetensors").chmod(0o400)

    async def child(identity: CheckpointIdentity) -> str:
        raise CheckpointError("it changed since it was recorded")

    async def main() -> None:
        matcher = Matcher(scene.caches, "cpu0", child)
        while isinstance(answer := await matcher.match(scene.asked), Loading):
            await scene.caches.changed.wait(timeout_s=60)
        assert isinstance(answer, Mismatch)
        assert answer.fields[0].cached == f"{tmp_path / 'checkpoint'} ({CHANGED})"
        assert matcher.digest_failures == 0
        await matcher.close()

    asyncio.run(main())
    scene.generation.retire()


def test_files_that_the_load_read_beside_the_chosen_ones_are_asked_for(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for name in ("checkpoint", "copy"):
        (tmp_path / name / "2_Dense").mkdir()
        (tmp_path / name / "2_Dense/w.npy").write_bytes(b"w")
    loaded = scene.generation.key.checkpoint
    scene.generation.key = with_checkpoint(
        scene.generation.key, extra=with_files(loaded, [*loaded.names, "2_Dense/w.npy"]).extra
    )

    async def main() -> None:
        matcher = Matcher(scene.caches, "cpu0", make_full_digest)
        asked = with_checkpoint(scene.asked, full="", sample="")
        names = ["model.safetensors", "2_Dense/w.npy", "model.safetensors.index.json"]
        assert await matcher.match(asked) == NeedDigest(rung="files", files=names)
        record = with_files(asked.checkpoint, names)
        asked = msgspec.structs.replace(asked, checkpoint=record)
        assert await matcher.match(asked) == NeedDigest(rung="sample", files=names)
        await matcher.close()

    asyncio.run(main())
    scene.generation.retire()


def test_digest_that_failed_is_said_and_tried_again(scene: Scene) -> None:
    attempts = []

    async def child(identity: CheckpointIdentity) -> str:
        attempts.append(identity.root)
        if len(attempts) == 1:
            raise CheckpointError("the disk is gone")
        return DIGEST

    async def final(matcher: Matcher) -> object:
        while isinstance(answer := await matcher.match(scene.asked), Loading):
            await scene.caches.changed.wait(timeout_s=60)
        return answer

    async def main() -> None:
        matcher = Matcher(scene.caches, "cpu0", child)
        assert await final(matcher) == Failed(
            cache="tiny/target",
            error="the full digest of its checkpoint could not be made: the disk is gone",
        )
        assert await final(matcher) is scene.generation
        assert matcher.digest_failures == 1
        await matcher.close()

    asyncio.run(main())
    scene.generation.retire()


def test_cancelled_digest_leaves_nothing_running(scene: Scene) -> None:
    async def child(identity: CheckpointIdentity) -> str:
        await asyncio.Event().wait()
        return DIGEST

    async def main() -> None:
        matcher = Matcher(scene.caches, "cpu0", child)
        await matcher.match(scene.asked)
        await matcher.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    scene.generation.retire()


def test_engine_that_is_content_with_samples_is_answered_without_a_full_digest(
    tmp_path: Path,
) -> None:
    scene = Scene(tmp_path)

    async def child(identity: CheckpointIdentity) -> str:
        raise AssertionError("no full digest is needed")

    async def main() -> None:
        matcher = Matcher(scene.caches, "cpu0", child)
        assert (
            await matcher.match(with_checkpoint(scene.asked, full=""), sampled=True)
            is scene.generation
        )
        await matcher.close()

    asyncio.run(main())
    scene.generation.retire()


def answer_of(caches: Caches, key: WeightCacheKey) -> object:
    async def main() -> object:
        matcher = Matcher(caches, "cpu0", make_full_digest)
        return await matcher.match(key)

    return asyncio.run(main())


def test_evicted_cache_is_found_by_its_last_key(scene: Scene) -> None:
    (cache,) = scene.caches
    cache.evict().retire()
    key = scene.generation.key
    assert answer_of(scene.caches, key) == Evicted(cache)
    answer = answer_of(scene.caches, msgspec.structs.replace(key, dtype="float16"))
    assert isinstance(answer, Mismatch)
    # Completely compared once it is there.
    assert answer_of(scene.caches, scene.asked) == Evicted(cache)


def test_cache_that_was_never_loaded_is_found_by_its_checkpoint(
    scene: Scene, tmp_path: Path
) -> None:
    (served,) = scene.caches
    served.evict().retire()
    other = identity_of(write_checkpoint(tmp_path / "other", seed=7, nbytes=4096))
    rare = scene.caches.ensure("rare/target", "target")
    rare.offer(None, 0)
    rare.checkpoint = other
    key = msgspec.structs.replace(scene.generation.key, dtype="float16", checkpoint=other)
    assert answer_of(scene.caches, key) == Evicted(rare)
    # The served one's checkpoint under another key: nobody's.
    wrong = msgspec.structs.replace(scene.generation.key, dtype="float16")
    assert isinstance(answer_of(scene.caches, wrong), Mismatch)
    # Of one that is downloaded first nobody knows.
    rare.checkpoint = None
    assert answer_of(scene.caches, wrong) == Evicted(rare)


def test_engines_of_other_keys_do_not_wait_for_a_cache_that_comes_back(scene: Scene) -> None:
    """Its loader has not told the key yet: it will be the last one."""
    (coming,) = scene.caches
    coming.evict().retire()
    coming.begin_load().expected_key = coming.last_key
    key = scene.generation.key
    assert answer_of(scene.caches, key) == Loading(cache="tiny/target", phase="queued")
    wrong = answer_of(scene.caches, msgspec.structs.replace(key, dtype="float16"))
    assert isinstance(wrong, Mismatch)


def test_running_engine_gets_the_newest_generation_of_its_cache_whatever_its_checkpoint(
    scene: Scene, tmp_path: Path
) -> None:
    async def child(identity: CheckpointIdentity) -> str:
        raise AssertionError("nothing is compared")

    matcher = Matcher(scene.caches, "cpu0", child)
    other = write_checkpoint(tmp_path / "other", nbytes=8192)
    asked = with_checkpoint(key_of({"model": str(other)}))
    assert matcher.newest("tiny/target", asked) is scene.generation
    refused = matcher.newest("tiny/target", msgspec.structs.replace(asked, dtype="torch.float16"))
    assert isinstance(refused, Mismatch)
    assert [field.field for field in refused.fields] == ["dtype"]
    gone = matcher.newest("none/target", asked)
    assert isinstance(gone, Absent)
    cache = scene.caches.get("tiny/target")
    assert cache
    cache.release()
    assert isinstance(matcher.newest("tiny/target", asked), Released)
    cache.begin_load()
    assert isinstance(matcher.newest("tiny/target", asked), Loading)
    scene.generation.retire()
