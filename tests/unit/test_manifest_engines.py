"""`engines:` in the manifest: accepted entries, and one error with a remedy per fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightcached.config.engines import EngineSpec, Listen
from weightcached.config.manifest import load_manifest
from weightcached.errors import ManifestError

HEAD = """version: 1
models:
  - {name: tiny, devices: [cpu0], engine: {model: org/tiny, dtype: bfloat16}}
  - {name: wide, devices: [cpu0, cpu1], engine: {model: org/wide, tensor_parallel_size: 2}}
  - {name: twice, devices: [cpu0, cpu1], engine: {model: org/twice, data_parallel_size: 2}}
engines:
"""


def write(tmp_path: Path, entries: str) -> Path:
    path = tmp_path / "manifest.yaml"
    path.write_text(HEAD + entries)
    return path


def entry(rest: str = "", *, listen: str = "127.0.0.1:8000", model: str = "tiny") -> str:
    """One entry on line 7."""
    return f"  - {{name: chat, model: {model}, listen: '{listen}'{rest}}}\n"


def test_entry_becomes_a_typed_object_with_the_models_arguments_below(tmp_path: Path) -> None:
    more = ", arguments: {max_model_len: 256, dtype: float32}, standby: 0, idle_sleep_s: 60"
    more += ", drain_s: 1.5, nursery: false"
    spec, model = load_manifest(write(tmp_path, entry(more))).service("chat")
    assert spec == EngineSpec(
        name="chat",
        model="tiny",
        listen=Listen(host="127.0.0.1", port=8000),
        arguments={"max_model_len": 256, "dtype": "float32"},
        standby=0,
        idle_sleep_s=60.0,
        drain_s=1.5,
        nursery=False,
    )
    assert spec.merged(model) == {
        "model": "org/tiny",
        "dtype": "float32",
        "load_format": "ipc_cache",
        "max_model_len": 256,
    }


def test_digest_changes_with_what_an_engine_is_started_with_and_nothing_else(
    tmp_path: Path,
) -> None:
    def digest(rest: str = "", **changed: str) -> str:
        spec, model = load_manifest(write(tmp_path, entry(rest, **changed))).service("chat")
        return spec.digest(model)

    same = {digest(), digest(", standby: 0"), digest(", drain_s: 3"), digest(listen="[::1]:9")}
    assert same == {digest()}
    assert len({digest(), digest(", arguments: {seed: 1}"), digest(model="wide")}) == 3


@pytest.mark.parametrize(
    ("text", "listen"),
    [
        ("127.0.0.1:80", Listen(host="127.0.0.1", port=80)),
        ("[::]:8000", Listen(host="::", port=8000)),
        ("unix:/run/x.sock", Listen(path="/run/x.sock")),
    ],
)
def test_addresses(tmp_path: Path, text: str, listen: Listen) -> None:
    (spec,) = load_manifest(write(tmp_path, entry(listen=text))).engines
    assert (spec.listen, str(spec.listen)) == (listen, text)


FAULTS = {
    "unknown key": (entry(", stand_by: 1"), "unknown key (did you mean 'standby'?)"),
    "no listen": ("  - {name: chat, model: tiny}\n", "the key listen is missing"),
    "no such model": (entry(model="tny"), "no model 'tny' in this manifest (did you mean 'tiny'?)"),
    "no port": (entry(listen="localhost"), "expected HOST:PORT, [IPv6]:PORT or unix:/path"),
    "bare IPv6": (entry(listen="::1:8000"), "expected HOST:PORT, [IPv6]:PORT or unix:/path"),
    "port 0": (entry(listen="h:0"), "expected a port of 1 to 65535, got 0"),
    "relative path": (entry(listen="unix:x"), "expected unix: with an absolute path"),
    "long path": (entry(listen=f"unix:/{'x' * 107}"), "the path has 108 bytes"),
    "two standbys": (entry(", standby: 2"), "expected 0 or 1, got 2"),
    "standby as word": (entry(", standby: yes"), "expected an integer of at least 0"),
    "negative drain": (entry(", drain_s: -1"), "expected a number of at least 0"),
    "no time for a step": (entry(", hang_s: 0.5"), "expected at least 1, got 0.5"),
    "nursery as number": (entry(", nursery: 1"), "expected true or false, got the integer 1"),
    "port twice": (entry(", arguments: {port: 1}"), "use the entry's key listen"),
    "model twice": (entry(", arguments: {model: x}"), "the entry's key model names the model"),
    "dashes": (entry(", arguments: {max-model-len: 1}"), "write max_model_len"),
    "grpc": (entry(", arguments: {grpc: true}"), "the service serves HTTP"),
    "two servers": (entry(", arguments: {api_server_count: 2}"), "a service has one API server"),
    "replicas": (entry(", arguments: {data_parallel_size: 2}"), "a service has one replica"),
    "the model's replicas": (entry(model="twice"), "a service has one replica"),
    "other layout": (
        entry(", arguments: {tensor_parallel_size: 2}"),
        "model tiny has 1 devices, tensor_parallel_size 2",
    ),
    "same name": (entry() + entry(listen="h:9"), "is taken by the engine on line 7"),
    "same address": (
        entry() + "  - {name: b, model: tiny, listen: '127.0.0.1:8000'}\n",
        "chat listens there too",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_one_error_with_line(tmp_path: Path, name: str) -> None:
    text, message = FAULTS[name]
    path = write(tmp_path, text)
    with pytest.raises(ManifestError) as caught:
        load_manifest(path)
    line = 8 if name.startswith("same") else 7
    assert str(caught.value).startswith(f"{path}:{line}: engines[")
    assert message in str(caught.value)


def test_service_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no engine 'chta' under engines: \\(there: chat\\)"):
        load_manifest(write(tmp_path, entry())).service("chta")
