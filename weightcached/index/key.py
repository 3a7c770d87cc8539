"""WeightCacheKey: everything that must be equal for cached bytes to be the right ones.

This module only holds and compares keys. The one function that builds them from an engine's
configuration is weightcached.vllm_compat.key.build_key; the loader child and the engine both call
it. docs/identity.md has the table of which field guards which fault.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from weightcached.checkpoint.identity import CheckpointIdentity

# The value of a setting that an engine version lacks; never guessed.
ABSENT = "absent"

_Value = Annotated[str, Meta(max_length=4_000)]
# Some ten entries each; a quarter of a million, which fit into a message, kept the daemon busy for
# a second.
_Values = Annotated[dict[_Value, _Value], Meta(max_length=1_000)]


class WeightCacheKey(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of one loaded model shard. All values but the checkpoint must simply be equal."""

    checkpoint: CheckpointIdentity
    role: _Value = "target"
    architecture: _Value = ABSENT
    config_digest: _Value = ABSENT
    dtype: _Value = ABSENT
    quantization: _Value = ABSENT
    quant_config_digest: _Value = ABSENT
    kv_cache_dtype: _Value = ABSENT
    kv_cache_skip_layers: _Value = ABSENT
    stage: _Value = ABSENT
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    context_parallel: _Value = ABSENT
    pp_layer_partition: _Value = ABSENT
    expert_placement: _Value = ABSENT
    multimodal_limits: _Value = ABSENT
    lora_layout: _Value = ABSENT
    model_impl: _Value = ABSENT
    speculative: _Value = ABSENT
    kernel_backends: _Values = {}
    environment: _Values = {}
    additional_config: _Value = ABSENT
    versions: _Values = {}
    device_name: _Value = ABSENT
    compute_capability: _Value = ABSENT
    code_revision: _Value = ABSENT

    def mismatched_fields(self, other: WeightCacheKey) -> list[tuple[str, str, str]]:
        """(field, our value, the other's value) for all that differs, the checkpoint apart.

        Entries of the three mappings are named one by one, e.g. `versions.torch`.
        """
        differing: list[tuple[str, str, str]] = []
        for field in self.__struct_fields__:
            ours, theirs = getattr(self, field), getattr(other, field)
            if field == "checkpoint" or ours == theirs:
                continue
            if not isinstance(ours, dict):
                differing.append((field, str(ours), str(theirs)))
                continue
            for name in sorted(ours.keys() | theirs.keys()):
                a, b = ours.get(name, ABSENT), theirs.get(name, ABSENT)
                if a != b:
                    differing.append((f"{field}.{name}", a, b))
        return differing
