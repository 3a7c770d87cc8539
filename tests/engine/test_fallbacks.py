"""Every reason against mapping, with real vLLM and a scripted daemon: text, count, consequence."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.checkpoints import llama_config, write_checkpoint
from tests import limits
from tests.engine.conftest import ANSWER_TIMEOUT_S, ENVIRONMENT, ROOT

UNAVAILABLE, MISMATCH = "WeightCacheUnavailableError", "CacheConfigMismatchError"
QUANT, PLATFORM = "UnsupportedQuantForIPCError", "UnsupportedPlatformForIPCError"
START = "systemctl --user start weightcached@cpu0.service"
BUILDS_OTHER_LAYERS = (
    "tiny/target: the layers that this engine builds differ from the cached ones in a name, shape, dtype or kernel "
    "class"
)
# Each reason by its case in fallbacks.py: code, error with fallback off, text.
REASONS: dict[str, tuple[str, str, str]] = {
    "absent-daemon": ("no-daemon", UNAVAILABLE, f"no weightcached daemon listens on DIR/cpu0.sock: {START}"),
    "dead-daemon": (
        "no-daemon", UNAVAILABLE,
        f"no weightcached daemon listens on DIR/cpu0.sock, which a dead one left behind: {START}",
    ),
    "unreadable": ("unreachable", UNAVAILABLE, "cannot connect to DIR/cpu0.sock: Permission denied"),
    "open-directory": (
        "runtime-path", "RuntimePathError", "runtime directory DIR has mode 0755, expected 0700: chmod 700 DIR",
    ),
    "wrong-owner": (
        "runtime-path", "RuntimePathError",
        f"the daemon on DIR/cpu0.sock runs as uid {os.getuid()}, expected 4242: refusing to talk to it",
    ),
    "refused-connection": ("refused", UNAVAILABLE, "the daemon refused: 64 connections are open"),
    "refused": ("refused", UNAVAILABLE, "the daemon refused: the daemon is stopping"),
    "protocol-version": (
        "protocol-version", "ProtocolError",
        "the daemon on DIR/cpu0.sock (weightcached 0.1.0) speaks protocol 9, this software speaks 1: bring both to the "
        "same weightcached version and restart the unit",
    ),
    "wrong-device": (
        "wrong-device", MISMATCH,
        "the daemon on DIR/cpu0.sock serves cpu7, this engine runs on cpu0: name its socket in socket_path, or leave "
        "socket_path out",
    ),
    "silent-greeting": ("timeout", UNAVAILABLE, "the daemon on DIR/cpu0.sock did not answer within 0.3 s"),
    "silent": ("timeout", UNAVAILABLE, "the daemon on DIR/cpu0.sock did not answer within 0.3 s"),
    "hangs-up": ("connection-lost", UNAVAILABLE, "the daemon on DIR/cpu0.sock closed the connection"),
    "truncated": ("protocol", "ProtocolError", "message does not decode: Input data was truncated"),
    "broken-index": ("protocol", "ProtocolError", "the daemon handed out no index of tiny/target"),
    "absent": (
        "absent", UNAVAILABLE,
        "the daemon has no such cache: no cache in role target on cpu0: the manifest gives it nothing",
    ),
    "mismatch": (
        "key-mismatch", MISMATCH,
        "tiny/target is cached with another key: dtype is torch.half, asked torch.float",
    ),
    "stage": ("key-mismatch", MISMATCH, "the cache holds processed weights, this engine needs loaded"),
    "skeleton": ("key-mismatch", MISMATCH, BUILDS_OTHER_LAYERS),
    "failed": ("failed", UNAVAILABLE, "tiny/target failed to load: the disk is full"),
    "released": (
        "released", UNAVAILABLE,
        "tiny/target was dropped, or released to an engine in copy mode; 'weightcachectl reload' brings it back",
    ),
    "loading": (
        "still-loading", UNAVAILABLE,
        "tiny/target is still loading (weights); raise state_timeout_s to wait longer, 'weightcachectl status' shows "
        "its progress",
    ),
    "stalled": (
        "stalled", UNAVAILABLE,
        "tiny/target has stopped loading: weights stands at 5 of 9 bytes for 0 s; 'weightcachectl status' shows its "
        "state, 'journalctl --user' its loader's log",
    ),
    "unsupported-quantization": (
        "unsupported-quantization", QUANT, "model.layers.0.mlp: method Odd sets attribute lut, a numpy.ndarray",
    ),
    "unforeseen-while-binding": ("attach-failed", UNAVAILABLE, "attaching failed: KeyError: 'weight'"),
    "unforeseen-while-asking": ("attach-failed", UNAVAILABLE, "attaching failed: RuntimeError: odd configuration"),
    "checkpoint": ("checkpoint", "CheckpointError", "checkpoint /models/x has no weight files"),
    "unsupported-platform": ("unsupported-platform", PLATFORM, "platform cpu has no segment backend"),
    "eplb": ("eplb", QUANT, "enable_eplb moves experts while serving: leave it out to use the cache"),
    "elastic": ("eplb", QUANT, "enable_elastic_ep moves experts while serving: leave it out to use the cache"),
    "weight-transfer": (
        "weight-transfer", PLATFORM, "weight_transfer_config writes into weights that others map: use mode copy"
    ),
    "preserve": (
        "weight-transfer", PLATFORM,
        "sleep_preserve_parameter_names writes into weights that others map: use mode copy",
    ),
    "cpu-offload": (
        "cpu-offload", PLATFORM,
        "cpu_offload_gb 1.5 moves weights out of device memory: set it to 0 to use the cache",
    ),
    "prefetch-offload": (
        "cpu-offload", PLATFORM,
        "offload_group_size 2 moves weights out of device memory: set it to 0 to use the cache",
    ),
}  # fmt: skip
# Processor time tells, however busy the machine is; the wait is bounded too.
CPU_LIMIT_S = 2.0
WALL_LIMIT_S = 20.0
OPTIONS: dict[str, dict[str, Any]] = {
    "loading": {"state_timeout_s": 0.3},
    "silent-greeting": {"connect_timeout_s": 0.3},
    "absent-daemon": {"connect_timeout_s": 0.3},
    "dead-daemon": {"connect_timeout_s": 0.3},
}
# Other log lines: the progress of a load, and the traceback of an unexpected error.
BESIDE = {"waiting for tiny/target: weights, 0.0 of 0.0 MiB", "attaching failed"}


def plain(text: str) -> str:
    """Without the time for which a load stood still: a busy machine looks later."""
    return re.sub(r"(of \d+ bytes for) \d+ s;", r"\1 0 s;", text)


class Plugin:
    """The process with vLLM, the plug-in and the scripted daemon (fallbacks.py)."""

    def __init__(self, model: Path, log: Path) -> None:
        self._log = log
        with open(log, "w", encoding="utf-8") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.engine.fallbacks", str(model)], env=os.environ | ENVIRONMENT, cwd=ROOT,
                text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
            )  # fmt: skip

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line.startswith("ANSWER "), self._log.read_text(encoding="utf-8")[-3000:]
        answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
        return answer

    def case(self, name: str, **options: Any) -> dict[str, Any]:
        return self.ask(case=name, options=OPTIONS.get(name, {}) | options)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(ANSWER_TIMEOUT_S)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plugin]:
    base = tmp_path_factory.mktemp("fallbacks")
    config = llama_config(
        hidden=64,
        intermediate=128,
        layers=2,
        heads=4,
        kv_heads=2,
        vocab=256,
        dtype="bfloat16",
        tied=False,
    )
    write_checkpoint(base / "model", config)
    plugin = Plugin(base / "model", base / "log")
    plugin.case("absent-daemon")
    yield plugin
    plugin.close()


@pytest.mark.timed
@pytest.mark.parametrize("name", REASONS)
def test_reason_is_logged_once_and_counted_and_the_model_loads_from_disk(
    plugin: Plugin, name: str
) -> None:
    code, _, text = REASONS[name]
    for load_format, extra in (("auto", {}), ("user_disk", {"a": 1})):
        answer = plugin.case(name, fallback_load_format=load_format, fallback_extra_config=extra)
        assert answer.get("loaded") == [load_format, extra], answer
        assert [plain(line) for line in answer["log"] if line not in BESIDE] == [
            f"loading from disk ({load_format}): {text}"
        ]
        assert answer["counted"] == {code: 1}
        limits.hold("processor time until it falls back", answer["cpu_seconds"], CPU_LIMIT_S)
        limits.hold("time until it falls back", answer["seconds"], WALL_LIMIT_S)


@pytest.mark.timed
@pytest.mark.parametrize("name", REASONS)
def test_reason_is_raised_and_counted_where_fallback_is_off(plugin: Plugin, name: str) -> None:
    code, kind, text = REASONS[name]
    for load_format in ("auto", "user_disk"):
        answer = plugin.case(name, fallback=False, fallback_load_format=load_format)
        assert "error" in answer, answer
        assert [plain(words) for words in answer["error"]] == [kind, text]
        assert [line for line in answer["log"] if line not in BESIDE] == []
        assert answer["counted"] == {code: 1}
        limits.hold("processor time until it falls back", answer["cpu_seconds"], CPU_LIMIT_S)
        limits.hold("time until it falls back", answer["seconds"], WALL_LIMIT_S)


def test_every_reason_has_its_own_wording_and_its_line_in_the_documentation() -> None:
    texts = [text for _, _, text in REASONS.values()]
    # Silence is one reason, at whatever step the daemon falls silent.
    assert len(set(texts)) == len(texts) - 1
    page = (ROOT / "docs/fallback.md").read_text(encoding="utf-8")
    for code, error, _ in REASONS.values():
        assert any(
            f"| `{code}` |" in line and f"`{error}`" in line for line in page.splitlines()
        ), (code, error)
    assert "| `another-rank` |" in page
    assert "`no-room`" in page


@pytest.mark.parametrize("load_format", ["auto", "user_disk"])
def test_load_from_disk_that_has_no_room_beside_the_cache_is_refused_with_the_numbers(
    plugin: Plugin, load_format: str
) -> None:
    answer = plugin.case("no-room", fallback_load_format=load_format)
    assert answer.get("error") == [
        "OutOfDeviceMemoryError",
        "the cache cannot be used (tiny/target is cached with another key: dtype is torch.bfloat16, asked "
        "torch.float16), and a load from disk has no room beside it: it needs at least 2.0 GiB on cpu0, 1.0 MiB of "
        "4.0 GiB are free, the daemon holds tiny/target 3.0 GiB (pid 4242); make the engine match the cache, or: "
        "'weightcachectl drop tiny/target' frees that cache, a lower --gpu-memory-utilization of this device's engines "
        "leaves room for more",
    ]
    assert answer["counted"] == {"key-mismatch": 1}
    refused = plugin.case("no-room", fallback=False, fallback_load_format=load_format)
    assert refused["error"][0] == MISMATCH


# ---- one decision for both questions


def test_cache_that_becomes_ready_between_memory_query_and_load_changes_nothing(
    plugin: Plugin,
) -> None:
    answer = plugin.ask(story="ready_in_between")
    assert (answer["memory"], answer["mapped"]) == (0, False)
    assert answer["requests"].count("Attach") == 1


def test_daemon_that_changes_its_mind_after_the_memory_query_changes_nothing(
    plugin: Plugin,
) -> None:
    answer = plugin.ask(story="gone_in_between")
    held = ["Hello", "HoldLoads"]
    assert answer == {"memory": 4096, "mapped": True, "requests": ["Hello", "Attach", *held]}


def test_decision_of_an_engine_that_ended_is_not_the_next_one_s(plugin: Plugin) -> None:
    answer = plugin.ask(story="another_engine_in_between")
    assert answer["mapped"] is False
    assert answer["requests"].count("Attach") == 2


def test_reason_that_was_raised_is_forgotten(plugin: Plugin) -> None:
    answer = plugin.ask(story="failed_engine_leaves_nothing")
    assert answer["error"] == "the daemon has no such cache: not yet"
    assert answer["mapped"] is True
