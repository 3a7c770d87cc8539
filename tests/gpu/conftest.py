"""Tests that need an NVIDIA GPU, named on the command line, never skipped: without it they fail."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator

import pytest

from bench.attach import Memory
from tests.engine.conftest import ENVIRONMENT, Engines, Service
from tests.systemd.manager import PrivateManager
from weightcached.system.gpus import list_gpus, visible_gpus

with warnings.catch_warnings():
    # Warnings are errors in our tests; those of torch's import are not ours.
    warnings.simplefilter("ignore")
    import torch


def visible() -> list[str]:
    """The GPUs of this process, in order: with CUDA_VISIBLE_DEVICES two runs share a machine."""
    return visible_gpus(list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


FREED_TIMEOUT_S = 20.0


@pytest.fixture(scope="session")
def gpu_uuid() -> str:
    """The first GPU that CUDA shows to this process, as weightcached names it."""
    if not torch.cuda.is_available():
        pytest.fail(
            f"tests/gpu need a GPU and a torch with CUDA, but torch {torch.__version__} finds none: see 'nvidia-smi'",
            pytrace=False,
        )
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


@pytest.fixture(scope="module")
def device() -> str:
    return visible()[0]


@pytest.fixture(scope="module")
def memory(device: str) -> Memory:
    return Memory(device)


@pytest.fixture(scope="module")
def manager() -> Iterator[PrivateManager]:
    """A user manager of these tests; its units see no FlashInfer."""
    with PrivateManager(ENVIRONMENT | {"VLLM_USE_FLASHINFER_SAMPLER": "0"}) as manager:
        yield manager


@pytest.fixture(scope="module")
def engines(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """The process of the module's engines; `service` is the module's own."""
    engines = Engines(service.env, tmp_path_factory.mktemp("engines") / "log")
    yield engines
    engines.close()


def settled(memory: Memory) -> int:
    """Used bytes once they are stable: the driver frees a process's memory a little later."""
    deadline_s = time.monotonic() + FREED_TIMEOUT_S
    last = -1
    while time.monotonic() < deadline_s:
        with contextlib.suppress(Exception):
            now = memory.used()
            if now == last:
                return now
            last = now
        time.sleep(1.0)
    return last
