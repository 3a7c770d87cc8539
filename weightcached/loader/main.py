"""The loader child's life: read the job, make vLLM's configuration, load, exit. The stages of a
load are stages.py's.

Started by the daemon with the interpreter of the model's engine. Its job comes as JSON on standard
input, its messages go over the inherited socket, its log to standard error. A failure is sent as
LoaderFailed and ends the process with status 1, or 78 if a retry is pointless; the daemon drops an
incomplete delivery.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from weightcached.errors import (
    SegmentError,
    WeightcachedError,
)
from weightcached.segments.api import Backend, open_backend
from weightcached.system.gpus import check_present
from weightcached.system.paths import is_host_device
from weightcached.wire.delivery import DaemonChannel, run_job
from weightcached.wire.loader_job import LoaderJob

if TYPE_CHECKING:
    from weightcached.vllm_compat.group_rank import Peers

log = logging.getLogger("weightcached.loader")

# As it was given: vLLM sets variables of its own.
_ENVIRONMENT = dict(os.environ)


def main() -> None:
    """Run the job on standard input and exit."""
    run_job(_run)


def _run(job: LoaderJob, daemon: DaemonChannel) -> None:
    daemon.phase("configuring")
    # Imports make objects by the million and no garbage: looking for it is a quarter of their time.
    gc.disable()
    # A context takes device memory, which is for the load whose turn it is.
    backend = None if job.waits else _open(job.device)
    # Before vLLM's imports, which take seconds: a missing checkpoint fails at once.
    _check_checkpoint(job)
    daemon.phase("importing")
    import torch

    from weightcached.loader.stages import Load
    from weightcached.segments.cuda import CudaBackend
    from weightcached.vllm_compat import solo_rank

    daemon.phase("configuring")
    vllm_config = solo_rank.create_vllm_config(job)
    vllm_config, model_config = solo_rank.configs_of(vllm_config, job.role)
    if vllm_config.device_config.device_type != ("cpu" if is_host_device(job.device) else "cuda"):
        raise WeightcachedError(
            f"{job.cache}: the vLLM of {sys.executable} runs on {vllm_config.device_config.device_type}, "
            f"the device is {job.device}"
        )
    gc.freeze()
    gc.enable()
    if backend is None:
        daemon.wait_for_turn()
        backend = _open(job.device)
    if isinstance(backend, CudaBackend):
        torch.cuda.set_device(0)
        if (warning := backend.persistence_warning()) is not None:
            log.warning("%s", warning)
    with _rank_of(job, daemon, vllm_config) as peers:
        solo_rank.init_workspace(vllm_config)
        configs = vllm_config, model_config
        Load(job, daemon, backend, *configs, environment=_ENVIRONMENT, peers=peers).run()


@contextmanager
def _rank_of(job: LoaderJob, daemon: DaemonChannel, vllm_config: Any) -> Iterator[Peers | None]:
    """vLLM's groups for this rank: with its peers if they meet, else with stand-ins."""
    from weightcached.vllm_compat import group_rank, solo_rank

    if job.rendezvous is None:
        with solo_rank.solo_rank(vllm_config, job.rank):
            yield None
        return
    daemon.phase("meeting")
    with group_rank.group_rank(
        vllm_config, job, job.rendezvous, lambda: daemon.progress(0, 0)
    ) as peers:
        yield peers


def _open(device: str) -> Backend:
    try:
        return open_backend(device)
    except SegmentError:
        # CUDA says the same of a name that no GPU has and of a driver that finds none, which may
        # come back.
        check_present(device)
        raise


def _check_checkpoint(job: LoaderJob) -> None:
    from weightcached.checkpoint.identity import check_headers, record_checkpoint
    from weightcached.config.drafts import checkpoint_arguments
    from weightcached.config.manifest import check_checkpoint

    check_checkpoint(job.engine)
    arguments = checkpoint_arguments(job.engine, job.role)
    if os.path.isdir(arguments["model"]) and arguments["load_format"] in (
        "auto",
        "hf",
        "safetensors",
    ):
        check_headers(record_checkpoint(**arguments))
