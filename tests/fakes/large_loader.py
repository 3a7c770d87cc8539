"""A loader child that makes large host segments in a second: x_tensors tensors, x_nbytes in all."""

from __future__ import annotations

import fcntl
import os
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
from weightcached.segments.host import HostBackend
from weightcached.segments.packing import StorageSpec, plan_segments
from weightcached.system.fds import READ_ONLY_SEALS, OwnedFd
from weightcached.wire.loader_job import decode_job

SMALL_NBYTES = 4096


def content(number: int, nbytes: int) -> bytes:
    """The bytes of tensor `number`: its number, again and again."""
    return number.to_bytes(8, "little") * (nbytes // 8)


class LargeChild(Child):
    def pack(self) -> tuple[bytes, list[OwnedFd]]:
        count = self.job.engine["x_tensors"]
        each = self.job.engine["x_nbytes"] // count // 512 * 512
        # As in a real model: two large tensors and then a small one, e.g. a norm.
        sizes = [each if number % 3 else SMALL_NBYTES for number in range(count)]
        layout = plan_segments(
            [StorageSpec(nbytes) for nbytes in sizes],
            granularity=HostBackend().granularity(),
            segment_nbytes=self.job.engine["x_segment_nbytes"],
        )
        fds = [_segment(plan.nbytes) for plan in layout.segments]
        storages: list[StorageRecord] = []
        for number, (nbytes, place) in enumerate(zip(sizes, layout.placements, strict=True)):
            data = content(number, nbytes)
            os.pwrite(fds[place.segment].fileno(), data, place.offset_bytes)
            storages.append(
                StorageRecord(
                    place.segment, place.offset_bytes, nbytes, xxhash.xxh3_128_digest(data)
                )
            )
        for fd in fds:
            _seal(fd)
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


def _segment(nbytes: int) -> OwnedFd:
    fd = OwnedFd(os.memfd_create("weightcached-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.posix_fallocate(fd.fileno(), 0, nbytes)
    return fd


def _seal(fd: OwnedFd) -> None:
    fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, READ_ONLY_SEALS)


if __name__ == "__main__":
    LargeChild(decode_job(sys.stdin.buffer.read())).run()
