"""The loaders of one model's ranks in one world, for loaders that need their peers.

The ranks meet at a store that rank 0 serves on the manifest's address. Before they build anything
they compare their configurations, afterwards their keys. Every wait is bounded and names the
missing rank. A rank that fails tells the others. Only for trusted networks: as among an engine's
ranks, nothing is authenticated.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed

from weightcached import __version__
from weightcached.config.ranks import layout_of
from weightcached.errors import LoadError, ManifestError
from weightcached.index.key import WeightCacheKey
from weightcached.wire.loader_job import LoaderJob, Meeting

log = logging.getLogger("weightcached.loader")

_POLL_S = 0.1
_CONNECT_TIMEOUT_S = 5.0
# What rank 0 waits for the others to leave before its store goes: a rank that only has to look once
# more may be slow on a busy machine, one that failed or was killed never comes.
_PART_TIMEOUT_S = 30.0
_FAIL_TIMEOUT_S = 5.0
_SIOCGIFADDR = 0x8915
# Arguments that may differ among the nodes of one model: a node's place and its directories.
_OF_A_NODE = frozenset(
    {
        "node_rank", "data_parallel_rank", "data_parallel_start_rank", "data_parallel_size_local", "model", "tokenizer",
        "download_dir", "hf_config_path", "speculative_config",
    }
)  # fmt: skip
_OF_A_RANK = frozenset({"tp_rank", "pp_rank", "dp_rank", "ep_rank", "checkpoint"})


class Peers:
    """All ranks of one cache at their meeting place. Each wait calls `waiting` now and then."""

    def __init__(self, job: LoaderJob, meeting: Meeting, waiting: Callable[[], None]) -> None:
        layout = layout_of(job.engine)
        self._meeting = meeting
        self._waiting = waiting
        self._first_here = layout.first_rank
        self._cache = job.cache
        self.count = layout.replica_ranks * layout.dp_size
        self.rank = job.dp_rank * layout.replica_ranks + job.rank
        self._place = f"{meeting.host}:{meeting.port}"
        # For the connection and the first meeting together.
        self._deadline_s = time.monotonic() + meeting.timeout_s
        self.store = self._serve() if self.rank == 0 else self._connect()

    def name(self, rank: int) -> str:
        """A rank for a message, with its device if that is on this node."""
        here = rank - self._first_here
        devices = self._meeting.devices
        return f"rank {rank} ({devices[here] if 0 <= here < len(devices) else 'on another node'})"

    def meet(self, stage: str, said: str = "") -> list[str]:
        """Wait until every rank is at this stage; the ranks' messages, by rank.

        Raises LoadError naming the ranks that did not come, or the one that failed.
        """
        deadline_s, self._deadline_s = (
            self._deadline_s or time.monotonic() + self._meeting.timeout_s,
            0.0,
        )
        with self._explain_loss():
            self.store.set(f"{stage}/{self.rank}", said)
            missing = list(range(self.count))
            while missing := [
                rank for rank in missing if not self.store.check([f"{stage}/{rank}"])
            ]:
                if self.store.check(["failed"]):
                    raise LoadError(f"{self._cache}: {self.store.get('failed').decode()}")
                if time.monotonic() > deadline_s:
                    raise self._timeout_error(stage, missing)
                self._waiting()
                time.sleep(_POLL_S)
            return [self.store.get(f"{stage}/{rank}").decode() for rank in range(self.count)]

    def part(self, stage: str) -> None:
        """Meet for the last time. Rank 0 then stays until the others have seen that all were there:
        its store ends with its process, which may be done before a slow rank looks again.
        """
        self.meet(stage)
        with self._explain_loss():
            self._leave(_PART_TIMEOUT_S)

    def agree(self, stage: str, values: dict[str, Any]) -> None:
        """Compare values by name with rank 0's. If any differ, every rank raises ManifestError."""
        said = [
            json.loads(text)
            for text in self.meet(stage, json.dumps(values, sort_keys=True, default=str))
        ]
        for rank, theirs in enumerate(said):
            names = sorted(
                name for name in said[0] | theirs if said[0].get(name) != theirs.get(name)
            )
            if names:
                differences = "; ".join(
                    f"{name} is {_shorten(theirs.get(name))}, on {self.name(0)} {_shorten(said[0].get(name))}"
                    for name in names
                )
                raise ManifestError(
                    f"{self._cache}: the nodes disagree: on {self.name(rank)} {differences}: make their manifests and "
                    "software equal, then 'weightcachectl reload' on each"
                )

    def fail(self, error: BaseException) -> None:
        """Tell the others. If the store ends with this process, give them a moment to read that."""
        with suppress(RuntimeError):
            if not self.store.check(["failed"]):
                self.store.set("failed", f"{self.name(self.rank)} failed: {error}"[:4000])
            self._leave(_FAIL_TIMEOUT_S)

    def _leave(self, timeout_s: float) -> None:
        self.store.set(f"left/{self.rank}", "")
        deadline_s = time.monotonic() + timeout_s
        others = [f"left/{rank}" for rank in range(self.count) if rank != self.rank]
        while self.rank == 0 and not self.store.check(others) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)

    def _timeout_error(self, stage: str, missing: list[int]) -> LoadError:
        names = ", ".join(self.name(rank) for rank in missing)
        return LoadError(
            f"{self._cache}: waited {self._meeting.timeout_s} s at {self._place} for {names} to be {stage}: are their "
            "units started, and with this model in their manifest? 'systemctl --user status weightcached.target'; on "
            f"another node, ranks that serve already come with 'weightcachectl reload --force --cache {self._cache}'"
        )

    @contextmanager
    def _explain_loss(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:
            raise LoadError(
                f"{self._cache}: {self.name(0)}, which serves {self._place}, went away: its unit's log says why"
            ) from e

    def _serve(self) -> Any:
        family = socket.AF_INET6 if ":" in self._meeting.host else socket.AF_INET
        try:
            # On this address alone; the store by itself would listen on all.
            listener = socket.create_server(
                (self._meeting.host, self._meeting.port), family=family, backlog=128
            )
        except OSError as e:
            reason = e.strerror if isinstance(e, socket.gaierror) else os.strerror(e.errno or 0)
            raise LoadError(
                f"{self._cache}: rank 0 cannot listen on {self._place}: {reason}; rendezvous in the manifest must name "
                "an address of this node, and a port that nobody uses"
            ) from e
        return self._store(
            master=True, listener=listener.detach(), timeout_s=self._meeting.timeout_s
        )

    def _connect(self) -> Any:
        while True:
            try:
                socket.create_connection(
                    (self._meeting.host, self._meeting.port), timeout=_CONNECT_TIMEOUT_S
                ).close()
                return self._store(master=False, listener=None, timeout_s=_CONNECT_TIMEOUT_S)
            except (OSError, RuntimeError) as e:
                if time.monotonic() > self._deadline_s:
                    raise LoadError(
                        f"{self._cache}: waited {self._meeting.timeout_s} s for {self.name(0)} to listen on "
                        f"{self._place} ({e}): is its unit started, and with this model in its manifest?"
                    ) from e
            self._waiting()
            time.sleep(_POLL_S)

    def _store(self, *, master: bool, listener: int | None, timeout_s: float) -> Any:
        return torch.distributed.TCPStore(
            self._meeting.host, self._meeting.port, None, is_master=master, timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False, master_listen_fd=listener,
        )  # fmt: skip


def _shorten(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def comparable(key: WeightCacheKey) -> dict[str, Any]:
    """The part of the key that must be equal for all ranks of one model."""
    fields = msgspec.to_builtins(key)
    same = {name: value for name, value in fields.items() if name not in _OF_A_RANK}
    return same | {"checkpoint": key.checkpoint.sample}


@contextmanager
def group_rank(
    vllm_config: Any, job: LoaderJob, meeting: Meeting, waiting: Callable[[], None]
) -> Iterator[Peers]:
    """vLLM's groups over real peers, for the time of the block.

    Raises LoadError for a peer that does not come or fails, ManifestError for a peer with another
    configuration.
    """
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.platforms import current_platform

    peers = Peers(job, meeting, waiting)
    try:
        peers.agree("configured", _hello(job))
        _prefer_interface(meeting)
        parallel, backend = vllm_config.parallel_config, current_platform.dist_backend
        with ExitStack() as stack:
            stack.callback(parallel_state.destroy_distributed_environment)
            stack.callback(parallel_state.destroy_model_parallel)
            torch.distributed.init_process_group(
                backend,
                store=torch.distributed.PrefixStore(f"world{_replica(parallel, job)}", peers.store),
                rank=parallel.data_parallel_rank * parallel.world_size + job.rank,
                world_size=parallel.world_size_across_dp,
                timeout=timedelta(seconds=meeting.timeout_s),
            )
            parallel_state.set_custom_all_reduce(False)
            with (
                set_current_vllm_config(vllm_config),
                _quiet_groups(parallel_state, parallel.nnodes),
            ):
                parallel_state.init_distributed_environment(
                    parallel.world_size, job.rank, "tcp://127.0.0.1:1", 0, backend
                )
                parallel_state.ensure_model_parallel_initialized(
                    parallel.tensor_parallel_size,
                    parallel.pipeline_parallel_size,
                    parallel.prefill_context_parallel_size,
                    parallel.decode_context_parallel_size,
                    backend=backend,
                )
            with set_current_vllm_config(vllm_config):
                yield peers
    except BaseException as e:
        peers.fail(e)
        raise


def _replica(parallel: Any, job: LoaderJob) -> int:
    # Replicas of a dense model meet at one place, and are a world each.
    return 0 if parallel.data_parallel_size > 1 else job.dp_rank


def _hello(job: LoaderJob) -> dict[str, Any]:
    import vllm

    arguments = {
        f"engine.{name}": value for name, value in job.engine.items() if name not in _OF_A_NODE
    }
    return arguments | {
        "cache": job.cache,
        "weightcached": __version__,
        "vLLM": vllm.__version__,
        "torch": str(torch.__version__),
    }


def _prefer_interface(meeting: Meeting) -> None:
    """Use the interface of the meeting place; gloo's default is that of this machine's name."""
    family = socket.AF_INET6 if ":" in meeting.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((meeting.host, meeting.port))
        address = probe.getsockname()[0]
    name = _interface_of(address) if family == socket.AF_INET else None
    if name is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, name)


def _interface_of(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                reply = fcntl.ioctl(
                    probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode())
                )
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return None


@contextmanager
def _quiet_groups(parallel_state: Any, nnodes: int) -> Iterator[None]:
    """Make no queues for broadcasting an engine's work: shared memory that no loader needs."""
    make = parallel_state.init_model_parallel_group

    def without_queue(*args: Any, **kwargs: Any) -> Any:
        return make(*args, **(kwargs | {"use_message_queue_broadcaster": False}))

    # Ranks with different names do without shared memory in their collectives.
    with (
        mock.patch.object(parallel_state, "init_model_parallel_group", without_queue),
        mock.patch.object(parallel_state, "_node_count", return_value=nnodes),
        mock.patch.dict(os.environ, {"VLLM_DIST_IDENT": str(os.getpid())}),
    ):
        yield
