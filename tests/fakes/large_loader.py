"""A loader child that makes large segments in a second: x_tensors tensors, x_nbytes in all.

On cpuN, and on a GPU: it imports no torch. x_seed: models of different ones have different bytes.
"""

from __future__ import annotations

import sys
import time

import msgspec
import xxhash

from tests.fakes.checkpoints import key_of
from tests.fakes.loader_child import Child
from weightcached.index import tensors as index_format
from weightcached.index.tensors import (
    LoadReport,
    SegmentRecord,
    StorageRecord,
    TensorIndex,
    TensorRecord,
)
from weightcached.segments.api import open_backend
from weightcached.segments.packing import StorageSpec, plan_segments
from weightcached.system.fds import OwnedFd
from weightcached.wire.loader_job import decode_job

SMALL_NBYTES = 4096


def content(number: int, nbytes: int, seed: int = 0) -> bytearray:
    """The bytes of tensor `number`: its number and the seed, again and again."""
    return bytearray((seed << 32 | number).to_bytes(8, "little") * (nbytes // 8))


class LargeChild(Child):
    def pack(self) -> tuple[bytes, list[OwnedFd]]:
        backend = open_backend(self.job.device)
        count = self.job.engine["x_tensors"]
        each = self.job.engine["x_nbytes"] // count // 512 * 512
        # As in a real model: two large tensors and then a small one, e.g. a norm.
        sizes = [each if number % 3 else SMALL_NBYTES for number in range(count)]
        layout = plan_segments(
            [StorageSpec(nbytes) for nbytes in sizes],
            granularity=backend.granularity(),
            segment_nbytes=self.job.engine["x_segment_nbytes"],
        )
        segments = [backend.create(plan.nbytes) for plan in layout.segments]
        storages: list[StorageRecord] = []
        for number, (nbytes, place) in enumerate(zip(sizes, layout.placements, strict=True)):
            data = content(number, nbytes, self.job.engine.get("x_seed", 0))
            segments[place.segment].write(place.offset_bytes, memoryview(data))
            storages.append(
                StorageRecord(
                    place.segment, place.offset_bytes, nbytes, xxhash.xxh3_128_digest(data)
                )
            )
        fds = [segment.publish() for segment in segments]
        tensors = [
            TensorRecord(
                names=[f"model.layers.{number}.weight"],
                kind="parameter",
                dtype="int64",
                shape=[nbytes // 64, 8],
                stride=[8, 1],
                storage=number,
            )
            for number, nbytes in enumerate(sizes)
        ]
        index = msgspec.structs.replace(
            self.described(),
            backend=backend.name,
            driver=backend.driver(),
            segments=[SegmentRecord(plan.nbytes, plan.private) for plan in layout.segments],
            storages=storages,
            tensors=tensors,
        )
        return index_format.encode(index), fds

    def described(self) -> TensorIndex:
        job = self.job
        return TensorIndex(
            software="test",
            backend="host",
            driver="host",
            boot_id=job.boot_id,
            device=job.device,
            cache=job.cache,
            role=job.role,
            generation=job.generation,
            spec_digest=job.spec_digest,
            stage="loaded",
            skeleton="",
            key=key_of(job.engine, role=job.role, rank=job.rank),
            segments=[],
            storages=[],
            tensors=[],
            load=LoadReport(seconds=time.monotonic() - self.began_s, finished_at=time.time()),
        )


if __name__ == "__main__":
    LargeChild(decode_job(sys.stdin.buffer.read())).run()
