"""Real vLLM engines of several ranks, as `vllm serve` has them: every replica and every rank is a
process of its own.

Reads one JSON object per line on standard input, {"engine": {…}}, and answers with one line that begins with "ANSWER ":
{"tokens": [by replica, by prompt]} or {"error": "…"}. Prompts run one by one, so that no batch differs from another's.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from bench.generate import prompts
from tests.engine.answers import open_channel
from tests.engine.forking import fork_workers

PROMPTS, TOKENS = 3, 16


async def decode(llm: Any, replicas: int) -> list[list[list[int]]]:
    """The tokens of each replica."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, detokenize=False, ignore_eos=True)
    vocab = llm.model_config.get_vocab_size()
    found: list[list[list[int]]] = []
    for replica in range(replicas):
        found.append([])
        for number, prompt in enumerate(prompts(PROMPTS, vocab)):
            name = f"{replica}-{number}"
            async for output in llm.generate(
                prompt, sampling, request_id=name, data_parallel_rank=replica
            ):
                tokens = list(output.outputs[0].token_ids)
            found[-1].append(tokens)
    return found


async def answer(engine: dict[str, Any]) -> dict[str, Any]:
    """One engine from start to end."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    fixed = {
        "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 256,
        "worker_extension_cls": "tests.engine.cpu_workers.Extension",
    }  # fmt: skip
    try:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**fixed, **engine))
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}"}
    try:
        return {"tokens": await decode(llm, engine.get("data_parallel_size", 1))}
    finally:
        llm.shutdown()


def main() -> None:
    """Answer until standard input ends."""
    say = open_channel()
    fork_workers()
    for line in sys.stdin:
        say(asyncio.run(answer(json.loads(line)["engine"])))


if __name__ == "__main__":
    main()
