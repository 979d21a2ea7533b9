"""From a schedule of the engine's steps to ids and a plan file, and back from such a file to something that runs.

Kernels and streams chosen together, in the simulator: for the rule `auto` with `kernels: best`, and for `bench`.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from msplit import formats, progress
from msplit.core.dag import Dag
from msplit.core.graph import Assignment, Ints
from msplit.cost.costs import Costs
from msplit.cost.profile import Workload
from msplit.engines.base import Job
from msplit.engines.cuda.engine import ENGINE
from msplit.engines.cuda.options import EngineOptions, KernelMode, StoredPlan
from msplit.engines.environment import environment
from msplit.errors import INSTALL_PYTORCH, EngineError, MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.inputs.make import feeds_for
from msplit.progress import Progress
from msplit.rules.auto import NOT_CHOSEN, PLAIN, Auto, claim_ids
from msplit.rules.base import KernelStreams, Remark, RuleContext
from msplit.rules.ruleset import RuleSet
from msplit.schedule import planfile
from msplit.schedule.plan import Plan, make_plan, topological
from msplit.schedule.search import PlanCandidate

if TYPE_CHECKING:
    from msplit.engines.cuda.engine import CompiledVariant, SimulatedVariant, SimulatedVariants


@dataclass(frozen=True, eq=False)
class Planned:
    """A schedule of the engine's steps in terms of the graph.

    Attributes:
        kernels: Which kernels are made.
        ids: Stream id per node of the flat graph. Nodes that share a kernel have the same.
        stored: The plan of the steps, for the engine.
        plan: Order and waits of the flat graph's nodes, for a plan file.
        made_for: GPU, driver, batch …: what a plan file says it was made for.
        node_ids: `ids`, but -1 for nodes that launch nothing.
    """

    kernels: KernelMode
    ids: Ints
    streams: int
    waits: int
    stored: StoredPlan
    plan: Plan
    made_for: Mapping[str, Any] = field(default_factory=dict)
    node_ids: Ints = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def groups(self) -> int:
        """Number of groups of nodes that share a kernel."""
        return len(self.stored.groups)

    def on(self, job: Job) -> Job:
        """The job that runs it, made of the one that runs the model on one stream."""
        options = replace(job.options, mode=self.kernels, plan=self.stored)
        return replace(job, ids=self.ids, streams=self.streams, options=options)


def planned(variant: CompiledVariant, candidate: PlanCandidate, batch: int | None = None) -> Planned:
    """Translate a schedule of compiled kernels to the graph. Their job has costs; the batch is for the plan file.

    Raises:
        EngineError: The second checker found the plan wrong, which is a bug in msplit.
    """
    job = variant.job
    if job.costs is None:
        raise ValueError("a plan needs costs")
    plan, stored, node_ids = variant.bind(candidate)
    ids = fill_ids(job.flat, job.costs, node_ids)
    return Planned(
        kernels=job.options.mode,
        ids=ids,
        streams=plan.streams,
        waits=plan.waits,
        stored=stored,
        plan=flat_plan(job.flat, job.costs, ids, stored.kernels),
        made_for=made_for(job, batch, layout=variant.compiled.layout),
        node_ids=node_ids,
    )


def fill_ids(flat: FlatGraph, costs: Costs, ids: Ints) -> Ints:
    """Ids of all nodes from those of the kernels; nodes without a kernel, which have -1, follow their inputs or their consumers."""
    streams = max(int(ids.max(initial=0)) + 1, 1)
    context = RuleContext(flat, costs, streams)
    claimed = np.where(flat.host, -1, ids).astype(np.int32)
    filled = claim_ids(context, Assignment.empty(len(flat)), claimed, "measured", "tuned").filled(0)
    filled[flat.host] = 0
    return filled


def flat_plan(flat: FlatGraph, costs: Costs, ids: Ints, kernels: Sequence[tuple[int, int, int]]) -> Plan:
    """The plan of the flat graph's nodes in the order of their kernels (see `StoredPlan`), as far as control edges allow that.

    Nodes that cost nothing launch nothing.
    """
    key = np.full(len(flat), np.inf)
    for place, (node, _, _) in enumerate(kernels):
        key[node] = -place
    dag = Dag.from_graph(flat.graph)
    lanes = np.where((costs.time_us > 0) & ~flat.host, ids, -1).astype(np.int32)
    return make_plan(dag, lanes, topological(dag, key))


def made_for(job: Job, batch: int | None = None, *, layout: str = "none") -> dict[str, Any]:
    """Conditions that a plan of a job depends on beside the graph, as plain data."""
    known = environment()
    gpus = known["gpus"] or [{}]
    found = {
        "gpu": gpus[0].get("name") or (job.costs.gpu if job.costs is not None else ""),
        "driver": gpus[0].get("driver"),
        "torch": known["versions"].get("torch"),
        "msplit": known["msplit"],
        "batch": batch,
        "inputs": {name: [value.dtype.name, *value.shape] for name, value in sorted(job.feeds.items())},
        "precision": str(job.precision),
        "options": {
            **({"fuse": True} if job.options.mode.fuses else {}),
            **({"group": True} if job.options.mode.groups else {}),
            **({} if layout == "none" else {"layout": layout}),
            **({"float32": [job.flat.graph.names[node] for node in sorted(job.wide)]} if job.wide else {}),
        },
    }
    return {key: value for key, value in found.items() if value is not None}


def plan_data(flat: FlatGraph, found: Planned) -> dict[str, Any]:
    """A plan file with the order of its kernels as plain data: `msplit check --plan` proves it, `msplit bench --plan` runs it."""
    stored = found.stored
    shared = [(group.kind, group.nodes, group.stream) for group in stored.groups]
    return planfile.dump(found.plan, flat, kernels=stored.kernels, groups=shared, made_for=found.made_for)


def save_plan(flat: FlatGraph, found: Planned, path: Path, *, force: bool = False) -> None:
    """Writes the plan file.

    Raises:
        WriteError: It can not be written.
    """
    text = json.dumps(plan_data(flat, found), indent=1) + "\n"
    formats.write_bytes_atomic(path, text.encode(), force=force)


def stored_job(job: Job, plan: planfile.PlanFile) -> tuple[Job, list[str]]:
    """The job that runs a stored plan, made of the one that runs the model on one stream, and what does not fit.

    Raises:
        MsplitError: The plan is one of another graph.
    """
    flat = job.flat
    found, unknown = plan.on(flat)
    if unknown or not len(found.order):
        raise _of_another(f"it names {unknown[0]!r}, which the graph has not" if unknown else "it orders nothing", plan)
    notes = []
    if plan.graph_hash and flat.model.graph_def is not None and plan.graph_hash != formats.graph_hash(flat.model):
        notes.append("the plan was made for another version of this graph")
    ids = np.maximum(found.stream, 0).astype(np.int32)
    options = _options_of(dict(plan.made_for.get("options") or {}), job.options)
    if plan.kernels:
        index = flat.graph.index
        kernels = [(index.get(name, -1), number, lane) for name, number, lane in plan.kernels]
        if all(node >= 0 for node, _, _ in kernels):
            options = replace(options, plan=StoredPlan(tuple(kernels)))
            for node, _, lane in kernels:
                ids[node] = lane
    notes += _differences(plan.made_for, made_for(job))
    return replace(job, ids=ids, streams=plan.streams, options=options, wide=_wide(job, plan)), notes


def _wide(job: Job, plan: planfile.PlanFile) -> frozenset[int]:
    """The nodes that a plan in this precision keeps in float32.

    Raises:
        MsplitError: One is none of the graph's.
    """
    names = dict(plan.made_for.get("options") or {}).get("float32")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return frozenset()
    if plan.made_for.get("precision") != str(job.precision):
        return frozenset()
    index = job.flat.graph.index
    if unknown := [name for name in names if name not in index]:
        raise _of_another(f"it names {unknown[0]!r}, which the graph has not", plan)
    return frozenset(index[name] for name in names)


def _of_another(why: str, plan: planfile.PlanFile) -> MsplitError:
    return MsplitError(f"the plan is not one of this graph: {why}", where=plan.source, fix="tune the model again")


def _options_of(made_for: Mapping[str, Any], options: EngineOptions) -> EngineOptions:
    """Options with what a plan was made for in place of their own; what is none of msplit's values is not looked at."""
    told = {key: made_for[key] for key in ("fuse", "group") if isinstance(made_for.get(key), bool)}
    mode = KernelMode.of(fuses=told.get("fuse", options.mode.fuses), groups=told.get("group", options.mode.groups))
    layout = made_for.get("layout")
    return replace(options, mode=mode, layout=layout if layout in ("nhwc", "nchw") else options.layout)


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences between now and when the plan was made."""
    names = {"gpu": "GPU", "driver": "driver", "torch": "PyTorch", "precision": "precision", "inputs": "shapes"}
    differ = [names[key] for key in names if key in then and key in now and then[key] != now[key]]
    return [f"the plan was made with another {' and another '.join(differ)}: tune again for the best"] if differ else []


MADE_HERE = ("gpu", "driver", "torch")
"""Conditions that a plan does not depend on if no GPU had a part in it."""


@dataclass(frozen=True, eq=False)
class Chosen:
    """Kernels other than plain ones, on streams that an algorithm chose.

    Simulated times: of these, and of plain kernels on one stream and on their best streams.
    """

    planned: Planned
    algorithm: str
    predicted_us: float
    one_us: float
    streams_us: float

    @property
    def gain(self) -> float:
        """Over plain kernels on one stream, simulated."""
        return self.one_us / self.predicted_us


def why_not() -> str | None:
    """The reason why larger kernels can not be looked for here, or None."""
    if importlib.util.find_spec("torch") is None:
        return f"PyTorch, which tells what kernels a model becomes, is not installed: {INSTALL_PYTORCH}"
    return None


def job_of(flat: FlatGraph, costs: Costs, workload: Workload) -> Job:
    """The model on one stream with made-up inputs, on the GPU where there is one, otherwise on the CPU."""
    if workload.profile is not None and workload.batch is None:
        workload = replace(workload, shapes={**workload.profile.shapes, **workload.shapes})
    feeds = feeds_for(flat, workload)
    device = "cpu" if ENGINE.unavailable() else "cuda"
    return Job(flat, np.zeros(len(flat), np.int32), 1, feeds, costs=costs, options=EngineOptions(device))


class Chooser:
    """Chooses kernels and streams for the rule `auto`; see `rules.base.ChoosesKernels`. Afterwards it tells what it found.

    Args:
        job: Makes the model, its inputs, its costs, and the engine's options, once that is asked for.
        batch: For the plan.
        names: Kernel modes that may be tried, plain ones first.
        tell: Told what is being done, in place of whoever listens to `msplit.progress`.

    Attributes:
        tried: All that was tried; None before, and where nothing could be.
        chosen: The best; None where that is plain kernels.
    """

    def __init__(
        self,
        job: Callable[[], Job],
        *,
        batch: int | None = None,
        names: Sequence[str] = tuple(KernelMode),
        tell: Progress | None = None,
    ) -> None:
        self._job, self._batch, self._names, self._tell = job, batch, names, tell
        self.tried: SimulatedVariants | None = None
        self.chosen: Chosen | None = None

    def __call__(
        self,
        streams: int,
        *,
        tied: Ints,
        candidates: Sequence[str] | None = None,
        wait_us: float | None = None,
    ) -> KernelStreams | Remark:
        """Choose kernels, as `rules.base.ChoosesKernels` says."""
        self.tried = self.chosen = None
        if (missing := why_not()) is not None:
            return _not(missing)
        job = self._job()
        try:
            with progress.telling() as tell:
                tell = self._tell or tell
                compiled = ENGINE.variants(job, tied, self._names, tell=tell)
                found = compiled.simulate(streams, candidates=candidates, wait_us=wait_us, tell=tell)
        except EngineError as error:
            return _not(error.what)
        if found is None:
            return _not("nothing launches a kernel")
        self.tried = found
        if found.dynamic:
            return _not("shapes depend on values, so the model can not be captured")
        taken = found.favourite
        plain = found.plain
        if taken is plain:
            larger = [name for name in found.variants if name != PLAIN]
            better = (
                f"in the simulator neither {' nor '.join(larger)} ones gain" if larger else "larger ones are the same"
            )
            return Remark(Auto.key, "kernels", f"kernels stay plain: {better}")
        made = planned(taken.compiled, taken.candidate(), self._batch)
        if not job.options.on_gpu:
            made = _portable(made)
        self.chosen = Chosen(made, taken.best.name, taken.best.makespan_us, found.one_us, plain.best.makespan_us)
        ids = np.where(job.flat.host, -1, made.node_ids).astype(np.int32)
        return KernelStreams(ids, describe(taken, plain))


def describe(taken: SimulatedVariant, plain: SimulatedVariant) -> str:
    """A sentence about what is taken, beside plain kernels."""
    best, other = taken.best, plain.best
    where = f"on {best.streams} streams" if best.streams > 1 else "on one stream"
    text = f"{taken.name} kernels {where} ('{best.name}') are fastest in the simulator: {best.makespan_us:.0f} µs"
    beside = f", {other.makespan_us:.0f} on {other.streams}" if other.streams > 1 else ""
    return f"{text}; plain ones take {plain.one.makespan_us:.0f} on one stream{beside}"


def with_kernels(ruleset: RuleSet, kernels: str) -> RuleSet:
    """The rule set with this choice in its rule `auto`."""
    changed = tuple(replace(rule, kernels=kernels) if isinstance(rule, Auto) else rule for rule in ruleset.rules)
    return replace(ruleset, rules=changed)


def ends_with_auto(ruleset: RuleSet) -> bool:
    """True if the rule `auto` is the last that claims nodes by itself: what follows are constraints and what fills gaps."""
    deciding = [rule for rule in ruleset.rules if rule.key not in ("colocation", "propagate")]
    return bool(deciding) and isinstance(deciding[-1], Auto)


def _portable(made: Planned) -> Planned:
    """Without what only says how it was lowered: no GPU was there to choose a memory layout, say."""
    made_for = {key: value for key, value in made.made_for.items() if key not in MADE_HERE}
    options = {key: value for key, value in made_for.get("options", {}).items() if key != "layout"}
    return replace(made, made_for={**made_for, "options": options})


def _not(why: str) -> Remark:
    return Remark(Auto.key, NOT_CHOSEN, f"kernels stay plain: {why}")
