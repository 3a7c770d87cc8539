"""The manifest: accepted values, and one error per fault, with file, line, key and remedy."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from weightcached.config.drafts import has_cached_draft
from weightcached.config.manifest import Manifest, ModelSpec, check_checkpoint, load_manifest
from weightcached.config.published import Published, path_of, read_published, write_published
from weightcached.config.rendezvous import Rendezvous
from weightcached.config.snapshots import SnapshotSpec
from weightcached.errors import (
    EXIT_CONFIG,
    CheckpointMissingError,
    DeviceError,
    ManifestError,
)

PLACE = Rendezvous(host="10.0.0.1", port=29600, draft_port=29601, timeout_s=60)
GPU_A = "GPU-0e3f0000-0000-4000-8000-00000000000a"
GPU_B = "GPU-77a10000-0000-4000-8000-00000000000b"


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Write a manifest; `CKPT` in it stands for an existing checkpoint directory."""
    checkpoint = tmp_path / "ckpt"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")

    def write(text: str | bytes) -> Path:
        path = tmp_path / "manifest.yaml"
        data = text if isinstance(text, bytes) else text.replace("CKPT", str(checkpoint)).encode()
        path.write_bytes(data)
        return path

    return write


def one(entry: str) -> str:
    """A manifest of one model; `entry` begins on line 3."""
    return "version: 1\nmodels:\n" + entry


def model(rest: str = "", *, devices: str = "[cpu0]", engine: str = "{model: CKPT}") -> str:
    return one(f"  - name: a\n    devices: {devices}\n    engine: {engine}\n{rest}")


def fault(path: Path) -> str:
    with pytest.raises(ManifestError) as caught:
        load_manifest(path)
    assert caught.value.exit_status == EXIT_CONFIG
    return str(caught.value).replace(str(path), "M").replace(str(path.parent), "DIR")


def test_full_entry_becomes_typed_objects(write: Any, tmp_path: Path) -> None:
    path = write(
        one(
            f"""  - name: llama-8b
    devices: [{GPU_A}, {GPU_B}]
    engine:
      model: CKPT
      tensor_parallel_size: 2
      gpu_memory_utilization: .9
      enforce_eager: true
      quantization: null
      hf_overrides: {{rope_theta: 1.5, layers: [1, 2]}}
    python: {sys.executable}
    rendezvous: {{group: 10.0.0.1:29600, timeout_s: 60}}
    identity: sampled
  - name: tiny
    devices: all
    engine: {{model: org/tiny}}
"""
        )
    )
    assert load_manifest(path) == Manifest(
        path=path,
        models=[
            ModelSpec(
                name="llama-8b",
                devices=[GPU_A, GPU_B],
                engine={
                    "model": str(tmp_path / "ckpt"),
                    "tensor_parallel_size": 2,
                    "gpu_memory_utilization": 0.9,
                    "enforce_eager": True,
                    "quantization": None,
                    "hf_overrides": {"rope_theta": 1.5, "layers": [1, 2]},
                },
                python=sys.executable,
                rendezvous=PLACE,
                identity="sampled",
            ),
            ModelSpec(name="tiny", devices=["all"], engine={"model": "org/tiny"}),
        ],
    )


def test_models_are_found_by_device_in_order_with_their_rank(write: Any) -> None:
    manifest = load_manifest(
        write(
            one(
                "  - {name: pair, devices: [cpu1, cpu0], engine: {model: CKPT, tensor_parallel_size: 2}}\n"
                "  - {name: every, devices: [all], engine: {model: CKPT}}\n"
                "  - {name: single, devices: [cpu1], engine: {model: CKPT}}\n"
            )
        )
    )
    assert [spec.name for spec in manifest.on("cpu0")] == ["pair", "every"]
    assert [spec.name for spec in manifest.on("cpu1")] == ["pair", "every", "single"]
    assert [spec.name for spec in manifest.on(GPU_A)] == ["every"]
    pair, every, single = manifest.models
    assert [pair.rank_of("cpu1"), pair.rank_of("cpu0")] == [0, 1]
    assert [every.rank_of("cpu0"), every.rank_of(GPU_A)] == [0, 0]
    with pytest.raises(
        DeviceError, match=re.escape("model 'single' is not on cpu0: its devices are cpu1")
    ):
        single.rank_of("cpu0")


def test_ranks_count_tensor_pipeline_and_data_parallelism(write: Any) -> None:
    layout = "tensor_parallel_size: 2, pipeline_parallel_size: 2, data_parallel_size: 2"
    devices = [f"cpu{n}" for n in range(8)]
    path = write(model(devices=f"[{', '.join(devices)}]", engine=f"{{model: CKPT, {layout}}}"))
    assert load_manifest(path).models[0].devices == devices


def test_digest_changes_with_everything_that_changes_the_load_and_nothing_else() -> None:
    def digest(device: str = "cpu0", **changed: Any) -> str:
        fields: dict[str, Any] = {
            "name": "a",
            "devices": ["cpu0", "cpu1"],
            "engine": {"model": "m", "dtype": "auto"},
        }
        return ModelSpec(**(fields | changed)).digest(device)

    assert re.fullmatch("[0-9a-f]{64}", digest())
    same = [
        digest(name="b"),
        digest(devices=["cpu0", "cpu2"]),
        digest(engine={"dtype": "auto", "model": "m"}),
        digest(identity="sampled"),
    ]
    elsewhere = Rendezvous(host="10.0.0.2", port=29700, draft_port=29800)
    assert digest(rendezvous=elsewhere) == digest(rendezvous=PLACE)
    assert set(same) == {digest()}
    different = [
        digest(),
        digest("cpu1"),
        digest(engine={"model": "m"}),
        digest(engine={"model": "m", "dtype": "auto", "seed": 0}),
        digest(python="/usr/bin/python3"),
        digest(rendezvous=PLACE),
        digest(env={"VLLM_USE_DEEP_GEMM": "0"}),
    ]
    assert len(set(different)) == len(different)


DEVICES = "; 'weightcachectl devices' prints their names"

KNOWN = "known keys: name, devices, engine, python, rendezvous, identity, env, resident, idle_evict_s, live, on_swap"
WITH_DRAFT = "{model: CKPT, speculative_config: {method: eagle, model: CKPT}}"
TWO_NODES = "{model: CKPT, tensor_parallel_size: 2, nnodes: 2, node_rank: 0}"
DEVICE_HINT = (
    "expected GPU-<uuid> or MIG-<uuid> as nvidia-smi -L prints it, or cpu0 … cpu999 for host memory; "
    "'weightcachectl devices' lists the devices of this machine"
)
MISSING = "models[0]: the key devices is missing: expected"
NAME = "1 to 100 letters, digits, dots, dashes or underscores"
FAULTS = {
    "empty": ("", "M: the file holds no value: expected the keys version and models"),
    "only_comments": (
        "# nothing\n",
        "M: the file holds no value: expected the keys version and models",
    ),
    "not_utf8": (b"version: 1\nmodels: \xff\n", "M:2: not UTF-8: byte 0xff"),
    "control_character": (
        "version: 1\nmodels: \x01\n",
        "M:2: not valid YAML: character U+0001: special characters are not allowed",
    ),
    "unclosed": (
        "version: 1\nmodels: [\n",
        "M:3: not valid YAML: while parsing a flow node, expected the node content, but found '<stream end>'",
    ),
    "tab": (
        "version: 1\n\tmodels: []\n",
        "M:2: not valid YAML: while scanning for the next token, found character '\\t' that cannot start any token",
    ),
    "two_documents": (
        "version: 1\n---\nversion: 1\n",
        "M:2: not valid YAML: expected a single document in the stream, but found another document",
    ),
    "list_at_top": ("- version: 1\n", "M:1: expected a mapping, got a list"),
    "version_missing": ("models: []\n", "M:1: the key version is missing: write 'version: 1'"),
    "version_other": (
        "version: 2\n",
        "M:1: version: expected 1, the only manifest version that this software reads, got the integer 2",
    ),
    "version_string": (
        "version: '1'\n",
        "M:1: version: expected 1, the only manifest version that this software reads, got '1'",
    ),
    "unknown_top": (
        "version: 1\nmodel: []\n",
        "M:2: model: unknown key (did you mean 'models'?); known keys: version, models, engines, "
        "snapshots, budget",
    ),
    "duplicate_top": (
        "version: 1\nmodels: []\nversion: 1\n",
        "M:3: version: the key stands here twice, first on line 1: remove one",
    ),
    "models_missing": ("version: 1\n", "M:1: the key models is missing: expected a list of models"),
    "models_empty": (
        "version: 1\nmodels: []\n",
        "M:2: models: the list is empty: expected at least one entry",
    ),
    "models_null": ("version: 1\nmodels:\n", "M:2: models: expected a list of models, got nothing"),
    "models_mapping": (
        "version: 1\nmodels: {a: 1}\n",
        "M:2: models: expected a list of models, got a mapping",
    ),
    "model_string": (one("  - llama\n"), "M:3: models[0]: expected a mapping, got 'llama'"),
    "unknown_key": (
        model("    devises: [cpu1]\n"),
        f"M:6: models[0].devises: unknown key (did you mean 'devices'?); {KNOWN}",
    ),
    "misplaced_key": (model("    zzz: 1\n"), f"M:6: models[0].zzz: unknown key; {KNOWN}"),
    "env_number": (
        model("    env: {VLLM_USE_DEEP_GEMM: 0}\n"),
        "M:6: models[0].env.VLLM_USE_DEEP_GEMM: expected a string, got the integer 0: quote it",
    ),
    "env_name": (
        model("    env: {'a-b': x}\n"),
        "M:6: models[0].env.a-b: no environment variable has such a name: expected one like VLLM_USE_DEEP_GEMM",
    ),
    "env_device": (
        model("    env: {CUDA_VISIBLE_DEVICES: '1'}\n"),
        "M:6: models[0].env.CUDA_VISIBLE_DEVICES: a loader sees the device that it loads for, and no other: use "
        "devices",
    ),
    "env_manager": (
        model("    env: {NOTIFY_SOCKET: x}\n"),
        "M:6: models[0].env.NOTIFY_SOCKET: NOTIFY_SOCKET is between the service manager and the daemon: remove it",
    ),
    "integer_key": (
        model("    1: 1\n"),
        "M:6: models[0]: expected a string as key, got the integer 1: quote it",
    ),
    "merge_key": (
        model("    <<: {}\n"),
        "M:6: models[0]: merge keys (<<) are not supported: write the keys out",
    ),
    "name_missing": (
        one("  - devices: [cpu0]\n"),
        f"M:3: models[0]: the key name is missing: expected {NAME}",
    ),
    "devices_missing": (
        one("  - name: a\n"),
        f"M:3: {MISSING} a list of devices or all",
    ),
    "engine_missing": (
        one("  - name: a\n    devices: [cpu0]\n"),
        "M:3: models[0]: the key engine is missing",
    ),
    "name_integer": (
        one("  - {name: 8, devices: [cpu0], engine: {model: CKPT}}\n"),
        f"M:3: models[0].name: expected {NAME}, got the integer 8: quote it",
    ),
    "name_slash": (
        one("  - {name: a/b, devices: [cpu0], engine: {model: CKPT}}\n"),
        "M:3: models[0].name: expected 1 to 100 letters, digits, dots, dashes or underscores, got 'a/b'",
    ),
    "name_newline": (
        one('  - {name: "a\\n", devices: [cpu0], engine: {model: CKPT}}\n'),
        "M:3: models[0].name: expected 1 to 100 letters, digits, dots, dashes or underscores, got 'a\\n'",
    ),
    "name_twice": (
        one(
            "  - {name: a, devices: [cpu0], engine: {model: CKPT}}\n"
            "  - {name: a, devices: [cpu1], engine: {model: CKPT}}\n"
        ),
        "M:4: models[1].name: the name 'a' is taken by the model on line 3: choose another",
    ),
    "device_string": (
        model(devices="cpu0"),
        "M:4: models[0].devices: expected a list of devices or all, got 'cpu0': write [cpu0]",
    ),
    "device_integer": (
        model(devices="[0]"),
        "M:4: models[0].devices[0]: expected a string, got the integer 0: quote it",
    ),
    "device_malformed": (
        model(devices="[cpu00]"),
        f"M:4: models[0].devices[0]: 'cpu00' is not a device name: {DEVICE_HINT}",
    ),
    "device_twice": (
        model(devices="[cpu0, cpu0]", engine="{model: CKPT, tensor_parallel_size: 2}"),
        "M:4: models[0].devices[1]: cpu0 is used twice in this model, first as rank 0",
    ),
    "device_kinds": (
        model(devices=f"[cpu0, {GPU_A}]", engine="{model: CKPT, tensor_parallel_size: 2}"),
        f"M:4: models[0].devices[1]: {GPU_A} and cpu0 are of different kinds: a model is on GPUs or in host memory",
    ),
    "devices_none": (
        model(devices="[]"),
        "M:4: models[0].devices: 0 devices are listed, one rank needs 1" + DEVICES,
    ),
    "devices_too_many": (
        model(devices="[cpu0, cpu1]"),
        "M:4: models[0].devices: 2 devices are listed, one rank needs 1" + DEVICES,
    ),
    "devices_too_few": (
        model(
            devices="[cpu0, cpu1]",
            engine="{model: CKPT, tensor_parallel_size: 2, pipeline_parallel_size: 2}",
        ),
        "M:4: models[0].devices: 2 devices are listed, tensor_parallel_size 2 × pipeline_parallel_size 2 needs 4"
        + DEVICES,
    ),
    "all_with_layout": (
        model(devices="all", engine="{model: CKPT, tensor_parallel_size: 2}"),
        "M:4: models[0].devices: all gives each device a copy of its own, tensor_parallel_size 2 needs 2: list "
        "them in rank order",
    ),
    "all_among_others": (
        model(devices="[cpu0, all]", engine="{model: CKPT, tensor_parallel_size: 2}"),
        "M:4: models[0].devices[1]: all must stand alone",
    ),
    "engine_list": (
        model(engine="[model]"),
        "M:5: models[0].engine: expected a mapping, got a list",
    ),
    "engine_model_missing": (
        model(engine="{}"),
        "M:5: models[0].engine: the key model is missing: expected a Hub id or the absolute path of a checkpoint",
    ),
    "engine_model_empty": (
        model(engine="{model: ''}"),
        "M:5: models[0].engine.model: expected a string that is not empty, got ''",
    ),
    "engine_model_null": (
        model(engine="{model: }"),
        "M:5: models[0].engine.model: expected a string, got nothing",
    ),
    "engine_model_home": (
        model(engine="{model: ~/m}"),
        "M:5: models[0].engine.model: expected a Hub id or an absolute path, got '~/m': "
        "the daemon runs in another directory",
    ),
    "engine_dashes": (
        model(engine="{model: CKPT, tensor-parallel-size: 2}"),
        "M:5: models[0].engine.tensor-parallel-size: engine arguments have their Python names: "
        "write tensor_parallel_size",
    ),
    "engine_option": (
        model(engine="{model: CKPT, --dtype: auto}"),
        "M:5: models[0].engine.--dtype: engine arguments have their Python names: write dtype",
    ),
    "engine_no_identifier": (
        model(engine="{model: CKPT, 'a b': 1}"),
        "M:5: models[0].engine.a b: no engine argument has such a name: expected one like tensor_parallel_size",
    ),
    "engine_duplicate": (
        model(engine="\n      model: CKPT\n      dtype: auto\n      dtype: half"),
        "M:8: models[0].engine.dtype: the key stands here twice, first on line 7: remove one",
    ),
    "engine_nested_duplicate": (
        model(engine="{model: CKPT, hf_overrides: {a: 1, a: 2}}"),
        "M:5: models[0].engine.hf_overrides.a: the key stands here twice, first on line 5: remove one",
    ),
    "engine_size_zero": (
        model(engine="{model: CKPT, tensor_parallel_size: 0}"),
        "M:5: models[0].engine.tensor_parallel_size: expected an integer of at least 1, got the integer 0",
    ),
    "engine_size_string": (
        model(engine="{model: CKPT, tensor_parallel_size: '2'}"),
        "M:5: models[0].engine.tensor_parallel_size: expected an integer of at least 1, got '2'",
    ),
    "engine_size_boolean": (
        model(engine="{model: CKPT, data_parallel_size: true}"),
        "M:5: models[0].engine.data_parallel_size: expected an integer of at least 1, got the boolean true",
    ),
    "engine_own_format": (
        model(engine="{model: CKPT, load_format: ipc_cache}"),
        "M:5: models[0].engine.load_format: 'ipc_cache' would attach to the cache that this entry fills: "
        "remove it here and give it to 'vllm serve' instead",
    ),
    "engine_own_other_format": (
        model(engine="{model: CKPT, load_format: weightcached}"),
        "M:5: models[0].engine.load_format: 'weightcached' would attach to the cache that this entry fills: "
        "remove it here and give it to 'vllm serve' instead",
    ),
    "engine_date": (
        model(engine="{model: CKPT, revision: 2024-01-02}"),
        "M:5: models[0].engine.revision: values of the YAML type timestamp are not supported: "
        "quote it if a string is meant",
    ),
    "engine_python_object": (
        model(engine="{model: CKPT, seed: !!python/object/apply:os.system [id]}"),
        "M:5: models[0].engine.seed: values of the YAML type python/object/apply:os.system are not supported: "
        "quote it if a string is meant",
    ),
    "engine_infinite": (
        model(engine="{model: CKPT, gpu_memory_utilization: .inf}"),
        "M:5: models[0].engine.gpu_memory_utilization: expected a finite number, got the float .inf",
    ),
    "engine_huge": (
        model(engine="{model: CKPT, seed: 9223372036854775808}"),
        "M:5: models[0].engine.seed: expected an integer of at most 64 bits, got the integer 9223372036854775808",
    ),
    "engine_tagged_integer": (
        model(engine="{model: CKPT, seed: !!int x}"),
        "M:5: models[0].engine.seed: 'x' is not of type int",
    ),
    "engine_nul": (
        model(engine='{model: "a\\0b"}'),
        "M:5: models[0].engine.model: expected text, got 'a\\x00b': NUL and lone surrogates are not allowed",
    ),
    "engine_surrogate": (
        model(engine='{model: CKPT, revision: "\\ud800"}'),
        "M:5: models[0].engine.revision: expected text, got '\\ud800': NUL and lone surrogates are not allowed",
    ),
    "python_relative": (
        model("    python: python3\n"),
        "M:6: models[0].python: expected the absolute path of an interpreter, got 'python3'",
    ),
    "rendezvous_other": (
        model("    rendezvous: grup\n"),
        "M:6: models[0].rendezvous: expected one of group, solo or a mapping, got 'grup' (did you mean 'group'?)",
    ),
    "rendezvous_nowhere": (
        model("    rendezvous: group\n"),
        "M:6: models[0].rendezvous: a group needs a place to meet: write {group: HOST:PORT}, an address of the node "
        "with rank 0",
    ),
    "rendezvous_without_group": (
        model("    rendezvous: {draft_port: 29600}\n"),
        "M:6: models[0].rendezvous: the key group is missing: expected HOST:PORT, an address of the node with rank 0",
    ),
    "rendezvous_unknown_key": (
        model("    rendezvous: {group: h:29600, timeout: 3}\n"),
        "M:6: models[0].rendezvous.timeout: unknown key (did you mean 'timeout_s'?); known keys: group, draft_port, "
        "timeout_s",
    ),
    "rendezvous_no_port": (
        model("    rendezvous: {group: somewhere}\n"),
        "M:6: models[0].rendezvous.group: expected HOST:PORT, got 'somewhere'",
    ),
    "rendezvous_low_port": (
        model("    rendezvous: {group: h:80}\n"),
        "M:6: models[0].rendezvous.group: expected a port of 1024 to 65535, got 80",
    ),
    "rendezvous_high_draft_port": (
        model("    rendezvous: {group: h:29600, draft_port: 65536}\n"),
        "M:6: models[0].rendezvous.draft_port: expected a port of 1024 to 65535, got 65536",
    ),
    "rendezvous_long_wait": (
        model("    rendezvous: {group: h:29600, timeout_s: 541}\n"),
        "M:6: models[0].rendezvous.timeout_s: expected at most 540, got 541: a longer wait looks like a hang",
    ),
    "rendezvous_one_port_for_both": (
        model("    rendezvous: {group: h:29600, draft_port: 29600}\n", engine=WITH_DRAFT),
        "M:6: models[0].rendezvous.draft_port: 29600 is the target's port too: both groups may meet at once",
    ),
    "rendezvous_engine_port": (
        model("    rendezvous: {group: h:29777}\n", engine="{model: CKPT, master_port: 29777}"),
        "M:6: models[0].rendezvous.group: 29777 is the engine's master_port: the engine starts while loaders may meet, "
        "choose another",
    ),
    "rendezvous_default_engine_port": (
        model("    rendezvous: {group: 10.0.0.1:29501}\n", engine=TWO_NODES),
        "M:6: models[0].rendezvous.group: 29501 is the engine's master_port: the engine starts while loaders may meet, "
        "choose another",
    ),
    "rendezvous_draft_engine_port": (
        model(
            "    rendezvous: {group: h:29600, draft_port: 29601}\n",
            engine=WITH_DRAFT[:-1] + ", master_port: 29601}",
        ),
        "M:6: models[0].rendezvous.draft_port: 29601 is the engine's master_port: the engine starts while loaders may "
        "meet, choose another",
    ),
    "rendezvous_loopback": (
        model("    rendezvous: {group: 127.0.0.1:29600}\n", engine=TWO_NODES),
        "M:6: models[0].rendezvous.group: 127.0.0.1 is a loopback address, and the ranks are on several "
        "nodes: write an address of the node with rank 0",
    ),
    "rendezvous_loopback_name": (
        model("    rendezvous: {group: localhost:29600}\n", engine=TWO_NODES),
        "M:6: models[0].rendezvous.group: localhost is a loopback address, and the ranks are on several "
        "nodes: write an address of the node with rank 0",
    ),
    "rendezvous_draft_of_a_stage": (
        model(
            "    rendezvous: {group: h:29600}\n",
            devices="[cpu0, cpu1]",
            engine=WITH_DRAFT[:-1] + ", pipeline_parallel_size: 2}",
        ),
        "M:6: models[0].rendezvous.group: only the last pipeline stage has the draft, so it cannot form a group: "
        "write rendezvous: solo",
    ),
    "rendezvous_of_copies": (
        model("    rendezvous: {group: h:29600}\n", devices="all"),
        "M:6: models[0].rendezvous: devices: all gives each device a copy of its own, which has no peers: write solo",
    ),
    "rendezvous_port_of_another_model": (
        one(
            "  - {name: a, devices: [cpu0], engine: {model: CKPT}, rendezvous: {group: h:29600}}\n"
            "  - {name: b, devices: [cpu0], engine: {model: CKPT}, rendezvous: {group: h:29600}}\n"
        ),
        "M:4: models[1].rendezvous: port 29600 belongs to a group of a too: choose another",
    ),
    "draft_own_format": (
        model(engine=WITH_DRAFT[:-2] + ", draft_load_config: {load_format: ipc_cache}}}"),
        "M:5: models[0].engine.speculative_config.draft_load_config: load_format 'ipc_cache' would attach to the cache "
        "that this entry fills: remove it",
    ),
    "identity_other": (
        model("    identity: true\n"),
        "M:6: models[0].identity: expected one of full, sampled, got the boolean true",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_one_error_with_line_and_key(name: str, write: Any) -> None:
    text, message = FAULTS[name]
    assert fault(write(text)) == message


def test_missing_file_and_directory_are_named(tmp_path: Path) -> None:
    assert fault(tmp_path / "none.yaml") == "M: cannot be read: No such file or directory"
    with pytest.raises(
        ManifestError, match=f"^{re.escape(str(tmp_path))}: cannot be read: Is a directory$"
    ):
        load_manifest(tmp_path)


def test_file_of_over_a_mebibyte_is_refused(write: Any) -> None:
    assert (
        fault(write("#" * (1024 * 1024 + 1)))
        == "M: larger than 1048576 bytes: a manifest is smaller"
    )


def test_byte_order_mark_is_accepted(write: Any) -> None:
    text = model().replace("CKPT", "org/m")
    assert load_manifest(write(b"\xef\xbb\xbf" + text.encode())).models[0].name == "a"


def test_alias_is_followed(write: Any) -> None:
    text = "  - {name: a, devices: [cpu0], engine: &e {model: CKPT}}\n  - {name: b, devices: [cpu0], engine: *e}\n"
    first, second = load_manifest(write(one(text))).models
    assert first.engine == second.engine


def test_alias_bomb_is_refused_and_not_expanded(write: Any) -> None:
    levels = "".join(f"      l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 9))
    text = model(engine=f"\n      model: CKPT\n      l0: &l0 [x, x, x, x, x, x, x, x, x]\n{levels}")
    assert "more than 100000 values, aliases counted each time: a manifest has fewer" in fault(
        write(text)
    )


def test_value_that_contains_itself_is_refused(write: Any) -> None:
    message = fault(write(model(engine="{model: CKPT, hf_overrides: &a [*a]}")))
    assert message.endswith(": nested too deeply: at most 32 levels are allowed")


def test_deep_nesting_is_refused(write: Any) -> None:
    message = fault(write(model(engine="{model: CKPT, x: " + "[" * 5000 + "]" * 5000 + "}")))
    assert message == "M: nested too deeply: at most 32 levels are allowed"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can hand a file to another user")
def test_unreadable_file_is_named(write: Any) -> None:
    path = write(model())
    path.chmod(0)
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        try:
            load_manifest(path)
        except ManifestError as e:
            os._exit(0 if str(e) == f"{path}: cannot be read: Permission denied" else 2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_snapshots_are_off_by_default(write: Any) -> None:
    assert load_manifest(write(model())).snapshots is None


def test_snapshots_have_a_directory_a_bound_and_a_count(write: Any, tmp_path: Path) -> None:
    text = model() + f"snapshots: {{dir: {tmp_path}, max_bytes: 200 GiB, keep: 2}}\n"
    spec = load_manifest(write(text)).snapshots
    assert spec == SnapshotSpec(directory=tmp_path, max_bytes=200 << 30, keep=2)


def test_snapshots_are_in_the_users_cache_by_default(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = load_manifest(write(model() + "snapshots: {}\n")).snapshots
    assert spec == SnapshotSpec(directory=tmp_path / "weightcached/snapshots")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("{dir: here}", "snapshots.dir: expected an absolute path, got 'here'"),
        (
            "{max_bytes: 10 GB}",
            "snapshots.max_bytes: expected bytes or a size such as 200 GiB, got '10 GB'",
        ),
        ("{keep: 0}", "snapshots.keep: expected an integer of at least 1, got the integer 0"),
        (
            "{keeps: 1}",
            "snapshots.keeps: unknown key (did you mean 'keep'?); known keys: dir, max_bytes, keep",
        ),
        ("true", "snapshots: expected a mapping, got the boolean true"),
    ],
)
def test_wrong_snapshots_are_refused_by_key(write: Any, value: str, text: str) -> None:
    assert fault(write(model() + f"snapshots: {value}\n")) == f"M:6: {text}"


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        ({"model": "/nonexistent/m"}, "model /nonexistent/m does not exist: mount"),
        ({"model": "CKPT/config.json"}, "model CKPT/config.json is not a directory: mount"),
        ({"model": "CKPT/.."}, "model CKPT/.. has no config.json: expected the directory"),
        (
            {"model": "CKPT", "speculative_config": {"model": "/nonexistent/d"}},
            "model /nonexistent/d does not exist: mount",
        ),
    ],
)
def test_what_is_not_there_is_that_models_fault_and_no_fault_of_the_manifest(
    write: Any, tmp_path: Path, engine: dict[str, object], problem: str
) -> None:
    path = write(model("    python: /nonexistent/python\n", engine=json.dumps(engine)))
    (entry,) = load_manifest(path).models
    with pytest.raises(CheckpointMissingError) as raised:
        check_checkpoint(entry.engine)
    assert str(raised.value).startswith(problem.replace("CKPT", str(tmp_path / "ckpt")))
    # It may come back: the daemon tries again.
    assert raised.value.exit_status != EXIT_CONFIG


def test_draft_that_is_not_there_stays_wanted(tmp_path: Path) -> None:
    """A served draft is not dropped because its directory is away for a while."""
    engine = {"model": str(tmp_path), "speculative_config": {"model": "/nonexistent/draft"}}
    assert has_cached_draft(engine)


@pytest.mark.parametrize(
    ("value", "on_cpu0", "on_cpu1"),
    [
        ("10 GiB", 10 << 30, 10 << 30),
        ("4096", 4096, 4096),
        ("{cpu0: 1 TiB, all: 512 MiB}", 1 << 40, 512 << 20),
        ("{cpu0: 1 MiB}", 1 << 20, 0),
    ],
)
def test_a_budget_is_of_each_device_or_of_the_named_ones(
    write: Any, value: str, on_cpu0: int, on_cpu1: int
) -> None:
    manifest = load_manifest(write(model() + f"budget: {value}\n"))
    assert (manifest.budget_of("cpu0"), manifest.budget_of("cpu1")) == (on_cpu0, on_cpu1)


def test_without_a_budget_there_is_no_limit(write: Any) -> None:
    assert load_manifest(write(model())).budget_of("cpu0") == 0


SIZES = "expected bytes or a size such as 40 GiB"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("0", f"budget: {SIZES}, or a mapping from devices to such sizes, got the integer 0"),
        ("[]", f"budget: {SIZES}, or a mapping from devices to such sizes, got a list"),
        ("10 GB", f"budget: {SIZES}, or a mapping from devices to such sizes, got '10 GB'"),
        ("{cpu0: 10 GB}", f"budget.cpu0: {SIZES}, got '10 GB'"),
        (
            "{cpux: 10 GiB}",
            "budget.cpux: 'cpux' is not a device name: expected GPU-<uuid> or MIG-<uuid> as nvidia-smi -L "
            "prints it, or cpu0 … cpu999 for host memory; 'weightcachectl devices' lists the devices of this "
            "machine",
        ),
    ],
)
def test_wrong_budgets_are_refused_by_key(write: Any, value: str, text: str) -> None:
    assert fault(write(model() + f"budget: {value}\n")) == f"M:6: {text}"


def test_models_are_resident_unless_they_are_on_demand(write: Any) -> None:
    (always,) = load_manifest(write(model())).models
    lines = "    resident: on-demand\n    idle_evict_s: 1.5\n"
    (on_demand,) = load_manifest(write(model(lines))).models
    assert (always.on_demand, always.idle_evict_s) == (False, 0.0)
    assert (on_demand.on_demand, on_demand.idle_evict_s) == (True, 1.5)
    # Residence changes no loaded byte.
    assert always.digest("cpu0") == on_demand.digest("cpu0")


def test_live_model_drains_unless_it_aborts_and_loads_the_same_bytes(write: Any) -> None:
    (plain,) = load_manifest(write(model())).models
    (live,) = load_manifest(write(model("    live: true\n    on_swap: abort\n"))).models
    assert (plain.live, plain.on_swap) == (False, "drain")
    assert (live.live, live.on_swap) == (True, "abort")
    assert plain.digest("cpu0") == live.digest("cpu0")
    assert fault(write(model("    on_swap: wait\n"))) == (
        "M:6: models[0].on_swap: expected one of abort, drain, got 'wait'"
    )


def test_published_checkpoint_counts_until_the_manifest_names_another(
    write: Any, tmp_path: Path
) -> None:
    path = write(model())
    (own,) = load_manifest(path).models
    assert not read_published(path)
    (tmp_path / "step-2").mkdir()
    entry = Published(path=str(tmp_path / "step-2"), instead_of=own.engine["model"], label="step 2")
    write_published(path, {"a": entry, "gone": entry})
    (found,) = load_manifest(path).models
    assert found.label == "step 2"
    # Clients and the tokenizer know it by its own name.
    assert found.engine == {
        **own.engine, "model": entry.path, "served_model_name": [own.engine["model"]],
        "tokenizer": own.engine["model"],
    }  # fmt: skip
    assert found.digest("cpu0") != own.digest("cpu0")
    (tmp_path / "step-2/tokenizer.json").touch()
    assert "tokenizer" not in load_manifest(path).models[0].engine

    # Its own checkpoint gets a label, and is the same one.
    same = msgspec.structs.replace(entry, path=own.engine["model"])
    write_published(path, {"a": same})
    assert load_manifest(path).models == [msgspec.structs.replace(own, label="step 2")]
    other = msgspec.structs.replace(entry, instead_of="/models/another")
    write_published(path, {"a": other})
    assert load_manifest(path).models == [own]
    write_published(path, {})
    assert not path_of(path).exists()


def test_damaged_file_of_what_was_published_is_named(write: Any) -> None:
    path = write(model())
    path_of(path).write_text("{")
    with pytest.raises(ManifestError, match=r"published\.json: .* it holds what was published"):
        load_manifest(path)


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (
            ["resident: on_demand"],
            "resident: expected one of always, on-demand, got 'on_demand' (did you mean 'on-demand'?)",
        ),
        (
            ["idle_evict_s: 60"],
            "idle_evict_s: a model that is always resident is not evicted: add 'resident: on-demand'",
        ),
        (
            ["idle_evict_s: 0", "resident: on-demand"],
            "idle_evict_s: expected a number of seconds above 0, got the integer 0",
        ),
    ],
)
def test_wrong_residence_is_refused_by_key(write: Any, lines: list[str], text: str) -> None:
    entry = "".join(f"    {line}\n" for line in lines)
    assert fault(write(model(entry))) == f"M:6: models[0].{text}"
