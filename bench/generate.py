"""Start engines, decode greedily, print one JSON line for each: tokens, and how long load and start
took.

    python bench/generate.py MODEL --load-format ipc_cache --engine '{"tensor_parallel_size": 2}'

With --serve the engine stays, and each line on standard input asks for more: an empty line for one
more round of the same prompts, {"load_format": …, "engine": {…}} for a new engine in place of the
old one. Engines of one process share its imports; their first answer's `start_seconds` counts from
the start of the process, the others' from the request.
"""

from __future__ import annotations

import gc
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
    return [
        {"prompt_token_ids": [(i * 37 + j * 11) % (vocab - 8) + 3 for j in range(8)]}
        for i in range(count)
    ]


class Decoder:
    """At most one engine at a time, over one model."""

    def __init__(self, model: str, count: int, tokens: int, probe: Path) -> None:
        self._model = model
        self._count = count
        self._tokens = tokens
        self._probe = probe
        self._llm: Any = None

    def start(self, load_format: str, arguments: dict[str, Any], began: float) -> dict[str, Any]:
        """A new engine; its first answer."""
        from vllm import LLM

        self.close()
        self._probe.write_text("", encoding="utf-8")
        defaults: dict[str, Any] = {"max_model_len": 512, "skip_tokenizer_init": True}
        self._llm = LLM(model=self._model, load_format=load_format, **(defaults | arguments))
        tokens = self.decode()
        return {
            "tokens": tokens,
            "start_seconds": time.time() - began,
            "loads": [
                json.loads(line) for line in self._probe.read_text(encoding="utf-8").splitlines()
            ],
            "kv_blocks": self._llm.llm_engine.vllm_config.cache_config.num_gpu_blocks,
        }

    def decode(self) -> list[list[int]]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=self._tokens, temperature=0, detokenize=False, ignore_eos=True
        )
        vocab = self._llm.llm_engine.model_config.get_vocab_size()
        outputs = self._llm.generate(prompts(self._count, vocab), sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        """End the engine and free its memory."""
        if self._llm is None:
            return
        import torch

        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


@click.command()
@click.argument("model")
@click.option("--load-format", default="auto", show_default=True)
@click.option("--engine", "engine_json", default="{}", help="More engine arguments, as JSON.")
@click.option("--prompts", "count", default=4, show_default=True)
@click.option("--tokens", default=32, show_default=True)
@click.option(
    "--serve", is_flag=True, help="Answer each line on standard input with another JSON line."
)
def main(
    model: str, load_format: str, engine_json: str, count: int, tokens: int, serve: bool
) -> None:
    """Decode greedily with MODEL and print the tokens."""
    began = time.time()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(PROBE), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    sys.path.insert(0, str(PROBE))
    with tempfile.NamedTemporaryFile(prefix="weightcached-probe-", suffix=".jsonl") as probe:
        os.environ["WEIGHTCACHED_PROBE"] = probe.name
        decoder = Decoder(model, count, tokens, Path(probe.name))
        _print(decoder.start(load_format, json.loads(engine_json), began))
        if serve:
            for line in sys.stdin:
                if line.strip():
                    request = json.loads(line)
                    _print(decoder.start(request["load_format"], request["engine"], time.time()))
                else:
                    _print({"tokens": decoder.decode()})


def _print(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
