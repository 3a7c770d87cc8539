"""Engines whose ranks are Ray actors, one after the other, over a Ray of two nodes on this machine.

    python -m tests.engine.ray_host HOME HOME

Each node has one rank, and XDG_RUNTIME_DIR from the command line, as a machine of its own would.
Commands and answers: host.py.
"""

from __future__ import annotations

import json
import os
import sys

import ray
from ray.cluster_utils import Cluster

from tests.engine.answers import open_channel
from tests.engine.host import Host


class RayHost(Host):
    def close(self) -> None:
        super().close()
        # An engine keeps its place in Ray as long as its driver is there.
        ray.shutdown()


def main() -> None:
    say = open_channel()
    cluster = Cluster()
    for number, home in enumerate(sys.argv[1:]):
        here = {"XDG_RUNTIME_DIR": home, "VLLM_CPU_OMP_THREADS_BIND": str(number)}
        cluster.add_node(num_cpus=1, num_gpus=1, env_vars=here)
    os.environ["RAY_ADDRESS"] = cluster.address
    # Engine core and client in this process, as in host.py; the ranks are actors in any case.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    host = RayHost()
    for line in sys.stdin:
        command = json.loads(line)
        say(host.answer(command) | {"number": command["number"]})
    host.close()
    cluster.shutdown()
    # Not through the interpreter's shutdown: vLLM's threads take their time there.
    os._exit(0)


if __name__ == "__main__":
    main()
