"""Loads a model: prepares requests, opens what answers them, and measures all of it in turns.

The arguments of NVIDIA's `multistream_inference`, so that a command for it can be repeated here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from msplit.assignment.model import load as load_model
from msplit.assignment.model import opened
from msplit.core.arguments import Precision, number, whole
from msplit.engines.base import Arrays, Job, TensorFlowOptions
from msplit.engines.environment import environment, gpus
from msplit.engines.tensorflow.engine import ENGINE as TENSORFLOW
from msplit.errors import EngineError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.formats import build as files
from msplit.formats.model import ReadOptions
from msplit.progress import Progress, phase, silent
from msplit.run.request import RunRequest
from msplit.run.setup import plural
from msplit.run.variants import own_data
from msplit.serving.loadtest import corpus as requests
from msplit.serving.loadtest.clients import ServerUnderTest, clients_of
from msplit.serving.loadtest.corpus import Checker, Prepared, by_steps
from msplit.serving.loadtest.dispatcher import Watch, call, settled
from msplit.serving.loadtest.generator import Layout, Level, LoadGenerator, RequestTable, Sending
from msplit.serving.loadtest.results import Common, LoadResult, LoadRun, Point, TargetResult, measured
from msplit.serving.loadtest.targets import (
    ECHO,
    ECHO_THREADS,
    SESSIONS,
    LocalTarget,
    ProcessTarget,
    ProcessTask,
    Target,
    echoes,
    of_pool,
)
from msplit.serving.pool.settings import PoolSettings
from msplit.serving.pool.sources import pool as make_pool
from msplit.verify.compare import computed_in

AUTO = "auto"
"""Value of `LoadSettings.beside` for TensorFlow in all ways where it sees a GPU."""

_FASTEST = 400_000
"""Requests per second for which there is room, as far as memory goes."""

_PER_ROW = 48
"""Bytes of a request in the table, beside its answer."""

_NEAR = 0.7
"""Share of what its echo answers above which the generator may set a target's figure."""

_LATE = 0.2
"""Share of the median latency above which it matters how late requests were sent."""


@dataclass(frozen=True)
class LoadSettings:
    """Settings of a load test.

    Attributes:
        clients: Closed loop: how many clients send, each when it has its answer.
        rates: Open loop: arrivals per second.
        shares: Open loop: arrivals as shares of the most that the same target has answered in the closed loop.
        seconds, warmup: Seconds of measuring and before it, for each target and level.
        repeat: Number of repeats of all of it.
        rows: Rows of a request.
        distinct: Prepared requests, each with inputs of its own.
        mix: Share of requests by priority; empty: all of them 0.
        timeout: Seconds that a request may wait to be started.
        most: Requests after warming up, after which a run ends; 0: when its time is over.
        beside: Names out of `targets.SESSIONS` to measure beside the pool, or ``auto``.
        threads: Number of threads that call TensorFlow's sessions.
        config: A file with a ConfigProto as text, for those sessions.
        memory: Bytes for the requests of a run and their answers; a run ends when they are full.
        command: The command line, for the record.
    """

    clients: Sequence[int] = (1, 2, 4, 8, 16)
    rates: Sequence[float] = ()
    shares: Sequence[float] = ()
    seconds: float = 2.0
    warmup: float = 0.5
    repeat: int = 3
    rows: int = 1
    distinct: int = 64
    mix: Mapping[int, float] = field(default_factory=dict)
    timeout: float | None = None
    most: int = 0
    beside: Sequence[str] = (AUTO,)
    threads: int = 16
    config: Path | None = None
    memory: int = 1 << 30
    command: Sequence[str] = ()

    def __post_init__(self) -> None:
        # Numbers first, each by itself; then what they say together.
        for name in ("repeat", "rows", "distinct", "threads"):
            whole(name, getattr(self, name), 1)
        whole("most", self.most, 0)
        for clients in self.clients:
            whole("the number of clients", clients, 1)
        for name in ("seconds", "warmup", "timeout"):
            if getattr(self, name) is not None:
                number(name, getattr(self, name))
        if not self.clients and (self.shares or not self.rates):
            said = "shares are of the most that clients find" if self.shares else "there is no load"
            raise MsplitError(said, fix="give clients" if self.shares else "give clients, or rates")
        if not all(0 < one < float("inf") for one in (*self.rates, *self.shares)) or self.seconds <= 0:
            raise MsplitError("rates, shares and seconds are above 0", fix="give numbers above 0")
        if any(share < 0 for share in self.mix.values()) or (self.mix and not sum(self.mix.values()) > 0):
            fix = "give a share for each priority, such as 0:0.1,1:0.9"
            raise MsplitError(f"{dict(self.mix)} are no shares", fix=fix)
        unknown = [name for name in self.beside if name not in (*SESSIONS, AUTO)]
        if unknown:
            raise MsplitError(f"there is no {unknown[0]!r} to measure", fix=f"one of: {', '.join(SESSIONS)}")


@dataclass(eq=False)
class _Bench:
    """State of a load test: targets and checkers of their answers by label, and the runs so far."""

    table: RequestTable
    generator: LoadGenerator
    settings: LoadSettings
    tell: Progress
    parts: int = 1
    targets: dict[str, Target] = field(default_factory=dict)
    checkers: dict[str, Checker] = field(default_factory=dict)
    runs: dict[tuple[str, str], tuple[Level, list[LoadRun]]] = field(default_factory=dict)
    done: int = 0

    def measure(self, label: str, key: str, level: Level, seed: int) -> None:
        """One run of one target."""
        target, settings = self.targets[label], self.settings
        levels = len(settings.clients) + len(settings.rates) + len(settings.shares)
        steps = settings.repeat * len(self.targets) * levels
        self.tell(f"{label}, {key}", min(self.done / max(steps, 1), 1.0))
        asked = Sending(
            level=level,
            seconds=settings.seconds,
            warmup=settings.warmup,
            distinct=settings.distinct,
            seed=seed,
            mix=tuple(settings.mix.items()),
            most=settings.most,
            parts=self.parts,
        )
        self.table.clear()
        self.generator.send(asked)
        watch = Watch(self.table, self.generator.alive)
        problems = target.run(self.table, watch, settings.timeout)
        sent = self.generator.receive()
        verdict = self.checkers[label].check(self.table)
        run = measured(self.table, sent, verdict, is_open=level.is_open, why=next(iter(problems), ""))
        self.runs.setdefault((label, key), (level, []))[1].append(run)
        self.done += 1

    def best(self, label: str) -> float:
        """The most that a target has answered in the closed loop, per second."""
        closed = [runs for (one, _), (level, runs) in self.runs.items() if one == label and not level.is_open]
        return max((run.throughput for runs in closed for run in runs), default=0.0)


@dataclass(frozen=True, eq=False)
class SessionTask(ProcessTask):
    """Task of a process that answers with TensorFlow.

    Attributes:
        kind: One of `SESSIONS`.
        model, choice: The model's file, and the graph and tensors chosen from it; a graph itself is not sent to another process.
        feeds: The prepared requests.
        request: Settings of the engine.
        settings: Settings of the pool, of which `batcher` uses those that apply.
        threads: Number of threads that call sessions.
        config: File with further options of sessions.
    """

    kind: str
    model: Path
    choice: ReadOptions
    feeds: Sequence[Arrays]
    request: RunRequest
    settings: PoolSettings
    threads: int
    config: Path | None

    @property
    def groups(self) -> int:
        """Number of sessions, for the kinds that have several."""
        return 4 if self.settings.groups == AUTO else int(self.settings.groups)

    def start(self) -> ProcessTarget:
        """Starts the process."""
        label, about = SESSIONS[self.kind]
        echo = ECHO if self.kind == "batcher" else ECHO_THREADS
        return ProcessTarget(label, about.format(threads=self.threads, groups=self.groups), echo, label, [self])

    def open(self) -> Target:
        """Opens the session, or the pool of sessions, in this process, which runs no others: merged streams are shared by all.

        Raises:
            EngineError: TensorFlow can not run the model so.
        """
        label, flat = SESSIONS[self.kind][0], load_model(self.model, **vars(self.choice))
        if self.kind == "batcher":
            settings = replace(self.settings, groups=self.groups)
            request = replace(self.request, engine=TENSORFLOW.name)
            return of_pool(label, "", make_pool(flat, request, settings=settings), self.feeds, on_gpu=False)
        options = TensorFlowOptions(xla=self.kind == "xla", merge_streams=self.kind == "merge", config=self.config)
        job = Job(
            flat=flat,
            ids=np.zeros(len(flat), np.int32),
            streams=1,
            feeds=self.feeds[0],
            tensorflow=options,
            op_libraries=self.request.op_libraries,
            precision=Precision(self.request.precision),
        )
        TENSORFLOW.prepare([job])
        built = TENSORFLOW.build(job)
        plain, steps, known = by_steps(built.step, self.feeds), [built.step] * self.threads, built.facts()
        return LocalTarget(
            label, "", plain, lambda table, watch, _: call(table, steps, self.feeds, watch), ECHO_THREADS, lambda: known
        )


def load(
    model: FlatGraph | str | os.PathLike[str],
    request: RunRequest | None = None,
    *,
    settings: LoadSettings | None = None,
    pool: PoolSettings | None = None,
    server: ServerUnderTest | None = None,
    progress: Progress | None = None,
    common: Common | None = None,
) -> LoadResult:
    """Sends many requests to a pool of a model or a build from another process, checks every answer, and measures.

    This executes the model.

    Args:
        model: From `msplit.load`, or where a model or a build is.
        request: As for `msplit.prepare`.
        settings: Settings of the load test.
        pool: Settings of the pool.
        server: Server to measure in place of a pool; inputs and right answers come from the model.
        progress: Told what is being done and how much of it is done.
        common: What earlier load tests of the model leave for this one.

    Raises:
        EngineError: The engine can not run the model, or plain steps give other outputs than they should.
        MsplitError: The settings do not fit the model.
    """

    # What is asked for: as many levels of priority as requests have, rows that stand in for a batch, a model where a server is measured.
    settings, pool_settings, common = settings or LoadSettings(), pool or PoolSettings(), common or Common()
    request = (request or RunRequest()).sized(batch=settings.rows)
    if settings.mix and max(settings.mix) >= pool_settings.priorities:
        pool_settings = replace(pool_settings, priorities=max(settings.mix) + 1)
    is_build = not isinstance(model, FlatGraph) and files.is_build(model)
    flat = None if is_build else opened(model)
    if server is not None and flat is None:
        raise MsplitError("a build says nothing of what a server should answer", fix="give the model itself")
    if server is not None:
        settings = replace(settings, beside=[name for name in settings.beside if name != AUTO])
    with ExitStack() as stack:
        # Requests and right answers come first: the table has as much room as the answers need.
        made: Any = None
        notes: list[str] = []
        if server is None:
            source, kept = model if flat is None else flat, common.recipe_of
            made = make_pool(source, request, settings=pool_settings, progress=progress, recipe_of=kept)
            stack.callback(made.close, finish=False)
            notes += made.about.notes
        notes += () if flat is None else own_data(flat)
        lengths = pool_settings.lengths if made is None else made.lengths
        ready = common.ready = common.ready or _prepared(flat, model, made, request, settings, lengths or ())
        table = RequestTable(Layout(_rows(settings, ready), ready.kept))
        stack.callback(table.close)
        # The target in question: the pool here, or a server that client processes ask.
        main: Target
        if server is None:
            each = f" on each of {len(request.devices)} GPUs" if len(request.devices) > 1 else ""
            about = f"{made.about.label}, {plural(int(made.settings.groups), 'group')}{each}"
            main = of_pool("pool", about, made, ready.feeds, on_gpu=request.device == "cuda" and made.polls)
            pool_settings = replace(pool_settings, groups=made.settings.groups)
        else:
            main = client = clients_of(server, ready.feeds, table)
            stack.callback(client.close)
            client.ready()
        # Beside it TensorFlow, and echoes, which show what the benchmark itself takes in the same ways.
        others, skipped = _beside(stack, _tasks(flat, ready, request, settings, pool_settings, table))
        threads = settings.threads if any(target.echo != main.echo for target in others) else 0
        generator = LoadGenerator(table)
        stack.callback(generator.close)
        bench = _Bench(table, generator, settings, progress or silent, parts=1 if server is None else server.processes)
        # A target whose plain steps are wrong is left out; if it is the one in question there is nothing to measure.
        bench.runs.update(common.echo)
        for target in (main, *others, *(() if common.echo else echoes(ready.feeds, ready.answers, threads))):
            checker = Checker(ready, target.plain)
            if checker.wrong:
                _refuse_wrong(target, main, checker, ready)
                skipped.append(_result(target, f"gives other outputs: {checker.wrong}"))
                continue
            bench.targets[target.label], bench.checkers[target.label] = target, checker
        _measure(bench)
        common.echo = common.echo or {key: runs for key, runs in bench.runs.items() if key[0] == ECHO}
        results = tuple(map(_result, bench.targets.values()))
        checker = bench.checkers[main.label]
        return LoadResult(
            model=str(flat.model.path if flat is not None else model),
            targets=(*results, *skipped),
            points=_points(bench),
            **{name: getattr(settings, name) for name in ("seconds", "warmup", "repeat", "rows")},
            distinct=(len(ready.feeds), checker.told_apart()),
            checked_against=ready.source,
            tolerances=checker.tolerances,
            notes=tuple(notes),
            environment=environment(settings.command),
        )


def _prepared(
    flat: FlatGraph | None, model: Any, pool: Any, request: RunRequest, settings: LoadSettings, lengths: Sequence[int]
) -> Prepared:
    """Requests and what their answers should be: by TensorFlow where there is a model, else by plain steps of a build's pool, which was
    verified when it was opened."""
    with phase("preparing requests"):
        several = requests.lengths_for(pool, max(lengths), settings.distinct) if lengths else []
        if flat is not None:
            feeds = requests.from_model(flat, request, settings.distinct, several)
        else:
            base = requests.of_build(Path(model))
            feeds = requests.of_ports(base, pool.inputs, settings.rows, settings.distinct, request.seed, several)
        if pool is not None:
            feeds = [requests.of_one_user(one, pool.inputs) for one in feeds]
    source, answers = "TensorFlow on the CPU", None
    if flat is not None:
        try:
            answers = requests.by_tensorflow(flat, feeds, request)
        except EngineError:  # a pool may run what TensorFlow does not
            if pool is None:
                raise
    if answers is None:
        source, answers = "plain steps", requests.by_steps(pool.step, feeds)
    computed = {} if flat is None else computed_in(flat)
    # A GPU may multiply in TF32.
    precision = Precision(request.precision).on(gpu=request.device == "cuda" and bool(gpus()))
    return Prepared(feeds, answers, f"{source}, one request at a time", precision, computed)


def _rows(settings: LoadSettings, ready: Prepared) -> int:
    """Requests for which the table has room."""
    length = settings.seconds + settings.warmup
    fastest = max([_FASTEST if settings.clients or settings.shares else 0, *(1.2 * rate for rate in settings.rates)])
    if settings.most:
        length = min(length, settings.warmup + settings.most / fastest)
    wanted = int(fastest * length) + 10_000
    each = _PER_ROW + sum(kept.bytes for kept in ready.kept.values())
    return max(1024, min(wanted, settings.memory // each))


def _tasks(
    flat: FlatGraph | None,
    ready: Prepared,
    request: RunRequest,
    settings: LoadSettings,
    pool_settings: PoolSettings,
    table: RequestTable,
) -> list[SessionTask]:
    """Descriptions of the targets with TensorFlow to measure beside the pool."""
    names = list(settings.beside)
    if AUTO in names:
        names = list(SESSIONS) if flat is not None and request.device == "cuda" and _sees_gpu() else []
    if names and flat is None:
        raise MsplitError("TensorFlow runs no builds", fix="load the model itself to have it measured beside")
    if flat is None:
        return []
    return [
        SessionTask(
            kind=name,
            model=flat.model.path,
            choice=flat.model.choice,
            feeds=ready.feeds,
            request=request,
            settings=pool_settings,
            threads=settings.threads,
            config=settings.config,
            layout=table.layout,
            handle=table.handle,
        )
        for name in dict.fromkeys(names)
    ]


def _sees_gpu() -> bool:
    from msplit.engines.tensorflow import runtime
    from msplit.engines.tensorflow.engine import ENGINE

    return ENGINE.unavailable() is None and runtime.has_gpu()


def _beside(stack: ExitStack, tasks: Sequence[SessionTask]) -> tuple[list[Target], list[TargetResult]]:
    """Starts what is measured beside the pool, all at once, and waits for it."""
    ready, skipped = list[Target](), list[TargetResult]()
    started = [task.start() for task in tasks]
    for target in started:
        stack.callback(target.close)
    for target in started:
        with phase(f"opening {target.label}"):
            try:
                target.ready()
                ready.append(target)
            except EngineError as problem:
                skipped.append(_result(target, problem.what))
    return ready, skipped


def _result(target: Target, skipped: str = "") -> TargetResult:
    """Result of a target that was measured, or was skipped for a reason."""
    facts = {} if skipped else dict(target.facts())
    return TargetResult(target.label, target.about, target.echo, facts, skipped)


def _refuse_wrong(target: Target, main: Target, checker: Checker, ready: Prepared) -> None:
    """Raises where it is the pool that gives other outputs.

    Raises:
        EngineError: It is.
    """
    if target is main:
        gives = "the server gives" if target.label == "server" else "plain steps give"
        fix = "see `msplit bench`, which compares every way to run the model; one whose steps change it has no right answers"
        raise EngineError(f"{gives} other outputs than {ready.source}: {checker.wrong}", fix=fix)


def _measure(bench: _Bench) -> None:
    """All levels of all targets in turns, again and again; who goes first changes, and what is sent does not."""
    settings = bench.settings
    labels = list(bench.targets)
    fixed = {f"{clients} client{'' if clients == 1 else 's'}": Level(clients=clients) for clients in settings.clients}
    fixed |= {f"{rate:,.6g}/s": Level(rate=rate) for rate in settings.rates}
    best: dict[str, float] = {}
    with phase("measuring"), settled():
        for repeat in range(settings.repeat):
            turn = labels[repeat % len(labels) :] + labels[: repeat % len(labels)]
            for key, level in fixed.items():
                for label in turn:
                    bench.measure(label, key, level, repeat)
            best = best or {label: bench.best(label) for label in labels if bench.targets[label].echo}
            for share in settings.shares:
                for label in turn:
                    rate = share * best.get(label, max(best.values(), default=0.0))
                    if rate > 0:
                        bench.measure(label, f"{100 * share:.6g} %", Level(rate=rate), repeat)


def _points(bench: _Bench) -> tuple[Point, ...]:
    """Results target by target, with remarks where the generator was the limit."""
    found = []
    for label, target in bench.targets.items():
        for (one, key), (level, runs) in bench.runs.items():
            if one == label:
                point = Point(label, level, key, tuple(runs))
                echo = bench.runs.get((target.echo, key))
                other = Point(target.echo, level, key, tuple(echo[1])) if echo else None
                found.append(replace(point, limited=limit(point, other)))
    return tuple(found)


def limit(point: Point, echo: Point | None) -> str:
    """Reason why the load generator, not the target, sets the figures of a point; "" where it does not."""
    if any(run.cut for run in point.runs):
        return "ended early: no more memory for answers"
    if echo is None:
        return ""
    most = echo.throughput.value
    if not point.level.is_open:
        return f"the generator alone reaches {most:,.0f}/s" if point.throughput.value > _NEAR * most else ""
    late, latency = max(run.late_us for run in point.runs), point.latency("p50")
    if latency is not None and late > _LATE * latency.value:
        return f"requests were sent up to {late:,.0f} µs late"
    return ""


_FORM = "MODEL N_IN IN… N_OUT OUT… BATCH ITERS THREADS [CONFIG]"


@dataclass(frozen=True)
class Multistream:
    """Arguments of such a command, without the model.

    Attributes:
        inputs, outputs: Names of tensors.
        batch: Rows of a request.
        iterations: Requests of each thread.
        threads: Number of threads.
        config: A file with a ConfigProto as text.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    batch: int
    iterations: int
    threads: int
    config: Path | None


def parse(arguments: Sequence[str]) -> Multistream:
    """Reads what stands behind the model.

    Raises:
        MsplitError: It is something else.
    """
    left = list(arguments)

    def wrong(what: str) -> MsplitError:
        return MsplitError(what, where="--multistream", fix=f"write {_FORM}")

    def take(what: str) -> str:
        if not left:
            raise wrong(f"{what} is missing")
        return left.pop(0)

    def whole(what: str) -> int:
        given = take(what)
        if not given.isdecimal() or int(given) < 1:
            raise wrong(f"{what} is {given!r}, not a number above 0")
        return int(given)

    inputs = tuple(take("the name of an input") for _ in range(whole("the number of inputs")))
    outputs = tuple(take("the name of an output") for _ in range(whole("the number of outputs")))
    batch, iterations, threads = (whole(f"the number of {what}") for what in ("rows", "iterations", "threads"))
    config = Path(left.pop(0)) if left else None
    if left:
        raise wrong(f"{left[0]!r} is too much")
    return Multistream(inputs, outputs, batch, iterations, threads, config)
