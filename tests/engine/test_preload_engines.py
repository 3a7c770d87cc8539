"""`weightcached preload` with vLLM's own parser, the real loader and real engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.engine.conftest import ANSWER_TIMEOUT_S, BIN, READY_TIMEOUT_S, ROOT, Engines, Service
from tests.fakes.daemon import until
from weightcached.errors import WeightcachedError
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Status, StatusReply


def status(socket: Path) -> StatusReply | None:
    try:
        with Connection.connect(socket, timeout_s=READY_TIMEOUT_S, purpose="ctl") as connection:
            reply = connection.request(Status(), READY_TIMEOUT_S)
    except WeightcachedError:
        return None
    assert isinstance(reply, StatusReply)
    return reply


def test_arguments_are_read_as_vllm_reads_them(service: Service) -> None:
    words = [
        "--model",
        "/m",
        "-tp",
        "2",
        "--pipeline_parallel_size=3",
        "--no-enable-prefix-caching",
    ]
    words += ["--trust-remote-code", "--max-model-len", "1k", "--enable-expert-parallel"]
    words += ["--kernel-config.enable_flashinfer_autotune=false"]
    words += [
        "--compilation-config",
        '{"mode": 3}',
        "--speculative-config",
        '{"method": "eagle", "model": "/d"}',
    ]
    done = subprocess.run(
        [sys.executable, "-m", "weightcached.vllm_compat.arguments", *words],
        env=service.env, cwd=ROOT, capture_output=True, text=True, check=True, timeout=ANSWER_TIMEOUT_S,
    )  # fmt: skip
    assert json.loads(done.stdout) == {
        "model": "/m",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 3,
        "enable_prefix_caching": False,
        "trust_remote_code": True,
        "max_model_len": 1000,
        "kernel_config": {"enable_flashinfer_autotune": False},
        "enable_expert_parallel": True,
        "compilation_config": {"mode": 3},
        "speculative_config": {"method": "eagle", "model": "/d"},
    }


def test_misspelt_argument_is_refused_with_the_one_that_was_meant(service: Service) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weightcached.vllm_compat.arguments", "--tensor-paralel-size", "2"],
        env=service.env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=ANSWER_TIMEOUT_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].endswith(
        "error: unrecognized arguments: --tensor-paralel-size 2 (did you mean '--tensor-parallel-size'?)"
    )


def test_mistake_is_told_in_vllms_words_with_status_2(service: Service, tmp_path: Path) -> None:
    command = [
        str(BIN / "weightcached"),
        "preload",
        "--model",
        "/m",
        "--tensor-parallel-size",
        "two",
    ]
    done = subprocess.run(
        [*command, "--weight-cache-socket-dir", str(tmp_path)],
        env=service.env, capture_output=True, text=True, check=False, timeout=ANSWER_TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert "argument --tensor-parallel-size/-tp: " in done.stderr
    assert "'two'" in done.stderr
    assert "Traceback" not in done.stderr


def test_engine_maps_what_was_preloaded_before_and_after_a_daemons_death(
    service: Service, engines: Engines, models: dict[str, Path]
) -> None:
    model = models["untied"]
    disk = engines.tokens(model)
    # Short enough for a socket.
    directory = service.manager.runtime_dir / "preload"
    command = [
        str(BIN / "weightcached"),
        "preload",
        "--model",
        str(model),
        "--max-model-len",
        "256",
        "--enforce-eager",
    ]
    with subprocess.Popen(
        [*command, "--weight-cache-socket-dir", str(directory)],
        env=service.env,
        stdout=subprocess.PIPE,
        text=True,
    ) as preload:
        try:
            assert preload.stdout
            assert (
                preload.stdout.readline()
                == f"READY untied: 1 rank on cpu0, sockets in {directory}\n"
            )
            loader = {"fallback": False, "socket_dir": str(directory)}
            assert engines.tokens(model, "ipc_cache", loader=loader) == disk
            before = status(directory / "cpu0.sock")
            assert before
            os.kill(before.pid, signal.SIGKILL)
            pid = before.pid

            def started_again() -> bool:
                after = status(directory / "cpu0.sock")
                return after is not None and after.pid != pid and after.state == "ready"

            until(started_again, "the daemon was started again", bound_s=READY_TIMEOUT_S)
            after = status(directory / "cpu0.sock")
            assert after
            assert [(c.source, c.generation) for c in after.caches] == [("adopted", 1)]
            assert engines.tokens(model, "ipc_cache", loader=loader) == disk
            engines.ask(close=True)
        finally:
            preload.send_signal(signal.SIGTERM)
        assert preload.wait(READY_TIMEOUT_S) == 0
    assert not (directory / "cpu0.sock").exists()
