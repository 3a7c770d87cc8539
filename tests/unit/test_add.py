"""weightcachectl add and remove: the manifest that they leave, the daemons that they tell, and what they
print."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.daemon import BOUND_S
from tests.fakes.stub_daemon import Answer, StubDaemon, cache, status
from weightcached.cli import add, edit
from weightcached.cli.weightcachectl import main
from weightcached.config.manifest import load_manifest
from weightcached.errors import ManifestError
from weightcached.system.units import install, source
from weightcached.wire.messages import CacheOutcome, Reload, ReloadReply, Request, Status

GPU_A = "GPU-0e3f0000-0000-4000-8000-00000000000a"
GPU_B = "GPU-77a10000-0000-4000-8000-00000000000b"
HEAD = "MODEL  ROLE    DEVICE  RANK  DP  PP  TP  EP  SIZE\n"
# A manifest that somebody has written with care, in another style than ours.
MINE = """\
# Our models; ask Kim before you change them.

version: 1   # do not touch
models:
    # The big one.
    - name: big   # big/target
      devices: [cpu0, cpu1]
      engine:
        model: org/big
        tensor_parallel_size: 2
        "revision": '1_0'
        hf_overrides: {a: 1e3, b: yes, c: 010, long: "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa bbbbbbbbbbbbbbbbbbbbbb c"}
      env: {A: "0"}

    # The small one,
    # for tests.
    - name: small
      devices: all
      engine: {model: org/small}

# One service.
engines:
    - name: chat
      model: big
      listen: 127.0.0.1:8000
# The end.
"""  # fmt: skip


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine without GPUs and without daemons; gives the directory of the sockets."""
    with tempfile.TemporaryDirectory(prefix="wc-") as base:
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        monkeypatch.setattr(add, "PARSER", ("-m", "tests.fakes.parser_child"))
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        gpus(monkeypatch)
        yield Path(base, "weightcached")


def gpus(monkeypatch: pytest.MonkeyPatch, *uuids: str) -> None:
    found = [SimpleNamespace(uuid=uuid) for uuid in uuids]
    monkeypatch.setattr("weightcached.preload.launcher.list_gpus", lambda: found)
    monkeypatch.setattr(add, "list_gpus", lambda: found)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """Where the manifest is, or will be."""
    path = tmp_path / "config/weightcached/manifest.yaml"
    path.parent.mkdir(parents=True)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(main, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


# ---- the file


def test_first_model_makes_a_manifest_and_says_what_comes_next(
    manifest: Path, model: Path, tmp_path: Path
) -> None:
    (model / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    result = run("add", str(model), "--tensor-parallel-size", "2", "--dtype", "float32")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.replace(str(tmp_path), "TMP") == (
        "added tiny to TMP/config/weightcached/manifest.yaml\n"
        + HEAD
        + "tiny   target  cpu0    0     0   0   0   0   about 0 KiB\n"
        "tiny   target  cpu1    1     0   0   1   0   about 0 KiB\n"
        "next:\n"
        "  weightcachectl start cpu0 cpu1\n"
        "  vllm serve TMP/tiny --tensor-parallel-size 2 --dtype float32 --load-format ipc_cache\n"
    )
    assert manifest.read_text().partition("\n\n")[2] == (
        "version: 1\n"
        "models:\n"
        "  - name: tiny\n"
        "    devices: [cpu0, cpu1]\n"
        "    engine:\n"
        f"      model: {model}\n"
        "      tensor_parallel_size: 2\n"
        "      dtype: float32\n"
    )
    assert not list(manifest.parent.glob(".*")), "a partial file is left"


def test_example_of_install_gives_way_and_an_edited_one_does_not(
    manifest: Path, model: Path, tmp_path: Path
) -> None:
    for name in ("weightcached", "weightcachectl"):
        (tmp_path / name).symlink_to("/bin/true")
    install(bin_dir=tmp_path)
    assert run("add", str(model)).exit_code == 0
    assert [m.name for m in load_manifest(manifest).models] == ["tiny"]

    manifest.write_text(source("manifest.yaml").read_text())
    assert run("add", str(model)).exit_code == 0
    before = source("manifest.yaml").read_text()
    after = manifest.read_text()
    # Every line of the example, comments too, in its order; and one entry more.
    added = after.replace(
        f"  - name: tiny\n    devices: [cpu0]\n    engine:\n      model: {model}\n", ""
    )
    assert added == before


def test_comments_order_and_style_stay_as_they_were(manifest: Path, model: Path) -> None:
    manifest.write_text(MINE)
    manifest.chmod(0o640)
    assert run("add", str(model), "--name", "new", "--quantization", "fp8").exit_code == 0
    assert manifest.read_text() == MINE.replace(
        "org/small}\n",
        "org/small}\n    - name: new\n      devices: [cpu0]\n      engine:\n"
        f"        model: {model}\n        quantization: fp8\n",
    )
    assert stat.S_IMODE(manifest.stat().st_mode) == 0o640
    assert run("remove", "new").exit_code == 0
    assert manifest.read_text() == MINE


def test_removed_entry_takes_its_own_comment_with_it_and_no_other(manifest: Path) -> None:
    manifest.write_text(MINE.replace("model: big\n", "model: small\n"))
    assert run("remove", "big").exit_code == 0
    left = manifest.read_text()
    for line in (
        "# Our models; ask",
        "    # The small one,\n    # for tests.\n    - name: small",
        "# The end.",
    ):
        assert line in left
    assert "org/big" not in left


def test_link_stays_a_link(manifest: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text(MINE)
    manifest.symlink_to(tmp_path / "real.yaml")
    assert run("add", str(model)).exit_code == 0
    assert manifest.is_symlink()
    assert load_manifest(tmp_path / "real.yaml").models[-1].name == "tiny"


def test_styles_of_yaml_are_kept(manifest: Path) -> None:
    entry = {"name": "new", "devices": "all", "engine": {"model": "org/x"}}
    added = "- name: new\n  devices: all\n  engine:\n    model: org/x\n"
    for text, indent in (
        # A list that is not indented, no end of line at the end, and a block of text last.
        ("version: 1\nmodels:\n- name: a\n  devices: all\n  engine: {model: org/a}", ""),
        (
            "models:\n  - devices: [ cpu0 ]\n    name: a\n    engine:\n        model: org/a\n"
            "        revision: |\n            text\n            of lines\n\n\nversion: 1\n",
            "  ",
        ),
        (
            "version: 1\r\nmodels:\r\n  - {name: a, devices: all, engine: {model: org/a}}\r\n# end\r\n",
            "  ",
        ),
        (
            "\ufeffversion: 1\n---\n".replace("---\n", "")
            + "models:\n - name: a\n   devices: all\n   engine: {model: org/a}\n",
            " ",
        ),
    ):
        manifest.write_bytes(text.encode())
        newline = "\r\n" if "\r" in text else "\n"
        edit.add_model(manifest, entry)
        left = manifest.read_bytes().decode()
        lines = "".join(f"{indent}{line}{newline}" for line in added.splitlines())
        assert left.count(lines) == 1
        assert left.replace(lines, "").rstrip() == text.rstrip()
        edit.remove_model(manifest, "new")
        assert manifest.read_bytes().decode().rstrip() == text.rstrip()


def test_manifest_in_brackets_is_left_to_its_editor(manifest: Path, model: Path) -> None:
    manifest.write_text(
        '{"version": 1, "models": [{"name": "a", "devices": "all", "engine": {"model": "org/a"}}]}'
    )
    assert refused(manifest, "add", str(model)) == (
        "M cannot be changed by this command: its models are written in brackets: edit it"
    )


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
        | st.sampled_from(["on", "1_0", "0o7", "1e-5", "~", "2026-11-30", "<<", "a: b", "# c", "\x85", "\u2028"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        max_leaves=5,
    )
)  # fmt: skip
@settings(deadline=None, max_examples=50)
def test_every_value_comes_back_or_the_file_stays(value: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "m.yaml")
        path.write_text(MINE)
        entry = {"name": "new", "devices": ["cpu0"], "engine": {"model": "org/x", "x": value}}
        try:
            found = edit.add_model(path, entry).models[-1].engine
        except ManifestError:
            assert path.read_text() == MINE
        else:
            assert found == entry["engine"]


def test_commands_at_once_all_leave_their_entry(manifest: Path) -> None:
    manifest.write_text(MINE)
    adding = [
        threading.Thread(
            target=edit.add_model,
            args=(manifest, {"name": f"m{n}", "devices": ["cpu0"], "engine": {"model": "org/x"}}),
        )
        for n in range(8)
    ]
    for thread in adding:
        thread.start()
    for thread in adding:
        thread.join()
    assert {m.name for m in load_manifest(manifest).models[2:]} == {f"m{n}" for n in range(8)}


# ---- bad input


def refused(manifest: Path, *arguments: str, code: int = 78) -> str:
    before = manifest.read_text() if manifest.exists() else None
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert (manifest.read_text() if manifest.exists() else None) == before
    assert not list(manifest.parent.glob(".*"))
    return result.stderr.replace(str(manifest), "M").removeprefix("weightcachectl: ").rstrip("\n")


def test_bad_input_changes_nothing_and_is_named(
    manifest: Path, model: Path, tmp_path: Path
) -> None:
    for there in (None, MINE):
        if there:
            manifest.write_text(there)
        number = 2 if there else 0
        wrong = f"the manifest would be wrong, nothing was changed: models[{number}]"
        for arguments, text in (
            (("--dtype", "refused"), "vLLM refuses the arguments: argument --dtype: invalid value; arguments of the "
             "server, such as --port, belong to 'vllm serve' alone"),
            (("--model", "other"), f"two models are named, {model} and other: name one"),
            (("--load-format", "ipc_cache"), "--load-format ipc_cache belongs to the engine, not to its weights: leave "
             "it out; the command that this one prints has it"),
            (("--name", "a b"), f"{wrong}.name: expected 1 to 100 letters, digits, dots, dashes or underscores, got "
             "'a b'"),
            (("--device", "cpu0", "--tensor-parallel-size", "2"), f"{wrong}.devices: 1 devices are listed, "
             "tensor_parallel_size 2 needs 2; 'weightcachectl devices' prints their names"),
            (("--device", "cpu1", "--device", "cpu0", "--tensor-parallel-size", "2"), "the workers of an engine on the "
             "CPU ask cpu0, cpu1: name these devices, in this order"),
        ):  # fmt: skip
            assert refused(manifest, "add", str(model), *arguments) == text
    assert refused(manifest, "add", f"{tmp_path}/gone").startswith(
        f"model {tmp_path}/gone does not exist"
    )
    assert refused(manifest, "add", str(model), "--name", "big") == (
        "M has a model big already: 'weightcachectl remove big' first, or choose another --name"
    )
    assert refused(manifest, "remove", "tiny") == "M: no model 'tiny'; models: big, small"
    assert refused(manifest, "remove", "big") == (
        "the manifest would be wrong, nothing was changed: engines[0].model: no model 'big' in this manifest; "
        "models: small"
    )
    assert "MODEL comes first, got --dtype" in refused(manifest, "add", "--dtype", "auto", code=2)


def test_manifest_that_is_wrong_already_is_left_to_its_editor(manifest: Path, model: Path) -> None:
    manifest.write_text(MINE.replace("devices: all", "devices: [cpu7, cpu8]"))
    assert refused(manifest, "add", str(model)).startswith("M:18: models[1].devices: 2 devices")
    manifest.write_text("version: [")
    assert refused(manifest, "add", str(model)).startswith("M:1: not valid YAML")


def test_only_model_is_not_removed(manifest: Path, model: Path) -> None:
    assert refused(manifest, "remove", "tiny") == "M: no model 'tiny'; models: none"
    run("add", str(model))
    assert refused(manifest, "remove", "tiny") == (
        "M: tiny is its only model, and a manifest has at least one: 'weightcachectl stop DEVICE' frees its memory"
    )


def test_disk_that_is_full_leaves_the_manifest(manifest: Path, model: Path) -> None:
    manifest.write_text(MINE)
    limited = "ulimit -f 0; trap '' XFSZ; exec \"$@\""
    command = [sys.executable, "-m", "weightcached.cli.weightcachectl", "add", str(model)]
    done = subprocess.run(
        ["bash", "-c", limited, "-", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=BOUND_S,
    )
    assert (done.returncode, done.stderr) == (78, f"weightcachectl: {manifest}: File too large\n")
    assert manifest.read_text() == MINE
    assert os.listdir(manifest.parent) == ["manifest.yaml"]


def test_what_a_change_would_have_altered_besides_is_refused(
    manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a line of another entry had been touched."""
    manifest.write_text(MINE)
    edited = edit._with_entry
    monkeypatch.setattr(edit, "_with_entry", lambda *a: edited(*a).replace("c: 010", "c: 10"))
    with pytest.raises(ManifestError, match="it would have been read otherwise: edit it"):
        edit.add_model(manifest, {"name": "n", "devices": ["cpu0"], "engine": {"model": "org/x"}})
    assert manifest.read_text() == MINE


# ---- daemons


def telling(
    asked: list[Request], *outcomes: CacheOutcome, device: str, has: str = "other/target"
) -> Any:
    def answer(request: Request) -> Iterable[Answer]:
        if isinstance(request, Status):
            return [status(device, cache(has))]
        asked.append(request)
        return [ReloadReply(outcomes=list(outcomes))]

    return answer


def test_running_daemons_reload_the_model_alone_and_the_serve_line_follows(
    manifest: Path, model: Path, runtime: Path
) -> None:
    asked: list[Request] = []
    loaded = CacheOutcome(cache="tiny/target", outcome="loaded", generation=1, seconds=2.0)
    with StubDaemon(runtime / "cpu0.sock", telling(asked, loaded, device="cpu0")):
        result = run("add", str(model))
    assert (result.exit_code, asked) == (0, [Reload(caches=["tiny"])])
    assert result.stdout.endswith(
        "cpu0 tiny/target: loaded, generation 1 in 2.0 s\n"
        "an engine that attaches:\n"
        f"  vllm serve {model} --load-format ipc_cache\n"
    )


def test_session_without_a_runtime_directory_adds_all_the_same(
    manifest: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/no/such/directory")
    result = run("add", str(model))
    assert result.exit_code == 0
    assert "next:\n  weightcachectl start cpu0\n" in result.stdout


def test_failed_load_leaves_the_entry_and_exits_1(
    manifest: Path, model: Path, runtime: Path
) -> None:
    failed = CacheOutcome(
        cache="tiny/target", outcome="failed", generation=0, seconds=2.0, error="no room"
    )
    with StubDaemon(runtime / "cpu0.sock", telling([], failed, device="cpu0")):
        result = run("add", str(model))
    assert result.exit_code == 1
    assert result.stdout.endswith("cpu0 tiny/target: failed: no room\n")
    assert load_manifest(manifest).models[0].name == "tiny"


def test_remove_tells_the_daemons_that_have_the_model_alone(manifest: Path, runtime: Path) -> None:
    manifest.write_text(MINE.replace("model: big\n", "model: small\n"))
    told: list[Request] = []
    spared: list[Request] = []
    dropped = CacheOutcome(cache="big/target", outcome="dropped", generation=0, seconds=0.0)
    with (
        StubDaemon(runtime / "cpu0.sock", telling(told, dropped, device="cpu0", has="big/target")),
        StubDaemon(runtime / "cpu1.sock", telling(spared, device="cpu1")),
    ):
        result = run("remove", "big")
    assert (result.exit_code, told, spared) == (0, [Reload(caches=["big"])], [])
    assert (
        result.stdout.replace(str(manifest), "M")
        == "removed big from M\ncpu0 big/target: dropped\n"
    )


# ---- the command that attaches


def entry(*devices: str, **more: Any) -> dict[str, Any]:
    placed: Any = "all" if devices == ("all",) else list(devices)
    return {"name": "m", "devices": placed, "engine": {"model": "org/m"}, **more}


def test_serve_line_leads_to_the_devices_of_the_entry(
    monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    gpus(monkeypatch, GPU_A, GPU_B)
    plain = "vllm serve org/m --load-format ipc_cache"
    assert add.serve_command(entry("all"), []) == plain
    assert add.serve_command(entry(GPU_A), []) == plain
    assert add.serve_command(entry(GPU_A, GPU_B), []) == plain
    assert add.serve_command(entry(GPU_B), []) == f"CUDA_VISIBLE_DEVICES={GPU_B} {plain}"
    assert add.serve_command(entry("cpu0", python="/opt/v/bin/python"), ["--a", "b c"]) == (
        "/opt/v/bin/vllm serve org/m --a 'b c' --load-format ipc_cache"
    )
    assert add.serve_command(entry("cpu3"), []) == (
        f"""{plain} --model-loader-extra-config '{{"socket_path": "{runtime}/cpu3.sock"}}'"""
    )


def test_devices_are_the_first_visible_ones_if_none_is_named(
    monkeypatch: pytest.MonkeyPatch, manifest: Path, model: Path
) -> None:
    gpus(monkeypatch, GPU_A, GPU_B)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    result = run("add", str(model), "--python", "/bin/true")
    assert result.exit_code == 0, result.output
    (spec,) = load_manifest(manifest).models
    assert (spec.devices, spec.python) == ([GPU_B], "/bin/true")
    assert f"  weightcachectl start {GPU_B}\n" in result.stdout


def test_interpreter_that_cannot_parse_is_named(
    manifest: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(add, "PARSER", ("-c", "import no_such_module"))
    assert refused(manifest, "add", str(model), "--dtype", "auto") == (
        f"{sys.executable} cannot run vLLM's parser: ModuleNotFoundError: No module named 'no_such_module': "
        "name the engine's interpreter with --python"
    )
    assert refused(
        manifest, "add", str(model), "--python", "/no/python", "--dtype", "auto"
    ).startswith("vLLM's parser cannot be asked: ")
