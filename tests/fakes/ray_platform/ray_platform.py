"""A platform plug-in for vLLM: its CPU platform, with a Ray resource for each rank.

vLLM's own names none ("current platform cpu does not support ray"), so no rank could be placed. Ray
counts resources and does not look for them: a node says that it has one GPU.
"""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


def register() -> str:
    """What an entry point of the group vllm.platform_plugins answers: the class."""
    return "ray_platform.CpuOnRay"


class CpuOnRay(CpuPlatform):
    ray_device_key = "GPU"
