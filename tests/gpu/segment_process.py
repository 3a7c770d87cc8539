"""The other process of tests/gpu/test_cuda_segments.py: segment_process.py MODE SOCKET_FD GPU_UUID
SIZES_JSON

create   make, fill and publish segments, send their descriptors, then wait to be killed
check    receive descriptors, map them, compare the content; answers as JSON
read     receive descriptors, map them, read both ends of each segment without torch; answers as JSON
write    receive descriptors, map them, let the driver and then a kernel write to them; should not survive that
"""

from __future__ import annotations

import json
import socket
import sys
import time
from typing import TYPE_CHECKING

from weightcached.segments.cuda import CudaBackend
from weightcached.system.fds import OwnedFd

if TYPE_CHECKING:
    import torch

END_NBYTES = 4096


def pattern(segment: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """The content of the tests' segments: uint8, shape (nbytes,)."""
    import torch

    return (
        torch.arange(nbytes // 4, dtype=torch.int32, device=device)
        .add_(segment * 7919)
        .view(torch.uint8)
    )


def create(sock: socket.socket, backend: CudaBackend, sizes: list[int]) -> None:
    fds = []
    for number, nbytes in enumerate(sizes):
        segment = backend.create(nbytes)
        tensor = segment.tensor()
        tensor.copy_(pattern(number, nbytes, tensor.device))
        del tensor
        fds.append(segment.publish())
    socket.send_fds(sock, [b"created"], [fd.fileno() for fd in fds])
    sock.recv(1)


def check(sock: socket.socket, backend: CudaBackend, sizes: list[int]) -> None:
    import torch

    fds = received(sock, len(sizes))
    started = time.perf_counter()
    mapping = backend.map(fds, sizes)
    mapped_s = time.perf_counter() - started
    tensors = [mapping.view(number, 0, nbytes) for number, nbytes in enumerate(sizes)]
    equal = [
        torch.equal(tensor, pattern(n, tensor.numel(), tensor.device))
        for n, tensor in enumerate(tensors)
    ]
    sock.sendall(json.dumps({"equal": equal, "mapped_s": mapped_s}).encode())


def read(sock: socket.socket, backend: CudaBackend, sizes: list[int]) -> None:
    mapping = backend.map(received(sock, len(sizes)), sizes)
    ends = [
        [mapping.read(number, at, END_NBYTES).hex() for at in (0, nbytes - END_NBYTES)]
        for number, nbytes in enumerate(sizes)
    ]
    sock.sendall(json.dumps({"ends": ends, "torch": "torch" in sys.modules}).encode())


def write(sock: socket.socket, backend: CudaBackend, sizes: list[int]) -> None:
    import torch
    from cuda.bindings import driver

    mapping = backend.map(received(sock, len(sizes)), sizes)
    tensor = mapping.view(0, 0, sizes[0])
    writable = torch.zeros(4096, dtype=torch.uint8, device=tensor.device)
    results = [
        driver.cuMemsetD8(target.data_ptr(), 7, 4096)[0].name for target in (writable, tensor)
    ]
    sock.sendall(json.dumps({"memset": results}).encode())
    tensor.fill_(7)
    torch.cuda.synchronize()


def received(sock: socket.socket, count: int) -> list[OwnedFd]:
    return [OwnedFd(fd) for fd in socket.recv_fds(sock, 16, count)[1]]


def main() -> None:
    mode, socket_fd, gpu_uuid, sizes = sys.argv[1:]
    with socket.socket(fileno=int(socket_fd)) as sock:
        # Before torch has touched CUDA: no context is current yet.
        backend = CudaBackend(gpu_uuid)
        {"create": create, "check": check, "read": read, "write": write}[mode](
            sock, backend, json.loads(sizes)
        )


if __name__ == "__main__":
    main()
