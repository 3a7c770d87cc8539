"""Attach, Memory and Verify: each answer, from a real daemon with a real child."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import xxhash

from tests.fakes import pauses
from tests.fakes.checkpoints import (
    MIB,
    WEIGHTS,
    identity_of,
    key_of,
    with_checkpoint,
    write_checkpoint,
)
from tests.fakes.client import Client
from tests.fakes.daemon import DaemonProcess, environment, model, until, write_manifest
from weightcached.checkpoint.identity import CheckpointIdentity
from weightcached.index.key import WeightCacheKey
from weightcached.index.tensors import MAX_INDEX_BYTES, decode, digest_of
from weightcached.system.fds import is_sealed, read_sealed
from weightcached.wire.messages import (
    Absent,
    Attach,
    Failed,
    Loading,
    Memory,
    Mismatch,
    NeedDigest,
    Progress,
    Ready,
    Reload,
    ReloadReply,
    Reply,
    Verify,
)

Launcher = Callable[..., DaemonProcess]


def key(checkpoint: Path, **engine: object) -> WeightCacheKey:
    return key_of({"model": str(checkpoint), **engine})


def test_ready_brings_index_and_segments_with_the_checkpoints_bytes(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    with daemon.client() as engine:
        handout = engine.attach(key(checkpoint))
        data = read_sealed(handout.index_fd.fileno(), max_nbytes=MAX_INDEX_BYTES)
        index = decode(data)
        pieces = [
            os.pread(fd.fileno(), os.fstat(fd.fileno()).st_size, 0) for fd in handout.segment_fds
        ]
        assert all(is_sealed(fd.fileno()) for fd in handout.segment_fds)
        handout.close()
    assert b"".join(pieces) == (checkpoint / WEIGHTS).read_bytes()
    assert [xxhash.xxh3_128(piece).digest() for piece in pieces] == [
        s.digest for s in index.storages
    ]
    assert handout.ready == Ready(
        cache="tiny/target",
        generation=1,
        nbytes=3 * MIB,
        segment_nbytes=[3 * MIB // 2] * 2,
        index_digest=digest_of(data),
        descriptors=3,
    )


def test_more_segments_than_fit_in_one_packet_arrive_in_order(
    make_daemon: Launcher, checkpoint: Path
) -> None:
    daemon = make_daemon([model("tiny", checkpoint, x_segments=600)]).start()
    with daemon.client() as engine:
        handout = engine.attach(key(checkpoint))
        pieces = [
            os.pread(fd.fileno(), os.fstat(fd.fileno()).st_size, 0) for fd in handout.segment_fds
        ]
        handout.close()
    assert len(pieces) == 600
    assert b"".join(pieces)[: 3 * MIB] == (checkpoint / WEIGHTS).read_bytes()


def test_memory_gives_the_counts_without_descriptors_or_lease(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    with daemon.client() as engine:
        ready = engine.expect(Memory(key=key(checkpoint)), Ready)
        assert (ready.nbytes, ready.descriptors) == (3 * MIB, 0)
        assert daemon.status().caches[0].engines == []


def test_mismatch_names_fields_with_both_values(daemon: DaemonProcess, checkpoint: Path) -> None:
    with daemon.client() as engine:
        asked = key(checkpoint, dtype="float16", x_vllm="0.33.0")
        mismatch = engine.expect(Attach(key=asked), Mismatch)
    assert mismatch.cache == "tiny/target"
    assert [tuple(msgspec.structs.astuple(f)) for f in mismatch.fields] == [
        ("dtype", "bfloat16", "float16"),
        ("versions.vllm", "0.32.0", "0.33.0"),
    ]


def test_mismatch_is_against_the_nearest_cache(make_daemon: Launcher, checkpoint: Path) -> None:
    far = model("far", checkpoint, dtype="float32", x_vllm="0.1")
    near = model("near", checkpoint, dtype="float16")
    daemon = make_daemon([far, near]).start()
    with daemon.client() as engine:
        mismatch = engine.expect(Attach(key=key(checkpoint)), Mismatch)
    assert (mismatch.cache, [f.field for f in mismatch.fields]) == ("near/target", ["dtype"])


def test_absent_for_a_role_that_no_cache_has(daemon: DaemonProcess, checkpoint: Path) -> None:
    with daemon.client() as engine:
        draft = key_of({"model": str(checkpoint)}, role="draft")
        absent = engine.expect(Attach(key=draft), Absent)
    assert absent.reason == "no cache in role draft on cpu0: the manifest gives it tiny/target"


def test_failed_carries_the_loaders_error(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    other = write_checkpoint(short_tmp / "other", seed=2)
    faulty = model("faulty", other, x_fault="exception-in-packing", dtype="float16")
    daemon = make_daemon([model("tiny", checkpoint), faulty])
    # An attempt after a second would say Loading.
    daemon.options = ["--no-retry"]
    daemon.start()
    with daemon.client() as engine:
        failed = engine.expect(Attach(key=key(other, dtype="float16")), Failed)
    assert failed == Failed(
        cache="faulty/target",
        error="loader of faulty/target ended with status 1: "
        "RuntimeError: CUDA error: an illegal memory access was encountered",
    )


def test_waiting_engine_gets_loading_and_then_its_weights(
    make_daemon: Launcher, checkpoint: Path, gate: Path
) -> None:
    daemon = make_daemon([model("tiny", checkpoint, x_gate=str(gate))]).launch()
    daemon.notified("weights")
    with daemon.client() as engine:
        loading = engine.expect(Attach(key=key(checkpoint)), Loading)
        assert (loading.cache, loading.phase) == ("tiny/target", "weights")
        assert (loading.done_bytes, loading.total_bytes) == (3 * MIB, 3 * MIB)
        # Repeated while it lasts.
        assert isinstance(engine.receive(), Loading)
        gate.write_bytes(b"")
        while isinstance(reply := engine.receive(), Loading):
            pass
        assert isinstance(reply, Ready)


def test_loading_is_final_without_wait(make_daemon: Launcher, checkpoint: Path, gate: Path) -> None:
    daemon = make_daemon([model("tiny", checkpoint, x_gate=str(gate))]).launch()
    daemon.notified("weights")
    with daemon.client() as engine:
        engine.expect(Attach(key=key(checkpoint), wait=False), Loading)
        engine.expect(Memory(key=key(checkpoint)), Loading)
    gate.write_bytes(b"")


def test_engine_that_comes_before_the_manifest_was_read_waits_for_it(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    held = pauses.Pauses(short_tmp / "pauses")
    held.arm("manifest")
    daemon = make_daemon([model("tiny", checkpoint)])
    daemon.module, daemon.env = "tests.fakes.pauses", {pauses.VARIABLE: str(held.directory)}
    daemon.launch()
    until(
        lambda: held.reached("manifest") and daemon.answer() is not None,
        "it serves and reads its manifest",
    )
    assert (daemon.status().state, daemon.status().caches) == ("loading", [])
    with daemon.client() as engine, daemon.client() as other:
        engine.send(Attach(key=key(checkpoint)))
        other.send(Memory(key=key(checkpoint)))
        # An engine would take its silence for a hang.
        assert engine.receive() == Loading(cache="cpu0", phase="queued")
        assert daemon.status().state == "loading"
        held.let_go("manifest", lambda: False)
        reply = engine.receive()
        while isinstance(reply, Loading):
            reply = engine.receive()
        assert isinstance(reply, Ready), reply
        engine.take(reply).close()
        assert isinstance(other.receive(), Loading | Ready)


def test_unknown_key_may_match_until_the_loader_says_it(
    make_daemon: Launcher, checkpoint: Path, gate: Path
) -> None:
    """Before the loader knows its key, any engine of the role waits; afterwards others are refused."""
    daemon = make_daemon([model("tiny", checkpoint, x_gate_before_key=str(gate))]).launch()
    daemon.notified("configuring")
    with daemon.client() as engine:
        engine.expect(Attach(key=key(checkpoint, dtype="float16")), Loading)
        gate.write_bytes(b"")
        while isinstance(reply := engine.receive(), Loading):
            pass
        assert isinstance(reply, Mismatch)
        assert [f.field for f in reply.fields] == ["dtype"]


def test_verify_hands_out_without_a_lease(daemon: DaemonProcess) -> None:
    with daemon.client("ctl") as tool:
        handout = tool.take(tool.expect(Verify(cache="tiny/target"), Ready))
        assert len(handout.segment_fds) == 2
        handout.close()
        assert daemon.status().caches[0].engines == []
        absent = tool.expect(Verify(cache="other/target"), Absent)
    assert absent.reason == "no cache 'other/target' on cpu0: it has tiny/target"


# ---- the checkpoint


def test_copy_of_the_checkpoint_is_asked_for_digests_and_then_served(
    daemon: DaemonProcess, checkpoint: Path, short_tmp: Path
) -> None:
    copy = write_checkpoint(short_tmp / "copy")
    asked = key(copy)
    with daemon.client() as engine:
        first = engine.expect(Attach(key=with_checkpoint(asked, sample="")), NeedDigest)
        assert (first.rung, first.files) == ("sample", [WEIGHTS, "model.safetensors.index.json"])
        second = final(engine, Attach(key=asked))
        assert isinstance(second, NeedDigest)
        assert (second.rung, second.files) == ("full", first.files)
        engine.attach(with_checkpoint(asked, full=full_digest(copy))).close()


def test_daemons_own_digest_is_made_once(daemon: DaemonProcess, short_tmp: Path) -> None:
    copy = write_checkpoint(short_tmp / "copy")
    asked = with_checkpoint(key(copy), full=full_digest(copy))
    for _ in range(2):
        with daemon.client() as engine:
            engine.attach(asked).close()
    assert daemon.log.count("digest made cache=tiny/target generation=1") == 1


def test_one_changed_value_is_never_taken_for_the_original(
    daemon: DaemonProcess, checkpoint: Path, short_tmp: Path
) -> None:
    other = write_checkpoint(short_tmp / "other")
    with open(other / WEIGHTS, "r+b") as f:
        # In a place that the sample does not see.
        f.seek(2 * MIB)
        f.write(b"\xff")
    with daemon.client() as engine:
        reply = final(engine, Attach(key=with_checkpoint(key(other), full=full_digest(other))))
    assert isinstance(reply, Mismatch)
    (field,) = reply.fields
    assert (field.field, field.asked) == ("checkpoint", str(other))
    assert field.cached.startswith(f"{checkpoint} (")


def test_new_status_of_the_same_bytes_is_no_other_checkpoint(
    daemon: DaemonProcess, checkpoint: Path, short_tmp: Path
) -> None:
    copy = write_checkpoint(short_tmp / "copy")
    until(lambda: "digest made" in daemon.log, "the digest is made")
    os.utime(checkpoint / WEIGHTS)
    (checkpoint / WEIGHTS).chmod(0o400)
    for directory in (checkpoint, copy):
        with daemon.client() as engine:
            engine.attach(with_checkpoint(key(directory), full=full_digest(directory))).close()
    assert outcomes(daemon) == [("unchanged", 1)]


def test_other_bytes_under_the_same_status_are_another_checkpoint(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    path = checkpoint / WEIGHTS
    until(lambda: "digest made" in daemon.log, "the digest is made")
    before = path.stat()
    with open(path, "r+b") as f:
        # In a place that the sample does not see.
        f.seek(2 * MIB)
        f.write(b"\xff")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with daemon.client() as engine:
        asked = with_checkpoint(key(checkpoint), full=full_digest(checkpoint))
        mismatch = final(engine, Attach(key=asked))
    assert isinstance(mismatch, Mismatch)
    assert [field.field for field in mismatch.fields] == ["checkpoint"]
    assert outcomes(daemon) == [("loaded", 2)]
    with daemon.client() as engine:
        engine.attach(key(checkpoint)).close()


def final(engine: Client, request: Attach) -> Reply:
    """The answer, once the daemon has made its digest."""
    reply = engine.ask(request)
    while isinstance(reply, Loading):
        reply = engine.receive()
    return reply


def outcomes(daemon: DaemonProcess) -> list[tuple[str, int]]:
    with daemon.client("ctl") as tool:
        reply = tool.ask(Reload())
        while isinstance(reply, Progress):
            reply = tool.receive()
    assert isinstance(reply, ReloadReply)
    return [(o.outcome, o.generation) for o in reply.outcomes]


def test_sampled_identity_stops_at_the_sample(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    copy = write_checkpoint(short_tmp / "copy")
    daemon = make_daemon([{**model("tiny", checkpoint), "identity": "sampled"}]).start()
    with daemon.client() as engine:
        engine.attach(key(copy)).close()


def test_equal_checkpoint_wins_over_an_undecided_one(
    make_daemon: Launcher, checkpoint: Path, short_tmp: Path
) -> None:
    """A base model and its fine-tune have one architecture; each engine gets its own."""
    tuned = write_checkpoint(short_tmp / "tuned", seed=2)
    daemon = make_daemon([model("base", checkpoint), model("tuned", tuned)]).start()
    with daemon.client() as engine:
        handout = engine.attach(key(tuned))
        handout.close()
    assert handout.ready.cache == "tuned/target"


def full_digest(checkpoint: Path) -> str:
    """As the engine makes it, by the identity's own command."""
    identity = msgspec.json.encode(identity_of(checkpoint))
    command = [sys.executable, "-m", "weightcached.checkpoint.identity", "full"]
    done = subprocess.run(
        command, input=identity, capture_output=True, check=True, env=environment()
    )
    return msgspec.json.decode(done.stdout, type=CheckpointIdentity).full


def test_manifest_written_while_serving_changes_nothing_by_itself(
    daemon: DaemonProcess, checkpoint: Path
) -> None:
    write_manifest(daemon.manifest, [model("other", checkpoint)])
    with daemon.client() as engine:
        engine.attach(key(checkpoint)).close()
