"""All ways to choose streams, and all ways to make kernels, side by side: simulated everywhere, measured where there is a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from msplit import rules
from msplit.analysis.colocation import groups
from msplit.assignment.assignment import assign
from msplit.assignment.model import opened, price
from msplit.assignment.plans import fill_ids, with_kernels
from msplit.core import statistics
from msplit.core.graph import Assignment, Ints
from msplit.cost.costs import Costs
from msplit.cost.profile import Workload
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE
from msplit.errors import EngineError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.progress import Progress, phase
from msplit.rules.auto import PLAIN, Auto
from msplit.rules.base import RuleContext
from msplit.rules.ruleset import RuleSet
from msplit.run.compilation import job_of
from msplit.run.compilation import why_not as no_torch
from msplit.schedule.algorithms import ONE
from msplit.schedule.choose import best, choose
from msplit.schedule.judge import predict
from msplit.schedule.search import AT_ONCE, ROUNDS, MeasuringDevice, PlanCandidate, candidate_of, single

if TYPE_CHECKING:
    from msplit.engines.cuda.engine import CompiledVariant

STREAMS = 4
"""Most streams where neither the user nor the rules say."""

_NO_GRAPH = "its steps can not be captured as one CUDA graph"


@dataclass(frozen=True)
class Row:
    """Kernels of one mode on streams that one algorithm, or rules, chose.

    Attributes:
        name: The algorithm, with its number of streams and its grain; or ``rules NAME``; with other kernels those in front, as in
            ``fused and grouped: list-8``.
        waits: Waits between them, before chains are lowered to the engine's steps.
        predicted_gain: Over one stream, simulated.
        skipped: Why it was not tried, None if it was.
        measured_us: Time on the device, median; None where it was not measured.
        gain: Over one stream in the same rounds; None where it was not measured, and for one stream.
        memory: Peak memory of values over one stream's; None where it is not known, 1 where it does not matter.
    """

    name: str
    streams: int
    waits: int
    predicted_us: float
    predicted_gain: float
    skipped: str | None = None
    measured_us: float | None = None
    gain: statistics.Ratio | None = None
    memory: float | None = None


@dataclass(frozen=True, eq=False)
class Compared:
    """Result of `compare`.

    Attributes:
        streams: Most streams.
        rows: One stream first, then as they were tried, then the rules.
        auto: Name of the one that the rule ``auto`` takes.
        bound_us: No schedule is faster, in the simulator's terms.
        device: What measured, "" if nothing did.
        why_not: Why nothing was measured, "" if it was.
        kernels: Each kernel mode on its best streams, plain kernels first. They are simulated over the engine's steps, and gains are
            over plain kernels on one stream.
        same: Kernel modes that change nothing.
        no_kernels: Why there are none, "" if there are.
    """

    flat: FlatGraph
    costs: Costs
    streams: int
    rows: tuple[Row, ...]
    auto: str
    bound_us: float
    device: str
    why_not: str
    kernels: tuple[Row, ...] = ()
    same: tuple[str, ...] = ()
    no_kernels: str = ""


def compare(
    flat: FlatGraph | str | os.PathLike[str],
    ruleset: str | Path | RuleSet,
    workload: Workload,
    *,
    streams: int | None = None,
    measure: bool = True,
    device: Callable[[Mapping[str, CompiledVariant]], MeasuringDevice] | None = None,
    tell: Progress | None = None,
) -> Compared:
    """Tries every way to choose streams, and to make kernels; see `api.compare`."""
    flat = opened(flat)
    if not isinstance(ruleset, RuleSet):
        ruleset = rules.load(ruleset, streams=streams)
    ruleset = replace(ruleset, rules=tuple(rule for rule in ruleset.rules if rule.key != "manual"))
    ruleset = with_kernels(ruleset, PLAIN)  # its row stands among those of plain kernels
    most = streams or ruleset.streams or STREAMS
    sizes, costs = price(flat, workload)
    context = RuleContext(flat, costs, most)
    problem = Auto().problem(context, Assignment.empty(len(flat)))
    rows, ids = [Row(ONE, 1, 0, 0.0, 1.0)], [np.zeros(len(flat), np.int32)]
    auto = ONE
    if len(problem):
        with phase("simulating candidates"):
            candidates = choose(problem, most)
        one = next(candidate.makespan_us for candidate in candidates if candidate.name == ONE)
        auto = best(candidates).name
        rows = [
            Row(c.name, c.streams, c.waits, c.makespan_us, one / c.makespan_us if c.skipped is None else 0.0, c.skipped)
            for c in candidates
        ]
        ids = [ids[0] if c.skipped is not None else fill_ids(flat, costs, problem.spread(c.stream)) for c in candidates]
        assigned = assign(flat, ruleset, streams=most, priced=(sizes, costs))
        found = predict(flat, costs, assigned.ids)
        name = Path(ruleset.source.removesuffix(" (shipped)")).stem
        rows.append(
            Row(f"rules {name}", len(found.lanes), found.plan.waits, found.makespan_us, one / found.makespan_us)
        )
        ids.append(assigned.ids)

    def job() -> Job:
        found = job_of(flat, costs, workload)
        return found if device is None else replace(found, options=replace(found.options, device="cpu"))

    why_not, where = "", ""
    if not measure:
        why_not = "measuring was not asked for"
    elif device is None and (why := ENGINE.unavailable()):
        why_not = why
    elif not len(problem):
        why_not = "no node launches a kernel"
    else:
        made = job()
        try:
            rows, where = _measured(made, rows, ids, device, tell)
        except EngineError as error:
            why_not = error.what
    kernels, same, no_kernels = _kernels(job, most, measure, device, tell)
    return Compared(flat, costs, most, tuple(rows), auto, problem.bound_us(), where, why_not, kernels, same, no_kernels)


def _kernels(
    job: Callable[[], Job],
    streams: int,
    measure: bool,
    device: Callable[[Mapping[str, CompiledVariant]], MeasuringDevice] | None,
    tell: Progress | None,
) -> tuple[tuple[Row, ...], tuple[str, ...], str]:
    """A row for each kernel mode, the modes that change nothing, and why there are no rows."""
    if not measure:
        return (), (), "only running the model once shows what kernels it becomes; leave --no-measure out"
    if (why := no_torch()) is not None:
        return (), (), why
    if device is None and (why := ENGINE.unavailable()):
        return (), (), f"only running the model on a GPU shows what kernels it becomes; {why}"
    try:
        made = job()
        found = ENGINE.variants(made, groups(made.flat).of, tell=tell).simulate(streams, tell=tell)
        if found is None:
            return (), (), "the engine launches no kernel for it"
        if found.dynamic:
            return (), (), _NO_GRAPH
        runner = device(found.compiled) if device else found.compiled.runner()
        one = single(found.plain.compiled.problem, found.plain.name)
        candidates = [variant.candidate() for variant in found.variants.values()]
        theirs, *ours = runner.times([one, *candidates], ROUNDS)
        rows = []
        for variant, candidate, times in zip(found.variants.values(), candidates, ours, strict=True):
            best = variant.best
            name = f"{variant.name}: {best.name}"
            row = Row(name, best.streams, best.waits, best.makespan_us, found.gain(variant))
            rows.append(_with_times(row, runner, candidate, one, (theirs, times)))
        runner.renew()
    except MsplitError as error:
        # An input can not be made up, an op has no lowering: candidates are shown all the same.
        return (), (), error.what
    return tuple(rows), found.same, ""


def _measured(
    job: Job,
    rows: Sequence[Row],
    ids: Sequence[Ints],
    device: Callable[[Mapping[str, CompiledVariant]], MeasuringDevice] | None,
    tell: Progress | None,
) -> tuple[list[Row], str]:
    """The rows with times: some at a time, side by side with one stream."""
    variants = ENGINE.variants(job, groups(job.flat).of, (PLAIN,))
    plain = variants[PLAIN]
    if plain.compiled.dynamic:
        raise EngineError(_NO_GRAPH)
    runner = device(variants) if device else variants.runner()
    one = single(plain.problem, PLAIN)
    found = [
        None if row.skipped is not None else candidate_of(plain.problem, PLAIN, row.name, plain.streams_of(of_row))
        for row, of_row in zip(rows, ids, strict=True)
    ]
    distinct = list({each.key(): each for each in found if each is not None and each.key() != one.key()}.values())
    times: dict[tuple[str, bytes], tuple[Sequence[float], Sequence[float]]] = {}
    for at in range(0, max(len(distinct), 1), AT_ONCE):
        batch = distinct[at : at + AT_ONCE]
        if tell:
            tell("measuring", at / max(len(distinct), 1))
        measured = runner.times([one, *batch], ROUNDS)
        times.setdefault(one.key(), (measured[0], measured[0]))
        times |= {each.key(): (measured[0], rounds) for each, rounds in zip(batch, measured[1:], strict=True)}
        runner.renew()
    result = [
        row if candidate is None else _with_times(row, runner, candidate, one, times[candidate.key()])
        for row, candidate in zip(rows, found, strict=True)
    ]
    return result, runner.describe()


def _with_times(
    row: Row,
    runner: MeasuringDevice,
    candidate: PlanCandidate,
    one: PlanCandidate,
    times: tuple[Sequence[float], Sequence[float]],
) -> Row:
    """A row with what its candidate took, second of `times`, in the rounds in which one stream took the first."""
    theirs, ours = times
    gain = None
    if candidate.key() != one.key():
        gain = statistics.ratio([theirs], [ours], over=ONE, clock="device")
    return replace(row, measured_us=median(ours) * 1e6, gain=gain, memory=runner.memory(candidate))
