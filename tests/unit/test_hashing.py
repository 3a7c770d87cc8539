"""Digests of storages in a segment: those of xxhash, with any window and spans."""

from __future__ import annotations

import pytest
import torch
import xxhash

from weightcached.model.hashing import SegmentHasher

CPU = torch.device("cpu")


def segment(nbytes: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes)
    )


def expected(data: torch.Tensor, spans: list[tuple[int, int]]) -> list[bytes]:
    content = bytes(data.tolist())
    return [xxhash.xxh3_128(content[offset : offset + nbytes]).digest() for offset, nbytes in spans]


def test_digest_is_xxh3_128_big_endian() -> None:
    data = torch.tensor(list(b"weights"), dtype=torch.uint8)
    with SegmentHasher(7, CPU) as hasher:
        assert hasher.digests(data, [(0, 7), (0, 0)]) == [
            bytes.fromhex(xxhash.xxh3_128(b"weights").hexdigest()),
            bytes.fromhex("99aa06d3014798d86001c324468d497f"),
        ]


@pytest.mark.parametrize("window", [1, 64, 999, 1000, 4096])
def test_spans_across_windows_have_the_digest_of_their_bytes(window: int) -> None:
    data = segment(3000)
    spans = [(0, 512), (512, 1500), (2048, 952), (2999, 1), (0, 3000)]
    with SegmentHasher(3000, CPU) as hasher:
        # As on a device: windows that the segment passes through.
        hasher._windows = [torch.empty(window, dtype=torch.uint8) for _ in range(2)]
        assert hasher.digests(data, spans) == expected(data, spans)


def test_one_hasher_serves_segments_of_several_sizes() -> None:
    with SegmentHasher(4096, CPU) as hasher:
        for nbytes in (4096, 1, 512, 4095):
            data = segment(nbytes)
            assert hasher.digests(data, [(0, nbytes)]) == expected(data, [(0, nbytes)])


def test_window_is_no_larger_than_the_largest_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(torch, "empty", lambda nbytes, **_: made.append(nbytes))
    SegmentHasher(4096, torch.device("cuda", 0)).close()
    SegmentHasher(5 << 30, torch.device("cuda", 0)).close()
    assert made == [4096, 4096, 1 << 28, 1 << 28]
