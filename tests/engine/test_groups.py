"""Ranks that load as a group hold the same as when each loads alone: real gloo, two networks.

An engine over both nodes then decodes, from either kind of cache, as one rank that loads from disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import (
    ANSWER_TIMEOUT_S,
    BIN,
    ENVIRONMENT,
    READY_TIMEOUT_S,
    ROOT,
    Engines,
    answers_of_ranks,
    checkpoint,
)
from tests.fakes.drafts import Maker, Shape, write_eagle, write_llama
from weightcached.config.rendezvous import MAX_TIMEOUT_S
from weightcached.errors import WeightcachedError
from weightcached.wire.connection import Connection
from weightcached.wire.fetch import fetch_index
from weightcached.wire.messages import Counters, Status, StatusReply

RANKS = 2
PORT = 29_610
# Of this run: one that was killed may have left its own.
NODES = (f"wc-test-{os.getpid()}a", f"wc-test-{os.getpid()}b")
ENDS = (f"wc-{os.getpid()}a", f"wc-{os.getpid()}b")
ENGINE_PORT = 29_620
ADDRESSES = ("10.213.7.1", "10.213.7.2")
# In float32: ranks add their partial sums, and in bfloat16 these are rounded differently from one
# rank's.
ALONE: dict[str, Any] = {"max_model_len": 64, "enforce_eager": True, "dtype": "float32"}
OVER_NODES = ALONE | {"tensor_parallel_size": RANKS, "nnodes": RANKS, "master_addr": ADDRESSES[0]}
COMMON = {"tensor_parallel_size": 2, "max_model_len": 64, "enforce_eager": True}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[dict[str, Any]]]]:
    """By rank, by case: digests in the group, and alone."""
    base, maker = tmp_path_factory.mktemp("groups"), Maker(Shape())
    target, head = write_llama(base / "target", maker), write_eagle(base / "eagle", maker)
    engine = COMMON | {
        "model": str(target),
        "speculative_config": {"method": "eagle", "model": str(head), "num_speculative_tokens": 2},
    }
    cases = json.dumps(
        [{"name": role, "role": role, "engine": engine} for role in ("target", "draft")]
    )
    return answers_of_ranks("group_ranks", str(PORT), cases, base, [{}] * RANKS)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_rank_in_a_group_equals_the_solo_rank(
    loaded: list[dict[str, list[dict[str, Any]]]], role: str
) -> None:
    seen = []
    for rank in range(RANKS):
        grouped, solo = loaded[rank][role]
        # In a draft without embeddings these are uninitialised memory.
        compared = [
            {name: what for name, what in found.items() if "embed_tokens" not in name}
            for found in (grouped, solo)
        ]
        assert len(compared[0]) > 5
        assert compared[0] == compared[1]
        seen.append(json.dumps(compared[0], sort_keys=True))
    assert len(set(seen)) == RANKS, "ranks that hold the same would hide a wrong rank"


class Node:
    """One of two nodes of a model: network, runtime directory (`home`), manifest, daemon of cpu0."""

    def __init__(self, rank: int, home: Path, engine: dict[str, Any], rendezvous: Any) -> None:
        self.socket = home / "weightcached/cpu0.sock"
        self.log = home / "log"
        entry = {
            "name": "m",
            "devices": ["cpu0"],
            "engine": OVER_NODES | engine | {"node_rank": rank},
        }
        manifest = {"version": 1, "models": [entry | {"rendezvous": rendezvous}]}
        (home / "manifest.yaml").write_text(json.dumps(manifest), encoding="utf-8")
        command = ["ip", "netns", "exec", NODES[rank], str(BIN / "weightcached"), "serve", "cpu0"]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*command, "--manifest", str(home / "manifest.yaml")],
                env=os.environ | ENVIRONMENT | {"XDG_RUNTIME_DIR": str(home)}, stdout=log, stderr=log, cwd=ROOT,
            )  # fmt: skip

    def status(self) -> StatusReply:
        with Connection.connect(
            self.socket, timeout_s=READY_TIMEOUT_S, purpose="ctl"
        ) as connection:
            status = connection.request(Status(), READY_TIMEOUT_S)
        assert isinstance(status, StatusReply)
        return status

    def outcome(self) -> str:
        """Wait for the daemon to be ready, or for the failure of its load."""
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(WeightcachedError, OSError):
                for cache in self.status().caches:
                    if cache.state in ("ready", "failed"):
                        return cache.error or cache.state
            if self.process.poll() is not None:
                break
            time.sleep(0.2)
        return self.log.read_text(encoding="utf-8")

    def digests(self) -> dict[str, str]:
        """By tensor."""
        directory = self.socket.parent
        index = fetch_index(
            self.socket.stem,
            "m/target",
            for_what="compared",
            socket_dir=directory,
            timeout_s=READY_TIMEOUT_S,
        )
        return {
            t.names[0]: index.storages[t.storage].digest.hex()
            for t in index.tensors
            if t.storage is not None
        }

    def engines(self) -> list[str]:
        """The networks of the processes that map the cache now."""
        return [
            subprocess.run(
                ["ip", "netns", "identify", str(engine.pid)], check=True, capture_output=True, text=True
            ).stdout.strip()
            for cache in self.status().caches
            for engine in cache.engines
        ]  # fmt: skip

    def counters(self) -> Counters:
        counters = self.status().counters
        assert counters
        return counters

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(ANSWER_TIMEOUT_S)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def networks() -> Iterator[None]:
    """Two network namespaces with one cable between them, and each with a loopback of its own."""
    try:
        for node in NODES:
            ip("netns", "add", node)
        ip(
            "link",
            "add",
            ENDS[0],
            "netns",
            NODES[0],
            "type",
            "veth",
            "peer",
            "name",
            ENDS[1],
            "netns",
            NODES[1],
        )
        for node, end, address in zip(NODES, ENDS, ADDRESSES, strict=True):
            ip("-n", node, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", node, "link", "set", end, "up")
            ip("-n", node, "link", "set", "lo", "up")
        yield
    finally:
        for node in NODES:
            subprocess.run(["ip", "netns", "delete", node], check=False, capture_output=True)


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The nodes' runtime directories."""
    return [tmp_path_factory.mktemp("node") for _ in NODES]


@contextlib.contextmanager
def running(
    homes: Sequence[Path], model: Path, rendezvous: Any, **second: Any
) -> Iterator[list[Node]]:
    """Both nodes; `second` are more engine arguments of the second one."""
    engine = {"model": str(model)}
    nodes: list[Node] = []
    with contextlib.ExitStack() as stack:
        for rank, arguments in enumerate((engine, engine | second)):
            nodes.append(Node(rank, homes[rank], arguments, rendezvous))
            stack.callback(nodes[-1].close)
        yield nodes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model") / "m", tied=False, dtype="bfloat16")


@pytest.fixture(scope="module")
def hosts(networks: None, homes: list[Path]) -> Iterator[list[Engines]]:
    """A process in each network that runs its node's engines one after the other: it imports once."""
    found: list[Engines] = []
    with contextlib.ExitStack() as stack:
        for rank, module in enumerate(("host", "headless")):
            here = {
                "XDG_RUNTIME_DIR": str(homes[rank]), "VLLM_HOST_IP": ADDRESSES[rank], "GLOO_SOCKET_IFNAME": ENDS[rank],
                "VLLM_CPU_OMP_THREADS_BIND": str(rank), "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
            }  # fmt: skip
            command = [
                "ip",
                "netns",
                "exec",
                NODES[rank],
                sys.executable,
                "-m",
                f"tests.engine.{module}",
            ]
            found.append(Engines(os.environ | ENVIRONMENT | here, homes[rank] / "engines", command))
            stack.callback(found[-1].close)
            # With all that it started: a rank waits long for one that failed.
            stack.callback(killed_with_children, found[-1].process.pid)
        yield found


def killed_with_children(session: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)


def tokens_of_two_nodes(hosts: list[Engines], model: Path, *, fallback: bool = False) -> Any:
    """Start an engine with tensor-parallel ranks in both networks; its tokens."""
    engine = OVER_NODES | {
        "model": str(model), "master_port": ENGINE_PORT, "distributed_executor_backend": "mp",
        "load_format": "ipc_cache", "model_loader_extra_config": {"fallback": fallback},
    }  # fmt: skip
    # The last engine's ranks first: the next second rank must not meet the last first one.
    for host in reversed(hosts):
        host.ask(close=True)
    for rank, host in enumerate(hosts):
        host.send(engine=engine | {"node_rank": rank})
    answers: dict[str, Any] = {}
    # The first answer: one that fails leaves the other waiting.
    waiting: dict[Any, Engines] = {host.process.stdout: host for host in hosts}
    while waiting:
        said = select.select(list(waiting), [], [], ANSWER_TIMEOUT_S)[0]
        assert said, "\n".join(host.log()[-3000:] for host in hosts)
        for stdout in said:
            answer = (host := waiting.pop(stdout)).answer()
            assert "error" not in answer, answer["error"] + host.log()[-3000:]
            answers |= answer
    return answers["tokens"]


GROUP = {"group": f"{ADDRESSES[0]}:{PORT}", "timeout_s": MAX_TIMEOUT_S}


def test_engine_over_two_networks_decodes_as_one_rank_from_disk(
    hosts: list[Engines], homes: list[Path], model: Path
) -> None:
    """Tokens from solo loads, from group loads, and with one node without a daemon."""
    held = {}
    disk = hosts[0].tokens(model, **ALONE)
    assert len({tuple(tokens) for tokens in disk}) == len(disk), (
        "prompts that decode alike would hide wrong weights"
    )
    for name, rendezvous in (("solo", "solo"), ("group", GROUP)):
        with running(homes, model, rendezvous) as nodes:
            assert [node.outcome() for node in nodes] == ["ready", "ready"]
            held[name] = [node.digests() for node in nodes]
            assert tokens_of_two_nodes(hosts, model) == disk
            assert [node.engines() for node in nodes] == [[network] for network in NODES]
            assert [node.counters().attaches for node in nodes] == [{"m/target": 1}] * RANKS
            if name == "group":
                nodes[1].close()
                assert tokens_of_two_nodes(hosts, model, fallback=True) == disk
                assert nodes[0].engines() == []
                assert nodes[0].counters().fallbacks == {"another-rank": 1}
            for host in reversed(hosts):
                host.ask(close=True)
    assert held["solo"] == held["group"]
    assert held["solo"][0] != held["solo"][1], "ranks that hold the same would hide a wrong rank"


def test_two_nodes_that_disagree_are_both_refused(
    networks: None, homes: list[Path], model: Path
) -> None:
    with running(homes, model, GROUP, dtype="bfloat16") as nodes:
        said = [node.outcome() for node in nodes]
    there, here = "rank 1 (on another node)", "rank 1 (cpu0)"
    assert (
        f"m/target: the nodes disagree: on {there} engine.dtype is bfloat16, on rank 0 (cpu0) float32"
        in said[0]
    )
    assert f"on {here} engine.dtype is bfloat16, on rank 0 (on another node) float32" in said[1]
