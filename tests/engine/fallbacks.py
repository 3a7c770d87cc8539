"""The plug-in in a process with real vLLM, against a scripted daemon: one question and one answer
per line.

    {"case": name, "options": {…}}       ask for the memory, then load; the result, the log and the counts
    {"story": name}                      one of STORIES
    {"checkpoint": path, "rung": "full", "options": {…}}   the engine's own checkpoint is this one, and the daemon asks
                                                           for its digest; `change`: a file to write to just then

CASES are the reasons against mapping, each as it is brought about.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.engine.answers import open_channel
from tests.fakes.models import an_index
from tests.fakes.stub_daemon import (
    Answer,
    Packet,
    Script,
    Silence,
    StubDaemon,
    cache,
    status,
    welcome,
)
from weightcached.index import tensors as index_format
from weightcached.system.fds import sealed_memfd
from weightcached.wire.messages import (
    Absent,
    Descriptors,
    Failed,
    FieldMismatch,
    Loading,
    Mismatch,
    NeedDigest,
    Ready,
    Refused,
    Released,
    Request,
    Status,
    encode,
)

CACHE = "tiny/target"
NOBODY = 65534
# Above what any machine needs: a busy one must not fail for another reason than the case brings about.
PATIENCE_S = 30.0


def handing_out(**index: Any) -> Script:
    """A daemon with one generation of one small segment."""
    data = index_format.encode(an_index(**index))

    def script(request: Request) -> Iterator[Answer]:
        if isinstance(request, Status):
            yield status("cpu0")
            return
        digest = index_format.digest_of(data)
        yield Ready(
            cache=CACHE, generation=1, nbytes=4096, segment_nbytes=[4096], index_digest=digest, descriptors=2
        )  # fmt: skip
        fds = [sealed_memfd("index", data), sealed_memfd("segment", bytes(4096))]
        yield Packet(encode(Descriptors(first=0)), [fd.fileno() for fd in fds])
        for fd in fds:
            fd.close()

    return script


def saying(*answers: Answer) -> Script:
    """A daemon that answers so, and holds nothing."""
    return lambda request: [status("cpu0")] if isinstance(request, Status) else answers


def loading_forever(request: Request) -> Iterable[Answer]:
    if isinstance(request, Status):
        yield status("cpu0")
        return
    while True:
        yield Loading(cache=CACHE, phase="weights", done_bytes=5, total_bytes=9)
        time.sleep(0.02)


class Process:
    """One configuration, its stand-in groups, and a socket directory per question."""

    def __init__(self, model: str, *, rank_here: int = 0, world_size: int = 1) -> None:
        from vllm.model_executor import model_loader
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader

        from weightcached.vllm_compat import solo_rank
        from weightcached.wire.loader_job import LoaderJob

        class Disk(BaseModelLoader):
            """Stands for vLLM's default loader and the user's: its model records its caller and
            arguments.
            """

            def download_model(self, model_config: Any) -> None:
                pass

            def load_weights(self, model: nn.Module, model_config: Any) -> None:
                pass

            def load_model(
                self, vllm_config: Any, model_config: Any, prefix: str = ""
            ) -> nn.Module:
                own = nn.Identity()
                own.loaded = [
                    self.load_config.load_format,
                    self.load_config.model_loader_extra_config,
                ]
                return own

        for load_format in ("auto", "user_disk"):
            model_loader._LOAD_FORMAT_TO_MODEL_LOADER[load_format] = Disk
        self.directory = Path(tempfile.mkdtemp(prefix="wc-"))
        self.socket = self.directory / f"cpu{rank_here}.sock"
        job = LoaderJob(
            device="cpu0", cache=CACHE, role="target", generation=1, spec_digest="", boot_id="", socket_fd=0, rank=0,
            engine={
                "model": model, "enforce_eager": True, "max_model_len": 256, "tensor_parallel_size": world_size
            },
        )  # fmt: skip
        self.config = solo_rank.create_vllm_config(job)
        self.log: list[str] = []
        handler = logging.Handler(logging.INFO)
        handler.emit = lambda record: self.log.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("vllm.weightcached").addHandler(handler)

    def loader(self, options: dict[str, Any]) -> Any:
        from weightcache_loader.ipc_loader import IpcModelLoader

        options = {
            "socket_dir": str(self.directory),
            "connect_timeout_s": PATIENCE_S,
            "state_timeout_s": PATIENCE_S,
        } | options
        load = dataclasses.replace(
            self.config.load_config, load_format="ipc_cache", model_loader_extra_config=options
        )  # fmt: skip
        return IpcModelLoader(load)

    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        """Both questions, as an engine asks them: (a loader for each)."""
        from weightcache_loader import fallback

        before = fallback.counts.copy()
        self.log.clear()
        answer: dict[str, Any] = {}
        began, worked = time.monotonic(), time.process_time()
        try:
            answer["memory"] = self.loader(options).get_external_weight_memory(self.config)
            model = self.loader(options).load_model(self.config, self.config.model_config)
            answer["loaded"] = getattr(model, "loaded", None)
            answer["mapped"] = hasattr(model, "generation")
        except Exception as e:
            answer["error"] = [type(e).__name__, str(e)]
        finally:
            self.config.compilation_config.static_forward_context.clear()
        answer["seconds"] = time.monotonic() - began
        answer["cpu_seconds"] = time.process_time() - worked
        answer["log"] = list(self.log)
        answer["counted"] = dict(fallback.counts - before)
        return answer


Context = Callable[[Process], contextlib.AbstractContextManager[Any]]


def daemon(script: Script = lambda request: [], *greeting: Answer, **patched: Any) -> Context:
    """A scripted daemon. patched: attributes of the plug-in's client during the case."""

    @contextlib.contextmanager
    def context(process: Process) -> Iterator[Any]:
        from weightcache_loader import client

        with contextlib.ExitStack() as stack:
            for name, value in patched.items():
                stack.enter_context(mock.patch.object(client, name, value))
            yield stack.enter_context(StubDaemon(process.socket, script, greeting))

    return context


@contextlib.contextmanager
def dead_daemon(process: Process) -> Iterator[None]:
    with StubDaemon(process.socket) as stub:
        stub.path = process.directory / "nothing"
    yield
    process.socket.unlink()


@contextlib.contextmanager
def unreadable(process: Process) -> Iterator[None]:
    """The socket's mode forbids it; root, whom no mode stops, asks as nobody."""
    from weightcached.wire import connection as client

    open_socket = client._open_socket

    def as_nobody(path: Path, timeout_s: float) -> Any:
        if os.getuid():
            return open_socket(path, timeout_s)
        os.seteuid(NOBODY)
        try:
            return open_socket(path, timeout_s)
        finally:
            os.seteuid(0)

    with StubDaemon(process.socket), mock.patch.object(client, "_open_socket", as_nobody):
        process.socket.chmod(0)
        yield


@contextlib.contextmanager
def open_directory(process: Process) -> Iterator[None]:
    with StubDaemon(process.socket):
        process.directory.chmod(0o755)
        yield
        process.directory.chmod(0o700)


@contextlib.contextmanager
def another_user(process: Process) -> Iterator[None]:
    from weightcached.wire import connection as client

    with StubDaemon(process.socket), mock.patch.object(client, "getuid", return_value=4242):
        yield


def configured(part: str, **changed: Any) -> Context:
    """The engine's configuration differs so; a daemon would be ready."""

    @contextlib.contextmanager
    def context(process: Process) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            target = process.config
            for name in filter(None, part.split(".")):
                target = getattr(target, name)
            for name, value in changed.items():
                stack.enter_context(mock.patch.object(target, name, value, create=True))
            stack.enter_context(StubDaemon(process.socket, handing_out()))
            yield

    return context


def failing(owner: str, name: str, error: Callable[[], Exception]) -> Context:
    """A step of the plug-in fails; a daemon is ready."""

    @contextlib.contextmanager
    def context(process: Process) -> Iterator[None]:
        from weightcache_loader import ipc_loader

        target = getattr(ipc_loader, owner) if owner else ipc_loader
        with (
            mock.patch.object(target, name, side_effect=error()),
            StubDaemon(process.socket, handing_out()),
        ):
            yield

    return context


@contextlib.contextmanager
def unsupported_platform(process: Process) -> Iterator[None]:
    from weightcached.vllm_compat import build

    with mock.patch.object(build, "stage_of_platform", return_value=""):
        yield


@contextlib.contextmanager
def without_room(process: Process) -> Iterator[None]:
    """A daemon holds another model, and the device has 1 MiB left."""
    from weightcached.segments.host import HostBackend

    differs = Mismatch(
        cache=CACHE, fields=[FieldMismatch("dtype", "torch.bfloat16", "torch.float16")]
    )

    def script(request: Request) -> Iterable[Answer]:
        return (
            [status("cpu0", cache(CACHE, bytes=3 << 30))]
            if isinstance(request, Status)
            else [differs]
        )

    with (
        StubDaemon(process.socket, script),
        mock.patch.object(HostBackend, "free_bytes", return_value=(1 << 20, 4 << 30)),
        mock.patch("weightcached.vllm_compat.room.least_bytes", return_value=2 << 30),
    ):
        yield


def _unsupported() -> Exception:
    from weightcached.errors import UnsupportedQuantForIPCError

    return UnsupportedQuantForIPCError(
        "model.layers.0.mlp: method Odd sets attribute lut, a numpy.ndarray"
    )


def _no_checkpoint() -> Exception:
    from weightcached.errors import CheckpointError

    return CheckpointError("checkpoint /models/x has no weight files")


CASES: dict[str, Context] = {
    "absent-daemon": lambda process: contextlib.nullcontext(),
    "dead-daemon": dead_daemon,
    "unreadable": unreadable,
    "open-directory": open_directory,
    "wrong-owner": another_user,
    "refused-connection": daemon(lambda r: [], Refused(code="too-many", message="64 connections are open")),
    "refused": daemon(saying(Refused(code="stopping", message="the daemon is stopping"))),
    "protocol-version": daemon(lambda r: [], welcome(protocol=9)),
    "wrong-device": daemon(lambda r: [], welcome("cpu7")),
    "silent-greeting": daemon(lambda r: [], Silence()),
    "silent": daemon(saying(Silence()), _SILENCE_S=0.3),
    "hangs-up": daemon(saying(Packet(b"", then_close=True))),
    "truncated": daemon(saying(Packet(encode(Absent(reason="x" * 40))[:30]))),
    "absent": daemon(saying(Absent(reason="no cache in role target on cpu0: the manifest gives it nothing"))),
    "mismatch": daemon(saying(Mismatch(cache=CACHE, fields=[FieldMismatch("dtype", "torch.half", "torch.float")]))),
    "failed": daemon(saying(Failed(cache=CACHE, error="the disk is full"))),
    "released": daemon(saying(Released(cache=CACHE))),
    "loading": daemon(loading_forever),
    "stalled": daemon(loading_forever, _STALL_S=0.3),
    "stage": daemon(handing_out(stage="processed")),
    "skeleton": daemon(handing_out(skeleton="another")),
    "broken-index": daemon(saying(Ready(
        cache=CACHE, generation=1, nbytes=0, segment_nbytes=[], index_digest="x", descriptors=0
    ))),
    "unsupported-quantization": failing("IpcModelLoader", "_build", _unsupported),
    "unforeseen-while-binding": failing("IpcModelLoader", "_build", lambda: KeyError("weight")),
    "unforeseen-while-asking": failing("", "build_key", lambda: RuntimeError("odd configuration")),
    "checkpoint": failing("", "build_key", _no_checkpoint),
    "unsupported-platform": unsupported_platform,
    "eplb": configured("parallel_config", enable_eplb=True),
    "elastic": configured("parallel_config", enable_elastic_ep=True),
    "weight-transfer": configured("", weight_transfer_config=object()),
    "preserve": configured("model_config", sleep_preserve_parameter_names=["*.weight"]),
    "cpu-offload": configured("offload_config.uva", cpu_offload_gb=1.5),
    "prefetch-offload": configured("offload_config.prefetch", offload_group_size=2),
    "no-room": without_room,
}  # fmt: skip


def asked_for_digest(process: Process, question: dict[str, Any]) -> dict[str, Any]:
    """The daemon asks for the engine's digest. `grown` is in KiB."""

    def script(request: Request) -> Iterable[Answer]:
        if isinstance(request, Status):
            return [status("cpu0")]
        if "change" in question:
            with open(question["change"], "r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"!")
        return [NeedDigest(rung=question["rung"])]

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with (
        StubDaemon(process.socket, script),
        mock.patch.object(process.config.model_config, "model", question["checkpoint"]),
    ):
        answer = process.load(question["options"])
    return answer | {"grown": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before}


# ---- one decision


@contextlib.contextmanager
def mapping_is_told(process: Process) -> Iterator[None]:
    """Nothing is built: only the plug-in's decision matters, which ranks make together."""
    from weightcache_loader.ipc_loader import IpcModelLoader

    def build(
        self: Any, vllm_config: Any, model_config: Any, prefix: str, attachment: Any
    ) -> tuple[nn.Module, object, object]:
        mapped = nn.Identity()
        mapped.generation = attachment.ready.generation
        return mapped, object(), object()

    def keep(
        self: Any, vllm_config: Any, model_config: Any, model: Any, attachment: Any, *memory: Any
    ) -> None:
        attachment.close()

    with (
        mock.patch.object(IpcModelLoader, "_build", build),
        mock.patch.object(IpcModelLoader, "_keep", keep),
    ):
        yield


def _kinds(requests: list[Request]) -> list[str]:
    return [type(request).__name__ for request in requests if not isinstance(request, Status)]


def ready_in_between(process: Process) -> dict[str, Any]:
    """No cache at the memory query; at the load it is there."""
    stub = StubDaemon(process.socket, saying(Absent(reason="not yet")))
    options = {"fallback_load_format": "user_disk"}
    with stub, mapping_is_told(process):
        memory = process.loader(options).get_external_weight_memory(process.config)
        stub.script = handing_out()
        model = process.loader(options).load_model(process.config, process.config.model_config)
    return {
        "memory": memory,
        "mapped": hasattr(model, "generation"),
        "requests": _kinds(stub.requests),
    }


def gone_in_between(process: Process) -> dict[str, Any]:
    """The cache is there at the memory query; at the load the daemon holds another model."""
    stub = StubDaemon(process.socket, handing_out())
    with stub, mapping_is_told(process):
        memory = process.loader({}).get_external_weight_memory(process.config)
        stub.script = saying(
            Mismatch(cache="other/target", fields=[FieldMismatch("dtype", "a", "b")])
        )
        model = process.loader({}).load_model(process.config, process.config.model_config)
    return {
        "memory": memory,
        "mapped": hasattr(model, "generation"),
        "requests": _kinds(stub.requests),
    }


def another_engine_in_between(process: Process) -> dict[str, Any]:
    """An engine asks for the memory and ends; the next one in this process asks for itself."""
    stub = StubDaemon(process.socket, handing_out())
    with stub, mapping_is_told(process):
        process.loader({}).get_external_weight_memory(process.config)
        stub.script = saying(Absent(reason="the manifest gives it another model"))
        with mock.patch.object(process.config, "instance_id", "another"):
            options = {"fallback_load_format": "user_disk"}
            model = process.loader(options).load_model(process.config, process.config.model_config)
    return {"mapped": hasattr(model, "generation"), "requests": _kinds(stub.requests)}


def failed_engine_leaves_nothing(process: Process) -> dict[str, Any]:
    """With fallback off a reason is raised; the next engine asks again and maps."""
    stub = StubDaemon(process.socket, saying(Absent(reason="not yet")))
    error = ""
    with stub, mapping_is_told(process):
        try:
            process.loader({"fallback": False}).get_external_weight_memory(process.config)
        except Exception as e:
            error = str(e)
        stub.script = handing_out()
        model = process.loader({"fallback": False}).load_model(
            process.config, process.config.model_config
        )
    return {
        "error": error,
        "mapped": hasattr(model, "generation"),
        "requests": _kinds(stub.requests),
    }


STORIES = {f.__name__: f for f in (
    ready_in_between, gone_in_between, another_engine_in_between, failed_engine_leaves_nothing,
)}  # fmt: skip


def main() -> None:
    """Answer questions until standard input ends. The argument is a checkpoint."""
    say = open_channel()
    torch.set_num_threads(1)
    from weightcached.vllm_compat.solo_rank import solo_rank

    process = Process(sys.argv[1])
    with solo_rank(process.config, 0):
        for line in sys.stdin:
            question = json.loads(line)
            if "story" in question:
                answer = STORIES[question["story"]](process)
            elif "checkpoint" in question:
                answer = asked_for_digest(process, question)
            else:
                with CASES[question["case"]](process):
                    answer = process.load(question["options"])
            say(answer, process.directory)
    shutil.rmtree(process.directory)
    os._exit(0)


if __name__ == "__main__":
    main()
