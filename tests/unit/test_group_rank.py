"""Ranks that meet over a real store: late ones, failing ones, other configurations."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes.daemon import BOUND_S, free_port
from weightcached.errors import LoadError, ManifestError
from weightcached.vllm_compat.group_rank import Peers, _interface_of
from weightcached.wire.loader_job import LoaderJob, Meeting


@pytest.fixture
def port() -> int:
    return free_port()


def peers(
    rank: int,
    port: int,
    *,
    timeout_s: int = int(BOUND_S),
    nodes: int = 1,
    host: str = "127.0.0.1",
    waiting: Callable[[], Any] = lambda: None,
) -> Peers:
    """One of two ranks, on one node or each on its own."""
    engine: dict[str, Any] = {"model": "m", "tensor_parallel_size": 2}
    if nodes == 2:
        engine |= {"nnodes": 2, "node_rank": rank}
    devices = ["cpu0", "cpu1"] if nodes == 1 else ["cpu0"]
    job = LoaderJob(
        device="cpu0", cache="m/target", role="target", generation=1, spec_digest="", engine=engine, rank=rank,
        boot_id="", socket_fd=0,
    )  # fmt: skip
    return Peers(job, Meeting(host=host, port=port, timeout_s=timeout_s, devices=devices), waiting)


def both(act: Callable[[int], Any]) -> list[Any]:
    """The result or the error of each of two ranks."""
    results: list[Any] = [None, None]

    def run(rank: int) -> None:
        try:
            results[rank] = act(rank)
        except Exception as e:
            results[rank] = e

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()
    return results


def test_every_rank_hears_what_all_said(port: int) -> None:
    kept = []

    def meet(rank: int) -> Any:
        rank_of_world = peers(rank, port)
        # The rank that serves the store stays until the other has read it all, as a loader that
        # packs.
        kept.append(rank_of_world)
        return rank_of_world.meet("here", f"I am {rank}")

    assert both(meet) == [["I am 0", "I am 1"]] * 2


def test_rank_0_stays_until_a_slow_rank_has_seen_that_all_were_there(port: int) -> None:
    looks_again = threading.Event()

    def part(rank: int) -> bool:
        # Rank 1 comes first, and is held up before it looks again for rank 0.
        is_slow = threading.Event()
        rank_of_world = peers(rank, port, waiting=lambda: is_slow.is_set() and looks_again.wait())
        if rank == 1:
            is_slow.set()
        else:
            while not rank_of_world.store.check(["loaded/1"]):
                time.sleep(0.01)
            threading.Timer(0.5, looks_again.set).start()
        rank_of_world.part("loaded")
        return looks_again.is_set()

    assert both(part) == [True, True]


def test_rank_that_does_not_come_is_named_with_its_device(port: int) -> None:
    first = peers(0, port, timeout_s=1)
    with pytest.raises(LoadError) as caught:
        first.meet("configured")
    assert str(caught.value) == (
        f"m/target: waited 1 s at 127.0.0.1:{port} for rank 1 (cpu1) to be configured: are their units started, and "
        "with this model in their manifest? 'systemctl --user status weightcached.target'; on another node, ranks that "
        "serve already come with 'weightcachectl reload --force --cache m/target'"
    )


def test_rank_of_another_node_is_named_as_such(port: int) -> None:
    with pytest.raises(LoadError, match=re.escape("for rank 1 (on another node) to be loaded: ")):
        peers(0, port, timeout_s=1, nodes=2).meet("loaded")


def test_first_rank_that_does_not_listen_is_named(port: int) -> None:
    with pytest.raises(LoadError) as caught:
        peers(1, port, timeout_s=1)
    assert str(caught.value) == (
        f"m/target: waited 1 s for rank 0 (cpu0) to listen on 127.0.0.1:{port} ([Errno 111] Connection refused): is "
        "its unit started, and with this model in its manifest?"
    )


def test_port_that_is_taken_is_said_at_once(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)), pytest.raises(LoadError) as caught:
        peers(0, port)
    assert str(caught.value) == (
        f"m/target: rank 0 cannot listen on 127.0.0.1:{port}: Address already in use; rendezvous in the manifest must "
        "name an address of this node, and a port that nobody uses"
    )


def test_address_of_another_node_is_said_at_once(port: int) -> None:
    said = f"rank 0 cannot listen on 192.0.2.1:{port}: Cannot assign requested address; "
    with pytest.raises(LoadError, match=re.escape(said)):
        peers(0, port, host="192.0.2.1")


def test_place_is_open_on_its_address_alone(port: int) -> None:
    peers(0, port)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=BOUND_S)


def test_nodes_that_disagree_are_both_refused_with_both_values(port: int) -> None:
    values = [
        {"engine.dtype": "auto", "vLLM": "0.33.0"},
        {"engine.dtype": "half", "vLLM": "0.33.0"},
    ]
    errors = both(lambda rank: peers(rank, port, nodes=2).agree("configured", values[rank]))
    assert [type(error) for error in errors] == [ManifestError] * 2
    assert str(errors[0]) == (
        "m/target: the nodes disagree: on rank 1 (on another node) engine.dtype is half, on rank 0 (cpu0) auto: make "
        "their manifests and software equal, then 'weightcachectl reload' on each"
    )
    assert "on rank 1 (cpu0) engine.dtype is half, on rank 0 (on another node) auto" in str(
        errors[1]
    )


def test_rank_that_fails_ends_the_wait_of_the_others(port: int) -> None:
    def act(rank: int) -> Any:
        mine = peers(rank, port)
        mine.meet("configured")
        if rank == 1:
            mine.fail(LoadError("no room"))
            return None
        try:
            return mine.meet("loaded")
        except LoadError as e:
            mine.fail(e)
            raise

    waited, _ = both(act)
    assert str(waited) == "m/target: rank 1 (cpu1) failed: no room"


def test_first_rank_that_dies_is_named(port: int) -> None:
    first, second = both(lambda rank: peers(rank, port))
    del first.store
    with pytest.raises(LoadError) as caught:
        second.meet("loaded")
    assert str(caught.value) == (
        f"m/target: rank 0 (cpu0), which serves 127.0.0.1:{port}, went away: its unit's log says why"
    )


def test_interface_is_found_by_its_address() -> None:
    assert _interface_of("127.0.0.1") == "lo"
    assert _interface_of("192.0.2.1") is None
