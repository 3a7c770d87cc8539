"""Changes of checkpoints and interpreters, with the real unit, loader and engine.

The same content is mapped, other content is not, and `reload` is the only remedy needed.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine import conftest
from tests.engine.conftest import ANSWER_TIMEOUT_S, ENVIRONMENT, ROOT, Engines, Service, checkpoint
from tests.engine.test_end_to_end import entry, serving
from tests.fakes.hub import Hub, commit_of
from weightcached.checkpoint.digests import DigestCache
from weightcached.checkpoint.identity import CheckpointIdentity, record_checkpoint
from weightcached.index.tensors import MAX_INDEX_BYTES, TensorIndex, decode
from weightcached.system.fds import close_all, read_sealed
from weightcached.wire.framing import MAX_PACKET_FDS, recv_packet
from weightcached.wire.loader_job import LoaderJob, encode_job
from weightcached.wire.messages import LoaderFailed, LoaderIndex, decode_loader

manager, service, engines = conftest.manager, conftest.service, conftest.engines
MAPPED = {"fallback": False}
REPO = "org/tiny"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "model", tied=False, dtype="bfloat16")


def reload(service: Service, device: str = "cpu0") -> list[str]:
    """Its lines, without times."""
    said = service.ctl("reload", device, check=False).stdout.splitlines()
    return [re.sub(r" in [\d.]+ m?s$", "", line) for line in said]


def until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {ANSWER_TIMEOUT_S} s"
        time.sleep(0.1)


def until_digested(record: CheckpointIdentity) -> None:
    """The daemon makes the digests of its loaded files by itself."""
    cache = DigestCache.of_user()
    until(lambda: all(cache.get(file.stat) for file in record.files), "digests")


def clutter(model: Path) -> None:
    """Files that nobody reads: a training run, a Git LFS pointer, a file larger than the disk."""
    for folder in ("checkpoint-500", "original"):
        (model / folder).mkdir()
    shutil.copy(next(model.glob("*.safetensors")), model / "checkpoint-500/model.safetensors")
    with open(model / "checkpoint-500/pytorch_model.bin", "wb") as f:
        os.truncate(f.fileno(), 1 << 40)
    (model / "original/model.safetensors").write_text("version https://git-lfs.github.com/")


def overwrite(path: Path) -> None:
    """Other bytes in the middle of a tensor, in the same size and with the same mtime."""
    before = path.stat()
    with open(path, "r+b") as f:
        f.seek(before.st_size // 2 + 10_000)
        f.write(bytes(range(64)))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_new_status_or_new_neighbours_are_mapped_and_other_content_is_not(
    service: Service, engines: Engines, model: Path, tmp_path: Path
) -> None:
    clutter(model)
    with serving(service, "cpu0", entry("tiny", model, "cpu0")):
        until_digested(record_checkpoint(str(model)))
        tokens = engines.tokens(model, "ipc_cache", loader=MAPPED)
        for path in model.glob("*.safetensors"):
            path.chmod(0o440)
            (tmp_path / "linked").mkdir(exist_ok=True)
            os.link(path, tmp_path / "linked" / path.name)  # as cp -al
        for path in model.glob("*.json"):
            shutil.copy(path, tmp_path / "linked")
        shutil.copytree(model / "checkpoint-500", model / "checkpoint-1000", ignore=_sparse)
        assert reload(service) == ["cpu0 tiny/target: unchanged, generation 1"]
        assert engines.tokens(model, "ipc_cache", loader=MAPPED) == tokens
        # The digest of what was loaded outlives the daemon, and the status that the files had.
        service.kill("cpu0")
        assert service.caches("cpu0")[0]["source"] == "adopted"
        assert engines.tokens(tmp_path / "linked", "ipc_cache", loader=MAPPED) == tokens

        changed = sorted(model.glob("*.safetensors"))[1]
        changed.chmod(0o640)
        overwrite(changed)
        answer = engines.ask(
            engine={
                "model": str(model),
                "load_format": "ipc_cache",
                "model_loader_extra_config": MAPPED,
            }
        )
        assert "checkpoint is" in answer["error"], answer
        assert reload(service) == ["cpu0 tiny/target: loaded, generation 2"]
        assert engines.tokens(model, "ipc_cache", loader=MAPPED) == engines.tokens(model)


def _sparse(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "pytorch_model.bin"]


@contextmanager
def started(service: Service, device: str) -> Iterator[None]:
    """A unit that has nothing to serve yet."""
    assert service.ctl("start", device, check=False).returncode == 1
    try:
        yield
    finally:
        service.ctl("stop", device, check=False)


def test_model_whose_mount_is_late_fails_alone_and_is_loaded_once_it_is_there(
    service: Service, model: Path, tmp_path: Path
) -> None:
    late, away = tmp_path / "late", tmp_path / "away"
    checkpoint(late, tied=True, dtype="bfloat16", seed=3)
    late.rename(away)
    models = [entry("tiny", model, "cpu0"), entry("late", late, "cpu1")]
    with serving(service, "cpu0", *models), started(service, "cpu1"):
        assert [cache["state"] for cache in service.caches("cpu0")] == ["ready"]
        (cache,) = service.caches("cpu1")
        assert cache["error"].startswith(f"model {late} does not exist: mount"), cache
        assert reload(service) == ["cpu0 tiny/target: unchanged, generation 1"]
        away.rename(late)
        # Nobody asks for it: the daemon tries again.
        until(lambda: service.caches("cpu1")[0]["state"] == "ready", "the late model is served")
        # The cache stays served when the mount goes away, and `reload` names the error.
        late.rename(away)
        (line,) = reload(service, "cpu1")
        assert line.startswith(f"cpu1 late/target: failed: model {late} does not exist: mount")
        assert service.caches("cpu1")[0]["state"] == "ready"


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """A virtual environment over the one of the tests, with a library of its own, deep-gemm 1.0."""
    folder = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    ours = sysconfig.get_path("purelib")
    (packages / "over.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    install(folder, "1.0")
    return folder / "bin/python"


def install(venv: Path, version: str) -> None:
    """Another version of the library, as pip leaves it."""
    packages = next(venv.glob("lib/python*/site-packages"))
    for old in packages.glob("deep_gemm-*.dist-info"):
        shutil.rmtree(old)
    new = packages / f"deep_gemm-{version}.dist-info"
    new.mkdir()
    text = f"Metadata-Version: 2.1\nName: deep-gemm\nVersion: {version}\n"
    (new / "METADATA").write_text(text)


def test_upgrade_of_a_library_is_noticed_by_reload(
    service: Service, model: Path, interpreter: Path
) -> None:
    served = entry("tiny", model, "cpu0") | {"python": str(interpreter)}
    with serving(service, "cpu0", served):
        assert reload(service) == ["cpu0 tiny/target: unchanged, generation 1"]
        install(interpreter.parents[1], "1.1")
        assert reload(service) == ["cpu0 tiny/target: loaded, generation 2"]
        assert reload(service) == ["cpu0 tiny/target: unchanged, generation 2"]


# ---- the Hub


def load(
    engine: dict[str, Any], environment: dict[str, str], log: Path
) -> TensorIndex | LoaderFailed:
    """What one real loader child delivers."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open(log, "ab") as stderr:
        job = LoaderJob(
            device="cpu0", cache="tiny/target", role="target", generation=1, spec_digest="x", rank=0,
            boot_id="b", socket_fd=theirs.fileno(), engine=engine,
        )  # fmt: skip
        child = subprocess.Popen(
            [sys.executable, "-m", "weightcached.loader"], env=os.environ | ENVIRONMENT | environment,
            cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.PIPE, stderr=stderr,
        )  # fmt: skip
        theirs.close()
        assert child.stdin is not None
        child.stdin.write(encode_job(job))
        child.stdin.close()
        ours.settimeout(ANSWER_TIMEOUT_S)
        try:
            answer = _answer(ours)
        finally:
            child.kill()
            child.wait()
    return answer


def _answer(sock: socket.socket) -> TensorIndex | LoaderFailed:
    while True:
        packet = recv_packet(sock, max_fds=MAX_PACKET_FDS)
        message = decode_loader(packet.data)
        try:
            if isinstance(message, LoaderFailed):
                return message
            if isinstance(message, LoaderIndex):
                return decode(read_sealed(packet.fds[0].fileno(), max_nbytes=MAX_INDEX_BYTES))
        finally:
            close_all(packet.fds)


@contextmanager
def moved_hub(tmp_path: Path, model: Path) -> Iterator[tuple[Hub, dict[str, str], Path]]:
    """A Hub whose main has moved, and a local cache with the old revision.

    Of the new revision it has only the configuration, as after a download of that alone.
    """
    cache = tmp_path / "hub"
    with Hub(REPO) as hub:
        environment = {
            "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0",
            "HF_HUB_ETAG_TIMEOUT": "120", "HF_HUB_DOWNLOAD_TIMEOUT": "120",
        }  # fmt: skip
        hub.push(commit_of("old"), model)
        _download(environment)
        hub.push(
            commit_of("new"), checkpoint(tmp_path / "new", tied=False, dtype="bfloat16", seed=7)
        )
        _download(environment, "config.json")
        repository = cache / "models--org--tiny"
        assert (repository / "refs/main").read_text() == commit_of("new")
        assert os.listdir(repository / "snapshots" / commit_of("new")) == ["config.json"]
        yield hub, environment, repository


def _download(environment: dict[str, str], *names: str) -> None:
    code = f"import huggingface_hub as h; h.snapshot_download({REPO!r}, allow_patterns={[*names] or None})"
    command = [sys.executable, "-c", code]
    subprocess.run(command, env=os.environ | environment, check=True, capture_output=True)


def test_revision_of_which_the_configuration_alone_is_there_is_downloaded(
    tmp_path: Path, model: Path
) -> None:
    with moved_hub(tmp_path, model) as (_, environment, repository):
        index = load({"model": REPO}, environment, tmp_path / "log")
        said = (tmp_path / "log").read_text()[-3000:]
        assert isinstance(index, TensorIndex), f"{index}\n{said}"
        new = repository / "snapshots" / commit_of("new")
        assert index.key.checkpoint.root == str(new)
        assert index.key.checkpoint.names == record_checkpoint(str(new)).names
        assert len(index.key.checkpoint.files) == 3


def test_incomplete_revision_without_a_network_names_the_complete_one(
    tmp_path: Path, model: Path
) -> None:
    with moved_hub(tmp_path, model) as (_, environment, _):
        pass
    offline = environment | {"HF_HUB_OFFLINE": "1"}
    failed = load({"model": REPO}, offline, tmp_path / "log")
    assert isinstance(failed, LoaderFailed), failed
    assert f"pin that one with 'revision: {commit_of('old')}'" in failed.message
    assert (failed.code, failed.permanent) == ("checkpoint", True)
    # As it says.
    index = load({"model": REPO, "revision": commit_of("old")}, offline, tmp_path / "log")
    assert isinstance(index, TensorIndex), index
    assert index.key.checkpoint.root.endswith(commit_of("old"))
