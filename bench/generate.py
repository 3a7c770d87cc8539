"""Start one engine, decode greedily, print one JSON line: tokens, and how long load and start took.

    python bench/generate.py MODEL --load-format ipc_cache --engine '{"tensor_parallel_size": 2}'

With --serve, the engine stays: each line on standard input is a request for one more round of the same prompts.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

PROBE = Path(__file__).resolve().parent / "probe"


def prompts(count: int, vocab: int) -> list[dict[str, list[int]]]:
    """The same `count` prompts of 8 token ids every time."""
    return [{"prompt_token_ids": [(i * 37 + j * 11) % (vocab - 8) + 3 for j in range(8)]} for i in range(count)]


@click.command()
@click.argument("model")
@click.option("--load-format", default="auto", show_default=True)
@click.option("--engine", "engine_json", default="{}", help="More engine arguments, as JSON.")
@click.option("--prompts", "count", default=4, show_default=True)
@click.option("--tokens", default=32, show_default=True)
@click.option("--serve", is_flag=True, help="Answer each line on standard input with another JSON line.")
def main(model: str, load_format: str, engine_json: str, count: int, tokens: int, serve: bool) -> None:
    """Decode greedily with MODEL and print the tokens."""
    began = time.time()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PROBE), *filter(None, [os.environ.get("PYTHONPATH")])])
    sys.path.insert(0, str(PROBE))
    with tempfile.NamedTemporaryFile(prefix="weightcached-probe-", suffix=".jsonl") as probe:
        os.environ["WEIGHTCACHED_PROBE"] = probe.name
        from vllm import LLM, SamplingParams

        arguments: dict[str, Any] = {"max_model_len": 512, "skip_tokenizer_init": True, **json.loads(engine_json)}
        llm = LLM(model=model, load_format=load_format, **arguments)
        sampling = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True)
        vocab = llm.llm_engine.model_config.get_vocab_size()

        def decode() -> list[list[int]]:
            outputs = llm.generate(prompts(count, vocab), sampling, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs]

        first = decode()
        loads = [json.loads(line) for line in Path(probe.name).read_text(encoding="utf-8").splitlines()]
        result = {
            "tokens": first,
            "loads": loads,
            "start_seconds": time.time() - began,
            "kv_blocks": llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
        }
        print(json.dumps(result), flush=True)
        if serve:
            for _ in sys.stdin:
                print(json.dumps({"tokens": decode()}), flush=True)


if __name__ == "__main__":
    main()
