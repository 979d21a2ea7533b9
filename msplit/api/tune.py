"""Find the fastest plan of a model by measuring: candidates, then local search, then a confirmation against one stream."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from msplit import formats
from msplit.analysis.colocation import groups
from msplit.api.model import save
from msplit.assignment import Assignment
from msplit.cost.costs import Costs
from msplit.dag import Dag
from msplit.engines.base import Job
from msplit.errors import EngineError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.graph import Ints
from msplit.measure import stats
from msplit.measure.environment import environment
from msplit.measure.result import BenchResult
from msplit.rules.auto import claim_rest
from msplit.rules.base import Context
from msplit.schedule import planfile
from msplit.schedule.order import topological
from msplit.schedule.plan import Plan, make_plan
from msplit.schedule.search import Device, Found, Limits, Trial, search, single

if TYPE_CHECKING:
    from msplit.engines.cuda.trials import Arm

BUILDS = 3
"""Builds of the confirmation."""

CONFIRM_ROUNDS = 15
"""Rounds of each."""

PROFILE_SECONDS = 12.0
"""Most time, over and above that of the search, for timing kernels alone, where no profile is given. Most models take a few seconds."""

ONE_STREAM = "one stream"

TUNED = "msplit, tuned"
"""How the label of the tuned variant of a bench begins."""


@dataclass(frozen=True)
class TuneSettings:
    """How to search.

    Attributes:
        seconds: Time for the search; building and the confirmation take a little more.
        max_memory: Plans that need more than so many times the memory of one stream are not taken. What is too small to matter is free.
        kernels: Ways to make kernels that are tried; see `engines.cuda.trials.OPTIONS`. Those that change nothing cost nothing.
        seed: Of what is drawn.
    """

    seconds: float = 20.0
    max_memory: float = 1.5
    kernels: Sequence[str] = ("plain", "fused", "grouped", "fused and grouped")
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Tuned:
    """The fastest plan that was found.

    Attributes:
        found: What was tried, and what it gave.
        trial: What was taken.
        kernels: The way in which its kernels are made.
        ids: Stream id per node of the flat graph.
        streams: How many streams it uses.
        waits: Waits between them.
        memory: Memory over one stream's.
        options: The engine's options that go with it, the stored plan among them.
        plan: Order and waits of the flat graph's nodes, for a plan file.
        gain: Over one stream, plain kernels, in `BUILDS` fresh builds; None where the plan *is* that.
        over_one: Over one stream of the same kernels; `gain` where those are plain, None where the plan is one stream.
        over_candidate: Over the best candidate; None where it is that.
        why: Why it was taken, in a sentence.
        made_for: GPU, driver, batch …: what a plan file says it was made for.
        arms: The kernels that were tried, by name: `Arm.bounds` tells what limits them.
        fallback: One stream, in case the plan turns out wrong or slower; None where it is that already.
    """

    found: Found
    trial: Trial
    kernels: str
    ids: Ints
    streams: int
    waits: int
    memory: float
    options: Mapping[str, Any]
    plan: Plan
    gain: stats.Ratio | None
    over_one: stats.Ratio | None
    over_candidate: stats.Ratio | None
    why: str
    made_for: Mapping[str, Any] = field(default_factory=dict)
    fallback: Tuned | None = None
    arms: Mapping[str, Arm] = field(default_factory=dict)


def tune(
    job: Job,
    settings: TuneSettings | None = None,
    *,
    streams: int = 16,
    given: Sequence[tuple[str, Ints]] = (),
    batch: int | None = None,
    device: Device | None = None,
    now: Callable[[], float] = time.perf_counter,
    tell: Callable[[str, float], None] | None = None,
) -> Tuned:
    """Searches for the fastest plan of a model on the cuda engine.

    Args:
        job: The model, its inputs, its costs, and the engine's options; its ids do not matter.
        settings: How to search.
        streams: Most streams.
        given: Further candidates: a name, and ids of the flat graph's nodes.
        batch: For the plan file.
        device: What measures, in place of the one that the job's option ``device`` means. The CPU does not measure: it simulates.
        now: Clock of the budget.
        tell: Told what is being done and the share of it that is done.

    Raises:
        EngineError: The engine can not run or not capture the model.
    """
    import torch

    from msplit.engines.cuda import steps, trials
    from msplit.engines.cuda.engine import prove

    settings = settings or TuneSettings()
    if job.costs is None:
        raise MsplitError("tuning needs costs", fix="give the job what `price` gives")
    costs = job.costs
    arms = trials.arms(
        job,
        groups(job.flat, handles=False).of,
        settings.kernels,
        seconds=PROFILE_SECONDS,
        tell=tell,
    )
    _refuse_dynamic(next(iter(arms.values())).prepared.program)
    device = device or trials.make_trials(arms, torch.device(str(job.options.get("device", "cuda"))))
    limits = Limits(settings.seconds, streams, settings.max_memory, settings.seed)
    found = search(
        {name: arm.problem for name, arm in arms.items()},
        device,
        limits,
        given={name: [(label, arm.streams_of(ids)) for label, ids in given] for name, arm in arms.items()},
        now=now,
        tell=tell,
    )
    if tell:
        tell("confirming", 1.0)
    alone_of = {name: single(arms[name].problem, name) for name in {found.winner.arm, found.candidate.arm}}
    trial, ratios, why = _decide(found, device, alone_of)
    device.renew()

    def result(trial: Trial, ratios: Mapping[str, stats.Ratio], why: str, fallback: Tuned | None) -> Tuned:
        arm = arms[trial.arm]
        program = arm.prepared.program
        plan = prove(arm.plan(trial), program)
        stored = steps.store(program, plan)
        ids = fill_ids(job.flat, costs, steps.ids_of(program, plan.stream, len(job.flat)))
        options = {**trials.OPTIONS[trial.arm], "plan": stored}
        return Tuned(
            found=found,
            trial=trial,
            kernels=trial.arm,
            ids=ids,
            streams=plan.streams,
            waits=plan.waits,
            memory=device.memory(trial),
            options=options,
            plan=flat_plan(job.flat, costs, ids, stored.kernels),
            gain=ratios.get("one"),
            over_one=ratios.get("same kernels") or (ratios.get("one") if trial.arm == found.one.arm else None),
            over_candidate=ratios.get("candidate"),
            why=why,
            made_for=made_for(arm.job, batch, layout=arm.prepared.layout),
            fallback=fallback,
            arms=arms,
        )

    alone = None if trial.key() == found.one.key() else result(found.one, {}, "", None)
    return result(trial, ratios, why, alone)


def confirmed(tuned: Tuned, result: BenchResult) -> Tuned:
    """The tuned plan after a bench has verified and measured it; one stream in its place where the bench found it slower than that."""
    variant = next((variant for variant in result.variants if variant.label.startswith(TUNED)), None)
    if variant is None or variant.failed:
        return tuned
    ratios = [ratio for ratio in variant.ratios if ratio.clock == "device" and "1 stream" in ratio.over]
    slower = [ratio for ratio in ratios if ratio.value < 1]
    if not slower or tuned.fallback is None:
        return tuned
    why = f"the plan that was found is {1 / slower[0].value:.3f} times slower than {slower[0].over} in this bench: one stream is kept"
    return replace(tuned.fallback, why=why)


def _refuse_dynamic(program: Any) -> None:
    if program.dynamic:
        step = program.steps[program.dynamic[0]].op
        raise EngineError(
            f"the shape of what {step.op} ({step.name}) computes depends on values, so the model can not be captured, nor tuned",
            fix="cut such ops off with --inputs and --outputs",
        )


def _decide(found: Found, device: Device, alone: Mapping[str, Trial]) -> tuple[Trial, dict[str, stats.Ratio], str]:
    """Measures the winner against the best candidate and one stream in fresh builds, and takes the simplest that nothing beats."""
    one, candidate, winner = found.one, found.candidate, found.winner
    runners = list({trial.key(): trial for trial in (one, *alone.values(), candidate, winner)}.values())
    builds = []
    for _ in range(BUILDS):
        device.renew()
        builds.append(device.times(runners, CONFIRM_ROUNDS))
    place = {trial.key(): number for number, trial in enumerate(runners)}

    def ratio(trial: Trial, over: Trial, label: str) -> stats.Ratio:
        mine, theirs = place[trial.key()], place[over.key()]
        return stats.ratio([b[theirs] for b in builds], [b[mine] for b in builds], over=label, clock="device")

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
    same = alone[taken.arm]
    if same.key() not in (one.key(), taken.key()):
        ratios["same kernels"] = ratio(taken, same, f"{ONE_STREAM}, {same.arm}")
    if taken.key() != candidate.key():
        ratios["candidate"] = ratio(taken, candidate, candidate.name)
    return taken, ratios, why


def fill_ids(flat: FlatGraph, costs: Costs, ids: Ints) -> Ints:
    """Ids of all nodes from those of the kernels.

    Args:
        flat: The graph.
        costs: Cost of its nodes.
        ids: Stream per node, -1 for nodes without a kernel: they follow their inputs or their consumers.
    """
    streams = max(int(ids.max(initial=0)) + 1, 1)
    context = Context(flat, costs, streams)
    claimed = np.where(flat.host, -1, ids).astype(np.int32)
    assignment = Assignment.empty(len(flat)).claim_many(
        [
            (np.flatnonzero(claimed == stream).astype(np.int32), stream, "measured")
            for stream in np.unique(claimed[claimed >= 0]).tolist()
        ],
        "tuned",
    )
    filled = claim_rest(context, assignment, "tuned").filled(0)
    filled[flat.host] = 0
    return filled


def flat_plan(flat: FlatGraph, costs: Costs, ids: Ints, kernels: Sequence[tuple[int, int, int]]) -> Plan:
    """The plan of the flat graph's nodes, in the order in which their kernels are recorded, as far as control edges allow that.

    Args:
        flat: The graph.
        costs: Nodes that cost nothing launch nothing.
        ids: Stream per node.
        kernels: The engine's order; see `steps.StoredPlan`.
    """
    key = np.full(len(flat), np.inf)
    for place, (node, _, _) in enumerate(kernels):
        key[node] = -place
    dag = Dag.from_graph(flat.graph)
    lanes = np.where((costs.time_us > 0) & ~flat.host, ids, -1).astype(np.int32)
    return make_plan(dag, lanes, topological(dag, key))


def made_for(job: Job, batch: int | None = None, *, layout: str = "none") -> dict[str, Any]:
    """What a plan of a job depends on beside the graph, as plain data."""
    known = environment()
    gpus = known["gpus"] or [{}]
    found = {
        "gpu": gpus[0].get("name") or (job.costs.gpu if job.costs is not None else ""),
        "driver": gpus[0].get("driver"),
        "torch": known["versions"].get("torch"),
        "msplit": known["msplit"],
        "batch": batch,
        "inputs": {name: [value.dtype.name, *value.shape] for name, value in sorted(job.feeds.items())},
        "precision": "ieee" if job.ieee else "tf32",
        "options": {key: True for key in ("fuse", "group") if job.options.get(key)}
        | ({} if layout == "none" else {"layout": layout}),
    }
    return {key: value for key, value in found.items() if value is not None}


def save_plan(flat: FlatGraph, tuned: Tuned, path: Path, *, force: bool = False) -> None:
    """Writes the plan with the order of its kernels; `msplit check --plan` proves it, `msplit bench --plan` runs it.

    Raises:
        WriteError: It can not be written.
    """
    stored = tuned.options["plan"]
    shared = [(group.kind, group.nodes, group.stream) for group in stored.groups]
    data = planfile.dump(tuned.plan, flat, kernels=stored.kernels, groups=shared, made_for=tuned.made_for)
    formats.write_bytes_atomic(path, (json.dumps(data, indent=1) + "\n").encode(), force=force)


def write(
    flat: FlatGraph, tuned: Tuned, *, output: Path | None = None, plan: Path | None = None, force: bool = False
) -> list[str]:
    """Writes the annotated model and the plan, those that are asked for. What was written, in sentences.

    Raises:
        WriteError: One can not be written.
    """
    said = []
    if output is not None:
        report, conflicts = save(flat, tuned.ids, output, force=force)
        said.append(f"Written: {report.path}, {report.set} stream ids set or changed.")
        if conflicts:
            said.append(
                f"{len(conflicts)} nodes of functions have one id for several call sites, which want different ones: "
                "only the plan keeps them apart."
            )
    if plan is not None:
        save_plan(flat, tuned, plan, force=force)
        count = len(tuned.options["plan"].groups)
        lists = f", with {count} group{'s' * (count != 1)} of nodes that share a kernel" if count else ""
        said.append(
            f"Written: {plan}, the plan{lists}; `msplit check --plan` proves it and `msplit bench --plan` runs it."
        )
    return said


def stored_job(job: Job, plan: planfile.PlanFile) -> tuple[Job, list[str]]:
    """The job that runs a stored plan, and what does not fit.

    Args:
        job: The model on one stream.
        plan: The plan.

    Raises:
        MsplitError: The plan is one of another graph.
    """
    from msplit.engines.cuda.steps import StoredPlan

    flat = job.flat
    found, unknown = plan.on(flat)
    if unknown or not len(found.order):
        name = f"it names {unknown[0]!r}, which the graph has not" if unknown else "it orders nothing"
        raise MsplitError(f"the plan is not one of this graph: {name}", where=plan.source, fix="tune the model again")
    notes = []
    if plan.graph_hash and flat.model.graph_def is not None and plan.graph_hash != formats.graph_hash(flat.model):
        notes.append("the plan was made for another version of this graph")
    ids = np.maximum(found.stream, 0).astype(np.int32)
    options: dict[str, Any] = {}
    for key, value in dict(plan.made_for.get("options") or {}).items():
        if (key in ("fuse", "group") and isinstance(value, bool)) or (key == "layout" and value in ("nhwc", "nchw")):
            options[key] = value
    if plan.kernels:
        index = flat.graph.index
        kernels = [(index.get(name, -1), number, lane) for name, number, lane in plan.kernels]
        if all(node >= 0 for node, _, _ in kernels):
            options["plan"] = StoredPlan(tuple(kernels))
            for node, _, lane in kernels:
                ids[node] = lane
    notes += _differences(plan.made_for, made_for(job))
    return replace(job, ids=ids, streams=plan.streams, options={**job.options, **options}), notes


def runs_as_stored(job: Job) -> bool:
    """Whether the engine can run a job by the order that its stored plan holds: not where its kernels have become others."""
    import torch

    from msplit.engines.cuda.engine import ENGINE
    from msplit.engines.cuda.steps import restore

    stored = job.options.get("plan")
    device = torch.device(str(job.options.get("device", "cuda")))
    return stored is not None and restore(ENGINE.prepared(job, device).program, stored) is not None


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is another than when the plan was made."""
    names = {"gpu": "GPU", "driver": "driver", "torch": "PyTorch", "precision": "precision", "inputs": "shapes"}
    differ = [names[key] for key in names if key in then and key in now and then[key] != now[key]]
    return [f"the plan was made with another {' and another '.join(differ)}: tune again for the best"] if differ else []
