"""`weightcached engine NAME`: keeps one service's endpoint served. No torch, no vLLM.

states.py decides, this module acts: every event ends in _step(), which begins the decided steps.

    $XDG_RUNTIME_DIR/weightcached/engines/<name>/   0700
        lock            flock()ed by the supervisor for its whole life
        fence           flock()ed by the engine that serves, and all that it has forked
        asleep          there while the service sleeps, for the next supervisor
        error           why a supervisor gave up before an engine served, for weightcachectl
        service.sock    weightcachectl's questions
        <number>/       one engine (running.py)
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weightcached.config.engines import EngineSpec
from weightcached.config.manifest import ModelSpec, OnSwap, load_manifest
from weightcached.config.ranks import layout_of
from weightcached.engine import control, endpoint, manager, renewal, running, tree
from weightcached.engine.giving_way import GivingWay
from weightcached.engine.lending import Lending
from weightcached.engine.plan import StartPlan, make_plan, with_checkpoint_of
from weightcached.engine.records import Record, read_record, record_of
from weightcached.engine.running import Running
from weightcached.engine.starting import Starter
from weightcached.engine.states import Action, Engine, Phase, Service
from weightcached.engine.swaps import Swaps
from weightcached.engine.tree import Tree, TreeError, all_processes
from weightcached.engine.turns import ASLEEP_FILE, DeviceTurns, NotWantedError
from weightcached.errors import (
    EXIT_FAILURE,
    EngineError,
    RuntimePathError,
    ServiceBusyError,
    WeightcachedError,
)
from weightcached.system.notify import inherited, watchdog_period_s
from weightcached.system.paths import (
    SOCKET_PATH_MAX_BYTES,
    create_runtime_dir,
    manifest_path,
    runtime_dir,
)
from weightcached.system.process import become_subreaper, holds_file
from weightcached.system.waits import end_tasks
from weightcached.wire.framing import listen
from weightcached.wire.services import ERROR_FILE

log = logging.getLogger(__name__)

# A first start compiles and may download; a longer one counts as a hang.
START_TIMEOUT_S = 3600.0
# Waking maps memory; the fence is free once the last process of the engine before is gone.
PROMOTE_TIMEOUT_S = 60.0
FENCE_TIMEOUT_S = 30.0
PROMOTE_ATTEMPTS = 3
PROMOTE_PAUSE_S = 1.0
SLEEP_TIMEOUT_S = 60.0
# Another service's requests end within its own drain_s, which only it knows.
LONGEST_DRAIN_S = 3600.0
PROBE_PERIOD_S = 1.0
FIRST_PROBE_S = 0.2
# Without an engine that ever served, so many failures end the supervisor: the remedy must come from
# outside.
MAX_FIRST_FAILURES = 3
_EXTEND_PERIOD_S = 10.0
_EXTEND_S = 60
_LOST_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Options:
    """The command line. module: makes engines; tests have another."""

    name: str
    manifest: Path | None = None
    socket_dir: Path | None = None
    module: str = "weightcached.vllm_compat.server"


def service_dir(name: str, socket_dir: Path | None = None) -> Path:
    """The directory of a service's sockets. Raises RuntimePathError if their paths are too long."""
    directory = (socket_dir or runtime_dir()) / "engines" / name
    longest = len(os.fsencode(directory / "123456" / "control.sock"))
    if longest > SOCKET_PATH_MAX_BYTES:
        raise RuntimePathError(
            f"{directory} is too long for sockets in it by {longest - SOCKET_PATH_MAX_BYTES} bytes: "
            "give the engine a shorter name"
        )
    return directory


def run(options: Options) -> int:
    """Keep the service until told to stop. Returns the exit status.

    Raises WeightcachedError before anything has started.
    """
    spec, model = load_manifest(manifest_path(options.manifest)).service(options.name)
    directory = service_dir(options.name, options.socket_dir)
    for part in (directory.parents[1], directory.parent, directory):
        create_runtime_dir(part)
    with _hold_lock(directory / "lock", options.name):
        become_subreaper()
        return asyncio.run(_run(options, spec, model, directory))


@contextlib.contextmanager
def _hold_lock(path: Path, name: str) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as e:
        raise ServiceBusyError(
            f"engine service {name} has a supervisor already, which holds {path}: "
            f"systemctl --user stop weightcached-engine@{name}.service, or end that process"
        ) from e
    finally:
        os.close(fd)


async def _run(options: Options, spec: EngineSpec, model: ModelSpec, directory: Path) -> int:
    supervisor = Supervisor(options, spec, model, directory)
    loop = asyncio.get_running_loop()
    for number in renewal.STOP_SIGNALS:
        loop.add_signal_handler(number, supervisor.stop)
    loop.add_signal_handler(signal.SIGCHLD, supervisor.reap)
    # What came while one supervisor became another.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, renewal.STOP_SIGNALS)
    supervisor.reap()
    return await supervisor.run()


class Supervisor:
    """One service, from the bound socket to the last engine's end."""

    def __init__(
        self, options: Options, spec: EngineSpec, model: ModelSpec, directory: Path
    ) -> None:
        self.spec = spec
        self.service = Service(standby=spec.standby)
        self._options = options
        # As /proc names it.
        self._directory = directory.resolve()
        self._fence = self._directory / "fence"
        self._error_file = self._directory / ERROR_FILE
        self._asleep_file = self._directory / ASLEEP_FILE
        self._plans: dict[int, StartPlan] = {1: make_plan(spec, model, options.socket_dir)}
        self._turns = DeviceTurns(
            spec, model, load_manifest(manifest_path(options.manifest)), directory.parents[1]
        )
        # The share of its devices' memory that it has until it sleeps; None: it has none. In host
        # memory it may be 0.
        self._share: float | None = None
        self._running: dict[int, Running] = {}
        self._swaps = Swaps(
            self.service, self._running, end=self._end_behind, restart=self._restart_for
        )
        self._lending = Lending(
            self.service, self._running, keep=self._keep, failed=self._end_failed, wait=self._wait
        )
        self._giving_way = GivingWay(
            self.service,
            step=self._step,
            wait=self._wait,
            keep=self._keep,
            take_newest=self._take_newest,
        )
        self._manager = manager.Manager(os.environ.get("NOTIFY_SOCKET"))
        self._public: socket.socket
        self._starter = Starter(options.module, lambda: self.service.stopping)
        self._spawned: dict[int, asyncio.Event] = {}
        # Engines that start with the memory of an awake one.
        self._with_memory: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._status = 0
        self._news = asyncio.Condition()
        self._timer: asyncio.TimerHandle | None = None
        self._listening_for_wake = False
        self._since = time.time()
        self._renewal = renewal.Renewal(self._unrest, lambda: self.service.stopping)
        self._begun = False
        self._was_ready = False
        self._died_s: float | None = None
        self.takeovers = 0
        self.last_takeover_s = 0.0

    # ---- life

    async def run(self) -> int:
        """Returns the exit status. Raises ListenError if the public address is taken."""
        stored = dict(inherited(os.environ))
        # The manager watches on if one supervisor becomes another, and an engine may not answer at once.
        self._keep(self._feed_watchdog())
        self.service.awake = not self._asleep_file.exists()
        await self._take_back()
        self._set_awake(self.service.awake or not self._running)
        self._public = await self._listen(stored.get(endpoint.STORE_NAME))
        server = control.ControlServer(listen(self._directory / "service.sock"), self._handle)
        self._keep(self._extend_start())
        self._begun = True
        try:
            self._step()
            await self._ended.wait()
        finally:
            self._manager.tell("STOPPING=1")
            server.close()
            await end_tasks(*self._tasks)
            await self._end_all()
            with contextlib.suppress(OSError):
                (self._directory / "service.sock").unlink()
            self._public.close()
            self._set_awake(True)
            if self.spec.listen.path:
                with contextlib.suppress(OSError):
                    os.unlink(self.spec.listen.path)
        log.info("stopped service=%s", self.spec.name)
        return self._status

    async def _end_all(self) -> None:
        self._starter.close()
        for engine in list(self._running.values()):
            with contextlib.suppress(TreeError):
                await engine.end()
                await engine.bury()
        for directory in self._directory.iterdir():
            if directory.is_dir():
                running.remove_directory(directory)

    async def _listen(self, stored: Any) -> socket.socket:
        """The public socket: the manager's, or that of an engine taken back, or a new one."""
        where = self.spec.listen
        fds = [stored] if stored is not None else []
        # Engines that were taken back accept where they did, whatever the manifest says by now.
        taken_back = bool(self._running)
        for engine in list(self._running.values()):
            if any(endpoint.is_at(fd, where, any_host=taken_back) for fd in fds):
                # Nobody can ask us meanwhile, and an engine that starts does not answer.
                break
            fd = await engine.public_socket(timeout_s=_LOST_TIMEOUT_S)
            fds += [fd] if fd is not None else []
        found = next((fd for fd in fds if endpoint.is_at(fd, where, any_host=taken_back)), None)
        if stored is not None and found is not stored:
            if not taken_back:
                endpoint.stop_listening(stored)
            self._manager.drop(endpoint.STORE_NAME)
        sock = endpoint.bind(where) if found is None else socket.socket(fileno=found.take())
        sock.setblocking(False)
        for fd in fds:
            fd.close()
        if found is None or found is not stored:
            self._manager.store(endpoint.STORE_NAME, sock.fileno())
        log.info(
            "listening service=%s address=%s%s",
            self.spec.name, where, "" if found is None else " taken back",
        )  # fmt: skip
        return sock

    def stop(self) -> None:
        """Drain the serving engine, end everything. A second call does not drain."""
        if self.service.stopping:
            self._ended.set()
            return
        log.info("stopping service=%s", self.spec.name)
        self.service.stopping = True
        self._starter.abort_imports()
        self._manager.tell(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={int((self.spec.drain_s + 60) * 1e6)}")
        self._step()

    def reap(self) -> None:
        """Take the exit status of children and of orphans that became children."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (e := task.exception()) is not None:
            # A fault of ours: a new supervisor takes the engines back.
            log.error("service=%s internal fault", self.spec.name, exc_info=e)
            os._exit(EXIT_FAILURE)

    # ---- taking back engines of an earlier supervisor

    async def _take_back(self) -> None:
        """Engines that outlived a supervisor, in the state in which they are."""
        found: list[Record] = []
        for directory in sorted(self._directory.iterdir()):
            if not directory.is_dir():
                continue
            # No number twice in one log.
            self.service.skip_to(int(directory.name) if directory.name.isdecimal() else 0)
            record = read_record(directory)
            if record is not None and running.is_alive(record):
                found.append(record)
                continue
            if record is not None:
                await running.end_remains(record)
            running.remove_directory(directory)
        current = self._plans.pop(1)
        older = list(dict.fromkeys(r.digest for r in found if r.digest != current.digest))
        versions = {digest: n for n, digest in enumerate([*older, current.digest], 1)}
        self.service.version = versions[current.digest]
        for record in found:
            # If the manifest's arguments do not work, engines of the present ones are started again.
            self._plans[versions[record.digest]] = replace(
                current, arguments=record.arguments, digest=record.digest,
                kv_cache_bytes=0, remembered={},
            )  # fmt: skip
        self._plans[self.service.version] = current
        for record in found:
            self._take_back_one(record, versions[record.digest])
        await self._end_strangers()
        await asyncio.gather(*(self._examine(record) for record in found))

    async def _end_strangers(self) -> None:
        """End engines without a record: processes that have the fence open and belong to no engine."""
        known = {pid for engine in self._running.values() for pid in engine.tree.members}
        for pid in {stat.session for stat in all_processes()} - known:
            if holds_file(pid, self._fence):
                log.warning("process %d is an engine without a record, ending it", pid)
                stranger = Tree(pid)
                await tree.end(stranger)
                await tree.bury(stranger)

    def _take_back_one(self, record: Record, version: int) -> None:
        self.service.started(version, number=record.number)
        self._lending.taken_back(record.number)
        self._follow(record)

    async def _examine(self, record: Record) -> None:
        """Ask a ready engine for its state; wait for one that still starts."""
        number = record.number
        if not record.facts:
            self._keep(self._until_ready(number))
            return
        engine = self._running.get(number)
        if engine is None:
            return
        try:
            answer = await engine.ask("ready", timeout_s=self.spec.hang_s)
        except EngineError as e:
            self._end_failed(number, str(e))
            return
        if not self.service.is_up(number):
            return
        log.info("engine=%d taken back serving=%s", number, answer["serving"])
        self.service.ready(number)
        # Of a service that sleeps none serves, and yet it has a version to go back to.
        self.service.proven = self.service.proven or self.service.engines[number].version
        if answer["serving"]:
            self.service.serves(number)
            self._share = self._plan_of(number).share
        self._keep(self._probe(number))

    # ---- steps

    def _step(self) -> None:
        """Begin the decided steps, and report changes."""
        if not self._begun or self._ended.is_set():
            # Engines of an earlier supervisor are not yet known; or all are being ended.
            return
        now_s = time.monotonic()
        for action in self.service.decide(now_s):
            self._begin(action)
        self._lending.offer()
        self._set_timer(now_s)
        self._watch_for_wake()
        self._tell()
        if self.service.stopping and not self.service.engines:
            self._ended.set()
        if not self._was_ready and self.service.failures >= MAX_FIRST_FAILURES:
            log.error("service=%s no engine can be started: %s", self.spec.name, self.service.error)
            self._status = EXIT_FAILURE
            # The manager forgets our status as soon as it starts the next supervisor.
            with contextlib.suppress(OSError):
                self._error_file.write_text(self.service.summary(), encoding="utf-8")
            self._ended.set()
        self._keep_quiet(self._notify_waiters())

    def _keep_quiet(self, work: Coroutine[Any, Any, None]) -> None:
        if not self._ended.is_set():
            self._keep(work)
        else:
            work.close()

    async def _notify_waiters(self) -> None:
        async with self._news:
            self._news.notify_all()

    def _begin(self, action: Action) -> None:
        if action.what == "start":
            engine = self.service.started(self.service.version)
            self._keep(self._start(engine))
            return
        engine = self.service.engines[action.number]
        if action.what == "promote":
            engine.to(Phase.PROMOTING)
            self._keep(self._promote(engine))
        elif action.what == "drain":
            engine.to(Phase.DRAINING)
            self._keep(self._drain(engine))
        else:
            engine.to(Phase.ENDING)
            self._keep(self._end(engine.number))

    async def _start(self, engine: Engine) -> None:
        self._spawned[engine.number] = over = asyncio.Event()
        plan = self._plans[engine.version]
        try:
            async with contextlib.AsyncExitStack() as turn:
                others = any(e.has_endpoint for e in self.service.engines.values())
                parked = others or await self._turns.anybody_awake()
                has_turn = not (parked and plan.kv_cache_bytes)
                if has_turn:
                    # It measures the device's memory, so nobody else may change that.
                    # Who ends it waits for it, and the turn may be a neighbour's for an hour.
                    held = self._turns.held(unless=lambda: engine.phase is Phase.ENDING)
                    await turn.enter_async_context(held)
                    parked = others or await self._turns.anybody_awake()
                if not parked:
                    self._with_memory.add(engine.number)
                    self._share = plan.share if self._share is None else self._share
                await self._start_alone(engine, plan, over, parked=parked, has_turn=has_turn)
        except NotWantedError:
            log.info("engine=%d is not started, it is not wanted any more", engine.number)
        finally:
            over.set()
            self._spawned.pop(engine.number, None)
            self._with_memory.discard(engine.number)

    async def _start_alone(
        self, engine: Engine, plan: StartPlan, over: asyncio.Event, *, parked: bool, has_turn: bool
    ) -> None:
        try:
            record = await self._spawn(engine, plan, parked=parked)
            self._follow(record)
        except (OSError, EngineError) as e:
            self._end_failed(engine.number, f"it cannot be started: {e}")
            return
        finally:
            # Ending it waits for this: half started, it could not be found.
            over.set()
        self._running[engine.number].keep_record()
        if engine.phase is not Phase.ENDING:
            await self._until_ready(engine.number, has_turn=has_turn)

    async def _spawn(self, engine: Engine, plan: StartPlan, *, parked: bool) -> Record:
        directory = self._directory / str(engine.number)
        running.remove_directory(directory)
        directory.mkdir(mode=0o700)
        job = plan.job(directory, engine.number, parked=parked)
        listener = listen(job.control_socket)
        with listener:
            pid, how = await self._starter.start(
                job, plan, self._public.fileno(), listener.fileno(), nursery=self.spec.nursery
            )
        log.info(
            "engine=%d starting service=%s pid=%d version=%d %s%s",
            engine.number, self.spec.name, pid, engine.version, how, " parked" if parked else "",
        )  # fmt: skip
        return record_of(job.number, plan.digest, pid, job.arguments)

    def _follow(self, record: Record) -> None:
        number = record.number
        self._running[number] = Running(
            record,
            self._directory / str(number),
            self._fence,
            lambda reason: self._end_failed(number, reason),
        )

    async def _until_ready(self, number: int, *, has_turn: bool = False) -> None:
        engine = self._running.get(number)
        if engine is None:
            return
        try:
            facts = await engine.ask("ready", timeout_s=START_TIMEOUT_S)
        except EngineError as e:
            # Its own words, if it has some, are the better reason, and then that it has ended. It says
            # them first; the kernel reports its end last.
            await asyncio.sleep(0.1)
            self._end_failed(number, engine.last_words() or str(e))
            return
        if not self.service.is_up(number):
            return
        plan = self._plan_of(number)
        try:
            await self._enlarge_share(number, plan.share, has_turn=has_turn)
        except EngineError as e:
            self._end_failed(number, f"it needs a share of {plan.share:g} of the device: {e}")
            return
        if not self.service.is_up(number):
            return
        # Right before it is parked: a swap asks no engine that starts.
        if not await self._swaps.catch_up(number, plan, drain_s=self.spec.drain_s):
            self._end_behind(number)
            return
        if not self.service.is_up(number):
            return
        plan.learn(facts)
        log.info(
            "engine=%d parked service=%s after=%.1fs", number, self.spec.name,
            time.time() - engine.record.since,
        )  # fmt: skip
        engine.record.facts = facts
        engine.watch()
        # Another supervisor that found facts would not ask for the share.
        engine.keep_record()
        self.service.ready(number)
        self._keep(self._probe(number))
        if not self.service.may_serve and facts.get("sleeps") and not facts.get("asleep"):
            # Sent to sleep while it started: it has its memory yet.
            self._begin(Action("drain", number))
        self._step()

    async def _enlarge_share(self, number: int, share: float, *, has_turn: bool) -> None:
        """Make room for an engine with a larger share than the one that serves. Raises EngineError.

        That one serves on meanwhile. Between the two nobody would, and a neighbour with the turn
        that asks us to sleep would wait for us.
        """
        if self._share is None or self._share >= share:
            return
        async with contextlib.nullcontext() if has_turn else self._turns.held():
            if self._share is not None and self.service.is_up(number):
                await self._turns.make_room(share, timeout_s=LONGEST_DRAIN_S)
            if self._share is not None and self.service.is_up(number):
                self._share = max(self._share, share)

    async def _promote(self, engine: Engine) -> None:
        number = engine.number
        # Not waited for: it has what it was lent, and otherwise waits for memory to be free.
        self._keep(self._lending.give_back(but=number))
        self._lending.gone(number)
        try:
            took = await self._take_endpoint(engine)
        except NotWantedError:
            if engine.phase is Phase.PROMOTING:
                self._begin(Action("drain", number))
            return
        except EngineError as e:
            self._end_failed(number, f"it cannot take over: {e}")
            return
        if engine.phase is not Phase.PROMOTING:
            return
        self.service.serves(number)
        record = self._running[number].record
        record.serving_since = time.time()
        self._running[number].active_s = time.monotonic()
        after = ""
        if self._died_s is not None:
            self.takeovers += 1
            self.last_takeover_s = time.monotonic() - self._died_s
            self._died_s = None
            after = f" takeover={self.last_takeover_s:.3f}s"
        log.info(
            "engine=%d serving service=%s pid=%d fence=%.3fs wake=%.3fs%s", number, self.spec.name,
            record.pid, took["fence_s"], took["wake_s"], after,
        )  # fmt: skip
        self._running[number].keep_record()
        self._step()

    async def _take_endpoint(self, engine: Engine) -> dict[str, Any]:
        """Have the engine wake and accept. Raises EngineError."""
        number = engine.number
        share = self._plan_of(number).share
        if self._share is not None and self._share >= share:
            took = await self._ask_to_serve(number)
        else:
            # Who has the turn may wait for us to sleep, and who stops us waits too.
            async with self._turns.held(unless=lambda: not self._is_wanted(engine)):
                await self._turns.make_room(share, timeout_s=LONGEST_DRAIN_S)
                took = await self._ask_to_serve(number)
        self._share = share
        return took

    def _is_wanted(self, engine: Engine) -> bool:
        wanted = self.service.may_serve and not self.service.stopping
        return wanted and engine.phase is Phase.PROMOTING

    async def _ask_to_serve(self, number: int) -> dict[str, Any]:
        """An engine without memory to wake stays asleep, and may be asked again.

        Memory that another process freed comes back a little later.
        """
        for attempt in range(PROMOTE_ATTEMPTS):
            if number not in self._running:
                raise EngineError("it has ended")
            try:
                return await self._running[number].ask(
                    "promote", timeout_s=PROMOTE_TIMEOUT_S, fence_s=FENCE_TIMEOUT_S
                )
            except EngineError as e:
                engine = self.service.engines.get(number)
                alive = engine is not None and engine.phase is Phase.PROMOTING
                if e.timed_out or not alive or attempt + 1 == PROMOTE_ATTEMPTS:
                    raise
                log.warning("engine=%d cannot take over yet: %s", number, e)
                await asyncio.sleep(PROMOTE_PAUSE_S)
        raise AssertionError("not reached")

    async def _drain(self, engine: Engine) -> None:
        at_once = self.service.gives_way and self._giving_way.aborts
        number, drain_s = engine.number, 0.0 if at_once else self.spec.drain_s
        log.info("engine=%d draining service=%s", number, self.spec.name)
        if self.service.may_serve:
            # For its successor. It serves on meanwhile; asleep it has nothing to lend.
            await self._lending.settled()
        try:
            took = await self._running[number].ask(
                "demote", timeout_s=drain_s + SLEEP_TIMEOUT_S, drain_s=drain_s
            )
        except EngineError as e:
            self._end_failed(number, f"it cannot be parked: {e}")
            return
        log.info(
            "engine=%d drained service=%s after=%.3fs sleep=%.3fs cut=%d", number, self.spec.name,
            took["drain_s"], took["sleep_s"], took["cut"],
        )  # fmt: skip
        await self._leave_device()
        self.service.parked(number)
        self._step()

    async def _leave_device(self) -> None:
        """Before nobody has the endpoint: others may get the device if the service is to sleep."""
        if not self.service.may_serve:
            await self._lending.give_back()
        if not self.service.awake:
            self._share = None

    def _plan_of(self, number: int) -> StartPlan:
        return self._plans[self.service.engines[number].version]

    def _end_failed(self, number: int, reason: str) -> None:
        if not self.service.is_up(number) or self._ended.is_set():
            return
        engine = self.service.engines[number]
        log.error("engine=%d %s: %s", number, engine.phase.value, reason)
        if engine.phase is Phase.SERVING and self._died_s is None:
            self._died_s = time.monotonic()
        self._starter.failed(number, starts=engine.phase is Phase.STARTING)
        self.service.failed(number, reason, time.monotonic())
        serving = self.service.serving
        if not self.service.proven:
            self._share = None
        elif self._share is not None and serving and serving.version == self.service.version:
            # Room that was made for a version that is given up by now.
            self._share = self._plan_of(serving.number).share
        self._keep(self._end(number))
        self._step()

    async def _end(self, number: int) -> None:
        if number in self._spawned:
            await self._spawned[number].wait()
        engine = self._running.get(number)
        if engine is not None:
            while True:
                try:
                    took_s = await engine.end()
                    break
                except TreeError as e:
                    # No engine may take over while such a process may still use the device.
                    log.error("engine=%d %s; trying on", number, e)
            log.info("engine=%d ended service=%s after=%.3fs", number, self.spec.name, took_s)
            del self._running[number]
            self._keep(engine.bury())
        self._lending.gone(number)
        if self.service.engines[number].has_endpoint:
            await self._leave_device()
        self.service.gone(number)
        self._step()

    # ---- looking after engines

    async def _probe(self, number: int) -> None:
        """Ask the engine's core again and again: a hung engine is a dead engine."""
        await asyncio.sleep(FIRST_PROBE_S)
        while number in self._running:
            engine = self._running[number]
            try:
                await engine.ping(timeout_s=self.spec.hang_s)
            except EngineError as e:
                if self.service.engines.get(number) is not None:
                    self._end_failed(number, f"it hangs: {e}" if e.timed_out else str(e))
                return
            engine.watch()
            self._sleep_if_idle(number, engine)
            # vLLM's own sleep and wake_up do not tell us.
            self._lending.offer()
            await asyncio.sleep(PROBE_PERIOD_S)

    def _sleep_if_idle(self, number: int, engine: Running) -> None:
        serving = self.service.serving
        idle_s = self.spec.idle_sleep_s
        if idle_s <= 0 or serving is None or serving.number != number:
            return
        if engine.activity.active == 0 and time.monotonic() - engine.active_s >= idle_s:
            log.info("engine=%d idle for %.0f s, goes to sleep", number, idle_s)
            self._set_awake(False)
            self._step()

    def _watch_for_wake(self) -> None:
        """While asleep, the first connection wakes; the kernel keeps it until an engine accepts."""
        wanted = (
            not self.service.awake and self.service.holder is None and not self.service.stopping
        )
        loop = asyncio.get_running_loop()
        if wanted and not self._listening_for_wake:
            loop.add_reader(self._public.fileno(), self._wake_for_client)
        elif self._listening_for_wake and not wanted:
            loop.remove_reader(self._public.fileno())
        self._listening_for_wake = wanted

    def _wake_for_client(self) -> None:
        log.info("service=%s somebody connects, waking", self.spec.name)
        self._set_awake(True)
        self._step()

    def _set_awake(self, awake: bool) -> None:
        self.service.awake = awake
        with contextlib.suppress(OSError):
            if awake:
                self._asleep_file.unlink(missing_ok=True)
            else:
                self._asleep_file.touch()

    def _set_timer(self, now_s: float) -> None:
        """now_s: what was decided by. A start that fell due a moment later would else be forgotten."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at_s = self.service.wake_time_s(now_s)
        if at_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(at_s - now_s + 0.01, self._step)

    # ---- saying how things are

    def _tell(self) -> None:
        sleeps = not self.service.awake and any(
            e.phase is Phase.PARKED for e in self.service.engines.values()
        )
        # A manager that waited for a service that sleeps would wait for its next client.
        if not self._was_ready and (sleeps or self.service.serving is not None):
            self._was_ready = True
            self._error_file.unlink(missing_ok=True)
            self._manager.tell("READY=1")
        self._manager.status(self.service.summary())

    async def _feed_watchdog(self) -> None:
        period_s = watchdog_period_s(os.environ)
        while period_s is not None:
            self._manager.tell("WATCHDOG=1")
            await asyncio.sleep(period_s)

    async def _extend_start(self) -> None:
        """A start may take long; the manager waits while an engine is starting."""
        while not self._was_ready:
            self._manager.tell(f"EXTEND_TIMEOUT_USEC={_EXTEND_S * 1_000_000}")
            await asyncio.sleep(_EXTEND_PERIOD_S)

    def status(self) -> dict[str, Any]:
        """The service, as `status --json` shows it."""
        serving = self.service.serving
        record = self._running[serving.number].record if serving else None
        return {
            "name": self.spec.name,
            "model": self.spec.model,
            "listen": str(self.spec.listen),
            "state": self.service.state(),
            "pid": record.pid if record else 0,
            "generation": serving.number if serving else 0,
            "since": record.serving_since if record else self._since,
            "takeovers": self.takeovers,
            "last_takeover_s": round(self.last_takeover_s, 3),
            "error": self.service.error,
            "awake": self._share is not None,
            "share": self._plans[self.service.version].share
            if self._share is None
            else self._share,
            "used": self._last_used(),
            "supervisor_pid": os.getpid(),
            "supervisor_since": self._since,
            # Engines that are to map new weights and cannot yet, with the reasons.
            "waits": {f"{self.spec.name}/{n}": why for n, why in self._swaps.waits.items()},
            "engines": [self._engine_status(e) for e in self.service.engines.values()],
        }

    def _last_used(self) -> float:
        """When a request was last seen, in seconds since 1970; now while one is under way."""
        serving = self.service.serving
        engine = self._running.get(serving.number) if serving else None
        if engine is None:
            return self._since
        return time.time() - (time.monotonic() - engine.active_s)

    def _engine_status(self, engine: Engine) -> dict[str, Any]:
        found = self._running.get(engine.number)
        return {
            "number": engine.number,
            "version": engine.version,
            "state": engine.phase.value,
            "pid": found.record.pid if found else 0,
            "since": found.record.since if found else 0.0,
            "requests": found.activity.requests if found else 0,
            "facts": found.record.facts if found else {},
        }

    # ---- questions of weightcachectl

    async def _handle(
        self, command: str, arguments: dict[str, Any], peer: control.Peer
    ) -> tuple[dict[str, Any], int | None]:
        if command == "swap":
            return {"engines": await self._swap(**arguments)}, None
        if command == "processes":
            return {"engines": self._processes(**arguments)}, None
        if command == "give_way":
            return await self._give_way(peer, **arguments), None
        if command == "resume":
            return await self._giving_way.end(peer), None
        if command == "renew":
            path, public = manifest_path(self._options.manifest), self._public.fileno()
            return {"renews": await self._renewal.begin(path, self.spec, public)}, None
        if command == "restart":
            await self._restart()
        elif command == "sleep":
            await self._sleep_or_wake(awake=False)
        elif command == "wake":
            await self._sleep_or_wake(awake=True)
        elif command == "stop":
            self.stop()
        elif command != "status":
            raise EngineError(f"no command {command!r}")
        return self.status(), None

    def _processes(self, *, model: str) -> list[dict[str, Any]]:
        """The processes of the engines of the model; and whether each engine unmaps its weights if
        it is asked to while it sleeps, which is not known before it is up.
        """
        if model != self.spec.model:
            return []
        return [
            {
                "engine": f"{self.spec.name}/{number}",
                "unmaps": bool(found.record.facts.get("unmaps", not found.record.facts)),
                "processes": found.processes(),
            }
            for number, found in self._running.items()
        ]

    async def _give_way(
        self, peer: control.Peer, *, device: str, on_swap: OnSwap
    ) -> dict[str, Any]:
        layout = layout_of(self._plans[self.service.version].arguments)
        return await self._giving_way.begin(
            peer, device, ranks=layout.tp_size * layout.pp_size, on_swap=on_swap
        )

    async def _take_newest(self) -> None:
        """Have the engines map what the next daemon serves, in place of what they had to unmap."""
        with contextlib.suppress(WeightcachedError):
            await self._swap(model=self.spec.model, on_swap="drain", daemon_returns=True)

    async def _swap(
        self, *, model: str, on_swap: str, daemon_returns: bool = False
    ) -> list[dict[str, Any]]:
        """Have the engines map the newest weights of the model; what became of each.

        An engine that cannot take them while it runs is replaced as by a restart, in the
        background. daemon_returns: wait for a daemon that is being started.
        """
        if model != self.spec.model:
            return []
        spec, entry = load_manifest(manifest_path(self._options.manifest)).service(self.spec.name)
        present = self._plans[self.service.version]
        newest = with_checkpoint_of(present, make_plan(spec, entry, self._options.socket_dir))
        outcomes = await self._swaps.swap(
            self.spec.name, present, newest, on_swap=on_swap, drain_s=self.spec.drain_s,
            daemon_returns=daemon_returns,
        )  # fmt: skip
        if self.service.gives_way and any(o["outcome"] == "restarting" for o in outcomes):
            # Their weights are gone, and they cannot have the new ones.
            for engine in list(self.service.engines.values()):
                if engine.phase is Phase.PARKED:
                    self._end_behind(engine.number)
        return outcomes

    def _end_behind(self, number: int) -> None:
        """End an engine with old weights; another is started in its place."""
        if self.service.is_up(number):
            log.info("engine=%d cannot take the newest weights, another is started", number)
            self._begin(Action("end", number))
            self._step()

    def _restart_for(self, reason: str) -> None:
        log.info("service=%s is restarted for its new weights: %s", self.spec.name, reason)
        self._keep(self._restart_quietly())

    async def _restart_quietly(self) -> None:
        try:
            await self._restart()
        except WeightcachedError as e:
            log.error("service=%s %s", self.spec.name, e)

    async def _restart(self) -> None:
        """Replace the serving engines by those of the present manifest.

        With one that comes later, which reads a newer manifest, it ends as that one does. Raises
        WeightcachedError if nothing has changed.
        """
        path = manifest_path(self._options.manifest)
        spec, model = load_manifest(path).service(self.spec.name)
        if spec.listen != self.spec.listen:
            raise endpoint.moved(self.spec.listen, spec.listen)
        self.spec, self.service.standby = spec, spec.standby
        version = self.service.restart()
        self._plans[version] = make_plan(spec, model, self._options.socket_dir)
        self._turns = DeviceTurns(spec, model, load_manifest(path), self._directory.parents[1])
        log.info("service=%s restarting version=%d", spec.name, version)
        self._starter.import_anew()
        self._step()
        await self._wait(
            lambda: self.service.version < version or self.service.has_settled(self.service.version)
        )
        if self.service.version < version:
            raise EngineError(
                f"the new engine cannot be started, the old one serves on: {self.service.error}"
            )

    def _unrest(self) -> str:
        """What another supervisor could not take up where this one left it, or ""."""
        if self.service.gives_way or self._swaps.under_way:
            return "is getting new weights"
        holder = self.service.holder
        if holder is not None and holder.phase is not Phase.SERVING:
            # Somebody may wait for that, as a neighbour that is to wake.
            return f"has engine {holder.number} {holder.phase.value}"
        # One that waits for the device's turn has no directory yet; one without a record would be ended.
        spawned = [n for n, over in self._spawned.items() if not over.is_set()]
        if any((self._directory / str(number)).exists() for number in spawned):
            return "is starting an engine"
        return ""

    async def _sleep_or_wake(self, *, awake: bool) -> None:
        self._set_awake(awake)
        if not awake and self.service.holder is None and not self._with_memory:
            # It kept its share while it gave way, or for the successor of an engine that died. Nobody is
            # left to drain, and who asks has room for its own engine now.
            self._share = None
        self._step()
        await self._wait(
            lambda: (
                self.service.awake != awake
                or (
                    (self.service.serving is not None) == awake
                    and (awake or self.service.holder is None)
                )
            )
        )

    async def _wait(self, condition: Callable[[], bool]) -> None:
        async with self._news:
            await self._news.wait_for(lambda: condition() or self.service.stopping)
