"""Ranks that load as a group hold what they hold when each loads alone: real gloo, then two nodes in two networks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import ANSWER_TIMEOUT_S, BIN, ENVIRONMENT, ROOT, answers_of_ranks, checkpoint
from tests.fakes.drafts import Maker, Shape, write_eagle, write_llama
from weightcached.errors import WeightcachedError
from weightcached.handout import read_index
from weightcached.wire.client import Connection
from weightcached.wire.messages import Status, StatusReply

RANKS = 2
PORT = 29_610
NODES = ("wc-test-a", "wc-test-b")
ENDS = ("wc-end-a", "wc-end-b")
ENGINE_PORT = 29_620
ADDRESSES = ("10.213.7.1", "10.213.7.2")
COMMON = {"tensor_parallel_size": 2, "max_model_len": 64, "enforce_eager": True}
READY_TIMEOUT_S = 180.0


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[dict[str, Any]]]]:
    """By rank, by case: digests in the group, and alone."""
    base, maker = tmp_path_factory.mktemp("groups"), Maker(Shape())
    target, head = write_llama(base / "target", maker), write_eagle(base / "eagle", maker)
    engine = COMMON | {
        "model": str(target),
        "speculative_config": {"method": "eagle", "model": str(head), "num_speculative_tokens": 2},
    }
    cases = json.dumps([{"name": role, "role": role, "engine": engine} for role in ("target", "draft")])
    return answers_of_ranks("group_ranks", str(PORT), cases, base, [{}] * RANKS)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_rank_in_a_group_equals_the_solo_rank(loaded: list[dict[str, list[dict[str, Any]]]], role: str) -> None:
    seen = []
    for rank in range(RANKS):
        grouped, solo = loaded[rank][role]
        # Of a draft without embeddings these are whatever the memory held.
        compared = [
            {name: what for name, what in found.items() if "embed_tokens" not in name} for found in (grouped, solo)
        ]
        assert len(compared[0]) > 5
        assert compared[0] == compared[1]
        seen.append(json.dumps(compared[0], sort_keys=True))
    assert len(set(seen)) == RANKS, "ranks that hold the same would hide a wrong rank"


class Node:
    """One of two nodes of a model: its own network, runtime directory, manifest and daemon of cpu0."""

    def __init__(self, rank: int, base: Path, engine: dict[str, Any], rendezvous: Any) -> None:
        base.mkdir(mode=0o700)
        self.socket = base / "run/cpu0.sock"
        self.log = base / "log"
        layout = {"tensor_parallel_size": RANKS, "nnodes": RANKS, "node_rank": rank, "master_addr": ADDRESSES[0]}
        entry = {"name": "m", "devices": ["cpu0"], "engine": engine | layout, "rendezvous": rendezvous}
        (base / "manifest.yaml").write_text(json.dumps({"version": 1, "models": [entry]}), encoding="utf-8")
        command = ["ip", "netns", "exec", NODES[rank], BIN / "weightcached", "serve", "cpu0"]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*command, "--manifest", base / "manifest.yaml", "--socket-dir", self.socket.parent],
                env=os.environ | ENVIRONMENT | {"XDG_RUNTIME_DIR": str(base)}, stdout=log, stderr=log, cwd=ROOT,
            )  # fmt: skip

    def outcome(self) -> str:
        """Wait for the daemon to be ready, or for the failure of its load."""
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(WeightcachedError, OSError):
                with Connection.connect(self.socket, timeout_s=5.0, purpose="ctl") as connection:
                    status = connection.request(Status(), 5.0)
                assert isinstance(status, StatusReply)
                for cache in status.caches:
                    if cache.state in ("ready", "failed"):
                        return cache.error or cache.state
            if self.process.poll() is not None:
                break
            time.sleep(0.2)
        return self.log.read_text(encoding="utf-8")

    def digests(self) -> dict[str, str]:
        """By tensor."""
        directory = self.socket.parent
        index = read_index(self.socket.stem, "m/target", for_what="compared", socket_dir=directory, timeout_s=10.0)
        return {t.names[0]: index.storages[t.storage].digest.hex() for t in index.tensors if t.storage is not None}

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(READY_TIMEOUT_S)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def networks() -> Iterator[None]:
    """Two network namespaces with one cable between them, and each with a loopback of its own."""
    try:
        for node in NODES:
            ip("netns", "add", node)
        ip("link", "add", ENDS[0], "netns", NODES[0], "type", "veth", "peer", "name", ENDS[1], "netns", NODES[1])
        for node, end, address in zip(NODES, ENDS, ADDRESSES, strict=True):
            ip("-n", node, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", node, "link", "set", end, "up")
            ip("-n", node, "link", "set", "lo", "up")
        yield
    finally:
        for node in NODES:
            subprocess.run(["ip", "netns", "delete", node], check=False, capture_output=True)


@contextlib.contextmanager
def running(base: Path, model: Path, rendezvous: Any, **second: Any) -> Iterator[list[Node]]:
    """Both nodes; `second` are more engine arguments of the second one."""
    base.mkdir()
    engine = {"model": str(model), "max_model_len": 64, "enforce_eager": True}
    nodes: list[Node] = []
    with contextlib.ExitStack() as stack:
        for rank, arguments in enumerate((engine, engine | second)):
            nodes.append(Node(rank, base / f"{rank}", arguments, rendezvous))
            stack.callback(nodes[-1].close)
        yield nodes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model") / "m", tied=False, dtype="bfloat16")


def killed_with_children(session: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


def tokens_of_two_nodes(model: Path, base: Path, nodes: list[Node] | None = None) -> Any:
    """What an engine decodes whose tensor-parallel ranks are in both networks; from disk, or attached to `nodes`."""
    common: dict[str, Any] = COMMON | {
        "nnodes": RANKS, "master_addr": ADDRESSES[0], "master_port": ENGINE_PORT, "distributed_executor_backend": "mp",
    }  # fmt: skip
    arguments = [common | {"node_rank": rank} for rank in range(RANKS)]
    for rank, node in enumerate(nodes or []):
        loader = {"fallback": False, "socket_dir": str(node.socket.parent)}
        arguments[rank] |= {"load_format": "ipc_cache", "model_loader_extra_config": loader}
    load_format = str(arguments[0].pop("load_format", "auto"))
    commands = [
        ["bench/generate.py", str(model), "--load-format", load_format, "--engine", json.dumps(arguments[0])],
        ["-m", "tests.engine.headless", json.dumps(arguments[1] | {"model": str(model)})],
    ]
    with contextlib.ExitStack() as stack:
        children = []
        for rank, command in enumerate(commands):
            log = stack.enter_context(open(base / f"engine{rank}", "wb"))
            addresses = {"VLLM_HOST_IP": ADDRESSES[rank], "GLOO_SOCKET_IFNAME": ENDS[rank]}
            child = subprocess.Popen(
                ["ip", "netns", "exec", NODES[rank], sys.executable, *command], cwd=ROOT,
                env=os.environ | ENVIRONMENT | addresses | {"VLLM_CPU_OMP_THREADS_BIND": str(rank)},
                stdout=log if rank else subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
            stack.callback(child.wait)
            # With all that it started: multiprocessing's trackers outlive their engine.
            stack.callback(killed_with_children, child.pid)
            children.append(child)
        said = children[0].communicate(timeout=ANSWER_TIMEOUT_S)[0]
    answers = [line for line in said.splitlines() if line.startswith("{")]
    assert answers, (base / "engine0").read_text(encoding="utf-8")[-3000:]
    return json.loads(answers[0])["tokens"]


GROUP = {"group": f"{ADDRESSES[0]}:{PORT}", "timeout_s": 120}


def test_two_nodes_in_two_networks_hold_the_same_solo_and_in_a_group(
    networks: None, model: Path, tmp_path: Path
) -> None:
    seen = {}
    disk = tokens_of_two_nodes(model, tmp_path)
    assert len({tuple(tokens) for tokens in disk}) == len(disk), "prompts that decode alike would hide wrong weights"
    for name, rendezvous in (("solo", "solo"), ("group", GROUP)):
        with running(tmp_path / name, model, rendezvous) as nodes:
            assert [node.outcome() for node in nodes] == ["ready", "ready"]
            seen[name] = [node.digests() for node in nodes]
            if name == "group":
                # What solo ranks hold is compared byte by byte below.
                assert tokens_of_two_nodes(model, tmp_path, nodes) == disk
    assert seen["solo"] == seen["group"]
    assert seen["solo"][0] != seen["solo"][1], "ranks that hold the same would hide a wrong rank"


def test_two_nodes_that_disagree_are_both_refused(networks: None, model: Path, tmp_path: Path) -> None:
    with running(tmp_path / "apart", model, GROUP, dtype="float32") as nodes:
        said = [node.outcome() for node in nodes]
    there, here = "rank 1 (on another node)", "rank 1 (cpu0)"
    assert f"m/target: the nodes disagree: on {there} engine.dtype is float32, on rank 0 (cpu0) None" in said[0]
    assert f"on {here} engine.dtype is float32, on rank 0 (on another node) None" in said[1]
