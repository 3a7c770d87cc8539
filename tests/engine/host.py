"""Real vLLM engines in one process, one after the other: imports are paid once.

Reads one JSON command per line on standard input and answers with one line that begins with "ANSWER
".

    {"engine": {…LLM arguments…}, "prompts": 4, "tokens": 32}    start an engine, decode, keep it; with "alone": true
                                                                 one prompt after the other instead of one batch,
                                                                 with "only": "start" nothing is decoded
    {"again": true}                                              decode once more with the engine that is kept
    {"call": "name"}                                             run one of CALLS on the engine that is kept
    {"operator": "name"}                                         whether vLLM has torch.ops._C.name here
    {"close": true}                                              end it

An engine that fails, when it starts or when it decodes, is an "error" in the answer.
The command's "number" comes back with the answer.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

from bench.generate import prompts
from tests.engine.answers import open_channel


class Host:
    """At most one engine."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.count = self.tokens = 0
        self.alone = False

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        if "engine" in command:
            return self.start(command)
        if "again" in command:
            return {"tokens": self.decode()}
        if "call" in command:
            return {"result": CALLS[command["call"]](self.llm)}
        if "operator" in command:
            return {"there": has_operator(command["operator"])}
        self.close()
        return {}

    def start(self, command: dict[str, Any]) -> dict[str, Any]:
        from vllm import LLM

        self.close()
        self.count, self.tokens = command.get("prompts", 4), command.get("tokens", 32)
        self.alone = command.get("alone", False)
        arguments = {
            "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 256,
            "distributed_executor_backend": "uni",
        }  # fmt: skip
        try:
            self.llm = LLM(**(arguments | command["engine"]))
            return {} if command.get("only") == "start" else {"tokens": self.decode()}
        except Exception as e:
            # Weights of the engine that failed hang in the traceback.
            return {"error": f"{type(e).__name__}: {e}"}
        finally:
            gc.collect()

    def decode(self) -> list[list[int]]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            max_tokens=self.tokens, temperature=0, detokenize=False, ignore_eos=True
        )
        vocab = self.llm.llm_engine.model_config.get_vocab_size()
        everything = prompts(self.count, vocab)
        batches = [[prompt] for prompt in everything] if self.alone else [everything]
        outputs = [
            o for batch in batches for o in self.llm.generate(batch, sampling, use_tqdm=False)
        ]
        return [list(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None:
        if self.llm is None:
            return
        import torch

        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()
        if torch.cuda.is_initialized():
            # The next engine finds the memory free.
            torch.cuda.empty_cache()


def has_operator(name: str) -> bool:
    """Whether vLLM's compiled library for this processor has it."""
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return hasattr(torch.ops._C, name)


def _worker(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def _model(llm: Any) -> Any:
    return _worker(llm).model_runner.model


def tied_objects(llm: Any) -> list[list[str]]:
    """Names of parameters that are one object, sorted."""
    names: dict[int, list[str]] = {}
    for name, parameter in _model(llm).named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def mapped_bytes(llm: Any) -> int:
    """Bytes of this process's mappings of segments."""
    total = 0
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            if "memfd:weightcached-segment" in line:
                begin, end = line.split()[0].split("-")
                total += int(end, 16) - int(begin, 16)
    return total


def reload_in_place(llm: Any) -> dict[str, Any]:
    """Build a second model, fill it with load_weights(), compare it with a load from disk."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from weightcached.vllm_compat.build import isolated_build

    config = llm.llm_engine.vllm_config
    loader = get_model_loader(config.load_config)
    disk = DefaultModelLoader(loader._disk_loader().load_config)
    device = torch.device(config.device_config.device)
    with set_current_vllm_config(config), isolated_build(config, keep=False):
        torch.set_default_dtype(config.model_config.dtype)
        with device:
            model = loader.create_model(config, config.model_config)
            config.compilation_config.static_forward_context.clear()
            other = disk.create_model(config, config.model_config)
        torch.set_default_dtype(torch.float32)
        addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
        loader.load_weights(model, config.model_config)
        disk.load_weights(other, config.model_config)
    ours, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    return {
        "names_equal": sorted(ours) == sorted(theirs),
        "bytes_equal": all(torch.equal(ours[name], theirs[name]) for name in theirs),
        "in_place": all(ours[name].data_ptr() == address for name, address in addresses.items()),
    }


def burst(llm: Any) -> int:
    """200 requests of 8 tokens at once; returns the tokens that came back."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
    vocab = llm.llm_engine.model_config.get_vocab_size()
    outputs = llm.generate(prompts(200, vocab), sampling, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def images(llm: Any) -> list[list[int]]:
    """What the model says to the same words with each of four images, one prompt after the other."""
    from PIL import Image
    from vllm import SamplingParams

    config = llm.llm_engine.model_config.hf_config
    side, token = config.vision_config.image_size, config.image_token_index
    sampling = SamplingParams(max_tokens=16, temperature=0, detokenize=False, ignore_eos=True)
    said = []
    for shade in range(4):
        pixels = bytes((x * (shade + 1) + shade * 60) % 256 for x in range(side * side * 3))
        prompt = {
            "prompt_token_ids": [token, *range(3, 11)],
            "multi_modal_data": {"image": Image.frombytes("RGB", (side, side), pixels)},
        }
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
        said.append(list(output.outputs[0].token_ids))
    return said


def speculation(llm: Any) -> dict[str, Any]:
    """Drafted and accepted tokens since the engine's start; needs disable_log_stats=False."""
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    metrics = {
        metric.name.removeprefix("vllm:spec_decode_"): metric for metric in llm.get_metrics()
    }
    return {name: metrics[name].value for name in names}


def draft(llm: Any) -> dict[str, Any]:
    """The draft's statement about its own weights, and which of them are the target's objects."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    runner = executor.driver_worker.worker.model_runner
    # The names of vLLM's two runners for it.
    model = (getattr(runner, "drafter", None) or runner.speculator).model
    target = _model(llm)
    flags = {
        name: getattr(model, name, None) for name in ("has_own_embed_tokens", "has_own_lm_head")
    }
    return flags | {
        "shares_embed_tokens": model.model.embed_tokens is target.model.embed_tokens,
        "shares_lm_head": getattr(model, "lm_head", None) is target.lm_head,
    }


def reload(llm: Any) -> str:
    """Have the workers read the weights again; the error's text, or ""."""
    return _error_of(lambda: llm.collective_rpc("reload_weights"))


def swap(llm: Any) -> Any:
    """Have the workers map the newest weights; what the first one says, or the error's text."""
    try:
        said = llm.collective_rpc("weightcached_swap")
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return said[0]


def prepare_swap(llm: Any) -> Any:
    (said,) = llm.collective_rpc("weightcached_prepare_swap")
    return said


def mapped_generations(llm: Any) -> dict[str, Any]:
    """By cache, the generation whose bytes are all mapped, by the digests in its index; "mixed" if
    some differ.
    """
    import xxhash

    from weightcached.model import mapped

    found: dict[str, Any] = {}
    for model in mapped.of_process():
        mapping: Any = model._mapping
        equal = all(
            xxhash.xxh3_128(mapping.read(s.segment, s.offset_bytes, s.nbytes)).digest() == s.digest
            for s in model.index.storages
        )
        found[model.cache] = model.ready.generation if equal else "mixed"
    return found


def generations_of_ranks(llm: Any) -> list[dict[str, Any]]:
    """mapped_generations() of each worker process."""
    found: list[dict[str, Any]] = llm.collective_rpc(mapped_generations)
    return found


def writes(llm: Any) -> dict[str, str]:
    """The answer to each way to write into the weights of a running engine."""

    def load_weights(worker: Any) -> None:
        weights = [(name, p.clone()) for name, p in worker.get_model().named_parameters()]
        worker.get_model().load_weights(weights)

    calls = {
        "update_weights": lambda: llm.collective_rpc("update_weights", args=({},)),
        "start_weight_update": lambda: llm.collective_rpc("start_weight_update"),
        "reset_weights": lambda: llm.collective_rpc("reset_weights"),
        "load_weights": lambda: load_weights(_worker(llm)),
        "reload_weights": lambda: llm.collective_rpc(
            "reload_weights", kwargs={"weights_path": "/models/other"}
        ),
    }
    return {name: _error_of(call) for name, call in calls.items()}


def _error_of(call: Any) -> str:
    try:
        call()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return ""


def sleeping(llm: Any) -> bool:
    return bool(llm.llm_engine.engine_core.is_sleeping())


def wake(llm: Any) -> bool:
    """Wake it; whether it sleeps on."""
    llm.wake_up()
    return sleeping(llm)


def restore_devices(llm: Any) -> list[str]:
    """The device on which a reload would make the tensors of the layers."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    layers = [LAYERWISE_INFO.get(module) for module in _model(llm).modules()]
    return sorted({str(info.restore_device) for info in layers if info is not None})


def kv_blocks(llm: Any) -> int:
    return int(llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)


def tuning(llm: Any) -> dict[str, Any]:
    """By operation, of how many shapes this process's FlashInfer looked for the best kernel, and
    how many it measured.

    Stored results are not measured again.
    """
    from flashinfer.autotuner import AutoTuner

    seen = AutoTuner.get().stats
    return {
        "configurations": seen.tuned_op_total_configs,
        "measured": seen.tuned_op_successful_configs,
    }


CALLS = {
    "tied_objects": tied_objects, "mapped_bytes": mapped_bytes, "reload_in_place": reload_in_place, "burst": burst,
    "images": images,
    "speculation": speculation, "draft": draft, "kv_blocks": kv_blocks,
    "tuning": tuning, "reload": reload, "writes": writes, "sleeping": sleeping, "wake": wake,
    "restore_devices": restore_devices, "swap": swap, "prepare_swap": prepare_swap,
    "mapped_generations": mapped_generations, "generations_of_ranks": generations_of_ranks,
}  # fmt: skip


def serve(host: Any) -> None:
    """Have `host` answer commands until standard input ends."""
    say = open_channel()
    for line in sys.stdin:
        command = json.loads(line)
        say(host.answer(command) | {"number": command["number"]})
    # Not through the interpreter's shutdown: vLLM's threads take their time there.
    os._exit(0)


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    serve(Host())


if __name__ == "__main__":
    main()
