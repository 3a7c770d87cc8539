"""What is left beside the manifest when `weightcachectl publish` ends, or does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightcached.cli.publish import published
from weightcached.config.published import read_published


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    path = tmp_path / "manifest.yaml"
    path.write_text(
        "version: 1\nmodels:\n- name: tiny\n  devices: [cpu0]\n"
        f"  engine: {{model: {tmp_path / 'old'}}}\n"
    )
    return path


@pytest.mark.parametrize("kept", [True, False])
def test_it_stays_unless_it_could_not_be_loaded(manifest: Path, kept: bool) -> None:
    new = manifest.with_name("new")
    with published(manifest, "tiny", new, "step 2") as result:
        assert read_published(manifest)["tiny"].path == str(new)
        result[0] = kept
    assert list(read_published(manifest)) == ["tiny"] * kept


def test_interrupted_command_leaves_what_the_daemons_go_on_loading(manifest: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        published(manifest, "tiny", manifest.with_name("new"), "step 2"),
    ):
        raise KeyboardInterrupt
    assert read_published(manifest)["tiny"].label == "step 2"
