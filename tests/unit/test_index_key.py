"""WeightCacheKey: every field counts; differences are named with both values."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from weightcached.checkpoint.identity import CheckpointIdentity
from weightcached.index.key import ABSENT, WeightCacheKey
from weightcached.wire.messages import Attach, decode_request, encode

CHECKPOINT = CheckpointIdentity(root="/models/a")
DICTIONARIES = ("kernel_backends", "environment", "versions")
FIELDS = [name for name in WeightCacheKey.__struct_fields__ if name != "checkpoint"]


def key(**fields: Any) -> WeightCacheKey:
    return WeightCacheKey(checkpoint=CHECKPOINT, **fields)


def another_value(field: str) -> Any:
    if field in DICTIONARIES:
        return {"x": "1"}
    return 7 if isinstance(getattr(key(), field), int) else "other"


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_counts(field: str) -> None:
    changed = key(**{field: another_value(field)})
    name, was, now = (
        (f"{field}.x", ABSENT, "1")
        if field in DICTIONARIES
        else (field, str(getattr(key(), field)), None)
    )
    assert key().mismatched_fields(changed) == [(name, was, now or str(another_value(field)))]
    assert changed.mismatched_fields(key()) == [(name, now or str(another_value(field)), was)]
    assert changed != key()


def test_equal_keys_differ_in_nothing() -> None:
    assert (
        key(versions={"a": "1", "b": "2"}).mismatched_fields(key(versions={"b": "2", "a": "1"}))
        == []
    )


def test_all_differences_are_named_in_field_order() -> None:
    ours = key(
        dtype="torch.bfloat16", tp_size=2, versions={"torch": "2.11", "vllm": "0.33", "cuda": "13"}
    )
    theirs = key(
        dtype="torch.float16",
        tp_size=4,
        versions={"torch": "2.12", "vllm": "0.33"},
        code_revision="abc",
    )
    assert ours.mismatched_fields(theirs) == [
        ("dtype", "torch.bfloat16", "torch.float16"),
        ("tp_size", "2", "4"),
        ("versions.cuda", "13", ABSENT),
        ("versions.torch", "2.11", "2.12"),
        ("code_revision", ABSENT, "abc"),
    ]


def test_checkpoint_is_not_compared_here() -> None:
    other = msgspec.structs.replace(key(), checkpoint=CheckpointIdentity(root="/models/b"))
    assert key().mismatched_fields(other) == []


def test_key_survives_the_wire() -> None:
    sent = key(dtype="x", versions={"é": "1"}, kernel_backends={"moe": "triton"}, tp_rank=3)
    received = decode_request(encode(Attach(key=sent)))
    assert received == Attach(key=sent)
    assert isinstance(received, Attach)
    assert received.key == sent
