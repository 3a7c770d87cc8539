"""The plug-in in a process with real vLLM, against a real daemon, on a device whose memory the test
defines: one question and one answer per line.

    {"options": {…}, "total": 100, "free": 80, "utilization": 0.92, "directory": "…", "remembered": {}}

The last two make it an engine of a service, which remembers what an equal one measured.
An engine starts on a GPU with these numbers, up to vLLM's own check of its memory (request_memory).
The answer has the bytes that vLLM gave it, the log, and the error that ended it. The CPU's workers
have no such check.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.engine.answers import open_channel
from tests.engine.fallbacks import Process


def start(process: Process, question: dict[str, Any]) -> dict[str, Any]:
    from vllm.v1.worker.utils import request_memory

    from weightcache_loader import holds
    from weightcached.vllm_compat import build, first_start

    free, total = question["free"], question["total"]
    cache_config = process.config.cache_config
    began = time.monotonic()
    process.log.clear()
    answer: dict[str, Any] = {}
    with (
        mock.patch.object(build, "device_memory", return_value=(free, total)),
        mock.patch.object(cache_config, "gpu_memory_utilization", question["utilization"]),
        mock.patch.object(cache_config, "kv_cache_memory_bytes", None),
        mock.patch.object(process.config, "instance_id", str(began)),
        # The weights have a few MiB.
        mock.patch.object(first_start, "_SLACK_BYTES", 64 << 10),
        mock.patch.dict(os.environ),
    ):
        if "directory" in question:
            first_start.begin(question["directory"], question["remembered"])
        try:
            loader = process.loader(question["options"])
            external = loader.get_external_weight_memory(process.config)
            snapshot: Any = SimpleNamespace(
                total_memory=total, free_memory=free, device_=SimpleNamespace(index=0)
            )
            answer["external"] = external
            answer["requested"] = request_memory(snapshot, cache_config, external)
            answer["kv_cache_bytes"] = cache_config.kv_cache_memory_bytes
        except Exception as e:
            answer["error"] = [type(e).__name__, str(e)]
    # A worker does that once it has captured its graphs.
    holds.end()
    return answer | {"log": list(process.log), "seconds": time.monotonic() - began}


def main() -> None:
    """Answer questions until standard input ends. The argument is a checkpoint."""
    say = open_channel()
    torch.set_num_threads(1)
    from weightcached.vllm_compat.solo_rank import solo_rank

    process = Process(sys.argv[1])
    with solo_rank(process.config, 0):
        for line in sys.stdin:
            say(start(process, json.loads(line)), process.directory)
    shutil.rmtree(process.directory)
    os._exit(0)


if __name__ == "__main__":
    main()
