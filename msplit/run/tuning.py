"""Find the fastest plan of a model by measuring: candidates, then local search, then a confirmation against one stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from msplit.analysis.colocation import groups
from msplit.assignment.model import measured_record, save
from msplit.assignment.plans import Planned, planned, save_plan
from msplit.core import statistics
from msplit.core.graph import Ints
from msplit.cost.profile import Workload
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE
from msplit.errors import EngineError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.progress import Progress
from msplit.run.request import TuneSettings
from msplit.schedule.search import Found, MeasuringDevice, PlanCandidate, SearchLimits, search, single
from msplit.verify.results import BenchResult

if TYPE_CHECKING:
    from msplit.engines.cuda.engine import CompiledVariant

BUILDS = 3
"""Builds of the confirmation."""

CONFIRM_ROUNDS = 15
"""Rounds of each."""

PROFILE_SECONDS = 12.0
"""Most time, over and above that of the search, for timing kernels alone, where no profile is given. Most models take a few seconds."""

ONE_STREAM = "one stream"

TUNED = "msplit, tuned"
"""How the label of the tuned variant of a bench begins."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Tuned(Planned):
    """The fastest plan that was found.

    Attributes:
        found: What was tried, and what it gave.
        taken: The candidate that it is.
        memory: Memory over one stream's.
        gain: Over one stream, plain kernels, in `BUILDS` fresh builds; None where the plan *is* that.
        over_one: Over one stream of the same kernels; `gain` where those are plain, None where the plan is one stream.
        over_candidate: Over the best candidate; None where it is that.
        why: Why it was taken, in a sentence.
        variants: The kernels that were tried, by `KernelMode`.
        fallback: One stream, in case the plan turns out wrong or slower; None where it is that already.
    """

    found: Found
    taken: PlanCandidate
    memory: float
    gain: statistics.Ratio | None
    over_one: statistics.Ratio | None
    over_candidate: statistics.Ratio | None
    why: str
    fallback: Tuned | None = None
    variants: Mapping[str, CompiledVariant] = field(default_factory=dict)


def tune(
    job: Job,
    settings: TuneSettings | None = None,
    *,
    streams: int = 16,
    given: Sequence[tuple[str, Ints]] = (),
    batch: int | None = None,
    device: MeasuringDevice | None = None,
    now: Callable[[], float] = time.perf_counter,
    tell: Progress | None = None,
) -> Tuned:
    """Searches for the fastest plan of a model on the cuda engine.

    Args:
        job: The model, its inputs, its costs, and the engine's options; its ids do not matter.
        given: Further candidates: a name, and ids of the flat graph's nodes.
        batch: For the plan file.
        device: What measures, in place of the one that the job runs on. The CPU does not measure: it simulates.
        now: Clock of the budget.

    Raises:
        EngineError: The engine can not run or not capture the model.
    """
    settings = settings or TuneSettings()
    if job.costs is None:
        raise MsplitError("tuning needs costs", fix="give the job what `price` gives")
    variants = ENGINE.variants(job, groups(job.flat).of, settings.kernels, seconds=PROFILE_SECONDS, tell=tell)
    if dynamic := next(iter(variants.values())).compiled.dynamic:
        op, name = dynamic
        raise EngineError(
            f"the shape of what {op} ({name}) computes depends on values, so the model can not be captured, nor tuned",
            fix="cut such ops off with --part inputs= and outputs=",
        )
    device = device or variants.runner()
    limits = SearchLimits(settings.seconds, streams, settings.max_memory, settings.seed)
    found = search(
        {mode: variant.problem for mode, variant in variants.items()},
        device,
        limits,
        given={mode: [(label, variant.streams_of(ids)) for label, ids in given] for mode, variant in variants.items()},
        now=now,
        progress=tell,
    )
    if tell:
        tell("confirming", 1.0)
    alone_of = {mode: single(variants[mode].problem, mode) for mode in {found.winner.mode, found.candidate.mode}}
    taken, ratios, why = _decide(found, device, alone_of)
    device.renew()

    def result(taken: PlanCandidate, ratios: Mapping[str, statistics.Ratio], why: str, fallback: Tuned | None) -> Tuned:
        variant = variants[taken.mode]
        made = planned(variant.job, variant.bind(taken), layout=variant.compiled.layout, batch=batch)
        return Tuned(
            **vars(made),
            found=found,
            taken=taken,
            memory=device.memory(taken),
            gain=ratios.get("one"),
            over_one=ratios.get("same kernels") or (ratios.get("one") if taken.mode == found.one.mode else None),
            over_candidate=ratios.get("candidate"),
            why=why,
            fallback=fallback,
            variants=variants,
        )

    alone = None if taken.key() == found.one.key() else result(found.one, {}, "", None)
    return result(taken, ratios, why, alone)


def confirmed(tuned: Tuned, result: BenchResult, label: str) -> Tuned:
    """The tuned plan after a bench has verified and measured it; one stream in its place where the bench found it slower than that.

    The variant of this label runs it; "" where it is one stream.
    """
    variant = next((variant for variant in result.variants if variant.label == label), None)
    if variant is None or variant.failed:
        return tuned
    over_one = [ratio for ratio in variant.ratios if ratio.clock == "device" and "1 stream" in ratio.over]
    slower = next((ratio for ratio in over_one if ratio.value < 1), None)
    if slower is None or tuned.fallback is None:
        return tuned
    why = f"the plan that was found is {1 / slower.value:.3f} times slower than {slower.over} in this bench: one stream is kept"
    return replace(tuned.fallback, why=why)


def _decide(
    found: Found, device: MeasuringDevice, alone: Mapping[str, PlanCandidate]
) -> tuple[PlanCandidate, dict[str, statistics.Ratio], str]:
    """Measures the winner against the best candidate and one stream in fresh builds, and takes the simplest that nothing beats."""
    one, candidate, winner = found.one, found.candidate, found.winner
    runners = list({each.key(): each for each in (one, *alone.values(), candidate, winner)}.values())
    builds = []
    for _ in range(BUILDS):
        device.renew()
        builds.append(device.times(runners, CONFIRM_ROUNDS))
    place = {each.key(): number for number, each in enumerate(runners)}

    def ratio(of: PlanCandidate, over: PlanCandidate, label: str) -> statistics.Ratio:
        mine, theirs = place[of.key()], place[over.key()]
        return statistics.ratio([b[theirs] for b in builds], [b[mine] for b in builds], over=label, clock="device")

    taken = winner
    why = "the fastest that was found"
    if winner.key() != candidate.key() and ratio(winner, candidate, candidate.name).value <= 1:
        taken, why = candidate, "what local search made of it was no faster in fresh builds"
    gain = ratio(taken, one, ONE_STREAM)
    if taken.key() != one.key() and not gain.low > 1:
        best = f"the best of the others ({taken.name}) is {gain.value:.3f} times as fast"
        return one, {}, f"nothing is faster than one stream for certain: {best}"
    if taken.key() == one.key():
        return one, {}, "nothing is faster than one stream"
    ratios = {"one": gain}
    same = alone[taken.mode]
    if same.key() not in (one.key(), taken.key()):
        ratios["same kernels"] = ratio(taken, same, f"{ONE_STREAM}, {same.mode}")
    if taken.key() != candidate.key():
        ratios["candidate"] = ratio(taken, candidate, candidate.name)
    return taken, ratios, why


def write(
    flat: FlatGraph,
    tuned: Tuned,
    *,
    output: Path | None = None,
    plan: Path | None = None,
    force: bool = False,
    workload: Workload | None = None,
) -> list[str]:
    """Writes the annotated model, with a record of what sized and priced it, and the plan: those that are asked for.

    Returns:
        What was written, in sentences.

    Raises:
        WriteError: One can not be written.
    """
    said = []
    if output is not None:
        record = measured_record(flat, workload or Workload(), tuned.streams)
        report, conflicts = save(flat, tuned.ids, output, force=force, record=record)
        said.append(f"Written: {report.path}, {report.set} stream ids set or changed.")
        said += [*report.warnings, *report.notes]
        if conflicts:
            said.append(
                f"{len(conflicts)} nodes of functions have one id for several call sites, which want different ones: "
                "only the plan keeps them apart, and `msplit check --plan` names them."
            )
    if plan is not None:
        save_plan(flat, tuned, plan, force=force)
        count = tuned.groups
        lists = f", with {count} group{'s' * (count != 1)} of nodes that share a kernel" if count else ""
        said.append(
            f"Written: {plan}, the plan{lists}; `msplit check --plan` proves it and `msplit bench --plan` runs it."
        )
    return said
