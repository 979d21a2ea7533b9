"""Plan files of the engine: written from schedules, read to run, and chosen together with kernels in the simulator.

From a schedule of the engine's steps to ids and a plan file, and back from such a file to something that runs.

Kernels and streams chosen together, in the simulator: for the rule `auto` with `kernels: best`, and for `bench`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from msplit import formats
from msplit.core.dag import Dag
from msplit.core.graph import Assignment, Ints
from msplit.cost.costs import Costs
from msplit.engines.base import Job
from msplit.engines.cuda.options import EngineOptions, KernelMode, StoredPlan
from msplit.engines.environment import environment
from msplit.errors import MsplitError
from msplit.flatten.flat import FlatGraph
from msplit.rules.auto import Auto, claim_ids
from msplit.rules.base import ChoosesKernels, RuleContext
from msplit.rules.ruleset import RuleSet
from msplit.schedule import planfile
from msplit.schedule.plan import Plan, make_plan, topological


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


def planned(
    job: Job, bound: tuple[Plan, StoredPlan, Ints], *, layout: str = "none", batch: int | None = None
) -> Planned:
    """Translates a schedule of compiled kernels to the graph.

    Args:
        job: What the kernels were made of. It has costs.
        bound: The plan of the kernels, the same in terms of the graph, and the stream of each node, -1 for one without a kernel.
        layout: Memory layout of convolutions, for the plan file.
        batch: Also for the plan file.
    """
    if job.costs is None:
        raise ValueError("a plan needs costs")
    plan, stored, node_ids = bound
    ids = fill_ids(job.flat, job.costs, node_ids)
    return Planned(
        kernels=job.options.mode,
        ids=ids,
        streams=plan.streams,
        waits=plan.waits,
        stored=stored,
        plan=flat_plan(job.flat, job.costs, ids, stored.kernels),
        made_for=made_for(job, batch, layout=layout),
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


class ChoosesPlan(ChoosesKernels, Protocol):
    """Chooses kernels for the rule `auto`, and keeps what came of it.

    Attributes:
        chosen: The best; None where that is plain kernels.
    """

    chosen: Chosen | None


def with_kernels(ruleset: RuleSet, kernels: str) -> RuleSet:
    """The rule set with this choice in its rule `auto`."""
    changed = tuple(replace(rule, kernels=kernels) if isinstance(rule, Auto) else rule for rule in ruleset.rules)
    return replace(ruleset, rules=changed)


def ends_with_auto(ruleset: RuleSet) -> bool:
    """True if the rule `auto` is the last that claims nodes by itself: what follows are constraints and what fills gaps."""
    deciding = [rule for rule in ruleset.rules if rule.key not in ("colocation", "propagate")]
    return bool(deciding) and isinstance(deciding[-1], Auto)
