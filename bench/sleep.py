"""Engines that sleep and wake on mapped weights: times, memory, tokens, on one GPU.

    python bench/sleep.py --work /tmp/sleep --json sleep.json

An 8B model, compiled with CUDA graphs. Each part runs on its own: a failure is shown and does not
end the others. Parts: cycles, standby, turns, daemon, own (vLLM's own back end), formats. Figures
stand beside their limits; "!" marks one that is missed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

GIB = 1 << 30
# Between sleep and wake, in every other cycle.
REST_S = 1.0
PARTS = ("cycles", "standby", "turns", "daemon", "own", "formats")
OURS = {"enable_sleep_mode": True, "sleep_mode_backend": "weightcached"}
COMPILED = {"max_model_len": 4096, "gpu_memory_utilization": 0.85}
SMALL = {
    "max_model_len": 1024, "enforce_eager": True, "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": GIB, **OURS,
}  # fmt: skip
TINY = {
    "tiny": {
        "hidden": 512, "intermediate": 1024, "layers": 2, "heads": 8, "kv_heads": 4, "vocab": 8192
    }
}  # fmt: skip
# With empty caches of vLLM a start takes two minutes.
START_TIMEOUT_S, ANSWER_TIMEOUT_S, DAEMON_TIMEOUT_S = 240.0, 40.0, 150.0
STARTED_S = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - STARTED_S:6.1f} {text}", flush=True)


# ---- an engine's process


def serve_engine() -> None:
    """Answer commands on standard input, one JSON line each."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    from vllm import LLM, SamplingParams

    llm: Any = None

    def generate(count: int, tokens: int) -> list[list[int]]:
        vocab = llm.llm_engine.model_config.get_vocab_size()
        prompts = [
            {"prompt_token_ids": [(i * 37 + j * 11) % (vocab - 8) + 3 for j in range(8)]}
            for i in range(count)
        ]
        sampling = SamplingParams(
            max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True
        )
        done = llm.generate(prompts, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in done]

    def worker() -> Any:
        return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker

    print("imported", file=out, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        began_s = time.perf_counter()
        answer: dict[str, Any] = {}
        try:
            match command["do"]:
                case "start":
                    llm = LLM(skip_tokenizer_init=True, **command["engine"])
                    config = llm.llm_engine.vllm_config.cache_config
                    answer["blocks"] = config.num_gpu_blocks
                    raw = {
                        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                        for t in worker().model_runner.kv_caches
                        if isinstance(t, torch.Tensor)
                    }
                    answer["kv_bytes"] = sum(raw.values())
                case "tokens":
                    answer["tokens"] = generate(command["prompts"], command["tokens"])
                case "sleep":
                    llm.sleep(level=command.get("level", 1))
                case "wake":
                    llm.wake_up(command.get("tags"))
                case "sleeping":
                    answer["sleeping"] = bool(llm.llm_engine.engine_core.is_sleeping())
                case "rpc":
                    llm.collective_rpc(command["method"])
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except BaseException as e:
            traceback.print_exc()
            answer["error"] = f"{type(e).__name__}: {str(e)[:400]}"
        answer["seconds"] = time.perf_counter() - began_s
        with open("/proc/self/status", encoding="utf-8") as status:
            answer["rss"] = next(
                int(row.split()[1]) * 1024 for row in status if row.startswith("VmRSS:")
            )
        print("ANSWER " + json.dumps(answer), file=out, flush=True)
    os._exit(0)


class EngineError(Exception):
    """An engine's process ended, was silent for too long, or answered with an error."""


class Engine:
    """One engine in a process of its own, which imports vLLM from the start."""

    def __init__(self, name: str, work: Path, env: dict[str, str]) -> None:
        self.name = name
        self.log = work / f"{name}.log"
        self._env = env
        self._buffer = b""
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "bench/sleep.py"), "--engine"], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, env=env, start_new_session=True,
            )  # fmt: skip

    def start(self, timeout_s: float = START_TIMEOUT_S, **engine: Any) -> dict[str, Any]:
        return self.ask("start", timeout_s, engine=engine)

    def tokens(self, prompts: int = 4, tokens: int = 16) -> Any:
        return self.ask("tokens", prompts=prompts, tokens=tokens)["tokens"]

    def ask(self, do: str, timeout_s: float = ANSWER_TIMEOUT_S, **more: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do} | more).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as e:
            raise EngineError(f"{self.name} {do}: the process is gone: {self._last()}") from e
        answer = self._answer(do, timeout_s)
        if "error" in answer:
            raise EngineError(f"{self.name} {do}: {answer['error']}; see {self.log}")
        return answer

    def _answer(self, do: str, timeout_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                if line.startswith(b"ANSWER "):
                    answer: dict[str, Any] = json.loads(line[7:])
                    return answer
                continue
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self.process.stdout], [], [], left_s)[0]:
                self.kill()
                raise EngineError(
                    f"{self.name} {do}: no answer in {timeout_s:.0f} s; see {self.log}"
                )
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            if not more:
                raise EngineError(f"{self.name} {do}: the process ended: {self._last()}")
            self._buffer += more

    def _last(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        told = [line for line in lines if "Error" in line or "error" in line]
        return " | ".join(told[-3:])[-600:]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


# ---- the daemon


class Daemon:
    """`weightcached serve` without a manager: its memory goes when it dies."""

    def __init__(self, device: str, work: Path, env: dict[str, str]) -> None:
        self.device, self.work, self.env = device, work, env
        self.manifest = work / "manifest.yaml"
        self.process: Any = None

    def place(self, models: dict[str, dict[str, Any]], max_model_len: int) -> None:
        """Write the manifest."""
        entries = [
            {
                "name": name,
                "devices": [self.device],
                "engine": engine | {"max_model_len": max_model_len},
            }
            for name, engine in models.items()
        ]
        self.manifest.write_text(json.dumps({"version": 1, "models": entries}), encoding="utf-8")

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "weightcached",
            "serve",
            self.device,
            "--manifest",
            str(self.manifest),
        ]
        with open(self.work / "daemon.log", "ab") as log:
            self.process = subprocess.Popen(
                command, env=self.env, stdout=log, stderr=log, start_new_session=True
            )

    def caches(self) -> dict[str, dict[str, Any]]:
        done = self.ctl("status", "--json")
        if done.returncode:
            return {}
        return {c["name"]: c for d in json.loads(done.stdout)["devices"] for c in d["caches"]}

    def until_loaded(self, names: Iterable[str]) -> None:
        """Wait for these caches. Raises the error of one that cannot be served."""
        deadline_s = time.monotonic() + DAEMON_TIMEOUT_S
        wanted = [f"{name}/target" for name in names]
        caches: dict[str, dict[str, Any]] = {}
        while time.monotonic() < deadline_s and self.process.poll() is None:
            caches = self.caches() or caches
            if all(caches.get(name, {}).get("state") in ("ready", "failed") for name in wanted):
                break
            time.sleep(0.3)
        states = {name: caches.get(name, {}) for name in wanted}
        for name, cache in states.items():
            if cache.get("state") != "ready":
                raise EngineError(
                    f"{name} is {cache.get('state', 'not there')} {cache.get('error', '')[:300]}: see "
                    f"{self.work / 'daemon.log'}"
                )

    def ctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "weightcached.cli.weightcachectl", *arguments], env=self.env,
            capture_output=True, text=True, check=False, timeout=DAEMON_TIMEOUT_S,
        )  # fmt: skip

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


# ---- measurements


class Bench:
    """Engines, the daemon, and the figures. A figure is (part, what, value, limit)."""

    models: dict[str, dict[str, Any]]
    daemon: Daemon
    # Used bytes before the engine that is measured, weights included.
    before_big = 0
    seconds = 540
    json_path: Path | None = None
    # On the CPU with small models, to try this program.
    rehearsal = False
    large: tuple[str, ...] = ("big",)
    max_model_len = 1024

    def __init__(self, device: str, work: Path, cycles: int, own_cycles: int, turns: int) -> None:
        self._nvml: Any = None
        if not device.startswith("cpu"):
            import pynvml

            pynvml.nvmlInit()
            self._gpu = pynvml.nvmlDeviceGetHandleByUUID(device)
            self._nvml = pynvml
        self.device, self.work = device, work
        self.cycle_count, self.own_count, self.turn_count = cycles, own_cycles, turns
        run = work / "run"
        run.mkdir(parents=True, exist_ok=True)
        run.chmod(0o700)
        self.env = dict(os.environ) | {
            "XDG_RUNTIME_DIR": str(run), "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        }  # fmt: skip
        self.rows: list[tuple[str, str, float | str, float | None]] = []
        self.errors: dict[str, str] = {}
        self.engines: dict[str, Engine] = {}
        self.reference: dict[str, Any] = {}
        self.big_kv_bytes = 0

    def used(self) -> int:
        if self._nvml is None:
            return 0
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._gpu).used)

    def row(self, part: str, what: str, value: float | str, limit: float | None = None) -> None:
        self.rows.append((part, what, value, limit))
        say(_line(part, what, value, limit))

    def part(self, name: str, run: Callable[[], None]) -> None:
        if time.monotonic() - STARTED_S > self.seconds:
            self.errors[name] = f"left out: {self.seconds} s were over"
            return
        say(f"--- {name}")
        try:
            run()
        except Exception as e:
            self.errors[name] = f"{type(e).__name__}: {e}"
            say(f"{name} FAILED: {self.errors[name]}")
            if not isinstance(e, EngineError):
                traceback.print_exc()
        self.write()

    def write(self) -> None:
        """The figures so far."""
        if self.json_path is not None:
            names = ("part", "what", "value", "limit")
            rows = [dict(zip(names, row, strict=True)) for row in self.rows]
            self.json_path.write_text(json.dumps({"rows": rows, "errors": self.errors}, indent=1))

    def engine(self, name: str) -> Engine:
        found = self.engines.get(name)
        if found is None or found.process.poll() is not None:
            found = self.engines[name] = Engine(name, self.work, self.env)
        return found

    def arguments(self, model: str, **more: Any) -> dict[str, Any]:
        extra = {"fallback": False, **more.pop("loader", {})}
        if self.rehearsal:
            kept = {
                "max_model_len": 256,
                "enforce_eager": True,
                "distributed_executor_backend": "uni",
            }
            more = kept | {"kv_cache_memory_bytes": GIB // 4}
        return {
            **self.models[model], "load_format": "ipc_cache", "model_loader_extra_config": extra, **more,
        }  # fmt: skip

    def check(self, part: str, engine: Engine, model: str, when: str) -> None:
        tokens = engine.tokens()
        expected = self.reference.setdefault(model, tokens)
        if tokens != expected:
            raise EngineError(f"tokens of {model} differ {when}")

    def first(self) -> None:
        """The engine of most parts: 8B, awake."""
        before = self.used()
        engine = self.engine("a")
        started = engine.start(**self.arguments("big", **COMPILED, **OURS))
        self.big_kv_bytes = started["kv_bytes"]
        self.row("start", "engine, s", started["seconds"])
        self.row("start", "KV cache, GiB", started["kv_bytes"] / GIB)
        self.row("start", "engine's memory with KV cache, GiB", (self.used() - before) / GIB)
        self.check("start", engine, "big", "at the start")
        self.before_big = before

    def cycles(self, name: str = "a", part: str = "cycles", count: int = 0) -> None:
        engine, count = self.engine(name), count or self.cycle_count
        sleeps: list[float] = []
        wakes: list[float] = []
        at_once: list[float] = []
        used: list[int] = []
        rss: list[int] = []
        equal = 0
        try:
            for number in range(count):
                sleeps.append(engine.ask("sleep")["seconds"])
                asleep = self.used()
                # The driver clears freed memory before it gives it out again.
                time.sleep(REST_S if number % 2 else 0)
                woke = engine.ask("wake")
                (wakes if number % 2 else at_once).append(woke["seconds"])
                used.append(asleep)
                rss.append(woke["rss"])
                self.check(part, engine, "big", f"in cycle {number}")
                equal += 1
        finally:
            self.row(part, "cycles with equal tokens", equal)
            if len(used) > 1:
                self._cycle_rows(part, sleeps, wakes, used, rss)
                what = "wake right after the sleep, s, median"
                self.row(part, what, statistics.median(at_once), None)

    def _cycle_rows(
        self, part: str, sleeps: list[float], wakes: list[float], used: list[int], rss: list[int]
    ) -> None:
        ours = part == "cycles"
        for what, values, limit in (("sleep", sleeps, 0.2), ("wake", wakes, 0.3)):
            self.row(part, f"{what}, s, median", statistics.median(values), limit if ours else None)
            self.row(part, f"{what}, s, slowest", max(values), None)
        # The weights are the daemon's, so they were used before.
        self.row(part, "asleep beside the weights, GiB", (max(used) - self.before_big) / GIB, 2.0)
        self.row(
            part, "growth on the device, first to last, MiB", (used[-1] - used[1]) / 2**20, 1.0
        )
        self.row(part, "growth of host memory, MiB", (rss[-1] - rss[1]) / 2**20, 256.0)

    def standby(self) -> None:
        a, b = self.engine("a"), self.engine("b")
        before = self.used()
        loader = {"start_parked": True}
        started = b.start(
            **self.arguments(
                "big", loader=loader, kv_cache_memory_bytes=self.big_kv_bytes, **COMPILED, **OURS
            )
        )
        self.row("standby", "start beside a serving engine, s", started["seconds"])
        self.row("standby", "parked engine costs, GiB", (self.used() - before) / GIB, 2.0)
        self.row("standby", "asleep when it is ready", str(b.ask("sleeping")["sleeping"]))
        self.check("standby", a, "big", "of the serving engine beside a parked one")
        a.ask("sleep")
        woke = b.ask("wake")
        self.row("standby", "first wake, s", woke["seconds"], 0.3)
        self.check("standby", b, "big", "after the first wake of a parked engine")
        status = self.daemon.caches().get("big/target", {})
        self.row("standby", "parked in status", sum(e["parked"] for e in status.get("engines", [])))
        began_s = time.monotonic()
        b.kill()
        gone_s = time.monotonic() - began_s
        a.ask("wake")
        a.ask("tokens", prompts=1, tokens=1)
        self.row(
            "standby", "SIGKILL to the other's first token, s", time.monotonic() - began_s, 0.9
        )
        self.row("standby", "of that until the process was gone, s", gone_s)
        self.check("standby", a, "big", "after the takeover")

    def turns(self) -> None:
        a, c = self.engine("a"), self.engine("c")
        started = c.start(
            **self.arguments("second", loader={"start_parked": True}, **COMPILED, **OURS)
        )
        self.row("turns", "second model's start, parked and measured, s", started["seconds"])
        self.row("turns", "second model's KV cache, GiB", started["kv_bytes"] / GIB)
        times: list[float] = []
        done = 0
        try:
            for number in range(self.turn_count):
                for sleeper, waker, model in ((a, c, "second"), (c, a, "big")):
                    began_s = time.monotonic()
                    sleeper.ask("sleep")
                    waker.ask("wake")
                    waker.ask("tokens", prompts=1, tokens=1)
                    times.append(time.monotonic() - began_s)
                    self.check("turns", waker, model, f"in turn {number}")
                done += 1
        finally:
            self.row("turns", "turns without a fault", done)
            if times:
                self.row("turns", "switch to first token, s, median", statistics.median(times), 1.0)
                self.row("turns", "switch to first token, s, slowest", max(times))
            c.kill()

    def daemon_part(self) -> None:
        a = self.engine("a")
        before = self.verify()
        a.ask("sleep")
        self.daemon.kill()
        a.ask("wake")
        self.check("daemon", a, "big", "after a wake without a daemon")
        a.ask("sleep")
        self.daemon.start()
        self.daemon.until_loaded(self.large)
        a.ask("wake")
        self.check("daemon", a, "big", "after the daemon came back")
        # From another daemon: the engine now holds a lease on its new mapping.
        a.ask("rpc", method="reload_weights")
        self.check("daemon", a, "big", "on the newest generation")
        a.ask("sleep")
        generation = self.daemon.caches()["big/target"]["generation"]
        done = self.daemon.ctl("reload", "--force", "--cache", "big/target")
        self.row(
            "daemon",
            "reload --force beside a sleeping engine",
            "ok" if not done.returncode else done.stderr[-200:],
        )
        cache = self.daemon.caches()["big/target"]
        self.row("daemon", "engines that map the old generation", len(cache["engines"]), 0)
        woke = a.ask("wake", timeout_s=60.0)
        self.row("daemon", "wake with another generation, s", woke["seconds"])
        self.check("daemon", a, "big", "on the generation of the reload")
        now = self.daemon.caches()["big/target"]
        self.row(
            "daemon",
            "generation",
            f"{generation} to {now['generation']}, engines {len(now['engines'])}",
        )
        self.row("daemon", "verify", f"{before}, then {self.verify()}")

    def verify(self) -> str:
        done = self.daemon.ctl("verify", "big/target")
        return "ok" if done.returncode == 0 else (done.stdout + done.stderr)[-200:]

    def own(self) -> None:
        if "a" in self.engines:
            self.engines.pop("a").kill()
            # The driver frees a killed process's memory a little later.
            time.sleep(1.5)
        e = self.engine("e")
        self.before_big = self.used()
        # As large as measured before: measuring it again would only take time.
        kv_bytes = {"kv_cache_memory_bytes": self.big_kv_bytes} if self.big_kv_bytes else {}
        e.start(**self.arguments("big", enable_sleep_mode=True, **COMPILED, **kv_bytes))
        self.check("own", e, "big", "with vLLM's own back end")
        self.cycles("e", "own", self.own_count)
        e.ask("sleep", level=2)
        e.ask("wake", tags=["weights"])
        e.ask("wake", tags=["kv_cache"])
        self.check("own", e, "big", "after level 2 and tags")
        self.row("own", "level 2, wake by tags", "tokens equal")
        e.kill()

    def formats(self, names: list[str]) -> None:
        failed = []
        self.daemon.place(self.models, self.max_model_len)
        self.daemon.ctl("reload")
        for name, cache in self.daemon.caches().items():
            say(f"cache {name}: {cache['state']} {cache['error'][:200]}")
        engines = {name: self.engine(name) for name in names}
        for name, engine in engines.items():
            try:
                engine.start(**self.arguments(name, **SMALL))
                first = engine.tokens()
                for _ in range(2):
                    engine.ask("sleep")
                    engine.ask("wake")
                    if engine.tokens() != first:
                        raise EngineError(f"{name}: tokens differ after a wake")
                self.row("formats", name, "tokens equal")
                if name == "bf16":
                    self.copied(engine)
            except EngineError as e:
                failed.append(str(e))
                self.row("formats", name, f"FAILED {e}"[:300])
            finally:
                engine.kill()
        if failed:
            raise EngineError("; ".join(failed))

    def copied(self, engine: Engine) -> None:
        """Level 2 in mode copy: from disk once the cache was released, then from the cache."""
        engine.kill()
        engine = self.engine("bf16")
        engine.start(**self.arguments("bf16", loader={"mode": "copy"}, **SMALL))
        first = engine.tokens()
        for source in ("disk", "cache"):
            engine.ask("sleep", level=2)
            engine.ask("wake", tags=["weights"])
            engine.ask("rpc", method="reload_weights")
            engine.ask("wake", tags=["kv_cache"])
            if engine.tokens() != first:
                raise EngineError(f"mode copy: tokens differ after level 2, weights from {source}")
            self.daemon.ctl("reload", "--cache", "bf16/target")
        engine.kill()
        log = engine.log.read_text(encoding="utf-8", errors="replace")
        told = ["the weights come from disk again" in log, "of bf16/target into the model" in log]
        self.row("formats", "mode copy, level 2, from disk and from the cache", str(told))

    def close(self) -> None:
        for engine in self.engines.values():
            engine.kill()
        self.daemon.kill()


def _line(part: str, what: str, value: float | str, limit: float | None) -> str:
    shown = f"{value:.3f}" if isinstance(value, float) else str(value)
    missed = limit is not None and not isinstance(value, str) and value > limit
    bound = "" if limit is None else f"  (limit {limit:g}){' !' if missed else ''}"
    return f"{part:8} {what:48} {shown}{bound}"


def make_models(
    work: Path, parts: list[str], big: Path | None, rehearsal: bool
) -> dict[str, dict[str, Any]]:
    """Checkpoints that are not there yet, and the engine arguments of each model."""
    import torch

    from bench.attach import SIZES
    from bench.checkpoint_models import CONFIGS
    from bench.checkpoints import llama_config, write_checkpoint
    from tests.fakes.drafts import Maker, Shape, write_eagle3, write_llama

    device = "cuda" if torch.cuda.is_available() else "cpu"
    models: dict[str, dict[str, Any]] = {}

    def make(name: str, write: Callable[[Path], Any]) -> Path:
        path = work / "models" / name
        if not (path / "config.json").exists():
            write(path)
        return path

    def llama(size: str, seed: int) -> Callable[[Path], Any]:
        config = llama_config(dtype="bfloat16", tied=False, **(SIZES | TINY)[size])
        return lambda path: write_checkpoint(path, config, shards=4, seed=seed, device=device)

    if rehearsal:
        for seed, name in enumerate(("big", "second", "bf16")):
            shape = Shape(dtype="float32", layers=2)
            write: Callable[[Path], Any] = partial(write_llama, maker=Maker(shape, seed))
            models[name] = {"model": str(make(name, write)), "dtype": "float32"}
        return models
    if parts != ["formats"]:
        models["big"] = {"model": str(big or make("big", llama("8b", 1)))}
    if "turns" in parts:
        models["second"] = {"model": str(make("second", llama("small", 2)))}
    if "formats" in parts:
        models["bf16"] = {"model": str(make("fp8", llama("tiny", 3)))}
        models["fp8-online"] = {"model": str(make("fp8", llama("tiny", 3))), "quantization": "fp8"}
        for name, architecture in (("moe", "qwen3-moe"), ("mla", "deepseek")):
            write = partial(write_checkpoint, config=CONFIGS[architecture](), seed=4)
            models[name] = {"model": str(make(name, write))}
        maker = Maker(Shape(), device="cpu")
        draft = make("eagle3", lambda path: write_eagle3(path, maker))
        models["draft"] = {
            "model": str(make("drafted", lambda path: write_llama(path, maker))),
            "speculative_config": {
                "method": "eagle3",
                "model": str(draft),
                "num_speculative_tokens": 3,
            },
        }
    return models


@contextlib.contextmanager
def closing(bench: Bench) -> Iterator[None]:
    """End all processes and print the figures, also after SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        print("\n".join(["", *(_line(*row) for row in bench.rows)]))
        for part, error in bench.errors.items():
            print(f"{part:8} FAILED: {error}", flush=True)
        bench.write()
        bench.close()


@click.command()
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    default=Path("/tmp/weightcached-sleep"),
    show_default=True,
)
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    default=None,
    help="Use this 8B checkpoint.",
)
@click.option("--parts", default=",".join(PARTS), show_default=True)
@click.option(
    "--formats",
    default="draft,fp8-online,moe,mla,bf16",
    show_default=True,
    help="Of the part formats.",
)
@click.option("--cycles", default=100, show_default=True)
@click.option("--own-cycles", default=10, show_default=True)
@click.option("--turns", default=20, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=None)
@click.option("--seconds", default=540, show_default=True, help="Begin no part after these.")
@click.option(
    "--rehearse", is_flag=True, help="On the CPU with small models: the course, no figures."
)
@click.option("--engine", is_flag=True, hidden=True)
def main(
    work: Path, model: Path | None, parts: str, cycles: int, own_cycles: int, turns: int, json_path: Path | None,
    seconds: int, rehearse: bool, engine: bool, formats: str,
) -> None:  # fmt: skip
    if engine:
        serve_engine()
        return
    from weightcached.system.gpus import list_gpus, visible_gpus

    chosen = [part for part in PARTS if part in parts.split(",")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    device = "cpu0" if rehearse else visible_gpus(list_gpus(), visible)[0]
    work.mkdir(parents=True, exist_ok=True)
    bench = Bench(device, work, cycles, own_cycles, turns)
    bench.seconds, bench.json_path, bench.rehearsal = seconds, json_path, rehearse
    # In a process of its own: its CUDA context would be counted.
    made = subprocess.run(
        [sys.executable, "-c", "import sys, json; from pathlib import Path; from bench.sleep import make_models; "
         "print('MODELS ' + json.dumps(make_models(Path(sys.argv[1]), sys.argv[2].split(','), "
         "Path(sys.argv[3]) if sys.argv[3] else None, bool(sys.argv[4]))))",
         str(work), ",".join(chosen), str(model or ""), "1" if rehearse else ""],
        env=bench.env, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    bench.models = json.loads(made.stdout.split("MODELS ", 1)[1])
    say(f"models: {', '.join(bench.models)}")
    bench.large = tuple(name for name in ("big", "second") if name in bench.models)
    bench.max_model_len = 256 if rehearse else 1024
    bench.daemon = Daemon(device, work, bench.env)
    small = [name for name in formats.split(",") if name in bench.models]
    at_first = bench.large or tuple(small)
    bench.daemon.place({name: bench.models[name] for name in at_first}, bench.max_model_len)
    bench.models = {name: bench.models[name] for name in (*bench.large, *small)}
    names = {"standby": "b", "turns": "c", "own": "e"}
    needed = {names[part] for part in chosen if part in names}
    if set(chosen) & {"cycles", "standby", "turns", "daemon"}:
        needed.add("a")
    steps = {
        "cycles": bench.cycles, "standby": bench.standby, "turns": bench.turns, "daemon": bench.daemon_part,
        "own": bench.own, "formats": lambda: bench.formats(small),
    }  # fmt: skip
    with closing(bench):
        bench.daemon.start()
        for name in sorted(needed):
            bench.engine(name)
        bench.part("load", lambda: bench.daemon.until_loaded(at_first))
        if set(chosen) & {"cycles", "standby", "turns", "daemon"}:
            bench.part("start", bench.first)
        for part in chosen:
            if part == "own" and "formats" in chosen and not rehearse:
                # Their imports run meanwhile.
                for name in small:
                    bench.engine(name)
            bench.part(part, steps[part])
    sys.exit(bool(bench.errors))


if __name__ == "__main__":
    main()
