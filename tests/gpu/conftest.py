"""Tests that need an NVIDIA GPU. They are named on the command line and never skipped: without one they fail."""

from __future__ import annotations

import os
import warnings

import pytest

from weightcached.devices import list_gpus, visible_gpus

with warnings.catch_warnings():
    # Warnings are errors in our tests; those of torch's import are not ours.
    warnings.simplefilter("ignore")
    import torch


def visible() -> list[str]:
    """The GPUs that this process may use, in its order: with CUDA_VISIBLE_DEVICES two runs share a machine."""
    return visible_gpus(list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


@pytest.fixture(scope="session")
def gpu_uuid() -> str:
    """The first GPU that CUDA shows to this process, as weightcached names it."""
    if not torch.cuda.is_available():
        pytest.fail(
            f"tests/gpu need a GPU and a torch with CUDA, but torch {torch.__version__} finds none: see 'nvidia-smi'",
            pytrace=False,
        )
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"
