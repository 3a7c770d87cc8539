"""Host segments: sealed memfds that nobody can change, whatever engines write to their mappings."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.daemon import BOUND_S
from weightcached.errors import OutOfDeviceMemoryError, SegmentError
from weightcached.segments.api import Backend, Mapping, PrivateCopy, WritableSegment, open_backend
from weightcached.segments.host import HostBackend
from weightcached.system.fds import READ_ONLY_SEALS, OwnedFd, is_sealed, sealed_memfd

PAGE = mmap.PAGESIZE


@pytest.fixture
def backend() -> Iterator[HostBackend]:
    """A backend whose user must leave no descriptor and no mapping."""
    gc.collect()
    before = left()
    yield HostBackend()
    gc.collect()
    assert left() == before


def left() -> tuple[int, int]:
    """(descriptors, mappings) of segments in this process."""
    links = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    held = sum("weightcached-segment" in link for link in links)
    return held, Path("/proc/self/maps").read_text().count("weightcached-segment")


def published(backend: HostBackend, content: bytes, nbytes: int = PAGE) -> OwnedFd:
    segment = backend.create(nbytes)
    segment.tensor()[: len(content)] = torch.tensor(list(content), dtype=torch.uint8)
    return segment.publish()


def text(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.tolist())


def test_classes_are_what_the_interface_asks_for(backend: HostBackend) -> None:
    segment = backend.create(PAGE)
    mapping = backend.map([published(backend, b"x")], [PAGE])
    checked: tuple[Backend, WritableSegment, Mapping, PrivateCopy]
    checked = (backend, segment, mapping, mapping.private_copy(0))
    assert checked[0].name == "host"
    assert isinstance(open_backend("cpu3"), HostBackend)


def test_mapped_segments_have_the_content_of_the_published_ones(backend: HostBackend) -> None:
    fds = [published(backend, b"first"), published(backend, b"second", 3 * PAGE)]
    mapping = backend.map(fds, [PAGE, 3 * PAGE])
    assert text(mapping.view(0, 0, 6)) == b"first\0"
    assert text(mapping.view(1, 2, 4)) == b"cond"
    assert bytes(mapping.read(1, 0, 3 * PAGE)) == b"second".ljust(3 * PAGE, b"\0")
    assert all(fd.closed for fd in fds)


def test_segment_outlives_its_creator_in_its_descriptor_alone(backend: HostBackend) -> None:
    code = (
        "import socket, sys, os, mmap; from weightcached.segments.host import HostBackend;"
        "import torch; s = HostBackend().create(mmap.PAGESIZE); s.tensor()[:4].fill_(7); fd = s.publish();"
        "socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b'.'], [fd.fileno()]); os.kill(os.getpid(), 9)"
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            timeout=BOUND_S,
            check=False,
        )
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    assert done.returncode == -9
    mapping = backend.map([OwnedFd(fd) for fd in fds], [PAGE])
    assert text(mapping.view(0, 0, 5)) == b"\7\7\7\7\0"


# ---- nobody changes what is published


def test_published_segment_is_sealed_against_everything(backend: HostBackend) -> None:
    with published(backend, b"kept") as fd:
        assert fcntl.fcntl(fd.fileno(), fcntl.F_GET_SEALS) == READ_ONLY_SEALS
        for attempt in (
            lambda: os.pwrite(fd.fileno(), b"lost", 0),
            lambda: os.ftruncate(fd.fileno(), 2 * PAGE),
            lambda: os.ftruncate(fd.fileno(), 0),
            lambda: mmap.mmap(fd.fileno(), PAGE),
            lambda: fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL),
        ):
            with pytest.raises(PermissionError):
                attempt()
        assert os.pread(fd.fileno(), 4, 0) == b"kept"


def test_what_a_mapping_writes_stays_its_own(backend: HostBackend) -> None:
    fd = published(backend, b"kept")
    first, second = (backend.map([fd.dup()], [PAGE]) for _ in range(2))
    first.view(0, 0, 4).fill_(0)
    assert text(first.view(0, 0, 4)) == b"\0\0\0\0"
    assert text(second.view(0, 0, 4)) == bytes(second.read(0, 0, 4)) == b"kept"
    assert os.pread(fd.fileno(), 4, 0) == b"kept"
    fd.close()


def test_private_copy_is_independent_of_the_mapping(backend: HostBackend) -> None:
    mapping = backend.map([published(backend, b"kept")], [PAGE])
    copies = [mapping.private_copy(0) for _ in range(2)]
    tensor = copies[0].view(0, 4)
    tensor[0] = ord("K")
    assert text(copies[1].view(0, 4)) == text(mapping.view(0, 0, 4)) == b"kept"
    mapping.close()
    gc.collect()
    del copies
    assert text(tensor) == b"Kept"


# ---- storages and lifetime


def test_each_view_has_a_storage_of_its_own(backend: HostBackend) -> None:
    mapping = backend.map([published(backend, b"x")], [PAGE])
    copy = mapping.private_copy(0)
    for views in (
        [mapping.view(0, o, 512) for o in (0, 512, 512)],
        [copy.view(o, 512) for o in (0, 512, 512)],
    ):
        stores = [view.untyped_storage() for view in views]
        assert [store.data_ptr() - stores[0].data_ptr() for store in stores] == [0, 512, 512]
        assert [store.nbytes() for store in stores] == [512] * 3
        assert [view.storage_offset() for view in views] == [0] * 3
        assert len({store._cdata for store in stores}) == 3


def test_tensor_keeps_the_mapping_after_close(backend: HostBackend) -> None:
    mapping = backend.map([published(backend, b"kept")], [PAGE])
    view = mapping.view(0, 0, 8)[:4].view(torch.int32)
    mapping.close()
    mapping.close()
    gc.collect()
    assert left()[1] == 1
    assert text(view.view(torch.uint8)) == b"kept"
    del view
    assert left()[1] == 0


def test_read_shares_the_pages_and_keeps_them(backend: HostBackend) -> None:
    mapping = backend.map([published(backend, b"kept")], [PAGE])
    held = mapping.read(0, 0, 4)
    mapping.close()
    assert bytes(held) == b"kept"


def test_unpublished_segment_is_freed_by_close(backend: HostBackend) -> None:
    segment = backend.create(PAGE)
    segment.close()
    segment.close()
    assert left() == (0, 0)
    for use in (segment.tensor, segment.publish):
        with pytest.raises(SegmentError) as e:
            use()
        assert str(e.value) == "the host segment is published or closed already"


def test_segment_closed_with_a_live_tensor_is_freed_with_the_tensor(backend: HostBackend) -> None:
    segment = backend.create(PAGE)
    tensor = segment.tensor()
    segment.close()
    tensor.fill_(1)
    assert left()[1] == 1
    del tensor


def test_segment_with_a_live_tensor_is_not_published(backend: HostBackend) -> None:
    segment = backend.create(PAGE)
    view = segment.tensor()[4:8]
    with pytest.raises(SegmentError) as e:
        segment.publish()
    assert (
        str(e.value)
        == "a tensor over the host segment is still alive: it could change sealed bytes"
    )
    view.fill_(1)
    del view
    mapping = backend.map([segment.publish()], [PAGE])
    assert text(mapping.view(0, 0, 9)) == b"\0\0\0\0\1\1\1\1\0"


def test_published_segment_is_not_the_creators_any_more(backend: HostBackend) -> None:
    segment = backend.create(PAGE)
    with segment.publish() as fd:
        assert not os.get_inheritable(fd.fileno())
        segment.close()
        assert is_sealed(fd.fileno())
        with pytest.raises(SegmentError):
            segment.publish()


# ---- refusals


@pytest.mark.parametrize("nbytes", [0, -PAGE, 1, PAGE + 1])
def test_size_off_the_page_is_refused(backend: HostBackend, nbytes: int) -> None:
    with pytest.raises(SegmentError) as e:
        backend.create(nbytes)
    assert (
        str(e.value)
        == f"a host segment of {nbytes} bytes: a positive multiple of {PAGE} is required"
    )


def test_more_than_there_is_is_refused(
    backend: HostBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfDeviceMemoryError) as e:
        backend.create(PAGE)
    assert str(e.value) == (
        f"cannot allocate a host segment of {PAGE} bytes: No space left on device; see 'free -m' and the unit's "
        "MemoryMax="
    )


def other_descriptor(kind: str, tmp_path: Path) -> OwnedFd:
    if kind == "unsealed":
        fd = OwnedFd(os.memfd_create("unsealed", os.MFD_ALLOW_SEALING))
        os.ftruncate(fd.fileno(), PAGE)
        return fd
    if kind == "file":
        (tmp_path / "f").write_bytes(bytes(PAGE))
        return OwnedFd(os.open(tmp_path / "f", os.O_RDWR))
    if kind == "pipe":
        read_end, write_end = os.pipe()
        os.close(write_end)
        return OwnedFd(read_end)
    return OwnedFd(os.open("/dev/null", os.O_RDWR))


@pytest.mark.parametrize("kind", ["unsealed", "file", "pipe", "null"])
def test_descriptor_that_could_change_is_refused(
    backend: HostBackend, tmp_path: Path, kind: str
) -> None:
    fds = [published(backend, b"a"), other_descriptor(kind, tmp_path)]
    with pytest.raises(SegmentError) as e:
        backend.map(fds, [PAGE, PAGE])
    assert str(e.value) == "segment 1 is not a sealed memfd: its bytes could change under an engine"
    assert all(fd.closed for fd in fds)


@pytest.mark.parametrize("nbytes", [PAGE // 2, 2 * PAGE])
def test_segment_of_another_size_is_refused(backend: HostBackend, nbytes: int) -> None:
    fds = [published(backend, b"a"), published(backend, b"b")]
    with pytest.raises(SegmentError) as e:
        backend.map(fds, [PAGE, nbytes])
    assert str(e.value) == f"segment 1 holds {PAGE} bytes, its index says {nbytes}"
    assert all(fd.closed for fd in fds)


def test_mapping_that_fails_is_named(backend: HostBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    fds = [published(backend, b"a"), published(backend, b"b")]
    real = mmap.mmap
    made: list[mmap.mmap] = []

    def second_fails(*arguments: Any, **options: Any) -> mmap.mmap:
        if made:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        made.append(real(*arguments, **options))
        return made[0]

    monkeypatch.setattr(mmap, "mmap", second_fails)
    with pytest.raises(SegmentError) as e:
        backend.map(fds, [PAGE, PAGE])
    assert str(e.value) == f"segment 1 of {PAGE} bytes does not map: Cannot allocate memory"
    assert all(fd.closed for fd in fds)


def test_other_segments_come_in_place_and_the_first_ones_are_freed(backend: HostBackend) -> None:
    first = [published(backend, b"old a"), published(backend, b"old b", 3 * PAGE)]
    kept = first[0].dup()
    mapping = backend.map(first, [PAGE, 3 * PAGE])
    a, b = mapping.view(0, 0, 5), mapping.view(1, 0, 5)
    address = a.data_ptr()
    # A page of its own, which the other segment's content must replace.
    b[:2] = 0
    fds = [published(backend, b"new a"), published(backend, b"new b", 3 * PAGE)]
    mapping.map_again(fds)
    assert (text(a), text(b), a.data_ptr()) == (b"new a", b"new b", address)
    assert all(fd.closed for fd in fds)
    # Mapped nowhere: the descriptor in this test is all that is left of the first generation.
    assert left()[1] == 2
    assert _inodes("weightcached-segment").isdisjoint({os.fstat(kept.fileno()).st_ino})
    kept.close()


def _inodes(name: str) -> set[int]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if name in line}


@pytest.mark.parametrize("fault", ["unsealed", "size", "count"])
def test_segment_that_does_not_fit_leaves_the_mapping_as_it_is(
    backend: HostBackend, fault: str, tmp_path: Path
) -> None:
    mapping = backend.map([published(backend, b"a"), published(backend, b"b")], [PAGE, PAGE])
    views = mapping.view(0, 0, 1), mapping.view(1, 0, 1)
    others = {
        "unsealed": lambda: other_descriptor("unsealed", tmp_path),
        "size": lambda: published(backend, b"d", 2 * PAGE),
    }
    fds = [published(backend, b"c"), *([others[fault]()] if fault in others else [])]
    with pytest.raises(SegmentError):
        mapping.map_again(fds)
    assert [text(view) for view in views] == [b"a", b"b"]
    assert all(fd.closed for fd in fds)


def test_descriptors_and_sizes_must_be_as_many(backend: HostBackend) -> None:
    fds = [published(backend, b"a"), published(backend, b"b")]
    with pytest.raises(SegmentError) as e:
        backend.map(fds, [PAGE])
    assert str(e.value) == "2 descriptors came for 1 segments"
    assert all(fd.closed for fd in fds)


@pytest.mark.parametrize("method", ["view", "read"])
@pytest.mark.parametrize(
    ("offset_bytes", "nbytes"), [(-1, 1), (0, -1), (0, PAGE + 1), (1, PAGE), (PAGE + 1, 0)]
)
def test_range_outside_its_segment_is_refused(
    backend: HostBackend, method: str, offset_bytes: int, nbytes: int
) -> None:
    mapping = backend.map([published(backend, b"a")], [PAGE])
    with pytest.raises(SegmentError) as e:
        getattr(mapping, method)(0, offset_bytes, nbytes)
    assert (
        str(e.value) == f"{nbytes} bytes at {offset_bytes} reach outside segment 0 of {PAGE} bytes"
    )


@pytest.mark.parametrize("segment", [-1, 1])
@pytest.mark.parametrize("method", ["view", "read", "private_copy"])
def test_segment_that_is_not_mapped_is_refused(
    backend: HostBackend, method: str, segment: int
) -> None:
    mapping = backend.map([published(backend, b"a")], [PAGE])
    arguments = () if method == "private_copy" else (0, 1)
    with pytest.raises(SegmentError) as e:
        getattr(mapping, method)(segment, *arguments)
    assert str(e.value) == f"segment {segment} is not one of the 1 that are mapped"


@pytest.mark.parametrize("method", ["view", "read", "private_copy"])
def test_closed_mapping_gives_nothing(backend: HostBackend, method: str) -> None:
    mapping = backend.map([published(backend, b"a")], [PAGE])
    mapping.close()
    arguments = () if method == "private_copy" else (0, 1)
    with pytest.raises(SegmentError) as e:
        getattr(mapping, method)(0, *arguments)
    assert str(e.value) == "the mapping of host segments is closed: take its tensors before close()"


# ---- the machine


def test_free_bytes_are_the_machines(backend: HostBackend) -> None:
    free, total = backend.free_bytes()
    assert 0 < free < total == os.sysconf("SC_PHYS_PAGES") * PAGE


def test_driver_names_the_running_kernel(backend: HostBackend) -> None:
    assert backend.driver() == f"linux {os.uname().release}"


def test_importing_the_backend_imports_no_torch() -> None:
    code = "import sys, weightcached.segments.host; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=BOUND_S
    )
    assert done.stdout == "False\n"


def test_segments_read_without_torch(backend: HostBackend) -> None:
    with sealed_memfd("weightcached-segment", b"weights".ljust(PAGE, b"\0")) as fd:
        code = (
            "import sys, mmap; from weightcached.segments.host import HostBackend;"
            "from weightcached.system.fds import OwnedFd;"
            f"m = HostBackend().map([OwnedFd({fd.fileno()})], [mmap.PAGESIZE]);"
            "print(bytes(m.read(0, 0, 7)), 'torch' in sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            pass_fds=[fd.fileno()],
            capture_output=True,
            text=True,
            check=True,
            timeout=BOUND_S,
        )
    assert done.stdout == "b'weights' False\n"
