"""New weights under a running engine service and its clients: pauses, answers, memory.

    python bench/swap.py --models /tmp/m8 --make 8b --swaps 50 --clients 32 --json swap.json
    python bench/swap.py --models /tmp/m8 --make 8b --tensor-parallel 2 --json swap2.json
    python bench/swap.py --models /tmp/m8 --make 8b --one-generation --swaps 10 --json swap1.json
    python bench/swap.py --models /tmp/tiny --make tiny --device cpu0 --swaps 4 --clients 4

Two checkpoints of one architecture are published in turn, while clients ask all the time; each answer
must be one that the same prompt got while only one of the two was there. A daemon for each device and
one service, in a directory of their own; the first GPUs, unless --device names another. From the third
swap on weights come from snapshots. "over" marks a figure beyond its limit.

With --one-generation a budget has no room for both: the engines sleep while one takes the place of the other. Then
a pause is the time in which no engine served, and a gap that from the last answer of the one to the first of the other.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import signal
import statistics
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.engine import (
    MODEL,
    REQUEST_TIMEOUT_S,
    ClientThreads,
    Process,
    choice_of,
    devices_of,
    free_ports,
    make_model,
    say,
    until,
    workplace,
)
from weightcached.cli import publish
from weightcached.cli.progress import ProgressDisplay
from weightcached.cli.reload import reload_all
from weightcached.cli.status import ask_device
from weightcached.errors import EngineError, WeightcachedError
from weightcached.system.paths import choose_runtime_dir
from weightcached.wire.messages import ReloadReply
from weightcached.wire.services import ask_service

START_TIMEOUT_S = 300.0
RELOAD_TIMEOUT_S = 300.0
LEARN_S = 4.0
# figure: (limit, description)
LIMITS = {
    "pause_worst_s": (0.05, "pause without the drain, worst"),
    "failed": (0, "failed requests"),
    "wrong": (0, "answers of neither model"),
    "left": (0, "engines that stayed on old weights"),
    "memory_mib": (64, "device memory afterwards, beside that before, MiB"),
}
# With room for one generation: from the second swap on, whose weights have snapshots.
LIMITS_IN_PLACE = {
    "gap_worst_s": (3.0, "last answer of the old to first of the new, worst"),
    **{name: LIMITS[name] for name in ("failed", "wrong", "left", "memory_mib")},
}


class Clients(ClientThreads):
    """Clients that ask all the time, each with a prompt of its own.

    seen: by prompt, the answers while `learning`; `wrong` are answers that were not among them;
    changes: the seconds from the last answer of one model to the first one of another.
    """

    def __init__(self, port: int, count: int, tokens: int) -> None:
        self.answers = 0
        self.gaps: list[float] = []
        self.failed: list[str] = []
        self.wrong: list[str] = []
        self.learning = ""
        self.seen: dict[str, list[set[tuple[int, ...]]]] = {}
        self.by_model: Counter[str] = Counter()
        self.changes: list[float] = []
        self._to_judge: list[tuple[float, int, tuple[int, ...]]] = []
        self._port, self._count, self._tokens = port, count, tokens
        super().__init__([partial(self._run, number) for number in range(count)])

    def _run(self, number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_TIMEOUT_S)
        last_s = time.monotonic()
        while not self._stop.is_set():
            learning = self.learning
            try:
                tokens = self._ask(connection, number)
            except (OSError, http.client.HTTPException, ValueError, KeyError) as e:
                self.failed.append(repr(e)[:200])
                connection.close()
                time.sleep(0.05)
                continue
            now_s = time.monotonic()
            self.gaps.append(now_s - last_s)
            last_s = now_s
            self.answers += 1
            self._note(number, tokens, learning)
        connection.close()

    def _ask(self, connection: http.client.HTTPConnection, number: int) -> tuple[int, ...]:
        prompt = [5 + number, 14, 25, 36, 47, 58, 69, 80]
        choice = choice_of(connection, prompt, self._tokens)
        if choice["finish_reason"] != "length":
            raise ValueError(f"it ended with {choice['finish_reason']}")
        return tuple(choice["token_ids"])

    def _note(self, number: int, tokens: tuple[int, ...], learning: str) -> None:
        if learning and learning == self.learning:
            self.seen.setdefault(learning, [set() for _ in range(self._count)])[number].add(tokens)
            return
        if learning or self.learning:
            # It began before, or ends after.
            return
        self._to_judge.append((time.monotonic(), number, tokens))

    def judge(self) -> None:
        """Count the answers by model: at the end, since those of a model are not known at once."""
        last_s, last = 0.0, ""
        for at_s, number, tokens in sorted(self._to_judge):
            for name, seen in self.seen.items():
                if tokens in seen[number]:
                    self.by_model[name] += 1
                    if last and name != last:
                        self.changes.append(at_s - last_s)
                    last_s, last = at_s, name
                    break
            else:
                self.wrong.append(f"prompt {number}: {tokens[:8]}")

    def learn(self, name: str) -> None:
        """Take the next answers as those of this model."""
        self.learning = name
        time.sleep(LEARN_S)
        until(
            lambda: all(self.seen.get(name, [set()])), f"answers of {name}",
            timeout_s=REQUEST_TIMEOUT_S,
        )  # fmt: skip
        self.learning = ""


class Bench:
    """Daemons, the service, and the figures."""

    def __init__(
        self, work: Path, devices: list[str], models: list[Path], arguments: dict[str, Any]
    ) -> None:
        self.work, self.devices, self.models, self.arguments = work, devices, models, arguments
        self.sockets = work / "run"
        self.sockets.mkdir(mode=0o700)
        choose_runtime_dir(self.sockets)
        self.manifest = work / "manifest.yaml"
        self.port = free_ports(1)
        self.processes: dict[str, Process] = {}
        self.results: dict[str, Any] = {"swaps": []}
        # No swap is begun after it.
        self.deadline = float("inf")

    @property
    def on_gpu(self) -> bool:
        return not self.devices[0].startswith("cpu")

    def write(
        self, *, on_swap: str, snapshots: bool, standby: int, one_generation: bool = False
    ) -> None:
        engine = {"model": str(self.models[0]), "skip_tokenizer_init": True}
        engine |= {"tensor_parallel_size": len(self.devices)}
        document: dict[str, Any] = {
            "version": 1,
            "models": [
                {
                    "name": MODEL, "devices": self.devices, "engine": engine, "live": True,
                    "on_swap": on_swap,
                }
            ],
            "engines": [
                {
                    "name": "a", "model": MODEL, "listen": f"127.0.0.1:{self.port}",
                    "arguments": {**self.arguments, "served_model_name": [MODEL]},
                    "standby": standby, "drain_s": 60,
                }
            ],
        }  # fmt: skip
        if snapshots:
            document["snapshots"] = {"dir": str(self.work / "snapshots"), "keep": 2}
        if one_generation:
            files = sum(path.stat().st_size for path in self.models[0].glob("*.safetensors"))
            document["budget"] = int(1.5 * files / len(self.devices))
        self.manifest.write_text(json.dumps(document))

    def start(self, *, standby: int) -> None:
        common = ["--manifest", str(self.manifest), "--socket-dir", str(self.sockets)]
        for device in self.devices:
            command = [sys.executable, "-m", "weightcached", "serve", device, *common]
            self.processes[device] = Process(command, self.work / f"{device}.log")
        for device in self.devices:
            until(
                partial(self._is_served, device), f"{device} serves",
                timeout_s=START_TIMEOUT_S, poll_s=0.2,
            )  # fmt: skip
        command = [sys.executable, "-m", "weightcached", "engine", "a", *common]
        self.processes["service"] = Process(command, self.work / "service.log")
        until(lambda: self._serves(standby), "the service", timeout_s=START_TIMEOUT_S, poll_s=0.2)

    def _is_served(self, device: str) -> bool:
        if self.processes[device].process.poll() is not None:
            raise RuntimeError(f"the daemon ended:\n{self.processes[device].tail()}")
        with contextlib.suppress(WeightcachedError, OSError):
            return ask_device(device).state == "ready"
        return False

    def _serves(self, standby: int) -> bool:
        if self.processes["service"].process.poll() is not None:
            raise RuntimeError(f"the supervisor ended:\n{self.processes['service'].tail()}")
        with contextlib.suppress(EngineError):
            status = ask_service(
                self.sockets / "engines/a/service.sock", "status", timeout_s=10
            )  # fmt: skip
            states = sorted(engine["state"] for engine in status["engines"])
            return states == ["parked"] * standby + ["serving"]
        return False

    def used_bytes(self) -> int:
        if not self.on_gpu:
            return 0
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByUUID(device) for device in self.devices]
        return sum(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles)

    def swap(self, number: int, devices: list[str] | None = None) -> list[Any]:
        """Publish the other checkpoint on the devices. The engines' outcomes."""
        directory = self.models[number % 2]
        began_s = time.monotonic()
        with publish.published(self.manifest, MODEL, directory, directory.name) as kept:
            ended = reload_all(
                devices or self.devices, caches=[MODEL], force=False, timeout_s=RELOAD_TIMEOUT_S,
                display=ProgressDisplay(sys.stderr), live=True,
            )  # fmt: skip
            kept[0] = True
        for device, end in ended.items():
            if not isinstance(end, ReloadReply) or end.error:
                raise RuntimeError(f"{device}: {end}")
            if failed := [o.error for o in end.outcomes if o.outcome == "failed"]:
                raise RuntimeError(f"{device}: {failed}")
        swaps = [s for end in ended.values() for s in getattr(end, "swaps", [])]
        # Each device tells the service; the first one swaps, the others find it done.
        done = [s for s in swaps if s.outcome != "unchanged"]
        pause_s = max((s.pause_s for s in done), default=0.0)
        figures = {
            "to": directory.name, "seconds": time.monotonic() - began_s, "pause_s": pause_s,
            "drain_s": max((s.drain_s for s in done), default=0.0),
            "engines": {s.engine: s.outcome for s in done},
            "reasons": [s.reason for s in done if s.reason],
        }  # fmt: skip
        self.results["swaps"].append(figures)
        say(f"swap {number}: {figures}")
        return done

    def wait_for_snapshots(self) -> None:
        def written() -> bool:
            replies = [ask_device(device) for device in self.devices]
            return all(c.snapshot not in ("", "writing") for r in replies for c in r.caches)

        with contextlib.suppress(TimeoutError):
            until(written, "snapshots", timeout_s=START_TIMEOUT_S, poll_s=0.5)

    def run(self, *, swaps: int, clients: int, tokens: int, snapshots: bool) -> None:
        asking = Clients(self.port, clients, tokens)
        try:
            self._run(asking, swaps, snapshots)
        finally:
            # Those of the swaps that came about.
            self._note(asking)

    def _run(self, asking: Clients, swaps: int, snapshots: bool) -> None:
        with asking:
            time.sleep(2)
            asking.learn(self.models[0].name)
            if snapshots:
                self.wait_for_snapshots()
            before = self.used_bytes()
            self.swap(1)
            time.sleep(2)
            asking.learn(self.models[1].name)
            if snapshots:
                self.wait_for_snapshots()
            asking.gaps.clear()
            for number in range(2, swaps + 1):
                if time.monotonic() > self.deadline:
                    say(f"no time left for {swaps + 1 - number} swaps")
                    break
                self.swap(number)
                time.sleep(0.5)
                # What one leaves behind would add up.
                self.results["swaps"][-1]["used_mib"] = self.used_bytes() >> 20
            self.results["longest_gap_s"] = max(asking.gaps, default=0.0)
            deadline_s = time.monotonic() + 20
            while self.used_bytes() > before + (64 << 20) and time.monotonic() < deadline_s:
                time.sleep(0.5)
            after = self.used_bytes()
            self.results |= {
                "memory_before": before, "memory_after": after,
                "memory_mib": (after - before) / (1 << 20),
            }  # fmt: skip

    def _note(self, asking: Clients) -> None:
        if len(asking.seen) == len(self.models):
            asking.judge()
        self.results |= {
            "changes": asking.changes, "gap_worst_s": max(asking.changes[1:], default=0.0),
            "answers": asking.answers, "by_model": dict(asking.by_model),
            "failed": len(asking.failed), "failures": asking.failed[:10],
            "wrong": len(asking.wrong), "wrong_answers": asking.wrong[:10],
        }  # fmt: skip
        if swaps := self.results["swaps"]:
            pauses = [s["pause_s"] for s in swaps]
            self.results |= {
                "pause_median_s": statistics.median(pauses), "pause_worst_s": max(pauses),
                "drain_worst_s": max(s["drain_s"] for s in swaps),
                "load_median_s": statistics.median(s["seconds"] for s in swaps),
                "left": sum(how == "left" for s in swaps for how in s["engines"].values()),
            }  # fmt: skip

    def one_rank(self) -> None:
        """With several devices: one has the next weights, the other has not."""
        number = len(self.results["swaps"]) + 1
        done = self.swap(number, self.devices[:1])
        self.results["one_rank"] = {s.engine: f"{s.outcome}: {s.reason}" for s in done}
        done = self.swap(number)
        self.results["both_ranks"] = {s.engine: s.outcome for s in done}

    def close(self) -> None:
        for name in sorted(self.processes, key=lambda name: name != "service"):
            self.processes[name].end()


def table(results: dict[str, Any], limits: dict[str, tuple[float, str]]) -> list[str]:
    """Each figure beside its limit."""
    lines = [f"{'figure':52} {'limit':>8} {'seen':>9}"]
    for name, (limit, what) in limits.items():
        if name in results:
            seen = results[name]
            lines.append(f"{what:52} {limit:>8} {seen:>9.3f}{'' if seen <= limit else '  over'}")
    for name in (
        "pause_median_s", "pause_worst_s", "changes",
        "drain_worst_s", "load_median_s", "longest_gap_s", "answers", "by_model", "failures",
        "wrong_answers", "one_rank", "both_ranks", "memory_before", "memory_after", "error",
    ):  # fmt: skip
        if results.get(name):
            lines.append(f"{name}: {results[name]}")
    return lines


@click.command()
@click.option(
    "--models", type=click.Path(path_type=Path), required=True, metavar="PREFIX",
    help="The checkpoints are PREFIX-a and PREFIX-b.",
)  # fmt: skip
@click.option(
    "--make",
    "shape",
    type=click.Choice(["8b", "1b", "tiny"]),
    help="Make them if they are missing.",
)
@click.option("--device", default=None, help="GPU-<uuid> or cpu0.  [default: the first GPUs]")
@click.option("--tensor-parallel", default=1, show_default=True)
@click.option("--swaps", default=50, show_default=True)
@click.option("--clients", default=32, show_default=True)
@click.option("--tokens", default=64, show_default=True, help="Of each answer.")
@click.option(
    "--on-swap", type=click.Choice(["drain", "abort"]), default="drain", show_default=True
)
@click.option("--standby", default=0, show_default=True, help="1: with a parked engine.")
@click.option("--snapshots/--no-snapshots", default=True, show_default=True)
@click.option("--one-generation", is_flag=True, help="A budget without room for both.")
@click.option(
    "--budget", default=3600.0, show_default=True, help="Seconds after which no swap is begun."
)
@click.option("--arguments", default="{}", help="More arguments of vllm serve, as JSON.")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write all figures there.")
@click.option("--logs", type=click.Path(path_type=Path), help="Copy the logs there.")
def main(
    *, models: Path, shape: str | None, device: str | None, tensor_parallel: int, swaps: int, clients: int,
    tokens: int, on_swap: str, standby: int, snapshots: bool, one_generation: bool, budget: float, arguments: str,
    out: Path | None, logs: Path | None,
) -> None:  # fmt: skip
    """Measure swaps of one engine service."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    # A time limit also ends the started processes.
    signal.signal(signal.SIGTERM, stop)
    pair = [models.with_name(f"{models.name}-{x}") for x in "ab"]
    if shape:
        for seed, path in enumerate(pair):
            make_model(path, shape, seed=seed, on_gpu=device != "cpu0")
    with workplace(keep=False) as work:
        bench = Bench(work, devices_of(device, tensor_parallel), pair, json.loads(arguments))
        bench.deadline = time.monotonic() + budget
        try:
            bench.write(
                on_swap=on_swap, snapshots=snapshots, standby=standby, one_generation=one_generation
            )
            bench.start(standby=standby)
            bench.run(swaps=swaps, clients=clients, tokens=tokens, snapshots=snapshots)
            if tensor_parallel > 1:
                bench.one_rank()
        except (Exception, KeyboardInterrupt) as e:
            say(f"failed: {e!r}")
            bench.results["error"] = repr(e)[:2000]
        finally:
            # Before the ends, which may take longer than a time limit leaves.
            if out:
                out.write_text(json.dumps(bench.results, indent=1))
            bench.close()
            if logs:
                logs.mkdir(parents=True, exist_ok=True)
                for path in work.glob("*.log"):
                    shutil.copy(path, logs)
        print("\n".join(table(bench.results, LIMITS_IN_PLACE if one_generation else LIMITS)))
    sys.exit("error" in bench.results)


if __name__ == "__main__":
    main()
