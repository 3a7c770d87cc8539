"""The job of a loader child: one JSON document on its standard input.

The child also inherits one end of a SOCK_SEQPACKET socketpair, whose number is `socket_fd`; over it
the child sends LoaderProgress, LoaderKey, LoaderIndex, Descriptors and LoaderFailed
(wire/messages.py). The daemon sends one packet: a child that `waits` touches neither device nor
weights before that packet.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

# The daemon's packet to a child that waits.
YOUR_TURN = b"your turn"


class Meeting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A loader's group: address, time to wait, and this node's devices in local-rank order."""

    host: str
    port: int
    timeout_s: int
    devices: list[str]


class LoaderJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cache to load. `rank` counts within the data parallel replica `dp_rank`, pipeline before
    tensor ranks.

    Without `rendezvous` the rank is loaded alone. `waits`: another load has the device; this child
    imports and configures meanwhile, and waits for its turn. `prepares`: while it waits it may open the
    device and lock host memory, but takes none of the device's. `label`: the operator's name for the
    weights.
    """

    device: str
    cache: str
    role: Literal["target", "draft"]
    generation: int
    spec_digest: str
    engine: dict[str, Any]
    rank: int
    dp_rank: int = 0
    rendezvous: Meeting | None = None
    identity: Literal["full", "sampled"] = "full"
    boot_id: str
    socket_fd: int
    waits: bool = False
    prepares: bool = False
    label: str = ""


def encode_job(job: LoaderJob) -> bytes:
    """The job as JSON."""
    return msgspec.json.encode(job)


def decode_job(data: bytes) -> LoaderJob:
    """The job from JSON. Raises msgspec.ValidationError."""
    return msgspec.json.decode(data, type=LoaderJob)
