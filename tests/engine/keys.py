"""Keys, skeletons and bytes of real vLLM configurations, without an engine; imports are paid once.

Reads one JSON question per line on standard input and answers with one line that begins with
"ANSWER ".

    {"engine": {…}, "environment": {…}, "rank": 0, "bytes": true}   configure; the key's fields, the skeleton, and a
                                                                    digest of every loaded tensor
    {"multimodal": {…}}                                             the key's field for these multimodal options
    {"counting": true}                                              vLLM's variables, and those that count
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any
from unittest import mock

import msgspec

from tests.engine.answers import open_channel

DEFAULTS = {"enforce_eager": True, "max_model_len": 256}


def digest_of(key: msgspec.Struct) -> str:
    """Of all fields, the checkpoint's full record too."""
    return hashlib.sha256(msgspec.msgpack.encode(key, order="deterministic")).hexdigest()


def configured(question: dict[str, Any]) -> dict[str, Any]:
    """Build the configuration as the loader child does, and everything that a key is made of."""
    from weightcached.model.bind import skeleton_of
    from weightcached.vllm_compat import build, solo_rank
    from weightcached.vllm_compat.key import build_key
    from weightcached.wire.loader_job import LoaderJob

    job = LoaderJob(
        device="cpu0", cache="m/target", role="target", generation=1, spec_digest="", boot_id="", socket_fd=0,
        engine=DEFAULTS | question["engine"], rank=question.get("rank", 0),
    )  # fmt: skip
    config = solo_rank.create_vllm_config(job)
    with solo_rank.solo_rank(config, job.rank):
        key = build_key(config, config.model_config, role="target")
        with build.isolated_build(config, keep=False):
            skeleton = skeleton_of(build.build_on_meta(config, config.model_config))
        answer = {"key": msgspec.to_builtins(key), "digest": digest_of(key), "skeleton": skeleton}
        if question.get("bytes"):
            with build.isolated_build(config, keep=False):
                answer["bytes"] = bytes_of(
                    solo_rank.load_for_stage(config, config.model_config, "loaded", lambda n: None)
                )
    return answer


def batches(question: dict[str, Any]) -> dict[str, Any]:
    """The most tokens and sequences of a batch, in the loader child and in `vllm serve`."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    from weightcached.vllm_compat import solo_rank
    from weightcached.wire.loader_job import LoaderJob

    engine = question["batches"]
    job = LoaderJob(
        device="cpu0", cache="m/target", role="target", generation=1, spec_digest="", boot_id="", socket_fd=0,
        engine=engine, rank=0,
    )  # fmt: skip
    ours = solo_rank.create_vllm_config(job).scheduler_config
    served = EngineArgs.get_batch_defaults(engine["tensor_parallel_size"])
    return {
        "ours": [ours.max_num_batched_tokens, ours.max_num_seqs],
        "served": [defaults[UsageContext.OPENAI_API_SERVER] for defaults in served],
    }


def bytes_of(model: Any) -> str:
    """Digest of every tensor of the model: name, shape and values."""
    import torch

    from weightcached.model.walk import tensors

    digest = hashlib.sha256()
    for slot in tensors(model):
        digest.update(f"{slot.path} {slot.tensor.dtype} {tuple(slot.tensor.shape)}\n".encode())
        if slot.tensor.is_meta:
            # A head that pooling leaves out keeps its name.
            continue
        digest.update(
            slot.tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def answer(question: dict[str, Any]) -> dict[str, Any]:
    if "counting" in question:
        from vllm import envs

        from weightcached.vllm_compat.key import changes_layout

        listed = sorted(envs.environment_variables)
        return {"listed": listed, "names": [name for name in listed if changes_layout(name)]}
    if "multimodal" in question:
        from vllm.config import MultiModalConfig

        from weightcached.vllm_compat.key import _multimodal

        return {"text": _multimodal(MultiModalConfig(**question["multimodal"]))}
    with mock.patch.dict(os.environ, question.get("environment", {})):
        try:
            return batches(question) if "batches" in question else configured(question)
        except Exception as e:
            return {"error": f"{type(e).__name__}: {e}"}


def main() -> None:
    """Answer questions until standard input ends."""
    say = open_channel()
    for line in sys.stdin:
        say(answer(json.loads(line)))
    os._exit(0)


if __name__ == "__main__":
    main()
