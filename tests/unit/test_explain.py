"""weightcachectl explain over real sockets: plans, private tensors and refusals, word by word."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.fakes.commands import Commands
from tests.fakes.models import an_index
from tests.fakes.stub_daemon import Answer, Packet, StubDaemon, cache, status
from tests.fakes.values import encode_value
from weightcached.cli.weightcachectl import main
from weightcached.index import tensors as index_format
from weightcached.index.tensors import (
    LoadReport,
    ModulePlan,
    SegmentRecord,
    StorageRecord,
    TensorIndex,
    TensorRecord,
)
from weightcached.system.fds import OwnedFd, sealed_memfd
from weightcached.wire.messages import Descriptors, Ready, Refused, Request, Status, Verify, encode

MARLIN = "vllm.model_executor.layers.quantization.gptq.Marlin"
FP8 = "vllm.model_executor.layers.quantization.online.fp8.Online"
ATTENTION = "vllm.model_executor.layers.attention.attention.Attention"
WORKSPACE = "model.layers.3.mlp.experts.quant_method.kernel.workspace"
REFUSAL = (
    f"{WORKSPACE}: missing ({MARLIN} of model.layers.3.mlp.experts: rerun: not offered; replay: NoMetaError: the "
    "operator _C.repack.default has no fake); this model cannot be attached, load it from disk"
)


@pytest.fixture
def socket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="wc-") as base:
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        yield Path(base, "weightcached/cpu0.sock")


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(main, ["explain", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def tensor(name: str, storage: int, kind: Any = "parameter") -> TensorRecord:
    return TensorRecord(
        names=[name], kind=kind, dtype="float32", shape=[1], stride=[1], storage=storage
    )


def quantized() -> TensorIndex:
    """Two layers of three hooks, one number restored, and private tensors of three kinds."""
    plans = []
    for layer in range(2):
        base = f"model.layers.{layer}"
        values = {f"{base}.mlp.down_proj.scale": encode_value(0.5)}
        why = f"rerun: not offered; replay: {base}.mlp.down_proj.kernel: is missing, loaded as None"
        plans += [
            ModulePlan(
                module=f"{base}.qkv_proj", plan="replay", method=FP8, reason="rerun: not offered"
            ),
            ModulePlan(
                module=f"{base}.mlp.down_proj",
                plan="restore",
                method=MARLIN,
                values=values,
                reason=why,
            ),
            ModulePlan(module=f"{base}.attn", plan="rerun", method=ATTENTION),
        ]
    plans.append(
        ModulePlan(module="lm_head", plan="restore", values={"lm_head.tied": encode_value(True)})
    )
    tensors = [
        tensor("model.layers.0.qkv_proj.weight", 0),
        *(tensor(f"model.layers.{n}.norm.weight", 1 + n) for n in range(2)),
        tensor("model.layers.0.mlp.down_proj.workspace", 3, "attribute"),
        *(tensor(f"buffers[{n}]", 4 + n, "attribute") for n in range(2)),
        *(tensor(f"more.{name}", 6 + n, "attribute") for n, name in enumerate(("a", "b", "c"))),
    ]
    storages = [StorageRecord(0, 0, 1 << 20, bytes(16))]
    storages += [StorageRecord(1, 512 * n, 300, bytes(16)) for n in range(3)]
    storages += [StorageRecord(1, (1 << 20) * (1 + n), 1 << 20, bytes(16)) for n in range(5)]
    return an_index(
        tensors,
        segments=[SegmentRecord(1 << 20, private=False), SegmentRecord(6 << 20, private=True)],
        storages=storages,
        stage="processed",
        modules=plans,
        generation=2,
        load=LoadReport(
            seconds=33.0,
            finished_at=1.0,
            phases={"importing": 5.25, "weights": 20.0, "proving": 2.0},
        ),
    )


@pytest.fixture
def serve(socket: Path) -> Iterator[Callable[..., StubDaemon]]:
    """Serve an index as tiny/target; `changed` are fields of its status."""
    with ExitStack() as stack:

        def serve(index: TensorIndex, **changed: Any) -> StubDaemon:
            fds = [stack.enter_context(sealed_memfd("index", index_format.encode(index)))]
            fds += [stack.enter_context(sealed_memfd("segment", bytes(8))) for _ in index.segments]

            def script(request: Request) -> Iterable[Answer]:
                if isinstance(request, Status):
                    return [status("cpu0", cache(**({"generation": index.generation} | changed)))]
                assert isinstance(request, Verify)
                return handing_out(request.cache, index, fds)

            return stack.enter_context(StubDaemon(socket, script))

        yield serve


def handing_out(name: str, index: TensorIndex, fds: list[OwnedFd]) -> list[Answer]:
    ready = Ready(
        cache=name, generation=index.generation, nbytes=index.nbytes, segment_nbytes=[],
        index_digest=index_format.digest_of(index_format.encode(index)),
        descriptors=len(fds),
    )  # fmt: skip
    return [ready, Packet(encode(Descriptors(first=0)), [fd.fileno() for fd in fds])]


def test_plans_of_layers_that_are_alike_are_one_row(serve: Callable[..., StubDaemon]) -> None:
    serve(quantized())
    result = run("tiny")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[:3] == [
        "cpu0 tiny/target: generation 2, processed weights, 7.0 MiB, of which 6.0 MiB are copied by each engine",
        "loaded in 33 s: importing 5.2 s, weights 20 s, proving 2.0 s",
        "",
    ]
    assert [" ".join(line.split()) for line in lines[3:]] == [
        "PLAN MODULES MODULE HOOK OF VALUES WHY NO EARLIER PLAN",
        "replay 2 model.layers.*.qkv_proj Online - rerun: not offered",
        "restore 2 model.layers.*.mlp.down_proj Marlin scale rerun: not offered; replay: "
        "model.layers.*.mlp.down_proj.kernel: is missing, loaded as None",
        "rerun 2 model.layers.*.attn Attention - -",
        "restore 1 lm_head - tied -",
        "",
        "PRIVATE BECAUSE STORAGES SIZE TENSORS",
        "below 64 KiB 2 1 KiB model.layers.*.norm.weight",
        "workspace of a kernel 1 1 KiB model.layers.*.mlp.down_proj.workspace",
        "no parameter: a forward pass may write to it 5 5.0 MiB buffers[*], more.a, more.b and 1 more",
    ]


def test_all_shows_each_module_and_name(serve: Callable[..., StubDaemon]) -> None:
    serve(quantized())
    lines = [" ".join(line.split()) for line in run("tiny", "--all").stdout.splitlines()]
    assert "replay 1 model.layers.0.qkv_proj Online - rerun: not offered" in lines
    assert "replay 1 model.layers.1.qkv_proj Online - rerun: not offered" in lines
    assert lines[-1] == (
        "no parameter: a forward pass may write to it 5 5.0 MiB buffers[0], buffers[1], more.a, more.b, more.c"
    )


def test_json_has_every_plan_and_every_private_tensor(serve: Callable[..., StubDaemon]) -> None:
    serve(quantized())
    result = run("tiny/target", "--json")
    (told,) = json.loads(result.stdout)["caches"]
    plans, private = told.pop("plans"), told.pop("private")
    assert told == {
        "device": "cpu0",
        "cache": "tiny/target",
        "state": "ready",
        "error": "",
        "refused_at": "",
        "snapshot": "",
        "snapshot_use": "",
        "generation": 2,
        "stage": "processed",
        "bytes": 7 << 20,
        "private_bytes": 6 << 20,
        "load_seconds": 33.0,
        "phases": {"importing": 5.25, "weights": 20.0, "proving": 2.0},
    }
    assert len(plans) == 7
    assert plans[1] == {
        "module": "model.layers.0.mlp.down_proj",
        "plan": "restore",
        "method": MARLIN,
        "reason": "rerun: not offered; replay: model.layers.0.mlp.down_proj.kernel: is missing, loaded as None",
        "values": ["model.layers.0.mlp.down_proj.scale"],
    }
    assert [entry["names"] for entry in private][:3] == [
        ["model.layers.0.norm.weight"],
        ["model.layers.1.norm.weight"],
        ["model.layers.0.mlp.down_proj.workspace"],
    ]
    assert private[2] == {
        "names": ["model.layers.0.mlp.down_proj.workspace"],
        "bytes": 300,
        "reason": "workspace of a kernel",
    }


def test_loaded_weights_have_no_plans(serve: Callable[..., StubDaemon]) -> None:
    serve(an_index([tensor("weight", 0)]))
    assert run("tiny").stdout == (
        "cpu0 tiny/target: generation 1, loaded weights, 4 KiB, of which 0 KiB are copied by each engine\n"
        "loaded in 1.0 s\n"
        "\n"
        "plans: none, hooks run in each engine\n"
        "\n"
        "private: nothing\n"
    )


def test_refusal_of_the_next_generation_stands_beside_what_is_served(
    serve: Callable[..., StubDaemon],
) -> None:
    serve(an_index([tensor("weight", 0)]), error=REFUSAL)
    assert f"the next generation failed: {REFUSAL}\n" in run("tiny").stdout
    (told,) = json.loads(run("tiny", "--json").stdout)["caches"]
    assert (told["refused_at"], told["generation"]) == (WORKSPACE, 1)


def refusing(**changed: Any) -> Callable[[Request], Iterable[Answer]]:
    return lambda request: [
        status("cpu0", cache(**{"generation": 0, "state": "failed", **changed}))
    ]


def test_refused_model_is_explained_by_the_path_of_its_first_difference(socket: Path) -> None:
    with StubDaemon(socket, refusing(error=REFUSAL)) as daemon:
        result = run("tiny")
        assert (result.exit_code, result.stdout, result.stderr) == (
            1,
            f"cpu0 tiny/target: refused at {REFUSAL}\n",
            "",
        )
        (told,) = json.loads(run("tiny", "--json").stdout)["caches"]
        assert not any(isinstance(request, Verify) for request in daemon.requests)
    assert told == {
        "device": "cpu0",
        "cache": "tiny/target",
        "state": "failed",
        "error": REFUSAL,
        "refused_at": WORKSPACE,
        "snapshot": "",
        "snapshot_use": "",
    }


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"error": "loader of tiny died of SIGKILL"}, "failed: loader of tiny died of SIGKILL"),
        ({"state": "released"}, "released: no generation is served, its state is released"),
        ({"state": "loading", "phase": "weights", "done_bytes": 1 << 30, "total_bytes": 3 << 30},
         "is being loaded, weights, 1.0 of 3.0 GiB"),
        ({"state": "loading", "error": REFUSAL}, f"refused at {REFUSAL}"),
    ],
)  # fmt: skip
def test_cache_without_a_generation_says_why(
    socket: Path, changed: dict[str, Any], text: str
) -> None:
    with StubDaemon(socket, refusing(**changed)):
        result = run("tiny/target")
    assert (result.exit_code, result.stdout) == (1, f"cpu0 tiny/target: {text}\n")


def test_daemon_that_hands_nothing_out_is_told_of(socket: Path) -> None:
    def script(request: Request) -> Iterable[Answer]:
        if isinstance(request, Status):
            return [status("cpu0", cache())]
        return [Refused(code="busy", message="too many connections")]

    with StubDaemon(socket, script):
        result = run("tiny")
    assert (result.exit_code, result.stdout) == (
        1,
        "cpu0 tiny/target: ready: tiny/target on cpu0 cannot be explained: too many connections\n",
    )


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    commands = Commands(tmp_path / "commands")
    monkeypatch.setenv("PATH", f"{commands.folder}:{os.environ['PATH']}")
    return commands


def test_unknown_cache_exits_1_and_no_daemon_3(socket: Path, systemd: Commands) -> None:
    with StubDaemon(socket, refusing()):
        assert run("other").exit_code == 1
    systemd.answer("systemctl", "--user list-units *")
    systemd.finish()
    assert run("tiny").exit_code == 3


def test_refusal_of_a_daemon_that_ended_over_it_is_had_from_systemd(
    socket: Path, systemd: Commands
) -> None:
    unit = "weightcached@cpu0.service"
    systemd.answer(
        "systemctl", "--user list-units *", f"{unit} loaded failed failed weights on cpu0\n"
    )
    text = f"failed: serving 0 of 1 caches, 0.0 GiB; tiny/target: {REFUSAL}"
    systemd.answer(
        "systemctl", f"--user show {unit} *",
        f"Result=exit-code\nExecMainStatus=78\nStatusText={text}\nLoadState=loaded\nActiveState=failed\nSubState=failed\n",
    )  # fmt: skip
    systemd.finish()
    result = run("tiny")
    assert (result.exit_code, result.stdout) == (
        1,
        f"cpu0: {unit} is failed (exit-code, status 78): {text}\n",
    )
    assert run("tiny", "--device", "cpu1").exit_code == 3
