"""What `reload` loads anew: all that an engine would be refused for, and nothing else."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.checkpoints import WEIGHTS, key_of, write_checkpoint
from tests.unit.test_fdstore import EXPECTED, Set
from weightcached.config.manifest import ModelSpec
from weightcached.config.wanted import Wanted
from weightcached.daemon.caches import Caches, Generation
from weightcached.daemon.children import make_full_digest
from weightcached.daemon.fdstore import adopt
from weightcached.daemon.matching import CHANGED, Matcher
from weightcached.daemon.staleness import Staleness, installed_versions
from weightcached.system.versions import installed

VARIABLE = "VLLM_USE_DEEP_GEMM"


class Scene:
    """A served generation of a checkpoint, and the manifest's cache."""

    def __init__(self, directory: Path) -> None:
        self.checkpoint = write_checkpoint(directory / "checkpoint", nbytes=64 * 1024)
        (self.generation,) = adopt(Set(self.checkpoint).stored, EXPECTED, lambda names: None)
        self.generation.key = key_of({"model": str(self.checkpoint)})
        self.identity = "full"
        self.python: str | None = None

    @property
    def weights(self) -> Path:
        return self.checkpoint / WEIGHTS

    def reason(self, *, digest_before: Any = None) -> str:
        """Why it is stale, after `digest_before` was done with the daemon's digest made."""
        spec = ModelSpec(
            name="tiny", devices=["cpu0"], engine={"model": str(self.checkpoint)}, python=self.python,
            identity=self.identity,  # type: ignore[arg-type]
        )  # fmt: skip
        want = Wanted("tiny/target", "target", spec, self.generation.spec_digest)

        async def main() -> str:
            caches = Caches()
            caches.adopt(self.generation)
            matcher = Matcher(caches, "cpu0", make_full_digest)
            try:
                if digest_before is not None:
                    await matcher.full_digest(self.generation)
                    digest_before()
                return await Staleness(matcher.full_digest, make_full_digest).reason(
                    self.generation, want
                )
            finally:
                await matcher.close()

        return asyncio.run(main())


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    scene = Scene(tmp_path)
    yield scene
    scene.generation.retire()


def flip(path: Path) -> None:
    before = path.stat()
    with open(path, "r+b") as f:
        f.seek(20_000)
        f.write(b"\xff\x00")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_nothing_changed(scene: Scene) -> None:
    assert scene.reason() == ""


def test_new_status_of_the_same_content_is_not_stale(scene: Scene) -> None:
    assert scene.reason(digest_before=lambda: scene.weights.chmod(0o400)) == ""


def test_neighbours_that_nobody_reads_are_not_stale(scene: Scene) -> None:
    (scene.checkpoint / "checkpoint-500").mkdir()
    (scene.checkpoint / "checkpoint-500/model.safetensors").write_bytes(b"x")
    assert scene.reason() == ""


def test_other_content_is_stale(scene: Scene) -> None:
    assert scene.reason(digest_before=lambda: flip(scene.weights)).startswith("full digest is ")


def test_other_content_outside_of_the_sample_is_not_seen_where_samples_are_enough(
    scene: Scene,
) -> None:
    scene.identity = "sampled"
    flip(scene.weights)
    assert scene.reason() == ""


def test_new_file_that_would_be_chosen_is_stale(scene: Scene) -> None:
    (scene.checkpoint / "more.safetensors").write_bytes(scene.weights.read_bytes())
    assert scene.reason() == "the cached checkpoint has 1 weight files, the requested one 2"


def test_status_that_changed_before_the_digest_was_made_is_stale(scene: Scene) -> None:
    scene.weights.chmod(0o400)
    assert scene.reason() == CHANGED


def test_checkpoint_that_is_gone_is_loaded_and_so_fails_with_its_reason(scene: Scene) -> None:
    scene.weights.unlink()
    assert scene.reason().startswith(f"checkpoint {scene.checkpoint} has no weight files")


def test_another_version_is_stale(scene: Scene) -> None:
    scene.generation.versions = installed()
    assert scene.reason() == ""
    before = scene.generation.versions["torch"]
    scene.generation.versions = scene.generation.versions | {"torch": "2.0.0", "gguf": "1.0"}
    assert scene.reason() == f"gguf was 1.0, is absent; torch was 2.0.0, is {before}"


def test_interpreter_that_cannot_be_asked_makes_nothing_stale(scene: Scene) -> None:
    scene.generation.versions = {"torch": "2.0.0"}
    scene.python = "/nonexistent/python"
    assert scene.reason() == ""


def test_variable_of_the_key_is_compared_as_it_was_set(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_with(scene.generation, {VARIABLE: "True"})
    scene.generation.environment = {VARIABLE: "1"}
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setenv("VLLM_PORT", "1234")
    assert scene.reason() == ""
    monkeypatch.setenv(VARIABLE, "0")
    assert scene.reason() == f"{VARIABLE} was 1, is 0"
    monkeypatch.delenv(VARIABLE)
    assert scene.reason() == f"{VARIABLE} was 1, is absent"


def key_with(generation: Generation, environment: dict[str, str]) -> None:
    import msgspec

    generation.key = msgspec.structs.replace(generation.key, environment=environment)


def test_versions_are_those_of_the_interpreter_without_its_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = asyncio.run(installed_versions(sys.executable))
    assert versions == installed()
    assert versions["weightcached"]
    # A vllm beside the daemon is not run.
    (tmp_path / "vllm.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    assert asyncio.run(installed_versions(sys.executable)) == versions
