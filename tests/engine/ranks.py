"""One of two tensor-parallel ranks: real vLLM groups over gloo, the plug-in, and a scripted daemon
of this rank's own.

    python -m tests.engine.ranks RANK STORE CHECKPOINT

{"case": name, "options": {…}}: bring about one of fallbacks.CASES, or "ready", on this rank; then both questions.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import zlib
from collections.abc import Iterator

from tests.engine.answers import open_channel
from tests.engine.fallbacks import CASES, Process, daemon, handing_out, mapping_is_told

WORLD_SIZE = 2


@contextlib.contextmanager
def brought_about(process: Process, case: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(mapping_is_told(process))
        stack.enter_context(
            daemon(handing_out())(process) if case == "ready" else CASES[case](process)
        )
        yield


def main() -> None:
    """Answer questions until standard input ends."""
    say = open_channel()
    rank, store, model = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    # vLLM's workers agree on this; it names the memory that its own collectives share.
    os.environ["VLLM_DIST_IDENT"] = str(zlib.crc32(store.encode()))
    process = Process(model, rank_here=rank, world_size=WORLD_SIZE)

    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(process.config):
        parallel_state.init_distributed_environment(
            WORLD_SIZE, rank, f"file://{store}", rank, "gloo"
        )
        parallel_state.ensure_model_parallel_initialized(WORLD_SIZE, 1, backend="gloo")
        for line in sys.stdin:
            question = json.loads(line)
            with brought_about(process, question["case"]):
                answer = process.load(question["options"])
            say(answer, process.directory)
    os._exit(0)


if __name__ == "__main__":
    main()
