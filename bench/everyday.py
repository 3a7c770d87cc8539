"""Engines beside resident weights on a real GPU: which start, with how much KV cache, and where the device ends.

    python bench/everyday.py --json everyday.json --model /tmp/m8    # about 5 minutes on one H200
    python bench/everyday.py --rows a,b --work /tmp/wc     # some rows, keeping the checkpoints for the next run

Every engine is a process of its own with a time limit. A row that fails is told and does not end
the rest. The device's use is the driver's figure after the first tokens, compared with utilization
× memory + 256 MiB.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.checkpoints import llama_config, write_checkpoint_apart  # noqa: E402
from bench.generate import prompts  # noqa: E402
from tests.fakes.daemon import DaemonProcess, model, until, write_manifest  # noqa: E402
from weightcached.errors import WeightcachedError  # noqa: E402
from weightcached.system.gpus import list_gpus, visible_gpus  # noqa: E402

MIB = 1 << 20
ALLOWED_OVER = 256 * MIB
UTILIZATION = 0.92
# The first with CUDA graphs also compiles.
START_TIMEOUT_S = 240.0
READY_TIMEOUT_S = 240.0
SIZES = {
    "8b": {"hidden": 4096, "intermediate": 14336, "layers": 32, "heads": 32, "kv_heads": 8, "vocab": 128256},
    "small": {"hidden": 2048, "intermediate": 5632, "layers": 16, "heads": 16, "kv_heads": 8, "vocab": 32000},
}  # fmt: skip
TINY = {"hidden": 256, "intermediate": 512, "layers": 4, "heads": 8, "kv_heads": 4, "vocab": 1024}
# Of every engine; main() changes it.
ARGUMENTS = {"enforce_eager": True, "max_model_len": 2048}
# Lines of an engine's log about its weights and its memory.
_TELLING = (
    "attached ", "loading from disk", "the KV cache is ", "no room", "startup plan", "Available KV cache memory",
    "held outside this process", "Error", "waiting for ",
)  # fmt: skip
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "INFO",
}  # fmt: skip


# ---- one engine, in a process of its own


def engine_main(question: dict[str, Any]) -> None:
    """Start an engine, decode, print the result, and stay until standard input ends."""
    say = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    began = time.time()
    try:
        if question["kill"]:
            _kill_before_asking(question["kill"])
        answer = _start(question["engine"])
    except BaseException as e:
        answer = {"error": f"{type(e).__name__}: {e}"[:2000]}
    say.write(json.dumps(answer | {"seconds": round(time.time() - began, 1)}) + "\n")
    say.flush()
    sys.stdin.read()
    # Not through the interpreter's shutdown, in which vLLM is slow.
    os._exit(0)


def _start(arguments: dict[str, Any]) -> dict[str, Any]:
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments)
    config = llm.llm_engine.vllm_config
    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
    outputs = llm.generate(
        prompts(4, config.model_config.get_vocab_size()), sampling, use_tqdm=False
    )
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    return {
        "tokens": list(outputs[0].outputs[0].token_ids),
        "kv_blocks": int(config.cache_config.num_gpu_blocks),
        # Under a startup plan vLLM measures nothing.
        "kv_bytes": int(
            getattr(worker, "available_kv_cache_memory_bytes", 0)
            or config.cache_config.kv_cache_memory_bytes
            or 0
        ),
        "used": total - free,
        "total": total,
    }


def _kill_before_asking(pid: int) -> None:
    """End the daemon 0.2 s before this engine asks it for the first time."""
    from weightcache_loader import client

    attach = client.attach

    def killing(*arguments: Any, **named: Any) -> Any:
        client.attach = attach
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        return attach(*arguments, **named)

    client.attach = killing


class Engine:
    """engine_main() as a process with a time limit."""

    def __init__(self, log: Path, environment: dict[str, str], *, kill: int, **engine: Any) -> None:
        self._log = log
        defaults = {
            **ARGUMENTS, "skip_tokenizer_init": True, "seed": 0,
            "distributed_executor_backend": "uni", "gpu_memory_utilization": UTILIZATION,
        }  # fmt: skip
        question = json.dumps({"engine": defaults | engine, "kill": kill})
        with open(log, "w", encoding="utf-8") as out:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__)), "--engine", question], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=out, text=True, cwd=ROOT, start_new_session=True,
                env=dict(os.environ) | ENVIRONMENT | environment | {"PYTHONPATH": _pythonpath()},
            )  # fmt: skip

    def answer(self, timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
        """The result, with the relevant lines of its log."""
        lines: queue.Queue[str] = queue.Queue()
        assert self._process.stdout is not None
        threading.Thread(
            target=lambda out: lines.put(out.readline()), args=(self._process.stdout,), daemon=True
        ).start()
        try:
            line = lines.get(timeout=timeout_s)
            found: dict[str, Any] = (
                json.loads(line) if line else {"error": "the engine's process died"}
            )
        except queue.Empty:
            found = {"error": f"no answer within {timeout_s:.0f} s"}
        log = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        found["log"] = [
            text.split("] ", 1)[-1][:400] for text in log if any(t in text for t in _TELLING)
        ][-12:]
        return found

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _pythonpath() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


# ---- the daemon, and what its manager does


class Daemon:
    """The daemon with its manager's store, which keeps the weights while it is away."""

    def __init__(self, directory: Path, device: str, models: list[dict[str, Any]]) -> None:
        self._process = DaemonProcess(directory, models, device=device)
        self._process.loader_command = None
        self._process.env = ENVIRONMENT
        self._lock = threading.Lock()
        self.runtime = self._process.runtime

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, *, keep_store: bool = False) -> None:
        with self._lock:
            self._process.launch(keep_store=keep_store)
        until(self._is_ready, "the weights are resident", bound_s=READY_TIMEOUT_S)

    def _is_ready(self) -> bool:
        # It may die while it is asked.
        with contextlib.suppress(OSError, EOFError):
            return self._process.is_ready()
        return False

    def kill(self) -> None:
        self._process.signal(signal.SIGKILL)
        self._process.wait()

    @contextlib.contextmanager
    def restarted_as_by_systemd(self) -> Iterator[None]:
        """Start it again as soon as it dies, as the unit does; once, within the block."""
        process = self._process.process
        assert process is not None

        def restart() -> None:
            process.wait()
            with self._lock:
                self._process.launch(keep_store=True)

        thread = threading.Thread(target=restart, daemon=True)
        thread.start()
        try:
            yield
        finally:
            thread.join(START_TIMEOUT_S)
            until(self._is_ready, "the daemon is back", bound_s=READY_TIMEOUT_S)

    def serve(self, models: list[dict[str, Any]]) -> None:
        """Take another manifest and load missing caches."""
        write_manifest(self._process.manifest, models)
        self._process.signal(signal.SIGHUP)
        wanted = {f"{entry['name']}/target" for entry in models}
        until(lambda: self._ready() >= wanted, "all models are resident", bound_s=READY_TIMEOUT_S)

    def _ready(self) -> set[str]:
        with contextlib.suppress(OSError, EOFError):
            if status := self._process.answer():
                return {cache.name for cache in status.caches if cache.state == "ready"}
        return set()

    def states(self) -> dict[str, str]:
        return {cache.name: cache.state for cache in self._process.status().caches}

    def close(self) -> None:
        log = self._process.log_path
        self._process.close()
        print(f"the daemon's log: {log}", flush=True)


# ---- the rows


class Rows:
    """Runs rows one after the other and keeps the result of each."""

    def __init__(
        self, daemon: Daemon, directory: Path, paths: dict[str, Path], wanted: set[str]
    ) -> None:
        self._daemon, self._directory, self._paths, self._wanted = daemon, directory, paths, wanted
        self._plans = {
            "VLLM_ENABLE_STARTUP_PLAN": "1",
            "VLLM_CACHE_ROOT": str(directory / "vllm-cache"),
        }
        self.results: list[dict[str, Any]] = []
        # Called with them after each row.
        self.keep: Callable[[list[dict[str, Any]]], None] = lambda results: None

    def run(self, row: str, what: str, action: Callable[[], dict[str, Any]]) -> None:
        if self._wanted and row not in self._wanted:
            return
        began = time.monotonic()
        try:
            result = action()
        except Exception as e:
            result = {"error": f"{type(e).__name__}: {e}"[:2000]}
        told = {"row": row, "what": what, "started": "error" not in result}
        result = told | {"row_seconds": round(time.monotonic() - began, 1)} | result
        self.results.append(result)
        print(line_of(result), flush=True)
        self.keep(self.results)

    def without_us(self) -> None:
        """The measure of the other rows: vLLM alone, without and with a startup plan of its own."""
        plain = {"load_format": "auto", "model_loader_extra_config": {}}
        self.run("p1", "plain vLLM", lambda: self._alone("p1", "8b", plan=True, **plain))
        self.run(
            "p2",
            "plain vLLM, with the plan that (p1) saved",
            lambda: self._alone("p2", "8b", plan=True, **plain),
        )

    def _engine(
        self, name: str, model_name: str, *, kill: int = 0, plan: bool = False,
        loader: dict[str, Any] | None = None, **engine: Any,
    ) -> Engine:  # fmt: skip
        options = {"socket_dir": str(self._daemon.runtime), **(loader or {})}
        ours = {"load_format": "ipc_cache", "model_loader_extra_config": options}
        return Engine(
            self._directory / f"{name}.log", self._plans if plan else {}, kill=kill,
            model=str(self._paths[model_name]), **(ours | engine),
        )  # fmt: skip

    def _alone(self, name: str, model_name: str, **engine: Any) -> dict[str, Any]:
        with contextlib.closing(self._engine(name, model_name, **engine)) as started:
            answer = started.answer()
        answer["limit"] = int(UTILIZATION * answer.get("total", 0)) + ALLOWED_OVER
        return answer

    def with_one_model(self) -> None:
        """8b alone is resident."""
        self.run("a", "attached", lambda: self._alone("a", "8b", plan=True))
        self.run(
            "f1",
            "attached, with the plan that (a) saved",
            lambda: self._alone("f1", "8b", plan=True),
        )
        self.run(
            "b",
            "another key (quantization fp8)",
            lambda: self._alone("b", "8b", quantization="fp8"),
        )
        self.run("e", "daemon killed 0.2 s before, restarted by its manager", self._killed)
        self.run("f2", "daemon away: from disk, attached plan there", self._away)
        self.run(
            "f3",
            "attached, after a plan from disk was saved",
            lambda: self._alone("f3", "8b", plan=True),
        )

    def with_two_models(self) -> None:
        self.run(
            "d", "maps the small one beside 8b", lambda: self._alone("d", "small", max_num_seqs=128)
        )
        self.run("g", "two engines at 0.45, a model each", self._two)
        self.run("c", "mode copy", self._copy)

    def _killed(self) -> dict[str, Any]:
        with self._daemon.restarted_as_by_systemd():
            answer = self._alone("e", "8b", kill=self._daemon.pid)
            if "error" in answer and self._daemon._process.process.poll() is None:  # type: ignore[union-attr]
                # It did not come so far: end the wait for a restart.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._daemon.pid, signal.SIGKILL)
        return answer

    def _away(self) -> dict[str, Any]:
        self._daemon.kill()
        try:
            return self._alone("f2", "8b", plan=True, loader={"connect_timeout_s": 1.0})
        finally:
            self._daemon.start(keep_store=True)

    def _two(self) -> dict[str, Any]:
        answers = []
        with contextlib.ExitStack() as stack:
            for name in ("8b", "small"):
                engine = stack.enter_context(
                    contextlib.closing(self._engine(f"g-{name}", name, gpu_memory_utilization=0.45))
                )
                answers.append(engine.answer())
        first, last = answers
        result = last | {"kv_blocks": [a.get("kv_blocks") for a in answers], "first": first}
        result["kv_bytes"] = sum(a.get("kv_bytes", 0) for a in answers)
        result["limit"] = int(0.9 * last.get("total", 0)) + ALLOWED_OVER
        if "error" in first:
            result["error"] = f"the first: {first['error']}"
        return result

    def _copy(self) -> dict[str, Any]:
        answer = self._alone("c", "8b", loader={"mode": "copy"})
        return answer | {"states": self._daemon.states()}


def line_of(result: dict[str, Any]) -> str:
    """One line of the table."""
    used, limit = result.get("used", 0), result.get("limit", 0)
    verdict = "" if not used else ("within" if used <= limit else "OVER")
    how = next(
        (word for word, sign in (("mapped", "attached "), ("disk", "loading from disk"))
         if any(text.startswith(sign) for text in result.get("log", []))), "-",
    )  # fmt: skip
    kv = result.get("kv_bytes", 0)
    return (
        f"{result['row']:<3} {'started' if result['started'] else 'DEAD':<8} {how:<7} KV {kv / 2**30:7.2f} GiB "
        f"{result.get('kv_blocks')!s:>16} blocks  device {used / 2**30:7.2f} of {limit / 2**30:7.2f} GiB {verdict:<7}"
        f"{result['row_seconds']:6.1f} s  {result['what']}"
        + (f"\n      {result['error'][:300]}" if "error" in result else "")
    )


def make_checkpoints(
    work: Path, *, tiny: bool, on: str, given: dict[str, Path | None]
) -> dict[str, Path]:
    """Random checkpoints, kept for the next run, of the models that are not given."""
    paths = {name: path for name, path in given.items() if path is not None}
    for seed, (name, size) in enumerate(SIZES.items()):
        if name in paths:
            continue
        path = work / (f"{name}-tiny" if tiny else name)
        if not (path / "config.json").exists():
            config = llama_config(**(TINY if tiny else size), dtype="bfloat16", tied=False)
            # config.json comes last: an interrupted run begins anew.
            write_checkpoint_apart(path, config, shards=1 if tiny else 4, seed=seed, device=on)
        paths[name] = path
    return paths


@click.command()
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path), help="Write all figures there."
)
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    help="Keep checkpoints here. Default: /dev/shm, removed after.",
)
@click.option(
    "--model", "model_path", type=click.Path(path_type=Path), help="Use this 8B checkpoint."
)
@click.option("--small", type=click.Path(path_type=Path), help="Use this one as the second model.")
@click.option("--rows", default="", help="Only these, e.g. a,b.")
@click.option("--graphs", is_flag=True, help="torch.compile and CUDA graphs, as by default.")
@click.option("--cpu", is_flag=True, help="Tiny models on cpu0: tries the program, not the memory.")
@click.option("--engine", "engine_question", hidden=True)
def main(
    json_path: Path | None, work: Path | None, model_path: Path | None, small: Path | None, rows: str, graphs: bool,
    cpu: bool, engine_question: str | None,
) -> None:  # fmt: skip
    """Start engines beside resident weights, one row after the other."""
    if engine_question is not None:
        engine_main(json.loads(engine_question))
    # A time limit ends the daemon and engines too, and the rows so far are written.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    device = "cpu0" if cpu else visible_gpus(list_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))[0]
    with contextlib.ExitStack() as stack:
        # Short: a socket's path has to fit into 107 bytes.
        directory = Path(tempfile.mkdtemp(prefix="wce-", dir="/tmp"))
        if work is None:
            work = Path(tempfile.mkdtemp(prefix="wce-", dir="/tmp" if cpu else "/dev/shm"))
            stack.callback(shutil.rmtree, work)
        began = time.monotonic()
        given = {"8b": model_path, "small": small}
        paths = make_checkpoints(work, tiny=cpu, on="cpu" if cpu else "cuda", given=given)
        print(f"checkpoints after {time.monotonic() - began:.0f} s", flush=True)
        ARGUMENTS["enforce_eager"] = not graphs
        entries = [model(name, paths[name], device, **ARGUMENTS) for name in SIZES]
        daemon = Daemon(directory, device, entries[:1])
        stack.callback(daemon.close)
        every = Rows(daemon, directory, paths, set(filter(None, rows.split(","))))

        def keep(results: list[dict[str, Any]]) -> None:
            if json_path is not None:
                document = {"device": device, "utilization": UTILIZATION, "rows": results}
                json_path.write_text(json.dumps(document, indent=1), encoding="utf-8")

        every.keep = keep
        try:
            every.without_us()
            daemon.start()
            print(f"8b resident after {time.monotonic() - began:.0f} s", flush=True)
            every.with_one_model()
            if not every._wanted or every._wanted & {"c", "d", "g"}:
                daemon.serve(entries)
                every.with_two_models()
        except (WeightcachedError, AssertionError, OSError) as e:
            print(f"given up: {type(e).__name__}: {e}", flush=True)
        finally:
            keep(every.results)
            print(f"\nafter {time.monotonic() - began:.0f} s:", flush=True)
            for result in every.results:
                print(line_of(result), flush=True)
    sys.exit(int(any(not result["started"] for result in every.results)))


if __name__ == "__main__":
    main()
